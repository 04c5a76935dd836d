"""The trees that observed trees are compared with: what pruning leaves of their sentences, and always the trees.

    log p(tree | words) <= log w(tree) - log Z,     Z the sum over the candidates

The right side is never above 0, since the tree is one of the candidates, unary steps included.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.packed import Forest
from lvpcfg.chart.forest.prune import Nodes


def with_trees(
    forest: Forest, nodes: Nodes, trees: Forest, tree_nodes: Nodes, sentences: Int64[Tensor, "trees"], rules: int
) -> tuple[Forest, Nodes]:
    """A forest with all nodes and edges of observed trees in it; `sentences` are those of the trees' tops.

    Both number the rules of a grammar alike; `rules` is how many there are.
    """
    every = Nodes(*(torch.cat(pair) for pair in zip(vars(nodes).values(), vars(tree_nodes).values(), strict=True)))
    most = every.width.amax() + 1
    key = (every.sentence * most + every.start) * most + every.width
    key = 2 * (key * (every.symbol.amax() + 1) + every.symbol) + every.top.long()
    known, number = key.unique(return_inverse=True)
    place = torch.empty_like(known).index_copy_(0, number, torch.arange(len(key), device=key.device))
    total, specials = len(known) + len(forest.tops), torch.arange(2, device=key.device)
    of_forest = torch.cat([number[: len(nodes.symbol)], len(known) + torch.arange(total + 2 - len(known)).to(key)])
    of_trees = torch.cat([number[len(nodes.symbol) :], len(known) + sentences, total + specials])
    level, rule = (torch.cat([getattr(forest, name), getattr(trees, name)]) for name in ("level", "rule"))
    parent, left, right = (
        torch.cat([take(of_forest, getattr(forest, name)), take(of_trees, getattr(trees, name))])
        for name in ("parent", "left", "right")
    )
    # An edge is known by its parent, its left child and its rule.
    key, order = ((parent * (total + 2) + left) * rules + rule).sort(stable=True)
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    edges = order[first]
    leaves = torch.cat([take(of_forest, forest.leaves), take(of_trees, trees.leaves)]).unique()
    tops = len(known) + torch.arange(len(forest.tops), device=leaves.device)
    level, rule, parent, left, right = (take(column, edges) for column in (level, rule, parent, left, right))
    return Forest(total, level, rule, parent, left, right, leaves, tops), Nodes(
        *(take(column, place) for column in vars(every).values())
    )
