"""Coarse to fine: forests -> trees, by one fine grammar or by a product of several (Petrov 2010)."""

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.decode import Decoder, chosen_trees, trees_of
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.forest import Forest, Plan, Posteriors, log_partition, posteriors
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.chart.forest.pruning import Pruning, words_of
from lvpcfg.chart.forest.viterbi import best_derivations
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import VITERBI


class CoarseToFine:
    """Parses by fine grammars over the same symbols and rules, in the forests that pruning by the first leaves.

    Log-probabilities are those of the first grammar. `stages` is told how long it takes.
    """

    def __init__(
        self, grammars: Sequence[Grammar], coarse: CoarseGrammar, decoder: str, stages: Stages | None = None
    ) -> None:
        self.rules = [FineRules(grammar) for grammar in grammars]
        self.decoder = Decoder(decoder, grammars[0], self.rules[0], any(grammar.signed for grammar in grammars))
        self.stages = stages or Stages(grammars[0].root.device)
        self.ways: Counter[str] = Counter()  # how many sentences needed more than the given type of numbers
        self.pruning = Pruning(grammars[0], coarse, self.stages)

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
        forest, kept = self.pruning.forest(words[0], coarse_words, lengths, threshold)
        with torch.inference_mode():
            return self._parse(words, lengths, forest, kept)

    def _parse(
        self, words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes
    ) -> tuple[list[Skeleton | None], Tensor]:
        word, symbol = words_of(forest, kept, lengths), take(kept.symbol, forest.leaves)
        with self.stages.stage("plan"):
            grammars = [
                Fine(forest, rules, rules.leaf(some, word, symbol))
                for rules, some in zip(self.rules, words, strict=True)
            ]
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
