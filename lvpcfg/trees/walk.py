"""Walking trees without recursion: treebanks hold trees deeper than Python's stack."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nltk.tree import Tree

from lvpcfg.errors import InputError, listed, show

Result = TypeVar("Result")


def trees_of(name: str, given: Iterable[Tree]) -> list[Tree]:
    """What a caller gave as trees."""
    if isinstance(given, Tree):
        raise InputError(f"{name} is one tree: expected a list of trees.")
    return listed(name, given, "a list of trees, such as read_trees makes of a file")


def require_tree(tree: Any) -> None:
    if not isinstance(tree, Tree):
        raise InputError(f"{show(tree)} is no tree: expected an nltk.Tree, such as read_trees makes of a file.")


def preorder(tree: Tree) -> list[Tree]:
    """Every constituent, parents before children, left to right; words are not among them."""
    found: list[Tree] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        found.append(node)
        todo.extend(child for child in reversed(node) if isinstance(child, Tree))
    return found


def rebuild(tree: Tree, make: Callable[[Tree, list[Any]], Result]) -> Result:
    """Folds a tree bottom-up: `make` gets each node and what it made of the node's children."""
    done: list[Result] = []
    for node in reversed(preorder(tree)):
        # Right siblings come first in this order, so the leftmost child is on top.
        children = [done.pop() if isinstance(child, Tree) else child for child in node]
        done.append(make(node, children))
    return done.pop()


def is_preterminal(node: Tree | str) -> bool:
    return isinstance(node, Tree) and len(node) == 1 and isinstance(node[0], str)


def require_tags(node: Tree) -> None:
    """Refuses a node with a word as its daughter, unless the node is that word's tag."""
    for child in node:
        if isinstance(child, str) and not is_preterminal(node):
            raise InputError(f"the word {show(child)} under {show(node.label())} has no tag: expected (TAG word).")


def tagged_words(tree: Tree) -> list[tuple[str, str]]:
    """The (word, tag) pairs of a tree, left to right."""
    return [(node[0], node.label()) for node in preorder(tree) if is_preterminal(node)]


def words(tree: Tree) -> list[str]:
    return [word for word, _ in tagged_words(tree)]
