"""Grammars over coarser states (Petrov & Klein 2007): what is left of a grammar when states are told apart less.

p(a_i -> b_j c_k) over coarse states is the fine rule summed over the states of b_j and of c_k, and its mean over those
of a_i, weighted by how often they are expected.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar, starts_of


def projected(grammar: Grammar, expected: Tensor, ancestor: Tensor) -> tuple[Grammar, Tensor]:
    """The grammar whose states are those that `ancestor` [states] names, numbered within their symbols.

    `expected` [states] is how often each state is expected, see `expected_states`.

    Its lexical table stays that of the fine grammar; the matrix, [tag states, coarse tag states], turns the rows of
    words into those of the coarse grammar.
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
        found = values.new_zeros(int(begin[-1]))
        for some, tensors in grammar.padded(rules, starts, values):
            for mode, symbols in enumerate(rules[some].unbind(1)):
                tensors = torch.einsum("rx...,rxk->r...k", tensors, member[min(mode, 1), symbols, : tensors.shape[1]])
            place, inside = begin[some].view(-1, *[1] * rules.shape[1]), torch.ones((), dtype=torch.bool, device=device)
            offset = torch.zeros_like(place)
            for mode, size in enumerate(states[rules[some]].unbind(1)):
                number = torch.arange(tensors.shape[mode + 1], device=device).view(
                    -1, *[1] * (rules.shape[1] - mode - 1)
                )
                size = size.view(place.shape)
                offset, inside = offset * size + number, inside & (number < size)
            found[(place + offset)[inside]] = tensors[inside]
        return found.clamp_min_(0)  # approximations may be below

    inner = len(grammar.symbols.interminals)
    fold = expected.new_zeros(len(symbol), int(first[-1]))
    fold[torch.arange(len(symbol), device=device), coarse] = share
    one = replace(
        grammar,
        states=states,
        binary=means(grammar.binary_rules, grammar.binary_starts, grammar.binary),
        unary=means(grammar.unary_rules, grammar.unary_starts, grammar.unary),
        root=grammar.root.new_zeros(int(first[-1])).index_add(0, coarse, grammar.root),
        hierarchy=grammar.hierarchy.new_zeros(0, int(first[-1])),
    )
    return one, fold[int(grammar.first_state[inner]) :, int(first[inner]) :]
