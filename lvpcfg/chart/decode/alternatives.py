"""The edges of forests on the host, where the search for k best trees (`kbest.py`) finds them."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lvpcfg.chart.decode.kbest import Edge, Ranked, Trees
from lvpcfg.chart.derivations import Node
from lvpcfg.chart.forest.forest import Forest, Plan
from lvpcfg.chart.forest.prune import Nodes
from lvpcfg.chart.semirings import safe_log


def on_host(tensor: Shaped[Tensor, "..."]) -> Shaped[np.ndarray, "..."]:
    return tensor.cpu().numpy()


class ForestOnHost:
    """Edges sorted by their parents."""

    def __init__(self, forest: Forest, nodes: Nodes) -> None:
        parents = forest.parent.argsort(stable=True)
        sizes = torch.bincount(forest.parent, minlength=forest.nodes)
        self.order, self.first = on_host(parents), np.concatenate([[0], on_host(sizes.cumsum(0))])
        self.left, self.right = on_host(forest.left[parents]), on_host(forest.right[parents])
        self.start, self.width, self.symbol = (on_host(column) for column in (nodes.start, nodes.width, nodes.symbol))
        self.top, self.one = on_host(nodes.top), forest.nodes + 1
        self.leaves = {*forest.leaves.tolist()}

    def rows(self, node: int) -> slice:
        """Where its edges stand."""
        return slice(int(self.first[node]), int(self.first[node + 1]))

    def step(self, node: int, row: int) -> Node | None:
        """The span of an edge, where it is a step."""
        if node >= len(self.top) or not self.top[node]:
            return None
        return Node(
            int(self.start[node]), int(self.width[node]), int(self.symbol[node]), int(self.symbol[self.left[row]]), 0
        )


class ByWorth(Trees):
    """By what each edge is worth; the arguments are those of `best_trees`, and what it found."""

    def __init__(self, forest: ForestOnHost, edges: Float[Tensor, "edges"], worth: Float[Tensor, "at_least_nodes"]):
        self.forest, self.worth = forest, on_host(worth)
        self.of_edges = on_host(edges)[forest.order]

    def edges(self, node: int) -> Sequence[Edge]:
        forest, rows = self.forest, self.forest.rows(node)
        if node in forest.leaves:
            return [Edge(float(self.worth[node]), ())]

        def make(number: int, worth: float) -> Edge:
            row = rows.start + number
            left, right = int(forest.left[row]), int(forest.right[row])
            return Edge(worth, (left,) if right == forest.one else (left, right), forest.step(node, row))

        left, right = forest.left[rows], forest.right[rows]
        return Ranked(self.of_edges[rows] + self.worth[left] + self.worth[right], make)


class ByDerivation(Trees):
    """By the best derivation of a tree (Viterbi): nodes are pairs of a node of the forest and a state of its symbol.

    `alpha` are the logarithms of the best inside scores, [nodes + 2, states].
    """

    def __init__(self, host: ForestOnHost, plan: Plan, rules: Tensor, alpha: Float[Tensor, "nodes_and_2 states"]):
        self.forest, self.alpha = host, on_host(alpha)
        shape, within = plan.shape_of_edges
        self.shape, self.within = on_host(shape)[host.order], on_host(within)[host.order]
        self.tensors = [  # of each shape, [rules, x, y, z]
            on_host(safe_log(some.written_out().values.double()).unflatten(2, (y, z)))
            for some, (_, y, z, _) in zip(plan.weights(rules, torch.float64), plan.shapes, strict=True)
        ]

    def node_on_top(self, top: int) -> tuple[int, int]:
        return top, 0

    def edges(self, node: tuple[int, int]) -> Sequence[Edge]:
        (at, state), forest = node, self.forest
        if at in forest.leaves:
            return [Edge(float(self.alpha[at, state]), ())]
        rows = np.arange(forest.first[at], forest.first[at + 1])
        known = []
        for shape in np.unique(self.shape[rows]):
            tensors = self.tensors[shape]
            some = rows[self.shape[rows] == shape]
            _, _, y, z = tensors.shape
            left, right = self.alpha[forest.left[some], :y], self.alpha[forest.right[some], :z]
            worth = tensors[self.within[some], state] + left[:, :, None] + right[:, None]
            known.append((worth.ravel(), np.repeat(some, y * z), np.tile(np.arange(y * z), len(some)), z))
        if not known:
            return []
        worth, row, pair = (np.concatenate(column) for column in zip(*(some[:3] for some in known), strict=True))
        widths = np.concatenate([np.full(len(some[0]), some[3]) for some in known])

        def make(number: int, worth: float) -> Edge:
            here, of_left, of_right = int(row[number]), *divmod(int(pair[number]), int(widths[number]))
            left, right = int(forest.left[here]), int(forest.right[here])
            children = ((left, of_left), (right, of_right))
            return Edge(worth, children[:1] if right == forest.one else children, forest.step(at, here))

        return Ranked(worth, make)
