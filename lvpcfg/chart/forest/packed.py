"""Packed forests: nodes, and edges from a node to its children by a rule."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.forest.arrays import take, true_indices

COLUMNS = ("level", "rule", "parent", "left", "right")  # of edges


@dataclass(frozen=True, eq=False)
class Forest:
    """Edges as parallel vectors. Children stand on lower levels than their parent; leaves are on none.

    Two more nodes follow the nodes 0 .. nodes - 1. The inside score of the first, `nodes`, is 0: it fills the gaps
    where a list has to be longer than what it holds. That of the second, `nodes + 1`, is 1: it is the right child of
    unary rules.
    """

    nodes: int
    level: Tensor  # [edges]
    rule: Tensor
    parent: Tensor
    left: Tensor
    right: Tensor
    leaves: Tensor  # [leaves]: nodes
    tops: Tensor  # [sentences]: nodes, whose one state is the sentence

    def with_edges(self, edges: Tensor) -> "Forest":
        """The same nodes with some of the edges."""
        columns = {name: take(getattr(self, name), edges) for name in COLUMNS}
        return Forest(self.nodes, **columns, leaves=self.leaves, tops=self.tops)

    def restricted(self, edges: Tensor, used: Tensor, tops: Tensor) -> "Part":
        """Some edges, the nodes that are `used` [nodes], and the sentences with these `tops`.

        The edges and tops have used nodes alone.
        """
        nodes = true_indices(used)
        number = torch.nn.functional.pad(used.long().cumsum(0) - 1, (0, 2))
        number[self.nodes :] = torch.arange(len(nodes), len(nodes) + 2, device=number.device)
        leaves = true_indices(take(used, self.leaves))
        some = self.with_edges(edges)
        forest = Forest(
            len(nodes),
            some.level,
            some.rule,
            *(take(number, column) for column in (some.parent, some.left, some.right, take(self.leaves, leaves), tops)),
        )
        return Part(forest, edges, nodes, leaves)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a forest, and the numbers that its edges, nodes and leaves have in the whole."""

    forest: Forest
    edges: Tensor
    nodes: Tensor
    leaves: Tensor
