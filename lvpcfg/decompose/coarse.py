"""Coarse grammars with their covers: what the coarse pass of parsing runs on."""

from dataclasses import replace

from lvpcfg.decompose.child_types import cover_by_child_types
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.grammar.coarse import CoarseGrammar, is_large, projected_coarse
from lvpcfg.grammar.model import Model


def covered(coarse: CoarseGrammar) -> CoarseGrammar:
    """The coarse grammar with its cover."""
    if coarse.cover is not None:
        return coarse
    cover = cover_by_child_types(rule_tensor(coarse.grammar))
    if not cover.rank:  # a grammar without binary rules gets a term that is zero
        cover = cover.map(lambda factor: factor.new_zeros(1, factor.shape[1]))
    return replace(coarse, cover=cover)


def with_coarse(model: Model) -> Model:
    """The model with what pruning needs: a coarse grammar, projected from its own where it has none, and its cover."""
    coarse = model.coarse
    if coarse is None and is_large(model.grammar):
        coarse = projected_coarse(model.grammar)
    return model if coarse is None or coarse.cover is not None else replace(model, coarse=covered(coarse))
