"""Grammars over coarser states (Petrov & Klein 2007): what is left of a grammar when states are told apart less.

p(a_i -> b_j c_k) over coarse states is the fine rule summed over the states of b_j and of c_k, and its mean over those
of a_i, weighted by how often they are expected.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar, starts_of, within_padding


@dataclass(frozen=True, eq=False)
class Projection:
    grammar: Grammar
    words: Tensor  # [tag states, coarse tag states]: fine lexical parameters @ this are the coarse ones
    expected: Tensor  # [coarse states]: how often each is expected


def projected(grammar: Grammar, expected: Tensor, ancestor: Tensor) -> Projection:
    """The grammar whose states are those that `ancestor` [states] names, numbered within their symbols.

    `expected` [states] is how often each state is expected, see `expected_states`.
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

    def means(rules: Tensor, starts: Tensor, values: Tensor) -> Tensor:
        begin = starts_of(states[rules].prod(1))
        found = values.new_zeros(int(begin[-1]) + 1)
        for some, tensors in grammar.padded(rules, starts, values):
            for mode, symbols in enumerate(rules[some].unbind(1)):
                tensors = torch.einsum("rx...,rxk->r...k", tensors, member[min(mode, 1), symbols, : tensors.shape[1]])
            place = within_padding(begin[some], states[rules[some]], tensors.shape[1:], len(found) - 1)
            found[place] = tensors
        return found[:-1].clamp_min_(0)  # approximations may be below

    inner = len(grammar.symbols.interminals)
    tags, coarse_tags = int(grammar.first_state[inner]), int(first[inner])  # where the states of tags begin
    fold = expected.new_zeros(len(symbol), int(first[-1]))
    fold[torch.arange(len(symbol), device=device), coarse] = share
    one = replace(
        grammar,
        states=states,
        binary=means(grammar.binary_rules, grammar.binary_starts, grammar.binary),
        unary=means(grammar.unary_rules, grammar.unary_starts, grammar.unary),
        root=grammar.root.new_zeros(int(first[-1])).index_add(0, coarse, grammar.root),
        lexical=grammar.lexical.fold(share[tags:], coarse[tags:] - coarse_tags, int(first[-1]) - coarse_tags),
        hierarchy=grammar.hierarchy.new_zeros(0, int(first[-1])),
    )
    return Projection(one, fold[tags:, coarse_tags:], total)
