"""The inside pass over all sentences of a batch, width by width.

    alpha(i,i)_a = Q^{a->x_i};   alpha(i,j) = sum_k T(alpha(i,k), alpha(k+1,j))

(Cohen & Collins 2012, figure 2.) Finished cells are kept twice, by (start, width) and by (end, width counted
down), so that the left children of all splits of all spans of a width are one contiguous view, and the right
children another. A cell is a row of mantissas with an exponent of two; exponents are constants to the
derivative, since any choice of them stands for the same number.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lvpcfg.chart.algebra import SUM
from lvpcfg.chart.blocks import AFTER, BEFORE, INNER, WORDS, Algebra, Whole
from lvpcfg.chart.forms import RuleTensors
from lvpcfg.chart.kruskal import Kruskal, KruskalByKind, Lanes

AnyRules = RuleTensors | Kruskal
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
        self.bottom: list[Tensor] = []  # for each width, [cells, interminal states]: binary rules
        self.top: list[Tensor] = []  # for each width, [cells, interminal states]: unary rules over those
        self.exponent: list[Tensor] = []  # for each width, [cells, 1]
        self.scale: list[Tensor] = []  # for each width, [cells, 1]: what the cell was multiplied by as it was written
        self.align: list[Tensor] = [leaf]  # for each width, [cells, splits, 1]: brings the splits to one exponent
        self.combined: list[Tensor] = []  # for each width from 2, [cells, lanes], where the form lifts them to states
        self.beside: list[list[Tensor]] = []  # for each width, what `project` found beside the lanes
        self._tables: list[Tensor] | None = None
        self._operands: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._room: Tensor | None = None
        with written_out(algebra):
            empty = leaf.new_zeros if form.table_size else leaf.new_empty  # the outside pass multiplies all of it
            lanes = form.lanes
            self.spans = Spans.made(lambda shape: empty((*algebra.lead, *shape)), self.length, self.batch, lanes)
            self.exponents = Spans.made(leaf.new_empty, self.length, self.batch, 1)
            self._read_words(leaf)
            for width in range(2, self.length + 1):
                self._fill(width)
            self._finish()
        self.forget()

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
        word, scale, exponent = algebra.normalise(leaf.flatten(-3, -2))
        self.word = self.keep(word, "bottom", 1, words=True)
        self.word_top = self.keep(self.word, "top", 1, words=True)
        top = algebra.zeros(leaf, len(exponent), form.interminals)
        if form.promotion is not None:
            top = self.keep(algebra.matmul(self.word, form.promotion), "top", 1)
        lanes, self._tables = form.words(algebra, self.word_top, top)
        self.beside.append(form.project(algebra, top)[1] if isinstance(form, KruskalByKind) else [])
        self._write(top, top, scale, exponent, lanes)

    def _fill(self, width: int) -> None:
        algebra, form = self.algebra, self.form
        align, exponent = algebra.align(torch.add(*self.exponents.children(width, 1)))
        self.align.append(align)
        parts = [self.apply(term, width) for term in form.terms(width)]
        combined = form.add(algebra, parts or [algebra.zeros(self.word, len(exponent), form.interminals)])
        if form.projects:
            self.combined.append(combined)
        cell, scale, taken = algebra.normalise(self.keep(form.lift(algebra, combined, width), "bottom", width))
        top = self._unary(cell, form.closure, width)
        lanes = None
        if width < self.length:
            lanes, beside = form.project(algebra, top)
            self.beside.append(beside)
        self._write(cell, top, scale, exponent + taken, lanes)

    def apply(self, term: int, width: int) -> Tensor:
        """What a term brings to the cells of a width."""
        block, operands, weights = self.form.blocks[term], self.operands(term, width), self.form.weights[term]
        if self.algebra is SUM and isinstance(block, Whole) and not block.filled:
            return block.apply(SUM, *operands, weights, self.room(block, width))
        return block.apply(self.algebra, *operands, weights)

    def room(self, block: Whole, width: int) -> Tensor:
        """For products of children of the spans of a width: the same for all widths, since new memory takes time."""
        rows, lanes = (self.length - width + 1) * self.batch, block.shape[1] * block.shape[2]
        if self._room is None or self._room.numel() < rows * lanes:
            self._room = self.word.new_empty(rows * lanes)
        return self._room.narrow(0, 0, rows * lanes).view(rows, lanes)

    def _write(self, bottom: Tensor, top: Tensor, scale: Tensor, exponent: Tensor, lanes: Tensor | None) -> None:
        self.bottom.append(bottom)
        self.top.append(top)
        self.scale.append(scale)
        self.exponent.append(exponent)
        width = len(self.top)
        self.exponents.own(width).copy_(exponent)
        if lanes is not None:
            self.spans.own(width, lanes.shape[-1]).copy_(lanes)

    def _finish(self) -> None:
        """The cell of the whole sentence, and log Z."""
        batch = self.batch
        if self.length == 1 or self.lengths is not None:
            self.final = torch.cat([self.top[0].narrow(-2, 0, batch), self.word_top.narrow(-2, 0, batch)], -1)
            self.final_exponent = self.exponent[0].narrow(0, 0, batch)
        else:
            nothing = self.algebra.zeros(self.word, batch, self.word.shape[-1])
            self.final = torch.cat([self.top[-1], nothing], -1)
            self.final_exponent = self.exponent[-1]
        if self.lengths is not None:
            nothing = self.algebra.zeros(self.word, batch, self.word.shape[-1])
            for width in range(2, self.length + 1):
                here = self.lengths == width
                cell = torch.cat([self.top[width - 1].narrow(-2, 0, batch), nothing], -1)
                self.final = torch.where(here.unsqueeze(-1), cell, self.final)
                exponent = self.exponent[width - 1].narrow(0, 0, batch)
                self.final_exponent = torch.where(here.unsqueeze(-1), exponent, self.final_exponent)
        total = self.total(self.final, self.form.root)
        self.log_z = self.algebra.log(total, self.final_exponent.squeeze(-1))
        self.sign = self.algebra.sign(total)

    def total(self, final: Tensor, root: Tensor) -> Tensor:
        return self.algebra.matmul(final, root.unsqueeze(-1)).squeeze(-1)

    def _unary(self, cell: Tensor, closure: Tensor | None, width: int) -> Tensor:
        return self.keep(cell if closure is None else self.algebra.matmul(cell, closure), "top", width)

    def keep(self, cells: Tensor, layer: str, width: int, words: bool = False, gradient: bool = False) -> Tensor:
        """Only the states that are allowed."""
        if self.allowed is None:
            return cells
        mask: Tensor = getattr(self.allowed, layer)
        rows = mask.narrow(0, 0, self.length - width + 1).select(2, width - 1).flatten(0, 1)
        first = self.form.interminals if words else 0
        rows = rows.narrow(-1, first, cells.shape[-1])
        return cells * rows if gradient else self.algebra.keep(cells, rows)

    def near_underflow(self) -> bool:
        """Whether some state of some cell is nearly as small as numbers get, beside the largest of its cell."""
        least = 1e10 * torch.finfo(self.word.dtype).tiny
        cells = torch.cat(self.bottom).abs()
        return bool(((cells < least) & (cells > 0)).any())

    def seen_through(self, form: RuleTensors) -> "Chart":
        """The same cells as children of the rules of another form over the same states."""
        chart = copy(self)
        chart.form = form
        chart.spans = Spans.made(self.word.new_empty, self.length, self.batch, form.lanes)
        chart._tables, chart._operands = None, {}
        for width, top in enumerate(self.top, 1):
            chart.spans.own(width).copy_(form.project(self.algebra, top)[0])
        return chart

    def word_and_rest(
        self, term: int, width: int, tables: list[Tensor], beside: list[list[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """What belongs to a word at one end of the spans of a width, and to the rest of them, [cells, lanes] each."""
        kind, table = self.form.blocks[term].kind, self.form.table_of(term)
        word = self.window(tables[table], width, kind, -2)
        if kind == WORDS:
            return word, self.window(tables[-1], width, AFTER, -2)
        return word, beside[width - 2][table].narrow(0, 0 if kind == AFTER else self.batch, len(word))

    def window(self, words: Tensor, width: int, kind: str, dimension: int) -> Tensor:
        """What belongs to the first words of the spans of a width, or to their last."""
        cells = (self.length - width + 1) * self.batch
        return words.narrow(dimension, (width - 1) * self.batch if kind == AFTER else 0, cells)

    def operands(self, term: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a term is applied to: two children, or the rules with a word filled in and the rest of the span;
        and the weights that align the splits."""
        known = self._operands.get((term, width))
        if known is None:
            known = self._operands[term, width] = self._find_operands(term, width)
        return known

    def _find_operands(self, term: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        block, least, align = self.form.blocks[term], self.form.narrowest, self.align[width - 1]
        kind = block.kind
        if kind == INNER:
            left, right = self.spans.children(width, least)
            return left, right, align if least == 1 else align.narrow(1, least - 1, width - 2 * least + 1)
        if isinstance(block, Lanes):
            word, rest = self.word_and_rest(term, width, self.tables, self.beside)
            return word, rest, align.select(1, width - 2 if kind == AFTER else 0)
        if kind == WORDS:
            words = self.form.pad(self.algebra, self.word_top)
            last = self.window(words, width, AFTER, -2)
            if not block.filled:
                return self.window(words, width, BEFORE, -2).unsqueeze(-2), last.unsqueeze(-2), align
        table = self.window(self.tables[self.form.table_of(term)], width, kind, -3)
        rest = last if kind == WORDS else self.spans.rest(width, kind, table.shape[-1] if self.form.whole else None)
        return table, rest, align.select(1, width - 2 if kind == AFTER else 0)
