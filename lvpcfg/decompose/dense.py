"""A whole grammar as one tensor over (symbol, state) pairs, [interminal states, states, states]."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar


def rule_tensor(grammar: Grammar) -> Tensor:
    """t(a -> b c, h2, h3 | h1, a) of all binary rules: sparse, coalesced, with no zeros in it."""
    binary = grammar.binary.written_out()
    place = binary.values.detach().nonzero().squeeze(1)
    rule = torch.searchsorted(binary.starts, place, right=True) - 1
    within = place - binary.starts[rule]
    a, b, c = binary.rules[rule].unbind(1)
    left, right = grammar.states[b], grammar.states[c]
    number = torch.stack([within // (left * right), within // right % left, within % right])
    inner, states = int(grammar.first_state[len(grammar.symbols.interminals)]), len(grammar.root)
    return torch.sparse_coo_tensor(
        grammar.first_state[torch.stack([a, b, c])] + number,
        binary.values.detach()[place],
        (inner, states, states),
        check_invariants=True,
    ).coalesce()


def _masses(factors: Factors) -> Tensor:
    """[parents]: the sum of each slice T^[a]."""
    u, v, w = (factor.double() for factor in (factors.u, factors.v, factors.w))
    return (v.sum(1) * w.sum(1)) @ u


def fitted(tensor: Tensor, factors: Factors) -> Tensor:
    """[nonzeros]: T^ where the sparse T has entries."""
    parts = zip(*(index.split(4096) for index in tensor.indices()), strict=True)
    return torch.cat([(factors.u[:, i] * factors.v[:, j] * factors.w[:, k]).sum(0) for i, j, k in parts])


def divergence(grammar: Grammar, factors: Factors) -> float:
    """KL of the grammar's trees from those with `factors` for the binary rules, in nats a tree; inf where T^ <= 0 < T.

    sum over rules of E(a) (t log(t / t^) - t + t^), E(a) being how often a is expected in a tree: where both are
    normalised the last two cancel.
    """
    tensor, factors = rule_tensor(grammar), factors.map(torch.Tensor.double)
    expected, t = expected_states(grammar).double()[: tensor.shape[0]], tensor.values().double()
    approximate = fitted(tensor, factors)
    if bool((approximate <= 0).any()):
        return float("inf")
    gains = expected[tensor.indices()[0]] * (t * (t / approximate).log() - t)
    return max(0.0, float(gains.sum() + expected @ _masses(factors)))  # nothing is lost but by rounding


@dataclass(frozen=True, eq=False)
class Difference:
    """T^ beside T, by the kinds of children: [4], 2 * (left child is a word) + (right child is a word)."""

    norm: Tensor  # ||T||_F
    error: Tensor  # ||T - T^||_F
    mass: Tensor  # the sum of |T^|
    negative: Tensor  # of it, in entries below zero
    added: Tensor  # of it, where T is zero


def difference(tensor: Tensor, factors: Factors) -> Difference:
    """T is sparse, [interminal states, states, states]; T^ and T - T^ are written out one parent at a time, in float64.

    ||T||^2 - 2 <T, T^> + ||T^||^2 would take less time, and lose every error below 1e-8 ||T||.
    """
    inner = len(tensor)
    total = torch.zeros(5, 4, dtype=torch.float64, device=tensor.device)
    for exact, approximate in _slices(tensor, factors):
        sizes = approximate.abs()
        parts = (
            exact.square(),
            (exact - approximate).square(),
            sizes,
            torch.where(approximate < 0, sizes, 0),
            torch.where(exact == 0, sizes, 0),
        )
        total += torch.stack([torch.stack([_corner(part, inner, kind) for kind in range(4)]) for part in parts])
    return Difference(*total[:2].sqrt(), *total[2:])


def block_errors(tensor: Tensor, factors: Factors, symbol_of_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rules [blocks, 3], gamma and norm [blocks] of `factors`, as `chart_certificate` needs them.

    T^ of a whole grammar has entries where there is no rule, and these have errors as others do: there is a block for
    every a, b, c with numbers in T or in T^, gamma is ||T - T^||_F and norm ||T^||_F of it.
    """
    is_of = torch.nn.functional.one_hot(symbol_of_state).double()  # [states, symbols]
    symbols = is_of.shape[1]
    squares = is_of.new_zeros(2, symbols, symbols, symbols)
    for a, (exact, approximate) in zip(symbol_of_state.tolist(), _slices(tensor, factors), strict=False):
        residual = is_of.T @ (exact - approximate).square() @ is_of
        squares[:, a] += torch.stack([residual, is_of.T @ approximate.square() @ is_of])
    rules = squares.sum(0).nonzero()
    gamma, norm = squares[:, rules[:, 0], rules[:, 1], rules[:, 2]].sqrt()
    return rules, gamma, norm


def _slices(tensor: Tensor, factors: Factors) -> Iterator[tuple[Tensor, Tensor]]:
    """T[a] and T^[a], [states, states], of one parent state after the other, in float64; T is sparse."""
    inner, states = tensor.shape[:2]
    (parent, *places), values = tensor.indices(), tensor.values().double()
    begin = torch.searchsorted(parent, torch.arange(inner + 1, device=parent.device)).tolist()
    u, v, w = (factor.double() for factor in (factors.u, factors.v, factors.w))
    for a in range(inner):
        terms, own = u[:, a].nonzero().squeeze(1), slice(begin[a], begin[a + 1])
        exact = values.new_zeros(states, states)
        exact[places[0][own], places[1][own]] = values[own]
        yield exact, (u[terms, a].unsqueeze(1) * v[terms]).T @ w[terms]


def _corner(matrix: Tensor, inner: int, kind: int) -> Tensor:
    left, right = (slice(inner, None) if word else slice(inner) for word in (kind // 2, kind % 2))
    return matrix[left, right].sum()
