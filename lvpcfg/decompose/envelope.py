"""Residual envelopes: E = e_a x e_b x e_c >= |T - T^| of each rule in CP form (`grammar/envelope.py`).

What a rule adds to the width of log Z is, over the sentences that the grammar draws,

    looseness = sum over x, y, z of n_x E_xyz,     n_x the expected number of x's in a tree

since all strings below a child add up to 1. So E minimises it among all covers: with e_b and e_c given, the smallest
e_a is a maximum, and the logarithm of the looseness is convex in their logarithms. It falls by gradient descent with a
maximum that is smooth at first. Rules of which it stays large are kept as they are.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from lvpcfg.decompose.options import ALSOptions, Options
from lvpcfg.errors import InputError
from lvpcfg.grammar.envelope import Envelope, digest, expect_nonnegative
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rules import CHUNK, similar

LOOSENESS = 0.01  # of all rules with an envelope together, in a tree
STEPS, RATE = 100, 0.1
SMALLEST = 1e-30  # of the numbers of an envelope, over the largest


def expect_certifiable(grammar: Grammar, options: Options) -> None:
    if not isinstance(options, ALSOptions):
        raise InputError(f"certify needs decompose=als, whose rules have CP forms each: found {options.name}.")
    expect_nonnegative(grammar)


def envelope_of(exact: Grammar, small: Grammar) -> Envelope:
    """For the rules of `small` that are in CP form instead of their tensors in `exact`."""
    binary, device = small.binary, small.root.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    if not isinstance(binary, RuleCP):  # all rules are as they were
        empty = small.root.new_zeros(0)
        return Envelope(none, empty, *(empty.view(0, 1),) * 3, digest(small), digest(exact))
    expected, factors = expected_states(exact).double(), binary.factors.map(torch.Tensor.double)
    sizes = binary.states[binary.rules[binary.cp_rules]]
    terms = Factors(*(torch.zeros_like(binary.u[:, 0]) for _ in range(3)))  # each [cp_rules, widest]
    looseness = torch.zeros(len(sizes), dtype=torch.float64, device=device)
    for group, shape in similar(sizes):
        for some in group.split(max(1, CHUNK // torch.Size(shape).numel())):
            tensors = torch.zeros(len(some), *shape, dtype=torch.float64, device=device)
            for tensor, rule in zip(tensors, binary.cp_rules[some].tolist(), strict=True):
                known = exact.binary.tensor(rule)
                tensor[: known.shape[0], : known.shape[1], : known.shape[2]] = known
            u, v, w = (
                factor[some, :, :size] for factor, size in zip((factors.u, factors.v, factors.w), shape, strict=True)
            )
            mass = Factors(u.abs(), v.abs(), w.abs()).tensor()
            residual = (tensors - Factors(u, v, w).tensor()).abs() + _rounding(shape, binary.factors.rank) * mass
            first = exact.first_state[binary.rules[binary.cp_rules[some], 0]].unsqueeze(1)
            state = (first + torch.arange(shape[0], device=device)).clamp_max(len(expected) - 1)
            found = cover(residual, expected[state], binary.dtype)
            for into, term in zip((terms.u, terms.v, terms.w), (found.u, found.v, found.w), strict=True):
                into[some, : term.shape[1]] = term.to(into.dtype)
            x, y, z = (term.double() for term in (found.u, found.v, found.w))
            looseness[some] = (expected[state] * x).sum(1) * y.sum(1) * z.sum(1)
    order = looseness.argsort()
    kept = order[looseness[order].cumsum(0) > LOOSENESS].sort().values
    covered = torch.ones_like(looseness, dtype=torch.bool).index_fill(0, kept, False)
    numbers = binary.cp_rules[kept]
    is_kept = torch.zeros_like(binary.is_cp).index_fill(0, numbers, True)
    written = exact.binary.listed()
    values = written.values[torch.repeat_interleave(is_kept, written.starts.diff())]
    u, v, w = (term[covered] for term in (terms.u, terms.v, terms.w))
    return Envelope(numbers, values, u, v, w, digest(small), digest(exact))


def _rounding(shape: list[int], rank: int) -> float:
    """Relative to the sum of |u| |v| |w|: of T^, and of what a forest makes of it in float64."""
    return 8 * (2 * max(shape) + rank + 8) * torch.finfo(torch.float64).eps


def cover(
    residual: Float64[Tensor, "rules x y z"], expected: Float64[Tensor, "rules x"], dtype: torch.dtype
) -> Factors:
    """e_a, e_b, e_c of each rule, [rules, size] of the given type, whose products are nowhere below the residual."""
    largest = residual.amax((1, 2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    log = (residual / largest.view(-1, 1, 1, 1)).clamp_min(SMALLEST).log()
    weight = (expected / expected.amax(1, keepdim=True).clamp_min(SMALLEST)).clamp_min(1e-4).log()
    b, c = log.amax((1, 3)), log.amax((1, 2))
    first = _tight(log, b, c)
    looseness = _looseness(*first, weight) * largest * expected.amax(1)
    matters = (looseness > LOOSENESS / (10 * len(residual))).nonzero().squeeze(1)
    better = _tight(log[matters], *_descended(log[matters].float(), weight[matters].float()))
    a, b, c = (part.index_copy(0, matters, found) for part, found in zip(first, better, strict=True))
    # One scale for the three, so that none leaves the range of the type; and up, for what rounding takes from them.
    tops = [part.amax(1, keepdim=True) for part in (a, b, c)]
    scale = ((torch.stack(tops).sum(0) + largest.log().unsqueeze(1)) / 3).exp()
    scale = scale * (1 + max(1e-12, 4 * torch.finfo(dtype).eps))
    some, tiny = residual > 0, torch.finfo(dtype).tiny
    used = some.any(3).any(2), some.any(3).any(1), some.any(2).any(1)
    return Factors(
        *(
            torch.where(mask, ((part - top).exp() * scale).clamp_min(tiny).to(dtype), 0)
            for part, top, mask in zip((a, b, c), tops, used, strict=True)
        )
    )


def _tight(log: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logarithms of a cover: a is the smallest for these b and c, then b for this a, and c."""
    b, c = b.to(log.dtype), c.to(log.dtype)
    a = (log - b[:, None, :, None] - c[:, None, None, :]).amax((2, 3))
    b = (log - a[:, :, None, None] - c[:, None, None, :]).amax((1, 3))
    c = (log - a[:, :, None, None] - b[:, None, :, None]).amax((1, 2))
    return a, b, c


def _looseness(a: Tensor, b: Tensor, c: Tensor, weight: Tensor) -> Tensor:
    return ((a + weight).logsumexp(1) + b.logsumexp(1) + c.logsumexp(1)).exp()


def _descended(log: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """b and c of a better cover."""
    with torch.enable_grad():
        b, c = (log.logsumexp(modes).requires_grad_() for modes in ((1, 3), (1, 2)))
        optimiser = torch.optim.Adam([b, c], lr=RATE)
        for step in range(STEPS):
            smooth = 0.5 * (1 - step / STEPS) + 0.01
            a = smooth * ((log - b[:, None, :, None] - c[:, None, None, :]) / smooth).logsumexp((2, 3))
            loss = _looseness(a, b, c, weight).log().sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return b.detach(), c.detach()
