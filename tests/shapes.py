"""How signatures are checked in the tests: shapes and types by beartype, where an int is also a float (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

# Not checked is what runs for each sum of a chart, tile of a forest or node of a tree, so that the tests would take
# twice as long: lvpcfg.chart.semirings and derivations, of lvpcfg.chart.forest plan, tiles, logarithms and arrays, and
# of lvpcfg.chart.fast inside, outside, blocks, cp and potentials. Nor are lvpcfg.distributions and lvpcfg.generation,
# which answer wrong input with sentences that the tests read.
CHECKED = [
    "lvpcfg.grammar",
    "lvpcfg.decompose",
    "lvpcfg.nn",
    "lvpcfg.chart.textbook",
    "lvpcfg.chart.lanes",
    "lvpcfg.chart.marks",
    "lvpcfg.chart.kbest",
    "lvpcfg.chart.fast.as_textbook",
    "lvpcfg.chart.fast.build",
    "lvpcfg.chart.fast.forms",
    "lvpcfg.chart.fast.logarithms",
    "lvpcfg.chart.fast.marginals",
    "lvpcfg.chart.fast.partition",
    "lvpcfg.chart.fast.sample",
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
