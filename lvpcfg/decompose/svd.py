"""Slice SVD: an SVD of each parent's slice T[a], a CP form with one-hot u (Cohen, Satta & Collins 2013, sec. 7).

T[a] = sum_i s_ai v_ai w_ai^T,  rank = sum_a r_a,  ||T - T^||_F^2 = the sum of s_ai^2 over the terms left out
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.grammar.factors import Factors

ROUNDING = 1e-28  # the share of ||T||_F^2 in singular values that are zero but for rounding


@dataclass(frozen=True, eq=False)
class SliceFit:
    factors: Factors  # sorted by parent, then by singular value, the largest first; v and w have length 1
    error: Float64[Tensor, ""]  # ||T - T^||_F


def slice_svd(tensor: Tensor, error: float) -> SliceFit:
    """The fewest terms that leave out at most the share `error` of ||T||_F^2; T is [x, y, z], dense or sparse (COO).

    One slice at a time is written out, without its rows and columns of zeros.
    """
    if tensor.ndim != 3 or not tensor.is_floating_point():
        shape = " x ".join(map(str, tensor.shape))
        raise InputError(f"the tensor is {shape} of {tensor.dtype}: expected x y z of real numbers.")
    if not 0 <= error < 1:
        raise InputError(f"the error is {error}: expected a share of the squared norm, at least 0 and less than 1.")
    entries = (tensor if tensor.is_sparse else tensor.to_sparse()).coalesce()
    index, values = entries.indices(), entries.values().double()
    scale = values.abs().max() if len(values) else values.new_ones(())
    terms = [_terms(values.new_zeros(0), index[:, :0], tensor.shape)]  # no terms, so that torch.cat has an argument
    for parent in index[0].unique():
        in_slice = index[0] == parent
        terms.append(_terms(values[in_slice] / scale, index[:, in_slice], tensor.shape))
    lengths, *rows = (torch.cat(parts) for parts in zip(*terms, strict=True))

    squares, order = lengths.square().sort()  # small ones are added up first
    left_out = squares.cumsum(0)
    kept = order[left_out > max(error, ROUNDING) * squares.sum()].sort().values
    u, v, w = (part[kept].to(tensor.dtype) for part in rows)
    missing = lengths.index_fill(0, kept, 0)
    weights = (scale * lengths[kept]).to(tensor.dtype)
    return SliceFit(Factors(u * weights.unsqueeze(1), v, w), scale * torch.linalg.vector_norm(missing))


def _terms(
    values: Float64[Tensor, "entries"], index: Int64[Tensor, "3 entries"], shape: torch.Size
) -> tuple[
    Float64[Tensor, "terms"], Float64[Tensor, "terms x"], Float64[Tensor, "terms y"], Float64[Tensor, "terms z"]
]:
    """The singular values of the slice with these entries, and its u, v and w."""
    (parents, _), (lefts, row), (rights, column) = (part.unique(return_inverse=True) for part in index)
    written = values.new_zeros(len(lefts), len(rights))
    written[row, column] = values
    left, lengths, right = torch.linalg.svd(written, full_matrices=False)
    u, v, w = (values.new_zeros(len(lengths), size) for size in shape)
    u[:, parents], v[:, lefts], w[:, rights] = 1, left.T, right
    return lengths, u, v, w
