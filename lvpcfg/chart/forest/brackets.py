"""Lower and upper bounds of all inside scores of a forest under a grammar that is known up to an envelope.

    T^ - E <= T <= T^ + E:      max(0, (T^ - E)(y2, y3)) <= T(z2, z3) <= (T^ + E)(w2, w3)      where 0 <= y <= z <= w

A forest that holds every node twice brackets both in one pass: its rules without an envelope, and they are most of the
work, are the same for both and are fetched once. Outside scores and posteriors follow in the same way.

Bounds are of real numbers. They hold for floats because E covers the rounding of CP forms, a margin that of all else,
and a least number in the upper half what underflows.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.packed import COLUMNS, Forest
from lvpcfg.chart.forest.plan import IMPOSSIBLE, Plan
from lvpcfg.chart.forest.prune import FineRules
from lvpcfg.chart.forest.tiles import CPTiles, Weights
from lvpcfg.grammar.envelope import Bracketed
from lvpcfg.grammar.factors import Factors

LEAST = 2.0**-1000  # of an upper score, in the units in which its node is computed: less may have underflowed
ROUNDING = 4 * torch.finfo(torch.float64).eps  # of an operation, generously


@dataclass(frozen=True, eq=False)
class InCP:
    """`RulesInCP`."""

    cp_rules: Int64[Tensor, "cp_rules"]
    factors: Factors


@dataclass(frozen=True, eq=False)
class NonNegativeTiles(CPTiles):
    """Rules whose results are known not to be below zero."""

    def parents(self, left: Tensor, right: Tensor) -> Tensor:
        return super().parents(left, right).clamp_min_(0)

    def children(self, rows: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, list[Tensor]]:
        total, sides = super().children(rows, left, right)
        return total.clamp_min_(0), [side.clamp_min_(0) for side in sides]


class BracketRules:
    """The rules of forests that hold every node twice: `upper` of one half, `lower` of the other."""

    def __init__(self, known: Bracketed) -> None:
        self.fine = rules = FineRules(known.centre)
        self.lower = torch.arange(len(rules.sizes), device=rules.sizes.device)
        self.sizes, self.cp = rules.sizes, None
        if known.terms is not None and rules.cp is not None:
            centre, terms, numbers = rules.cp.factors, known.terms, rules.cp.cp_rules
            others = len(rules.sizes) + torch.arange(len(numbers), device=numbers.device)
            self.lower = self.lower.index_copy(0, numbers, others)
            self.sizes = torch.cat([rules.sizes, take(rules.sizes, numbers)])
            factors = Factors(
                torch.cat([torch.cat([centre.u, sign * terms.u], 1) for sign in (1, -1)]),
                torch.cat([centre.v, terms.v], 1).repeat(2, 1, 1),
                torch.cat([centre.w, terms.w], 1).repeat(2, 1, 1),
            )
            self.cp = InCP(torch.cat([numbers, others]), factors)


class Brackets:
    """A forest under such rules; `leaf` is Q of each leaf."""

    def __init__(
        self,
        rules: BracketRules,
        forest: Forest,
        leaf: Float64[Tensor, "leaves states"],
        lengths: Int64[Tensor, "sentences"],
    ) -> None:
        self.forest, self.sentences = forest, len(forest.tops)
        self.plan = plan = Plan(_twice(forest, rules.lower), rules.sizes, rules.cp)
        self.weights: Weights = [
            NonNegativeTiles(some.factors) if isinstance(some, CPTiles) else some
            for some in plan.weights(rules.fine.values, torch.float64)
        ]
        least = leaf.new_full((2 * forest.nodes + 2,), LEAST)
        least[forest.nodes :] = 0
        self.scores = plan.inside(self.weights, torch.cat([leaf, leaf]), least=least)
        # No tree has more than 3n - 1 edges and n words; each of them multiplies by a sum of so many products.
        most = torch.bincount(forest.parent, minlength=1).amax() + plan.widest**2 + 4 * plan.widest + 64
        self.margin = ROUNDING * most * 4 * lengths.double()

    @cached_property
    def log_z(self) -> tuple[Float64[Tensor, "sentences"], Float64[Tensor, "sentences"]]:
        """The lowest and the highest that log Z can be."""
        possible = take(self.scores.exponent, self.plan.forest.tops) > IMPOSSIBLE / 2
        found = torch.where(possible & (self.scores.sign > 0), self.scores.log_z, -torch.inf)
        high, low = found.split(self.sentences)
        return low - self.margin, high + self.margin

    @cached_property
    def posteriors(self) -> "PosteriorBounds":
        """Of all edges and nodes, each times the same number for all of a sentence."""
        edges = torch.zeros(2 * len(self.forest.rule) + 1, dtype=torch.float64, device=self.margin.device)
        scores, plan = self.scores, self.plan
        beta = plan.outside(self.weights, scores, torch.ones_like(scores.log_z), edges)
        high_nodes, low_nodes = (scores.alpha * beta).sum(1)[: 2 * self.forest.nodes].view(2, -1)
        high_edges, low_edges = edges[:-1].view(2, -1)
        wrong = take(plan.sentence_of_node(), true_indices(plan.out_of_range(scores, beta)))
        high, low = scores.log_z.split(self.sentences)
        share = (low - high).exp()  # both halves are in units of their own Z
        known = share > 0
        known[wrong[wrong >= 0] % self.sentences] = False
        return PosteriorBounds(high_edges, low_edges, high_nodes, low_nodes, share, known)


@dataclass(frozen=True, eq=False)
class PosteriorBounds:
    """In units of the high Z of each sentence for the high ones, of the low Z for the low ones, which is `share`."""

    high: Float64[Tensor, "edges"]
    low: Float64[Tensor, "edges"]
    high_nodes: Float64[Tensor, "nodes"]
    low_nodes: Float64[Tensor, "nodes"]
    share: Float64[Tensor, "sentences"]  # low Z / high Z
    known: Bool[Tensor, "sentences"]  # else numbers were out of range


def _twice(forest: Forest, lower: Int64[Tensor, "rules"]) -> Forest:
    """Every node and every edge, and then all of them again with other rules."""
    nodes = forest.nodes

    def both(name: str) -> Tensor:
        column = getattr(forest, name)
        if name == "level":
            return torch.cat([column, column])
        if name == "rule":
            return torch.cat([column, take(lower, column)])
        return torch.cat([torch.where(column < nodes, column, column + nodes), column + nodes])

    columns = {name: both(name) for name in (*COLUMNS, "leaves", "tops")}
    return replace(forest, nodes=2 * nodes, **columns)
