"""Forms of a grammar: how its rules turn left and right cells into a parent cell.

For all spans of one width at once (cells = spans x sentences, as one dimension) a form supplies

    words     what the rules become once a word is filled in for one of their children
    project   a finished cell -> the lanes under which it serves as a left and as a right child
    terms     left and right lanes -> what each term brings to the parent, combined over the splits
    lift      the sum of the terms -> parent cell
    anchored  the posterior of each skeletal rule at each split (of the blocks of `RuleTensors`)

and `inside.py` drives them. States are numbered interminals first, and cells wider than a word hold those
only. A preterminal child is one word, so its rules are contracted with the word once: in the chart they
are matrices, not tensors.

`RuleTensors` holds T^{a -> b c} in batches of one shape: a PCFG (all m = 1), an L-PCFG with any number of
states for each symbol, or one dense tensor (one symbol whose states are all the nonterminals).
`Kruskal` holds T = sum_rho u_rho v_rho w_rho over all states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from lvpcfg.chart.algebra import SUM, Log, Sum

Algebra = Sum | Log
AddProduct = Callable[[Tensor, Tensor], None]
INNER, BEFORE, AFTER, WORDS = "inner", "before", "after", "words"  # which children are words


@dataclass(frozen=True, eq=False)
class Block:
    """A batch of rules of one kind and shape (x, y, z): one term of a cell.

    States are padded to the shape by the one past the last, which is zero in every cell.
    """

    kind: str
    shape: tuple[int, int, int]
    rules: Tensor  # [rules]: numbers of skeletal rules
    pair: Tensor | None  # [rules]: the children of each; None: every rule has its own
    left: Tensor  # [pairs, y]
    right: Tensor  # [pairs, z]
    parent: Tensor  # [rules, x]
    sources: Tensor  # [parent states, most rules]: the rows that add up to each
    places: Tensor  # in `Grammar.binary`, in the shape of the weights; one past the last is zero

    # The weights of a block are [rules, x, y * z], or with a word to be filled in
    # [rules, y, x * z] (before) and [rules, z, x * y] (after).

    @property
    def filled(self) -> bool:
        """Whether words are filled into the rules beforehand."""
        return self.kind in (BEFORE, AFTER)

    def table(self, algebra: Algebra, word: Tensor, weights: Tensor) -> Tensor:
        """The rules with each word filled in: [rules, words, x, states of the other child]."""
        picked = select(word, self.left if self.kind == BEFORE else self.right)  # [rules, words, y]
        return _product(algebra, picked, weights).unflatten(-1, (self.shape[0], -1))

    def undo_table(self, word: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through `table` in ordinary arithmetic: the gradient of the words."""
        picked = _product(SUM, gradient.flatten(2), weights.transpose(1, 2))
        return _deposit(picked, self.left if self.kind == BEFORE else self.right, word.shape[1])

    def undo_weights(self, word: Tensor, gradient: Tensor) -> Tensor:
        """The same for the weights."""
        picked = select(word, self.left if self.kind == BEFORE else self.right)
        return torch.bmm(picked.transpose(1, 2), gradient.flatten(2))

    def apply(self, algebra: Algebra, one: Tensor, two: Tensor, align: Tensor, weights: Tensor) -> Tensor:
        """The parent cells, [cells, states].

        `one` and `two` are the left and right children, [cells, splits, lanes], or the rules with a word filled
        in and the other child, [cells, lanes]; `align` brings the splits to one exponent.
        """
        rows = self.rows(algebra, one, two, align, weights)
        flat = rows.transpose(-1, -2).flatten(-3, -2)  # [rules * x, cells]
        return algebra.collect(flat, self.parent.flatten(), self.sources).transpose(-1, -2)

    def rows(self, algebra: Algebra, one: Tensor, two: Tensor, align: Tensor, weights: Tensor) -> Tensor:
        """What each rule brings to its parent, [rules, cells, x]."""
        if self.kind in (BEFORE, AFTER):
            return _product(algebra, self._rest(algebra.scale(two, align)), one.transpose(-1, -2)).squeeze(-2)
        left, right = self._children(algebra.scale(one, align), two)
        return _product(algebra, self._outer(algebra, left, right), weights.transpose(-1, -2))

    def chosen(self, weights: Tensor, rule: Tensor, x: Tensor) -> Tensor:
        """The weights of some rules with some parent states, [choices, y, z]."""
        if self.kind in (INNER, WORDS):
            return weights[rule, x].unflatten(-1, self.shape[1:])
        matrices = weights.unflatten(-1, (self.shape[0], -1))[rule, :, x]
        return matrices if self.kind == BEFORE else matrices.transpose(1, 2)

    def _rest(self, cells: Tensor) -> Tensor:
        """[rules, cells, 1, states of the child that is no word]"""
        return select(cells, self.right if self.kind == BEFORE else self.left).unsqueeze(-2)

    def _children(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        """[pairs, cells, splits, y] and [pairs, cells, splits, z]"""
        return select(one, self.left, 2), select(two, self.right, 2)

    def _outer(self, algebra: Algebra, left: Tensor, right: Tensor) -> Tensor:
        """The products of the children's states, summed over the splits, [rules, cells, y * z]."""
        if left.shape[-1] == right.shape[-1] == 1:
            outer = algebra.dot(left, right)
        else:
            outer = _product(algebra, left.transpose(-1, -2), right).flatten(-2)
        return outer if self.pair is None else outer.index_select(-3, self.pair)

    def undo(
        self,
        one: Tensor,
        two: Tensor,
        align: Tensor,
        weights: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
    ) -> None:
        """Backwards through `apply` in ordinary arithmetic: adds the gradients of `one`, `two` and the weights.

        Written out because it is where the time goes. `add` takes the gradient of the weights as two factors, at
        once, while they are in the cache.
        """
        into_one, into_two = into
        rows = select(gradient, self.parent)  # [rules, cells, x]
        if self.kind in (BEFORE, AFTER):
            rest, rows = self._rest(two * align), rows.unsqueeze(-2)
            into_one.addcmul_(rows.transpose(-1, -2), rest)
            picked = _product(SUM, rows, one)
            other = _deposit(picked.squeeze(-2), self.right if self.kind == BEFORE else self.left, two.shape[-1])
            into_two.addcmul_(other, align)
            return
        left, right = self._children(one * align, two)
        if add is not None:
            add(rows.transpose(-1, -2), self._outer(SUM, left, right))
        outer = _product(SUM, rows, weights)  # [rules, cells, y * z]
        if self.pair is not None:
            outer = outer.new_zeros(left.shape[0], *outer.shape[1:]).index_add_(0, self.pair, outer)
        outer = outer.unflatten(-1, (left.shape[-1], -1))
        if outer.shape[-1] == outer.shape[-2] == 1:
            left, right = outer * right, outer * left
        else:
            left, right = torch.matmul(outer, right.transpose(-1, -2)).transpose(-1, -2), torch.matmul(left, outer)
        into_one.addcmul_(_deposit(left, self.left, one.shape[-1], 2), align)
        into_two.add_(_deposit(right, self.right, two.shape[-1], 2))

    def anchored(self, outside: Tensor, one: Tensor, two: Tensor, align: Tensor, weights: Tensor) -> Tensor:
        """sum over states of O(parent) T I(left) I(right), [rules, cells, splits].

        `outside` is [cells, states], the derivative of log Z: these are posteriors.
        """
        parent = select(outside, self.parent)  # [rules, cells, x]
        if self.kind != INNER:
            return (parent * self.rows(SUM, one, two, align, weights)).sum(-1, keepdim=True)
        left, right = self._children(one * align, two)
        lifted = _product(SUM, parent, weights)  # [rules, cells, y * z]
        if lifted.shape[-1] == 1:
            product = (left * right).squeeze(-1)
            return lifted * (product if self.pair is None else product.index_select(0, self.pair))
        if self.pair is not None:
            left, right = left.index_select(0, self.pair), right.index_select(0, self.pair)
        return (torch.matmul(left, lifted.unflatten(-1, (left.shape[-1], -1))) * right).sum(-1)


def _product(algebra: Algebra, x: Tensor, y: Tensor) -> Tensor:
    """A matrix product; where there is nothing to sum over, elementwise."""
    return algebra.times(x, y) if x.shape[-1] == 1 else algebra.matmul(x, y)


def select(cells: Tensor, states: Tensor, dimensions: int = 1) -> Tensor:
    """[cells, (splits,) states] -> [groups, cells, (splits,) m], by whole rows: fast where m is 1."""
    rows = cells.movedim(-1, -dimensions - 1).contiguous().index_select(-dimensions - 1, states.flatten())
    return rows.unflatten(-dimensions - 1, tuple(states.shape)).movedim(-dimensions - 1, -1)


def _deposit(picked: Tensor, states: Tensor, size: int, dimensions: int = 1) -> Tensor:
    """Backwards through `select`: [groups, cells, (splits,) m] -> [cells, (splits,) states]."""
    rows = picked.movedim(-1, 1).flatten(0, 1)
    return rows.new_zeros(size, *rows.shape[1:]).index_add_(0, states.flatten(), rows).movedim(0, -1)


@dataclass(frozen=True, eq=False)
class Whole:
    """One rule tensor over all states (x, y, z): a block without a choice of states, all of it plain products."""

    kind: str
    shape: tuple[int, int, int]
    rules: Tensor  # [1]
    places: Tensor | None  # in `Grammar.binary`, in the shape of the weights

    # The weights are [x, y * z] where no child is a word, and there may be more rows than x; [x, y, z] where the right
    # child is one, and else [y, x, z]: such that a word is filled in by one product.

    @property
    def filled(self) -> bool:
        """Whether words are filled into the rules beforehand; of two words, the first."""
        return self.kind != INNER

    def table(self, algebra: Algebra, word: Tensor, weights: Tensor) -> Tensor:
        """The rules with each word filled in: [words, x, states of the other child]."""
        x, y, z = self.shape
        return algebra.matmul(word, self._by_word(weights)).unflatten(-1, (x, y if self.kind == AFTER else z))

    def _by_word(self, weights: Tensor) -> Tensor:
        """[states of the word, x * states of the other child]"""
        return weights.flatten(-3, -2).transpose(-1, -2) if self.kind == AFTER else weights.flatten(-2)

    def apply(
        self, algebra: Algebra, one: Tensor, two: Tensor, align: Tensor, weights: Tensor, room: Tensor | None = None
    ) -> Tensor:
        """The parent cells, [cells, x]; arguments as those of a `Block`, and room for products."""
        if self.filled:
            return algebra.matmul(algebra.scale(two, align).unsqueeze(-2), one.transpose(-1, -2)).squeeze(-2)
        left = algebra.scale(one, align).transpose(-1, -2)
        room = None if room is None else room.view(-1, *self.shape[1:])
        # [cells, y, z]: the children's states, summed over the splits
        outer = algebra.matmul(left, two) if room is None else torch.bmm(left, two, out=room)
        return algebra.matmul(outer.flatten(-2), weights.transpose(-1, -2)).narrow(-1, 0, self.shape[0])

    def undo(
        self,
        one: Tensor,
        two: Tensor,
        align: Tensor,
        weights: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
        room: Tensor | None = None,
    ) -> None:
        """Backwards through `apply` in ordinary arithmetic, with room for products.

        Where a word is filled in, the first of `into` takes the gradient of what the word's rules brought to each
        span: a word begins spans of all widths, whose shares of `table` are then added up in one product.
        """
        into_one, into_two = into
        if self.filled:
            torch.mul(gradient, align, out=into_one)
            into_two.add_(torch.bmm(into_one.unsqueeze(-2), one).squeeze(-2))
            return
        one = one * align
        room = gradient.new_empty(len(gradient), weights.shape[1]) if room is None else room
        outer = room.view(-1, *self.shape[1:])  # [cells, y, z]
        if add is not None:
            torch.bmm(one.transpose(-1, -2), two, out=outer)
            add(gradient.T, room)
        torch.mm(gradient, weights.narrow(0, 0, self.shape[0]), out=room)
        into_one.addcmul_(torch.bmm(two, outer.transpose(-1, -2)), align)
        into_two.add_(torch.bmm(one, outer))

    def chosen(self, weights: Tensor, rule: Tensor, x: Tensor) -> Tensor:
        """The weights with some parent states, [choices, y, z]."""
        if self.kind == INNER:
            return weights[x].unflatten(-1, self.shape[1:])
        return weights[x] if self.kind == AFTER else weights[:, x].transpose(0, 1)

    def undo_table(self, word: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through `table` in ordinary arithmetic: the gradient of the words."""
        return torch.mm(gradient.flatten(1), self._by_word(weights).T)

    def undo_weights(self, word: Tensor, gradient: Tensor) -> Tensor:
        """The same for the weights."""
        if self.kind == AFTER:
            return torch.mm(gradient.flatten(1).T, word).unflatten(0, gradient.shape[1:])
        return torch.mm(word.T, gradient.flatten(1)).unflatten(1, gradient.shape[1:])

    def anchored(self, outside: Tensor, one: Tensor, two: Tensor, align: Tensor, weights: Tensor) -> Tensor:
        """As of a `Block`, [1, cells, splits]."""
        if self.filled:
            return (outside * self.apply(SUM, one, two, align, weights)).sum(-1, keepdim=True).unsqueeze(0)
        lifted = torch.mm(outside, weights.narrow(0, 0, self.shape[0])).unflatten(-1, self.shape[1:])  # [cells, y, z]
        return (torch.bmm(one * align, lifted) * two).sum(-1).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Form:
    """What all forms have; its tensors are in the arithmetic of the chart they are used in."""

    root: Tensor  # [states]
    closure: Tensor | None  # [interminal states (bottom), the same (top)]: no, one or more unary rules
    promotion: Tensor | None  # [preterminal states, interminal states]: one or more unary rules over a word
    weights: tuple[Tensor, ...]
    interminals: int  # number of their states

    @property
    def unary(self) -> tuple[Tensor, ...]:
        return () if self.closure is None or self.promotion is None else (self.closure, self.promotion)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it can be differentiated by."""
        return (self.root, *self.unary, *self.weights)

    def with_tensors(self: "AnyForm", tensors: Sequence[Tensor]) -> "AnyForm":
        if self.closure is None:
            return replace(self, root=tensors[0], weights=tuple(tensors[1:]))
        root, closure, promotion, *weights = tensors
        return replace(self, root=root, closure=closure, promotion=promotion, weights=tuple(weights))

    def with_weights(self: "AnyForm", weights: Sequence[Tensor]) -> "AnyForm":
        return replace(self, weights=tuple(weights))

    def to(self: "AnyForm", dtype: torch.dtype) -> "AnyForm":
        return self.with_tensors([tensor.to(dtype) for tensor in self.tensors])

    def prepared(self: "AnyForm", algebra: Algebra) -> "AnyForm":
        """As it is best for charts in this algebra."""
        return self

    def joined(self, weights: list[Tensor | None]) -> list[Tensor | None]:
        """From the gradients of the weights to those of the tensors."""
        return weights

    def add(self, algebra: Algebra, parts: Sequence[Tensor]) -> Tensor:
        """What the terms bring to a cell, together."""
        return algebra.add(parts)

    def shares(self, combined: Tensor, terms: Sequence[int]) -> Sequence[Tensor]:
        """Backwards through `add` in ordinary arithmetic."""
        return [combined] * len(terms)


AnyForm = TypeVar("AnyForm", bound=Form)


@dataclass(frozen=True, eq=False)
class RuleTensors(Form):
    blocks: tuple[Block | Whole, ...]  # parallel to weights
    padded: bool  # cells end in a state that is always zero

    @cached_property
    def whole(self) -> bool:
        """Whether the rules are whole tensors, without a choice of states."""
        return any(isinstance(block, Whole) for block in self.blocks)

    @property
    def narrowest(self) -> int:
        """Width of the narrowest span that serves as a child otherwise than as a word filled in."""
        return 2 if self.closure is None else 1

    def terms(self, width: int) -> list[int]:
        """The blocks that make spans of this width."""
        least = {WORDS: 2, BEFORE: 1 + self.narrowest, AFTER: 1 + self.narrowest, INNER: 2 * self.narrowest}
        return [
            i
            for i, block in enumerate(self.blocks)
            if width >= least[block.kind] and (block.kind != WORDS or width == 2)
        ]

    projects = False

    @property
    def lanes(self) -> tuple[int, int]:
        return (self.interminals + self.padded,) * 2

    def lift(self, algebra: Algebra, combined: Tensor, width: int) -> Tensor:
        return combined

    def table_of(self, term: int) -> int:
        """The place of a block among those that a word is filled in for."""
        return self._filled.index(term)

    @cached_property
    def _filled(self) -> list[int]:
        return [term for term, block in enumerate(self.blocks) if block.filled]

    @cached_property
    def table_size(self) -> int:
        """Numbers that a word takes when it is filled into the rules."""
        filled = [block for block in self.blocks if block.filled]
        return sum(len(one.rules) * one.shape[0] * one.shape[1 if one.kind == AFTER else 2] for one in filled)

    def project(self, algebra: Algebra, top: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The same on both sides, [1, cells, states]."""
        return self.pad(algebra, top).unsqueeze(-3), []

    def words(self, algebra: Algebra, word: Tensor, top: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """The lanes of single words, and the rules with each word filled in."""
        padded = self.pad(algebra, word)
        tables = [
            block.table(algebra, padded, weights)
            for block, weights in zip(self.blocks, self.weights, strict=True)
            if block.filled
        ]
        return None if self.closure is None else self.project(algebra, top)[0], tables

    def pad(self, algebra: Algebra, cells: Tensor) -> Tensor:
        if not self.padded:
            return cells
        return torch.cat([cells, algebra.zeros(cells, *cells.shape[len(algebra.lead) : -1], 1)], -1)


@dataclass(frozen=True, eq=False)
class Dense(RuleTensors):
    """The weights are parts of one tensor, and so are their gradients: it is large, and copies of it cost time."""

    rules: Tensor  # [interminals, states, states]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.root, self.rules

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Dense":
        root, rules = tensors
        return replace(self, root=root, rules=rules, weights=tuple(quarters(rules.detach(), self.interminals)))

    @property
    def lanes(self) -> tuple[int, int]:
        return (self.blocks[0].shape[1],) * 2

    def prepared(self, algebra: Algebra) -> "Dense":
        """Numbers of states that are no multiple of 8 make products slow: phrases get states that are always 0."""
        phrases, after, before, words = self.weights
        block, *blocks = self.blocks
        if algebra is SUM:
            size = -(-self.interminals // 8) * 8
            block = replace(block, shape=(self.interminals, size, size))
            phrases = torch.nn.functional.pad(phrases, (0, size - self.interminals) * 3)
        before, words = (part.transpose(-2, -3).contiguous() for part in (before, words))
        weights = (phrases.flatten(-2), after.contiguous(), before, words)
        return replace(self, weights=weights, blocks=(block, *blocks))

    def joined(self, weights: list[Tensor | None]) -> list[Tensor | None]:
        rules = torch.empty_like(self.rules)
        places = quarters(rules, self.interminals)
        places[2:] = [place.transpose(-3, -2) for place in places[2:]]
        for gradient, place in zip(weights, places, strict=True):
            if gradient is None:
                place.zero_()
                continue
            if gradient.dim() < place.dim():
                gradient = gradient.unflatten(-1, self.blocks[0].shape[1:])
            place.copy_(gradient.narrow(-2, 0, place.shape[-2]).narrow(-1, 0, place.shape[-1]))
        return [rules]


def quarters(rules: Tensor, interminals: int) -> list[Tensor]:
    """[x, y, z], children being: two phrases; a phrase and a word; a word and a phrase; two words."""
    sizes = [interminals, rules.shape[-1] - interminals]
    return [part for half in rules.split(sizes, -2) for part in half.split(sizes, -1)]


@dataclass(frozen=True, eq=False)
class Kruskal(Form):
    """weights: U [rank, interminals], then V beside W, over interminals [states, 2 rank] and over preterminals.

    `kinds` counts the terms for any children, for a phrase and a word, for a word and a phrase, and for two words, in
    this order. In ordinary arithmetic the latter cost less (`KruskalByKind`).
    """

    source: RuleTensors | None  # the rules it stands for, for decoders that score rules
    kinds: tuple[int, int, int, int]

    narrowest, projects, table_size, whole = 1, True, 0, False

    def to(self, dtype: torch.dtype) -> "Kruskal":
        return replace(super().to(dtype), source=None if self.source is None else self.source.to(dtype))

    def prepared(self, algebra: Algebra) -> "Kruskal":
        return self._by_kind if algebra is SUM and any(self.kinds[1:]) else self

    @cached_property
    def for_log_z(self) -> "Kruskal":
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
    def unsorted(self) -> "Kruskal":
        """With terms that all serve any children."""
        return replace(self, kinds=(sum(self.kinds), 0, 0, 0))

    @cached_property
    def _by_kind(self) -> "KruskalByKind":
        u, inner, outer = self.weights
        parts = [[*half.split(self.kinds, 1)] for whole in (inner, outer) for half in whole.tensor_split(2, 1)]
        (v, v_after, *_), (w, _, w_before, _) = parts[:2]
        (v_of_word, _, v_before, v_words), (w_of_word, w_after, _, w_words) = parts[2:]
        weights = (
            u.narrow(0, 0, len(u) - self.kinds[3]),
            torch.cat([v, w, v_after, w_before], 1),
            torch.cat([v_of_word, w_of_word, w_after, v_before, v_words, w_words], 1),
            u,
        )
        return KruskalByKind(
            self.root, self.closure, self.promotion, weights, self.interminals, self.source, self.kinds, self.tensors
        )

    @property
    def lanes(self) -> tuple[int, int]:
        return (self.weights[0].shape[-2],) * 2

    @property
    def blocks(self) -> tuple["Lanes", ...]:
        return (Lanes(),)

    def terms(self, width: int) -> list[int]:
        return [0]

    def lifting(self, width: int) -> int | None:
        """Which of the weights lifts cells of a width."""
        return 0

    def lift(self, algebra: Algebra, combined: Tensor, width: int) -> Tensor:
        lifting = self.lifting(width)
        return combined if lifting is None else algebra.matmul(combined, self.weights[lifting])

    def project(self, algebra: Algebra, top: Tensor) -> tuple[Tensor, list[Tensor]]:
        """By V as a left child and by W as a right child, [2, cells, rank]."""
        return _halves(algebra.matmul(top, self.weights[1])), []

    def words(self, algebra: Algebra, word: Tensor, top: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        lanes = _halves(algebra.matmul(word, self.weights[2]))
        return lanes if self.closure is None else algebra.plus(lanes, self.project(algebra, top)[0]), []

    def table_of(self, term: int) -> int:
        raise AssertionError("a Kruskal form fills in no words")

    def pad(self, algebra: Algebra, cells: Tensor) -> Tensor:
        return cells


def _halves(lanes: Tensor) -> Tensor:
    """[cells, 2 rank] -> [2, cells, rank]"""
    return lanes.unflatten(-1, (2, -1)).movedim(-2, -3)


class RankSpace(Kruskal):
    """A form whose interminal states are the terms themselves, so that nothing is lifted."""

    def lifting(self, width: int) -> None:
        return None


@dataclass(frozen=True, eq=False)
class KruskalByKind(Kruskal):
    """The same in ordinary arithmetic, where a term whose v (or w) has no interminal needs one split alone: its left
    (right) child is a word. The lanes of the rest of the span are not kept with those of the splits, but beside them.

    weights: U without the terms for two words; over interminals V and W of the terms for any children, V of those for
    a phrase and a word, W of those for a word and a phrase; over preterminals V and W of the first, W of the second, V
    of the third, V and W of the terms for two words; and all of U, for spans of two words.
    """

    given: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.given

    @property
    def lanes(self) -> tuple[int, int]:
        return (self.kinds[0],) * 2

    @cached_property
    def blocks(self) -> tuple["Lanes", ...]:
        return Lanes(), Lanes(AFTER), Lanes(BEFORE), Lanes(WORDS)

    def terms(self, width: int) -> list[int]:
        return [0, 1, 2, 3] if width == 2 else [0, 1, 2]

    def lifting(self, width: int) -> int:
        return 3 if width == 2 else 0

    def add(self, algebra: Algebra, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts], -1)

    def shares(self, combined: Tensor, terms: Sequence[int]) -> Sequence[Tensor]:
        return combined.split(self.kinds[: len(terms)], -1)

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
        some, inner, outer, u = (
            torch.zeros_like(weight) if gradient is None else gradient
            for gradient, weight in zip(weights, self.weights, strict=True)
        )
        u = u + torch.nn.functional.pad(some, (0, 0, 0, self.kinds[3]))
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
    """The terms of one kind of a Kruskal form: lane by lane over the splits. They need no weights of their own."""

    kind: str = INNER

    @property
    def filled(self) -> bool:
        return self.kind != INNER

    def apply(self, algebra: Algebra, left: Tensor, right: Tensor, align: Tensor, _: Tensor) -> Tensor:
        if self.kind != INNER:  # a word and the rest of the span
            return left * align * right
        return algebra.dot(left, right, align)

    def undo(
        self,
        left: Tensor,
        right: Tensor,
        align: Tensor,
        _: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
    ) -> None:
        """Backwards through `apply` in ordinary arithmetic."""
        into_left, into_right = into
        lanes = (gradient.unsqueeze(-2) if self.kind == INNER else gradient) * align
        into_left.addcmul_(lanes, right)
        into_right.addcmul_(lanes, left)
