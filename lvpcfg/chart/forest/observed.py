"""Observed skeletal trees as a forest, their rules numbered as those of pruned charts are (`FineRules`).

Every span has a bottom node, above a binary rule or a word, and a top node above any number of unary rules. The inside
scores of the forest are the weights of the trees, in time linear in their size:

    w(tree) = pi C T C T ... C Q,     C the step from the top to the bottom symbol of a span

so that the numerator of a likelihood is a function of the same tensors as its denominator, the chart.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeletal
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.forest import Forest, Plan, log_likelihood
from lvpcfg.chart.forest.prune import FineRules, Nodes


class RuleNumbers:
    """The numbers that forests of a grammar give its rules: (a, b, c), steps (above, below), and root symbols."""

    def __init__(self, rules: FineRules) -> None:
        every = [*rules.grammar.binary_rules.tolist(), *rules.steps.tolist()]
        self.number = {tuple(rule): number for number, rule in enumerate(every)}
        self.first_root = len(every)


@dataclass(frozen=True, eq=False)
class ForestOverWords:
    """A forest whose leaves are words of sentences, and how to compute it with the parameters of the day."""

    plan: Plan
    sentence: Int64[Tensor, "leaves"]
    position: Int64[Tensor, "leaves"]
    symbol: Int64[Tensor, "leaves"]

    @staticmethod
    def of(forest: Forest, nodes: Nodes, rules: FineRules) -> "ForestOverWords":
        columns = (take(column, forest.leaves) for column in (nodes.sentence, nodes.start, nodes.symbol))
        return ForestOverWords(Plan(forest, rules.sizes, rules.cp, rules.most), *columns)

    def log_z(self, rules: FineRules, words: Float[Tensor, "length batch word_states"]) -> Float64[Tensor, "sentences"]:
        """log of the sum over the trees of each sentence; differentiable by the rules and the words."""
        plan = copy(self.plan)
        plan.cp = rules.cp  # the same rules with the numbers of now
        word = self.position * words.shape[1] + self.sentence
        leaf = rules.leaf(words.flatten(0, 1), word, self.symbol)
        leaf = torch.nn.functional.pad(leaf, (0, plan.widest - leaf.shape[1]))
        return log_likelihood(plan, rules.values, leaf)


@dataclass(frozen=True, eq=False)
class ObservedTrees:
    """Trees that the rules of a grammar make, in one forest."""

    sentences: Int64[Tensor, "trees"]  # their numbers among all trees; the others use rules that the grammar lacks
    forest: Forest
    nodes: Nodes
    over_words: ForestOverWords

    @staticmethod
    def of(trees: Sequence[Skeletal], rules: FineRules, numbers: RuleNumbers) -> "ObservedTrees | None":
        """None, if the grammar makes none of the trees."""
        found = _Forest(numbers)
        sentences = [number for number, tree in enumerate(trees) if found.add(number, tree.nodes)]
        if not sentences:
            return None
        device = rules.sizes.device
        forest, nodes = found.finished(device)
        over_words = ForestOverWords.of(forest, nodes, rules)
        return ObservedTrees(torch.tensor(sentences, device=device), forest, nodes, over_words)

    def log_weights(
        self, rules: FineRules, words: Float[Tensor, "length batch word_states"]
    ) -> Float64[Tensor, "trees"]:
        """log of the weight of each tree; differentiable by the rules and the words of all sentences."""
        return self.over_words.log_z(rules, words)


class _Forest:
    """The columns of a `Forest`, as they grow tree by tree."""

    def __init__(self, numbers: RuleNumbers) -> None:
        self.numbers = numbers
        self.longest = 0
        self.nodes: list[tuple[int, int, int, int, bool]] = []  # as `Nodes`: sentence, start, width, symbol, top
        self.edges: list[tuple[int, int, int, int, int]] = []  # level, rule, parent, left, right (-1 for none)
        self.leaves: list[int] = []  # nodes
        self.roots: list[tuple[int, int]] = []  # node, symbol

    def add(self, sentence: int, nodes: Sequence[Node]) -> bool:
        """Whether the tree has rules of the grammar alone; else it is left out."""
        number, at = self.numbers.number, {(node.start, node.width): place for place, node in enumerate(nodes)}
        spans, edges, leaves, begin = [], [], [], len(self.nodes)
        for place, node in enumerate(nodes):  # its bottom and its top node are numbers 2 place and 2 place + 1
            bottom, top = begin + 2 * place, begin + 2 * place + 1
            spans.append((sentence, node.start, node.width, node.bottom, False))
            spans.append((sentence, node.start, node.width, node.top, True))
            edges.append((2 * node.width + 1, number.get((node.top, node.bottom)), top, bottom, -1))
            if not node.split:
                leaves.append(bottom)
                continue
            left, right = at[node.start, node.split], at[node.start + node.split, node.width - node.split]
            rule = number.get((node.bottom, nodes[left].top, nodes[right].top))
            edges.append((2 * node.width, rule, bottom, begin + 2 * left + 1, begin + 2 * right + 1))
        known = [(level, rule, up, left, right) for level, rule, up, left, right in edges if rule is not None]
        if not nodes or len(known) < len(edges):
            return False
        self.edges += known
        self.leaves += leaves
        self.roots.append((begin + 1, nodes[0].top))
        self.nodes += spans
        self.longest = max(self.longest, nodes[0].width)
        return True

    def finished(self, device: torch.device) -> tuple[Forest, Nodes]:
        """The forest, and its nodes but for those on top."""
        nodes, total = len(self.nodes), len(self.nodes) + len(self.roots)
        last, unit, tops = 2 * self.longest + 2, total + 1, range(nodes, total)
        edges = [
            (level, rule, parent, left, unit if right < 0 else right) for level, rule, parent, left, right in self.edges
        ]
        edges += [
            (last, self.numbers.first_root + symbol, top, root, unit)
            for top, (root, symbol) in zip(tops, self.roots, strict=True)
        ]
        level, rule, parent, left, right = torch.tensor(edges, device=device).T.contiguous()
        leaves, of_sentences = (torch.tensor(some, device=device) for some in (self.leaves, tops))
        sentence, start, width, symbol, top = torch.tensor(self.nodes, device=device).T.contiguous()
        forest = Forest(total, level, rule, parent, left, right, leaves, of_sentences)
        return forest, Nodes(sentence, start, width, symbol, top.bool())
