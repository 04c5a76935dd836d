"""Inside and outside on packed forests: lists of nodes, and of edges node -> left, right by a rule.

    alpha(leaf) = Q^{a -> x},     alpha(node) = sum over its edges of T(alpha(left), alpha(right))
    beta(top) = 1 / Z,            beta(left) += T_(1,3)(beta(node), alpha(right)), and so for the right

The skeletal trees of a treebank are a forest in which each node has one edge (Matsuzaki et al. 2005: EM); what a
coarse grammar leaves of a chart is another (Petrov & Klein 2007: coarse to fine). Sentences may differ in length.

Edges of one level are computed together, as products of batches of matrices: the edges of one rule stand in tiles
of one width, with the rule's tensor once a tile. The width is the mean number of edges a rule has there, so that
neither the padding of tiles nor the tensors more than double. Rules are padded to a few shapes, as few as pay.

A rule may be in Kruskal form (Cohen & Collins 2012), T(y2, y3) = U^T (V y2 * W y3): r (x + y + z) multiplications an
edge instead of x y z, and as many fewer numbers to fetch for each tile.

A unary rule is a binary one whose right child is the constant 1, and the root distribution is the unary rules of
a node on top, which has one state. Each node holds mantissas and an exponent, as the cells of a chart do.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lvpcfg.grammar.kruskal import Factors, RuleFactors

BATCH = 250_000  # what another batch of edges costs, in multiplications
CHUNK = 1 << 20  # numbers held by one step
NARROW = 0.7  # of the mean number of edges of a rule: tiles of Kruskal forms, which have less to fetch for each
NOTHING = -1e9  # the exponent of a node without derivations
Shape = tuple[int, int, int, int]  # (x, y, z), and the rank of Kruskal forms, 0 for tensors


@dataclass(frozen=True, eq=False)
class Forest:
    """Edges as parallel vectors. Children stand on lower levels than their parent; leaves on none.

    Beyond the nodes 0 .. nodes - 1 there are two more: `nodes` is nothing, 0, and `nodes + 1` the constant 1, the
    right child of unary rules.
    """

    nodes: int
    level: Tensor  # [edges]
    rule: Tensor
    parent: Tensor
    left: Tensor
    right: Tensor
    leaves: Tensor  # [leaves]: nodes
    tops: Tensor  # [sentences]: nodes


@dataclass(frozen=True, eq=False)
class Tiles:
    """Edges of rules of one shape (x, y, z), in tiles of edges of one rule; places left empty lead to nothing."""

    shape: int
    unary: bool  # all right children are the constant 1, and are left out of the products
    rule: Tensor  # [tiles]: among those of the shape
    edge: Tensor  # [tiles, width]
    parent: Tensor
    left: Tensor
    right: Tensor

    def parts(self, size: int) -> Iterator["Tiles"]:
        """So many tiles at a time."""
        if size >= len(self.rule):
            yield self
            return
        columns = (self.rule, self.edge, self.parent, self.left, self.right)
        for part in zip(*(column.split(size) for column in columns), strict=True):
            yield Tiles(self.shape, self.unary, *part)


@dataclass(frozen=True, eq=False)
class Level:
    tiles: list[Tiles]
    nodes: Tensor  # those that it computes
    parent: Tensor  # [edges]: among them
    left: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """alpha [nodes + 2, states] and the exponents [nodes + 2] it counts with; log Z of each sentence, float64."""

    alpha: Tensor
    exponent: Tensor
    log_z: Tensor


@dataclass(frozen=True, eq=False)
class Tensors:
    """T of some rules, [rules, x, y * z]."""

    values: Tensor

    def of(self, rule: Tensor) -> "Tensors":
        return Tensors(self.values.index_select(0, rule))

    def parents(self, *children: Tensor) -> Tensor:
        """T(y2, y3): [tiles, width, y] and [tiles, width, z] -> [tiles, width, x]."""
        return torch.bmm(_outer(*children), self.values.transpose(1, 2))

    def best_parents(self, *children: Tensor) -> Tensor:
        """The same with the largest product instead of the sum."""
        outer = _outer(*children)
        return torch.stack([(outer * row.unsqueeze(1)).amax(2) for row in self.values.unbind(1)], 2)

    def children(self, rows: Tensor, left: Tensor, right: Tensor | None = None) -> tuple[Tensor, ...]:
        """T_(1,3)(y1, y3) and T_(1,2)(y1, y2): [tiles, width, x] -> [tiles, width, y] and [tiles, width, z]."""
        outer = torch.bmm(rows, self.values)
        if right is None:
            return (outer,)
        outer = outer.unflatten(2, (left.shape[2], -1))
        into_left = torch.matmul(outer, right.unsqueeze(3)).squeeze(3)
        return into_left, torch.matmul(left.unsqueeze(2), outer).squeeze(2)

    def totals(self, rows: Tensor, *children: Tensor) -> Tensor:
        """T applied to all three, [tiles, width]."""
        return (torch.bmm(rows, self.values) * _outer(*children)).sum(2)


@dataclass(frozen=True, eq=False)
class KruskalForms:
    """The same in Kruskal form: U [rules, rank, x], V [rules, rank, y], W [rules, rank, z]."""

    factors: Factors

    def of(self, rule: Tensor) -> "KruskalForms":
        return KruskalForms(self.factors.map(lambda factor: factor.index_select(0, rule)))

    def parents(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self._lanes(left, right)
        return torch.bmm(left.mul_(right), self.factors.u)

    def best_parents(self, *children: Tensor) -> Tensor:
        raise AssertionError("derivations are those of tensors: `Grammar.expanded`")

    def children(self, rows: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        (left, right), lanes = self._lanes(left, right), torch.bmm(rows, self.factors.u.transpose(1, 2))
        return torch.bmm(right.mul_(lanes), self.factors.v), torch.bmm(left.mul_(lanes), self.factors.w)

    def totals(self, rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
        left, right = self._lanes(left, right)
        return left.mul_(right).mul_(torch.bmm(rows, self.factors.u.transpose(1, 2))).sum(2)

    def _lanes(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """V y2 and W y3, [tiles, width, rank]."""
        return torch.bmm(left, self.factors.v.transpose(1, 2)), torch.bmm(right, self.factors.w.transpose(1, 2))


Weights = list[Tensors | KruskalForms]


def _outer(left: Tensor, right: Tensor | None = None) -> Tensor:
    """[tiles, width, y * z]"""
    if right is None:
        return left
    return (left.unsqueeze(3) * right.unsqueeze(2)).flatten(2)


class Plan:
    """How to compute a forest under rules of given sizes [rules, (x, y, z)], some of them in Kruskal form."""

    def __init__(self, forest: Forest, sizes: Tensor, factored: RuleFactors | None = None) -> None:
        self.forest, self.device, self.factored = forest, forest.rule.device, factored
        self.widest = int(sizes.max())
        level, rule, *columns = (
            column.cpu().numpy() for column in (forest.level, forest.rule, forest.parent, forest.left, forest.right)
        )
        # Only the rules that occur are laid out, and are numbered anew.
        used, rule = np.unique(rule, return_inverse=True)
        size = np.pad(sizes.cpu().numpy(), ((0, 0), (0, 1)))
        volume, form = size[:, :3].prod(1), np.zeros(len(size), dtype=np.int64)  # a rule's place among Kruskal forms
        if factored is not None:
            compressed = factored.rules.cpu().numpy()
            form[compressed] = np.arange(len(compressed))
            volume[compressed], size[compressed, 3] = 0, factored.factors.rank
        starts = np.append(0, volume.cumsum())
        size, self.size = size[used], int(starts[-1])
        columns = [np.append(column, forest.nodes) for column in columns]  # the edge past the last leads to nothing
        self.shapes, shape_of = _shapes(size, rule, level)
        within = np.zeros(len(size), dtype=np.int64)  # a rule's place among those of its shape
        self.rules, self.layouts = [], []  # for each shape
        for i, (*_, rank) in enumerate(self.shapes):
            rules = np.flatnonzero(shape_of == i)
            within[rules] = np.arange(len(rules))
            self.rules.append(self._tensor(used[rules]))
            start = form if rank else starts
            layout = np.column_stack([start[used[rules]], size[rules, :3]])  # [rules, (start, x, y, z)]
            self.layouts.append(self._tensor(layout.astype(np.int32 if self.size < 2**31 else np.int64)))

        def tiled(edges: np.ndarray) -> Tiles:
            """Of edges sorted by rule."""
            shape = int(shape_of[rule[edges[0]]])
            *_, z, rank = self.shapes[shape]
            tile, slot, tile_rule, width = _tiled(rule[edges], NARROW if rank else 1)
            table = np.full((len(tile_rule), width), len(rule))
            table[tile, slot] = edges
            found = (within[tile_rule], table, *(column[table] for column in columns))
            unary = z == 1 and bool((columns[2][edges] == forest.nodes + 1).all())
            return Tiles(shape, unary, *map(self._tensor, found))

        def groups(order: np.ndarray, key: np.ndarray) -> list[np.ndarray]:
            changes = np.flatnonzero(np.diff(key[order])) + 1
            return [group for group in np.split(order, changes) if len(group)]

        shape = shape_of[rule]
        self.levels = []
        for edges in groups(np.lexsort((rule, shape, level)), level):
            nodes, parent = np.unique(columns[0][edges], return_inverse=True)
            left, right = (column[edges] for column in columns[1:])
            tiles = [tiled(group) for group in groups(edges, shape)]
            self.levels.append(Level(tiles, *map(self._tensor, (nodes, parent, left, right))))
        self.by_rule = [tiled(group) for group in groups(np.lexsort((rule, shape)), shape)]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def weights(self, rules: Tensor, dtype: torch.dtype) -> Weights:
        """The rules of each shape, from the tensors of all that have one, end to end."""
        weights: Weights = []
        for (x, y, z, rank), layout in zip(self.shapes, self.layouts, strict=True):
            if rank and self.factored is not None:
                u, v, w = (
                    factor.index_select(0, layout[:, 0]).narrow(2, 0, size).to(dtype)
                    for factor, size in zip(vars(self.factored.factors).values(), (x, y, z), strict=True)
                )
                weights.append(KruskalForms(Factors(u, v, w)))
            else:
                weights.append(Tensors(rules.new_empty(len(layout), x, y * z, dtype=dtype)))
        for part, place in self._parts(weights):
            values = rules.index_select(0, place.clamp_max(self.size - 1).flatten()).view(place.shape)
            part.copy_(torch.where(place < self.size, values, 0))
        return weights

    def flat(self, weights: Weights) -> Tensor:
        """Backwards through `weights`; rules that do not occur are 0."""
        rules = torch.zeros(self.size + 1, dtype=torch.float64, device=self.device)
        for part, place in self._parts(weights):
            rules.index_copy_(0, place.flatten().long(), part.flatten())
        return rules[:-1]

    def _parts(self, weights: Weights) -> Iterator[tuple[Tensor, Tensor]]:
        """Of tensors as `weights` makes them a few rules at a time, and their places: all would fill the memory."""
        for shape, layout, some in zip(self.shapes, self.layouts, weights, strict=True):
            if isinstance(some, Tensors):
                size = max(1, CHUNK // math.prod(shape[:3]))
                for part, layouts in zip(some.values.split(size), layout.split(size), strict=True):
                    yield part, self._places(shape, layouts)

    def _places(self, shape: Shape, layout: Tensor) -> Tensor:
        """[rules, x, y * z]: where the numbers of padded tensors stand in those that are end to end."""
        x, y, z = (torch.arange(size, dtype=layout.dtype, device=self.device) for size in shape[:3])
        x, y = x.view(-1, 1, 1), y.view(-1, 1)
        start, mx, my, mz = layout.view(-1, 4, 1, 1, 1).unbind(1)
        inside = (x < mx) & (y < my) & (z < mz)
        return torch.where(inside, start + (x * my + y) * mz + z, self.size).flatten(2)

    def inside(self, weights: Weights, leaf: Tensor, best: bool = False) -> Scores:
        """`leaf` is [leaves, states]. With `best`, the best derivations instead of the sum of all."""
        forest = self.forest
        alpha = leaf.new_zeros(forest.nodes + 2, self.widest)
        exponent = leaf.new_full((forest.nodes + 2,), NOTHING)  # a node that no edge leads to stays so
        alpha[-1, 0], exponent[-1] = 1, 0
        alpha.narrow(1, 0, leaf.shape[1]).index_copy_(0, forest.leaves, leaf)

        base = torch.zeros_like(exponent)  # of nodes, before they are normalised

        def normalise(nodes: Tensor) -> None:
            rows = alpha.index_select(0, nodes)
            largest = rows.abs().amax(1)
            shift = largest.log2().floor().clamp_min(-100)
            alpha.index_copy_(0, nodes, rows * torch.exp2(-shift).unsqueeze(1))
            exponent.index_copy_(0, nodes, torch.where(largest > 0, shift + base.index_select(0, nodes), NOTHING))

        normalise(forest.leaves)
        for level in self.levels:
            known = exponent.index_select(0, level.left) + exponent.index_select(0, level.right)
            largest = known.new_full((len(level.nodes),), 2 * NOTHING).scatter_reduce_(0, level.parent, known, "amax")
            base.index_copy_(0, level.nodes, largest)
            for tiles in self._steps(level.tiles):
                rows = self._rows(tiles, weights, alpha, exponent, base, best).flatten(0, 1)
                cells, parent = alpha.narrow(1, 0, rows.shape[1]), tiles.parent.flatten()
                if best:
                    cells.scatter_reduce_(0, parent.unsqueeze(1).expand_as(rows), rows, "amax")
                else:
                    cells.index_add_(0, parent, rows)
            alpha[-2] = 0
            normalise(level.nodes)
        top = alpha[forest.tops, 0].double().clamp_min(0)  # a sum below zero is an error of the approximation
        return Scores(alpha, exponent, top.log() + math.log(2) * exponent[forest.tops].double())

    def outside(self, weights: Weights, scores: Scores, gradient: Tensor) -> Tensor:
        """beta [nodes + 2, states]: the derivative of log Z, times `gradient` [sentences], by alpha."""
        forest, alpha = self.forest, scores.alpha
        beta = torch.zeros_like(alpha)
        top = alpha[forest.tops, 0]
        beta[forest.tops, 0] = torch.where(top > 0, gradient.to(alpha.dtype) / top, 0)
        for level in reversed(self.levels):
            for tiles in self._steps(level.tiles):
                rows, children = self._gradients(tiles, beta, scores.exponent), self._children(tiles, alpha)
                found = weights[tiles.shape].of(tiles.rule).children(rows, *children)
                for child, part in zip((tiles.left, tiles.right), found, strict=False):
                    beta.narrow(1, 0, part.shape[2]).index_add_(0, child.flatten(), part.flatten(0, 1))
        beta[-2:] = 0
        return beta

    def rule_gradients(self, scores: Scores, beta: Tensor) -> Tensor:
        """d log Z / d rules, summed over all edges in float64."""
        total = torch.zeros(self.size + 1, dtype=torch.float64, device=self.device)
        for tiles in self._steps(self.by_rule):
            rows = self._gradients(tiles, beta, scores.exponent)
            found = torch.bmm(rows.transpose(1, 2), _outer(*self._children(tiles, scores.alpha)))
            place = self._places(self.shapes[tiles.shape], self.layouts[tiles.shape].index_select(0, tiles.rule))
            total.index_add_(0, place.flatten(), found.flatten().double())
        return total[:-1]

    def edge_posteriors(self, weights: Weights, scores: Scores, beta: Tensor) -> Tensor:
        """[edges]: sum over states of O(parent) T I(left) I(right) / Z."""
        posterior = beta.new_zeros(len(self.forest.rule) + 1)
        for tiles in self._steps(self.by_rule):
            rows, children = self._gradients(tiles, beta, scores.exponent), self._children(tiles, scores.alpha)
            found = weights[tiles.shape].of(tiles.rule).totals(rows, *children)
            posterior.index_copy_(0, tiles.edge.flatten(), found.flatten())
        return posterior[:-1]

    def _steps(self, batches: Iterable[Tiles]) -> Iterator[Tiles]:
        for tiles in batches:
            x, y, z, rank = self.shapes[tiles.shape]
            width = tiles.edge.shape[1]
            each = (rank + width) * (x + y + z) if rank else y * z * (x + width)
            yield from tiles.parts(max(1, CHUNK // each))

    def _rows(
        self, tiles: Tiles, weights: Weights, alpha: Tensor, exponent: Tensor, base: Tensor, best: bool
    ) -> Tensor:
        """What each edge brings to its parent, [tiles, width, x], with the exponents `base`."""
        rules, children = weights[tiles.shape].of(tiles.rule), self._children(tiles, alpha)
        rows = rules.best_parents(*children) if best else rules.parents(*children)
        return rows * self._factor(tiles, exponent, base)

    def _gradients(self, tiles: Tiles, beta: Tensor, exponent: Tensor) -> Tensor:
        """Backwards through `_rows`, with the exponents that were found, [tiles, width, x]."""
        rows = beta.index_select(0, tiles.parent.flatten())[:, : self.shapes[tiles.shape][0]]
        return rows.view(*tiles.edge.shape, -1) * self._factor(tiles, exponent, exponent)

    def _factor(self, tiles: Tiles, exponent: Tensor, base: Tensor) -> Tensor:
        """[tiles, width, 1]: from the exponents of the children to that of the parent."""
        known = exponent[tiles.left] if tiles.unary else exponent[tiles.left] + exponent[tiles.right]
        return torch.exp2((known - base[tiles.parent]).clamp_max(120)).unsqueeze(2)

    def _children(self, tiles: Tiles, alpha: Tensor) -> tuple[Tensor, ...]:
        """[tiles, width, y] and [tiles, width, z], or the first alone."""
        _, y, z, _ = self.shapes[tiles.shape]
        sides = ((tiles.left, y),) if tiles.unary else ((tiles.left, y), (tiles.right, z))
        return tuple(
            alpha.index_select(0, child.flatten()).view(*child.shape, -1).narrow(2, 0, size) for child, size in sides
        )


def _shapes(sizes: np.ndarray, rule: np.ndarray, level: np.ndarray) -> tuple[list[Shape], np.ndarray]:
    """A few shapes, and the one that each rule is padded to: two are joined where that costs less than a batch."""
    widest = sizes[:, :3].max(initial=1)
    rounded = np.minimum(2 ** np.ceil(np.log2(sizes[:, :3])).astype(np.int64), widest)
    rounded = np.column_stack([rounded, sizes[:, 3]])
    shapes, shape_of = np.unique(rounded, axis=0, return_inverse=True)
    shape_of = shape_of.reshape(-1)
    edges = np.bincount(shape_of[rule], minlength=len(shapes)).astype(np.float64)
    levels = np.zeros((len(shapes), int(level.max(initial=0)) + 1), dtype=bool)
    levels[shape_of[rule], level] = True
    while len(shapes) > 1:
        union = np.maximum(shapes[:, None], shapes[None])  # [shapes, shapes, 4]
        cost = edges * _multiplications(shapes)
        padding = (edges[:, None] + edges[None]) * _multiplications(union) - cost[:, None] - cost[None]
        saved = BATCH * (levels[:, None] & levels[None]).sum(2)
        other = np.eye(len(shapes), dtype=bool) | (shapes[:, None, 3] != shapes[None, :, 3])
        gain = np.where(other, -np.inf, saved - padding)
        i, j = sorted(np.unravel_index(gain.argmax(), gain.shape))
        if gain[i, j] < 0:
            break
        shapes[i], edges[i], levels[i] = union[i, j], edges[i] + edges[j], levels[i] | levels[j]
        shapes, edges, levels = (np.delete(array, j, 0) for array in (shapes, edges, levels))
        shape_of = np.where(shape_of == j, i, shape_of - (shape_of > j))
    return [(x, y, z, rank) for x, y, z, rank in shapes.tolist()], shape_of


def _multiplications(shapes: np.ndarray) -> np.ndarray:
    """Of an edge, [..., 4] -> [...]."""
    sizes, rank = shapes[..., :3], shapes[..., 3]
    return np.where(rank > 0, rank * sizes.sum(-1), sizes.prod(-1))


def _tiled(rule: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """For edges sorted by rule the tile and the place in it of each, the rule of each tile, and the width: a share of
    the mean number of edges of a rule."""
    rules, first, counts = np.unique(rule, return_index=True, return_counts=True)
    width = math.ceil(share * len(rule) / len(rules))
    tiles = -(-counts // width)
    rank = np.arange(len(rule)) - np.repeat(first, counts)
    tile = np.repeat(tiles.cumsum() - tiles, counts) + rank // width
    return tile, rank % width, np.repeat(rules, tiles), width


def log_likelihood(plan: Plan, rules: Tensor, leaf: Tensor) -> Tensor:
    """log Z of each sentence of a forest, float64; differentiable once.

    `rules` are all rule tensors end to end, `leaf` [leaves, states] the Q of each leaf, whose type is that of the
    computation; the derivative by float64 rules is summed up as such. Parameter times derivative is the expected
    count.
    """
    total: Tensor = _LogLikelihood.apply(plan, rules, leaf)
    return total


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, rules: Tensor, leaf: Tensor) -> Tensor:
        ctx.plan, ctx.weights = plan, plan.weights(rules, leaf.dtype)
        ctx.scores = plan.inside(ctx.weights, leaf)
        # A copy: `ctx` and its own output would keep each other, and all the weights, alive.
        log_z: Tensor = ctx.scores.log_z.clone()
        return log_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan, scores, leaves = ctx.plan, ctx.scores, ctx.plan.forest.leaves
        beta = plan.outside(ctx.weights, scores, gradient)
        by_leaf = beta[leaves] * torch.exp2(-scores.exponent[leaves].clamp_min(-120)).unsqueeze(1)
        return None, plan.rule_gradients(scores, beta), by_leaf
