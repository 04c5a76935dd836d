"""One CP form of all rules in charts (Cohen, Satta & Collins 2013): T = sum_rho u_rho v_rho w_rho.

project   V alpha and W alpha, once for each cell
combine   sum over the splits k of V alpha(i,k) * W alpha(k+1,j), lane by lane
lift      U^T, once for each cell
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, AddProduct
from lvpcfg.chart.fast.forms import Form, TensorForm
from lvpcfg.grammar.rules import BinaryRules
from lvpcfg.grammar.whole_cp import WholeCP

LARGE, FEW = 1 << 17, 0.02  # numbers of weights that are looked through for zeros, and the share that is worth it


@dataclass(frozen=True, eq=False)
class CPForm(Form):
    """weights: U [rank, interminals]; V and behind it W, over interminals [states, 2 rank]; the same over preterminals.

    `term_counts` counts the terms for any children, for a phrase and a word, for a word and a phrase, and for two
    words, in this order. The latter three cost less (`SortedCPForm`).
    """

    source: TensorForm | None  # the rules it stands for, for decoders that score rules
    term_counts: tuple[int, int, int, int]

    narrowest: ClassVar[int] = 1
    projects: ClassVar[bool] = True
    matrix_size: ClassVar[int] = 0
    dense: ClassVar[bool] = False
    lifts: ClassVar[bool] = True

    def to(self, dtype: torch.dtype) -> "CPForm":
        return replace(super().to(dtype), source=None if self.source is None else self.source.to(dtype))

    def prepared(self) -> "CPForm":
        return self._sorted if any(self.term_counts[1:]) else self

    @cached_property
    def for_log_z(self) -> "CPForm":
        """What is enough for log Z alone: cells may stay in rank space, where that is cheaper.

            V alpha(i,j) = V U^T sum_k (V alpha(i,k) * W alpha(k+1,j))   and the same for W

        (Cohen, Satta & Collins 2013, section 4.) The products of the factors, and of unary rules with them,
        are computed once. U itself is then needed for the cell of the sentence alone.
        """
        u, inner, outer = self.weights
        rank, states = u.shape
        lifting = 3 * states + (0 if self.closure is None else states * states / rank)
        if any(self.term_counts[1:]) or 2 * rank > lifting:
            return self
        phrases, tags = self.root.split([states, len(self.root) - states])
        if self.closure is not None and self.promotion is not None:
            tags, outer = tags + self.promotion @ phrases, outer + self.promotion @ inner
            u = u @ self.closure
        root = torch.cat([u @ phrases, tags])
        return RankSpace(root, None, None, (u, u @ inner, outer), rank, None, self.term_counts)

    @property
    def terms_of_derivations(self) -> int:
        return self.lanes

    @property
    def scored_rules(self) -> TensorForm | None:
        return self.source

    def with_binary(self, binary: BinaryRules) -> "CPForm":
        """Without the rules it stands for, which would have to be written out again."""
        form = binary.for_charts()
        assert isinstance(form, WholeCP)
        return replace(self, weights=weights_of(form.u, form.v, form.w), source=None)

    @property
    def unsorted(self) -> "CPForm":
        return replace(self, term_counts=(sum(self.term_counts), 0, 0, 0))

    @cached_property
    def _sorted(self) -> "SortedCPForm":
        u, inner, outer = self.weights
        parts = [[*side.split(self.term_counts, 1)] for both in (inner, outer) for side in both.tensor_split(2, 1)]
        (v, v_last, *_), (w, _, w_first, _) = parts[:2]
        (v_of_word, _, v_first, v_words), (w_of_word, w_last, _, w_words) = parts[2:]
        others = len(u) - self.term_counts[3]
        weights = (
            u.narrow(0, 0, others),
            torch.cat([v, w, v_last, w_first], 1),
            torch.cat([v_of_word, w_of_word, w_last, v_first, v_words, w_words], 1),
            u.narrow(0, others, self.term_counts[3]),
        )
        return SortedCPForm(
            self.root,
            self.closure,
            self.promotion,
            weights,
            self.interminals,
            self.source,
            self.term_counts,
            self.tensors,
        )

    @cached_property
    def factors(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The weights to multiply cells by, as they are and transposed: those of many symbols are nearly all zeros."""
        return tuple(_factor(weight) for weight in self.weights)

    @property
    def lanes(self) -> int:
        return self.weights[0].shape[-2]

    @property
    def blocks(self) -> tuple["Lanes", ...]:
        return (Lanes(),)

    def terms(self, width: int) -> list[int]:
        return [0]

    @property
    def rest_lanes(self) -> tuple[int, ...]:
        """Numbers of lanes that `project` computes for spans next to a word, apart from those for splits."""
        return ()

    @property
    def lifted_terms(self) -> int:
        return self.weights[0].shape[-2]

    def join(
        self, parts: Sequence[Float[Tensor, "cells _"]], out: Float[Tensor, "cells terms"]
    ) -> Float[Tensor, "cells terms"]:
        """What all terms add to cells."""
        return out.copy_(parts[0])

    def lift(self, combined: Float[Tensor, "cells terms"], out: Float[Tensor, "cells inner"]) -> None:
        torch.mm(combined, self.factors[0][0], out=out)

    def project(
        self, top: Float[Tensor, "cells inner"]
    ) -> tuple[Float[Tensor, "2 cells lanes"], list[Float[Tensor, "cells _"]]]:
        """By V as a left child and by W as a right child."""
        return _halves(torch.mm(top, self.factors[1][0])), []

    def words(
        self, word: Float[Tensor, "words word_states"], top: Float[Tensor, "words inner"]
    ) -> tuple[Float[Tensor, "2 words lanes"] | None, list[Float[Tensor, "words _"]]]:
        """The lanes of single words."""
        lanes = _halves(torch.mm(word, self.factors[2][0]))
        return lanes if self.closure is None else lanes + self.project(top)[0], []

    def matrices_of(self, term: int) -> int:
        raise AssertionError("the terms of a CP form need no matrices")

    def pad(self, cells: Tensor) -> Tensor:
        return cells


