"""Outside scores and gradients: the inside pass run backwards, width by width.

    beta(i,j) = d log Z / d alpha(i,j)

(Cohen & Collins 2012, figure 2.) Each width is computed again instead of having kept its products, so
that memory is O(n^2) cells for every form and every arithmetic. In ordinary arithmetic terms bring their
derivative along (`backward`), since that is where the time goes; in the others autograd finds it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lvpcfg.chart.fast import potentials
from lvpcfg.chart.fast.algebra import SUM
from lvpcfg.chart.fast.blocks import AFTER, BEFORE, INNER, WORDS, DenseBlock
from lvpcfg.chart.fast.cp import CPByChildTypes, CPForm, Lanes
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart, Spans, written_out


class Outside:
    """The derivative of log Z, weighted by a number for each sentence, by everything a chart was made of.

    beta of a cell is the derivative by what the chart holds, so that alpha * beta is the posterior as it stands.
    """

    def __init__(self, chart: Chart, gradient: Tensor, parameters: bool = False) -> None:
        self.chart, self.parameters, form = chart, parameters, chart.form
        self.tensors: list[Tensor | None] = [None] * (len(form.unary) + 1)  # where parameters are asked for
        self.weights: list[Tensor | None] = [None] * len(form.weights)
        with written_out(chart.algebra):
            self._make_room()
            self._begin(gradient)
            self.top.whole.index_copy_(-2, chart.whole, self.final.narrow(-1, 0, form.interminals))
            for width in range(chart.length, 1, -1):
                self._backward_width(width)
            self._backward_words()
            if parameters and chart.algebra is SUM:
                self._backward_matrices()
        self.tensors += form.joined(self.weights) if parameters else [None] * len(form.tensors)
        del self.tensors[len(form.tensors) :]
        del self.tables, self.beside, self.filled, self.words, self.flat, self.weights
        chart.forget()

    def _make_room(self) -> None:
        """For gradients to be added up in."""
        chart, form = self.chart, self.chart.form
        self.spans = Spans(torch.zeros_like(chart.spans.sides), chart.batch)
        self.words = torch.zeros_like(form.pad(chart.algebra, chart.word_top))  # as halves of two-word spans
        self.tables: list[Tensor] = []
        self.filled: Spans | None = None  # of what words in rules brought to the spans they begin and end
        if chart.algebra is SUM and form.whole:
            self.filled = Spans.made(chart.word.new_zeros, chart.length, chart.batch, form.interminals)
            self.pairs = chart.word.new_zeros((chart.length - 1) * chart.batch, form.interminals)
        else:
            self.tables = [torch.zeros_like(table) for table in chart.tables]
        self.beside = [chart.layer(chart.word, lanes) for lanes in form.beside]
        for layer in self.beside:
            layer.whole.zero_()
        # For each width, the gradients of lanes and of what is beside them, where parameters are asked for.
        wanted = self.parameters and form.projects and chart.algebra is SUM
        self.flat = chart.layer(chart.word, 2 * form.lanes + sum(form.beside) if wanted else 0)
        self.top = chart.layer(chart.word, form.interminals)
        self.top.whole.zero_()
        self.bottom = self.top if chart.top is chart.bottom else chart.layer(chart.word, form.interminals)
        if form.projects:
            self.combined = chart.layer(chart.word, form.terms_lifted, 2)

    def _begin(self, gradient: Tensor) -> None:
        chart = self.chart

        if chart.algebra is SUM:
            total = chart.total(chart.final, chart.form.root)
            share = (gradient / total).masked_fill(total == 0, 0).to(total.dtype).unsqueeze(-1)
            self.final, self.tensors[0] = share * chart.form.root, torch.mm(share.T, chart.final).squeeze(0)
            return

        def log_z(final: Tensor, root: Tensor) -> Tensor:
            return chart.algebra.log(chart.total(final, root))

        self.final, self.tensors[0] = _backward(
            log_z, [chart.final, chart.form.root], [gradient], [True, self.parameters]
        )

    def _backward_width(self, width: int) -> None:
        chart, form, top, bottom = self.chart, self.chart.form, self.top[width - 1], self.bottom[width - 1]
        if width < chart.length:
            top.add_(self._from_parents(width))
        chart.keep(top, "top", width, gradient=True)
        if form.closure is not None:
            self._backward_product(self.tensors, 1, form.closure, chart.bottom[width - 1], top, bottom)
        elif bottom is not top:
            bottom.copy_(top)
        chart.keep(bottom, "bottom", width, gradient=True)
        combined = bottom
        if isinstance(form, CPForm) and form.lifts:
            combined = self.combined[width - 2]
            self._backward_product(self.weights, 0, form.weights[0], chart.combined[width - 2], bottom, combined)
        if width == 2 and isinstance(form, CPByChildTypes):
            lanes = torch.mm(bottom, form.weights[3].T)
            one, two = chart.pair_of_words(chart.tables)
            into_one, into_two = chart.pair_of_words(self.tables)
            into_one.addcmul_(lanes, two)
            into_two.addcmul_(lanes, one)
        terms = form.terms(width)
        for term, share in zip(terms, self._shares(combined, terms, width), strict=True):
            self._backward_term(term, width, share)

    def _backward_term(self, term: int, width: int, share: Tensor) -> None:
        """Hands the gradient of what a term brought to the cells of a width on to its operands and its weights."""
        chart, algebra, block = self.chart, self.chart.algebra, self.chart.form.blocks[term]
        parameters = self.parameters and not block.filled and not chart.form.projects
        operands, weights, into = chart.operands(term, width), chart.form.weights[term], self._into(term, width)
        if algebra is not SUM:
            *found, gradient = _backward(
                partial(block.apply, algebra),
                [*operands, weights],
                [share],
                [True, True, parameters],
            )
            _add(self.weights, term, gradient)
            for view, part in zip(into, found, strict=True):
                view.add_(part)
            return
        add = partial(_add_product, self.weights, term) if parameters else None
        if isinstance(block, DenseBlock) and not block.filled:
            block.backward(*operands, weights, share, into, add, chart.room(block, width))
        else:
            block.backward(*operands, weights, share, into, add)

    def _into(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        """Where the gradients of the operands of a term are added up."""
        chart, block = self.chart, self.chart.form.blocks[term]
        if block.kind == INNER:
            return self.spans.children(width, chart.form.narrowest)
        if isinstance(block, Lanes):
            return chart.word_and_rest(term, width, self.tables, self.beside)
        if block.kind == WORDS:
            rest = chart.window(self.words, width, AFTER, -2)
            if not block.filled:
                return chart.window(self.words, width, BEFORE, -2).unsqueeze(-2), rest.unsqueeze(-2)
        else:
            rest = self.spans.rest(width, block.kind, chart.form.interminals if chart.form.whole else None)
        if self.filled is None:
            return chart.window(self.tables[chart.form.table_of(term)], width, block.kind, -3), rest
        return self.pairs if block.kind == WORDS else self.filled.one(width, block.kind), rest

    def _backward_product(
        self,
        gradients: list[Tensor | None],
        place: int,
        matrix: Tensor,
        cells: Tensor,
        gradient: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Backwards through the product of the cells of a width with a matrix of the form.

        The gradient of the matrix is added up, in ordinary arithmetic in the end (`_backward_matrices`).
        """
        algebra = self.chart.algebra
        if algebra is SUM:
            return torch.mm(gradient, matrix.T, out=out)
        found, weights = _backward(algebra.matmul, [cells, matrix], [gradient], [True, self.parameters])
        _add(gradients, place, weights)
        return found if out is None else out.copy_(found)

    def _backward_matrices(self) -> None:
        """The gradients of the matrices that cells were multiplied with, in one product over all widths each."""
        chart, form = self.chart, self.chart.form
        if form.closure is not None:
            self.tensors[1] = torch.mm(chart.bottom.wider.T, self.top.wider)
            self.tensors[2] = torch.mm(chart.word.T, self.top[0])
        if isinstance(form, CPForm):
            self.weights[0] = torch.mm(chart.combined.whole.T, self.bottom.wider)
            first = 0 if form.promotion is not None else len(chart.word)  # where there are no phrases of one word
            children = len(chart.top.whole) - chart.batch - first  # all but whole sentences
            if children > 0:
                cells, lanes = (layer.whole.narrow(0, first, children) for layer in (chart.top, self.flat))
                self.weights[1] = torch.mm(cells.T, lanes)
        if isinstance(form, CPByChildTypes) and chart.length > 1:
            self.weights[3] = torch.mm(chart.pairs.T, self.bottom[1])

    def _shares(self, cell: Tensor, terms: list[int], width: int) -> Sequence[Tensor]:
        """The gradient of each of the terms that a cell is the sum of."""
        chart, algebra = self.chart, self.chart.algebra
        if algebra is SUM:
            return chart.form.shares(chart.form.pad(algebra, cell), terms)
        if len(terms) < 2:
            return [cell] * len(terms)
        parts = [chart.apply(term, width) for term in terms]
        return _backward(lambda *parts: algebra.add(parts), parts, [cell], [True] * len(parts))

    def _from_parents(self, width: int) -> Tensor:
        """From the lanes of a cell to the cell."""
        form = self.chart.form
        if not form.projects:
            lanes = self.spans.own(width).narrow(-1, 0, form.interminals)
            return torch.add(lanes.select(-3, 0), lanes.select(-3, 1))
        parts = [*self.spans.own(width).unbind(-3), *(layer[width - 1] for layer in self.beside)]
        lanes = torch.cat(parts, -1, out=self.flat[width - 1] if self.flat.whole.numel() else None)
        return self._backward_product(self.weights, 1, form.weights[1], self.chart.top[width - 1], lanes)

    def _from_spans(self) -> tuple[Tensor, Tensor | None]:
        """From words as children to words: the gradients of their states, and of the phrases over them."""
        chart, form, algebra = self.chart, self.chart.form, self.chart.algebra
        unary, lanes = form.promotion is not None, self.spans.own(1)
        if algebra is SUM:
            top = self._from_parents(1) if unary and chart.length > 1 else None
            if isinstance(form, TensorForm):
                return self._backward_filled(form), top
            lanes = torch.cat([*lanes.unbind(-3), *self.tables], -1)
            self.weights[2] = torch.mm(chart.word_top.T, lanes) if self.parameters else None
            return torch.mm(lanes, form.weights[2].T), top

        def words(word: Tensor, top: Tensor, *weights: Tensor) -> list[Tensor]:
            lanes, tables = form.with_weights(weights).words(algebra, word, top)
            return tables if lanes is None else [lanes, *tables]

        lanes = lanes if form.projects else lanes.sum(-3, keepdim=True)
        word_top, top, *found = _backward(
            words,
            [chart.word_top, chart.top[0], *form.weights],
            [lanes, *self.tables] if form.narrowest == 1 else self.tables,
            [True, unary, *[self.parameters] * len(form.weights)],
        )
        for term, gradient in enumerate(found):
            _add(self.weights, term, gradient)
        pairs = self.words.narrow(-1, 0, chart.word.shape[-1])
        return pairs if word_top is None else pairs + word_top, top

    def _backward_filled(self, form: TensorForm) -> Tensor:
        """The gradient of the words, from the rules that they were filled into."""
        chart, total = self.chart, self.words
        word = form.pad(chart.algebra, chart.word_top)
        for term, block in enumerate(form.blocks):
            if block.filled:
                into, words = total, word
                if self.filled is None:
                    table = self.tables[form.table_of(term)]
                else:
                    table = self._table(self.filled, block.kind)
                    into, words = (chart.window(x, 2, block.kind, -2) for x in (total, word))
                into.add_(block.backward_table(words, form.weights[term], table))
                if self.parameters:
                    self.weights[term] = block.backward_weights(words, table)
        return total.narrow(-1, 0, chart.word.shape[-1])

    def _table(self, filled: Spans, kind: str) -> Tensor:
        """The gradient of the rules with words filled in, but for the words that no span begins (or ends) with."""
        chart = self.chart
        if kind == WORDS:
            return self.pairs.unsqueeze(-1) * chart.window(chart.word_top, 2, AFTER, -2).unsqueeze(-2)
        rest = chart.spans.within(kind).narrow(-1, 0, chart.form.interminals)
        return torch.bmm(filled.beside(kind).transpose(1, 2), rest)

    def _backward_words(self) -> None:
        chart, form, algebra = self.chart, self.chart.form, self.chart.algebra
        self.word_top, phrases = self._from_spans()
        whole = self.final.narrow(-1, form.interminals, self.word_top.shape[-1])
        self.word_top.narrow(-2, 0, chart.batch).add_(torch.where(chart.is_word, whole, 0))
        word = self.word_top.clone()
        chart.keep(word, "top", 1, words=True, gradient=True)
        if self.bottom is not self.top:
            self.bottom[0].zero_()
        if phrases is not None:
            self.top[0].add_(phrases)
        chart.keep(self.top[0], "top", 1, gradient=True)
        if form.promotion is not None:
            word += self._backward_product(self.tensors, 2, form.promotion, chart.word, self.top[0])
        self.word = word
        leaf = word * potentials.scales(chart.potential, 1) if algebra is SUM else word.clone()
        chart.keep(leaf, "bottom", 1, words=True, gradient=True)
        self.leaf = leaf.unflatten(-2, (chart.length, chart.batch))


def _add(gradients: list[Tensor | None], place: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        known = gradients[place]
        gradients[place] = gradient if known is None else known.add_(gradient)


def _add_product(gradients: list[Tensor | None], place: int, x: Tensor, y: Tensor) -> None:
    known = gradients[place]
    if known is None:
        gradients[place] = torch.matmul(x, y)
    elif known.dim() == 2:
        known.addmm_(x, y)
    else:
        known.baddbmm_(x, y)


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
