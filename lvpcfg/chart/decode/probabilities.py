"""log p(tree, sentence) of skeletal trees under a grammar, summed over states and over unary chains."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lvpcfg.chart.decode.whole import WholeCharts
from lvpcfg.chart.derivations import Skeletal, Skeleton, only
from lvpcfg.chart.fast.partition import log_partition
from lvpcfg.chart.forest.observed import ObservedTrees, RuleNumbers
from lvpcfg.chart.forest.prune import FineRules


class TreeProbabilities:
    """Of the grammar of whole charts: a CP form gives weight to rules that are not listed too."""

    def __init__(self, whole: WholeCharts) -> None:
        self.whole, self.grammar = whole, whole.grammar

    @cached_property
    def _rules(self) -> FineRules:
        return FineRules(self.grammar)

    @cached_property
    def _numbers(self) -> RuleNumbers:
        return RuleNumbers(self._rules)

    @cached_property
    def _symbol_of_state(self) -> list[int]:
        return self.grammar.symbol_of_state.tolist()

    def log_probs(
        self, trees: Sequence[Skeleton], words: Sequence[Float[Tensor, "_ tag_states"]]
    ) -> Float64[Tensor, "trees"]:
        """Of trees, each with what its words are worth; -inf for what is no tree of the grammar."""
        found = torch.full((len(trees),), -torch.inf, dtype=torch.float64, device=self.grammar.root.device)
        skeletal = [Skeletal(tuple(tree)) for tree in trees]
        observed = ObservedTrees.of(skeletal, self._rules, self._numbers)
        if observed is not None:
            leaf = torch.nn.utils.rnn.pad_sequence([*words])
            found.index_copy_(0, observed.sentences, observed.log_weights(self._rules, leaf))
        listed = set() if observed is None else set(observed.sentences.tolist())
        others = [number for number in range(len(trees)) if number not in listed]
        if others:
            leaf = torch.nn.utils.rnn.pad_sequence([words[number] for number in others])
            lengths = torch.tensor([len(words[number]) for number in others], device=leaf.device)
            some = None if bool((lengths == len(leaf)).all()) else lengths
            allowed = only([skeletal[number] for number in others], self._symbol_of_state, leaf)
            found[others] = log_partition(self.whole.form, leaf, some, allowed)[0]
        return found
