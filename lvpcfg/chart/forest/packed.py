"""Packed forests: nodes, and edges from a node to its children by a rule."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
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
    level: Int64[Tensor, "edges"]
    rule: Int64[Tensor, "edges"]
    parent: Int64[Tensor, "edges"]
    left: Int64[Tensor, "edges"]
    right: Int64[Tensor, "edges"]
    leaves: Int64[Tensor, "leaves"]  # nodes
    tops: Int64[Tensor, "sentences"]  # the node on top of each sentence, which has one state

    def with_edges(self, edges: Int64[Tensor, "some"]) -> "Forest":
        """The same nodes with some of the edges."""
        columns = {name: take(getattr(self, name), edges) for name in COLUMNS}
        return Forest(self.nodes, **columns, leaves=self.leaves, tops=self.tops)

    def restricted(
        self, edges: Int64[Tensor, "some"], used: Bool[Tensor, "nodes"], tops: Int64[Tensor, "some_sentences"]
    ) -> "Part":
        """Some edges, the nodes that are `used`, and the sentences with these `tops`.

        All nodes of the edges, and the tops, must be used.
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
    """A part of a forest, and the numbers that its edges, nodes and leaves have in that forest."""

    forest: Forest
    edges: Int64[Tensor, "edges"]
    nodes: Int64[Tensor, "nodes"]
    leaves: Int64[Tensor, "leaves"]
