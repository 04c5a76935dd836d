"""The matrices of an HMM as products of two: forward-backward at O(rank * states) a step (Cohen, Satta & Collins 2013,
section 7).

    svd   M ~ (U S) V^T          the least squared error; factors may be negative: sums, but no best sequence
    nmf   M_ij ~ sum over r of p(r | i) p(j | r)      the rank is a hidden variable, found by EM (Hofmann 1999), which
                                 lowers sum_ij M_ij log(M_ij / M^_ij) at every iteration; an HMM is still an HMM

The factors stand where a matrix alone would: `Chain(initial, svd(transition, rank))`, or `HMM.from_probabilities`. What
was learned with factors from the start is an `HMM` with a rank.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.errors import InputError

EXACTLY = 512  # rows and columns of matrices whose singular vectors are not looked for by random projections


def svd(matrix: Float[Tensor, "rows columns"], rank: int) -> tuple[Tensor, Tensor]:
    """[rows, rank] and [rank, columns]."""
    _expect_rank(matrix, rank)
    if min(matrix.shape) <= EXACTLY:
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
        v = v.mT
    else:
        u, values, v = torch.svd_lowrank(matrix, min(rank + 16, *matrix.shape), niter=4)
    return u[:, :rank] * values[:rank], v[:, :rank].mT


def nmf(
    matrix: Float[Tensor, "rows columns"], rank: int, iterations: int = 200, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The same, for a matrix whose rows are distributions: so are those of both factors."""
    _expect_rank(matrix, rank)
    if bool((matrix < 0).any()) or bool((matrix.sum(1) == 0).any()):
        wrong = "negative numbers" if bool((matrix < 0).any()) else "a row of zeros"
        raise InputError(f"nmf of a matrix with {wrong}: expected one whose rows are distributions.")
    generator = torch.Generator().manual_seed(seed)
    left = torch.rand(len(matrix), rank, generator=generator).to(matrix)
    right = matrix[torch.randperm(len(matrix), generator=generator)[:rank]] + 1 / matrix.shape[1]
    left, right = left / left.sum(1, keepdim=True), right / right.sum(1, keepdim=True)
    for _ in range(iterations):
        ratio = matrix / (left @ right).clamp_min(torch.finfo(matrix.dtype).tiny)
        new_right = right * (left.mT @ ratio)
        left = left * (ratio @ right.mT)
        left, right = (x / x.sum(1, keepdim=True) for x in (left, new_right))
    return left, right


def _expect_rank(matrix: Tensor, rank: int) -> None:
    if not 1 <= rank <= min(matrix.shape):
        shape = " x ".join(map(str, matrix.shape))
        raise InputError(f"rank {rank} of a matrix of {shape}: expected 1 to {min(matrix.shape)}.")
