"""Posteriors -> trees.

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

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lvpcfg.chart.decode.alternatives import ByWorth, ForestOnHost
from lvpcfg.chart.decode.free_recall import FreeRecall
from lvpcfg.chart.decode.kbest import Search, Trees
from lvpcfg.chart.decode.written import Writer
from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.forest import arrays
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.forest import Forest, Posteriors
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rules import starts_of
from lvpcfg.options import FREE, RECALL, RULE_SUM, VARIATIONAL
from lvpcfg.trees.binarisation import INTERMEDIATE

NEGLIGIBLE = 1e-6  # a posterior below zero by no more than this is rounding


@dataclass(frozen=True)
class Worth:
    """The score that a posterior adds to a tree, elementwise; -inf for what is impossible."""

    decoder: str
    has_unary_rules: bool

    def rule(self, posterior: Float[Tensor, "..."], parent: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Of a rule at a split, or at the root, given its posterior and that of its parent."""
        if self.decoder == RECALL:
            return torch.where(posterior != 0, 0.0, -math.inf).to(posterior.dtype)
        if self.decoder == RULE_SUM:
            return torch.where(posterior > 0, posterior, -math.inf)
        log = _log(posterior)
        return log - torch.where(parent > 0, parent, 1).log() if self.decoder == VARIATIONAL else log

    def step(
        self, posterior: Float[Tensor, "..."], top: Float[Tensor, "..."], real: Bool[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """Of a step from bottom to top. `top` is the posterior of the symbol above; `real` says that binarisation did
        not add this symbol, so that it counts."""
        worth = self.rule(posterior, top)
        if self.decoder == RECALL:
            return worth + top.abs() * real
        return worth if self.has_unary_rules else torch.where(worth > -math.inf, 0.0, worth)

    def tag(self, posterior: Float[Tensor, "*words"]) -> Float[Tensor, "*words"]:
        """Of a word's tag."""
        return posterior.abs() if self.decoder == RECALL else self.rule(posterior, posterior)


def _log(posterior: Tensor) -> Tensor:
    """-inf for what is not above zero; clamped before the logarithm, which is slow at such numbers."""
    tiny = torch.finfo(posterior.dtype).tiny
    log = posterior.clamp_min(tiny).log_()
    return torch.nn.functional.threshold(log, math.log(2 * tiny), -math.inf, inplace=True)


class BestTrees:
    """The best tree below every node: its worth, and the children of its topmost edge.

    A node at the top of a span has one child, the node at its bottom. A missing child is the node `nothing`. Nodes
    without a tree are worth -inf.
    """

    def __init__(self, nodes: int, like: Float[Tensor, "..."]) -> None:
        self.worth = like.new_full((nodes + 1,), -math.inf)
        self.nothing = nodes
        self.worth.narrow(0, nodes, 1).zero_()
        self.left = torch.full((nodes + 1,), self.nothing, device=like.device)
        self.right = torch.full((nodes + 1,), self.nothing, device=like.device)

    def put(
        self,
        nodes: Int64[Tensor, "nodes"],
        left: Int64[Tensor, "nodes"],
        right: Int64[Tensor, "nodes"],
        worth: Float[Tensor, "nodes"],
    ) -> None:
        """The best edges of nodes that have none yet."""
        self.worth.index_copy_(0, nodes, worth)
        self.left.index_copy_(0, nodes, left)
        self.right.index_copy_(0, nodes, right)

    def skeletons(
        self,
        tops: Int64[Tensor, "sentences"],
        lengths: Int64[Tensor, "sentences"],
        describe: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> list[Skeleton | None]:
        """The trees below the top nodes; None where that is `nothing`, or where a node of the tree has no edge.

        `describe` gives the start, width and symbol of nodes. A tree over n words has 2n - 1 spans, so that the index
        of every span in preorder follows from the widths of those before it: all trees are walked at once, and the
        host need not wait for any.
        """
        first = starts_of(2 * lengths - 1)
        total, longest = torch.stack([first[-1], lengths.max()]).tolist()
        # The top node of each span; the last is none.
        above = torch.full((total + 1,), self.nothing, device=tops.device)
        above[first[:-1]] = tops
        place = torch.arange(total + 1, device=tops.device)

        def known(nodes: Tensor) -> tuple[Tensor, ...]:
            return describe(torch.where(nodes == self.nothing, 0, nodes))

        filled = 0
        for _ in range(longest - 1):  # one more generation
            below = self.left[above]
            left, right = self.left[below], self.right[below]
            inner = left != self.nothing
            above[torch.where(inner, place + 1, total)] = left
            above[torch.where(inner, place + 2 * known(left)[1], total)] = right
            above[total] = self.nothing
            if arrays.on_host(above):
                before, filled = filled, int((above != self.nothing).sum())
                if filled == before:
                    break
        below = self.left[above]
        left = self.left[below]
        (start, width, top), (_, _, bottom), (_, split, _) = known(above), known(below), known(left)
        split = torch.where(left == self.nothing, 0, split)
        there = ((above != self.nothing) & (below != self.nothing)).long()
        rows = torch.stack([there, start, width, top, bottom, split], 1).tolist()
        trees = [rows[begin:end] for begin, end in itertools.pairwise(first.tolist())]
        # A tree with a gap is none: a choice above it underflowed.
        return [[Node(*row[1:]) for row in tree] if all(row[0] for row in tree) else None for tree in trees]


class Decoder:
    """Decodes forests of a grammar's symbols, by one grammar or by a product of several."""

    def __init__(self, name: str, grammar: Grammar, rules: FineRules, signed: bool) -> None:
        self.name, self.signed, self.grammar, device = name, signed, grammar, grammar.root.device
        self.interminals = len(grammar.symbols.interminals)
        self.has_unary_rules = len(grammar.unary_rules) > 0
        self.real = torch.tensor(
            [not symbol.startswith(INTERMEDIATE) for symbol in grammar.symbols.names], device=device
        )
        number, binary = torch.arange(len(rules.sizes), device=device), len(grammar.binary)
        self.is_step = (number >= binary) & (number < binary + len(rules.steps))
        self.negative = 0  # rules whose posterior came out below zero
        self.recalled = 0  # sentences that those left without a tree: labelled recall instead

    def worth(self, decoder: str | None = None) -> Worth:
        return Worth(decoder or self.name, self.has_unary_rules)

    def trees(
        self,
        forest: Forest,
        nodes: Nodes,
        posteriors: Sequence[Posteriors],
        lengths: Int64[Tensor, "sentences"],
        k: int = 1,
    ) -> list[list[Skeleton]]:
        """The k best trees of each sentence, best first; fewer where there are fewer."""
        if self.name == FREE:
            total = torch.stack([some.nodes for some in posteriors]).sum(0)
            return self.free_recall(nodes, total, lengths, posteriors[0].log_z > -math.inf, k)
        if self.signed:
            self.negative += sum(int((some.edges < -NEGLIGIBLE).sum()) for some in posteriors)

        def decode(decoder: str) -> list[list[Skeleton]]:
            worths = [self.worths(decoder, forest, nodes, some) for some in posteriors]
            edges, leaves = (torch.stack(parts).sum(0) for parts in zip(*worths, strict=True))
            best = best_trees(forest, edges, leaves)
            found = trees_of(forest, nodes, best, lengths)
            if k == 1:
                return as_lists(found)
            return self.k_best(ByWorth(ForestOnHost(forest, nodes), edges, best.worth), forest.tops, found, k)

        return self.or_recall(decode)

    def free_recall(
        self,
        nodes: Nodes,
        posterior: Float[Tensor, "at_least_nodes"],
        lengths: Int64[Tensor, "sentences"],
        possible: Bool[Tensor, "sentences"],
        k: int,
    ) -> list[list[Skeleton]]:
        """By free recall, of the sentences that are possible."""
        known = FreeRecall(nodes, posterior, lengths, self.real, self.interminals)
        if k > 1:
            return known.k_best(possible.tolist(), k, self.writer.labels_of_step)
        return [[tree] if has_tree else [] for tree, has_tree in zip(known.trees(), possible.tolist(), strict=True)]

    def k_best(
        self, trees: Trees, tops: Int64[Tensor, "sentences"], first: Sequence[Skeleton | None], k: int
    ) -> list[list[Skeleton]]:
        """The k best trees of each sentence, of which the first is known, None where there is none."""
        return [
            [] if best is None else Search(trees, self.writer.labels_of_step).best(trees.node_on_top(top), k, best)
            for top, best in zip(tops.tolist(), first, strict=True)
        ]

    def or_recall(self, decode: Callable[[str], list[list[Skeleton]]]) -> list[list[Skeleton]]:
        """By the decoder; where negative posteriors leave no tree, by labelled recall."""
        found = decode(self.name)
        if not self.signed or self.name == RECALL or all(found):
            return found
        recalled = decode(RECALL)
        self.recalled += sum(not trees and bool(others) for trees, others in zip(found, recalled, strict=True))
        return [trees or others for trees, others in zip(found, recalled, strict=True)]

    @cached_property
    def writer(self) -> Writer:
        return Writer(self.grammar)

    def worths(self, decoder: str, forest: Forest, nodes: Nodes, known: Posteriors) -> tuple[Tensor, Tensor]:
        """The worth of each edge and of each leaf."""
        worth, edges, parents = self.worth(decoder), known.edges, known.nodes[forest.parent]
        is_step = self.is_step[forest.rule]
        real = self.real[nodes.symbol[torch.where(is_step, forest.parent, 0)]]
        of_edges = torch.where(is_step, worth.step(edges, parents, real), worth.rule(edges, parents))
        return of_edges, worth.tag(known.nodes[forest.leaves])


def as_lists(trees: Sequence[Skeleton | None]) -> list[list[Skeleton]]:
    """The best tree of each sentence as a list, without any where there is none."""
    return [[] if tree is None else [tree] for tree in trees]


def best_trees(forest: Forest, edges: Float[Tensor, "edges"], leaves: Float[Tensor, "leaves"]) -> BestTrees:
    """The best trees of a forest, given the worth of each edge and of each leaf. Of equal edges the first is chosen."""
    chosen, worth = best_edges(forest, edges, leaves)
    best = chosen_trees(forest, chosen, edges)
    best.worth.narrow(0, 0, len(worth)).copy_(worth)
    return best


def best_edges(
    forest: Forest, edges: Float[Tensor, "edges"], leaves: Float[Tensor, "leaves"]
) -> tuple[Int64[Tensor, "nodes_and_2"], Float[Tensor, "nodes_and_2"]]:
    """The topmost edge of the best tree below each node, -1 where there is none, and what that tree is worth."""
    worth = edges.new_full((forest.nodes + 2,), -math.inf)
    worth.narrow(0, forest.nodes + 1, 1).zero_()  # the right child of unary rules
    worth.index_copy_(0, forest.leaves, leaves)
    none = len(edges)
    chosen = torch.full((forest.nodes + 2,), none, device=edges.device)
    for here in by_level(forest):
        parent = take(forest.parent, here)
        offered = take(edges, here) + take(worth, take(forest.left, here)) + take(worth, take(forest.right, here))
        worth.scatter_reduce_(0, parent, offered, "amax")
        won = (offered == take(worth, parent)) & (offered > -math.inf)
        chosen.scatter_reduce_(0, parent, torch.where(won, here, none), "amin")
    return torch.where(chosen < none, chosen, -1), worth


def by_level(forest: Forest) -> tuple[Int64[Tensor, "some"], ...]:
    """The edges of each level, from the lowest."""
    order = forest.level.argsort(stable=True)
    return order.split(torch.unique_consecutive(forest.level[order], return_counts=True)[1].tolist())


def chosen_trees(forest: Forest, chosen: Int64[Tensor, "nodes_and_2"], like: Float[Tensor, "..."]) -> BestTrees:
    """The trees in which each node has the edge `chosen`, -1 where it has none."""
    best = BestTrees(forest.nodes + 2, like)
    has_edge, edges = chosen >= 0, chosen.clamp_min(0)
    for mine, column in ((best.left, forest.left), (best.right, forest.right)):
        mine[:-1] = torch.where(has_edge, take(column, edges) if len(column) else edges, best.nothing)
    best.worth[:-1] = torch.where(has_edge, 0.0, -math.inf)
    return best


def trees_of(
    forest: Forest, nodes: Nodes, best: BestTrees, lengths: Int64[Tensor, "sentences"]
) -> list[Skeleton | None]:
    """The trees below the top nodes of a forest; the only child of each is the top of the span of all words."""
    if not len(nodes.symbol):
        return [None] * len(lengths)
    tops = torch.where(best.worth[forest.tops] > -math.inf, best.left[forest.tops], best.nothing)

    def describe(some: Tensor) -> tuple[Tensor, ...]:
        return nodes.start[some], nodes.width[some], nodes.symbol[some]

    return best.skeletons(tops, lengths, describe)
