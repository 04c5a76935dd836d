"""How wrong a compressed grammar can be, for a sentence: intervals for what the exact grammar says of it.

They are computed from the compressed grammar and its envelope alone: over the forest in which the sentence was parsed,
or over its whole chart, from two grammars of tensors between which the exact one is.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.loss import whole_charts
from lvpcfg.chart.derivations import Skeletal, Skeleton
from lvpcfg.chart.fast.build import form
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.brackets import ROUNDING, BracketRules, Brackets
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.observed import ObservedTrees, RuleNumbers
from lvpcfg.chart.forest.prune import Nodes
from lvpcfg.chart.forest.pruning import words_of
from lvpcfg.grammar.envelope import Bracketed
from lvpcfg.grammar.rule_cp import RuleCP

Bounds = tuple[Float64[Tensor, "some"], Float64[Tensor, "some"]]  # from below and from above


class Certifier:
    """For sentences whose words are worth `words` [words, tag states] in float64, all of them end to end."""

    def __init__(self, known: Bracketed) -> None:
        self.known, self.rules = known, BracketRules(known)

    def brackets(
        self,
        words: Float64[Tensor, "words tag_states"],
        lengths: Int64[Tensor, "sentences"],
        forest: Forest,
        nodes: Nodes,
    ) -> Brackets:
        """Of a forest over all sentences."""
        word, symbol = words_of(forest, nodes, lengths), take(nodes.symbol, forest.leaves)
        return Brackets(self.rules, forest, self.rules.fine.leaf(words, word, symbol), lengths)

    def of_trees(
        self,
        trees: Sequence[Skeleton],
        words: Float64[Tensor, "words tag_states"],
        lengths: Int64[Tensor, "trees"],
    ) -> Bounds:
        """Of log p of a tree of each sentence; -inf for what is no tree of the grammar."""
        low, high = (torch.full((len(trees),), -torch.inf, dtype=torch.float64, device=words.device) for _ in "lh")
        observed = ObservedTrees.of([Skeletal(tuple(tree)) for tree in trees], self.rules.fine, self._numbers)
        if observed is not None:
            word = words_of(observed.forest, observed.nodes, lengths)
            symbol = take(observed.nodes.symbol, observed.forest.leaves)
            leaf = self.rules.fine.leaf(words, word, symbol)
            bounds = Brackets(self.rules, observed.forest, leaf, take(lengths, observed.sentences)).log_z
            for into, bound in zip((low, high), bounds, strict=True):
                into.index_copy_(0, observed.sentences, bound)
        return low, high

    def of_charts(self, words: Float64[Tensor, "words tag_states"], lengths: Int64[Tensor, "sentences"]) -> Bounds:
        """Of log Z of whole charts."""
        most = int(torch.bincount(self.known.centre.binary_rules[:, 0], minlength=1).amax())
        operations = lengths * most * max(self.known.centre.binary.state_counts) ** 2 + 64
        margin = ROUNDING * operations * 4 * lengths
        low, high = (whole_charts(one, words, lengths) for one in self._forms)
        return low - margin, high + margin

    @cached_property
    def _numbers(self) -> RuleNumbers:
        return RuleNumbers(self.rules.fine)

    @cached_property
    def _forms(self) -> tuple[FastForm, FastForm]:
        """Of the grammars below and above."""
        centre, terms = self.known.centre, self.known.terms
        rules = centre.binary.written_out()
        around = torch.zeros_like(rules.values)
        if terms is not None and isinstance(centre.binary, RuleCP):
            none = torch.zeros_like(centre.binary.values)
            around = replace(centre.binary, values=none, u=terms.u, v=terms.v, w=terms.w).written_out().values
        low, high = (
            form(replace(centre, binary=rules.with_tensors({"values": values.clamp_min(0)})), fixed=True)
            for values in (rules.values - around, rules.values + around)
        )
        return low, high
