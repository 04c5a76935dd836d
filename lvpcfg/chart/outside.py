"""Outside scores and gradients: the inside pass run backwards, width by width.

    beta(i,j) = d log Z / d alpha(i,j)

(Cohen & Collins 2012, figure 2.) Each width is computed again instead of having kept its products, so that memory is
O(n^2) cells for every form and every arithmetic. In ordinary arithmetic terms bring their derivative along
(`undo`), since that is where the time goes; in the others autograd finds it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lvpcfg.chart.algebra import SUM
from lvpcfg.chart.forms import AFTER, BEFORE, INNER, WORDS, Algebra, Block, Lanes
from lvpcfg.chart.inside import Chart, Spans


class Outside:
    """The derivative of log Z, weighted by a number for each sentence, by everything a chart was made of.

    beta of a cell is the derivative by its mantissas, so that alpha * beta is the posterior as it stands.
    """

    def __init__(self, chart: Chart, gradient: Tensor, parameters: bool = False) -> None:
        self.chart, self.parameters = chart, parameters
        self.tensors: list[Tensor | None] = [None] * len(chart.form.tensors)  # where parameters are asked for
        self.top: list[Tensor] = []  # for each width, [cells, interminal states]; widest first until the end
        self.bottom: list[Tensor] = []
        self.spans = Spans(torch.zeros_like(chart.spans.left), torch.zeros_like(chart.spans.right), chart.batch)
        self.tables = [torch.zeros_like(table) for table in chart.tables]
        self.words = torch.zeros_like(chart.form.pad(chart.algebra, chart.word_top))  # as halves of two-word spans
        self.transposed: dict[int, Tensor] = {}
        self.factors: dict[int, list[tuple[Tensor, Tensor]]] = {}  # products of these are gradients of tensors
        self._begin(gradient)
        for width in range(chart.length, 1, -1):
            self._undo(width)
        self._undo_words()
        self._multiply_factors()
        del self.tables, self.words, self.transposed, self.factors
        chart.forget()
        self.top.reverse()
        self.bottom.reverse()

    def _begin(self, gradient: Tensor) -> None:
        chart = self.chart

        def log_z(final: Tensor, root: Tensor) -> Tensor:
            return chart.algebra.log(chart.total(final, root), chart.final_exponent.squeeze(-1))

        self.final, root = _backward(log_z, [chart.final, chart.form.root], [gradient], [True, self.parameters])
        self._add(0, [root])

    def _add(self, place: int, gradients: Sequence[Tensor | None]) -> None:
        for i, gradient in enumerate(gradients, place):
            if gradient is not None:
                known = self.tensors[i]
                self.tensors[i] = gradient if known is None else known.add_(gradient)

    def _undo(self, width: int) -> None:
        chart, form, algebra = self.chart, self.chart.form, self.chart.algebra
        top = self._add_final(width, self._from_parents(width))
        bottom = chart.keep(top, "top", width, gradient=True)
        if form.closure is not None:
            bottom = self._undo_product(1, chart.bottom[width - 1], bottom)
        self.top.append(top)
        self.bottom.append(bottom)
        cell = chart.keep(algebra.unscale(bottom, chart.shift[width - 1]), "bottom", width, gradient=True)
        if form.projects:
            cell = self._undo_product(len(form.tensors) - len(form.weights), chart.combined[width - 2], cell)

        terms = form.terms(width)
        for term, share in zip(terms, self._shares(cell, terms, width), strict=True):
            block, place = form.blocks[term], len(form.tensors) - len(form.weights) + term
            parameters = self.parameters and block.kind in (INNER, WORDS)
            operands, into = chart.operands(term, width), self._into(term, width)
            if algebra is SUM:
                add = partial(self._add_product, place) if parameters else None
                block.undo(*operands, form.weights[term], share, into, add)
            else:
                *found, weights = _backward(
                    partial(_apply, block, algebra, operands[2]),
                    [*operands[:2], form.weights[term]],
                    [share],
                    [True, True, parameters],
                )
                self._add(place, [weights])
                for view, gradient in zip(into, found, strict=True):
                    view.add_(gradient)

    def _into(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        """Where the gradients of the operands of a term are added up."""
        chart, kind = self.chart, self.chart.form.blocks[term].kind
        if kind == INNER:
            return self.spans.children(width, chart.form.narrowest)
        if kind == WORDS:
            first, last = chart.window(self.words, width, BEFORE, -2), chart.window(self.words, width, AFTER, -2)
            return first.unsqueeze(-2), last.unsqueeze(-2)
        table = chart.window(self.tables[chart.form.table_of(term)], width, kind, -3)
        return table, self.spans.rest(width, kind)

    def _add_product(self, place: int, x: Tensor, y: Tensor) -> None:
        known = self.tensors[place]
        self.tensors[place] = torch.bmm(x, y) if known is None else known.baddbmm_(x, y)

    def _undo_product(self, place: int, cells: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through the product of the cells of a width with a matrix of the form."""
        algebra, matrix = self.chart.algebra, self.chart.form.tensors[place]
        if algebra is SUM:
            if self.parameters:
                self.factors.setdefault(place, []).append((cells, gradient))
            if place not in self.transposed:
                self.transposed[place] = matrix.T.contiguous()
            return torch.mm(gradient, self.transposed[place])
        found, weights = _backward(algebra.matmul, [cells, matrix], [gradient], [True, self.parameters])
        self._add(place, [weights])
        return found

    def _multiply_factors(self) -> None:
        """The gradients of matrices that were used in every width, in one product over all cells."""
        for place, pairs in self.factors.items():
            cells, gradients = (torch.cat(factors) for factors in zip(*pairs, strict=True))
            self._add(place, [torch.mm(cells.T, gradients)])

    def _shares(self, cell: Tensor, terms: list[int], width: int) -> list[Tensor]:
        """The gradient of each of the terms that a cell is the sum of."""
        chart, form, algebra = self.chart, self.chart.form, self.chart.algebra
        if algebra is SUM:
            return [form.pad(algebra, cell)] * len(terms)
        if len(terms) < 2:
            return [cell] * len(terms)
        parts = [form.blocks[term].apply(algebra, *chart.operands(term, width), form.weights[term]) for term in terms]
        return _backward(lambda *parts: algebra.add(parts), parts, [cell], [True] * len(parts))

    def _from_parents(self, width: int) -> Tensor:
        """From the lanes of a cell to the cell."""
        form = self.chart.form
        if width == self.chart.length:
            return torch.zeros_like(self.chart.top[width - 1])
        left, right = self.spans.own(width)
        if not form.projects:
            return (left + right).narrow(-1, 0, form.interminals)
        lanes = torch.cat([left, right], -1)
        return self._undo_product(len(form.tensors) - len(form.weights) + 1, self.chart.top[width - 1], lanes)

    def _add_final(self, width: int, top: Tensor) -> Tensor:
        """The share of the sentences that are as long as this."""
        chart = self.chart
        share = self.final.narrow(-1, 0, chart.form.interminals)
        if chart.lengths is None:
            return share if width == chart.length else top
        share = torch.where((chart.lengths == width).unsqueeze(-1), share, 0)
        rest = top.shape[-2] - chart.batch
        return top + torch.nn.functional.pad(share, (0, 0, 0, rest))

    def _undo_words(self) -> None:
        chart, form, algebra = self.chart, self.chart.form, self.chart.algebra
        weights, unary = len(form.weights), form.promotion is not None
        place = len(form.tensors) - weights

        def filled(word: Tensor, top: Tensor, *weights: Tensor) -> list[Tensor]:
            left, right, tables = form.with_weights(weights).words(algebra, word, top)
            return [*tables] if left is None or right is None else [left, right, *tables]

        gradients = [*(self.spans.own(1) if form.narrowest == 1 else ()), *self.tables]
        word_top, top, *found = _backward(
            filled,
            [chart.word_top, chart.top[0], *form.weights],
            gradients,
            [True, unary, *[self.parameters] * weights],
        )
        self._add(place, found)
        word_top = self.words.narrow(-1, 0, chart.word.shape[-1]) + (0 if word_top is None else word_top)
        top = torch.zeros_like(chart.top[0]) if top is None else top
        if chart.length == 1 or chart.lengths is not None:
            here = (
                self.final if chart.lengths is None else torch.where((chart.lengths == 1).unsqueeze(-1), self.final, 0)
            )
            here = torch.nn.functional.pad(here, (0, 0, 0, word_top.shape[-2] - chart.batch))
            word_top = word_top + here.narrow(-1, form.interminals, word_top.shape[-1])
            top = top + here.narrow(-1, 0, form.interminals)
        self.word_top, word = word_top, chart.keep(word_top, "top", 1, words=True, gradient=True)
        self.top.append(top)
        self.bottom.append(torch.zeros_like(top))
        if form.promotion is not None:
            masked = chart.keep(top, "top", 1, gradient=True)
            promoted, promotion = _backward(
                algebra.matmul, [chart.word, form.promotion], [masked], [True, self.parameters]
            )
            self._add(2, [promotion])
            word = word + promoted
        self.word = word
        leaf = chart.keep(algebra.unscale(word, chart.shift[0]), "bottom", 1, words=True, gradient=True)
        self.leaf = leaf.unflatten(-2, (chart.length, chart.batch))


def _apply(block: Block | Lanes, algebra: Algebra, align: Tensor, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
    return block.apply(algebra, one, two, align, weights)


def _backward(
    function: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Any]:
    """The gradients of the wanted inputs of a function, given those of its outputs; None where there are none."""
    found: list[Any] = [None] * len(inputs)
    if not gradients or not any(wanted):
        return found
    leaves = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        outputs = function(*leaves)
    places = [i for i, want in enumerate(wanted) if want]
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    computed = torch.autograd.grad(outputs, [leaves[i] for i in places], gradients, allow_unused=True)
    for i, gradient in zip(places, computed, strict=True):
        found[i] = gradient
    return found
