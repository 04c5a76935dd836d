"""The coarse grammar of a model: one state for each symbol, nothing below zero. Charts are pruned by it.

An estimator makes it of the rule counts of its treebank, whatever its own parameters are. For a grammar that comes
without counts, it is the projection by how often states are expected.
"""

from dataclasses import dataclass

import torch

from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.projection import nonnegative, projected

MANY = 128  # interminals: with unary rules between all of them, full charts are slow to decode


@dataclass(frozen=True, eq=False)
class CoarseGrammar:
    grammar: Grammar  # over the symbols, rules and words of the model
    # An exact CP form [interminals, symbols, symbols] of its binary rules, with each rule in one term. It takes a while
    # to find, and is None until it is needed.
    cover: Factors | None = None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CoarseGrammar":
        cover = None if self.cover is None else self.cover.map(lambda factor: factor.to(device=device, dtype=dtype))
        return CoarseGrammar(self.grammar.to(device, dtype), cover)


def is_large(grammar: Grammar) -> bool:
    """Whether pruning saves time in its charts."""
    return bool((grammar.states > 1).any()) or len(grammar.symbols.interminals) > MANY


def projected_coarse(grammar: Grammar) -> CoarseGrammar:
    """The projection of a grammar to one state for each symbol, by how often its states occur in a tree."""
    grammar = nonnegative(grammar)
    return CoarseGrammar(
        projected(grammar, expected_states(grammar), torch.zeros_like(grammar.symbol_of_state)).grammar
    )
