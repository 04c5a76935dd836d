"""Coarse to fine: forests -> smaller forests -> trees, by one fine grammar or by a product of several (Petrov 2010)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.chart.decode.decode import BestTrees, Decoder, Posteriors, trees_of
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.forest import Forest, Plan
from lvpcfg.chart.forest.prune import Coarse, FineRules, Nodes
from lvpcfg.chart.forest.tiles import Tensors, Weights, pick, places
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.projection import nonnegative, projected
from lvpcfg.grammar.rules import starts_of
from lvpcfg.options import VITERBI

FEW = 2  # states of a symbol in the grammars between the coarsest and the fine one
SHARPER = 4  # times the threshold: grammars with some states are surer of themselves


class CoarseToFine:
    """Parses by fine grammars over the same symbols and rules, in the forests that coarser ones leave.

    Those are the coarse grammar, which comes with its cover, and, where the first grammar has a hierarchy, its
    projection to few states. Log-probabilities are those of the first grammar. `stages` is told how long it takes.
    """

    def __init__(
        self, grammars: Sequence[Grammar], coarse: CoarseGrammar, decoder: str, stages: Stages | None = None
    ) -> None:
        self.rules = [FineRules(grammar) for grammar in grammars]
        self.decoder = Decoder(decoder, grammars[0], self.rules[0], any(grammar.signed for grammar in grammars))
        self.stages = stages or Stages(grammars[0].root.device)
        grammar = nonnegative(grammars[0])
        self.middle = []  # the rules of a grammar with few states, if there is one, and what makes words of its own
        for ancestor in [level for level in grammar.hierarchy if 0 < int(level.max()) < FEW][-1:]:
            few = projected(grammar, expected_states(grammar), ancestor)
            self.middle.append((FineRules(few.grammar), few.words))
        assert coarse.cover is not None
        self.coarse = Coarse(coarse.grammar, coarse.cover, self.stages)

    def parse(
        self, words: Sequence[Tensor], coarse_words: Tensor, lengths: Tensor, threshold: float
    ) -> tuple[list[Skeleton | None], Tensor]:
        """The best tree of each sentence, None where none is left, and log Z of what is left, [sentences].

        `words` has for each grammar [words of all sentences, tag states], `coarse_words` is [words, tags].
        """
        forest, kept = self.coarse.forest(coarse_words, lengths, threshold)
        with torch.inference_mode():
            return self._parse(words, lengths, forest, kept, threshold)

    def _parse(
        self, words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes, threshold: float
    ) -> tuple[list[Skeleton | None], Tensor]:
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
        if self.decoder.name == VITERBI:
            with self.stages.stage("fine"):
                best, log_z = grammars[0].best_derivations()
            with self.stages.stage("decode"):
                return trees_of(forest, kept, best), log_z
        with self.stages.stage("fine"):
            known = [grammar.posteriors() for grammar in grammars]
        with self.stages.stage("decode"):
            return self.decoder.trees(forest, kept, known, lengths), known[0].log_z


class Fine:
    """A forest under one grammar; `leaf` is [leaves, states]."""

    def __init__(self, forest: Forest, rules: FineRules, leaf: Tensor) -> None:
        self.forest, self.rules, self.leaf = forest, rules, leaf

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.forest, self.rules.sizes, self.rules.cp)

    @cached_property
    def weights(self) -> Weights:
        return self.plan.weights(self.rules.values, self.leaf.dtype)

    def posteriors(self) -> Posteriors:
        scores = self.plan.inside(self.weights, self.leaf)
        edges = self.leaf.new_zeros(len(self.forest.rule) + 1)
        beta = self.plan.outside(self.weights, scores, torch.ones_like(scores.log_z), edges)
        return Posteriors(scores.log_z, (scores.alpha * beta).sum(1), edges[:-1])

    def log_probs(self, chosen: Tensor) -> Tensor:
        """log p of the tree that each sentence is left with when every node keeps but one edge."""
        edges = chosen[chosen >= 0]
        columns = {name: getattr(self.forest, name)[edges] for name in ("level", "rule", "parent", "left", "right")}
        plan = Plan(replace(self.forest, **columns), self.rules.sizes, self.rules.cp)
        return plan.inside(plan.weights(self.rules.values, self.leaf.dtype), self.leaf).log_z

    def best_derivations(self) -> tuple[Tensor, Tensor]:
        """Viterbi: the edge of each node [nodes + 2] in the best derivations, -1 elsewhere; log Z [sentences]."""
        forest, plan = self.forest, self.plan
        log_z = plan.inside(self.weights, self.leaf).log_z
        scores = plan.inside(self.weights, self.leaf, best=True)
        alpha, exponent = scores.alpha, scores.exponent
        state = torch.full((forest.nodes + 2,), -1, device=alpha.device)
        state[forest.tops] = torch.where(alpha[forest.tops, 0] > 0, 0, -1)
        chosen = torch.full_like(state, -1)
        for level in reversed(plan.levels):
            parts = []
            for tiles in level.tiles:
                _, y, z, _ = plan.shapes[tiles.shape]
                rules, columns = self.weights[tiles.shape], vars(plan.layout)
                assert isinstance(rules, Tensors)
                wanted = state[tiles.of(plan.layout.parent)] >= 0
                rule = tiles.rule.repeat_interleave(tiles.width)[wanted]
                parent, left, right, edge = (
                    tiles.of(columns[name])[wanted] for name in ("parent", "left", "right", "edge")
                )
                children = (alpha[left, :y].unsqueeze(2) * alpha[right, :z].unsqueeze(1)).flatten(1)
                value, place = (rules.values[rule, state[parent]] * children).max(1)
                value = value * torch.exp2(exponent[left] + exponent[right] - exponent[parent])
                parts.append((value, edge, parent, left, right, place // z, place % z))
            value, edge, parent, left, right, of_left, of_right = map(torch.cat, zip(*parts, strict=True))
            best = value.new_zeros(forest.nodes + 2).scatter_reduce(0, parent, value, "amax")
            won = (value == best[parent]) & (value > 0)
            chosen.index_copy_(0, parent[won], edge[won])
            won &= chosen[parent] == edge
            state.index_copy_(0, left[won], of_left[won])
            state.index_copy_(0, right[won], of_right[won])
        return chosen, log_z


def pruned(forest: Forest, nodes: Nodes, keep: Tensor) -> tuple[Forest, Nodes]:
    """What is left of a forest when it keeps some of its edges: nodes that none of them touches go too."""
    edges = places(keep)
    columns = {name: pick(getattr(forest, name), edges) for name in ("level", "rule", "parent", "left", "right")}
    used = torch.zeros(forest.nodes + 2, dtype=torch.int64, device=keep.device)
    used[len(nodes.symbol) :] = 1  # those on top
    for name in ("parent", "left", "right"):
        used.index_fill_(0, columns[name], 1)
    number, there = used.cumsum(0) - 1, places(used[: len(nodes.symbol)] > 0)
    columns |= {name: pick(number, columns[name]) for name in ("parent", "left", "right")}
    leaves = forest.leaves[pick(used, forest.leaves) > 0]
    return (
        Forest(int(number[-1]) - 1, **columns, leaves=number[leaves], tops=number[forest.tops]),
        Nodes(*(pick(column, there) for column in vars(nodes).values())),
    )
