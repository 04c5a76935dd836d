"""The k best trees of a sentence, lazily (Huang & Chiang 2005, algorithm 3).

    best_k(node) = the k best over its edges of   worth(edge) + best_i(left) + best_j(right)

What the best tree by each edge is worth is known beforehand, so that a second tree is looked for only below nodes that
another tree needs. Trees that differ but are written alike, since binarisation is undone and chains are filled in, are
one tree: it is the better of them, at every node. A node therefore takes a tree once for each of its edges at the most,
and what is found does not grow with the number of trees that are written alike.
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lvpcfg.chart.derivations import Node, Skeleton

Written = tuple[Hashable, ...]  # subtrees, each of them a number: equal where they are written alike
Labels = Callable[[Node], tuple[str, ...]]  # that a node is written with


class Edge(NamedTuple):
    """From a node to its children: none for a word, one for a step from the top of a span to its bottom."""

    worth: float  # of the best tree with this edge on top
    children: tuple[Hashable, ...]
    step: Node | None = None  # the span, in steps; its split is not known yet


class Trees(ABC):
    """The trees of sentences, as the search asks for them."""

    @abstractmethod
    def edges(self, node: Any) -> Sequence[Edge]:
        """Those of a node, best first."""

    def node_on_top(self, top: int) -> Hashable:
        """What the top of a sentence is called here."""
        return top


@dataclass(frozen=True)
class Ranked(Sequence[Edge]):
    """Edges that are made when they are asked for, since few are."""

    worth: Float[np.ndarray, "edges"]  # of all of them, in any order
    make: Callable[[int, float], Edge]  # of the number of an edge in that order, and its worth
    order: Int[np.ndarray, "possible"] = field(init=False)  # of those that are possible, best first

    def __post_init__(self) -> None:
        possible = np.flatnonzero(self.worth > -np.inf)
        object.__setattr__(self, "order", possible[np.argsort(-self.worth[possible], kind="stable")])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: Any) -> Any:
        number = int(self.order[place])
        return self.make(number, float(self.worth[number]))


@dataclass(frozen=True, slots=True)
class Best:
    """One of the best trees below a node."""

    worth: float
    written: Written
    step: Node | None
    children: "tuple[Best, ...]"

    @property
    def width(self) -> int:
        return 0 if self.step is None else self.step.width

    def skeleton(self) -> Skeleton:
        """The tree, without what stands above the step on its top."""
        found: Skeleton = []
        waiting = [self] if self.step is not None else [*self.children]
        while waiting:
            tree = waiting.pop()
            (below,) = tree.children
            assert tree.step is not None
            split = below.children[0].width if below.children else 0
            node = tree.step
            found.append(Node(node.start, node.width, node.top, node.bottom, split))
            waiting += reversed(below.children)
        return found


class Waiting(NamedTuple):
    """A tree that has not been made yet."""

    loss: float  # - worth
    number: int  # of the edge
    ranks: tuple[int, ...]  # which tree of each child
    edge: Edge


@dataclass(slots=True)
class _Found:
    """What has been found below a node."""

    edges: Sequence[Edge]
    begun: int = 0  # how many of its edges
    best: list[Best] = field(default_factory=list)
    written: set[Written] = field(default_factory=set)
    waiting: list[Waiting] = field(default_factory=list)  # what may come next, a heap
    last: Waiting | None = None  # what came last, and has not been followed up


Task = Generator["Task", None, None]


class Search:
    """For the trees of one sentence."""

    def __init__(self, trees: Trees, labels: Labels) -> None:
        self.trees, self.labels = trees, labels
        self.found: dict[Hashable, _Found] = {}
        self.numbers: dict[tuple[tuple[str, ...], Written], int] = {}

    def best(self, top: Hashable, k: int, first: Skeleton) -> list[Skeleton]:
        """The k best trees below a node; `first` is the best of them, as the decoder found it."""
        known = self.of_tree(first)
        _run(self._find(top, k))
        others = [tree.skeleton() for tree in self.found[top].best if tree.written != known]
        return [first, *others][:k]

    def _find(self, node: Hashable, size: int) -> Task:
        """Finds more trees below a node, until there are `size` of them or no more. Yields what has to be done first:
        trees are deeper than Python's stack."""
        found = self._of(node)
        while len(found.best) < size:
            if found.last is not None:
                yield self._follow_up(found)
            if found.begun < len(found.edges):
                edge = found.edges[found.begun]
                if not found.waiting or edge.worth >= -found.waiting[0].loss:
                    heapq.heappush(found.waiting, Waiting(-edge.worth, found.begun, (0,) * len(edge.children), edge))
                    found.begun += 1
            if not found.waiting:
                return
            last = heapq.heappop(found.waiting)
            loss, _, ranks, edge = last
            for child in edge.children:
                yield self._find(child, 1)
            below = [self._of(child).best for child in edge.children]
            if not all(below):  # out of the range of floats
                continue
            found.last = last
            children = tuple(some[rank] for some, rank in zip(below, ranks, strict=True))
            tree = Best(-loss, self._written(edge, children), edge.step, children)
            if tree.written not in found.written:
                found.written.add(tree.written)
                found.best.append(tree)

    def _follow_up(self, found: _Found) -> Task:
        """What comes after the last tree: the next one of one of its children. Ranks are reached in one way."""
        assert found.last is not None
        (_, number, ranks, edge), found.last = found.last, None
        for place in reversed(range(len(ranks))):
            child, rank = edge.children[place], ranks[place] + 1
            yield self._find(child, rank + 1)
            if rank < len(self._of(child).best):
                changed = (*ranks[:place], rank, *ranks[place + 1 :])
                below = [self._of(child).best for child in edge.children]
                loss = sum(some[0].worth - some[rank].worth for some, rank in zip(below, changed, strict=True))
                heapq.heappush(found.waiting, Waiting(loss - edge.worth, number, changed, edge))
            if ranks[place]:
                return

    def _of(self, node: Hashable) -> _Found:
        if node not in self.found:
            self.found[node] = _Found(self.trees.edges(node))
        return self.found[node]

    def _written(self, edge: Edge, children: Sequence[Best]) -> Written:
        if edge.step is not None:
            return self._with_labels(edge.step, children[0].written)
        return tuple(itertools.chain.from_iterable(child.written for child in children))

    def _with_labels(self, step: Node, below: Written) -> Written:
        """A subtree is its labels, where it begins, and what is below; without labels it is what is below."""
        labels = self.labels(step)
        below = below or (-1 - step.start,)  # a word
        return (self.numbers.setdefault((labels, below), len(self.numbers)),) if labels else below

    def of_tree(self, skeleton: Skeleton) -> Written:
        built: list[Written] = []
        for node in reversed(skeleton):
            built.append(self._with_labels(node, built.pop() + built.pop() if node.split else ()))
        return built.pop()


def _run(task: Task) -> None:
    """A task, and before it those that it yields."""
    waiting = [task]
    while waiting:
        first = next(waiting[-1], None)
        if first is None:
            waiting.pop()
        else:
            waiting.append(first)
