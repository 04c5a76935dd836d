"""The best derivations of a forest (Viterbi): over states, so that rules in CP form are written out."""

import math

import torch
from torch import Tensor

from lvpcfg.chart.forest.arrays import take, true_indices, worth_computing
from lvpcfg.chart.forest.logarithms import LogScores
from lvpcfg.chart.forest.plan import IMPOSSIBLE, Plan
from lvpcfg.chart.forest.tiles import Tensors
from lvpcfg.chart.semirings import safe_log


def best_derivations(plan: Plan, rules: Tensor, leaf: Tensor, logarithms: bool = False) -> Tensor:
    """[nodes + 2]: the edge of each node in the best derivation of its sentence, -1 elsewhere.

    `rules` and `leaf` are non-negative. Sentences without a derivation are computed in float64, and then by logarithms.
    """
    weights = [some.written_out() for some in plan.weights(rules, leaf.dtype)]
    if logarithms:
        return _downwards(plan, weights, LogScores(plan, [*weights], leaf, best=True).alpha)
    scores = plan.inside([*weights], leaf, best=True)
    chosen = _downwards(plan, weights, safe_log(scores.alpha.double()) + math.log(2) * scores.exponent.unsqueeze(1))
    failed = ~scores.log_z.isfinite() & ~(take(scores.exponent, plan.forest.tops) < IMPOSSIBLE / 2)
    if bool(failed.any()):
        again, part = plan.part(true_indices(failed))
        edges = best_derivations(
            again, rules, take(leaf, part.leaves).double(), logarithms=leaf.dtype == torch.float64
        )[:-2]
        found = torch.where(edges >= 0, part.edges[edges], -1) if len(part.edges) else edges
        chosen.index_copy_(0, part.nodes, found)
    return chosen


def _downwards(plan: Plan, weights: list[Tensors], alpha: Tensor) -> Tensor:
    """From the logarithms of the best inside scores, [nodes + 2, states], to the edges that they are made of."""
    forest, layout = plan.forest, plan.layout
    state = torch.full((forest.nodes + 2,), -1, device=alpha.device)  # of nodes in the best derivations
    state[forest.tops] = torch.where(alpha[forest.tops, 0] > -math.inf, 0, -1)
    chosen = torch.full_like(state, -1)
    for level in reversed(plan.levels):
        parts = []
        for tiles in plan.steps(level.tiles, [*weights]):
            _, y, z, _ = plan.shapes[tiles.shape]
            some = worth_computing(take(state, tiles.of(layout.parent)) >= 0)
            rule = take(tiles.rule, some // tiles.width)
            parent, left, right, edge = (
                take(tiles.of(column), some) for column in (layout.parent, layout.left, layout.right, layout.edge)
            )
            of_parent = take(state, parent)
            row = safe_log(weights[tiles.shape].values[rule, of_parent.clamp_min(0)].double())  # [some, y * z]
            pairs = take(alpha, left)[:, :y].unsqueeze(2) + take(alpha, right)[:, :z].unsqueeze(1)
            value, place = (row + pairs.flatten(1)).max(1)
            value = torch.where(of_parent >= 0, value, -math.inf)
            parts.append((value, edge, parent, left, right, place // z, place % z))
        value, edge, parent, left, right, of_left, of_right = map(torch.cat, zip(*parts, strict=True))
        best = torch.full_like(alpha[:, 0], -math.inf).scatter_reduce_(0, parent, value, "amax")
        # Of edges that are equally good, the last one. What has not won writes to the node without derivations.
        won = (value == take(best, parent)) & (value > -math.inf)
        chosen.scatter_reduce_(0, torch.where(won, parent, forest.nodes), torch.where(won, edge, -1), "amax")
        won &= take(chosen, parent) == edge
        for child, of_child in ((left, of_left), (right, of_right)):
            state.index_copy_(0, torch.where(won, child, forest.nodes), torch.where(won, of_child, -1))
    chosen[-2:] = state[-2:] = -1
    return chosen
