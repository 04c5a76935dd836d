"""Inside and outside on packed forests: lists of nodes, and of edges node -> left, right by a rule.

    alpha(leaf) = Q^{a -> x},     alpha(node) = sum over its edges of T(alpha(left), alpha(right))
    beta(top) = 1 / Z,            beta(left) += T_(1,3)(beta(node), alpha(right)), and so for the right

The skeletal trees of a treebank are a forest in which each node has one edge (Matsuzaki et al. 2005: EM); what a
coarse grammar leaves of a chart is another (Petrov & Klein 2007: coarse to fine). Sentences may differ in length.

Edges of one level are computed together, as products of batches of matrices: the edges of one rule stand in tiles
of one width, with the rule's tensor once a tile. The width is the mean number of edges a rule has there, so that
neither the padding of tiles nor the tensors more than double. Rules are padded to a few shapes, as few as pay.

A rule may be in CP form (Cohen & Collins 2012), T(y2, y3) = U^T (V y2 * W y3): r (x + y + z) multiplications an
edge instead of x y z, and as many fewer numbers to fetch for each tile.

A unary rule is a binary one whose right child is the constant 1, and the root distribution is the unary rules of
a node on top, which has one state. Each node has an exponent of its own: single trees stray too far from one scale
for a sentence, as charts have it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lvpcfg.chart.forest.tiles import CPTiles, Shape, Tensors, Tiles, Weights, outer, pick
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rules import within_padding

BATCH = 250_000  # what another batch of edges costs, in multiplications
CHUNK = 1 << 20  # numbers held by one step
NARROW = 0.7  # of the mean number of edges of a rule: tiles of CP forms, which have less to fetch for each
SMALL = 8  # multiplications of an edge: where there are no more, each edge is a tile
NOTHING = -1e9  # the exponent of a node without derivations


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
class Level:
    """Edges that can be computed together, and the nodes they lead to."""

    tiles: list[Tiles]
    begin: int  # their first place in the `Layout`
    places: int
    nodes: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Edges in tiles, by level; places left empty lead to nothing."""

    edge: Tensor  # [places]; one past the last where there is none
    parent: Tensor
    left: Tensor
    right: Tensor
    tiles: list[list[Tiles]]  # of each level


@dataclass(frozen=True, eq=False)
class Scores:
    """alpha [nodes + 2, states] and the exponents [nodes + 2] it counts with; log Z of each sentence, float64; what was
    projected, by the first place of the tiles."""

    alpha: Tensor
    exponent: Tensor
    log_z: Tensor
    projected: dict[int, tuple[Tensor, ...]]


