"""Posteriors of a forest -> trees.

    max-rule     argmax over trees of prod of q(rule, i, k, j), the posteriors of skeletal rules (Petrov & Klein 2007)
    max-rule-sum the same with sum instead of prod
    variational  prod of q / posterior of the parent
    recall       argmax of sum of mu(a, i, j) over trees of the grammar (Goodman 1996)
    free-recall  the same over all trees, one label a span

All but free recall are one recursion over the edges of a forest, whether pruning left it (`coarse_to_fine.py`) or it is
all of a chart (`exhaustive.py`):

    best(node) = max over its edges of  worth(edge) + best(left) + best(right)

A span has a bottom symbol and a top symbol, and the step between them, any number of unary rules or none, is scored as
one rule; a grammar without unary rules has no such step to score. Recall counts the top symbol of every span and the
tag of every word: what stands between is free, so that it is not tempted into long chains.

With several grammars (Petrov 2010: products of grammars) what a rule is worth adds up over them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import FREE, RECALL, RULE_SUM, VARIATIONAL
from lvpcfg.trees.binarisation import INTERMEDIATE

NEGLIGIBLE = 1e-6  # a posterior below zero by no more than this is rounding


@dataclass(frozen=True, eq=False)
class Posteriors:
    """Of a forest under one grammar."""

    log_z: Tensor  # [sentences], float64: log |Z|
    nodes: Tensor  # [nodes + 2]
    edges: Tensor  # [edges]


class Decoder:
    """What posteriors are worth to trees of a grammar's symbols."""

    def __init__(self, name: str, grammar: Grammar, rules: FineRules) -> None:
        self.name, device = name, grammar.root.device
        self.interminals = len(grammar.symbols.interminals)
        self.real = torch.tensor(
            [not symbol.startswith(INTERMEDIATE) for symbol in grammar.symbols.names], device=device
        )
        number = torch.arange(len(rules.sizes), device=device)
        binary = len(grammar.binary)
        self.is_step = (number >= binary) & (number < binary + len(rules.steps))
        self.has_unary_rules = len(grammar.unary_rules) > 0
        self.signed = grammar.signed
        self.negative = 0  # rules whose posterior came out below zero
        self.recalled = 0  # sentences that those left without a tree: labelled recall instead

    def trees(
        self, forest: Forest, nodes: Nodes, posteriors: Sequence[Posteriors], lengths: Tensor
    ) -> tuple[list[Skeleton | None], Tensor | None]:
        """The best tree of each sentence, None where there is none, by one grammar or by a product of several.

        Also the edges of the trees, [nodes + 2], unless they need not be those of the grammar (free recall).
        """
        if self.name == FREE:
            total = torch.stack([one.nodes for one in posteriors]).sum(0)
            found = free_recall(nodes, total, lengths, self.real, self.interminals)
            possible = (posteriors[0].log_z > -math.inf).tolist()
            return [tree if one else None for tree, one in zip(found, possible, strict=True)], None
        chosen, _ = self.best(forest, nodes, posteriors)
        return skeletons(forest, nodes, chosen), chosen

    def best(self, forest: Forest, nodes: Nodes, posteriors: Sequence[Posteriors]) -> tuple[Tensor, Tensor]:
        """The edge of each node in the best tree below it, and what the best tree of each sentence is worth."""
        if self.signed:
            self.negative += sum(int((one.edges < -NEGLIGIBLE).sum()) for one in posteriors)
        chosen, worth = self._best(self.name, forest, nodes, posteriors)
        if not self.signed or self.name == RECALL:
            return chosen, worth
        recalled, of_recalled = self._best(RECALL, forest, nodes, posteriors)
        lost = worth == -math.inf
        self.recalled += int((lost & (of_recalled > -math.inf)).sum())
        of_lost = torch.cat([lost[nodes.sentence], lost, lost.new_zeros(2)])  # [nodes + 2]
        return torch.where(of_lost, recalled, chosen), worth

    def _best(
        self, decoder: str, forest: Forest, nodes: Nodes, posteriors: Sequence[Posteriors]
    ) -> tuple[Tensor, Tensor]:
        worths = [self._worth(decoder, forest, nodes, one) for one in posteriors]
        edges, leaves = (torch.stack(parts).sum(0) for parts in zip(*worths, strict=True))
        return best_edges(forest, edges, leaves)

    def _worth(self, decoder: str, forest: Forest, nodes: Nodes, known: Posteriors) -> tuple[Tensor, Tensor]:
        """What each edge and each leaf is worth to a tree."""
        leaves, edges, parents = known.nodes[forest.leaves], known.edges, known.nodes[forest.parent]
        step = self.is_step[forest.rule]
        if decoder == RECALL:  # the symbols above unary rules, and the tags
            above = nodes.symbol[torch.where(step, forest.parent, 0)]
            possible = torch.where(edges != 0, 0.0, -math.inf)
            return torch.where(step & self.real[above], parents.abs(), 0) + possible, leaves.abs()
        if decoder == RULE_SUM:
            worth, of_leaves = edges, torch.where(leaves > 0, leaves, -math.inf)
        elif decoder == VARIATIONAL:
            worth, of_leaves = _log(edges) - _log(parents), torch.zeros_like(leaves)
        else:
            worth, of_leaves = _log(edges), _log(leaves)
        if not self.has_unary_rules:  # then the step from bottom to top is no decision
            worth = worth.masked_fill(step, 0)
        return torch.where(edges > 0, worth, -math.inf), of_leaves


