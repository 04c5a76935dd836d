"""How signatures are checked in the tests: shapes and types by beartype, where an int is also a float (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

# Not lvpcfg.chart.semirings nor the rest of lvpcfg.chart.forest: their functions run for each tile of a forest or each
# sum of a chart, and checking them would double the time of the tests.
CHECKED = [
    "lvpcfg.grammar",
    "lvpcfg.decompose",
    "lvpcfg.distributions",
    "lvpcfg.nn",
    "lvpcfg.chart.textbook",
    "lvpcfg.chart.lanes",
    "lvpcfg.chart.derivations",
    "lvpcfg.chart.marks",
    "lvpcfg.chart.kbest",
    "lvpcfg.chart.fast",
    "lvpcfg.chart.forest.forest",
    "lvpcfg.chart.forest.packed",
    "lvpcfg.chart.forest.prune",
    "lvpcfg.chart.forest.layout",
    "lvpcfg.chart.forest.observed",
    "lvpcfg.chart.forest.viterbi",
    "lvpcfg.chart.decode",
]
