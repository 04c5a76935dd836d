"""Coarse to fine: forests -> smaller forests -> trees, by one fine grammar or by a product of several (Petrov 2010)."""

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.decode import Decoder, chosen_trees, trees_of
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.forest import Forest, Plan, Posteriors, log_partition, posteriors
from lvpcfg.chart.forest.prune import Coarse, FineRules, Nodes
from lvpcfg.chart.forest.viterbi import best_derivations
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.projection import nonnegative, projected
from lvpcfg.grammar.rules import starts_of
from lvpcfg.options import VITERBI

FEW = 2  # states of a symbol in the grammars between the coarsest and the fine one
SHARPER = 4  # times the threshold: grammars with some states are surer of themselves


class CoarseToFine:
    """Parses by fine grammars over the same symbols and rules, in the forests that coarser ones leave.

    Those are the coarse grammar, which comes with its cover, and, where the first grammar has a hierarchy, its
    projection to few states. Log-probabilities are those of the first grammar. `stages` is told how long it takes.
    """

    def __init__(
        self, grammars: Sequence[Grammar], coarse: CoarseGrammar, decoder: str, stages: Stages | None = None
    ) -> None:
        self.rules = [FineRules(grammar) for grammar in grammars]
        self.decoder = Decoder(decoder, grammars[0], self.rules[0], any(grammar.signed for grammar in grammars))
        self.stages = stages or Stages(grammars[0].root.device)
        self.ways: Counter[str] = Counter()  # how many sentences needed more than the given type of numbers
        grammar = nonnegative(grammars[0])
        self.middle = []  # the rules of a grammar with few states, if there is one, and the map to its words
        for ancestor in [level for level in grammar.hierarchy if 0 < int(level.max()) < FEW][-1:]:
            few = projected(grammar, expected_states(grammar), ancestor)
            self.middle.append((FineRules(few.grammar), few.words))
        assert coarse.cover is not None
        self.coarse = Coarse(coarse.grammar, coarse.cover, self.stages)

    def parse(
        self,
        words: Sequence[Float[Tensor, "words _"]],
        coarse_words: Float[Tensor, "words tags"],
        lengths: Int64[Tensor, "sentences"],
        threshold: float,
    ) -> tuple[list[Skeleton | None], Float64[Tensor, "sentences"]]:
        """The best tree of each sentence, None where none is left, and log Z of what is left.

        `words` are those of all sentences, end to end, for each grammar [words, tag states].
        """
        forest, kept = self.coarse.forest(coarse_words, lengths, threshold)
        with torch.inference_mode():
            return self._parse(words, lengths, forest, kept, threshold)

    def _parse(
        self, words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes, threshold: float
    ) -> tuple[list[Skeleton | None], Tensor]:
        first = starts_of(lengths)

        def fine(rules: FineRules, of_words: Tensor) -> Fine:
            leaves = forest.leaves
            word = first[kept.sentence[leaves]] + kept.start[leaves]
            return Fine(forest, rules, rules.leaf(of_words, word, kept.symbol[leaves]))

        for rules, fold in self.middle:
            with self.stages.stage("middle"):
                edges = fine(rules, words[0] @ fold).posteriors().edges
                forest, kept = pruned(forest, kept, edges > SHARPER * threshold)
        with self.stages.stage("plan"):
            grammars = [fine(rules, of_words) for rules, of_words in zip(self.rules, words, strict=True)]
        if self.decoder.name == VITERBI:
            with self.stages.stage("fine"):
                chosen, log_z = grammars[0].best_derivations()
            with self.stages.stage("decode"):
                return trees_of(forest, kept, chosen_trees(forest, chosen, log_z), lengths), log_z
        with self.stages.stage("fine"):
            known = [grammar.posteriors() for grammar in grammars]
            self.ways.update(known[0].ways)
        with self.stages.stage("decode"):
            return self.decoder.trees(forest, kept, known, lengths), known[0].log_z


class Fine:
    """A forest under one grammar."""

    def __init__(self, forest: Forest, rules: FineRules, leaf: Float[Tensor, "leaves states"]) -> None:
        self.forest, self.rules, self.leaf = forest, rules, leaf
        self.plan = Plan(forest, rules.sizes, rules.cp)

    def posteriors(self) -> Posteriors:
        return posteriors(self.plan, self.rules.values, self.leaf)

    def best_derivations(self) -> tuple[Int64[Tensor, "nodes_and_2"], Float64[Tensor, "sentences"]]:
        """Viterbi: the edge of each node in the best derivations, -1 elsewhere; and log Z."""
        arguments = (self.plan, self.rules.values, self.leaf)
        return best_derivations(*arguments), log_partition(*arguments)[0]


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
