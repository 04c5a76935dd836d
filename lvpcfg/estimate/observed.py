"""The skeletal trees of a treebank as a forest in which each node has one edge."""

import numpy as np
import torch

from lvpcfg.chart.forest.forest import Forest
from lvpcfg.trees.treebank import Treebank


def observed_forest(treebank: Treebank, device: torch.device) -> Forest:
    """Its rules are numbered binary first, then unary, then a root rule for each symbol."""
    nodes, trees = len(treebank.symbol), len(treebank)
    left, right, rule, roots = (
        column.numpy() for column in (treebank.left, treebank.right, treebank.rule, treebank.roots[:-1])
    )
    inner = np.flatnonzero(left >= 0)
    binary, unary = len(treebank.binary_rules), len(treebank.unary_rules)
    is_unary = right[inner] < 0
    one = nodes + trees + 1
    height = _heights(left, right)
    columns = (
        np.append(height[inner], np.full(trees, height.max() + 1)),
        np.append(rule[inner] + np.where(is_unary, binary, 0), binary + unary + treebank.symbol.numpy()[roots]),
        np.append(inner, nodes + np.arange(trees)),
        np.append(left[inner], roots),
        np.append(np.where(is_unary, one, right[inner]), np.full(trees, one)),
        np.flatnonzero(left < 0),
        nodes + np.arange(trees),
    )
    return Forest(nodes + trees, *(torch.from_numpy(column).to(device) for column in columns))


def _heights(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[nodes]: 0 for words, else one more than the highest child.

    From the words up: a node is looked at once, when the last of its children is done.
    """
    nodes = len(left)
    height = np.zeros(nodes, dtype=np.int64)
    inner = np.flatnonzero(left >= 0)
    missing, parent = np.zeros(nodes, dtype=np.int64), np.full(nodes, -1)
    for child in (left, right):
        some = inner[child[inner] >= 0]
        missing[some] += 1
        parent[child[some]] = some
    done, above = np.flatnonzero(left < 0), 0
    while len(done):
        height[done] = above
        above += 1
        up = parent[done]
        up = up[up >= 0]
        np.subtract.at(missing, up, 1)
        done = np.unique(up[missing[up] == 0])
    return height
