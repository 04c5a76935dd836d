"""Coarse to fine: forests -> trees, by one fine grammar or by a product of several (Petrov 2010)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.alternatives import ByDerivation, ForestOnHost
from lvpcfg.chart.decode.decode import Decoder, as_lists, chosen_trees, trees_of
from lvpcfg.chart.decode.decoded import BEST, Decoded, Wanted
from lvpcfg.chart.decode.spans import cells_of, cells_of_nodes, steps_of_forest
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.forest import Forest, Plan, Posteriors, log_partition, posteriors
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.chart.forest.pruning import Pruning, words_of
from lvpcfg.chart.forest.viterbi import best_derivations, best_scores
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
        wanted: Wanted = BEST,
    ) -> Decoded:
        """The best trees of each sentence, and log Z of what is left.

        `words` are those of all sentences, end to end, for each grammar [words, tag states]. Posteriors of spans are
        means over the grammars.
        """
        forest, kept = self.pruning.forest(words[0], coarse_words, lengths, threshold)
        with torch.inference_mode():
            decoded = self._parse(words, lengths, forest, kept, wanted)
        return replace(decoded, forest=(forest, kept)) if wanted.forest else decoded

    def _parse(self, words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes, wanted: Wanted) -> Decoded:
        word, symbol = words_of(forest, kept, lengths), take(kept.symbol, forest.leaves)
        with self.stages.stage("plan"):
            grammars = [
                Fine(forest, rules, rules.leaf(some, word, symbol))
                for rules, some in zip(self.rules, words, strict=True)
            ]
        viterbi, known = self.decoder.name == VITERBI, list[Posteriors]()
        if not viterbi or wanted.spans:
            with self.stages.stage("fine"):
                known = [grammar.posteriors() for grammar in grammars]
            self.ways.update(known[0].ways)
        if viterbi:
            trees, log_z = self._derivations(grammars[0], kept, lengths, wanted.trees)
        else:
            log_z = known[0].log_z
            with self.stages.stage("decode"):
                trees = self.decoder.trees(forest, kept, known, lengths, wanted.trees)
        if not wanted.spans:
            return Decoded(trees, log_z)
        edges = torch.stack([some.edges for some in known]).mean(0)
        is_step = take(self.decoder.is_step, forest.rule)
        cells = cells_of_nodes(kept) if wanted.everywhere else cells_of(trees)
        return Decoded(trees, log_z, steps_of_forest(forest, kept, edges, is_step, cells))

    def _derivations(
        self, grammar: "Fine", kept: Nodes, lengths: Tensor, k: int
    ) -> tuple[list[list[Skeleton]], Tensor]:
        """Viterbi."""
        forest = grammar.forest
        with self.stages.stage("fine"):
            chosen, log_z = grammar.best_derivations()
            alpha = grammar.best_scores() if k > 1 else None
        with self.stages.stage("decode"):
            found = trees_of(forest, kept, chosen_trees(forest, chosen, log_z), lengths)
            if alpha is None:
                return as_lists(found), log_z
            trees = ByDerivation(ForestOnHost(forest, kept), grammar.plan, grammar.rules.values, alpha)
            return self.decoder.k_best(trees, forest.tops, found, k), log_z


class Fine:
    """A forest under one grammar."""

    def __init__(self, forest: Forest, rules: FineRules, leaf: Float[Tensor, "leaves states"]) -> None:
        self.forest, self.rules, self.leaf = forest, rules, leaf
        self.plan = Plan(forest, rules.sizes, rules.cp, rules.most)

    def posteriors(self) -> Posteriors:
        return posteriors(self.plan, self.rules.values, self.leaf)

    def best_derivations(self) -> tuple[Int64[Tensor, "nodes_and_2"], Float64[Tensor, "sentences"]]:
        """Viterbi: the edge of each node in the best derivations, -1 elsewhere; and log Z."""
        return best_derivations(self.plan, self.rules.values, self.leaf), self.log_z()

    def log_z(self) -> Float64[Tensor, "sentences"]:
        return log_partition(self.plan, self.rules.values, self.leaf)[0]

    def best_scores(self) -> Float64[Tensor, "nodes_and_2 states"]:
        """The logarithm of the best derivation below each state of each node."""
        return best_scores(self.plan, self.rules.values, self.leaf)
