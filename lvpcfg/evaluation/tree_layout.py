"""Where the labels and edges of a tree stand in a picture.

Each subtree has an interval of the line to itself, at least as wide as its labels; a parent stands over the middle
between its first and its last child; words stand on one line at the bottom. Edges fall from one row to the next, and to
a word straight down the word's own interval, so that no edge crosses a label.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from nltk.tree import Tree

from lvpcfg.trees.walk import rebuild

ROW, LABEL, GAP = 27.0, 13.0, 9.0  # points: between rows, the height of labels, between neighbours

WidthOf = Callable[[str, bool], float]  # the width of a label in points, and whether it is a word


@dataclass(frozen=True)
class Label:
    """A label and its box."""

    text: str
    x: float  # its middle
    y: float
    width: float
    bracket: tuple[int, int, str] | None  # first word, one past the last, label; None for a word


@dataclass(frozen=True)
class Layout:
    labels: list[Label]
    edges: list[list[tuple[float, float]]]  # each a line through its points
    width: float  # of all: labels are between 0 and this,
    height: float


@dataclass(frozen=True)
class _Part:
    """A subtree, or a word, around its own middle."""

    text: str
    is_word: bool
    label: float  # width
    left: float  # how far it reaches
    right: float
    rows: int  # above the row of words
    words: int
    below: tuple[tuple[float, "_Part"], ...]  # children, and where they are from here


def layout(tree: Tree, width_of: WidthOf) -> Layout:
    """Places in points, from the lower left corner."""

    def word(text: str) -> _Part:
        width = width_of(text, True)
        return _Part(text, True, width, width / 2, width / 2, 0, 1, ())

    def parent(node: Tree, found: list[_Part | str]) -> _Part:
        text = str(node.label())
        children = [word(child) if isinstance(child, str) else child for child in found]
        width, places = width_of(text, False), [0.0]
        for before, after in pairwise(children):
            places.append(places[-1] + before.right + GAP + after.left)
        middle = places[-1] / 2
        left = max([width / 2, *(middle + child.left for child in children[:1])])
        right = max([width / 2, *(middle + child.right for child in children[-1:])])
        rows = 1 + max((child.rows for child in children), default=0)
        below = tuple((place - middle, child) for place, child in zip(places, children, strict=False))
        return _Part(text, False, width, left, right, rows, sum(child.words for child in children), below)

    return _placed(rebuild(tree, parent))


def _placed(root: _Part) -> Layout:
    labels: list[Label] = []
    edges: list[list[tuple[float, float]]] = []
    todo = [(root, root.left, root.rows, 0)]
    while todo:
        part, x, row, start = todo.pop()
        y = LABEL / 2 + (0 if part.is_word else row * ROW)
        bracket = None if part.is_word else (start, start + part.words, part.text)
        labels.append(Label(part.text, x, y, part.label, bracket))
        for offset, child in part.below:
            edge = [(x, y - LABEL / 2), (x + offset, y - ROW + LABEL / 2)]
            if child.is_word and row > 1:
                edge.append((x + offset, LABEL))
            edges.append(edge)
            todo.append((child, x + offset, row - 1, start))
            start += child.words
    return Layout(labels, edges, root.left + root.right, root.rows * ROW + LABEL)
