"""Forests -> trees: the recursion of `decode` over the nodes that are left, by the posteriors of one or more grammars.

With several grammars (Petrov 2010) the logarithms of posteriors add up: a product of grammars. Where posteriors
themselves are added, so they are over the grammars.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.decode import PRODUCT, RECALL, RULE_SUM, VARIATIONAL, Node, Skeleton
from lvpcfg.chart.forest import Forest, Plan
from lvpcfg.chart.prune import FineRules, Spans

FOREST_DECODERS = (PRODUCT, RULE_SUM, VARIATIONAL, RECALL)


@dataclass(frozen=True, eq=False)
class Posteriors:
    """Under one grammar: log Z of each sentence, posteriors of nodes and of edges."""

    log_z: Tensor  # [sentences], float64
    nodes: Tensor  # [nodes]
    edges: Tensor  # [edges]


def posteriors(forest: Forest, spans: Spans, rules: FineRules, leaf: Tensor) -> Posteriors:
    """`leaf` is [words of all sentences, tag states]... """
    plan = Plan(forest, rules.sizes)
    weights = plan.weights(rules.values)
    scores = plan.inside(weights, leaf)
    beta = plan.outside(weights, scores, torch.ones_like(scores.log_z))
    nodes = (scores.alpha * beta).sum(1)
    return Posteriors(scores.log_z, nodes, plan.edge_posteriors(weights, scores, beta))


def worths(forest: Forest, known: Posteriors, decoder: str, real: Tensor) -> tuple[Tensor, Tensor]:
    """What each edge and each leaf is worth to a tree; `real` [edges] is 1 where recall counts the parent."""
    parent, leaves = known.nodes[forest.parent], known.nodes[forest.leaves]
    if decoder == RECALL:
        return parent * real, torch.zeros_like(leaves)
    if decoder == RULE_SUM:
        return (torch.where(values > 0, values, -math.inf) for values in (known.edges, leaves))
    edges = _log(known.edges)
    if decoder == VARIATIONAL:
        return edges - torch.where(parent > 0, parent, 1).log(), torch.zeros_like(leaves)
    return edges, _log(leaves)


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0).log()


def best_trees(forest: Forest, spans: Spans, edges: Tensor, leaves: Tensor) -> list[Skeleton | None]:
    """The tree of each sentence that is worth most, or None where there is none."""
    best = edges.new_full((forest.nodes + 2,), -math.inf)
    best[-1] = 0
    best.index_copy_(0, forest.leaves, leaves)
    chosen = torch.full((forest.nodes + 2,), -1, dtype=torch.int64, device=edges.device)
    order = forest.level.argsort(stable=True)
    sizes = torch.unique_consecutive(forest.level[order], return_counts=True)[1].tolist()
    for here in order.split(sizes):
        parent = forest.parent[here]
        worth = edges[here] + best[forest.left[here]] + best[forest.right[here]]
        best.scatter_reduce_(0, parent, worth, "amax")
        won = (worth == best[parent]) & (worth > -math.inf)
        chosen.index_copy_(0, parent[won], here[won])
    left, right = (column.tolist() for column in (forest.left, forest.right))
    start, width, symbol = (column.tolist() for column in (spans.start, spans.width, spans.symbol))
    edge, found = chosen.tolist(), []
    for top in forest.tops.tolist():
        nodes: Skeleton = []
        waiting = [left[edge[top]]] if edge[top] >= 0 else []
        while waiting:
            above = waiting.pop()
            below = left[edge[above]]
            children = (left[edge[below]], right[edge[below]]) if edge[below] >= 0 else ()
            split = width[children[0]] if children else 0
            nodes.append(Node(start[above], width[above], symbol[above], symbol[below], split))
            waiting += reversed(children)
        found.append(nodes or None)
    return found
