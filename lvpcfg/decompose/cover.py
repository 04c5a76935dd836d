"""The exact non-negative fibre cover: a sparse tensor as a sum of few of its fibres, each of them of rank one.

A fibre has two of its three indices fixed: (b, c) with u over a, (a, c) with v over b, or (a, b) with w over c. Every
entry lies on three fibres and goes to one that is taken, so the fewest terms are a minimum set cover. Two fibres share
one entry at the most, which leaves two reductions that lose nothing:

    a fibre with one entry left is dropped if that entry lies on another;
    an entry left on one fibre alone takes that fibre.

Where neither applies, the fibre whose entries are worth most is taken. What an entry is worth is its multiplier in the
Lagrangian dual of the cover, a lower bound on the number of terms, made large by subgradient steps (Held, Wolfe &
Crowder 1974):

    max over y >= 0 of   sum_e y_e + sum_f min(0, 1 - sum of y_e over the entries of f)
"""

import heapq

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.grammar.factors import Factors

STEPS, SHORTEST = 600, 0.01  # subgradient steps at the most; they end when their factor is below SHORTEST
PATIENCE = 20  # steps without a better bound before the factor is halved
GAP = 0.03  # a step aims at a bound that is better by this share


def cover(tensor: Tensor) -> Factors:
    """Factors with `tensor` (sparse, order 3, of any signs) as their exact sum: every entry is in one term, times 1."""
    if tensor.layout != torch.sparse_coo or tensor.sparse_dim() != 3 or tensor.dense_dim():
        raise InputError(f"expected a sparse COO tensor of order 3, found {tensor.layout} {tuple(tensor.shape)}.")
    tensor = tensor.detach().coalesce()
    entry = tensor.values().nonzero().squeeze(1)
    index, values = tensor.indices()[:, entry], tensor.values()[entry]
    fibre = _fibres(index, tensor.shape)
    terms, term = _chosen_fibres(fibre, _worths(fibre)).to(index.device).unique(return_inverse=True)
    factors = []
    for mode, size in enumerate(tensor.shape):
        factor = values.new_zeros(len(terms), size)
        factor[term, index[mode]] = torch.where(terms[term] == fibre[:, mode], values, torch.ones_like(values))
        factors.append(factor)
    return Factors(*factors)


def _fibres(index: Int64[Tensor, "3 entries"], shape: torch.Size) -> Int64[Tensor, "entries 3"]:
    """The number of the fibre of each entry along each mode."""
    a, b, c = index
    x, y, z = shape
    keys = torch.stack([b * z + c, y * z + a * z + c, (x + y) * z + a * y + b], 1)
    return keys.unique(return_inverse=True)[1]


def _worths(fibre: Int64[Tensor, "entries 3"]) -> Float64[Tensor, "entries"]:
    """The multipliers y of the best bound that was found."""
    size = torch.bincount(fibre.flatten()).double()
    y = best_y = (1 / size[fibre]).amin(1)
    best, step, waited = 0.0, 1.0, 0
    for _ in range(STEPS):
        price = 1 - torch.zeros_like(size).index_add_(0, fibre.flatten(), y.repeat_interleave(3))
        bound = float(y.sum() + price.clamp_max(0).sum())
        waited += 1
        if bound > best:
            best, best_y, waited = bound, y, 0
        elif waited == PATIENCE:
            y, step, waited = best_y, step / 2, 0
            if step < SHORTEST:
                break
            continue
        slope = 1 - (price < 0).double()[fibre].sum(1)
        length = step * ((1 + GAP) * best - bound + 1) / slope.square().sum().clamp_min(1)
        y = (y + length * slope).clamp_min(0)
    return best_y


def _chosen_fibres(fibre: Int64[Tensor, "entries 3"], worth: Float64[Tensor, "entries"]) -> Int64[Tensor, "entries"]:
    """The fibre that each entry goes to."""
    fibres_of: list[list[int]] = fibre.tolist()  # the fibres of each entry that are not dropped
    worths: list[float] = worth.tolist()
    entries_of: list[set[int]] = [set() for _ in range(int(fibre.max()) + 1 if len(fibre) else 0)]  # not yet covered
    total = [0.0] * len(entries_of)
    for entry, fibres in enumerate(fibres_of):
        for f in fibres:
            entries_of[f].add(entry)
            total[f] += worths[entry]
    chosen = [-1] * len(fibres_of)
    single = [f for f, entries in enumerate(entries_of) if len(entries) == 1]
    heap = [(-value, f) for f, value in enumerate(total)]
    heapq.heapify(heap)

    def take(taken: int) -> None:
        for entry in list(entries_of[taken]):
            chosen[entry] = taken
            for f in fibres_of[entry]:
                entries_of[f].discard(entry)
                total[f] -= worths[entry]
                if len(entries_of[f]) == 1:
                    single.append(f)

    while heap:
        while single:
            f = single.pop()
            if not entries_of[f]:
                continue
            (entry,) = entries_of[f]
            if len(fibres_of[entry]) > 1:
                entries_of[f].clear()
                fibres_of[entry].remove(f)
            if len(fibres_of[entry]) == 1:
                take(fibres_of[entry][0])
        value, f = heapq.heappop(heap)
        if entries_of[f] and total[f] == -value:
            take(f)
        elif entries_of[f]:  # it was worth more when it was put there
            heapq.heappush(heap, (-total[f], f))
    return torch.tensor(chosen, dtype=torch.int64)