class Plan:
    """How to compute a forest under rules of given sizes [rules, (x, y, z)], some of them in CP form."""

    def __init__(self, forest: Forest, sizes: Tensor, cp: RuleCP | None = None) -> None:
        self.forest, self.device, self.cp = forest, forest.rule.device, cp
        self.widest = int(sizes.max())
        # Only the rules that occur are laid out, and are numbered anew.
        occurs = torch.zeros(len(sizes), dtype=torch.int64, device=self.device).index_fill_(0, forest.rule, 1)
        used = occurs.nonzero().squeeze(1)
        self.rule = pick(occurs.cumsum(0) - 1, forest.rule)
        sizes, volume = torch.nn.functional.pad(sizes, (0, 1)), sizes.prod(1)
        form = torch.zeros_like(volume)  # a rule's place among CP forms
        if cp is not None:
            form[cp.cp_rules] = torch.arange(len(cp.cp_rules), device=self.device)
            volume[cp.cp_rules], sizes[cp.cp_rules, 3] = 0, cp.factors.rank
        starts = volume.cumsum(0) - volume
        self.size = int(volume.sum())
        depths = torch.bincount(forest.level).nonzero().squeeze(1)
        level = torch.searchsorted(depths, forest.level)
        self.shapes, self.shape_of = _shapes(sizes[used], self.rule, level)
        self.within = torch.zeros_like(self.shape_of)  # a rule's place among those of its shape
        self.rules, self.tensors = [], []  # for each shape, [rules] and [rules, (start, x, y, z)]
        for shape, (*_, rank) in enumerate(self.shapes):
            rules = (self.shape_of == shape).nonzero().squeeze(1)
            self.within[rules] = torch.arange(len(rules), device=self.device)
            rules = used[rules]
            start = form if rank else starts
            table = torch.cat([start[rules].unsqueeze(1), sizes[rules, :3]], 1)
            self.rules.append(rules)
            self.tensors.append(table.to(torch.int32 if self.size < 2**31 else torch.int64))
        self.layout = self._laid_out(level, len(depths))
        depth = torch.full((forest.nodes + 2,), len(depths), device=self.device).index_copy_(0, forest.parent, level)
        nodes = depth.argsort(stable=True).split(torch.bincount(depth, minlength=len(depths) + 1).tolist())
        self.levels = [
            Level(tiles, tiles[0].begin, tiles[-1].end - tiles[0].begin, some)
            for tiles, some in zip(self.layout.tiles, nodes, strict=False)
        ]

    @cached_property
    def _by_rule(self) -> Layout:
        """Edges of all levels together."""
        return self._laid_out(torch.zeros_like(self.rule), 1)

    def _laid_out(self, level: Tensor, levels: int) -> Layout:
        """Edges are sorted by level and shape, then by rule, if there is more than one edge in a tile."""
        forest, shapes, edges = self.forest, len(self.shapes), len(self.rule)
        small = torch.tensor(
            [bool(_multiplications(np.array(shape)) <= SMALL) for shape in self.shapes],
            dtype=torch.bool,
            device=self.device,
        )
        share = torch.tensor([NARROW if rank else 1.0 for *_, rank in self.shapes], device=self.device)
        by_rule = torch.where(small[self.shape_of], 0, torch.arange(len(self.shape_of), device=self.device))
        key = (level * shapes + pick(self.shape_of, self.rule)) * len(self.shape_of) + pick(by_rule, self.rule)
        key, order = key.sort()
        run, size = key.unique_consecutive(return_inverse=True, return_counts=True)[1:]  # edges of one rule
        first = size.cumsum(0) - size
        group = key[first] // len(self.shape_of)  # of each run
        # The width of a group's tiles, and how many each run takes.
        in_group, runs = (
            torch.bincount(group, weights, minlength=levels * shapes) for weights in (size.double(), None)
        )
        shape = torch.arange(shapes, device=self.device).repeat(levels)
        width = torch.where(small[shape], 1, (share[shape] * in_group / runs.clamp_min(1)).ceil().long())
        tiles = -(-size // width[group])
        first_tile = tiles.cumsum(0) - tiles
        tiles_in_group = torch.bincount(group, tiles.double(), minlength=levels * shapes).long()
        group_tile = tiles_in_group.cumsum(0) - tiles_in_group
        spaces = tiles_in_group * width
        begin = spaces.cumsum(0) - spaces
        # The first place of each run, and from there on its edges.
        start = begin[group] + (first_tile - group_tile[group]) * width[group]
        place = pick(start - first, run) + torch.arange(edges, device=self.device)
        edge = torch.full((int(spaces.sum()),), edges, device=self.device).index_copy_(0, place, order)
        nothing = forest.rule.new_full((1,), forest.nodes)
        parent, left, right = (
            pick(torch.cat([column, nothing]), edge) for column in (forest.parent, forest.left, forest.right)
        )
        of_tile = torch.repeat_interleave(tiles_in_group)
        head = torch.arange(len(of_tile), device=self.device) - pick(group_tile, of_tile)
        head = pick(begin, of_tile) + head * pick(width, of_tile)
        rules = pick(self.within, pick(self.rule, pick(edge, head)))
        binary = torch.bincount(
            pick(group, run), pick(forest.right, order) != forest.nodes + 1, minlength=levels * shapes
        )
        found: list[list[Tiles]] = [[] for _ in range(levels)]
        for number, (count, some, each, at, two) in enumerate(
            zip(
                tiles_in_group.tolist(),
                rules.split(tiles_in_group.tolist()),
                width.tolist(),
                begin.tolist(),
                binary.tolist(),
                strict=True,
            )
        ):
            if count:
                unary = self.shapes[number % shapes][2] == 1 and not two
                found[number // shapes].append(Tiles(number % shapes, unary, some, each, at))
        return Layout(edge, parent, left, right, found)

    def weights(self, rules: Tensor, dtype: torch.dtype) -> Weights:
        """The rules of each shape, from the tensors of all that have one, end to end."""
        weights: Weights = []
        for (x, y, z, rank), layout in zip(self.shapes, self.tensors, strict=True):
            if rank and self.cp is not None:
                u, v, w = (
                    factor.index_select(0, layout[:, 0]).narrow(2, 0, size).to(dtype)
                    for factor, size in zip((self.cp.u, self.cp.v, self.cp.w), (x, y, z), strict=True)
                )
                weights.append(CPTiles(Factors(u, v, w)))
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
        for shape, layout, some in zip(self.shapes, self.tensors, weights, strict=True):
            if isinstance(some, Tensors):
                size = max(1, CHUNK // math.prod(shape[:3]))
                for part, layouts in zip(some.values.split(size), layout.split(size), strict=True):
                    yield part, self._places(shape, layouts)

    def _places(self, shape: Shape, layout: Tensor) -> Tensor:
        """[rules, x, y * z]: where the numbers of padded tensors stand in those that are end to end."""
        return within_padding(layout[:, 0], layout[:, 1:], shape[:3], self.size).flatten(2)

    def inside(self, weights: Weights, leaf: Tensor, best: bool = False) -> Scores:
        """`leaf` is [leaves, states]. With `best`, the best derivations instead of the sum of all."""
        forest, layout = self.forest, self.layout
        alpha = leaf.new_zeros(forest.nodes + 2, self.widest)
        exponent = leaf.new_full((forest.nodes + 2,), NOTHING)  # a node that no edge leads to stays so
        alpha[-1, 0], exponent[-1] = 1, 0
        place = torch.zeros(forest.nodes + 2, dtype=torch.int64, device=self.device)  # of a node, in its level
        projected: dict[int, tuple[Tensor, ...]] = {}

        def write(nodes: Tensor, rows: Tensor, base: Tensor) -> None:
            largest = rows.abs().amax(1)
            shift = largest.log2().floor().clamp_min(-100)
            alpha.narrow(1, 0, rows.shape[1]).index_copy_(0, nodes, rows * torch.exp2(-shift).unsqueeze(1))
            exponent.index_copy_(0, nodes, torch.where(largest > 0, shift + base, NOTHING))

        write(forest.leaves, leaf, exponent.new_zeros(()))
        for level in self.levels:
            size = len(level.nodes)
            place[-2] = size  # what leads to nothing
            place.index_copy_(0, level.nodes, torch.arange(size, device=self.device))
            parent, left, right = (
                column.narrow(0, level.begin, level.places) for column in (layout.parent, layout.left, layout.right)
            )
            parent = place.index_select(0, parent)
            known = exponent.index_select(0, left) + exponent.index_select(0, right)
            base = known.new_full((size + 1,), 2 * NOTHING).scatter_reduce_(0, parent, known, "amax")
            factor = torch.exp2(known - base.index_select(0, parent))
            cells = alpha.new_zeros(size + 1, self.widest)
            for tiles in self._steps(level.tiles):
                rules, children = weights[tiles.shape].of(tiles.rule), self._children(tiles, layout, alpha)
                if isinstance(rules, CPTiles):
                    children = projected[tiles.begin] = rules.project(*children)
                rows = (rules.best_parents(*children) if best else rules.parents(*children)).flatten(0, 1)
                at = tiles.begin - level.begin
                rows *= factor.narrow(0, at, len(rows)).unsqueeze(1)
                into, of = cells.narrow(1, 0, rows.shape[1]), parent.narrow(0, at, len(rows))
                if best:
                    into.scatter_reduce_(0, of.unsqueeze(1).expand_as(rows), rows, "amax")
                else:
                    into.index_add_(0, of, rows)
            write(level.nodes, cells.narrow(0, 0, size), base.narrow(0, 0, size))
        top = alpha[forest.tops, 0].double().clamp_min(0)  # a sum below zero is an error of the approximation
        return Scores(alpha, exponent, top.log() + math.log(2) * exponent[forest.tops].double(), projected)

    def outside(self, weights: Weights, scores: Scores, gradient: Tensor, edges: Tensor | None = None) -> Tensor:
        """beta [nodes + 2, states]: the derivative of log Z, times `gradient` [sentences], by alpha.

        `edges` [edges + 1] is filled with the posteriors of edges, sum over states of O(parent) T I(left) I(right) / Z.
        """
        forest, layout, alpha = self.forest, self.layout, scores.alpha
        beta = torch.zeros_like(alpha)
        top = alpha[forest.tops, 0]
        beta[forest.tops, 0] = torch.where(top > 0, gradient.to(alpha.dtype) / top, 0)
        factor = self._factor(layout, scores.exponent)
        posterior = None if edges is None else torch.empty_like(factor)
        for level in reversed(self.levels):
            for tiles in self._steps(level.tiles):
                children = scores.projected.get(tiles.begin) or self._children(tiles, layout, alpha)
                rules, rows = weights[tiles.shape].of(tiles.rule), self._gradients(tiles, layout, beta, factor)
                total, found = rules.children(rows, *children)
                for child, part in zip((layout.left, layout.right), found, strict=False):
                    beta.narrow(1, 0, part.shape[2]).index_add_(0, tiles.of(child), part.flatten(0, 1))
                if posterior is not None:
                    tiles.of(posterior).copy_(total.flatten())
        if edges is not None and posterior is not None:
            edges.index_copy_(0, layout.edge, posterior)
        beta[-2:] = 0
        return beta

    def rule_gradients(self, weights: Weights, scores: Scores, beta: Tensor) -> list[Tensor]:
        """d log Z / d rules, and by the factors of CP forms, summed over all edges in float64."""
        layout = self._by_rule
        total = torch.zeros(self.size + 1, dtype=torch.float64, device=self.device)
        factors = [] if self.cp is None else [*map(torch.zeros_like, (self.cp.u, self.cp.v, self.cp.w))]
        factor = self._factor(layout, scores.exponent)
        for tiles in self._steps(layout.tiles[0]):
            rows, children = self._gradients(tiles, layout, beta, factor), self._children(tiles, layout, scores.alpha)
            rules, tensors = weights[tiles.shape], self.tensors[tiles.shape].index_select(0, tiles.rule)
            if isinstance(rules, CPTiles):
                for into, found in zip(factors, rules.of(tiles.rule).gradients(rows, *children), strict=True):
                    into.narrow(2, 0, found.shape[2]).index_add_(0, tensors[:, 0], found.to(into.dtype))
                continue
            found = torch.bmm(rows.transpose(1, 2), outer(*children))
            place = self._places(self.shapes[tiles.shape], tensors)
            total.index_add_(0, place.flatten(), found.flatten().double())
        return [total[:-1], *factors]

    def _steps(self, batches: Iterable[Tiles]) -> Iterator[Tiles]:
        for tiles in batches:
            x, y, z, rank = self.shapes[tiles.shape]
            each = (rank + tiles.width) * (x + y + z) if rank else y * z * (x + tiles.width)
            yield from tiles.parts(max(1, CHUNK // each))

    def _factor(self, layout: Layout, exponent: Tensor) -> Tensor:
        """[places]: from the exponents of the children to that of the parent."""
        known = exponent.index_select(0, layout.left) + exponent.index_select(0, layout.right)
        return torch.exp2((known - exponent.index_select(0, layout.parent)).clamp_max_(120))

    def _gradients(self, tiles: Tiles, layout: Layout, beta: Tensor, factor: Tensor) -> Tensor:
        """What parents hand on to edges, [tiles, width, x]."""
        rows = beta.index_select(0, tiles.of(layout.parent))[:, : self.shapes[tiles.shape][0]]
        return (rows * tiles.of(factor).unsqueeze(1)).view(len(tiles.rule), tiles.width, -1)

    def _children(self, tiles: Tiles, layout: Layout, alpha: Tensor) -> tuple[Tensor, ...]:
        """[tiles, width, y] and [tiles, width, z], or the first alone."""
        _, y, z, _ = self.shapes[tiles.shape]
        sides = ((layout.left, y),) if tiles.unary else ((layout.left, y), (layout.right, z))
        return tuple(
            alpha.index_select(0, tiles.of(child)).view(len(tiles.rule), tiles.width, -1).narrow(2, 0, size)
            for child, size in sides
        )


def _shapes(sizes: Tensor, rule: Tensor, level: Tensor) -> tuple[list[Shape], Tensor]:
    """A few shapes, and the one that each rule [rules, (x, y, z, rank)] is padded to: two are joined where that costs
    less than a batch. `rule` and `level` are those of the edges."""
    device, depth = sizes.device, int(level.max()) + 1 if len(level) else 1
    exact = sizes.cpu().numpy()
    rounded = np.minimum(2 ** np.ceil(np.log2(exact[:, :3])).astype(np.int64), exact[:, :3].max(initial=1))
    shapes, shape_of = np.unique(np.column_stack([rounded, exact[:, 3]]), axis=0, return_inverse=True)
    shape_of = shape_of.reshape(-1)
    here = torch.from_numpy(shape_of).to(device)[rule] * depth + level
    table = torch.bincount(here, minlength=len(shapes) * depth).view(len(shapes), depth).cpu().numpy()
    edges, levels = table.sum(1).astype(np.float64), table > 0
    while len(shapes) > 1:
        union = np.maximum(shapes[:, None], shapes[None])  # [shapes, shapes, 4]
        cost = edges * _multiplications(shapes)
        padding = (edges[:, None] + edges[None]) * _multiplications(union) - cost[:, None] - cost[None]
        saved = BATCH * (levels.astype(np.float32) @ levels.T.astype(np.float32))  # once for each level of both
        other = np.eye(len(shapes), dtype=bool) | (shapes[:, None, 3] != shapes[None, :, 3])
        gain = np.where(other, -np.inf, saved - padding)
        i, j = sorted(np.unravel_index(gain.argmax(), gain.shape))
        if gain[i, j] < 0:
            break
        shapes[i], edges[i], levels[i] = union[i, j], edges[i] + edges[j], levels[i] | levels[j]
        shapes, edges, levels = (np.delete(array, j, 0) for array in (shapes, edges, levels))
        shape_of = np.where(shape_of == j, i, shape_of - (shape_of > j))
    return [(x, y, z, rank) for x, y, z, rank in shapes.tolist()], torch.from_numpy(shape_of).to(device)


def _multiplications(shapes: np.ndarray) -> np.ndarray:
    """Of an edge, [..., 4] -> [...]."""
    sizes, rank = shapes[..., :3], shapes[..., 3]
    return np.where(rank > 0, rank * sizes.sum(-1), sizes.prod(-1))


def log_likelihood(plan: Plan, rules: Tensor, leaf: Tensor) -> Tensor:
    """log Z of each sentence of a forest, float64; differentiable once.

    `rules` are all rule tensors end to end, `leaf` [leaves, states] the Q of each leaf, whose type is that of the
    computation; the derivative by float64 rules is summed up as such. Parameter times derivative is the expected
    count. The factors of the plan's CP forms have derivatives too.
    """
    factors = () if plan.cp is None else (plan.cp.u, plan.cp.v, plan.cp.w)
    total: Tensor = _LogLikelihood.apply(plan, rules, leaf, *factors)
    return total


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, rules: Tensor, leaf: Tensor, *factors: Tensor) -> Tensor:
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
        by_rules, *by_factors = plan.rule_gradients(ctx.weights, scores, beta)
        return None, by_rules, by_leaf, *by_factors
