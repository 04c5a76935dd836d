"""Which trees of a sentence are looked at (Petrov & Klein 2007): what coarser grammars leave of its chart, as a forest.

The coarse grammar, with one state for each symbol, comes first (`prune.py`). Where the fine grammar came about by
splitting states, its projection to few states prunes once more.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.forest import Forest, Plan, posteriors
from lvpcfg.chart.forest.prune import Coarse, FineRules, Nodes
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.projection import nonnegative, projected
from lvpcfg.grammar.rules import starts_of

FEW = 2  # states of a symbol in the grammars between the coarsest and the fine one
SHARPER = 4  # times the threshold: grammars with some states are surer of themselves


class Pruning:
    """Prunes charts of a fine grammar by its coarse grammar, which comes with its cover, and by a projection of it.

    `stages` is told how long it takes.
    """

    def __init__(self, grammar: Grammar, coarse: CoarseGrammar, stages: Stages) -> None:
        self.stages = stages
        grammar = nonnegative(grammar)
        self.middle = []  # the rules of a grammar with few states, if there is one, and the map to its words
        for ancestor in [level for level in grammar.hierarchy if 0 < int(level.max()) < FEW][-1:]:
            few = projected(grammar, expected_states(grammar), ancestor)
            self.middle.append((FineRules(few.grammar), few.words))
        assert coarse.cover is not None
        self.coarse = Coarse(coarse.grammar, coarse.cover, stages)

    def forest(
        self,
        words: Float[Tensor, "words tag_states"],
        coarse_words: Float[Tensor, "words tags"],
        lengths: Int64[Tensor, "sentences"],
        threshold: float,
    ) -> tuple[Forest, Nodes]:
        """What is left of the charts of some sentences; `words` are those of all of them, end to end."""
        forest, nodes = self.coarse.forest(coarse_words, lengths, threshold)
        with torch.inference_mode():
            for rules, fold in self.middle:
                with self.stages.stage("middle"):
                    plan = Plan(forest, rules.sizes, rules.cp, rules.most)
                    leaf = rules.leaf(words @ fold, words_of(forest, nodes, lengths), take(nodes.symbol, forest.leaves))
                    edges = posteriors(plan, rules.values, leaf).edges
                    forest, nodes = pruned(forest, nodes, edges > SHARPER * threshold)
        return forest, nodes


def words_of(forest: Forest, nodes: Nodes, lengths: Int64[Tensor, "sentences"]) -> Int64[Tensor, "leaves"]:
    """The word of each leaf, among those of all sentences end to end."""
    sentence = take(nodes.sentence, forest.leaves)
    return take(starts_of(lengths), sentence) + take(nodes.start, forest.leaves)


def pruned(forest: Forest, nodes: Nodes, keep: Bool[Tensor, "edges"]) -> tuple[Forest, Nodes]:
    """What is left of a forest when it keeps some of its edges: nodes that none of them touches go too."""
    used = torch.zeros(forest.nodes + 2, dtype=torch.bool, device=keep.device)
    used[len(nodes.symbol) :] = True  # those on top
    edges = true_indices(keep)
    for ends in (forest.parent, forest.left, forest.right):
        used.index_fill_(0, take(ends, edges), True)
    part = forest.restricted(edges, used[: forest.nodes], forest.tops)
    kept = part.nodes[: len(part.nodes) - len(forest.tops)]
    return part.forest, Nodes(*(take(column, kept) for column in vars(nodes).values()))
