"""The order in which the edges of a forest are computed: level by level, in tiles (`tiles.py`).

The width of tiles is the mean number of edges of a rule, so that neither empty slots nor repeated tensors more than
double the numbers. Rules are padded to a few shapes: two shapes become one where the padding costs less than a batch.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lvpcfg.chart.forest.arrays import repeated, take
from lvpcfg.chart.forest.packed import Forest
from lvpcfg.chart.forest.tiles import Shape, Tiles

BATCH = 250_000  # what another batch of edges costs, in multiplications
NARROW = 0.7  # of the mean number of edges of a rule: tiles of CP forms, which have less to fetch for each
SMALL = 8  # multiplications of an edge: where there are no more, each edge is a tile


@dataclass(frozen=True, eq=False)
class Layout:
    """Edges in slots. Empty slots lead to the forest's node without derivations."""

    edge: Int[Tensor, "slots"]  # one past the last edge where there is none
    parent: Int[Tensor, "slots"]
    left: Int[Tensor, "slots"]
    right: Int[Tensor, "slots"]
    tiles: list[list[Tiles]]  # of each level


@dataclass(frozen=True, eq=False)
class Shapes:
    """The shapes that rules are padded to."""

    shapes: list[Shape]
    shape_of: Int[Tensor, "rules"]
    within: Int[Tensor, "rules"]  # the number of a rule among those of its shape
    members: list[Int[Tensor, "_"]]  # for each shape, the rules that have it

    @staticmethod
    def of(
        sizes: Int[Tensor, "rules 4"], rule: Int[Tensor, "edges"], level: Int[Tensor, "edges"], levels: int
    ) -> "Shapes":
        """For rules of `sizes` (x, y, z, rank); `rule` and `level` are those of the edges.

        Sizes are rounded up to powers of two, and then two shapes become one where that costs less than a batch.
        """
        rounded = 2 ** sizes[:, :3].double().log2().ceil().long()
        if len(sizes):
            rounded = torch.minimum(rounded, sizes[:, :3].amax())
        found, rounded_of = torch.cat([rounded, sizes[:, 3:]], 1).unique(dim=0, return_inverse=True)
        place = take(rounded_of, rule) * levels + level
        edges = torch.bincount(place, minlength=len(found) * levels).view(len(found), levels)
        found, joined = _joined(found, edges)
        shape_of = take(joined, rounded_of)
        counts = torch.zeros_like(joined).index_add_(0, shape_of, torch.ones_like(shape_of))
        order = shape_of.argsort(stable=True)
        within = torch.arange(len(order), device=order.device) - take(counts.cumsum(0) - counts, take(shape_of, order))
        within = torch.empty_like(order).index_copy_(0, order, within)
        number = (counts > 0).long().cumsum(0) - 1
        *shapes, sizes_of = torch.cat([found.T, counts.unsqueeze(0)]).tolist()  # what the host has to know
        kept = [(x, y, z, rank) for x, y, z, rank, size in zip(*shapes, sizes_of, strict=True) if size]
        members = order.split([size for size in sizes_of if size])
        return Shapes(kept, take(number, shape_of), within, list(members))


def _joined(
    shapes: Int[Tensor, "shapes 4"], counts: Int[Tensor, "shapes levels"]
) -> tuple[Int[Tensor, "shapes 4"], Int[Tensor, "shapes"]]:
    """The shapes, some of them larger, and for each of them the number of the shape that it was joined to.

    `counts` are the numbers of edges. Each round joins the two shapes for which that saves most. Where nothing is saved
    any more, a round changes nothing: so the number of rounds is fixed, and the host need not read anything.
    """
    shapes, edges, levels = shapes.clone(), counts.sum(1).double(), (counts > 0).double()
    joined = torch.arange(len(shapes), device=shapes.device)
    pairs = (shapes[:, None, 3] == shapes[:, 3]).triu(1)  # of one rank
    for _ in range(len(shapes) - 1):
        union = torch.maximum(shapes.unsqueeze(1), shapes)  # [shapes, shapes, 4]
        cost = edges * _multiplications(shapes)
        padding = (edges.unsqueeze(1) + edges) * _multiplications(union) - cost.unsqueeze(1) - cost
        saved = BATCH * (levels @ levels.T)  # a batch on each level that both are on
        gain, place = torch.where(pairs, saved - padding, -torch.inf).flatten().max(0, keepdim=True)
        pays, i, j = gain >= 0, place // len(shapes), place % len(shapes)
        joined = torch.where((joined == j) & pays, i, joined)
        both = take(union.flatten(0, 1), place)
        shapes.index_copy_(0, i, torch.where(pays.unsqueeze(1), both, take(shapes, i)))
        moved, moved_levels = take(edges, j) * pays, take(levels, j) * pays.unsqueeze(1)
        edges.index_add_(0, i, moved).index_add_(0, j, -moved)
        levels.index_copy_(0, i, torch.maximum(take(levels, i), moved_levels))
        gone = torch.zeros_like(pairs[0]).index_copy_(0, j, pays)
        pairs &= ~(gone.unsqueeze(1) | gone)
    return shapes, joined


