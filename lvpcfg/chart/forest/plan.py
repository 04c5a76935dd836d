"""Inside and outside on packed forests, as products of batches of matrices.

    alpha(leaf) = Q^{a -> x},     alpha(node) = sum over its edges of T(alpha(left), alpha(right))
    beta(top) = 1 / Z,            beta(left) += T_(1,3)(beta(node), alpha(right)), and so for the right

Edges of one level are computed together (`layout.py`). A unary rule is a binary one whose right child is the constant
1, and the root distribution is the unary rules of a node on top, which has one state.

A rule may be in CP form (Cohen & Collins 2012), T(y2, y3) = U^T (V y2 * W y3): r (x + y + z) multiplications an
edge instead of x y z, and as many fewer numbers to fetch for each tile.

Each node has its own exponent: alpha is in units of 2^exponent. One scale for a sentence, as in charts, would not be
enough: the numbers of single trees are too far from it. Numbers may be negative.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.layout import Layout, Shapes, laid_out
from lvpcfg.chart.forest.packed import Forest, Part
from lvpcfg.chart.forest.tiles import CPTiles, Shape, Tensors, Tiles, Weights
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.rules import RulesInCP, within_padding

CHUNK = 1 << 20  # numbers held by one step
IMPOSSIBLE = -1e9  # the exponent of a node that has no derivation, whatever the numbers are


@dataclass(frozen=True, eq=False)
class Level:
    """Edges that can be computed together, and the nodes they lead to."""

    tiles: list[Tiles]
    begin: int  # their first slot in the `Layout`
    slots: int
    nodes: Int[Tensor, "some"]


@dataclass(frozen=True, eq=False)
class Scores:
    """The inside scores of a forest."""

    alpha: Float[Tensor, "nodes_and_2 states"]  # in units of 2^exponent
    exponent: Float[Tensor, "nodes_and_2"]
    # By how many powers of two alpha was scaled up, and with it what was lost to underflow.
    raised: Float[Tensor, "nodes_and_2"]
    log_z: Float64[Tensor, "sentences"]  # log |Z|
    sign: Float64[Tensor, "sentences"]  # of Z
    projected: dict[int, tuple[Tensor, ...]]  # the children of edges, by the first slot of their tiles


class Plan:
    """How to compute a forest under rules of given sizes (x, y, z), some of them in CP form.

    With `most`, a node keeps that many of its states, those with the largest inside scores.
    """

    def __init__(
        self, forest: Forest, sizes: Int[Tensor, "rules 3"], cp: RulesInCP | None = None, most: int = 0
    ) -> None:
        self.forest, self.device, self.sizes, self.cp, self.most = forest, forest.rule.device, sizes, cp, most
        # Only the rules that occur are laid out, and are numbered anew.
        occurs = torch.zeros(len(sizes), dtype=torch.bool, device=self.device).index_fill_(0, forest.rule, True)
        used = true_indices(occurs)
        self.rule = take(occurs.long().cumsum(0) - 1, forest.rule)
        levels = torch.bincount(forest.level).nonzero().squeeze(1)  # that have edges
        level = torch.searchsorted(levels, forest.level.contiguous())
        volume, ranks = sizes.prod(1), torch.zeros_like(sizes[:, :1])
        form = torch.zeros_like(volume)  # the number of a rule among CP forms
        if cp is not None:
            form[cp.cp_rules] = torch.arange(len(cp.cp_rules), device=self.device)
            volume, ranks = volume.index_fill(0, cp.cp_rules, 0), ranks.index_fill(0, cp.cp_rules, cp.factors.rank)
        starts = volume.cumsum(0) - volume
        self.widest, self.size = torch.stack([sizes.amax(), volume.sum()]).tolist()
        self._shapes = Shapes.of(take(torch.cat([sizes, ranks], 1), used), self.rule, level, len(levels))
        self.shapes = self._shapes.shapes
        self.rules = [take(used, members) for members in self._shapes.members]  # for each shape
        self.tensors = [  # for each shape, [rules, (start, x, y, z)]
            torch.cat([take(form if rank else starts, rules).unsqueeze(1), take(sizes, rules)], 1).to(
                torch.int32 if self.size < 2**31 else torch.int64
            )
            for (*_, rank), rules in zip(self.shapes, self.rules, strict=True)
        ]
        self.layout = laid_out(forest, self._shapes, self.rule, level, len(levels))
        depth = torch.full((forest.nodes + 2,), len(levels), device=self.device).index_copy_(0, forest.parent, level)
        nodes = depth.argsort(stable=True).split(torch.bincount(depth, minlength=len(levels) + 1).tolist())
        self.levels = [
            Level(tiles, tiles[0].begin, tiles[-1].end - tiles[0].begin, some)
            for tiles, some in zip(self.layout.tiles, nodes, strict=False)
        ]

    @cached_property
    def _by_rule(self) -> Layout:
        """Edges of all levels together."""
        return laid_out(self.forest, self._shapes, self.rule, torch.zeros_like(self.rule), 1)

    def _kept(self, rows: Float[Tensor, "nodes states"]) -> Float[Tensor, "nodes states"]:
        """With zeros for all but the largest."""
        if not 0 < self.most < rows.shape[1]:
            return rows
        least = rows.abs().topk(self.most, 1).values[:, -1:]
        return torch.where(rows.abs() >= least, rows, 0)

    # Rules

    @property
    def shape_of_edges(self) -> tuple[Int[Tensor, "edges"], Int[Tensor, "edges"]]:
        """The shape of the rule of each edge, and which of the rules of that shape it is."""
        return take(self._shapes.shape_of, self.rule), take(self._shapes.within, self.rule)

    def weights(self, rules: Float[Tensor, "numbers"], dtype: torch.dtype) -> Weights:
        """The rules of each shape, from the tensors of all that have one, end to end."""
        weights: Weights = []
        for (x, y, z, rank), layout in zip(self.shapes, self.tensors, strict=True):
            if rank and self.cp is not None:
                factors = self.cp.factors
                u, v, w = (
                    take(factor, layout[:, 0]).narrow(2, 0, size).to(dtype)
                    for factor, size in zip((factors.u, factors.v, factors.w), (x, y, z), strict=True)
                )
                weights.append(CPTiles(Factors(u, v, w)))
            else:
                weights.append(Tensors(rules.new_empty(len(layout), x, y * z, dtype=dtype)))
        for part, place in self._tensor_parts(weights):
            values = take(rules, place.clamp_max(self.size - 1).flatten()).view(place.shape)
            part.copy_(torch.where(place < self.size, values, 0))
        return weights

    def flat(self, weights: Weights) -> Float64[Tensor, "numbers"]:
        """Backwards through `weights`; rules that do not occur are 0."""
        rules = torch.zeros(self.size + 1, dtype=torch.float64, device=self.device)
        for part, place in self._tensor_parts(weights):
            rules.index_copy_(0, place.flatten().long(), part.flatten())
        return rules[:-1]

    def _tensor_parts(self, weights: Weights) -> Iterator[tuple[Tensor, Tensor]]:
        """A few rules that are tensors at a time, and where their numbers stand: all would fill the memory."""
        for shape, layout, some in zip(self.shapes, self.tensors, weights, strict=True):
            if not shape[3]:
                size = max(1, CHUNK // math.prod(shape[:3]))
                for part, layouts in zip(some.written_out().values.split(size), layout.split(size), strict=True):
                    yield part, self._positions(shape, layouts)

    def _positions(self, shape: Shape, layout: Int[Tensor, "rules 4"]) -> Int[Tensor, "rules x yz"]:
        """The indices of the numbers of padded tensors among those of all tensors end to end."""
        return within_padding(layout[:, 0], layout[:, 1:], shape[:3], self.size).flatten(2)

    # Inside and outside

    def inside(
        self,
        weights: Weights,
        leaf: Float[Tensor, "leaves states"],
        best: bool = False,
        least: Float[Tensor, "nodes_and_2"] | None = None,
    ) -> Scores:
        """With `best`, the largest product instead of the sum of all: then the weights have to be written out.

        No score is below the `least` of its node, in the units in which it is computed.
        """
        forest, layout, limits = self.forest, self.layout, Limits.of(leaf.dtype)
        alpha = leaf.new_zeros(forest.nodes + 2, self.widest)
        exponent = leaf.new_full((forest.nodes + 2,), IMPOSSIBLE)  # a node that no edge leads to stays so
        # The exponents that parents are computed at depend on those of their children. A node that came out as 0 has
        # little say in it: it counts as if it were the smallest number there is.
        scale, raised = exponent.clone(), torch.zeros_like(exponent)
        alpha[-1, 0], exponent[-1], scale[-1] = 1, 0, 0
        number = torch.zeros(forest.nodes + 2, dtype=torch.int64, device=self.device)  # of a node in its level
        projected: dict[int, tuple[Tensor, ...]] = {}

        def write(nodes: Tensor, rows: Tensor, base: Tensor, if_zero: float) -> None:
            largest = rows.abs().amax(1)
            is_zero, shift = largest == 0, largest.log2().floor().clamp_min(limits.shift)
            shift.masked_fill_(is_zero, 0)
            alpha.narrow(1, 0, rows.shape[1]).index_copy_(0, nodes, rows * torch.exp2(-shift).unsqueeze(1))
            found = (base + shift).clamp_min_(IMPOSSIBLE)
            exponent.index_copy_(0, nodes, found)
            scale.index_copy_(0, nodes, torch.where(is_zero, (found + if_zero).clamp_min_(IMPOSSIBLE), found))
            raised.index_copy_(0, nodes, -shift)

        write(forest.leaves, leaf, exponent.new_zeros(()), IMPOSSIBLE)
        exponent.copy_(scale)  # words that are 0 are impossible,
        raised.zero_()  # and the others have lost nothing
        for level in self.levels:
            size = len(level.nodes)
            number[-2] = size  # where empty slots lead
            number.index_copy_(0, level.nodes, torch.arange(size, device=self.device))
            parent, left, right = (
                column.narrow(0, level.begin, level.slots) for column in (layout.parent, layout.left, layout.right)
            )
            parent = take(number, parent)
            known = take(scale, left) + take(scale, right)
            base = known.new_full((size + 1,), 2 * IMPOSSIBLE).scatter_reduce_(0, parent, known, "amax")
            factor = torch.exp2(known - take(base, parent))
            cells = alpha.new_zeros(size + 1, self.widest)
            for tiles in self.steps(level.tiles, weights):
                rules = weights[tiles.shape].of(tiles.rule)
                children = rules.project(*self.children(tiles, layout, alpha))
                if self.shapes[tiles.shape][3]:
                    projected[tiles.begin] = children
                rows = (rules.written_out().best_parents(*children) if best else rules.parents(*children)).flatten(0, 1)
                at = tiles.begin - level.begin
                rows *= factor.narrow(0, at, len(rows)).unsqueeze(1)
                into, of = cells.narrow(1, 0, rows.shape[1]), parent.narrow(0, at, len(rows))
                if best:
                    into.scatter_reduce_(0, of.unsqueeze(1).expand_as(rows), rows, "amax")
                else:
                    into.index_add_(0, of, rows)
            cells = self._kept(cells.narrow(0, 0, size))
            if least is not None:
                cells = torch.maximum(cells, take(least, level.nodes).unsqueeze(1))
            write(level.nodes, cells, base.narrow(0, 0, size), limits.smallest)
        top = take(alpha, forest.tops)[:, 0].double()
        log_z = top.abs().log() + math.log(2) * take(exponent, forest.tops).double()
        return Scores(alpha, exponent, raised, log_z, top.sign(), projected)

    def outside(
        self,
        weights: Weights,
        scores: Scores,
        gradient: Float[Tensor, "sentences"],
        edges: Float[Tensor, "edges_and_1"] | None = None,
    ) -> Float[Tensor, "nodes_and_2 states"]:
        """beta: the derivative of log |Z|, times `gradient`, by alpha.

        The posteriors of edges, sum over states of O(parent) T I(left) I(right) / Z, are written to `edges`.
        """
        forest, layout, alpha = self.forest, self.layout, scores.alpha
        beta = torch.zeros_like(alpha)
        top = take(alpha, forest.tops)[:, 0]
        beta[forest.tops, 0] = torch.where(top != 0, gradient.to(alpha.dtype) / top, 0)
        factor = self._factor(layout, scores.exponent)
        posterior = None if edges is None else torch.empty_like(factor)
        for level in reversed(self.levels):
            if self.most:
                kept = take(beta, level.nodes) * (take(alpha, level.nodes) != 0)
                beta.index_copy_(0, level.nodes, kept)
            for tiles in self.steps(level.tiles, weights):
                children = scores.projected.get(tiles.begin) or self.children(tiles, layout, alpha)
                rules, rows = weights[tiles.shape].of(tiles.rule), self._parents(tiles, layout, beta, factor)
                total, found = rules.children(rows, *children)
                for child, part in zip((layout.left, layout.right), found, strict=False):
                    beta.narrow(1, 0, part.shape[2]).index_add_(0, tiles.of(child), part.flatten(0, 1))
                if posterior is not None:
                    tiles.of(posterior).copy_(total.flatten())
        if edges is not None and posterior is not None:
            edges.index_copy_(0, layout.edge, posterior)
        beta[-2:] = 0
        return beta

    def out_of_range(self, scores: Scores, beta: Float[Tensor, "nodes_and_2 states"]) -> Bool[Tensor, "nodes_and_2"]:
        """Whose outside scores are not finite, or would not be at the exponent at which the node was computed. What the
        node lost to underflow may then matter (`fast/partition.py`)."""
        return ~(beta.abs().amax(1).log2() + scores.raised < Limits.of(beta.dtype).largest)

    def rule_gradients(
        self, weights: Weights, scores: Scores, beta: Float[Tensor, "nodes_and_2 states"]
    ) -> list[Tensor]:
        """d log |Z| / d rules, and by the factors of CP forms, summed over all edges in float64."""
        layout, totals = self._by_rule, self.no_gradients()
        factor = self._factor(layout, scores.exponent)
        for tiles in self.steps(layout.tiles[0], weights):
            rows, children = self._parents(tiles, layout, beta, factor), self.children(tiles, layout, scores.alpha)
            self.add_gradients(totals, tiles, weights[tiles.shape].of(tiles.rule).gradients(rows, *children))
        return [totals[0][:-1], *totals[1:]]

    def no_gradients(self) -> list[Tensor]:
        """Zeros: for all tensors end to end, and one more number, which takes the padding; and for the factors."""
        factors = [] if self.cp is None else [*vars(self.cp.factors).values()]
        total = torch.zeros(self.size + 1, dtype=torch.float64, device=self.device)
        return [total, *map(torch.zeros_like, factors)]

    def add_gradients(self, totals: list[Tensor], tiles: Tiles, found: list[Tensor]) -> None:
        """Those of the rules of some tiles: by the tensor [tiles, x, y * z], or by the three factors."""
        shape, tensors = self.shapes[tiles.shape], take(self.tensors[tiles.shape], tiles.rule)
        if shape[3]:
            for into, part in zip(totals[1:], found, strict=True):
                into.narrow(2, 0, part.shape[2]).index_add_(0, tensors[:, 0], part.to(into.dtype))
        else:
            totals[0].index_add_(0, self._positions(shape, tensors).flatten(), found[0].flatten().double())

    def steps(self, batches: Iterable[Tiles], weights: Weights) -> Iterator[Tiles]:
        """As many tiles at a time as there is room for."""
        for tiles in batches:
            yield from tiles.parts(max(1, CHUNK // weights[tiles.shape].numbers(tiles.width)))

    def _factor(self, layout: Layout, exponent: Tensor) -> Tensor:
        """[slots]: from the exponents of the children to that of the parent."""
        known, parent = take(exponent, layout.left) + take(exponent, layout.right), take(exponent, layout.parent)
        power = (known - parent).clamp_max_(Limits.of(exponent.dtype).largest - 1)  # more, and 0 would be no number
        return torch.where(parent > IMPOSSIBLE / 2, torch.exp2(power), 0)

    def _parents(self, tiles: Tiles, layout: Layout, beta: Tensor, factor: Tensor) -> Tensor:
        """What parents hand on to edges, [tiles, width, x]."""
        rows = take(beta, tiles.of(layout.parent))[:, : self.shapes[tiles.shape][0]]
        return (rows * tiles.of(factor).unsqueeze(1)).view(len(tiles.rule), tiles.width, -1)

    def children(
        self, tiles: Tiles, layout: Layout, alpha: Float[Tensor, "nodes_and_2 states"]
    ) -> tuple[Float[Tensor, "tiles width _"], ...]:
        """[tiles, width, y] and [tiles, width, z], or the first alone."""
        _, y, z, _ = self.shapes[tiles.shape]
        sides = ((layout.left, y),) if tiles.unary else ((layout.left, y), (layout.right, z))
        return tuple(
            take(alpha, tiles.of(child)).view(len(tiles.rule), tiles.width, -1).narrow(2, 0, size)
            for child, size in sides
        )

    # Parts

    def sentence_of_node(self) -> Int[Tensor, "nodes_and_2"]:
        """-1 for nodes that are in no tree of a sentence."""
        forest, layout = self.forest, self.layout
        found = torch.full((forest.nodes + 2,), -1, device=self.device)
        found[forest.tops] = torch.arange(len(forest.tops), device=self.device)
        for level in reversed(self.levels):
            parent, left, right = (
                column.narrow(0, level.begin, level.slots) for column in (layout.parent, layout.left, layout.right)
            )
            for child in (left, right):
                found.scatter_reduce_(0, child, take(found, parent), "amax")
        found[-2:] = -1
        return found

    def part(self, sentences: Int[Tensor, "some"]) -> tuple["Plan", Part]:
        """The plan of some sentences."""
        forest = self.forest
        chosen = torch.zeros(len(forest.tops) + 1, dtype=torch.bool, device=self.device)  # -1 is the last
        used = take(chosen.index_fill_(0, sentences, True), self.sentence_of_node() % len(chosen))[:-2]
        part = forest.restricted(true_indices(take(used, forest.parent)), used, take(forest.tops, sentences))
        return Plan(part.forest, self.sizes, self.cp, self.most), part


@dataclass(frozen=True)
class Limits:
    """Powers of two of a type."""

    largest: float  # no number is as large
    smallest: float  # the smallest number but 0
    shift: float  # numbers are scaled up by no more than this

    @staticmethod
    def of(dtype: torch.dtype) -> "Limits":
        known = torch.finfo(dtype)
        tiny = math.log2(known.tiny)
        return Limits(math.log2(known.max), tiny + math.log2(known.eps), tiny + 26)
