"""The k best derivations: best-first search from the root down over one textbook chart of best weights.

What is left to be expanded is worth exactly what the chart says, so the first k derivations that are complete are
the k best, and no node needs more than its k best edges. (A* with a perfect estimate: Pauls & Klein 2009.) The k-max
semiring finds the same weights with k lists in every lane; here one weight is enough.
"""

import heapq
import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.lanes import Map, Rules
from lvpcfg.chart.semirings import Max
from lvpcfg.chart.textbook import CFG, inside


class Open(NamedTuple):
    """A node that is still to be expanded."""

    start: int
    width: int
    top: int  # state; -1: to be chosen, below a term of a CP form
    term: tuple[int, int, int] = (0, 0, 0)  # which rules, which child, which term


class Edge(NamedTuple):
    score: float
    node: Node
    children: tuple[Open, ...]


Nodes = tuple[Node, "Nodes"] | None  # linked lists: derivations that begin alike share their beginning
Waiting = tuple[Open, "Waiting"] | None


class KBest:
    """The k best derivations of each sentence under binary rules, all numbers being logarithms."""

    def __init__(
        self, grammar: CFG, words: Float[Tensor, "batch n word_states"], lengths: Int[Tensor, "batch"] | None, k: int
    ) -> None:
        with torch.no_grad():
            _, tops = inside(Max, grammar, words, lengths)
        sizes = [words.shape[1]] * len(words) if lengths is None else lengths.tolist()
        self.derivations = [
            _Sentence(_alone(grammar, b), words[b], [top[0, b] for top in tops[:length]], k).derivations()
            for b, length in enumerate(sizes)
        ]


class _Sentence:
    """The search for one sentence; `tops` are by width."""

    def __init__(
        self, grammar: CFG, words: Float[Tensor, "n word_states"], tops: list[Float[Tensor, "_ states"]], k: int
    ) -> None:
        self.grammar, self.words, self.tops, self.k = grammar, words, tops, k
        self.known: dict[Open, list[Edge]] = {}

    @torch.no_grad()
    def derivations(self) -> list[Skeleton]:
        """Best first, nodes in preorder, labelled with states; those of CP forms with their terms."""
        length = len(self.tops)
        order = itertools.count()  # of what is equally good
        agenda: list[tuple[float, int, Nodes, Waiting]] = [
            (-score, next(order), None, (Open(0, length, top), None))
            for score, top in self._largest(self.tops[-1][0] + self.grammar.root)
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
            if node not in self.known:
                self.known[node] = self._edges(node)
            edges = self.known[node]
            for edge in edges:
                following: Waiting = rest
                for child in reversed(edge.children):
                    following = (child, following)
                loss = edges[0].score - edge.score
                heapq.heappush(agenda, (score + loss, next(order), (edge.node, done), following))
        return found

    def _largest(self, scores: Tensor) -> list[tuple[float, int]]:
        """The k largest with their indices, without those that are impossible."""
        values, indices = scores.flatten().topk(min(self.k, scores.numel()))
        return [pair for pair in zip(values.tolist(), indices.tolist(), strict=True) if pair[0] > -math.inf]

    def _edges(self, node: Open) -> list[Edge]:
        """The k best ways to go on from a node."""
        start, width = node.start, node.width
        products = [self._products(rules, start, width) for rules in self.grammar.rules if width > 1]
        found = []
        for above, top in self._tops(node):
            for step, bottom in self._bottoms(products, start, width, top):
                if width == 1:
                    worth = float(self.words[start, bottom - len(self.grammar.root)])
                    found.append(Edge(above + step + worth, Node(start, 1, top, bottom, 0), ()))
                    continue
                for number, values in enumerate(products):
                    for score, split, lane in self._lanes(number, values, bottom):
                        (left, right), term = self._children(number, lane)
                        children = Open(start, split, *left), Open(start + split, width - split, *right)
                        found.append(Edge(above + step + score, Node(start, width, top, bottom, split, term), children))
        return heapq.nlargest(self.k, found, key=lambda edge: edge.score)

    def _tops(self, node: Open) -> list[tuple[float, int]]:
        """The best top states, each with its weight in the term above."""
        if node.top >= 0:
            return [(0.0, node.top)]
        number, child, term = node.term
        states, factor = self.grammar.rules[number].children[child].row(term)
        scores = factor + self.tops[node.width - 1][node.start, states]
        return [(float(factor[place]), int(states[place])) for _, place in self._largest(scores)]

    def _bottoms(self, products: list[Tensor], start: int, width: int, top: int) -> list[tuple[float, int]]:
        """The best states below unary rules, each with the weight of the step."""
        if self.grammar.closure is None:
            return [(0.0, top)]
        bottom = self.grammar.root.new_full(self.grammar.root.shape, -math.inf)
        if width == 1:
            bottom[len(bottom) - self.words.shape[1] :] = self.words[start]
        for rules, values in zip(self.grammar.rules, products, strict=False):
            lifted = _applied(rules.lift, values.amax(0))
            bottom[: len(lifted)] = torch.maximum(bottom[: len(lifted)], lifted)
        states, steps = self.grammar.closure.row(top)
        return [(float(steps[place]), int(states[place])) for _, place in self._largest(steps + bottom[states])]

    def _products(self, rules: Rules, start: int, width: int) -> Tensor:
        """The products of the two children, [splits, lanes]."""
        left = torch.stack([self.tops[k - 1][start] for k in range(1, width)])
        right = torch.stack([self.tops[width - k - 1][start + k] for k in range(1, width)])
        return _applied(rules.children[0], left) + _applied(rules.children[1], right)

    def _lanes(self, number: int, values: Tensor, bottom: int) -> list[tuple[float, int, int]]:
        """The best lanes: score, width of the left child, lane."""
        if bottom >= len(self.grammar.root) - self.words.shape[1]:
            return []
        lanes, weights = self.grammar.rules[number].lift.row(bottom)
        found = self._largest(values[:, lanes] + weights)
        return [(score, place // len(lanes) + 1, int(lanes[place % len(lanes)])) for score, place in found]

    def _children(self, number: int, lane: int) -> tuple[list[tuple[int, tuple[int, int, int]]], int | None]:
        """For each child its top state, or -1 and the term that gives weights to its states; and the term."""
        children = self.grammar.rules[number].children
        states = [-1 if child.lanes is None else int(child.lanes[lane]) for child in children]
        terms = [(state, (number, place, lane) if state < 0 else (0, 0, 0)) for place, state in enumerate(states)]
        return terms, lane if -1 in states else None


def _applied(linear: Map, x: Tensor) -> Tensor:
    """[..., inputs] -> [..., outputs]"""
    cells = x.reshape(1, 1, -1, x.shape[-1])
    return linear.change(Max.convert)(Max, cells).view(*x.shape[:-1], -1)


def _alone(grammar: CFG, sentence: int) -> CFG:
    """The grammar of one sentence."""

    def of_map(linear: Map) -> Map:
        batched = linear.values is not None and linear.values.dim() == (3 if linear.entries is None else 2)
        return linear.change(lambda values: values[sentence] if batched else values)

    rules = tuple(
        replace(some, children=tuple(map(of_map, some.children)), lift=of_map(some.lift)) for some in grammar.rules
    )
    root = grammar.root if grammar.root.dim() == 1 else grammar.root[sentence]
    return CFG(root, rules, None if grammar.closure is None else of_map(grammar.closure))
