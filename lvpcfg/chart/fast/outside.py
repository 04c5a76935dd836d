"""Outside scores and gradients: the inside pass run backwards, width by width.

    beta(i,j) = d log Z / d alpha(i,j)

(Cohen & Collins 2012, figure 2.) Each width is computed again instead of having kept its products, so that memory is
O(n^2) cells for every form. Terms bring their derivative along (`backward`), since that is where the time goes.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.chart.fast import potentials
from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, WORDS, DenseBlock
from lvpcfg.chart.fast.cp import CPForm, Lanes, SortedCPForm
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart, Spans


class Outside:
    """The derivative of log Z, weighted by a number for each sentence, by all inputs and cells of a chart.

    beta of a cell is the derivative by the scaled number that the chart holds, so that alpha * beta is the posterior.
    """

    @torch.inference_mode()
    def __init__(self, chart: Chart, gradient: Float[Tensor, "batch"], parameters: bool = False) -> None:
        self.chart, self.parameters, form = chart, parameters, chart.form
        self.tensors: list[Tensor | None] = [None] * (len(form.unary) + 1)  # where parameters are asked for
        self.weights: list[Tensor | None] = [None] * len(form.weights)
        self._allocate()
        self._begin(gradient)
        self.top.cells.index_copy_(0, chart.sentence_cells, self.final.narrow(-1, 0, form.interminals))
        for width in range(chart.length, 1, -1):
            self._backward_width(width)
        self._backward_words()
        if parameters:
            self._add_matrix_gradients()
        self.tensors += form.joined(self.weights) if parameters else [None] * len(form.tensors)
        del self.tensors[len(form.tensors) :]
        del self.matrices, self.rests, self.from_matrices, self.words, self.lanes, self.weights
        chart.forget()

    def _allocate(self) -> None:
        """Room for gradients to be added up in."""
        chart, form = self.chart, self.chart.form
        self.spans = Spans(torch.zeros_like(chart.spans.sides), chart.batch)
        self.words = torch.zeros_like(form.pad(chart.word_top))  # as halves of two-word spans
        self.matrices: list[Tensor] = []
        self.from_matrices: Spans | None = None  # of what the matrices of words added to spans
        if form.dense:
            self.from_matrices = Spans.allocate(chart.word.new_zeros, chart.length, chart.batch, form.interminals)
            self.pairs = chart.word.new_zeros((chart.length - 1) * chart.batch, form.interminals)
        else:
            self.matrices = [torch.zeros_like(matrices) for matrices in chart.matrices]
        self.rests = [chart.layer(chart.word, lanes) for lanes in form.rest_lanes]
        for layer in self.rests:
            layer.cells.zero_()
        # For each width, the gradients of all lanes, where parameters are asked for.
        wanted = self.parameters and form.projects
        self.lanes = chart.layer(chart.word, 2 * form.lanes + sum(form.rest_lanes) if wanted else 0)
        self.top = chart.layer(chart.word, form.interminals)
        self.top.cells.zero_()
        self.bottom = self.top if chart.top is chart.bottom else chart.layer(chart.word, form.interminals)
        if form.projects:
            self.combined = chart.layer(chart.word, form.lifted_terms, 2)

    def _begin(self, gradient: Tensor) -> None:
        total = self.chart.total()
        share = (gradient / total).masked_fill(total == 0, 0).to(total.dtype)
        self.final = share.unsqueeze(-1) * self.chart.form.root
        self.tensors[0] = torch.mv(self.chart.final.T, share)

    def _backward_width(self, width: int) -> None:
        chart, form, top, bottom = self.chart, self.chart.form, self.top[width - 1], self.bottom[width - 1]
        if width < chart.length:
            top.add_(self._from_parents(width))
        chart.keep(top, "top", width)
        if form.closure is not None:
            torch.mm(top, form.closure.T, out=bottom)
        elif bottom is not top:
            bottom.copy_(top)
        chart.keep(bottom, "bottom", width)
        combined = bottom
        if isinstance(form, CPForm) and form.lifts:
            combined = torch.mm(bottom, form.factors[0][1], out=self.combined[width - 2])
        if width == 2 and isinstance(form, SortedCPForm):
            lanes = torch.mm(bottom, form.weights[3].T)
            first, last = chart.pair_of_words(chart.matrices)
            into_first, into_last = chart.pair_of_words(self.matrices)
            into_first.addcmul_(lanes, last)
            into_last.addcmul_(lanes, first)
        terms = form.terms(width)
        for term, share in zip(terms, form.shares(form.pad(combined), terms), strict=True):
            self._backward_term(term, width, share)

    def _backward_term(self, term: int, width: int, share: Tensor) -> None:
        """Backwards through `Chart.apply`: adds the gradients of the operands and of the weights of a term."""
        chart, block = self.chart, self.chart.form.blocks[term]
        parameters = self.parameters and not block.has_matrices and not chart.form.projects
        operands, weights, into = chart.operands(term, width), chart.form.weights[term], self._into(term, width)
        add = partial(_add_product, self.weights, term) if parameters else None
        if isinstance(block, DenseBlock) and not block.has_matrices:
            block.backward(*operands, weights, share, into, add, chart.workspace(block, width))
        else:
            block.backward(*operands, weights, share, into, add)

    def _into(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        """Where the gradients of the operands of a term are added up."""
        chart, block = self.chart, self.chart.form.blocks[term]
        if block.child_types == PHRASES:
            return self.spans.children(width, chart.form.narrowest)
        if isinstance(block, Lanes):
            return chart.word_and_rest(term, width, self.matrices, self.rests)
        if block.child_types == WORDS:
            rest = chart.window(self.words, width, WORD_LAST, -2)
            if not block.has_matrices:
                return chart.window(self.words, width, WORD_FIRST, -2).unsqueeze(-2), rest.unsqueeze(-2)
        else:
            rest = self.spans.rest(width, block.child_types, chart.form.interminals if chart.form.dense else None)
        if self.from_matrices is None:
            return chart.window(self.matrices[chart.form.matrices_of(term)], width, block.child_types, -3), rest
        if block.child_types == WORDS:
            return self.pairs, rest
        return self.from_matrices.by_word(width, block.child_types), rest

    def _add_matrix_gradients(self) -> None:
        """The gradients of the matrices that cells were multiplied with, in one product over all widths each."""
        chart, form = self.chart, self.chart.form
        if form.closure is not None:
            self.tensors[1] = torch.mm(chart.bottom.wider.T, self.top.wider)
            self.tensors[2] = torch.mm(chart.word.T, self.top[0])
        if isinstance(form, CPForm):
            self.weights[0] = torch.mm(chart.combined.cells.T, self.bottom.wider)
            first = 0 if form.promotion is not None else len(chart.word)  # where there are no phrases of one word
            children = len(chart.top.cells) - chart.batch - first  # all cells but those of sentences
            if children > 0:
                cells, lanes = (layer.cells.narrow(0, first, children) for layer in (chart.top, self.lanes))
                self.weights[1] = torch.mm(cells.T, lanes)
        if isinstance(form, SortedCPForm) and chart.length > 1:
            self.weights[3] = torch.mm(chart.pairs.T, self.bottom[1])

    def _from_parents(self, width: int) -> Tensor:
        """From the gradients of the lanes of a cell to that of the cell."""
        form = self.chart.form
        if not form.projects:
            lanes = self.spans.of_width(width).narrow(-1, 0, form.interminals)
            return torch.add(lanes.select(0, 0), lanes.select(0, 1))
        parts = [*self.spans.of_width(width).unbind(0), *(layer[width - 1] for layer in self.rests)]
        lanes = torch.cat(parts, -1, out=self.lanes[width - 1] if self.lanes.cells.numel() else None)
        assert isinstance(form, CPForm)
        return torch.mm(lanes, form.factors[1][1])

    def _from_spans(self) -> tuple[Tensor, Tensor | None]:
        """From words as children to words: the gradients of their states, and of the phrases over them."""
        chart, form = self.chart, self.chart.form
        top = self._from_parents(1) if form.promotion is not None and chart.length > 1 else None
        if isinstance(form, TensorForm):
            return self._backward_matrices(form), top
        lanes = torch.cat([*self.spans.of_width(1).unbind(0), *self.matrices], -1)
        self.weights[2] = torch.mm(chart.word_top.T, lanes) if self.parameters else None
        assert isinstance(form, CPForm)
        return torch.mm(lanes, form.factors[2][1]), top

    def _backward_matrices(self, form: TensorForm) -> Tensor:
        """The gradient of the words, from the rules that were contracted with them."""
        chart, total = self.chart, self.words
        word = form.pad(chart.word_top)
        for term, block in enumerate(form.blocks):
            if block.has_matrices:
                into, words = total, word
                if self.from_matrices is None:
                    gradient = self.matrices[form.matrices_of(term)]
                else:
                    gradient = self._gradient_of_matrices(self.from_matrices, block.child_types)
                    into, words = (chart.window(x, 2, block.child_types, -2) for x in (total, word))
                into.add_(block.backward_matrices(words, form.weights[term], gradient))
                if self.parameters:
                    self.weights[term] = block.backward_weights(words, gradient)
        return total.narrow(-1, 0, chart.word.shape[-1])

    def _gradient_of_matrices(self, spans: Spans, child_types: str) -> Tensor:
        """For all words that a span begins with (or ends with)."""
        chart = self.chart
        if child_types == WORDS:
            return self.pairs.unsqueeze(-1) * chart.window(chart.word_top, 2, WORD_LAST, -2).unsqueeze(-2)
        rest = chart.spans.all_rests(child_types).narrow(-1, 0, chart.form.interminals)
        return torch.bmm(spans.all_by_word(child_types).transpose(1, 2), rest)

    def _backward_words(self) -> None:
        chart, form = self.chart, self.chart.form
        self.word_top, phrases = self._from_spans()
        sentence = self.final.narrow(-1, form.interminals, self.word_top.shape[-1])
        self.word_top.narrow(0, 0, chart.batch).add_(torch.where(chart.is_word, sentence, 0))
        word = self.word_top.clone()
        chart.keep(word, "top", 1, words=True)
        if self.bottom is not self.top:
            self.bottom[0].zero_()
        if phrases is not None:
            self.top[0].add_(phrases)
        chart.keep(self.top[0], "top", 1)
        if form.promotion is not None:
            word += torch.mm(self.top[0], form.promotion.T)
        self.word = word
        leaf = word * potentials.scales(chart.potential, 1)
        chart.keep(leaf, "bottom", 1, words=True)
        self.leaf = leaf.unflatten(0, (chart.length, chart.batch))


def _add_product(gradients: list[Tensor | None], term: int, x: Tensor, y: Tensor) -> None:
    known = gradients[term]
    if known is None:
        gradients[term] = torch.matmul(x, y)
    elif known.dim() == 2:
        known.addmm_(x, y)
    else:
        known.baddbmm_(x, y)
