"""Whole-grammar CP forms in charts (Cohen, Satta & Collins 2013), T = sum_rho u_rho v_rho w_rho over all states.

project   V alpha and W alpha, once for each cell
combine   sum over the splits k of V alpha(i,k) * W alpha(k+1,j), lane by lane
lift      U^T, once for each cell
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.chart.fast.algebra import SUM
from lvpcfg.chart.fast.blocks import AFTER, BEFORE, INNER, AddProduct, Algebra
from lvpcfg.chart.fast.forms import Form, TensorForm


@dataclass(frozen=True, eq=False)
class CPForm(Form):
    """weights: U [rank, interminals], then V beside W, over interminals [states, 2 rank] and over preterminals.

    `kinds` counts the terms for any children, for a phrase and a word, for a word and a phrase, and for two words, in
    this order. In ordinary arithmetic the latter cost less (`CPByChildTypes`).
    """

    source: TensorForm | None  # the rules it stands for, for decoders that score rules
    kinds: tuple[int, int, int, int]

    narrowest, projects, table_size, whole = 1, True, 0, False

    def to(self, dtype: torch.dtype) -> "CPForm":
        return replace(super().to(dtype), source=None if self.source is None else self.source.to(dtype))

    def prepared(self, algebra: Algebra) -> "CPForm":
        return self._by_kind if algebra is SUM and any(self.kinds[1:]) else self

    @cached_property
    def for_log_z(self) -> "CPForm":
        """What is enough for log Z alone: cells may stay in rank space, where that is cheaper.

            V alpha(i,j) = V U^T sum_k (V alpha(i,k) * W alpha(k+1,j))   and the same for W

        (Cohen, Satta & Collins 2013, section 4.) The products of the factors, and of unary rules with them, are made
        once, so that all that is left of U is what the whole sentence ends in.
        """
        u, inner, outer = self.weights
        rank, states = u.shape
        if any(self.kinds[1:]) or 2 * rank > 3 * states + (0 if self.closure is None else states * states / rank):
            return self
        phrases, tags = self.root.split([states, len(self.root) - states])
        if self.closure is not None and self.promotion is not None:
            tags, outer = tags + self.promotion @ phrases, outer + self.promotion @ inner
            u = u @ self.closure
        root = torch.cat([u @ phrases, tags])
        return RankSpace(root, None, None, (u, u @ inner, outer), rank, None, self.kinds)

    @property
    def unsorted(self) -> "CPForm":
        """With terms that all serve any children."""
        return replace(self, kinds=(sum(self.kinds), 0, 0, 0))

    @cached_property
    def _by_kind(self) -> "CPByChildTypes":
        u, inner, outer = self.weights
        parts = [[*half.split(self.kinds, 1)] for whole in (inner, outer) for half in whole.tensor_split(2, 1)]
        (v, v_after, *_), (w, _, w_before, _) = parts[:2]
        (v_of_word, _, v_before, v_words), (w_of_word, w_after, _, w_words) = parts[2:]
        weights = (
            u.narrow(0, 0, len(u) - self.kinds[3]),
            torch.cat([v, w, v_after, w_before], 1),
            torch.cat([v_of_word, w_of_word, w_after, v_before, v_words, w_words], 1),
            u.narrow(0, len(u) - self.kinds[3], self.kinds[3]),
        )
        return CPByChildTypes(
            self.root, self.closure, self.promotion, weights, self.interminals, self.source, self.kinds, self.tensors
        )

    @property
    def lanes(self) -> int:
        return self.weights[0].shape[-2]

    @property
    def blocks(self) -> tuple["Lanes", ...]:
        return (Lanes(),)

    def terms(self, width: int) -> list[int]:
        return [0]

    lifts = True

    @property
    def beside(self) -> tuple[int, ...]:
        """Numbers of lanes that `project` finds beside the others."""
        return ()

    @property
    def terms_lifted(self) -> int:
        return self.weights[0].shape[-2]

    def add(self, algebra: Algebra, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """What the terms bring to cells, together."""
        return out.copy_(algebra.add(parts))

    def lift(self, algebra: Algebra, combined: Tensor, out: Tensor) -> None:
        algebra.multiply(combined, self.weights[0], out)

    def project(self, algebra: Algebra, top: Tensor) -> tuple[Tensor, list[Tensor]]:
        """By V as a left child and by W as a right child, [2, cells, rank]."""
        return _halves(algebra.matmul(top, self.weights[1])), []

    def words(self, algebra: Algebra, word: Tensor, top: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        lanes = _halves(algebra.matmul(word, self.weights[2]))
        return lanes if self.closure is None else algebra.plus(lanes, self.project(algebra, top)[0]), []

    def table_of(self, term: int) -> int:
        raise AssertionError("a CP form fills in no words")

    def pad(self, algebra: Algebra, cells: Tensor) -> Tensor:
        return cells


def _halves(lanes: Tensor) -> Tensor:
    """[cells, 2 rank] -> [2, cells, rank]"""
    return lanes.unflatten(-1, (2, -1)).movedim(-2, -3)


class RankSpace(CPForm):
    """A form whose interminal states are the terms themselves, so that nothing is lifted. It serves log Z alone."""

    lifts = False

    def lift(self, algebra: Algebra, combined: Tensor, out: Tensor) -> None:
        out.copy_(combined)


@dataclass(frozen=True, eq=False)
class CPByChildTypes(CPForm):
    """The same in ordinary arithmetic, where a term whose v (or w) has no interminal needs one split alone: its left
    (right) child is a word. The lanes of the rest of the span are not kept with those of the splits, but beside them.

    weights: U without the terms for two words; over interminals V and W of the terms for any children, V of those for
    a phrase and a word, W of those for a word and a phrase; over preterminals V and W of the first, W of the second, V
    of the third, V and W of the terms for two words; and U of the latter, which `Chart` and `Outside` apply to spans of
    two words by themselves.
    """

    given: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.given

    @property
    def lanes(self) -> int:
        return self.kinds[0]

    @property
    def beside(self) -> tuple[int, ...]:
        return self.kinds[1:3]

    @cached_property
    def blocks(self) -> tuple["Lanes", ...]:
        return Lanes(), Lanes(AFTER), Lanes(BEFORE)

    def terms(self, width: int) -> list[int]:
        return [0, 1, 2]

    def add(self, algebra: Algebra, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        return torch.cat([*parts], -1, out=out)

    def shares(self, combined: Tensor, terms: Sequence[int]) -> Sequence[Tensor]:
        return combined.split(self.kinds[:3], -1)

    def project(self, algebra: Algebra, top: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Beside the lanes of the splits, those of spans without their last word and without their first."""
        return self._apart(torch.mm(top, self.weights[1]), self.kinds[1:3])

    def words(self, algebra: Algebra, word: Tensor, top: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """The tables: words as the last of a span, as the first, as the first of two and as the last of two."""
        lanes, tables = self._apart(torch.mm(word, self.weights[2]), [*self.kinds[1:], self.kinds[3]])
        return lanes if self.closure is None else lanes + self.project(algebra, top)[0], tables

    def _apart(self, lanes: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        both, *beside = lanes.split([2 * self.kinds[0], *sizes], -1)
        return _halves(both), beside

    def table_of(self, term: int) -> int:
        return term - 1

    def joined(self, weights: list[Tensor | None]) -> list[Tensor | None]:
        """With zeros for what is no part of a term of its kind."""
        some, inner, outer, of_words = (
            torch.zeros_like(weight) if gradient is None else gradient
            for gradient, weight in zip(weights, self.weights, strict=True)
        )
        u = torch.cat([some, of_words])
        general, after, before, words = self.kinds
        v, w, v_after, w_before = inner.split([general, general, after, before], 1)
        phrases = [v, v_after, before + words, w, after, w_before, words]
        v, w, w_after, v_before, v_words, w_words = outer.split([general, general, after, before, words, words], 1)
        tags = [v, after, v_before, v_words, w, w_after, before, w_words]
        return [u, *(_with_zeros(parts) for parts in (phrases, tags))]


def _with_zeros(parts: Sequence[Tensor | int]) -> Tensor:
    """Parts side by side, with zeros where there is only a number of columns."""
    rows = next(part for part in parts if isinstance(part, Tensor))
    return torch.cat([rows.new_zeros(len(rows), part) if isinstance(part, int) else part for part in parts], 1)


@dataclass(frozen=True)
class Lanes:
    """The terms of one kind of a CP form: lane by lane over the splits. They need no weights of their own."""

    kind: str = INNER

    @property
    def filled(self) -> bool:
        return self.kind != INNER

    def apply(self, algebra: Algebra, left: Tensor, right: Tensor, _: Tensor) -> Tensor:
        if self.kind != INNER:  # a word and the rest of the span
            return left * right
        return algebra.dot(left, right)

    def backward(
        self,
        left: Tensor,
        right: Tensor,
        _: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
    ) -> None:
        """Backwards through `apply` in ordinary arithmetic."""
        into_left, into_right = into
        lanes = gradient.unsqueeze(-2) if self.kind == INNER else gradient
        into_left.addcmul_(lanes, right)
        into_right.addcmul_(lanes, left)
