"""From features to vectors: the singular vectors of Omega, and the projections of every node on them.

    Omega^a = mean over the nodes of a of (phi - mean phi)(psi - mean psi)^T  =  U S V^T
    Y(t) = (1, U^T (phi(t) - mean phi)),   Z(o) = (1, S^-1 V^T (psi(o) - mean psi))

for each symbol a, with the largest singular values S (Cohen et al. 2012, section 5). The mean of Y Z^T is the identity.
The first state is the constant 1, and the means of the others over all nodes of a are 0: a symbol with one state is
that of the treebank PCFG, and without back-off and the smoothing of words all trees together have the probability 1.
Feature i is scaled by sqrt(M_a / (count_i + 5)).

Omega is never made. A random subspace is turned towards its singular vectors by products with the sparse matrices of
phi and psi (Halko, Martinsson & Tropp 2011), for all symbols at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

TURNS = 3  # of the random subspace
MORE = 10  # of its dimensions, beyond those that are asked for
ADDED = 5  # to the count of each feature


@dataclass(frozen=True, eq=False)
class FeatureMatrix:
    """phi or psi of all nodes, less its mean, [nodes, columns]: each kind of feature has one value in every row.

    A column belongs to one symbol; columns are sorted by symbol.
    """

    symbol: Int64[Tensor, "nodes"]
    sizes: Int64[Tensor, "symbols"]  # M_a, the nodes of each symbol
    column: Int64[Tensor, "nodes kinds"]
    value: Float64[Tensor, "nodes kinds"]
    starts: Int64[Tensor, "symbols_plus_1"]  # where the columns of each symbol begin

    @staticmethod
    def of(
        symbol: Int64[Tensor, "nodes"], sizes: Int64[Tensor, "symbols"], features: Iterable[Int64[Tensor, "nodes"]]
    ) -> "FeatureMatrix":
        numbers = [torch.unique(feature, return_inverse=True)[1] for feature in features]
        kinds = len(numbers)
        keys = [((symbol * kinds + kind) << 32) + number for kind, number in enumerate(numbers)]
        key, column, count = torch.unique(torch.stack(keys, 1), return_inverse=True, return_counts=True)
        owner = (key >> 32) // kinds
        scale = (sizes[owner] / (count + ADDED)).double().sqrt()
        starts = torch.searchsorted(owner, torch.arange(len(sizes) + 1))
        return FeatureMatrix(symbol, sizes, column, scale[column], starts)

    @cached_property
    def owner(self) -> Int64[Tensor, "columns"]:
        return torch.repeat_interleave(self.starts[1:] - self.starts[:-1])

    @cached_property
    def mean(self) -> Float64[Tensor, "columns"]:
        """Of each column over the nodes of its symbol."""
        sums = self.value.new_zeros(len(self.owner)).index_add(0, self.column.flatten(), self.value.flatten())
        return sums / self.sizes[self.owner]

    @cached_property
    def example(self) -> Int64[Tensor, "columns"]:
        """A place in `column` where each stands."""
        place = torch.arange(self.column.numel())
        return torch.zeros_like(self.owner).index_copy(0, self.column.flatten(), place)

    @cached_property
    def _by_column(self) -> tuple[Int64[Tensor, "entries"], Int64[Tensor, "columns"], Float64[Tensor, "entries"]]:
        """The transposed matrix: the nodes of each column, where those of each begin, and the values there."""
        column, kinds = self.column.flatten(), self.column.shape[1]
        order = column.argsort(stable=True)
        first = torch.searchsorted(column[order], torch.arange(len(self.owner)))
        return order // kinds, first, self.value.flatten()[order]

    def times(self, vectors: Float64[Tensor, "columns k"]) -> Float64[Tensor, "nodes k"]:
        of_mean = self._by_symbol(self.owner, self.mean.unsqueeze(1) * vectors)
        return embedding_bag(self.column, vectors, per_sample_weights=self.value, mode="sum") - of_mean[self.symbol]

    def transposed_times(self, vectors: Float64[Tensor, "nodes k"]) -> Float64[Tensor, "columns k"]:
        """For vectors that are divided by the sizes of symbols: means over their nodes."""
        vectors = vectors / self.sizes[self.symbol].unsqueeze(1)
        node, first, value = self._by_column
        found = embedding_bag(node, vectors, first, per_sample_weights=value, mode="sum")
        return found - self.mean.unsqueeze(1) * self._by_symbol(self.symbol, vectors)[self.owner]

    def _by_symbol(self, symbol: Int64[Tensor, "rows"], rows: Float64[Tensor, "rows k"]) -> Tensor:
        return rows.new_zeros(len(self.sizes), rows.shape[1]).index_add(0, symbol, rows)

    def columns_of(self) -> list[slice]:
        """Those of each symbol."""
        return [slice(*pair) for pair in pairwise(self.starts.tolist())]

    def without(self, share: float, generator: torch.Generator) -> "FeatureMatrix":
        """Without this share of the columns, chosen at random."""
        if not share:
            return self
        kept = (torch.rand(len(self.owner), generator=generator) >= share).double()
        return FeatureMatrix(self.symbol, self.sizes, self.column, self.value * kept[self.column], self.starts)


@dataclass(frozen=True, eq=False)
class Singular:
    """U, S and V of all symbols; columns of zeros beyond the rank of a symbol."""

    left: Float64[Tensor, "inside_columns k"]
    values: Float64[Tensor, "symbols k"]
    right: Float64[Tensor, "outside_columns k"]


@dataclass(frozen=True, eq=False)
class Projected:
    """Y and Z of all nodes; 0 for the states that a symbol does not have."""

    sizes: Int64[Tensor, "symbols"]  # M_a
    states: Int64[Tensor, "symbols"]
    inside: Float64[Tensor, "nodes m"]
    outside: Float64[Tensor, "nodes m"]


def singular(inside: FeatureMatrix, outside: FeatureMatrix, k: int, generator: torch.Generator) -> Singular:
    """The largest k singular values of each Omega, and their vectors."""
    right = torch.randn(len(outside.owner), k + MORE, generator=generator, dtype=torch.float64)
    for _ in range(TURNS):
        left = _orthonormal(inside.transposed_times(outside.times(right)), inside.columns_of())
        right = _orthonormal(outside.transposed_times(inside.times(left)), outside.columns_of())
    left = inside.transposed_times(outside.times(right))  # Omega V
    values = right.new_zeros(len(inside.sizes), k + MORE)
    for symbol, (rows, columns) in enumerate(zip(inside.columns_of(), outside.columns_of(), strict=True)):
        u, s, v = torch.linalg.svd(left[rows], full_matrices=False)
        sign = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0) if len(u) else 1.0
        missing = (0, k + MORE - len(s))
        left[rows], right[columns] = pad(u * sign, missing), pad((right[columns] @ v.T) * sign, missing)
        values[symbol] = pad(s, missing)
    return Singular(left[:, :k], values[:, :k], right[:, :k])


def _orthonormal(vectors: Float64[Tensor, "columns k"], symbols: list[slice]) -> Float64[Tensor, "columns k"]:
    """A basis of what the vectors of each symbol span."""
    for rows in symbols:
        basis = torch.linalg.qr(vectors[rows])[0]
        vectors[rows] = pad(basis, (0, vectors.shape[1] - basis.shape[1]))
    return vectors


def projected(
    inside: FeatureMatrix,
    outside: FeatureMatrix,
    found: Singular,
    most: Int64[Tensor, "symbols"],
    least: float,
    share: float,
) -> Projected:
    """With up to `most` states a symbol: no singular value is inverted that is below `least`, or below this share of
    the symbol's largest."""
    good = (found.values > least) & (found.values > share * found.values[:, :1])
    good &= torch.arange(good.shape[1]) < most.unsqueeze(1) - 1
    inverse = torch.where(good, 1 / found.values, 0)
    y = inside.times(found.left) * good[inside.symbol]
    z = outside.times(found.right) * inverse[inside.symbol]
    states = 1 + good.sum(1)
    widest = int(states.max())
    y, z = (pad(rows, (1, 0), value=1)[:, :widest] for rows in (y, z))
    return Projected(inside.sizes, states, y, z)
