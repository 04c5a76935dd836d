"""Posteriors of spans: mu(a, i, j) / Z = alpha * beta, in the notation of Cohen & Collins 2012, figure 2."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lvpcfg.chart.derivations import Allowed
from lvpcfg.chart.fast.blocks import PHRASES, WORD_LAST
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.fast.logarithms import LogChart
from lvpcfg.chart.fast.partition import Problem, Solution, solve_outside
from lvpcfg.errors import InputError
from lvpcfg.grammar.grammar import Grammar


@dataclass(frozen=True, eq=False)
class Marginals:
    """Posteriors of the states of each span (i, j), first and last word included; zero where j < i.

    With unary rules every span has a top state, which its parent sees, and a bottom state, below which is a binary rule
    or a word; without them the two are the same.
    """

    log_z: Float64[Tensor, "batch"]  # log |Z|
    sign: Float[Tensor, "batch"]  # of Z
    top: Float[Tensor, "batch i j states"]
    bottom: Float[Tensor, "batch i j states"]

    def by_symbol(self, grammar: Grammar, layer: str = "top") -> Float[Tensor, "batch i j symbols"]:
        """Posteriors of symbols, whatever their states."""
        return by_symbol(getattr(self, layer), grammar)


def by_symbol(values: Float[Tensor, "*spans states"], grammar: Grammar) -> Float[Tensor, "*spans symbols"]:
    """Summed over the states of each symbol."""
    symbol = grammar.symbol_of_state.to(values.device)
    return values.new_zeros(*values.shape[:-1], len(grammar.symbols)).index_add(-1, symbol, values)


def marginals(
    form: FastForm,
    leaf: Float[Tensor, "length batch word_states"],
    lengths: Int[Tensor, "batch"] | None = None,
    allowed: Allowed | None = None,
) -> Marginals:
    """Posteriors of all spans and states."""
    with torch.no_grad():
        problem = Problem(form, leaf, lengths, allowed)
        ones = torch.ones(leaf.shape[1], dtype=torch.float64, device=leaf.device)
        return collect(solve_outside(problem, ones), leaf.dtype)


def collect(solutions: Sequence[Solution], dtype: torch.dtype) -> Marginals:
    """The posteriors of charts, in the order of the sentences."""
    order = torch.cat([solution.sentences for solution in solutions]).argsort()
    parts = [_posteriors(solution) for solution in solutions]
    log_z, sign, top, bottom = (torch.cat(list(part)).index_select(0, order) for part in zip(*parts, strict=True))
    return Marginals(log_z, sign, top.to(dtype), bottom.to(dtype))


def anchored(
    form: TensorForm, leaf: Float[Tensor, "length batch word_states"], width: int, rules: int
) -> Float[Tensor, "batch starts splits {rules}"]:
    """Posteriors of skeletal rules over the spans of one width.

    sum over states of O(a, i, j) T I(b, i, k) I(c, k + 1, j) / Z, where split k is the number of words on the left,
    less one. (Petrov & Klein 2007.)
    """
    batch, starts = leaf.shape[1], leaf.shape[0] - width + 1
    found = leaf.new_zeros(rules, starts, batch, width - 1)
    with torch.no_grad():
        for solution in solve_outside(Problem(form, leaf), torch.ones(batch, dtype=torch.float64, device=leaf.device)):
            if solution.sums is None:
                raise InputError("posteriors of rules are not available for sentences that need log-sum-exp.")
            chart, outside = solution.sums
            beta = form.pad(outside.bottom[width - 1])
            for term in form.terms(width):
                block = form.blocks[term]
                first = {PHRASES: form.narrowest - 1, WORD_LAST: width - 2}.get(block.child_types, 0)
                values = block.anchored(beta, *chart.operands(term, width), chart.form.weights[term])
                values = values.unflatten(1, (starts, -1)).to(leaf.dtype)
                for split in range(values.shape[-1]):
                    place = found.select(-1, first + split).index_select(0, block.rules)
                    place.index_add_(2, solution.sentences, values.select(-1, split))
                    found.select(-1, first + split).index_copy_(0, block.rules, place)
    return found.permute(2, 1, 3, 0)


def _posteriors(solution: Solution) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sign = solution.chart.sign.to(torch.float64)
    if isinstance(solution.chart, LogChart):
        return solution.chart.log_z, sign, *solution.chart.posteriors()
    assert solution.sums is not None
    chart, outside = solution.sums
    inner, outer = chart.form.interminals, chart.word.shape[-1]
    layers = []
    for values, gradients, words in (
        (chart.top, outside.top, chart.word_top * outside.word_top),
        (chart.bottom, outside.bottom, chart.word * outside.word),
    ):
        spans = chart.word.new_zeros(chart.length, chart.length, chart.batch, inner + outer)
        for width, (value, gradient) in enumerate(zip(values, gradients, strict=True), 1):
            _diagonal(spans.narrow(-1, 0, inner), width).copy_(_by_start(value * gradient, chart.batch))
        _diagonal(spans.narrow(-1, inner, outer), 1).copy_(_by_start(words, chart.batch))
        layers.append(spans.permute(2, 0, 1, 3))
    return chart.log_z, sign, layers[0], layers[1]


def _diagonal(spans: Tensor, width: int) -> Tensor:
    """The cells of one width of [i, j, batch, states], as [batch, states, starts]."""
    return spans.diagonal(width - 1, 0, 1)


def _by_start(cells: Tensor, batch: int) -> Tensor:
    """[starts * batch, states] -> [batch, states, starts]"""
    return cells.unflatten(0, (-1, batch)).permute(1, 2, 0)
