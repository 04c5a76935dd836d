"""Normalised trees -> binarised skeletal trees, and back exactly.

A -> B C D becomes A -> B @A, @A -> C D (right) or A -> @A D, @A -> B C (left). With horizontal
order h an intermediate symbol remembers the last h daughters already generated, @A|B; with
vertical order 2 phrase labels remember their parent, NP^S. Unary chains become one label, S+VP, or
stay as unary rules. The root is never collapsed: TOP is no symbol of the grammar.

The marks @ + ^ | are written by this file alone: where a treebank's label holds one, it is
percent-encoded.
"""

import re
from functools import cache
from urllib.parse import unquote

from nltk.tree import Tree

from lvpcfg.trees.binarisation import CHAIN, INTERMEDIATE, PARENT, RIGHT, SIBLING, Binarisation
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.walk import is_preterminal, rebuild, require_tags

MARKS = re.compile(r"[%+^|]|^@")


def binarise(tree: Tree, scheme: Binarisation = RIGHT) -> Tree:
    """The skeletal tree; `debinarise` gives `tree` back."""

    def make(node: Tree, children: list[Tree | str]) -> Tree:
        label = _encode(node.label())
        if is_preterminal(node):
            return Tree(label, children)
        require_tags(node)
        finished = [_finish(child, label, scheme) for child in children]
        if scheme.unaries == "collapse" and len(finished) == 1 and node is not tree:
            (child,) = finished
            return Tree(label + CHAIN + child.label(), list(child))
        return Tree(label, finished)

    return _split(rebuild(tree, make), scheme)


def debinarise(tree: Tree) -> Tree:
    """Undoes `binarise`, whatever scheme it used."""

    def make(node: Tree, children: list[list[Tree | str] | str]) -> list[Tree | str]:
        return unbinarised(node.label(), [x for child in children for x in ([child] if type(child) is str else child)])

    return rebuild(tree, make)[0]


def unbinarised(label: str, children: list[Tree | str]) -> list[Tree | str]:
    """What a node of a binarised tree becomes, given what is under it: that itself, if binarisation made the node."""
    for name in reversed(labels_of(label)):
        children = [Tree(name, children)]
    return children


def with_top(children: list[Tree | str]) -> Tree:
    """What is below the root of a binarised tree, with TOP on it."""
    top = Tree(TOP, children)
    return top[0] if top[0].label() == TOP else top


def labels_of(label: str) -> tuple[str, ...]:
    """The labels that a node of a binarised tree stands for, outermost first: none, if binarisation made the node."""
    return () if label.startswith(INTERMEDIATE) else _decode(label)


def _finish(child: Tree, parent: str, scheme: Binarisation) -> Tree:
    """Annotates a child with its parent, then splits it: an intermediate symbol shows both."""
    if scheme.vertical == 2 and (CHAIN in child.label() or not is_preterminal(child)):
        top, chain, rest = child.label().partition(CHAIN)
        child = Tree(top + PARENT + parent + chain + rest, list(child))
    return _split(child, scheme)


def _split(node: Tree, scheme: Binarisation) -> Tree:
    children = list(node)
    if len(children) <= 2:
        return node
    rightwards = scheme.direction == "right"
    if not rightwards:
        children.reverse()
    names = [_top(child.label()) for child in children]
    rest = children[-1]
    for i in range(len(children) - 2, -1, -1):
        label = node.label()
        if i > 0:
            known = names[max(0, i - int(min(scheme.horizontal, i))) : i]
            label = INTERMEDIATE + SIBLING.join([label, *(known if rightwards else reversed(known))])
        rest = Tree(label, [children[i], rest] if rightwards else [rest, children[i]])
    return rest


def _top(label: str) -> str:
    return label.partition(CHAIN)[0].partition(PARENT)[0]


@cache
def _encode(label: str) -> str:
    return MARKS.sub(lambda mark: f"%{ord(mark[0]):02X}", label)


@cache
def _decode(label: str) -> tuple[str, ...]:
    return tuple(unquote(part.partition(PARENT)[0]) for part in label.split(CHAIN))