def _log(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def best_edges(forest: Forest, edges: Tensor, leaves: Tensor) -> tuple[Tensor, Tensor]:
    """The edge of each node, [nodes + 2], in the best tree below it, -1 where there is none; and the worth of the best
    tree of each sentence, -inf where there is none. `edges` and `leaves` say what each is worth.
    """
    best = edges.new_full((forest.nodes + 2,), -math.inf)
    best[-1] = 0
    best.index_copy_(0, forest.leaves, leaves)
    chosen = torch.full((forest.nodes + 2,), -1, device=edges.device)
    order = forest.level.argsort(stable=True)
    sizes = torch.unique_consecutive(forest.level[order], return_counts=True)[1].tolist()
    for here in order.split(sizes):
        parent = forest.parent[here]
        worth = edges[here] + best[forest.left[here]] + best[forest.right[here]]
        best.scatter_reduce_(0, parent, worth, "amax")
        won = (worth == best[parent]) & (worth > -math.inf)
        chosen.index_copy_(0, parent[won], here[won])
    return chosen, best[forest.tops]


def skeletons(forest: Forest, nodes: Nodes, chosen: Tensor) -> list[Skeleton | None]:
    """The tree of each sentence, or None where there is none."""
    left, right, edge, tops = (column.tolist() for column in (forest.left, forest.right, chosen, forest.tops))
    start, width, symbol = (column.tolist() for column in (nodes.start, nodes.width, nodes.symbol))
    found: list[Skeleton | None] = []
    for top in tops:
        tree: Skeleton = []
        waiting = [left[edge[top]]] if edge[top] >= 0 else []
        while waiting:
            above = waiting.pop()
            if edge[above] < 0:  # what was chosen above it underflowed
                tree = []
                break
            below = left[edge[above]]
            children = (left[edge[below]], right[edge[below]]) if edge[below] >= 0 else ()
            split = width[children[0]] if children else 0
            tree.append(Node(start[above], width[above], symbol[above], symbol[below], split))
            waiting += reversed(children)
        found.append(tree or None)
    return found


def free_recall(
    nodes: Nodes, posterior: Tensor, lengths: Tensor, real: Tensor, interminals: int
) -> list[Skeleton | None]:
    """argmax over all binary trees of sum of |mu(label, i, j)|, with the best label of each span, or none.

    Symbols that binarisation made score 0; a span whose likeliest symbol is one of them gets no label.
    """
    batch, n = len(lengths), int(lengths.max())
    cell = (nodes.sentence * n + nodes.start) * n + nodes.width - 1  # [sentence, start, width]
    posterior = posterior[: len(cell)].abs()
    unlabelled = int(real.long().argmin())  # a symbol that binarisation made, if there is one

    def likeliest(layer: Tensor) -> Tensor:
        """[batch, starts, widths]: symbols."""
        at, symbol = cell[layer], nodes.symbol[layer]
        largest = posterior.new_zeros(batch * n * n).scatter_reduce(0, at, posterior[layer], "amax")
        won = posterior[layer] == largest[at]
        labels = torch.full((batch * n * n,), unlabelled, device=at.device)
        return labels.index_copy_(0, at[won], symbol[won]).view(batch, n, n)

    worth = torch.where(nodes.top & real[nodes.symbol], posterior, 0)
    best = posterior.new_zeros(batch * n * n).scatter_reduce(0, cell, worth, "amax").view(batch, n, n)
    splits = torch.zeros_like(best, dtype=torch.int64)
    for width in range(2, n + 1):
        start = torch.arange(n - width + 1, device=cell.device).unsqueeze(1)
        part = torch.arange(1, width, device=cell.device)
        value, split = (best[:, start, part - 1] + best[:, start + part, width - part - 1]).max(2)
        best[:, : n - width + 1, width - 1] += value
        splits[:, : n - width + 1, width - 1] = split + 1
    tops, bottoms, parts = (grid.tolist() for grid in (likeliest(nodes.top), likeliest(~nodes.top), splits))
    found: list[Skeleton | None] = []
    for sentence, length in enumerate(lengths.tolist()):
        tree: Skeleton = []
        waiting = [(0, length)]
        while waiting:
            at, width = waiting.pop()
            label, below, left = (grid[sentence][at][width - 1] for grid in (tops, bottoms, parts))
            tree.append(Node(at, width, label, label if label >= interminals else below, left))
            if left:
                waiting += [(at + left, width - left), (at, left)]
        found.append(tree)
    return found
