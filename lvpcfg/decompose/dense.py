"""All binary rules of a grammar as one tensor over (symbol, state) pairs, and how far a CP form is from it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar


def rule_tensor(grammar: Grammar) -> Float[Tensor, "interminal_states states states"]:
    """t(a -> b c, h2, h3 | h1, a) of all binary rules: sparse, coalesced, with no zeros in it."""
    binary = grammar.binary.written_out()
    position = binary.values.detach().nonzero().squeeze(1)
    rule = torch.searchsorted(binary.starts, position, right=True) - 1
    within = position - binary.starts[rule]
    a, b, c = binary.rules[rule].unbind(1)
    left, right = grammar.states[b], grammar.states[c]
    number = torch.stack([within // (left * right), within // right % left, within % right])
    inner, states = int(grammar.first_state[len(grammar.symbols.interminals)]), len(grammar.root)
    return torch.sparse_coo_tensor(
        grammar.first_state[torch.stack([a, b, c])] + number,
        binary.values.detach()[position],
        (inner, states, states),
        check_invariants=True,
    ).coalesce()


def _masses(factors: Factors) -> Float64[Tensor, "parents"]:
    """The sum of each slice T^[a]."""
    u, v, w = (factor.double() for factor in (factors.u, factors.v, factors.w))
    return (v.sum(1) * w.sum(1)) @ u


def fitted(tensor: Float[Tensor, "x y z"], factors: Factors) -> Float[Tensor, "nonzeros"]:
    """T^ where the sparse T has entries."""
    parts = zip(*(index.split(4096) for index in tensor.indices()), strict=True)
    return torch.cat([(factors.u[:, i] * factors.v[:, j] * factors.w[:, k]).sum(0) for i, j, k in parts])


def divergence(grammar: Grammar, factors: Factors) -> float:
    """KL of the grammar's trees from those with `factors` for the binary rules, in nats a tree; inf where T^ <= 0 < T.

    sum over rules of E(a) (t log(t / t^) - t + t^), where E(a) is how often a is expected in a tree. The last two
    cancel where both grammars are normalised.
    """
    tensor, factors = rule_tensor(grammar), factors.map(torch.Tensor.double)
    expected, t = expected_states(grammar).double()[: tensor.shape[0]], tensor.values().double()
    approximate = fitted(tensor, factors)
    if bool((approximate <= 0).any()):
        return float("inf")
    gains = expected[tensor.indices()[0]] * (t * (t / approximate).log() - t)
    return max(0.0, float(gains.sum() + expected @ _masses(factors)))  # below zero by rounding only


@dataclass(frozen=True, eq=False)
class Difference:
    """How T^ differs from T, for each type of children: 2 * (left is a preterminal) + (right is a preterminal)."""

    norm: Float64[Tensor, "4"]  # ||T||_F
    error: Float64[Tensor, "4"]  # ||T - T^||_F
    mass: Float64[Tensor, "4"]  # the sum of |T^|
    negative: Float64[Tensor, "4"]  # the sum of |T^| over entries below zero
    added: Float64[Tensor, "4"]  # the sum of |T^| over entries where T is zero


def difference(tensor: Float[Tensor, "interminal_states states states"], factors: Factors) -> Difference:
    """How T^ differs from a sparse T; T^ and T - T^ are written out for one parent at a time, in float64.

    ||T||^2 - 2 <T, T^> + ||T^||^2 would take less time, but errors below 1e-8 ||T|| would be lost to rounding.
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
        total += torch.stack(
            [torch.stack([_quarter(part, inner, types).sum() for types in range(4)]) for part in parts]
        )
    return Difference(*total[:2].sqrt(), *total[2:])


def _slices(
    tensor: Float[Tensor, "interminal_states states states"], factors: Factors
) -> Iterator[tuple[Float64[Tensor, "states states"], Float64[Tensor, "states states"]]]:
    """T[a] and T^[a] of one parent state after the other; T is sparse."""
    inner, states = tensor.shape[:2]
    (parent, left, right), values = tensor.indices(), tensor.values().double()
    begin = torch.searchsorted(parent, torch.arange(inner + 1, device=parent.device)).tolist()
    u, v, w = (factor.double() for factor in (factors.u, factors.v, factors.w))
    for a in range(inner):
        terms, entries = u[:, a].nonzero().squeeze(1), slice(begin[a], begin[a + 1])
        exact = values.new_zeros(states, states)
        exact[left[entries], right[entries]] = values[entries]
        yield exact, (u[terms, a].unsqueeze(1) * v[terms]).T @ w[terms]


def _quarter(matrix: Float64[Tensor, "states states"], inner: int, child_types: int) -> Float64[Tensor, "lefts rights"]:
    """The part of T[a] with children of these types, see `BinaryRules.child_types`; `inner` states are interminals'."""
    left, right = (slice(inner, None) if word else slice(inner) for word in (child_types // 2, child_types % 2))
    return matrix[left, right]
