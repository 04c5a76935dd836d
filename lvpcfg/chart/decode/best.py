"""The k best derivations: best-first search from the root down over one chart of best scores.

What is left to be expanded is worth exactly what the chart says, so the first k derivations that are complete are
the k best, and no node needs more than its k best edges. (A* with a perfect estimate: Pauls & Klein 2009.)
"""

import heapq
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.fast.blocks import Block
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.pairs import Pairs


class Open(NamedTuple):
    """A node that is still to be expanded."""

    start: int
    width: int
    top: int  # state; -1: to be chosen
    factor: int = -1  # in a CP form, the factor (column of V beside W) above it


class Edge(NamedTuple):
    score: float
    node: Node
    children: tuple[Open, ...]


Nodes = tuple[Node, "Nodes"] | None  # linked lists: derivations that begin alike share their beginning
Waiting = tuple[Open, "Waiting"] | None


class Best:
    """The k best derivations of sentences; the chart is one of `MAX`."""

    def __init__(self, chart: Chart, k: int) -> None:
        self.chart, self.form, self.k = chart, chart.form, k
        self.known: dict[tuple[int, Open], list[Edge]] = {}

    def skeletons(self, sentence: int) -> list[Skeleton]:
        """Best first, nodes in preorder, labelled with states."""
        chart, length = self.chart, self.chart.length
        if chart.lengths is not None:
            length = int(chart.lengths[sentence])
        scores, tops = self._largest(chart.final[sentence] + self.form.root)
        order = itertools.count()  # of what is equally good
        agenda: list[tuple[float, int, Nodes, Waiting]] = [
            (-score, next(order), None, (Open(0, length, top), None))
            for score, top in zip(scores.tolist(), tops.tolist(), strict=True)
        ]
        found: list[Skeleton] = []
        while agenda and len(found) < self.k:
            score, _, done, waiting = heapq.heappop(agenda)
            if waiting is None:
                nodes: Skeleton = []
                while done is not None:
                    last, done = done
                    nodes.append(last)
                found.append(nodes[::-1])
                continue
            node, rest = waiting
            edges = self.known.get((sentence, node))
            if edges is None:
                edges = self.known[sentence, node] = self._edges(sentence, node)
            for edge in edges:
                following: Waiting = rest
                for child in reversed(edge.children):
                    following = (child, following)
                loss = edges[0].score - edge.score
                heapq.heappush(agenda, (score + loss, next(order), (edge.node, done), following))
        return found

    def _largest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The k largest, without those that are impossible, and their places."""
        values, places = scores.flatten().topk(min(self.k, scores.numel()))
        possible = values > -torch.inf
        return values[possible], places[possible]

    def _edges(self, sentence: int, node: Open) -> list[Edge]:
        """The k best ways to go on from a node."""
        chart, form = self.chart, self.form
        cell = node.start * chart.batch + sentence
        tops = [(0.0, node.top)]
        if isinstance(form, CPForm) and node.factor >= 0:
            values, factors = chart.top[node.width - 1][cell], form.weights[1]
            if node.width == 1:
                values, factors = torch.cat([values, chart.word_top[cell]]), torch.cat(form.weights[1:])
            scores, states = self._largest(factors[:, node.factor] + values)
            own = values[states]
            tops = [*zip((scores - own).tolist(), states.tolist(), strict=True)]
        found = []
        for above, top in tops:
            for step, bottom in self._bottoms(cell, node.width, top):
                if node.width == 1:
                    worth = float(chart.word[cell, bottom - form.interminals])
                    found.append(Edge(above + step + worth, Node(node.start, 1, top, bottom, 0), ()))
                    continue
                for score, split, rank, left, right in self._splits(cell, node.width, bottom):
                    children = (
                        Open(node.start, split, *left),
                        Open(node.start + split, node.width - split, *right),
                    )
                    made = Node(node.start, node.width, top, bottom, split, rank)
                    found.append(Edge(above + step + score, made, children))
        return heapq.nlargest(self.k, found, key=lambda edge: edge.score)

    def _bottoms(self, cell: int, width: int, top: int) -> list[tuple[float, int]]:
        """The best states below unary rules, with what the step is worth."""
        chart, inner = self.chart, self.form.interminals
        step = self.form.promotion if width == 1 else self.form.closure
        if step is None or top >= inner:
            return [(0.0, top)]
        values = chart.word[cell] if width == 1 else chart.bottom[width - 1][cell]
        _, states = self._largest(values + step[:, top])
        first = inner if width == 1 else 0
        return [*zip(step[states, top].tolist(), (states + first).tolist(), strict=True)]

    def _splits(
        self, cell: int, width: int, bottom: int
    ) -> list[tuple[float, int, int | None, tuple[int, ...], tuple[int, ...]]]:
        """The best pairs of children: score, width of the left one, rank, and both as arguments of `Open`."""
        chart, form = self.chart, self.form
        if isinstance(form, CPForm):
            left, right = chart.operands(0, width)
            joint = left[cell] + right[cell] + form.weights[0][:, bottom]  # [splits, rank]
            scores, places = self._largest(joint)
            ranks = len(form.weights[0])
            return [
                (score, place // ranks + 1, place % ranks, (-1, place % ranks), (-1, ranks + place % ranks))
                for score, place in zip(scores.tolist(), places.tolist(), strict=True)
            ]
        found = []
        for term in form.terms(width):
            for score, *named in self._pairs(form, term, width, cell, bottom):
                split, of_left, of_right = (int(x) for x in named)
                found.append((score, split, None, (of_left,), (of_right,)))
        return heapq.nlargest(self.k, found, key=lambda one: one[0])

    def _pairs(self, form: TensorForm, term: int, width: int, cell: int, bottom: int) -> list[tuple[float, ...]]:
        """The best of a term: score, width of the left child, states of both."""
        block = form.blocks[term]
        if isinstance(block, Block):
            rule, x = (block.parent == bottom).nonzero().unbind(1)
        else:
            rule, x = torch.zeros_like(block.rules), torch.full_like(block.rules, bottom)
        if not len(rule):
            return []
        pairs = Pairs(self.chart, form, term, width, torch.full_like(rule, cell), rule, x)
        joint = pairs.left.unsqueeze(3) + pairs.right.unsqueeze(2) + pairs.weights.unsqueeze(1)
        scores, places = self._largest(joint)
        _, splits, y, z = joint.shape
        choice, split, of_left = places // (splits * y * z), places // (y * z) % splits, places // z % y
        named = pairs.named(choice, split, of_left, places % z)
        return [*zip(scores.tolist(), *(column.tolist() for column in named), strict=True)]
