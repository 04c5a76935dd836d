"""Exact pruning for best derivations: a coarse chart whose scores are maxima over states bounds them from above.

    t^(a -> b c) = max over h1, h2, h3 of T    s^(a -> b) = max over states of the best chain    q^(a -> x) = max of q
    bound(edge)  = best outside * rule * best inside, in the max-times algebra of one state a symbol

No derivation through an edge is worth more than its bound. So edges whose bound is below a derivation that is known,
the best one of a chart that is pruned by posteriors, can be dropped: the best derivation of what is left is the best of
all (A* and coarse-to-fine with a guarantee; Klein & Manning 2003).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.chains import Chains
from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine, Fine
from lvpcfg.chart.decode.decode import as_lists, chosen_trees, trees_of
from lvpcfg.chart.decode.decoded import Decoded, Wanted
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.prune import Edges, FineRules, Nodes, joined
from lvpcfg.chart.forest.pruning import words_of
from lvpcfg.chart.forest.viterbi import best_states
from lvpcfg.chart.semirings import safe_log
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import VITERBI

MARGIN = 1e-3  # nats, for the rounding of the derivation that is known


class BestRules(FineRules):
    """The rules of a grammar with the best chain of unary rules between two states instead of their sum."""

    def _closure(self) -> Tensor:
        grammar, inner = self.grammar, self.grammar.interminal_states
        best = self.chains.best.exp().to(grammar.root.dtype)
        identity = torch.eye(len(grammar.root), dtype=grammar.root.dtype, device=grammar.root.device)
        return torch.cat([best[:inner], identity[inner:]])

    @cached_property
    def chains(self) -> Chains:
        return Chains.of_states(self.grammar)


class ExactViterbi(CoarseToFine):
    """The best derivations of all: those of forests that are pruned by posteriors say which edges may be in better."""

    def __init__(self, grammar: Grammar, coarse: CoarseGrammar, stages: Stages) -> None:
        super().__init__([grammar], coarse, VITERBI, stages)
        self.best = BestRules(grammar)
        self.exact = ExactPruning(self.best)

    def _parse(self, words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes, wanted: Wanted) -> Decoded:
        """log Z is that of the forest that is pruned by posteriors."""
        (some,) = words
        with self.stages.stage("plan"):
            word, symbol = words_of(forest, kept, lengths), take(kept.symbol, forest.leaves)
            first = Fine(forest, self.best, self.best.leaf(some, word, symbol))
            sums = Fine(forest, self.rules[0], first.leaf)
        with self.stages.stage("fine"):
            known = first.best_scores()[forest.tops, 0].double()
            log_z = sums.log_z()
        with self.stages.stage("bound"):
            forest, kept = self.exact.forest(some, lengths, known)
        with self.stages.stage("plan"):
            word, symbol = words_of(forest, kept, lengths), take(kept.symbol, forest.leaves)
            fine = Fine(forest, self.best, self.best.leaf(some, word, symbol))
        with self.stages.stage("fine"):
            chosen, states = best_states(fine.plan, self.best.values, fine.leaf)
        with self.stages.stage("decode"):
            found = trees_of(forest, kept, chosen_trees(forest, chosen, log_z), lengths)
            chains = self._chains(forest, kept, chosen, states)
            trees = [
                None if nodes is None else self._with_chains(nodes, sentence, chains)
                for sentence, nodes in enumerate(found)
            ]
        return Decoded(as_lists(trees), log_z)

    def _chains(
        self, forest: Forest, kept: Nodes, chosen: Tensor, states: Tensor
    ) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """The symbols of the unary rules above the spans of sentences, from their states."""
        tops = true_indices((chosen[: len(kept.top)] >= 0) & kept.top)
        below = take(forest.left, take(chosen, tops))
        first, symbol = self.best.first, self.best.grammar.symbol_of_state.tolist()
        ends = (take(first, take(kept.symbol, nodes)) + take(states, nodes) for nodes in (tops, below))
        spans = (take(column, tops).tolist() for column in (kept.sentence, kept.start, kept.width))
        return {
            (sentence, start, width): tuple(symbol[state] for state in self.best.chains.path(top, bottom))
            for sentence, start, width, top, bottom in zip(*spans, *(end.tolist() for end in ends), strict=True)
            if top != bottom
        }

    @staticmethod
    def _with_chains(nodes: Skeleton, sentence: int, chains: dict[tuple[int, int, int], tuple[int, ...]]) -> Skeleton:
        return [replace(node, chain=chains.get((sentence, node.start, node.width), ())) for node in nodes]


@dataclass(frozen=True, eq=False)
class ChildTypes:
    """The binary rules between two phrases, a phrase and a word, a word and a phrase, two words."""

    rules: Int64[Tensor, "some"]
    a: Int64[Tensor, "some"]
    b: Int64[Tensor, "some"]
    c: Int64[Tensor, "some"]
    log: Float64[Tensor, "some"]


class ExactPruning:
    """The coarsest bound: maxima over all states of each symbol."""

    def __init__(self, rules: BestRules) -> None:
        grammar: Grammar = rules.grammar
        self.rules, self.inner, self.symbols = rules, len(grammar.symbols.interminals), len(grammar.symbols)
        written = grammar.binary.written_out()
        number = torch.repeat_interleave(written.starts.diff())
        log = safe_log(_largest(written.values.double(), number, len(written)))
        self.types = [
            ChildTypes(some, a, b, c, take(log, some))
            for types in range(4)
            for some in [true_indices(grammar.binary.child_types == types)]
            for a, b, c in [take(written.rules, some).unbind(1)]
        ]
        above, below = rules.steps.unbind(1)
        volume = grammar.states[above] * grammar.states[below]
        begin = len(rules.values) - len(grammar.root) - int(volume.sum())
        steps = rules.values[begin : len(rules.values) - len(grammar.root)].double()
        self.step = safe_log(_largest(steps, torch.repeat_interleave(volume), len(volume)))
        self.root = safe_log(_largest(grammar.root.double(), grammar.symbol_of_state, self.symbols))
        self.above, self.below = above, below
        self.binary = len(written)

    def forest(
        self,
        words: Float64[Tensor, "words tag_states"],
        lengths: Int64[Tensor, "sentences"],
        known: Float64[Tensor, "sentences"],
    ) -> tuple[Forest, Nodes]:
        """The edges that may be in a derivation with a log-probability of `known` at the least, of each sentence."""
        tags = self.rules.grammar.symbol_of_state[self.rules.grammar.interminal_states :]
        best = safe_log(_largest(words.double().T, tags, self.symbols).T)  # [words, symbols]
        parts = []
        sizes = lengths.tolist()
        for sentence, (leaf, least) in enumerate(zip(best.split(sizes), (known - MARGIN).tolist(), strict=True)):
            if least > -math.inf:
                parts.append(_Chart(self, leaf.contiguous()).left(sentence, least))
        none = lengths[:0]
        parts.append((Edges(none, none, none, none, none, none), Nodes(none, none, none, none, none.bool())))
        return joined(self.rules, self.binary, parts, lengths, max(sizes))


class _Chart:
    """The best inside scores of one sentence: by width and start, [starts, symbols]."""

    def __init__(self, exact: ExactPruning, leaf: Float64[Tensor, "n symbols"]) -> None:
        self.exact, self.n = exact, len(leaf)
        self.bottom, self.top = [leaf], [self._above(leaf)]
        self.best: list[list[Tensor]] = [[]]  # of each span and rule, by child types: the best split, [starts, rules]
        for width in range(2, self.n + 1):
            cells = leaf.new_full((self.n - width + 1, exact.symbols), -math.inf)
            self.best.append([])
            for types, some in zip(range(4), exact.types, strict=True):
                pairs = self._pairs(width, types, some).amax(1) + some.log
                self.best[-1].append(pairs)
                cells.scatter_reduce_(1, some.a.expand_as(pairs), pairs, "amax")
            self.bottom.append(cells)
            self.top.append(self._above(cells))

    def _above(self, cells: Float64[Tensor, "starts symbols"]) -> Float64[Tensor, "starts symbols"]:
        values = cells[:, self.exact.below] + self.exact.step
        return torch.full_like(cells, -math.inf).scatter_reduce_(1, self.exact.above.expand_as(values), values, "amax")

    def _splits(self, width: int, types: int) -> range:
        """How many words may be on the left."""
        first = width - 1 if types == 1 else 1  # a phrase and a word
        last = 1 if types >= 2 else width - 1  # a word on the left
        return range(first, last + 1) if types < 3 or width == 2 else range(0)

    def _pairs(self, width: int, types: int, some: ChildTypes) -> Float64[Tensor, "starts splits rules"]:
        starts, splits = self.n - width + 1, self._splits(width, types)
        if not splits:
            return self.top[0].new_full((starts, 1, len(some.a)), -math.inf)
        left = torch.stack([self.top[k - 1][:starts] for k in splits], 1)
        right = torch.stack([self.top[width - k - 1][k : k + starts] for k in splits], 1)
        return left[..., some.b] + right[..., some.c]

    def left(self, sentence: int, least: float) -> tuple[Edges, Nodes]:
        """The edges whose bound is `least` or more, from the widest spans down, and the nodes that they touch."""
        exact, n, symbols = self.exact, self.n, self.exact.symbols
        above = [torch.full_like(cells, -math.inf) for cells in self.top]  # outside scores
        under = [torch.full_like(cells, -math.inf) for cells in self.top]
        above[n - 1][0] = torch.where(exact.root + self.top[n - 1][0] >= least, exact.root, -math.inf)
        roots = true_indices(above[n - 1][0] > -math.inf)
        first = [0]
        for width in range(1, n + 1):
            first.append(first[-1] + (n - width + 1) * symbols)
        tops = first[-1]  # nodes: bottoms of all spans, then tops
        found = []

        def keep(rule: Tensor, width: int, parent: Tensor, left: Tensor, right: Tensor) -> None:
            found.append((rule, torch.full_like(rule, width), parent, left, right))

        for width in range(n, 0, -1):
            base = first[width - 1]
            values = above[width - 1][:, exact.above] + exact.step
            start, step = (values + self.bottom[width - 1][:, exact.below] >= least).nonzero().unbind(1)
            up, down = start * symbols + exact.above[step], start * symbols + exact.below[step]
            keep(exact.binary + step, width, tops + base + up, base + down, torch.full_like(step, -1))
            under[width - 1].view(-1).scatter_reduce_(0, down, values[start, step], "amax")
            for types, some in enumerate(exact.types) if width > 1 else ():
                splits = self._splits(width, types)
                outer = under[width - 1][:, some.a]
                start, rule = (outer + self.best[width - 1][types] >= least).nonzero().unbind(1)
                if not len(start) or not splits:
                    continue
                worth = outer[start, rule] + some.log[rule]
                b, c = some.b[rule], some.c[rule]
                for k in splits:  # of the spans and rules that are left: few
                    left, right = self.top[k - 1][start, b], self.top[width - k - 1][start + k, c]
                    here = true_indices(worth + left + right >= least)
                    if not len(here):
                        continue
                    at_b = start[here] * symbols + b[here]
                    at_c = (start[here] + k) * symbols + c[here]
                    for narrower, place, score in (
                        (k, at_b, worth[here] + right[here]),
                        (width - k, at_c, worth[here] + left[here]),
                    ):
                        above[narrower - 1].view(-1).scatter_reduce_(0, place, score, "amax")
                    parent = base + start[here] * symbols + some.a[rule[here]]
                    lefts, rights = tops + first[k - 1] + at_b, tops + first[width - k - 1] + at_c
                    keep(some.rules[rule[here]], width, parent, lefts, rights)
        return self._numbered(sentence, found, roots, first, tops)

    def _numbered(
        self, sentence: int, found: Sequence[tuple[Tensor, ...]], roots: Tensor, first: list[int], tops: int
    ) -> tuple[Edges, Nodes]:
        rule, width, parent, left, right = (torch.cat(column) for column in zip(*found, strict=True))
        symbols = self.exact.symbols
        roots = tops + first[self.n - 1] + roots
        used = torch.cat([parent, left, right[right >= 0], roots]).unique()
        number = torch.full((2 * tops,), -1, device=rule.device).index_copy_(
            0, used, torch.arange(len(used), device=rule.device)
        )
        cell = used % tops
        of_width = torch.searchsorted(torch.tensor(first, device=rule.device), cell, right=True)
        start = (cell - torch.tensor(first, device=rule.device)[of_width - 1]) // symbols
        symbol = cell % symbols
        nodes = Nodes(torch.full_like(used, sentence), start, of_width, symbol, used >= tops)
        right = torch.where(right < 0, -1, number[right.clamp_min(0)])
        return Edges(rule, width, number[parent], number[left], right, number[roots]), nodes


def _largest(values: Tensor, group: Int64[Tensor, "numbers"], groups: int) -> Tensor:
    """The largest number of each group, 0 at the least; `values` may have more axes behind the first."""
    index = group.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return values.new_zeros(groups, *values.shape[1:]).scatter_reduce_(0, index, values, "amax")
