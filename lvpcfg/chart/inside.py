"""The inside pass over all sentences of a batch, width by width.

    alpha(i,i)_a = Q^{a->x_i};   alpha(i,j) = sum_k T(alpha(i,k), alpha(k+1,j))

(Cohen & Collins 2012, figure 2.) Finished cells are kept twice, by (start, width) and by (end, width counted
down), so that the left children of all splits of all spans of a width are one contiguous view, and the right
children another. A cell is a row of mantissas with an exponent of two; exponents are constants to the
derivative, since any choice of them stands for the same number.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.algebra import SUM
from lvpcfg.chart.forms import AFTER, BEFORE, INNER, WORDS, Algebra, Kruskal, RuleTensors

AnyRules = RuleTensors | Kruskal
LARGE = 1 << 22  # numbers


@dataclass(frozen=True, eq=False)
class Spans:
    """Numbers for every span, by (start, sentence) and by (end, sentence).

    Its views of one width have cells = (start, sentence) as their first dimension.
    """

    left: Tensor  # [starts * batch, widths, lanes]
    right: Tensor  # [ends * batch, widths counted down, lanes]
    batch: int

    @staticmethod
    def made(empty: Callable[..., Tensor], length: int, batch: int, left: int, right: int) -> "Spans":
        return Spans(empty((length * batch, length, left)), empty((length * batch, length, right)), batch)

    def _starts(self, width: int) -> Tensor:
        """The rows where spans of a width start, [cells, widths, lanes]."""
        return self.left.narrow(-3, 0, (self.left.shape[-2] - width + 1) * self.batch)

    def _ends(self, width: int) -> Tensor:
        first = (width - 1) * self.batch
        return self.right.narrow(-3, first, self.right.shape[-3] - first)

    def children(self, width: int, least: int) -> tuple[Tensor, Tensor]:
        """Left and right children of all splits into parts of `least` words or more, [cells, splits, lanes]."""
        n, splits = self.left.shape[-2], width - 2 * least + 1
        left, right = self._starts(width), self._ends(width)
        return left.narrow(-2, least - 1, splits), right.narrow(-2, n - width + least, splits)

    def own(self, width: int) -> tuple[Tensor, Tensor]:
        """The spans themselves, as left and as right children of others, [cells, lanes]."""
        n = self.left.shape[-2]
        return self._starts(width).select(-2, width - 1), self._ends(width).select(-2, n - width)

    def write(self, width: int, left: Tensor, right: Tensor) -> None:
        for view, values in zip(self.own(width), (left, right), strict=True):
            view.copy_(values)

    def rest(self, width: int, kind: str) -> Tensor:
        """What is left of the spans without their first word (BEFORE) or their last (AFTER), [cells, lanes]."""
        n = self.left.shape[-2]
        if kind == BEFORE:
            return self._ends(width).select(-2, n - width + 1)
        return self._starts(width).select(-2, width - 2)


@dataclass(frozen=True, eq=False)
class Allowed:
    """Which states spans may have, bool [starts, batch, widths, states]: in the bottom layer (binary rules and
    words) and in the top layer (with unary rules over them)."""

    bottom: Tensor
    top: Tensor


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
        self.form, self.algebra, self.lengths, self.allowed = form, algebra, lengths, allowed
        self.length, self.batch = leaf.shape[-3], leaf.shape[-2]
        self.bottom: list[Tensor] = []  # for each width, [cells, interminal states]: binary rules
        self.top: list[Tensor] = []  # for each width, [cells, interminal states]: unary rules over those
        self.exponent: list[Tensor] = []  # for each width, [cells, 1]
        self.shift: list[Tensor] = []  # for each width, [cells, 1]: what was taken out as the cell was written
        self.align: list[Tensor] = [leaf]  # for each width, [cells, splits, 1]: brings the splits to one exponent
        self.combined: list[Tensor] = []  # for each width from 2, [cells, lanes], where the form lifts them to states
        self._tables: list[Tensor] | None = None
        left, right = form.lanes
        self.spans = Spans.made(
            lambda shape: leaf.new_empty((*algebra.lead, *shape)), self.length, self.batch, left, right
        )
        self.exponents = Spans.made(leaf.new_empty, self.length, self.batch, 1, 1)
        self._read_words(leaf)
        for width in range(2, self.length + 1):
            self._fill(width)
        self._finish()
        self.forget()

    @property
    def tables(self) -> list[Tensor]:
        """The rules with each word filled in, [rules, length * batch, ...]."""
        if self._tables is None:
            _, _, self._tables = self.form.words(self.algebra, self.word_top, self.top[0])
        return self._tables

    def forget(self) -> None:
        """Where the tables are large, they are made again when they are needed again."""
        if self.form.table_size * len(self.word_top) > LARGE:
            self._tables = None

    def _read_words(self, leaf: Tensor) -> None:
        """Width 1: words as children of binary rules, filled into the rules, and under unary rules."""
        algebra, form = self.algebra, self.form
        word, shift, exponent = algebra.normalise(leaf.flatten(-3, -2))
        self.word = self.keep(word, "bottom", 1, words=True)
        self.word_top = self.keep(self.word, "top", 1, words=True)
        top = algebra.zeros(leaf, len(exponent), form.interminals)
        if form.promotion is not None:
            top = self.keep(algebra.matmul(self.word, form.promotion), "top", 1)
        left, right, self._tables = form.words(algebra, self.word_top, top)
        self._write(top, top, shift, exponent, left, right)

    def _fill(self, width: int) -> None:
        algebra, form = self.algebra, self.form
        left, right = self.exponents.children(width, 1)
        align, exponent = algebra.align(left + right)
        self.align.append(align)
        parts = [
            form.blocks[term].apply(algebra, *self.operands(term, width), form.weights[term])
            for term in form.terms(width)
        ] or [algebra.zeros(self.word, len(exponent), form.interminals)]
        combined = algebra.add(parts)
        if form.projects:
            self.combined.append(combined)
        cell, shift, taken = algebra.normalise(self.keep(form.lift(algebra, combined), "bottom", width))
        top = self._unary(cell, form.closure, width)
        lanes = form.project(algebra, top) if width < self.length else (None, None)
        self._write(cell, top, shift, exponent + taken, *lanes)

    def _write(
        self, bottom: Tensor, top: Tensor, shift: Tensor, exponent: Tensor, left: Tensor | None, right: Tensor | None
    ) -> None:
        self.bottom.append(bottom)
        self.top.append(top)
        self.shift.append(shift)
        self.exponent.append(exponent)
        width = len(self.top)
        self.exponents.write(width, exponent, exponent)
        if left is not None and right is not None:
            self.spans.write(width, left, right)

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
        smallest = [cells.abs().masked_fill(cells == 0, 1).amin() for cells in self.bottom if cells.numel()]
        return bool(torch.stack(smallest).amin() < least) if smallest else False

    def seen_through(self, form: RuleTensors) -> "Chart":
        """The same cells as children of the rules of another form over the same states."""
        chart = copy(self)
        chart.form = form
        chart.spans = Spans.made(self.word.new_empty, self.length, self.batch, *form.lanes)
        chart._tables = None
        for width, top in enumerate(self.top, 1):
            chart.spans.write(width, *form.project(self.algebra, top))
        return chart

    def window(self, words: Tensor, width: int, kind: str, dimension: int) -> Tensor:
        """What belongs to the first words of the spans of a width, or to their last."""
        cells = (self.length - width + 1) * self.batch
        return words.narrow(dimension, (width - 1) * self.batch if kind == AFTER else 0, cells)

    def operands(self, term: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a term is applied to: two children, or the rules with a word filled in and the rest of the span;
        and the weights that align the splits."""
        kind, least, align = self.form.blocks[term].kind, self.form.narrowest, self.align[width - 1]
        if kind == INNER:
            left, right = self.spans.children(width, least)
            return left, right, align.narrow(1, least - 1, width - 2 * least + 1)
        if kind == WORDS:
            words = self.form.pad(self.algebra, self.word_top)
            first, last = self.window(words, width, BEFORE, -2), self.window(words, width, AFTER, -2)
            return first.unsqueeze(-2), last.unsqueeze(-2), align
        table = self.window(self.tables[self.form.table_of(term)], width, kind, -3)
        return table, self.spans.rest(width, kind), align.select(1, 0 if kind == BEFORE else width - 2)
