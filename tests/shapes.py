"""How signatures are checked in the tests: shapes and types by beartype, where an int is also a float (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

# Not checked: lvpcfg.chart.semirings, and of lvpcfg.chart.forest plan, tiles, logarithms and arrays, which run for
# each sum of a chart or tile of a forest, so that the tests would take much longer; and lvpcfg.distributions
# and lvpcfg.generation, which answer wrong input with sentences that the tests read.
CHECKED = [
    "lvpcfg.grammar",
    "lvpcfg.decompose",
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
    "lvpcfg.chart.forest.pruning",
    "lvpcfg.chart.forest.candidates",
    "lvpcfg.chart.forest.viterbi",
    "lvpcfg.chart.decode",
    "lvpcfg.sequence",
]
