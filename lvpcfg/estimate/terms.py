"""Splitting and merging the terms of rules in CP form, as states are split and merged.

A term rho of a node over children with inside scores y2 and y3 has the inside score I = (V y2)(W y3) and the outside
score O = U beta, and sum over rho of I O = 1 once they are divided by that sum. What merging two terms loses is then
what merging two states loses (`states.py`), with w the relative frequency of a term in its rule or, where rules share
their terms, in the grammar.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from lvpcfg import processes
from lvpcfg.estimate.latent import Counts, Latent
from lvpcfg.estimate.states import Refinement, after_merging, disturbed, least, losses_of_nodes, share_in_pair
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.whole_cp import WholeCP

NOTHING = 1e-6  # an expected count in the whole treebank that is taken for zero where terms are split
FACTORS = ("u", "v", "w")  # [..., rank, states]: a rank for each rule, or one for all


def split_terms(refinement: Refinement, parts: int, noise: float, generator: torch.Generator) -> Refinement:
    """Every term in so many, whose counts differ by up to the factor exp(noise)."""
    binary, factors = in_cp(refinement.counts), {}
    for name in FACTORS:
        counts = getattr(binary, name)
        counts = torch.where(counts > NOTHING, counts, 0)  # zeros stay zeros, and cost nothing
        factors[name] = disturbed(counts.repeat_interleave(parts, -2) / parts, noise, generator)
    return _with_factors(refinement, factors)


def merge_terms(refinement: Refinement, fraction: float, rank: int) -> Refinement:
    """Merges this fraction of the pairs of terms, those worth least, and as many as it takes to leave `rank` of them:
    of each rule, or of all rules where they share their terms."""
    binary, factors = in_cp(refinement.counts), {}
    if not len(binary.cp_rules):
        return refinement
    losses, alive = term_losses(refinement.latent, refinement.counts)  # [1 or rules, _]
    exists = alive.unflatten(1, (-1, 2)).all(2)
    place = torch.where(exists, losses, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    too_many = alive.sum(1, keepdim=True) - rank
    chosen = least(losses, exists, fraction) | (exists & (place < too_many))
    number, left = after_merging(chosen, alive), int((alive.sum(1) - chosen.sum(1)).amax())
    for name in FACTORS:
        factor = getattr(binary, name)
        counts = factor.view(*alive.shape, -1) * alive.unsqueeze(2)
        merged = torch.zeros_like(counts).scatter_add_(1, number.unsqueeze(2).expand_as(counts), counts)
        factors[name] = merged[:, :left].reshape(*factor.shape[:-2], left, -1)
    return _with_factors(refinement, factors)


def term_losses(latent: Latent, counts: Counts) -> tuple[Float64[Tensor, "_ pairs"], Bool[Tensor, "_ twice_pairs"]]:
    """[rules or 1, pairs]: what merging the terms 2k and 2k + 1 would lose; and which terms are there at all."""
    bank, parameters = latent.treebank, latent.parameters(counts)
    binary = in_cp(parameters)
    alpha, beta = latent.posteriors(parameters)
    nodes = bank.is_binary.nonzero().squeeze(1)
    nodes = nodes[bank.rule[nodes].argsort(stable=True)]
    of_rule = nodes.split(torch.bincount(bank.rule[nodes], minlength=len(binary)).tolist())
    used = in_cp(counts).u.sum(-1).view(-1, binary.factors.rank)  # [rules or 1, terms]
    share = share_in_pair(used)
    losses = used.new_zeros(len(used), used.shape[1] // 2)
    for number, rule in enumerate(binary.cp_rules.tolist()):
        some, row = of_rule[rule], number if len(used) > 1 else 0  # rules that share their terms have one row
        factors = binary.factors_of(rule).map(lambda factor: factor.to(alpha))
        left, right, outside = (
            scores[which.to(alpha.device)][:, : factor.shape[1]] @ factor.T
            for scores, which, factor in (
                (alpha, bank.left[some], factors.v),
                (alpha, bank.right[some], factors.w),
                (beta, some, factors.u),
            )
        )
        inside = left * right
        outside = outside / (inside * outside).sum(1, keepdim=True)
        losses[row] += losses_of_nodes(inside, outside, share[row : row + 1].to(alpha)).sum(0).cpu()
    return processes.sum_over_processes(losses), used > 0


def in_cp(counts: Counts) -> RuleCP | WholeCP:
    assert isinstance(counts.binary, RuleCP | WholeCP)
    return counts.binary


def _with_factors(refinement: Refinement, factors: dict[str, Tensor]) -> Refinement:
    counts = refinement.counts
    binary = replace(in_cp(counts), **dict[str, Any](factors))
    return replace(refinement, latent=refinement.latent.over(binary), counts=replace(counts, binary=binary))
