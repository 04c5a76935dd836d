"""CP forms of all rules whose terms are for children of one type each: two phrases, a phrase and a word, a word and a
phrase, or two words.

Such a form needs more terms, but only those for two phrases are needed at every split of a span (`CPByChildTypes`). On
a treebank grammar of 3,839 rules and at a divergence of 0.05 nats a tree, 340 terms fitted apart take 0.52 s where 232
fitted together take 0.67; at 0.1 it is 0.47 s against 0.58. At 1, which is a poor fit, 64 together take 0.30 s and 100
apart 0.38. The fit of each type keeps its margins of the counts as far as `apr` does, and so does their sum.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lvpcfg.decompose.apr import Fit, Progress, apr
from lvpcfg.decompose.cover import cover
from lvpcfg.grammar.factors import Factors

MANY = 32  # terms for each type of children


def parts_by_child_types(
    tensor: Float[Tensor, "interminal_states states states"],
) -> list[Float[Tensor, "interminal_states states states"]]:
    """The four parts of a sparse tensor, one for each type of children."""
    tensor = tensor.detach().coalesce()
    _, left, right = tensor.indices()
    child_types = 2 * (left >= tensor.shape[0]).long() + (right >= tensor.shape[0]).long()
    return [_entries(tensor, (child_types == types) & (tensor.values() != 0)) for types in range(4)]


def _entries(tensor: Float[Tensor, "x y z"], which: Bool[Tensor, "nonzeros"]) -> Float[Tensor, "x y z"]:
    """A sparse tensor with some of its entries alone."""
    index, values = tensor.indices()[:, which], tensor.values()[which]
    return torch.sparse_coo_tensor(index, values, tensor.shape, check_invariants=True).coalesce()


def cover_by_child_types(tensor: Float[Tensor, "interminal_states states states"]) -> Factors:
    """The exact cover (see `cover`) of the rules with each type of children.

    A term for two phrases that is a fibre over children also takes the entries of this fibre with a word as that child.
    That costs nothing, and leaves less to cover for the types with one word.
    """
    phrases, after, before, words = parts_by_child_types(tensor)
    first = cover(phrases)
    over_right, after = _extended(first.u, first.v, first.w, after)
    over_left, before = _extended(first.u, over_right, first.v, before.transpose(1, 2).coalesce())
    before = before.transpose(1, 2).coalesce()
    return _together([Factors(first.u, over_left, over_right), *map(cover, (after, before, words))])


def _extended(
    u: Float[Tensor, "rank parents"],
    v: Float[Tensor, "rank children"],
    w: Float[Tensor, "rank children"],
    rest: Float[Tensor, "parents children children"],
) -> tuple[Float[Tensor, "rank children"], Float[Tensor, "parents children children"]]:
    """Moves entries of the sparse `rest` into w of the terms that are fibres over it; returns w and what is left.

    A term is a fibre over w where u and v have a single entry each, which is 1.
    """
    single = ((u != 0).sum(1) == 1) & ((v != 0).sum(1) == 1) & (u.sum(1) == 1) & (v.sum(1) == 1)
    if not bool(single.any()):
        return w, rest
    term = torch.full((u.shape[1], v.shape[1]), -1, device=u.device)
    term[u[single].argmax(1), v[single].argmax(1)] = single.nonzero().squeeze(1)
    a, b, c = rest.indices()
    taken = term[a, b] >= 0
    w = w.clone()
    w[term[a, b][taken], c[taken]] = rest.values()[taken]
    return w, _entries(rest, ~taken)


def apr_by_child_types(
    counts: Float[Tensor, "interminal_states states states"],
    rank: int,
    sweeps: int = 100,
    progress: Progress | None = None,
    **options: Any,
) -> Fit:
    """CP-APR of the rules with each type of children; each gets terms in proportion to the rank of its exact cover.

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
    """`rank`, or the sum of the sizes if that is less, divided in proportion to the sizes; each gets one at the least.

    Large shares, except the last, are multiples of 8, since matrix products of such sizes are fast.
    """
    each, rest = len(sizes), sum(sizes) - len(sizes)
    more = max(0, min(rank - each, rest))  # to be divided when each has one
    ends = [more * (part - number) / max(1, rest) + number for number, part in enumerate(accumulate(sizes), 1)]
    step = 8 if MANY * each <= rank < sum(sizes) else 1
    return [
        end - begin for begin, end in pairwise([0, *(step * round(end / step) for end in ends[:-1]), round(ends[-1])])
    ]


def _together(parts: list[Factors]) -> Factors:
    u, v, w = (torch.cat(factors) for factors in zip(*((part.u, part.v, part.w) for part in parts), strict=True))
    return Factors(u, v, w)
