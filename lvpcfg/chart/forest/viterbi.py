"""The best derivations of a forest (Viterbi): over states, so that rules in CP form are written out."""

import math

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from lvpcfg.chart.forest.arrays import take, true_indices, worth_computing
from lvpcfg.chart.forest.logarithms import LogScores
from lvpcfg.chart.forest.plan import IMPOSSIBLE, Plan, Scores
from lvpcfg.chart.forest.tiles import Tensors, outer
from lvpcfg.chart.semirings import safe_log


def best_derivations(
    plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"], logarithms: bool = False
) -> Int64[Tensor, "nodes_and_2"]:
    """The edge of each node in the best derivation of its sentence, -1 elsewhere."""
    return best_states(plan, rules, leaf, logarithms)[0]


def best_states(
    plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"], logarithms: bool = False
) -> tuple[Int64[Tensor, "nodes_and_2"], Int64[Tensor, "nodes_and_2"]]:
    """The edge and the state of each node in the best derivation of its sentence, -1 elsewhere.

    `rules` and `leaf` are non-negative. Sentences that have no derivation are computed again in float64, and then by
    logarithms.
    """
    weights = [some.written_out() for some in plan.weights(rules, leaf.dtype)]
    if logarithms:
        alpha = LogScores(plan, [*weights], leaf, best=True).alpha
        return _downwards(plan, weights, alpha, None)
    scores = plan.inside([*weights], leaf, best=True)
    chosen, states = _downwards(plan, weights, scores.alpha, scores.exponent)
    failed = _failed(plan, scores)
    if bool(failed.any()):
        again, part = plan.part(true_indices(failed))
        words = take(leaf, part.leaves).double()
        edges, better = best_states(again, rules, words, logarithms=leaf.dtype == torch.float64)
        numbers = torch.nn.functional.pad(part.edges, (0, 1), value=-1)  # the last one is that of -1
        chosen.index_copy_(0, part.nodes, numbers[edges[:-2]])
        states.index_copy_(0, part.nodes, better[:-2])
    return chosen, states


def best_scores(
    plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"], logarithms: bool = False
) -> Float64[Tensor, "nodes_and_2 states"]:
    """The logarithm of the best derivation below each state of each node; the arguments are those above."""
    weights = [some.written_out() for some in plan.weights(rules, leaf.dtype)]
    if logarithms:
        return LogScores(plan, [*weights], leaf, best=True).alpha
    scores = plan.inside([*weights], leaf, best=True)
    alpha = safe_log(scores.alpha.double()) + math.log(2) * scores.exponent.double().unsqueeze(1)
    failed = _failed(plan, scores)
    if bool(failed.any()):
        again, part = plan.part(true_indices(failed))
        words = take(leaf, part.leaves).double()
        better = best_scores(again, rules, words, logarithms=leaf.dtype == torch.float64)[:-2]
        alpha.index_copy_(0, part.nodes, better)
    return alpha


def _failed(plan: Plan, scores: Scores) -> Bool[Tensor, "sentences"]:
    """Whose best derivation is out of the range of the type."""
    return ~scores.log_z.isfinite() & ~(take(scores.exponent, plan.forest.tops) < IMPOSSIBLE / 2)


def _downwards(plan: Plan, weights: list[Tensors], alpha: Tensor, exponent: Tensor | None) -> tuple[Tensor, Tensor]:
    """From the best inside scores [nodes + 2, states] to the edges that attain them, and their parents' states.

    The scores are logarithms where there are no exponents.
    """
    forest, layout = plan.forest, plan.layout
    none = -math.inf if exponent is None else 0.0
    state = torch.full((forest.nodes + 2,), -1, device=alpha.device)  # of nodes in the best derivations
    state[forest.tops] = torch.where(alpha[forest.tops, 0] > none, 0, -1)
    chosen = torch.full_like(state, -1)
    for level in reversed(plan.levels):
        parts = []
        for tiles in plan.steps(level.tiles, [*weights]):
            _, y, z, _ = plan.shapes[tiles.shape]
            some = worth_computing(take(state, tiles.of(layout.parent)) >= 0)
            parent, left, right, edge = (
                take(tiles.of(column), some) for column in (layout.parent, layout.left, layout.right, layout.edge)
            )
            of_parent = take(state, parent)
            row = weights[tiles.shape].values[take(tiles.rule, some // tiles.width), of_parent.clamp_min(0)]
            children = take(alpha, left)[:, :y], take(alpha, right)[:, :z]
            if exponent is None:
                pairs = children[0].unsqueeze(2) + children[1].unsqueeze(1)
                value, place = (safe_log(row) + pairs.flatten(1)).max(1)
            else:
                value, place = (row * outer(children[0].unsqueeze(1), children[1].unsqueeze(1)).squeeze(1)).max(1)
                value *= torch.exp2(take(exponent, left) + take(exponent, right) - take(exponent, parent))
            value = torch.where(of_parent >= 0, value, none)
            parts.append((value, edge, parent, left, right, place // z, place % z))
        value, edge, parent, left, right, of_left, of_right = map(torch.cat, zip(*parts, strict=True))
        best = torch.full_like(alpha[:, 0], none).scatter_reduce_(0, parent, value, "amax")
        # Of edges that are equally good, the last. Those that have not won write to the node without derivations.
        won = (value == take(best, parent)) & (value > none)
        number = torch.arange(len(edge), device=edge.device)
        last = torch.zeros_like(state).scatter_reduce_(0, torch.where(won, parent, forest.nodes), number, "amax")
        won &= take(last, parent) == number
        chosen.index_copy_(0, torch.where(won, parent, forest.nodes), edge)
        for child, of_child in ((left, of_left), (right, of_right)):
            state.index_copy_(0, torch.where(won, child, forest.nodes), of_child)
            state[forest.nodes] = -1
    chosen[forest.nodes :] = -1
    return chosen, state
