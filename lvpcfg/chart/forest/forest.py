"""Packed forests under a grammar: log Z and its sign, posteriors and derivatives, exact for every sentence.

The skeletal trees of a treebank are a forest in which each node has one edge (Matsuzaki et al. 2005: EM); what a
coarse grammar leaves of a chart is another (Petrov & Klein 2007: coarse to fine). Sentences may differ in length.

As in charts (`fast/partition.py`), a sentence that leaves the range of float32 is noticed: log Z is -inf or not a
number, or outside scores are not finite. It is computed again in float64 and, if that is not enough and nothing is
negative, by log-sum-exp, before it is called impossible.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from lvpcfg.chart.fast.partition import LOGARITHMIC, NARROW, WIDE
from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.logarithms import LogScores, logsumexp
from lvpcfg.chart.forest.packed import Forest, Part
from lvpcfg.chart.forest.plan import IMPOSSIBLE, Plan

__all__ = ["Forest", "Plan", "Posteriors", "log_likelihood", "log_partition", "posteriors"]


@dataclass(frozen=True, eq=False)
class Posteriors:
    log_z: Float64[Tensor, "sentences"]  # log |Z|
    sign: Float64[Tensor, "sentences"]  # of Z
    nodes: Float[Tensor, "nodes_and_2"]
    edges: Float[Tensor, "edges"]
    ways: Counter[str]  # how many sentences were computed again in each way


@dataclass(frozen=True, eq=False)
class Gradients:
    leaf: Float[Tensor, "leaves states"]
    rules: list[Float[Tensor, "..."]]  # by the tensors end to end, and by the factors of CP forms


class Solution(ABC):
    """A forest computed one way; `rules` are its tensors end to end."""

    way: str
    log_z: Float64[Tensor, "sentences"]
    sign: Float64[Tensor, "sentences"]

    def __init__(self, plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"]) -> None:
        self.plan, self.rules, self.leaf = plan, rules.detach(), leaf.detach()
        self.weights = plan.weights(rules, leaf.dtype)

    @abstractmethod
    def failed(self) -> Bool[Tensor, "sentences"]:
        """Whose log Z may be wrong."""

    @abstractmethod
    def posteriors(self) -> tuple[Posteriors, Bool[Tensor, "sentences"]]:
        """Posteriors, and which sentences failed."""

    @abstractmethod
    def gradients(self, gradient: Float[Tensor, "sentences"]) -> tuple[Gradients, Bool[Tensor, "sentences"]]:
        """Of log Z times `gradient`, summed over the sentences that did not fail; and which ones failed."""

    def again(self, failed: Bool[Tensor, "sentences"]) -> "tuple[Solution, Part, Tensor] | None":
        """The sentences that failed, in the next way: the solution, their part of the forest, and their numbers."""
        if self.way == LOGARITHMIC or not bool(failed.any()):
            return None
        sentences = true_indices(failed)
        plan, part = self.plan.part(sentences)
        leaf = take(self.leaf, part.leaves)
        if leaf.dtype != torch.float64:
            return Scaled(plan, self.rules, leaf.double()), part, sentences
        factors = () if plan.cp is None else vars(plan.cp.factors).values()
        if any(bool((tensor < 0).any()) for tensor in (self.rules, leaf, *factors)):
            return None
        return Logarithmic(plan, self.rules, leaf), part, sentences


class Scaled(Solution):
    """In ordinary numbers, with an exponent for each node."""

    def __init__(self, plan: Plan, rules: Tensor, leaf: Tensor) -> None:
        super().__init__(plan, rules, leaf)
        self.way = WIDE if leaf.dtype == torch.float64 else NARROW
        self.scores = plan.inside(self.weights, leaf)
        self.log_z, self.sign = self.scores.log_z, self.scores.sign

    def failed(self) -> Tensor:
        exponent = take(self.scores.exponent, self.plan.forest.tops)
        return ~self.log_z.isfinite() & ~(exponent < IMPOSSIBLE / 2)

    def _failed(self, beta: Tensor) -> Tensor:
        """With those whose outside scores are out of range."""
        failed, bad = self.failed(), self.plan.out_of_range(self.scores, beta)
        if bool(bad.any()):
            sentences = take(self.plan.sentence_of_node(), true_indices(bad))
            failed = failed.index_fill(0, sentences[sentences >= 0], True)
        return failed

    def posteriors(self) -> tuple[Posteriors, Tensor]:
        edges = self.leaf.new_zeros(len(self.plan.forest.rule) + 1)
        beta = self.plan.outside(self.weights, self.scores, torch.ones_like(self.log_z), edges)
        nodes = (self.scores.alpha * beta).sum(1)
        return Posteriors(self.log_z, self.sign, nodes, edges[:-1], Counter()), self._failed(beta)

    def gradients(self, gradient: Tensor) -> tuple[Gradients, Tensor]:
        plan, scores, leaves = self.plan, self.scores, self.plan.forest.leaves
        beta = plan.outside(self.weights, scores, gradient)
        failed = self._failed(beta)
        if bool(failed.any()):
            nodes = true_indices(torch.nn.functional.pad(failed, (0, 1))[plan.sentence_of_node()])
            for column in (beta, scores.alpha, scores.exponent):
                column.index_fill_(0, nodes, 0)
        exponent = take(scores.exponent, leaves)
        by_leaf = take(beta, leaves) * torch.where(exponent > IMPOSSIBLE / 2, torch.exp2(-exponent), 0).unsqueeze(1)
        return Gradients(by_leaf[:, : self.leaf.shape[1]], plan.rule_gradients(self.weights, scores, beta)), failed


class Logarithmic(Solution):
    """By log-sum-exp."""

    way = LOGARITHMIC

    def __init__(self, plan: Plan, rules: Tensor, leaf: Tensor) -> None:
        super().__init__(plan, rules, leaf)
        self.scores = LogScores(plan, self.weights, leaf)
        self.log_z, self.sign = self.scores.log_z, self.scores.sign

    def failed(self) -> Tensor:
        return torch.zeros_like(self.log_z, dtype=torch.bool)

    def posteriors(self) -> tuple[Posteriors, Tensor]:
        beta, edges = self.scores.outside()
        nodes = logsumexp(self.scores.alpha + beta, (1,)).exp()
        return Posteriors(self.log_z, self.sign, nodes, edges, Counter()), self.failed()

    def gradients(self, gradient: Tensor) -> tuple[Gradients, Tensor]:
        by_leaf, by_rules = self.scores.gradients(self.scores.outside()[0], gradient)
        return Gradients(by_leaf, by_rules), self.failed()


def posteriors(plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"]) -> Posteriors:
    """Of all nodes and edges of a forest; the arguments are those of `log_likelihood`."""
    return _posteriors(Scaled(plan, rules, leaf))


def _posteriors(solution: Solution) -> Posteriors:
    known, failed = solution.posteriors()
    again = solution.again(failed)
    if again is None:
        return known
    other, part, sentences = again
    better = _posteriors(other)
    known.log_z.index_copy_(0, sentences, better.log_z)
    known.sign.index_copy_(0, sentences, better.sign)
    known.nodes.index_copy_(0, part.nodes, better.nodes[:-2].to(known.nodes.dtype))
    known.edges.index_copy_(0, part.edges, better.edges.to(known.edges.dtype))
    known.ways.update(better.ways + Counter({other.way: len(sentences) - better.ways.total()}))
    return known


def log_partition(
    plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"]
) -> tuple[Float64[Tensor, "sentences"], Float64[Tensor, "sentences"]]:
    """log |Z| of each sentence and the sign of Z; without derivatives."""
    return _log_partition(Scaled(plan, rules, leaf))


def _log_partition(solution: Solution) -> tuple[Tensor, Tensor]:
    log_z, sign = solution.log_z, solution.sign
    again = solution.again(solution.failed())
    if again is None:
        return log_z, sign
    other, _, sentences = again
    better, signs = _log_partition(other)
    return log_z.index_copy(0, sentences, better), sign.index_copy(0, sentences, signs)


def log_likelihood(
    plan: Plan, rules: Float[Tensor, "numbers"], leaf: Float[Tensor, "leaves states"]
) -> Float64[Tensor, "sentences"]:
    """log |Z| of each sentence of a forest; differentiable once.

    `rules` are all rule tensors end to end, `leaf` is the Q of each leaf. The computation has the type of `leaf`, but
    derivatives by rules are summed in float64. Parameter times derivative is the expected count. The factors of the
    plan's CP forms have derivatives too.
    """
    factors = () if plan.cp is None else (plan.cp.factors.u, plan.cp.factors.v, plan.cp.factors.w)
    total: Tensor = _LogLikelihood.apply(plan, rules, leaf, *factors)
    return total


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, rules: Tensor, leaf: Tensor, *factors: Tensor) -> Tensor:
        ctx.solution = Scaled(plan, rules, leaf)
        # A copy: else `ctx` and the output would keep each other, and all the weights, alive.
        return _log_partition(ctx.solution)[0].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = _gradients(ctx.solution, gradient)
        return None, found.rules[0], found.leaf, *found.rules[1:]


def _gradients(solution: Solution, gradient: Tensor) -> Gradients:
    known, failed = solution.gradients(gradient)
    again = solution.again(failed)
    if again is None:
        return known
    other, part, sentences = again
    better = _gradients(other, take(gradient, sentences))
    known.leaf.index_copy_(0, part.leaves, better.leaf.to(known.leaf.dtype))
    return Gradients(known.leaf, [x + y for x, y in zip(known.rules, better.rules, strict=True)])
