"""Forests -> trees: the decoders of `decode` over what a coarse grammar left, by one fine grammar or by several.

With several grammars (Petrov 2010: products of grammars) what a rule is worth adds up over them: the logarithms of its
posteriors, or the posteriors themselves where those are summed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.forest import Forest, Plan, Posteriors, log_partition, posteriors
from lvpcfg.chart.forest.prune import Coarse, FineRules, Nodes
from lvpcfg.chart.forest.viterbi import best_derivations
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.projection import nonnegative, projected
from lvpcfg.grammar.rules import starts_of
from lvpcfg.options import FREE, RECALL, RULE_SUM, VARIATIONAL, VITERBI
from lvpcfg.trees.binarisation import INTERMEDIATE

FEW = 2  # states of a symbol in the grammars between the coarsest and the fine one
SHARPER = 4  # times the threshold: grammars with some states are surer of themselves


@dataclass(frozen=True)
class Found:
    skeleton: Skeleton | None
    log_z: float  # log p(sentence), of what was left
    log_prob: float  # log p(tree, sentence), where it was asked for


class CoarseToFine:
    """Parses by fine grammars over the same symbols and rules, in the forests that coarser ones leave.

    Those are the coarse grammar, which comes with its cover, and, where the first grammar has a hierarchy, its
    projection to few states. Log-probabilities are those of the first grammar. `stages` is told how long it takes.
    """

    def __init__(
        self, grammars: Sequence[Grammar], coarse: CoarseGrammar, decoder: str, stages: Stages | None = None
    ) -> None:
        self.decoder, self.negative = decoder, 0  # posteriors of rules below zero, through approximations
        self.ways: Counter[str] = Counter()  # sentences that float32, or float64, was not enough for
        self.rules = [FineRules(grammar) for grammar in grammars]
        grammar = nonnegative(grammars[0])
        symbols, device = grammar.symbols, grammar.root.device
        self.stages = stages or Stages(device)
        self.middle = []  # the rules of a grammar with few states, if there is one, and what makes words of its own
        for ancestor in [level for level in grammar.hierarchy if 0 < int(level.max()) < FEW][-1:]:
            few = projected(grammar, expected_states(grammar), ancestor)
            self.middle.append((FineRules(few.grammar), few.words))
        assert coarse.cover is not None
        self.coarse = Coarse(coarse.grammar, coarse.cover, self.stages)
        self.real = torch.tensor([not name.startswith(INTERMEDIATE) for name in symbols.names], device=device)
        rules, steps = len(grammar.binary_rules), len(self.coarse.rules.steps)
        kinds = torch.tensor([0, 1, 0], device=device).repeat_interleave(
            torch.tensor([rules, steps, len(symbols)], device=device)
        )
        self.is_step = kinds.bool()  # [rules]
        self.has_unary_rules = len(grammar.unary_rules) > 0

    def parse(
        self,
        words: Sequence[Tensor],
        coarse_words: Tensor,
        lengths: Tensor,
        threshold: float,
        probabilities: bool,
    ) -> list[Found]:
        """`words` has for each grammar [words of all sentences, tag states], `coarse_words` is [words, tags]."""
        forest, kept = self.coarse.forest(coarse_words, lengths, threshold)
        with torch.inference_mode():
            return self._parse(words, lengths, forest, kept, threshold, probabilities)

    def _parse(
        self,
        words: Sequence[Tensor],
        lengths: Tensor,
        forest: Forest,
        kept: Nodes,
        threshold: float,
        probabilities: bool,
    ) -> list[Found]:
        first = starts_of(lengths)

        def fine(rules: FineRules, table: Tensor) -> Fine:
            leaves = forest.leaves
            word = first[kept.sentence[leaves]] + kept.start[leaves]
            return Fine(forest, rules, rules.leaf(table, word, kept.symbol[leaves]))

        for rules, fold in self.middle:
            with self.stages.stage("middle"):
                posteriors = fine(rules, words[0] @ fold).posteriors()
                forest, kept = pruned(forest, kept, posteriors.edges > SHARPER * threshold)
        with self.stages.stage("plan"):
            grammars = [fine(rules, table) for rules, table in zip(self.rules, words, strict=True)]
        if self.decoder == VITERBI:
            with self.stages.stage("fine"):
                chosen, log_z = grammars[0].best_derivations()
        else:
            with self.stages.stage("fine"):
                known = [grammar.posteriors() for grammar in grammars]
            for found in known:
                self.ways += found.ways
            log_z = known[0].log_z
        with self.stages.stage("decode"):
            if self.decoder == FREE:
                nodes = torch.stack([posteriors.nodes for posteriors in known]).sum(0)
                trees = free_recall(kept, nodes, lengths, self.real, self.coarse.inner)
                return [
                    Found(tree if z > -math.inf else None, z, -math.inf)
                    for tree, z in zip(trees, log_z.tolist(), strict=True)
                ]
            if self.decoder != VITERBI:
                self.negative += sum(int((posteriors.edges < 0).sum()) for posteriors in known)
                worths = [self._worth(forest, kept, posteriors) for posteriors in known]
                edges, leaves = (torch.stack(parts).sum(0) for parts in zip(*worths, strict=True))
                chosen = best_edges(forest, edges, leaves)
            weights = grammars[0].log_probs(chosen) if probabilities else torch.full_like(log_z, -math.inf)
            trees = skeletons(forest, kept, chosen)
        return [Found(*found) for found in zip(trees, log_z.tolist(), weights.tolist(), strict=True)]

    def _worth(self, forest: Forest, kept: Nodes, known: Posteriors) -> tuple[Tensor, Tensor]:
        """What each edge and each leaf is worth to a tree."""
        leaves, edges, parents = known.nodes[forest.leaves], known.edges, known.nodes[forest.parent]
        possible = torch.where(edges > 0, 0.0, -math.inf)
        step = self.is_step[forest.rule]
        if self.decoder == RECALL:  # the symbols above unary rules, and the tags
            above = kept.symbol[torch.where(step, forest.parent, 0)]
            return torch.where(step & self.real[above], parents, 0) + possible, leaves
        if self.decoder == RULE_SUM:
            worth, of_leaves = edges, torch.where(leaves > 0, leaves, -math.inf)
        elif self.decoder == VARIATIONAL:
            worth, of_leaves = _log(edges) - _log(parents), torch.zeros_like(leaves)
        else:
            worth, of_leaves = _log(edges), _log(leaves)
        if not self.has_unary_rules:  # then the step from bottom to top is no decision
            worth = worth.masked_fill(step, 0)
        return possible + worth, of_leaves


def _log(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


class Fine:
    """A forest under one grammar; `leaf` is [leaves, states]."""

    def __init__(self, forest: Forest, rules: FineRules, leaf: Tensor) -> None:
        self.forest, self.rules, self.leaf = forest, rules, leaf
        self.plan = Plan(forest, rules.sizes, rules.cp)

    def posteriors(self) -> Posteriors:
        return posteriors(self.plan, self.rules.values, self.leaf)

    def log_probs(self, chosen: Tensor) -> Tensor:
        """log |p| of the tree that each sentence is left with when every node keeps but one edge."""
        forest = self.forest.with_edges(chosen[chosen >= 0])
        return log_partition(Plan(forest, self.rules.sizes, self.rules.cp), self.rules.values, self.leaf)[0]

    def best_derivations(self) -> tuple[Tensor, Tensor]:
        """Viterbi: the edge of each node [nodes + 2] in the best derivations, -1 elsewhere; log Z [sentences]."""
        arguments = (self.plan, self.rules.values, self.leaf)
        return best_derivations(*arguments), log_partition(*arguments)[0]


def pruned(forest: Forest, nodes: Nodes, keep: Tensor) -> tuple[Forest, Nodes]:
    """What is left of a forest when it keeps some of its edges: nodes that none of them touches go too."""
    used = torch.zeros(forest.nodes + 2, dtype=torch.bool, device=keep.device)
    used[len(nodes.symbol) :] = True  # those on top
    edges = true_indices(keep)
    for ends in (forest.parent, forest.left, forest.right):
        used.index_fill_(0, take(ends, edges), True)
    part = forest.restricted(edges, used[: forest.nodes], forest.tops)
    kept = part.nodes[: len(part.nodes) - len(forest.tops)]
    return part.forest, Nodes(*(take(column, kept) for column in vars(nodes).values()))


def best_edges(forest: Forest, edges: Tensor, leaves: Tensor) -> Tensor:
    """The edge of each node, [nodes + 2], in the tree under it that is worth most; -1 where there is none."""
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
    return chosen


def skeletons(forest: Forest, kept: Nodes, chosen: Tensor) -> list[Skeleton | None]:
    """The tree of each sentence, or None where there is none."""
    left, right, edge, tops = (column.tolist() for column in (forest.left, forest.right, chosen, forest.tops))
    start, width, symbol = (column.tolist() for column in (kept.start, kept.width, kept.symbol))
    found: list[Skeleton | None] = []
    for top in tops:
        nodes: Skeleton = []
        waiting = [left[edge[top]]] if edge[top] >= 0 else []
        while waiting:
            above = waiting.pop()
            if edge[above] < 0:  # what was chosen above it underflowed
                nodes = []
                break
            below = left[edge[above]]
            children = (left[edge[below]], right[edge[below]]) if edge[below] >= 0 else ()
            split = width[children[0]] if children else 0
            nodes.append(Node(start[above], width[above], symbol[above], symbol[below], split))
            waiting += reversed(children)
        found.append(nodes or None)
    return found


def free_recall(kept: Nodes, posterior: Tensor, lengths: Tensor, real: Tensor, inner: int) -> list[Skeleton | None]:
    """argmax over all binary trees of sum of mu(label, i, j), with the best label of each span, or none."""
    batch, n = len(lengths), int(lengths.max())
    cell = (kept.sentence * n + kept.start) * n + kept.width - 1  # [sentence, start, width]
    posterior = posterior[: len(cell)]
    unlabelled = int(real.long().argmin())  # a symbol that binarisation made, if there is one

    def likeliest(layer: Tensor) -> Tensor:
        """[batch, starts, widths]: symbols."""
        at, symbol = cell[layer], kept.symbol[layer]
        largest = posterior.new_zeros(batch * n * n).scatter_reduce(0, at, posterior[layer], "amax")
        won = posterior[layer] == largest[at]
        labels = torch.full((batch * n * n,), unlabelled, device=at.device)
        return labels.index_copy_(0, at[won], symbol[won]).view(batch, n, n)

    worth = torch.where(kept.top & real[kept.symbol], posterior, 0)
    best = posterior.new_zeros(batch * n * n).scatter_reduce(0, cell, worth, "amax").view(batch, n, n)
    splits = torch.zeros_like(best, dtype=torch.int64)
    for width in range(2, n + 1):
        start = torch.arange(n - width + 1, device=cell.device).unsqueeze(1)
        part = torch.arange(1, width, device=cell.device)
        value, split = (best[:, start, part - 1] + best[:, start + part, width - part - 1]).max(2)
        best[:, : n - width + 1, width - 1] += value
        splits[:, : n - width + 1, width - 1] = split + 1
    tops, bottoms, parts = (table.tolist() for table in (likeliest(kept.top), likeliest(~kept.top), splits))
    found: list[Skeleton | None] = []
    for sentence, length in enumerate(lengths.tolist()):
        nodes: Skeleton = []
        waiting = [(0, length)]
        while waiting:
            at, width = waiting.pop()
            label, below, left = (table[sentence][at][width - 1] for table in (tops, bottoms, parts))
            nodes.append(Node(at, width, label, label if label >= inner else below, left))
            if left:
                waiting += [(at + left, width - left), (at, left)]
        found.append(nodes)
    return found