def _multiplications(shapes: Tensor) -> Tensor:
    """Of an edge, [..., 4] -> [...]."""
    sizes, rank = shapes[..., :3], shapes[..., 3]
    return torch.where(rank > 0, rank * sizes.sum(-1), sizes.prod(-1))


def _is_small(shape: Shape) -> bool:
    x, y, z, rank = shape
    return (rank * (x + y + z) if rank else x * y * z) <= SMALL


def laid_out(
    forest: Forest, shapes: Shapes, rule: Int[Tensor, "edges"], level: Int[Tensor, "edges"], levels: int
) -> Layout:
    """The slots of edges, whose rules and levels are `rule` and `level`.

    Edges are sorted by level and shape, and then by rule, if there is more than one edge in a tile. Those of one level
    and shape are a group here, and those of one rule in it a run.
    """
    device, per_level, edges, rules = rule.device, len(shapes.shapes), len(rule), len(shapes.shape_of)
    groups = levels * per_level
    is_small = torch.tensor([_is_small(shape) for shape in shapes.shapes], dtype=torch.bool, device=device)
    share = torch.tensor([NARROW if rank else 1.0 for *_, rank in shapes.shapes], device=device)
    key_of_rule = torch.where(is_small[shapes.shape_of], 0, torch.arange(rules, device=device))
    key = (level * per_level + take(shapes.shape_of, rule)) * rules + take(key_of_rule, rule)
    key, order = key.sort()
    run, size = key.unique_consecutive(return_inverse=True, return_counts=True)[1:]
    first = size.cumsum(0) - size  # the first edge of each run
    group = key[first] // max(1, rules)  # of each run
    edges_in_group, runs = (torch.bincount(group, weights, minlength=groups) for weights in (size.double(), None))
    shape = torch.arange(per_level, device=device).repeat(levels)
    mean = (share[shape] * edges_in_group / runs.clamp_min(1)).ceil().long()
    width = torch.where(is_small[shape], 1, mean)  # of the tiles of each group
    tiles = -(-size // width[group])  # that each run takes
    tiles_in_group = torch.bincount(group, tiles.double(), minlength=groups).long()
    first_tile = tiles_in_group.cumsum(0) - tiles_in_group
    slots = tiles_in_group * width
    begin = slots.cumsum(0) - slots
    binary = torch.bincount(take(group, run), take(forest.right, order) != forest.nodes + 1, minlength=groups)
    # All that the host has to know, in one piece.
    known = torch.stack([tiles_in_group, width, begin, (binary > 0).long()]).tolist()
    total_slots, total_tiles = sum(map(int.__mul__, *known[:2])), sum(known[0])

    # The first slot of each run, and from there on its edges.
    start = begin[group] + (tiles.cumsum(0) - tiles - first_tile[group]) * width[group]
    slot = take(start - first, run) + torch.arange(edges, device=device)
    edge = torch.full((total_slots,), edges, device=device).index_copy_(0, slot, order)
    empty = rule.new_full((1,), forest.nodes)
    parent, left, right = (
        take(torch.cat([column, empty]), edge) for column in (forest.parent, forest.left, forest.right)
    )
    of_tile, number = repeated(tiles_in_group, torch.zeros_like(tiles_in_group), total_tiles)
    head = take(begin, of_tile) + number * take(width, of_tile)  # the first slot of each tile, which is never empty
    rule_of_tile = take(shapes.within, take(rule, take(edge, head)))
    found: list[list[Tiles]] = [[] for _ in range(levels)]
    for place, (count, some, each, at, two) in enumerate(
        zip(known[0], rule_of_tile.split(known[0]), *known[1:], strict=True)
    ):
        if count:
            unary = shapes.shapes[place % per_level][2] == 1 and not two
            found[place // per_level].append(Tiles(place % per_level, unary, some, each, at))
    return Layout(edge, parent, left, right, found)
