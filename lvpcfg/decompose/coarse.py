"""What the coarse pass of parsing runs on: the exact cover of a grammar without its states."""

from dataclasses import replace

import torch

from lvpcfg.decompose.kinds import cover_by_kind
from lvpcfg.decompose.whole import rule_tensor
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.kruskal import Factors
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.projection import nonnegative, projected

MANY = 128  # phrase symbols: unary rules between all of them make whole charts slow to decode


def is_large(grammar: Grammar) -> bool:
    """Whether its charts are worth pruning."""
    return bool((grammar.states > 1).any()) or len(grammar.symbols.interminals) > MANY


def with_cover(model: Model) -> Model:
    """The model with what pruning needs; it is saved with it."""
    if model.cover is not None or not is_large(model.grammar):
        return model
    return replace(model, cover=coarse_cover(model.grammar))


def coarse_cover(grammar: Grammar) -> Factors:
    grammar = nonnegative(grammar)
    coarsest = projected(grammar, expected_states(grammar), torch.zeros_like(grammar.symbol_of_state))
    cover = cover_by_kind(rule_tensor(coarsest.grammar))
    # A grammar without binary rules gets a term that is zero.
    return cover if cover.rank else cover.map(lambda factor: factor.new_zeros(1, factor.shape[1]))
