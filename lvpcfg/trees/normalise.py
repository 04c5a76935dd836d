"""Raw treebank trees -> trees a grammar can be read from.

Traces and the constituents they leave empty go, function tags and indices go (NP-SBJ-1, NP=2 and
ADVP|PRT become NP, NP and ADVP; -LRB- and PRP$ stay), X over X becomes one X, and one label, TOP,
stands on top.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from nltk.tree import Tree

from lvpcfg.trees.walk import is_preterminal, rebuild, require_tags, require_tree

TOP = "TOP"
WRAPPERS = frozenset({"", "TOP", "ROOT"})
BARE_LABEL = re.compile(r"-[^-]*-|[^-=|]+")
TRACE_TAG, TRACE_WORD = "-NONE-", "*0*"


def normalise(tree: Tree) -> Tree | None:
    """The normalised tree, or None if the tree has only traces."""
    require_tree(tree)
    root: Tree | None = rebuild(tree, _normalise_node)
    if root is None:
        return None
    children = [root]
    while len(children) == 1 and children[0].label() in WRAPPERS and not is_preterminal(children[0]):
        children = list(children[0])
    return Tree(TOP, children)


def normalise_all(trees: Iterable[Tree]) -> list[Tree]:
    """The normalised trees, without those that hold nothing but traces."""
    return [normal for normal in map(normalise, trees) if normal is not None]


@cache
def bare_label(label: str) -> str:
    """The label without function tags and indices."""
    match = BARE_LABEL.match(label)
    return match[0] if match else label


def _normalise_node(node: Tree, children: list[Any]) -> Tree | None:
    label = bare_label(node.label())
    if is_preterminal(node):
        return None if label == TRACE_TAG or node[0] == TRACE_WORD else Tree(label, children)
    require_tags(node)
    kept = [child for child in children if child is not None]
    if not kept:
        return None
    if len(kept) == 1 and kept[0].label() == label:
        return kept[0]
    return Tree(label, kept)
