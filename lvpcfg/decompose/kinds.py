"""Whole-grammar decompositions whose terms serve rules of one kind each: with two phrases, a phrase and a word, a word
and a phrase, or two words as children.

They take more terms in all, but only those for two phrases are needed at every split of a span (`KruskalByKind`). Each
kind keeps its own margins of the counts, and so does their sum.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lvpcfg.decompose.apr import Fit, Progress, apr
from lvpcfg.decompose.cover import cover
from lvpcfg.grammar.kruskal import Factors


def kinds_of(tensor: Tensor) -> list[Tensor]:
    """The parts of a sparse tensor [interminal states, states, states], without those that are empty."""
    tensor = tensor.detach().coalesce()
    _, left, right = tensor.indices()
    kind = 2 * (left >= tensor.shape[0]).long() + (right >= tensor.shape[0]).long()
    kind = torch.where(tensor.values() != 0, kind, -1)
    return [
        torch.sparse_coo_tensor(
            tensor.indices()[:, kind == one], tensor.values()[kind == one], tensor.shape, check_invariants=True
        ).coalesce()
        for one in range(4)
        if bool((kind == one).any())
    ]


def cover_by_kind(tensor: Tensor) -> Factors:
    """The exact cover (see `cover`) of each kind."""
    return _together([cover(part) for part in kinds_of(tensor)]) if tensor._nnz() else cover(tensor)


def apr_by_kind(
    counts: Tensor,
    rank: int,
    sweeps: int = 100,
    tolerance: float = 1e-4,
    start: str = "cover",
    starts: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """CP-APR (see `apr`) of each kind, with a share of the terms in proportion to what its exact cover would take."""
    parts = kinds_of(counts)
    if len(parts) < 2 or rank < len(parts):
        return apr(counts, rank, sweeps, tolerance, start, starts, seed, progress)
    fits: list[Fit] = []

    def advance(sweep: int, divergence: float, violation: float) -> None:
        if progress is not None:
            progress((len(fits) * sweeps + sweep) // len(parts), divergence, violation)

    for part, share in zip(parts, shares([cover(part).rank for part in parts], rank), strict=True):
        fits.append(apr(part, share, sweeps, tolerance, start, starts, seed, advance))
    return Fit(
        _together([fit.factors for fit in fits]),
        sum(fit.divergence for fit in fits),
        max(fit.violation for fit in fits),
        max(fit.sweeps for fit in fits),
    )


def shares(sizes: list[int], rank: int) -> list[int]:
    """`rank`, or the sum of the sizes if that is less, shared out in proportion to them; one to each at the least."""
    each, rest = len(sizes), sum(sizes) - len(sizes)
    more = max(0, min(rank - each, rest))  # than one each
    ends = [round(more * (part - number) / max(1, rest)) + number for number, part in enumerate(accumulate(sizes), 1)]
    return [end - begin for begin, end in pairwise([0, *ends])]


def _together(parts: list[Factors]) -> Factors:
    u, v, w = (torch.cat(factors) for factors in zip(*((part.u, part.v, part.w) for part in parts), strict=True))
    return Factors(u, v, w)
