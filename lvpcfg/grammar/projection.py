"""Grammars over coarser states (Petrov & Klein 2007): what is left of a grammar when states are told apart less.

p(a_i -> b_j c_k) over coarse states is the fine rule summed over the states of b_j and of c_k, and its mean over those
of a_i, weighted by how often they are expected.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rules import starts_of, transformed


@dataclass(frozen=True, eq=False)
class Projection:
    grammar: Grammar
    words: Float[Tensor, "tag_states coarse_tag_states"]  # fine lexical parameters @ this are the coarse ones
    expected: Float[Tensor, "coarse_states"]  # how often each occurs in a tree


def projected(grammar: Grammar, expected: Float[Tensor, "states"], ancestor: Int64[Tensor, "states"]) -> Projection:
    """The grammar over coarser states: `ancestor` is the coarse state of each state, numbered within its symbol.

    `expected` is how often each state occurs in a tree, see `expected_states`.
    """
    symbol, device = grammar.symbol_of_state, grammar.root.device
    states = torch.ones_like(grammar.states).scatter_reduce(0, symbol, ancestor + 1, "amax")
    first, coarse = starts_of(states), starts_of(states)[symbol] + ancestor
    total = expected.new_zeros(int(first[-1])).index_add(0, coarse, expected)
    alike = 1 / torch.bincount(coarse, minlength=len(total)).to(expected.dtype)
    share = torch.where(total[coarse] > 0, expected / total[coarse].clamp_min(1e-300), alike[coarse])

    within = torch.arange(len(symbol), device=device) - grammar.first_state[symbol]
    member = expected.new_zeros(2, len(states), int(grammar.states.max()), int(states.max()))
    member[:, symbol, within, ancestor] = torch.stack([share, torch.ones_like(share)])  # of parents, of children

    inner = len(grammar.symbols.interminals)
    tags, coarse_tags = int(grammar.first_state[inner]), int(first[inner])  # where the states of tags begin
    fold = expected.new_zeros(len(symbol), int(first[-1]))
    fold[torch.arange(len(symbol), device=device), coarse] = share
    coarse_grammar = replace(
        grammar,
        binary=grammar.binary.listed().projected(tuple(states.tolist()), ancestor, share),
        unary=transformed(grammar.states, states, grammar.unary_rules, grammar.unary, member.unbind()),
        root=grammar.root.new_zeros(int(first[-1])).index_add(0, coarse, grammar.root),
        lexical=grammar.lexical.fold(share[tags:], coarse[tags:] - coarse_tags, int(first[-1]) - coarse_tags),
        hierarchy=grammar.hierarchy.new_zeros(0, int(first[-1])),
    )
    return Projection(coarse_grammar, fold[tags:, coarse_tags:], total)


def nonnegative(grammar: Grammar) -> Grammar:
    """A grammar to prune by: its rules as tensors, with 0 in place of negative numbers."""
    binary = grammar.binary.listed()
    return replace(grammar, binary=replace(binary, values=binary.values.clamp_min(0)), unary=grammar.unary.clamp_min(0))
