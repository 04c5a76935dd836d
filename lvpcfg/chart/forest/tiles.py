"""Edges of a forest in tiles of one rule each, and what rules do to them: as tensors, or in CP form.

A tile is a few slots for edges of one rule, so that the rule is fetched once for all of them, and all tiles of one
shape are one product of batches of matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lvpcfg.grammar.factors import Factors

Shape = tuple[int, int, int, int]  # (x, y, z), and the rank of CP forms, 0 for tensors


@dataclass(frozen=True, eq=False)
class Tiles:
    """Edges of rules of one shape (x, y, z), in tiles of edges of one rule."""

    shape: int
    unary: bool  # all right children are the constant 1, and are left out of the products
    rule: Int[Tensor, "tiles"]  # its number among those of the shape
    width: int  # slots of a tile
    begin: int  # their first slot in the `Layout`

    @property
    def end(self) -> int:
        return self.begin + len(self.rule) * self.width

    def parts(self, size: int) -> Iterator["Tiles"]:
        """At most `size` tiles at a time."""
        for first in range(0, len(self.rule), size):
            yield replace(self, rule=self.rule[first : first + size], begin=self.begin + first * self.width)

    def of(self, column: Shaped[Tensor, "all_slots"]) -> Shaped[Tensor, "slots"]:
        """Their tiles * width slots of a column."""
        return column.narrow(0, self.begin, len(self.rule) * self.width)


@dataclass(frozen=True, eq=False)
class Tensors:
    """T of some rules; yz are all pairs of y and z."""

    values: Float[Tensor, "rules x yz"]

    def of(self, rule: Int[Tensor, "tiles"]) -> "Tensors":
        return Tensors(self.values.index_select(0, rule))

    def numbers(self, width: int) -> int:
        """How many numbers a step holds for a tile."""
        _, x, pairs = self.values.shape
        return pairs * (x + width)

    def written_out(self) -> "Tensors":
        return self

    def project(self, *children: Tensor) -> tuple[Tensor, ...]:
        return children

    def parents(self, *children: Float[Tensor, "tiles width _"]) -> Float[Tensor, "tiles width x"]:
        """T(y2, y3) of left children [tiles, width, y] and right children [tiles, width, z]."""
        return torch.bmm(outer(*children), self.values.transpose(1, 2))

    def best_parents(self, *children: Float[Tensor, "tiles width _"]) -> Float[Tensor, "tiles width x"]:
        """The same with the largest product instead of the sum."""
        products = outer(*children)
        return torch.stack([(products * row.unsqueeze(1)).amax(2) for row in self.values.unbind(1)], 2)

    def children(
        self,
        rows: Float[Tensor, "tiles width x"],
        left: Float[Tensor, "tiles width y"],
        right: Float[Tensor, "tiles width z"] | None = None,
    ) -> tuple[Float[Tensor, "tiles width"], list[Float[Tensor, "tiles width _"]]]:
        """T applied to all three; and T_(1,3)(y1, y3) [tiles, width, y] and T_(1,2)(y1, y2) [tiles, width, z]."""
        both = torch.bmm(rows, self.values)
        if right is None:
            return (both * left).sum(2), [both]
        both = both.unflatten(2, (left.shape[2], -1))
        into_left = torch.matmul(both, right.unsqueeze(3)).squeeze(3)
        return (into_left * left).sum(2), [into_left, both.mul_(left.unsqueeze(3)).sum(2)]

    def gradients(
        self, rows: Float[Tensor, "tiles width x"], *children: Float[Tensor, "tiles width _"]
    ) -> list[Float[Tensor, "tiles x yz"]]:
        """By T, for each tile."""
        return [torch.bmm(rows.transpose(1, 2), outer(*children))]

    def by_tensor(self, gradient: Float[Tensor, "tiles x y z"]) -> list[Float[Tensor, "tiles x yz"]]:
        """The same from the derivatives by T written out."""
        return [gradient.flatten(2)]


@dataclass(frozen=True, eq=False)
class CPTiles:
    """The same in CP form: U [rules, rank, x], V [rules, rank, y], W [rules, rank, z].

    Both passes take the children as V y2 and W y3 (`project`), which are computed once.
    """

    factors: Factors

    def of(self, rule: Int[Tensor, "tiles"]) -> "CPTiles":
        return replace(self, factors=self.factors.map(lambda factor: factor.index_select(0, rule)))

    def numbers(self, width: int) -> int:
        sizes = (factor.shape[2] for factor in (self.factors.u, self.factors.v, self.factors.w))
        return (self.factors.rank + width) * sum(sizes)

    def written_out(self) -> Tensors:
        """The tensors that they stand for: derivations are over states, not over terms."""
        return Tensors(self.factors.tensor().flatten(2))

    def project(
        self, left: Float[Tensor, "tiles width y"], right: Float[Tensor, "tiles width z"]
    ) -> tuple[Float[Tensor, "tiles width rank"], Float[Tensor, "tiles width rank"]]:
        """V y2 and W y3."""
        return torch.bmm(left, self.factors.v.transpose(1, 2)), torch.bmm(right, self.factors.w.transpose(1, 2))

    def parents(
        self, left: Float[Tensor, "tiles width rank"], right: Float[Tensor, "tiles width rank"]
    ) -> Float[Tensor, "tiles width x"]:
        return torch.bmm(left * right, self.factors.u)

    def children(
        self,
        rows: Float[Tensor, "tiles width x"],
        left: Float[Tensor, "tiles width rank"],
        right: Float[Tensor, "tiles width rank"],
    ) -> tuple[Float[Tensor, "tiles width"], list[Float[Tensor, "tiles width _"]]]:
        lanes = torch.bmm(rows, self.factors.u.transpose(1, 2))
        into_left, into_right = right * lanes, left * lanes
        return (into_left * left).sum(2), [torch.bmm(into_left, self.factors.v), torch.bmm(into_right, self.factors.w)]

    def gradients(
        self,
        rows: Float[Tensor, "tiles width x"],
        left: Float[Tensor, "tiles width y"],
        right: Float[Tensor, "tiles width z"],
    ) -> list[Float[Tensor, "tiles rank _"]]:
        """By U, V and W, for each tile."""
        (v, w), lanes = self.project(left, right), torch.bmm(rows, self.factors.u.transpose(1, 2))
        pairs = ((v * w, rows), (w * lanes, left), (v * lanes, right))
        return [torch.bmm(terms.transpose(1, 2), states) for terms, states in pairs]

    def by_tensor(self, gradient: Float[Tensor, "tiles x y z"]) -> list[Float[Tensor, "tiles rank _"]]:
        u, v, w = (factor.to(gradient.dtype) for factor in (self.factors.u, self.factors.v, self.factors.w))
        return [
            torch.einsum("txyz,try,trz->trx", gradient, v, w),
            torch.einsum("txyz,trx,trz->try", gradient, u, w),
            torch.einsum("txyz,trx,try->trz", gradient, u, v),
        ]


Weights = list[Tensors | CPTiles]  # for each shape


def outer(
    left: Float[Tensor, "tiles width y"], right: Float[Tensor, "tiles width z"] | None = None
) -> Float[Tensor, "tiles width yz"]:
    """All products of a state on the left and one on the right."""
    if right is None:
        return left
    return (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2)
