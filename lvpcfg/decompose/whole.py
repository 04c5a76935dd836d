"""A whole grammar as one tensor over (symbol, state) pairs, [interminal states, states, states]."""

import torch
from torch import Tensor

from lvpcfg.grammar.expectations import rewrites
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.kruskal import Factors


def rule_tensor(grammar: Grammar) -> Tensor:
    """t(a -> b c, h2, h3 | h1, a) of all binary rules: sparse, coalesced, with no zeros in it."""
    place = grammar.binary.detach().nonzero().squeeze(1)
    rule = torch.searchsorted(grammar.binary_starts, place, right=True) - 1
    within = place - grammar.binary_starts[rule]
    a, b, c = grammar.binary_rules[rule].unbind(1)
    left, right = grammar.states[b], grammar.states[c]
    number = torch.stack([within // (left * right), within // right % left, within % right])
    inner, states = int(grammar.first_state[len(grammar.symbols.interminals)]), len(grammar.root)
    return torch.sparse_coo_tensor(
        grammar.first_state[torch.stack([a, b, c])] + number,
        grammar.binary.detach()[place],
        (inner, states, states),
        check_invariants=True,
    ).coalesce()


def spectral_radius(factors: Factors, grammar: Grammar) -> float:
    """Of M_ab, the expected number of b's per rewrite of a, with `factors` for the binary rules: below 1 is tight.

    Where unary rules are whole chains, a rewrite is a binary rule and then at most one chain above each child.
    """
    inner = factors.u.shape[-1]
    u, v, w = (factor.double() for factor in (factors.u, factors.v, factors.w))
    binary = (u.T @ (v * w.sum(1, keepdim=True) + w * v.sum(1, keepdim=True)))[:, :inner]
    unary = rewrites(grammar)[1][:, :inner]
    m = binary + binary @ unary if grammar.closed else binary + unary
    return float(torch.linalg.eigvals(m).abs().max())