def weights_of(
    u: Float[Tensor, "rank inner"], v: Float[Tensor, "rank states"], w: Float[Tensor, "rank states"]
) -> tuple[Float[Tensor, "rank inner"], Float[Tensor, "inner columns"], Float[Tensor, "word_states columns"]]:
    """U, and the columns of V and then of W, 2 rank in all, over interminals and over preterminals."""
    sizes = [u.shape[1], v.shape[1] - u.shape[1]]
    phrases, tags = (torch.cat(half).T for half in zip(v.split(sizes, 1), w.split(sizes, 1), strict=True))
    return u, phrases, tags


def _factor(weight: Float[Tensor, "rows columns"]) -> tuple[Tensor, Tensor]:
    """The matrix and its transpose, sparse where few of its numbers are not zero, on CPUs whose PyTorch can do that."""
    small = weight.numel() < LARGE or not weight.is_cpu or not torch.backends.mkl.is_available()
    if small or int(weight.count_nonzero()) > FEW * weight.numel():
        return weight, weight.T
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return weight.to_sparse_csr(), weight.T.to_sparse_csr()


def _halves(lanes: Float[Tensor, "cells both"]) -> Float[Tensor, "2 cells rank"]:
    """[cells, 2 rank] -> [2, cells, rank]"""
    return lanes.unflatten(-1, (2, -1)).movedim(-2, -3)


class RankSpace(CPForm):
    """A form whose interminal states are the terms themselves, so that nothing is lifted. It serves log Z alone."""

    lifts: ClassVar[bool] = False

    def lift(self, combined: Tensor, out: Tensor) -> None:
        out.copy_(combined)


@dataclass(frozen=True, eq=False)
class SortedCPForm(CPForm):
    """A CP form whose terms are sorted by their children. A term whose v (or w) has no interminal needs one split
    alone: its left (right) child is a word. The lanes of the rest of the span are kept apart from those for splits.

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
        return self.term_counts[0]

    @property
    def rest_lanes(self) -> tuple[int, ...]:
        return self.term_counts[1:3]

    @cached_property
    def blocks(self) -> tuple["Lanes", ...]:
        return Lanes(), Lanes(WORD_LAST), Lanes(WORD_FIRST)

    def terms(self, width: int) -> list[int]:
        return [0, 1, 2]

    def join(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        return torch.cat([*parts], -1, out=out)

    def shares(self, combined: Tensor, terms: Sequence[int]) -> Sequence[Tensor]:
        return combined.split(self.term_counts[:3], -1)

    def project(self, top: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Also the lanes of spans without their last word and without their first."""
        return self._apart(torch.mm(top, self.factors[1][0]), self.term_counts[1:3])

    def words(self, word: Tensor, top: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Also the lanes of words as the last of a span, as the first, as the first of two and as the last of two."""
        lanes, others = self._apart(torch.mm(word, self.factors[2][0]), [*self.term_counts[1:], self.term_counts[3]])
        return lanes if self.closure is None else lanes + self.project(top)[0], others

    def _apart(self, lanes: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        both, *others = lanes.split([2 * self.term_counts[0], *sizes], -1)
        return _halves(both), others

    def matrices_of(self, term: int) -> int:
        """The place of the term's words in what `words` finds."""
        return term - 1

    def joined(self, weights: list[Tensor | None]) -> list[Tensor | None]:
        """With zeros for what is no part of a term with such children."""
        some, inner, outer, of_words = (
            torch.zeros_like(weight) if gradient is None else gradient
            for gradient, weight in zip(weights, self.weights, strict=True)
        )
        u = torch.cat([some, of_words])
        general, last, first, words = self.term_counts
        v, w, v_last, w_first = inner.split([general, general, last, first], 1)
        phrases = [v, v_last, first + words, w, last, w_first, words]
        v, w, w_last, v_first, v_words, w_words = outer.split([general, general, last, first, words, words], 1)
        tags = [v, last, v_first, v_words, w, w_last, first, w_words]
        return [u, *(_with_zeros(parts) for parts in (phrases, tags))]


def _with_zeros(parts: Sequence[Tensor | int]) -> Tensor:
    """Parts side by side, with zeros where there is only a number of columns."""
    rows = next(part for part in parts if isinstance(part, Tensor))
    return torch.cat([rows.new_zeros(len(rows), part) if isinstance(part, int) else part for part in parts], 1)


@dataclass(frozen=True)
class Lanes:
    """The terms of a CP form with the same types of children: lane by lane over the splits, without weights."""

    child_types: str = PHRASES

    @property
    def has_matrices(self) -> bool:
        return self.child_types != PHRASES

    def apply(self, left: Tensor, right: Tensor, _: Tensor) -> Tensor:
        if self.child_types != PHRASES:  # a word and the rest of the span
            return left * right
        return (left * right).sum(-2)

    def backward(
        self,
        left: Tensor,
        right: Tensor,
        _: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
    ) -> None:
        """Backwards through `apply`."""
        into_left, into_right = into
        lanes = gradient.unsqueeze(-2) if self.child_types == PHRASES else gradient
        into_left.addcmul_(lanes, right)
        into_right.addcmul_(lanes, left)
