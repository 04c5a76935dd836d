"""Whole-grammar decompositions whose terms serve rules of one kind each: with two phrases, a phrase and a word, a word
and a phrase, or two words as children.

They take more terms in all, but only those for two phrases are needed at every split of a span (`CPByChildTypes`). On a
treebank grammar of 3,839 rules and at a divergence of 0.05 nats a tree 340 terms apart take 0.52 s where 232 together
take 0.67; at 0.1 it is 0.47 s against 0.58. At 1, which is a poor fit, 64 together take 0.30 s and 100 apart 0.38. Each
kind keeps its own margins of the counts as far as `apr` does, and so does their sum.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lvpcfg.decompose.apr import Fit, Progress, apr
from lvpcfg.decompose.cover import cover
from lvpcfg.grammar.factors import Factors

MANY = 32  # terms for each kind


def parts_by_child_types(tensor: Tensor) -> list[Tensor]:
    """The four parts of a sparse tensor [interminal states, states, states]."""
    tensor = tensor.detach().coalesce()
    _, left, right = tensor.indices()
    kind = 2 * (left >= tensor.shape[0]).long() + (right >= tensor.shape[0]).long()
    return [_entries(tensor, (kind == one) & (tensor.values() != 0)) for one in range(4)]


def _entries(tensor: Tensor, which: Tensor) -> Tensor:
    """Some of the entries of a sparse tensor."""
    place, values = tensor.indices()[:, which], tensor.values()[which]
    return torch.sparse_coo_tensor(place, values, tensor.shape, check_invariants=True).coalesce()


def cover_by_child_types(tensor: Tensor) -> Factors:
    """The exact cover (see `cover`) of each kind. A fibre of children that are phrases goes on over words, at no cost,
    so that there is less left to cover for the kinds with one word."""
    phrases, after, before, words = parts_by_child_types(tensor)
    first = cover(phrases)
    over_right, after = _extended(first.u, first.v, first.w, after)
    over_left, before = _extended(first.u, over_right, first.v, before.transpose(1, 2).coalesce())
    before = before.transpose(1, 2).coalesce()
    return _together([Factors(first.u, over_left, over_right), *map(cover, (after, before, words))])


def _extended(u: Tensor, v: Tensor, w: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """w of terms with one parent and one v, both times 1, with the entries of `rest` beside them; and what is left."""
    single = ((u != 0).sum(1) == 1) & ((v != 0).sum(1) == 1) & (u.sum(1) == 1) & (v.sum(1) == 1)
    if not bool(single.any()):
        return w, rest
    term = torch.full((u.shape[1], v.shape[1]), -1, device=u.device)
    term[u[single].argmax(1), v[single].argmax(1)] = single.nonzero().squeeze(1)
    a, b, c = rest.indices()
    own = term[a, b] >= 0
    w = w.clone()
    w[term[a, b][own], c[own]] = rest.values()[own]
    return w, _entries(rest, ~own)


def apr_by_child_types(
    counts: Tensor, rank: int, sweeps: int = 100, progress: Progress | None = None, **options: Any
) -> Fit:
    """CP-APR of each kind, with a share of the terms in proportion to what its exact cover would take.

    `options` are those of `apr`.
    """
    parts = [part for part in parts_by_child_types(counts) if part._nnz()]
    if len(parts) < 2 or rank < len(parts):
        return apr(counts, rank, sweeps, progress=progress, **options)
    fits: list[Fit] = []

    def advance(sweep: int, divergence: float, violation: float) -> None:
        if progress is not None:
            progress((len(fits) * sweeps + sweep) // len(parts), divergence, violation)

    for part, share in zip(parts, shares([cover(part).rank for part in parts], rank), strict=True):
        fits.append(apr(part, share, sweeps, progress=advance, **options))
    return Fit(
        _together([fit.factors for fit in fits]),
        sum(fit.divergence for fit in fits),
        max(fit.violation for fit in fits),
        max(fit.sweeps for fit in fits),
    )


def shares(sizes: list[int], rank: int) -> list[int]:
    """`rank`, or the sum of the sizes if that is less, shared out in proportion to them; one to each at the least.

    Where there are many, all but the last get multiples of 8, since products of such sizes are fast.
    """
    each, rest = len(sizes), sum(sizes) - len(sizes)
    more = max(0, min(rank - each, rest))  # than one each
    ends = [more * (part - number) / max(1, rest) + number for number, part in enumerate(accumulate(sizes), 1)]
    step = 8 if MANY * each <= rank < sum(sizes) else 1
    return [
        end - begin for begin, end in pairwise([0, *(step * round(end / step) for end in ends[:-1]), round(ends[-1])])
    ]


def _together(parts: list[Factors]) -> Factors:
    u, v, w = (torch.cat(factors) for factors in zip(*((part.u, part.v, part.w) for part in parts), strict=True))
    return Factors(u, v, w)
