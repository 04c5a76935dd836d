"""Inside and outside on packed forests by log-sum-exp, for sentences that are out of the range of float64.

The sums are those of `plan.py`, over the same tiles, with rules written out as tensors. Nothing underflows, so there
are no exponents; nothing may be negative. It is slow, and rarely needed.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.plan import Level, Plan
from lvpcfg.chart.forest.tiles import Tiles, Weights
from lvpcfg.chart.semirings import safe_log

CHUNK = 1 << 20  # numbers held by one step


class LogScores:
    """log alpha [nodes + 2, states] of a forest; `weights` and `leaf` [leaves, states] are ordinary numbers.

    With `best`, the best derivations instead of the sum of all.
    """

    def __init__(self, plan: Plan, weights: Weights, leaf: Tensor, best: bool = False) -> None:
        self.plan, self.weights, self.leaf, self.best = plan, weights, leaf, best
        forest = plan.forest
        self.alpha = torch.full((forest.nodes + 2, plan.widest), -math.inf, dtype=torch.float64, device=leaf.device)
        self.alpha[-1, 0] = 0
        self.alpha[forest.leaves, : leaf.shape[1]] = safe_log(leaf.double())
        for level in plan.levels:
            rows = torch.cat([self._parents(tiles) for tiles in self._steps(level)])
            found = self._scattered(rows, _slots(level, plan.layout.parent))
            self.alpha.index_copy_(0, level.nodes, take(found, level.nodes))
        self.log_z = self.alpha[forest.tops, 0]
        self.sign = (self.log_z > -math.inf).double()

    def outside(self) -> tuple[Tensor, Tensor]:
        """log beta [nodes + 2, states], and the posteriors of edges [edges]."""
        forest, layout = self.plan.forest, self.plan.layout
        beta = torch.full_like(self.alpha, -math.inf)
        beta[forest.tops, 0] = torch.where(self.log_z > -math.inf, -self.log_z, -math.inf)
        posteriors = beta.new_zeros(len(forest.rule) + 1)
        for level in reversed(self.plan.levels):
            found = [self._children(tiles, beta) for tiles in self._steps(level)]
            posterior, *sides = (torch.cat(part) for part in zip(*found, strict=True))
            posteriors.index_copy_(0, _slots(level, layout.edge), posterior)
            for rows, child in zip(sides, (layout.left, layout.right), strict=True):
                beta = torch.logaddexp(beta, self._scattered(rows, _slots(level, child)))
        beta[-2:] = -math.inf
        return beta, posteriors[:-1]

    def gradients(self, beta: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """d log Z, times `gradient` [sentences], by the leaves, and by rules and factors as `Plan.rule_gradients`.

        Those by numbers that are 0 are left out, since they may be infinite. Parameter times derivative is right.
        """
        plan, leaves = self.plan, self.plan.forest.leaves
        counts_for = torch.nn.functional.pad(gradient.double(), (0, 1))[plan.sentence_of_node()]  # [nodes + 2]
        totals = plan.no_gradients()
        for level in plan.levels:
            for tiles in self._steps(level):
                rules, left, right = self._terms(tiles)
                share = take(counts_for, tiles.of(plan.layout.parent)).view(len(tiles.rule), -1, 1, 1, 1)
                found = ((self._outer(tiles, beta) + left + right).exp() * share).sum(1)  # [tiles, x, y, z]
                found = torch.where(rules.squeeze(1) > -math.inf, found, 0)
                plan.add_gradients(totals, tiles, self.weights[tiles.shape].of(tiles.rule).by_tensor(found))
        by_leaf = take(beta, leaves)[:, : self.leaf.shape[1]].exp() * take(counts_for, leaves).unsqueeze(1)
        return torch.where(self.leaf > 0, by_leaf, 0), [totals[0][:-1], *totals[1:]]

    def _terms(self, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
        """log T [tiles, 1, x, y, z]; log alpha of left children [tiles, width, 1, y, 1], of right ones [.., 1, 1, z]"""
        x, y, z, _ = self.plan.shapes[tiles.shape]
        count, layout = len(tiles.rule), self.plan.layout
        rules = safe_log(self.weights[tiles.shape].of(tiles.rule).written_out().values.double())
        left, right = (take(self.alpha, tiles.of(child)) for child in (layout.left, layout.right))
        return (
            rules.view(count, 1, x, y, z),
            left[:, :y].reshape(count, -1, 1, y, 1),
            right[:, :z].reshape(count, -1, 1, 1, z),
        )

    def _outer(self, tiles: Tiles, beta: Tensor) -> Tensor:
        """log beta of the parents, [tiles, width, x, 1, 1]."""
        x = self.plan.shapes[tiles.shape][0]
        return take(beta, tiles.of(self.plan.layout.parent))[:, :x].reshape(len(tiles.rule), -1, x, 1, 1)

    def _parents(self, tiles: Tiles) -> Tensor:
        """[tiles * width, states]"""
        rules, left, right = self._terms(tiles)
        terms = rules + left + right
        return self._padded(terms.amax((3, 4)) if self.best else logsumexp(terms, (3, 4)))

    def _children(self, tiles: Tiles, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The posterior of each edge, and what it adds to log beta of its children, [tiles * width, states]."""
        rules, left, right = self._terms(tiles)
        above = self._outer(tiles, beta) + rules
        into_left, into_right = logsumexp(above + right, (2, 4)), logsumexp(above + left, (2, 3))
        posterior = logsumexp(into_left + left.flatten(2), (2,)).exp()
        return posterior.flatten(), self._padded(into_left), self._padded(into_right)

    def _padded(self, rows: Tensor) -> Tensor:
        rows = rows.flatten(0, 1)
        return torch.nn.functional.pad(rows, (0, self.plan.widest - rows.shape[1]), value=-math.inf)

    def _scattered(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """[slots, states] -> [nodes + 2, states]: the logarithm of the sum for each node, or the largest."""
        index = nodes.unsqueeze(1).expand_as(rows)
        largest = torch.full_like(self.alpha, -math.inf).scatter_reduce_(0, index, rows, "amax")
        if self.best:
            return largest
        finite = torch.where(largest > -math.inf, largest, 0)
        sums = torch.zeros_like(largest).index_add_(0, nodes, (rows - take(finite, nodes)).exp())
        return sums.log() + finite

    def _steps(self, level: Level) -> Iterator[Tiles]:
        for tiles in level.tiles:
            yield from tiles.parts(max(1, CHUNK // (tiles.width * math.prod(self.plan.shapes[tiles.shape][:3]))))


def _slots(level: Level, column: Tensor) -> Tensor:
    """Those of a level."""
    return column.narrow(0, level.begin, level.slots)


def logsumexp(x: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    largest = x.amax(dimensions, keepdim=True)
    finite = torch.where(largest > -math.inf, largest, 0)
    total = (x - finite).exp().sum(dimensions, keepdim=True).log() + finite
    return total.squeeze(dimensions)
