"""The inside pass over all sentences of a batch, width by width.

    alpha(i,i)_a = Q^{a->x_i};   alpha(i,j) = sum_k T(alpha(i,k), alpha(k+1,j))

(Cohen & Collins 2012, figure 2.) Finished cells are kept twice, by (start, width) and by (end, width counted
down), so that the left children of all splits of all spans of a width are one contiguous view, and the right
children another. Cells are scaled by powers of two (`potentials.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lvpcfg.chart.fast import potentials
from lvpcfg.chart.fast.algebra import SUM
from lvpcfg.chart.fast.blocks import AFTER, BEFORE, INNER, WORDS, Algebra, DenseBlock
from lvpcfg.chart.fast.cp import CPByChildTypes, CPForm, Lanes
from lvpcfg.chart.fast.forms import TensorForm

AnyRules = TensorForm | CPForm
LARGE = 1 << 24  # numbers


@dataclass(frozen=True, eq=False)
class Spans:
    """Numbers for every span, by (start, sentence) and by (end, sentence).

    Its views of one width have cells = (start, sentence) as their first dimension. Each is made in one operation,
    since the number of operations is what small charts take their time for.
    """

    sides: Tensor  # [2, starts * batch, widths, lanes], and [.., ends * batch, widths counted down, lanes]
    batch: int

    @staticmethod
    def made(empty: Callable[..., Tensor], length: int, batch: int, lanes: int) -> "Spans":
        return Spans(empty((2, length * batch, length, lanes)), batch)

    @cached_property
    def length(self) -> int:
        return self.sides.shape[-2]

    @cached_property
    def _shape(self) -> tuple[tuple[int, ...], int, int]:
        """Leading dimensions, rows and lanes."""
        *lead, _, rows, _, lanes = self.sides.shape
        return tuple(lead), rows, lanes

    @cached_property
    def _strides(self) -> tuple[tuple[int, ...], int, int, int, int]:
        *lead, side, row, column, lane = self.sides.stride()
        return tuple(lead), side, row, column, lane

    @property
    def left(self) -> Tensor:
        """[starts * batch, widths, lanes]"""
        return self.sides.select(-4, 0)

    @property
    def right(self) -> Tensor:
        """[ends * batch, widths counted down, lanes]"""
        return self.sides.select(-4, 1)

    def children(self, width: int, least: int) -> tuple[Tensor, Tensor]:
        """Left and right children of all splits into parts of `least` words or more, [cells, splits, lanes]."""
        splits = width - 2 * least + 1
        return self._side(width, 0, least - 1, splits), self._side(width, 1, self.length - width + least, splits)

    def own(self, width: int, lanes: int | None = None) -> Tensor:
        """The spans themselves, as left and as right children of others, [2, cells, lanes]; all lanes or the first."""
        (lead, rows, all_lanes), (skip, side, row, column, lane) = self._shape, self._strides
        lanes = all_lanes if lanes is None else lanes
        first = (width - 1) * self.batch
        left, right = (width - 1) * column, side + first * row + (self.length - width) * column
        return self.sides.as_strided((*lead, 2, rows - first, lanes), (*skip, right - left, row, lane), left)

    def one(self, width: int, kind: str) -> Tensor:
        """The spans by their first word (BEFORE) or their last (AFTER), [cells, lanes]."""
        if kind == BEFORE:
            return self._side(width, 0, width - 1)
        return self._side(width, 1, self.length - width)

    def rest(self, width: int, kind: str, lanes: int | None = None) -> Tensor:
        """What is left of the spans without their first word (BEFORE) or their last (AFTER), [cells, lanes]."""
        if kind == BEFORE:
            return self._side(width, 1, self.length - width + 1, lanes=lanes)
        return self._side(width, 0, width - 2, lanes=lanes)

    def _side(self, width: int, which: int, place: int, columns: int | None = None, lanes: int | None = None) -> Tensor:
        """One or more columns of the rows where spans of a width start (0) or end (1), [cells, (columns,) lanes]."""
        (lead, rows, all_lanes), (skip, side, row, column, lane) = self._shape, self._strides
        lanes = all_lanes if lanes is None else lanes
        first = (width - 1) * self.batch  # the row where the first span ends
        offset = place * column + which * (side + first * row)
        if columns is None:
            return self.sides.as_strided((*lead, rows - first, lanes), (*skip, row, lane), offset)
        return self.sides.as_strided((*lead, rows - first, columns, lanes), (*skip, row, column, lane), offset)

    def beside(self, kind: str) -> Tensor:
        """Spans of two words or more, by their first word (BEFORE) or their last (AFTER), [words, widths, lanes]."""
        words, widths = self.sides.shape[-3] - self.batch, self.length - 1
        if kind == BEFORE:
            return self.left.narrow(-3, 0, words).narrow(-2, 1, widths)
        return self.right.narrow(-3, self.batch, words).narrow(-2, 0, widths)

    def within(self, kind: str) -> Tensor:
        """The same spans without that word."""
        words, widths = self.sides.shape[-3] - self.batch, self.length - 1
        if kind == BEFORE:
            return self.left.narrow(-3, self.batch, words).narrow(-2, 0, widths)
        return self.right.narrow(-3, 0, words).narrow(-2, 1, widths)


class Layer:
    """Numbers for the cells of a chart, [(parts,) cells, lanes] in one tensor; those of each width as views of it."""

    def __init__(self, like: Tensor, lead: tuple[int, ...], sizes: Sequence[int], lanes: int) -> None:
        self.whole = like.new_empty((*lead, sum(sizes), lanes))
        self.widths = self.whole.split(list(sizes), -2)

    @property
    def wider(self) -> Tensor:
        """All but the narrowest."""
        narrowest, cells = self.widths[0].shape[-2], self.whole.shape[-2]
        return self.whole.narrow(-2, narrowest, cells - narrowest)

    def __getitem__(self, place: int) -> Tensor:
        return self.widths[place]

    def __len__(self) -> int:
        return len(self.widths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.widths)


@dataclass(frozen=True, eq=False)
class Allowed:
    """Which states spans may have, bool [starts, batch, widths, states]: in the bottom layer (binary rules and
    words) and in the top layer (with unary rules over them)."""

    bottom: Tensor
    top: Tensor


def written_out(algebra: Algebra) -> AbstractContextManager[Any]:
    """Where derivatives are written out, torch need not keep account of them: operations take less time."""
    return torch.inference_mode() if algebra is SUM else nullcontext()


class Chart:
    """The inside chart of a batch; the rows of a width are its cells, ordered by (start, sentence).

    `leaf` is [length, batch, preterminal states]; it and the tensors of the form are in the chart's algebra.
    """

    def __init__(
        self,
        form: AnyRules,
        leaf: Tensor,
        algebra: Algebra = SUM,
        lengths: Tensor | None = None,  # [batch], where some are shorter
        allowed: Allowed | None = None,
    ) -> None:
        form = form.prepared(algebra)
        self.form, self.algebra, self.lengths, self.allowed = form, algebra, lengths, allowed
        self.length, self.batch = leaf.shape[-3], leaf.shape[-2]
        self._tables: list[Tensor] | None = None
        self._operands: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._room: Tensor | None = None
        with written_out(algebra):
            self._make_room(leaf)
            self._read_words(leaf)
            for width in range(2, self.length + 1):
                self._fill(width)
            self._finish()
        self.forget()

    def _make_room(self, leaf: Tensor) -> None:
        form, lead = self.form, self.algebra.lead
        empty = leaf.new_zeros if form.table_size else leaf.new_empty  # the outside pass multiplies all of it
        self.spans = Spans.made(lambda shape: empty((*lead, *shape)), self.length, self.batch, form.lanes)
        self.bottom = self.layer(leaf, form.interminals)  # for each width, binary rules
        self.top = self.bottom  # for each width, unary rules over those
        if form.closure is not None or self.allowed is not None:
            self.top = self.layer(leaf, form.interminals)
        if form.projects:
            self.combined = self.layer(leaf, form.terms_lifted, 2)  # for each width from 2, what is lifted to states
        self.beside = [self.layer(leaf, lanes) for lanes in form.beside]  # what `project` finds beside the lanes

    def layer(self, like: Tensor, lanes: int, narrowest: int = 1) -> Layer:
        sizes = [(self.length - width + 1) * self.batch for width in range(narrowest, self.length + 1)]
        return Layer(like, self.algebra.lead, sizes, lanes)

    @property
    def tables(self) -> list[Tensor]:
        """The rules with each word filled in, [rules, length * batch, ...]."""
        if self._tables is None:
            _, self._tables = self.form.words(self.algebra, self.word_top, self.top[0])
        return self._tables

    def forget(self) -> None:
        """Where the tables are large, they are made again when they are needed again."""
        if self.form.table_size * len(self.word_top) > LARGE:
            self._tables = None
            self._operands.clear()

    def _read_words(self, leaf: Tensor) -> None:
        """Width 1: words as children of binary rules, filled into the rules, and under unary rules."""
        algebra, form = self.algebra, self.form
        self.word = leaf.flatten(-3, -2).clone()
        self.potential = leaf.new_zeros(self.length + 1, self.batch)
        # How much larger the cells are now than when they were made, and with them what they lost to underflow.
        self.raised = leaf.new_ones(self.bottom.whole.shape[-2], 1)
        if algebra is SUM:
            self.potential = potentials.of_words(leaf)
            self.word *= potentials.scales(self.potential, 1)
        self.keep(self.word, "bottom", 1, words=True)
        self.word_top = self.word if self.allowed is None else self.word.clone()
        self.keep(self.word_top, "top", 1, words=True)
        top = self.top[0]
        if form.promotion is None:
            top.copy_(algebra.zeros(leaf, *top.shape[len(algebra.lead) :]))
        else:
            algebra.multiply(self.word, form.promotion, out=top)
        self.keep(top, "top", 1)
        lanes, self._tables = form.words(algebra, self.word_top, top)
        if self.bottom is not self.top:
            self.bottom[0].copy_(top)
        if lanes is not None:
            self.spans.own(1).copy_(lanes)
        if form.beside:
            for layer, found in zip(self.beside, form.project(algebra, top)[1], strict=True):
                layer[0].copy_(found)

    def _fill(self, width: int) -> None:
        algebra, form, bottom, top = self.algebra, self.form, self.bottom[width - 1], self.top[width - 1]
        parts = [self.apply(term, width) for term in form.terms(width)]
        if isinstance(form, CPForm):
            combined = form.add(algebra, parts, out=self.combined[width - 2])
            form.lift(algebra, combined, out=bottom)
        elif parts:
            bottom.copy_(algebra.add(parts))
        else:
            bottom.copy_(algebra.zeros(self.word, *bottom.shape[len(algebra.lead) :]))
        if width == 2 and isinstance(form, CPByChildTypes):
            self.pairs = torch.mul(*self.pair_of_words(self.tables))
            bottom.addmm_(self.pairs, form.weights[3])
        self.keep(bottom, "bottom", width)
        if form.closure is not None:
            algebra.multiply(bottom, form.closure, out=top)
        elif top is not bottom:
            top.copy_(bottom)
        self.keep(top, "top", width)
        if algebra is SUM and width in potentials.WIDTHS:
            self._settle(width)
        if width < self.length:
            lanes, beside = form.project(algebra, top)
            self.spans.own(width, lanes.shape[-1]).copy_(lanes)
            for layer, found in zip(self.beside, beside, strict=True):
                layer[width - 1].copy_(found)

    def pair_of_words(self, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What belongs to the first and to the last word of the spans of two, where tables of theirs are the last."""
        first, last = tables[-2:]
        return self.window(first, 2, BEFORE, -2), self.window(last, 2, AFTER, -2)

    def _settle(self, width: int) -> None:
        """Scales all that is finished by what the spans of this width show."""
        spans = self.bottom[width - 1].unflatten(0, (-1, self.batch))
        potential = potentials.of_spans(spans, width, self.length)
        self.potential += potential
        scales = [potentials.scales(potential, narrower) for narrower in range(1, width + 1)]
        for narrower, scale in enumerate(scales[:-1], 1):
            self.spans.own(narrower).mul_(scale)
        whole = torch.cat(scales)
        raised = self.raised.narrow(0, 0, len(whole))
        raised.mul_(whole).clamp_min_(1)
        for layer in {self.bottom, self.top, *self.beside}:
            layer.whole.narrow(0, 0, len(whole)).mul_(whole)
        if self.form.projects:
            wider = whole.narrow(0, len(self.word), len(whole) - len(self.word))
            self.combined.whole.narrow(0, 0, len(wider)).mul_(wider)
        if isinstance(self.form, CPByChildTypes):
            self.pairs.mul_(scales[1])
        self.word.mul_(scales[0])
        if self.word_top is not self.word:
            self.word_top.mul_(scales[0])
        for table in self._tables or ():
            table.mul_(scales[0] if self.form.projects else scales[0].unsqueeze(-1))
        self._operands.clear()

    def apply(self, term: int, width: int) -> Tensor:
        """What a term brings to the cells of a width."""
        block, operands, weights = self.form.blocks[term], self.operands(term, width), self.form.weights[term]
        if self.algebra is SUM and isinstance(block, DenseBlock) and not block.filled:
            return block.apply(SUM, *operands, weights, self.room(block, width))
        return block.apply(self.algebra, *operands, weights)

    def room(self, block: DenseBlock, width: int) -> Tensor:
        """For products of children of the spans of a width: the same for all widths, since new memory takes time."""
        rows, lanes = (self.length - width + 1) * self.batch, block.shape[1] * block.shape[2]
        if self._room is None or self._room.numel() < rows * lanes:
            self._room = self.word.new_empty(rows * lanes)
        return self._room.narrow(0, 0, rows * lanes).view(rows, lanes)

    def _finish(self) -> None:
        """The cell of the whole sentence, and log Z."""
        n, batch = self.length, self.batch
        lengths = torch.full((batch,), n, device=self.word.device) if self.lengths is None else self.lengths
        before = (lengths - 1) * (2 * n + 2 - lengths) // 2  # narrower spans of one sentence
        self.whole = before * batch + torch.arange(batch, device=lengths.device)  # where layers have these cells
        self.is_word = (lengths == 1).unsqueeze(-1)
        words = self.word_top.narrow(-2, 0, batch)
        words = torch.where(
            self.is_word, words, self.algebra.zeros(words, *[1] * (words.dim() - len(self.algebra.lead)))
        )
        self.final = torch.cat([self.top.whole.index_select(-2, self.whole), words], -1)
        potential = self.potential.gather(0, lengths.unsqueeze(0)).squeeze(0)
        total = self.total(self.final, self.form.root)
        self.log_z = self.algebra.log(total) + potentials.LOG2 * potential.to(torch.float64)
        self.sign = self.algebra.sign(total)

    def total(self, final: Tensor, root: Tensor) -> Tensor:
        return self.algebra.matmul(final, root.unsqueeze(-1)).squeeze(-1)

    def keep(self, cells: Tensor, layer: str, width: int, words: bool = False, gradient: bool = False) -> None:
        """Only the states that are allowed, or their gradients; in place."""
        if self.allowed is None:
            return
        mask = self._mask(cells, layer, width, words)
        if gradient:
            cells.mul_(mask)
        else:
            cells.copy_(self.algebra.keep(cells, mask))

    def _mask(self, cells: Tensor, layer: str, width: int, words: bool) -> Tensor:
        mask: Tensor = getattr(self.allowed, layer)
        rows = mask.narrow(0, 0, self.length - width + 1).select(2, width - 1).flatten(0, 1)
        return rows.narrow(-1, self.form.interminals if words else 0, cells.shape[-1])

    def near_underflow(self) -> bool:
        """Whether the product of the smallest weight and the smallest states is as small as numbers get, or smaller."""
        tiny = torch.finfo(self.word.dtype).tiny
        state = float(torch.minimum(_least(self.bottom.whole / self.raised), _least(self.word)))
        if state**4 > tiny:  # then a weight would have to be smaller than two states together
            return False
        weights = [float(_least(weight)) for weight in (*self.form.unary, *self.form.weights)]
        return state**2 * min([1.0, *weights]) < tiny

    def seen_through(self, form: TensorForm) -> "Chart":
        """The same cells as children of the rules of another form over the same states."""
        chart = copy(self)
        chart.form = form
        chart.spans = Spans.made(self.word.new_empty, self.length, self.batch, form.lanes)
        chart._tables, chart._operands = None, {}
        for width, top in enumerate(self.top, 1):
            chart.spans.own(width).copy_(form.project(self.algebra, top)[0])
        return chart

    def word_and_rest(
        self, term: int, width: int, tables: Sequence[Tensor], beside: Sequence[Layer]
    ) -> tuple[Tensor, Tensor]:
        """What belongs to a word at one end of the spans of a width, and to the rest of them, [cells, lanes] each."""
        kind, table = self.form.blocks[term].kind, self.form.table_of(term)
        word = self.window(tables[table], width, kind, -2)
        return word, beside[table][width - 2].narrow(0, 0 if kind == AFTER else self.batch, len(word))

    def window(self, words: Tensor, width: int, kind: str, dimension: int) -> Tensor:
        """What belongs to the first words of the spans of a width, or to their last."""
        cells = (self.length - width + 1) * self.batch
        return words.narrow(dimension, (width - 1) * self.batch if kind == AFTER else 0, cells)

    def operands(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        """What a term is applied to: two children, or the rules with a word filled in and the rest of the span."""
        known = self._operands.get((term, width))
        if known is None:
            known = self._operands[term, width] = self._find_operands(term, width)
        return known

    def _find_operands(self, term: int, width: int) -> tuple[Tensor, Tensor]:
        block = self.form.blocks[term]
        kind = block.kind
        if kind == INNER:
            return self.spans.children(width, self.form.narrowest)
        if isinstance(block, Lanes):
            return self.word_and_rest(term, width, self.tables, self.beside)
        if kind == WORDS:
            words = self.form.pad(self.algebra, self.word_top)
            last = self.window(words, width, AFTER, -2)
            if not block.filled:
                return self.window(words, width, BEFORE, -2).unsqueeze(-2), last.unsqueeze(-2)
        table = self.window(self.tables[self.form.table_of(term)], width, kind, -3)
        rest = last if kind == WORDS else self.spans.rest(width, kind, table.shape[-1] if self.form.whole else None)
        return table, rest


def _least(x: Tensor) -> Tensor:
    """The smallest number that is not 0, whatever its sign."""
    return torch.where(x == 0, torch.inf, x.abs()).amin() if x.numel() else x.new_tensor(torch.inf)
