"""The inside pass over all sentences of a batch, width by width, in ordinary numbers.

    alpha(i,i)_a = Q^{a->x_i};   alpha(i,j) = sum_k T(alpha(i,k), alpha(k+1,j))

(Cohen & Collins 2012, figure 2.) Finished cells are kept twice, by (start, width) and by (end, width counted
down), so that the left children of all splits of all spans of a width are one contiguous view, and the right
children another. Cells are scaled by powers of two (`potentials.py`), so that all the work is plain matrix
multiplication while the chart as a whole lives in log space.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.derivations import Allowed
from lvpcfg.chart.fast import potentials
from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, WORDS, DenseBlock
from lvpcfg.chart.fast.cp import CPForm, Lanes, SortedCPForm
from lvpcfg.chart.fast.forms import TensorForm

FastForm = TensorForm | CPForm
LARGE = 1 << 24  # numbers


@dataclass(frozen=True, eq=False)
class Spans:
    """Numbers for every span, by (start, sentence) and by (end, sentence).

    Its views of one width have cells = (start, sentence) as their first dimension. Each view takes one operation, since
    it is the number of operations that small charts spend their time on.
    """

    # The first side is [starts * batch, widths, lanes], the second [ends * batch, widths counted down, lanes].
    sides: Float[Tensor, "2 rows widths lanes"]
    batch: int

    @staticmethod
    def allocate(empty: Callable[..., Tensor], length: int, batch: int, lanes: int) -> "Spans":
        return Spans(empty((2, length * batch, length, lanes)), batch)

    @cached_property
    def length(self) -> int:
        return self.sides.shape[2]

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return self.sides.stride()

    @property
    def left(self) -> Float[Tensor, "rows widths lanes"]:
        """By start, [starts * batch, widths, lanes]."""
        return self.sides.select(0, 0)

    @property
    def right(self) -> Float[Tensor, "rows widths lanes"]:
        """By end, [ends * batch, widths counted down, lanes]."""
        return self.sides.select(0, 1)

    def children(
        self, width: int, least: int
    ) -> tuple[Float[Tensor, "cells splits lanes"], Float[Tensor, "cells splits lanes"]]:
        """Left and right children of all splits into parts of `least` words or more."""
        splits = width - 2 * least + 1
        return self._side(width, 0, least - 1, splits), self._side(width, 1, self.length - width + least, splits)

    def of_width(self, width: int, lanes: int | None = None) -> Float[Tensor, "2 cells lanes"]:
        """Spans as left and as right children of others; all lanes, or as many of the first."""
        _, rows, _, all_lanes = self.sides.shape
        side, row, column, lane = self._strides
        lanes = all_lanes if lanes is None else lanes
        first = (width - 1) * self.batch
        left, right = (width - 1) * column, side + first * row + (self.length - width) * column
        return self.sides.as_strided((2, rows - first, lanes), (right - left, row, lane), left)

    def by_word(self, width: int, side: str) -> Float[Tensor, "cells lanes"]:
        """The spans by their first word (WORD_FIRST) or their last (WORD_LAST)."""
        if side == WORD_FIRST:
            return self._side(width, 0, width - 1)
        return self._side(width, 1, self.length - width)

    def rest(self, width: int, side: str, lanes: int | None = None) -> Float[Tensor, "cells lanes"]:
        """What is left of the spans without their first word (WORD_FIRST) or their last."""
        if side == WORD_FIRST:
            return self._side(width, 1, self.length - width + 1, lanes=lanes)
        return self._side(width, 0, width - 2, lanes=lanes)

    def _side(self, width: int, which: int, begin: int, columns: int | None = None, lanes: int | None = None) -> Tensor:
        """Columns from `begin` on of rows where spans of a width start (0) or end (1), [cells, (columns,) lanes]."""
        _, rows, _, all_lanes = self.sides.shape
        side, row, column, lane = self._strides
        lanes = all_lanes if lanes is None else lanes
        first = (width - 1) * self.batch  # the row where the first span ends
        offset = begin * column + which * (side + first * row)
        if columns is None:
            return self.sides.as_strided((rows - first, lanes), (row, lane), offset)
        return self.sides.as_strided((rows - first, columns, lanes), (row, column, lane), offset)

    def all_by_word(self, side: str) -> Float[Tensor, "words widths lanes"]:
        """Spans of two words or more, by their first word (WORD_FIRST) or their last."""
        words, widths = self.sides.shape[1] - self.batch, self.length - 1
        if side == WORD_FIRST:
            return self.left.narrow(0, 0, words).narrow(1, 1, widths)
        return self.right.narrow(0, self.batch, words).narrow(1, 0, widths)

    def all_rests(self, side: str) -> Float[Tensor, "words widths lanes"]:
        """The same spans without that word."""
        words, widths = self.sides.shape[1] - self.batch, self.length - 1
        if side == WORD_FIRST:
            return self.left.narrow(0, self.batch, words).narrow(1, 0, widths)
        return self.right.narrow(0, 0, words).narrow(1, 1, widths)


class Layer:
    """Numbers for the cells of a chart: `cells` [cells, lanes] of all widths, and `widths`, views of it by width."""

    def __init__(self, like: Tensor, sizes: Sequence[int], lanes: int) -> None:
        self.cells = like.new_empty((sum(sizes), lanes))
        self.widths = self.cells.split(list(sizes))

    @property
    def wider(self) -> Tensor:
        """All but the narrowest."""
        narrowest = len(self.widths[0])
        return self.cells.narrow(0, narrowest, len(self.cells) - narrowest)

    def __getitem__(self, place: int) -> Tensor:
        return self.widths[place]

    def __len__(self) -> int:
        return len(self.widths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.widths)


class Chart:
    """The inside chart of a batch; the rows of a width are its cells, ordered by (start, sentence).

    `lengths` is given where some sentences are shorter. `Outside` computes the derivatives; torch does not record them
    (inference mode), so that operations take less time.
    """

    @torch.inference_mode()
    def __init__(
        self,
        form: FastForm,
        leaf: Float[Tensor, "length batch word_states"],
        lengths: Int[Tensor, "batch"] | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        form = form.prepared()
        self.form, self.lengths, self.allowed = form, lengths, allowed
        self.length, self.batch = leaf.shape[0], leaf.shape[1]
        self._matrices: list[Tensor] | None = None
        self._operands: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._workspace: Tensor | None = None
        self._allocate(leaf)
        self._read_words(leaf)
        for width in range(2, self.length + 1):
            self._fill(width)
        self._finish()
        self.forget()

    def _allocate(self, leaf: Tensor) -> None:
        form = self.form
        empty = leaf.new_zeros if form.matrix_size else leaf.new_empty  # the outside pass multiplies all of it
        self.spans = Spans.allocate(empty, self.length, self.batch, form.lanes)
        self.bottom = self.layer(leaf, form.interminals)  # for each width, binary rules
        self.top = self.bottom  # for each width, unary rules over those
        if form.closure is not None or self.allowed is not None:
            self.top = self.layer(leaf, form.interminals)
        if form.projects:
            self.combined = self.layer(leaf, form.lifted_terms, 2)  # for each width from 2, what is lifted to states
        self.rests = [self.layer(leaf, lanes) for lanes in form.rest_lanes]  # lanes of spans next to a word

    def layer(self, like: Tensor, lanes: int, narrowest: int = 1) -> Layer:
        sizes = [(self.length - width + 1) * self.batch for width in range(narrowest, self.length + 1)]
        return Layer(like, sizes, lanes)

    @cached_property
    def first_cells(self) -> Int[Tensor, "ends"]:
        """The number of the first cell of each width in a layer, and the number of all cells."""
        narrower = torch.arange(self.length + 1, device=self.word.device)
        return self.batch * (narrower * (2 * self.length + 1 - narrower) // 2)

    @property
    def matrices(self) -> list[Tensor]:
        """The rules contracted with each word, [rules, length * batch, ...]."""
        if self._matrices is None:
            _, self._matrices = self.form.words(self.word_top, self.top[0])
        return self._matrices

    def forget(self) -> None:
        """Frees the matrices of words where they are large; they are computed again when they are needed."""
        if self.form.matrix_size * len(self.word_top) > LARGE:
            self._matrices = None
            self._operands.clear()

    def _read_words(self, leaf: Tensor) -> None:
        """Width 1: words as children of binary rules, and under unary rules."""
        form = self.form
        # By how much the cells were scaled up after they were computed, and with them what they lost to underflow.
        self.raised = leaf.new_ones(len(self.bottom.cells), 1)
        self.potential = potentials.of_words(leaf)
        self.word = leaf.flatten(0, 1) * potentials.scales(self.potential, 1)
        self.keep(self.word, "bottom", 1, words=True)
        self.word_top = self.word if self.allowed is None else self.word.clone()
        self.keep(self.word_top, "top", 1, words=True)
        top = self.top[0]
        if form.promotion is None:
            top.zero_()
        else:
            torch.mm(self.word, form.promotion, out=top)
        self.keep(top, "top", 1)
        lanes, self._matrices = form.words(self.word_top, top)
        if self.bottom is not self.top:
            self.bottom[0].copy_(top)
        if lanes is not None:
            self.spans.of_width(1).copy_(lanes)
        if form.rest_lanes:
            for layer, found in zip(self.rests, form.project(top)[1], strict=True):
                layer[0].copy_(found)

    def _fill(self, width: int) -> None:
        form, bottom, top = self.form, self.bottom[width - 1], self.top[width - 1]
        parts = [self.apply(term, width) for term in form.terms(width)]
        if isinstance(form, CPForm):
            combined = form.join(parts, out=self.combined[width - 2])
            form.lift(combined, out=bottom)
        elif parts:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            bottom.copy_(total)
        else:
            bottom.zero_()
        if width == 2 and isinstance(form, SortedCPForm):
            self.pairs = torch.mul(*self.pair_of_words(self.matrices))
            bottom.addmm_(self.pairs, form.weights[3])
        self.keep(bottom, "bottom", width)
        if form.closure is not None:
            torch.mm(bottom, form.closure, out=top)
        elif top is not bottom:
            top.copy_(bottom)
        self.keep(top, "top", width)
        if width in potentials.WIDTHS:
            self._settle(width)
        if width < self.length:
            lanes, rests = form.project(top)
            self.spans.of_width(width, lanes.shape[-1]).copy_(lanes)
            for layer, found in zip(self.rests, rests, strict=True):
                layer[width - 1].copy_(found)

    def pair_of_words(self, lanes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The lanes of the first and of the last word of the spans of two, which are the last two of `lanes`."""
        first, last = lanes[-2:]
        return self.window(first, 2, WORD_FIRST, -2), self.window(last, 2, WORD_LAST, -2)

    def _settle(self, width: int) -> None:
        """Scales all that is finished by potentials that are estimated from the spans of this width."""
        spans = self.bottom[width - 1].unflatten(0, (-1, self.batch))
        potential = potentials.of_spans(spans, width, self.length)
        self.potential += potential
        scales = [potentials.scales(potential, narrower) for narrower in range(1, width + 1)]
        for narrower, scale in enumerate(scales[:-1], 1):
            self.spans.of_width(narrower).mul_(scale)
        finished = torch.cat(scales)  # [cells, 1]
        self.raised.narrow(0, 0, len(finished)).mul_(finished).clamp_min_(1)
        for layer in {self.bottom, self.top, *self.rests}:
            layer.cells.narrow(0, 0, len(finished)).mul_(finished)
        if self.form.projects:
            wider = finished.narrow(0, len(self.word), len(finished) - len(self.word))
            self.combined.cells.narrow(0, 0, len(wider)).mul_(wider)
        if isinstance(self.form, SortedCPForm):
            self.pairs.mul_(scales[1])
        self.word.mul_(scales[0])
        if self.word_top is not self.word:
            self.word_top.mul_(scales[0])
        for matrices in self._matrices or ():
            matrices.mul_(scales[0] if self.form.projects else scales[0].unsqueeze(-1))
        self._operands.clear()

    def apply(self, term: int, width: int) -> Float[Tensor, "cells lanes"]:
        """What a term adds to the cells of a width."""
        block, operands, weights = self.form.blocks[term], self.operands(term, width), self.form.weights[term]
        if isinstance(block, DenseBlock) and not block.has_matrices:
            return block.apply(*operands, weights, self.workspace(block, width))
        return block.apply(*operands, weights)

    def workspace(self, block: DenseBlock, width: int) -> Float[Tensor, "cells pairs"]:
        """For products of children of the spans of a width: the same for all widths, since new memory takes time."""
        rows, lanes = (self.length - width + 1) * self.batch, block.shape[1] * block.shape[2]
        if self._workspace is None or self._workspace.numel() < rows * lanes:
            self._workspace = self.word.new_empty(rows * lanes)
        return self._workspace.narrow(0, 0, rows * lanes).view(rows, lanes)

    def _finish(self) -> None:
        """The cells that span the sentences, log |Z| and its sign."""
        n, batch = self.length, self.batch
        lengths = torch.full((batch,), n, device=self.word.device) if self.lengths is None else self.lengths
        narrower = (lengths - 1) * (2 * n + 2 - lengths) // 2  # spans of one sentence
        self.sentence_cells = narrower * batch + torch.arange(batch, device=lengths.device)  # in layers
        self.is_word = (lengths == 1).unsqueeze(-1)
        words = torch.where(self.is_word, self.word_top.narrow(0, 0, batch), 0)
        self.final = torch.cat([self.top.cells.index_select(0, self.sentence_cells), words], -1)
        potential = self.potential.gather(0, lengths.unsqueeze(0)).squeeze(0)
        total = self.total()
        self.log_z = total.double().abs().log() + potentials.LOG2 * potential.double()
        self.sign = total.sign()

    def total(self) -> Float[Tensor, "batch"]:
        """Z of each sentence, scaled as the cells are."""
        return torch.mv(self.final, self.form.root)

    def keep(self, cells: Float[Tensor, "cells _"], layer: str, width: int, words: bool = False) -> None:
        """Sets the states that are not allowed, or their gradients, to zero."""
        if self.allowed is None:
            return
        mask: Tensor = getattr(self.allowed, layer)
        rows = mask.narrow(0, 0, self.length - width + 1).select(2, width - 1).flatten(0, 1)
        cells.mul_(rows.narrow(-1, self.form.interminals if words else 0, cells.shape[-1]))

    def near_underflow(self) -> bool:
        """Whether the smallest weight times the smallest states is below what floats hold with full precision."""
        tiny = torch.finfo(self.word.dtype).tiny
        state = float(torch.minimum(_least(self.bottom.cells / self.raised), _least(self.word)))
        if state**4 > tiny:  # then a weight would have to be smaller than two states together
            return False
        weights = [float(_least(weight)) for weight in (*self.form.unary, *self.form.weights)]
        return state**2 * min([1.0, *weights]) < tiny

    def seen_through(self, form: TensorForm) -> "Chart":
        """The same cells as the children of rules of another form over the same states."""
        chart = copy(self)
        chart.form = form
        chart.spans = Spans.allocate(self.word.new_empty, self.length, self.batch, form.lanes)
        chart._matrices, chart._operands = None, {}
        for width, top in enumerate(self.top, 1):
            chart.spans.of_width(width).copy_(form.project(top)[0])
        return chart

    def word_and_rest(
        self, term: int, width: int, words: Sequence[Tensor], rests: Sequence[Layer]
    ) -> tuple[Float[Tensor, "cells lanes"], Float[Tensor, "cells lanes"]]:
        """The lanes of a word at one end of the spans of a width, and of the rest of them."""
        side, number = self.form.blocks[term].child_types, self.form.matrices_of(term)
        word = self.window(words[number], width, side, -2)
        return word, rests[number][width - 2].narrow(0, 0 if side == WORD_LAST else self.batch, len(word))

    def window(self, words: Tensor, width: int, side: str, dimension: int) -> Tensor:
        """Of numbers for words, those of the first words of the spans of a width, or of their last."""
        cells = (self.length - width + 1) * self.batch
        return words.narrow(dimension, (width - 1) * self.batch if side == WORD_LAST else 0, cells)

    def operands(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        """What a term is applied to: two children, or the matrices of a word and the rest of the span."""
        known = self._operands.get((term, width))
        if known is None:
            known = self._operands[term, width] = self._find_operands(term, width)
        return known

    def _find_operands(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        block = self.form.blocks[term]
        child_types = block.child_types
        if child_types == PHRASES:
            return self.spans.children(width, self.form.narrowest)
        if isinstance(block, Lanes):
            return self.word_and_rest(term, width, self.matrices, self.rests)
        if child_types == WORDS:
            words = self.form.pad(self.word_top)
            last = self.window(words, width, WORD_LAST, -2)
            if not block.has_matrices:
                return self.window(words, width, WORD_FIRST, -2).unsqueeze(-2), last.unsqueeze(-2)
        matrices = self.window(self.matrices[self.form.matrices_of(term)], width, child_types, -3)
        if child_types == WORDS:
            return matrices, last
        return matrices, self.spans.rest(width, child_types, matrices.shape[-1] if self.form.dense else None)


def _least(x: Tensor) -> Tensor:
    """The smallest number that is not 0, whatever its sign."""
    return torch.where(x == 0, torch.inf, x.abs()).amin() if x.numel() else x.new_tensor(torch.inf)
