"""Trees as sentences: what grammar induction learns from, and is scored on."""

from collections.abc import Sequence
from typing import Any

from nltk.tree import Tree

from lvpcfg.errors import InputError, show
from lvpcfg.trees.walk import is_preterminal, rebuild

PUNCTUATION = frozenset({",", ":", ".", "``", "''", "-LRB-", "-RRB-"})  # tags of the Penn Treebank
PHRASE, TAG = "X", "T"  # the labels of trees that say nothing but what belongs together


def without_punctuation(tree: Tree) -> Tree | None:
    """A normalised tree without the words whose tags are punctuation, nor what that leaves empty; None: all is."""

    def make(node: Tree, children: list[Any]) -> Tree | None:
        if is_preterminal(node):
            return None if node.label() in PUNCTUATION else node
        kept = [child for child in children if child is not None]
        return Tree(node.label(), kept) if kept else None

    found: Tree | None = rebuild(tree, make)
    return found


def flat(sentence: Tree | Sequence[str]) -> Tree:
    """A tree as it is; the words of a sentence as a tree without phrases."""
    if isinstance(sentence, Tree):
        return sentence
    if isinstance(sentence, str) or not sentence or not all(isinstance(word, str) and word for word in sentence):
        raise InputError(f"{show(sentence)} is no sentence: expected a tree, or a list of one or more words.")
    return Tree("", [Tree(TAG, [word]) for word in sentence])
