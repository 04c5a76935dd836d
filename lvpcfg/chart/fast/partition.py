"""log Z and its derivatives, exact for every sentence.

Numbers leave the range of floats where the states of a cell, or the parts of a sentence, are too far apart for one
scale. This never goes unnoticed: log Z is -inf or not a number, or the outside pass overflows. The reason: what
underflows in float32 is below 2^-149, and alpha * beta is a posterior, so that a lost number matters only if its
outside score is above 2^128, which is infinite in float32. (A cell that was scaled up after it was computed has lost
more: its outside score is checked after scaling it by the same factor.) Such a sentence is computed again in float64
and, if that is not enough, by log-sum-exp, before it is called impossible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lvpcfg.chart.derivations import Allowed
from lvpcfg.chart.fast.inside import Chart, FastForm
from lvpcfg.chart.fast.logarithms import LogChart, LogOutside
from lvpcfg.chart.fast.outside import Outside

MATRICES = 1 << 27  # bytes
NARROW, WIDE, LOGARITHMIC = "as given", "float64", "log-sum-exp"


@runtime_checkable
class Scores(Protocol):
    """Inside scores of sentences, in any layout."""

    log_z: Float64[Tensor, "batch"]
    sign: Tensor

    def near_underflow(self) -> bool: ...


@runtime_checkable
class Derivatives(Protocol):
    """Of log Z, weighted by a number for each sentence: by the words, and by the tensors of the form if asked for."""

    @property
    def leaf(self) -> Float[Tensor, "length batch word_states"]: ...

    tensors: list[Tensor | None]


@dataclass(eq=False)
class Solution:
    """Charts of some sentences of a batch, computed one way: by sums (`level` NARROW or WIDE), or by log-sum-exp."""

    sentences: Int[Tensor, "some"]  # their numbers
    level: str
    chart: Scores
    outside: Derivatives | None = None

    @property
    def sums(self) -> tuple[Chart, Outside] | None:
        """Inside and outside scores in ordinary numbers, unless log-sum-exp was needed."""
        return (
            (self.chart, self.outside) if isinstance(self.chart, Chart) and isinstance(self.outside, Outside) else None
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """The sentences of a batch under a form in ordinary numbers."""

    form: FastForm
    leaf: Float[Tensor, "length batch word_states"]
    lengths: Int[Tensor, "batch"] | None = None
    allowed: Allowed | None = None

    def part(self, sentences: Int[Tensor, "some"]) -> "Problem":
        allowed = self.allowed
        if allowed is not None:
            allowed = Allowed(allowed.bottom.index_select(1, sentences), allowed.top.index_select(1, sentences))
        lengths = self.lengths  # on the CPU, or where the sentences are
        if lengths is not None:
            lengths = lengths.index_select(0, sentences.to(lengths.device))
        return replace(self, leaf=self.leaf.index_select(1, sentences), lengths=lengths, allowed=allowed)

    def sentences_at_once(self) -> int:
        """As many as keep the matrices of their words within bounds."""
        each = self.leaf.shape[0] * self.form.matrix_size * self.leaf.element_size()
        return max(1, MATRICES // max(1, each))

    def chart(self, level: str) -> Scores:
        if level == NARROW:
            return Chart(self.form, self.leaf, self.lengths, self.allowed)
        chart = Chart if level == WIDE else LogChart
        return chart(self.form.to(torch.float64), self.leaf.to(torch.float64), self.lengths, self.allowed)

    def outside(self, chart: Scores, gradient: Float[Tensor, "batch"], parameters: bool = False) -> Derivatives:
        if isinstance(chart, Chart):
            return Outside(chart, gradient, parameters)
        assert isinstance(chart, LogChart)
        return LogOutside(chart, gradient, parameters)

    def overflowed(self, outside: Derivatives) -> Bool[Tensor, "batch"]:
        """Whose outside scores are not finite, or would not be at the scale at which cells were computed."""
        fine = outside.leaf.isfinite().all(-1).all(0)
        if isinstance(outside, Outside):
            chart = outside.chart
            for beta, raised in (
                (outside.bottom.cells, chart.raised),
                (outside.word, chart.raised[: len(outside.word)]),
            ):
                fine &= (beta * raised).isfinite().all(-1).view(-1, chart.batch).all(0)
        return ~fine

    def levels(self) -> list[str]:
        """The ways to compute it, in order."""
        levels = [NARROW] if self.leaf.dtype == torch.float64 else [NARROW, WIDE]
        signed = any(bool((tensor < 0).any()) for tensor in (*self.form.tensors, self.leaf))
        return levels if signed else [*levels, LOGARITHMIC]


def solve(problem: Problem, certify: bool = True) -> list[Solution]:
    """The inside charts of all sentences; those that fail at the first level are in other solutions.

    Only the outside pass shows all underflow. To certify log Z, it is run here for charts with numbers close to
    underflow; `solve_outside` runs it anyway.
    """
    sentences = torch.arange(problem.leaf.shape[1], device=problem.leaf.device)
    pieces = sentences.split(problem.sentences_at_once())
    if len(pieces) == 1:
        return _solve(problem, sentences, None, certify)
    return [solution for piece in pieces for solution in _solve(problem.part(piece), piece, None, certify)]


def _solve(problem: Problem, sentences: Tensor, levels: Sequence[str] | None, certify: bool) -> list[Solution]:
    level = NARROW if levels is None else levels[0]
    chart = problem.chart(level)
    failed = ~chart.log_z.isfinite()
    if certify and chart.near_underflow():
        failed |= problem.overflowed(problem.outside(chart, torch.ones_like(chart.log_z)))
    solution = Solution(sentences, level, chart)
    if not bool(failed.any()):
        return [solution]
    levels = problem.levels() if levels is None else levels
    return _again(problem, solution, failed, levels, certify) if len(levels) > 1 else [solution]


def _again(
    problem: Problem, solution: Solution, failed: Tensor, levels: Sequence[str], certify: bool
) -> list[Solution]:
    """The sentences that did not fail at the same level, the others at the next."""
    solutions = []
    for some, ways in (((~failed).nonzero().squeeze(1), levels), (failed.nonzero().squeeze(1), levels[1:])):
        if len(some):
            solutions += _solve(problem.part(some), solution.sentences.index_select(0, some), ways, certify)
    return solutions


def solve_outside(
    problem: Problem,
    gradient: Float[Tensor, "batch"],
    parameters: bool = False,
    solutions: list[Solution] | None = None,
) -> list[Solution]:
    """Inside and outside charts; sentences whose outside scores overflow are computed again at the next level.

    `gradient` is the weight of each sentence's log Z.
    """
    done, waiting = [], solve(problem, certify=False) if solutions is None else list(solutions)
    while waiting:
        solution = waiting.pop()
        outside = problem.outside(solution.chart, gradient.index_select(0, solution.sentences), parameters)
        failed = problem.overflowed(outside)
        levels = problem.levels() if bool(failed.any()) else []
        ways = levels[levels.index(solution.level) :] if levels else []
        if len(ways) < 2:
            done.append(replace(solution, outside=outside))
        else:
            waiting += _again(problem.part(solution.sentences), solution, failed, ways, certify=False)
    return done


def log_partition(
    form: FastForm,
    leaf: Float[Tensor, "length batch word_states"],
    lengths: Int[Tensor, "batch"] | None = None,
    allowed: Allowed | None = None,
) -> tuple[Float64[Tensor, "batch"], Float64[Tensor, "batch"]]:
    """log |Z| of each sentence, and the sign of Z; differentiable once by `leaf` and the form's tensors.

    The derivative by an entry that is zero is 0 where it is infinite, where log-sum-exp was needed, and where the
    cells it would need have no derivation at all; expected counts, entry times derivative, are right everywhere.
    """
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (leaf, *form.tensors))
    if allowed is None and not wanted:
        form = form.for_log_z
    return differentiable(Problem(form, leaf, lengths, allowed))


def differentiable(problem: Problem) -> tuple[Float64[Tensor, "batch"], Float64[Tensor, "batch"]]:
    """The same for any layout of a problem."""
    log_z, sign = _LogPartition.apply(problem, problem.leaf, *problem.form.tensors)
    return log_z, sign


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, leaf: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        form = problem.form.with_tensors([tensor.detach() for tensor in tensors])
        ctx.problem = replace(problem, form=form, leaf=leaf.detach())
        ctx.solutions = solve(ctx.problem)
        ctx.save_for_backward(leaf, *tensors)
        log_z, sign = (
            torch.cat([getattr(solution.chart, name) for solution in ctx.solutions]) for name in ("log_z", "sign")
        )
        order = torch.cat([solution.sentences for solution in ctx.solutions]).argsort()
        sign = sign.to(torch.float64).index_select(0, order)
        ctx.mark_non_differentiable(sign)
        return log_z.index_select(0, order), sign

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        leaf, *tensors = ctx.saved_tensors
        parameters = any(ctx.needs_input_grad[2:])
        with torch.no_grad():
            solutions = solve_outside(ctx.problem, gradient, parameters, ctx.solutions)
            found = total_gradients(ctx.problem, solutions)
        if torch.is_grad_enabled():  # a second derivative may be asked for
            found = [gradient if gradient is None else _NotTwice.apply(gradient, leaf, *tensors) for gradient in found]
        return (None, *found)


def total_gradients(problem: Problem, solutions: Sequence[Solution]) -> list[Tensor | None]:
    """The gradients by the words and, where they were asked for, by the tensors of the form, over all sentences."""
    tensors, leaf = problem.form.tensors, torch.empty_like(problem.leaf)
    totals: list[Tensor | None] = [None] * len(tensors)
    for solution in solutions:
        assert solution.outside is not None
        words, *found = (solution.outside.leaf, *solution.outside.tensors)
        if len(solutions) == 1 and not words.is_inference():
            leaf = words.to(leaf.dtype)
        else:
            leaf.index_copy_(1, solution.sentences, words.to(leaf.dtype))
        for number, (gradient, tensor) in enumerate(zip(found, tensors, strict=True)):
            if gradient is not None:
                known = totals[number]
                gradient = gradient.clone() if gradient.is_inference() else gradient
                gradient = gradient.to(tensor.dtype)
                totals[number] = gradient if known is None else known.add_(gradient)
    return [_finite(g, t) for g, t in zip([leaf, *totals], [problem.leaf, *tensors], strict=True)]


def _finite(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Without the infinite derivatives of entries that are zero: what counts is their product, 0."""
    if gradient is None or bool(gradient.sum().isfinite()):
        return gradient
    return torch.where((tensor == 0) & ~gradient.isfinite(), 0, gradient)


class _NotTwice(torch.autograd.Function):
    """Gradients that raise an error when they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "the gradient of log Z cannot be differentiated again: its backward pass is written out, once. "
            "For entropies and divergences use lvpcfg.distributions."
        )
