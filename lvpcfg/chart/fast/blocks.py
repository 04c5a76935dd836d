"""Blocks of rules: what batches of rule tensors bring to the cells of a width, and the way back.

    T(y2, y3) = sum_jk T_ijk y2_j y3_k, summed over the splits of a span

`Block` is a batch of rules T^{a -> b c} of one shape, `DenseBlock` one tensor over all states. A preterminal child is
one word, so that its rules are contracted with the word once: in the chart they are matrices, not tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.fast.algebra import SUM, Log, Sum

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
    def order(self) -> tuple[int, ...]:
        """Of the modes (rule, x, y, z) in the weights."""
        return {BEFORE: (0, 2, 1, 3), AFTER: (0, 3, 1, 2)}.get(self.kind, (0, 1, 2, 3))

    @property
    def filled(self) -> bool:
        """Whether words are filled into the rules beforehand."""
        return self.kind in (BEFORE, AFTER)

    def table(self, algebra: Algebra, word: Tensor, weights: Tensor) -> Tensor:
        """The rules with each word filled in: [rules, words, x, states of the other child]."""
        picked = select(word, self.left if self.kind == BEFORE else self.right)  # [rules, words, y]
        return _product(algebra, picked, weights).unflatten(-1, (self.shape[0], -1))

    def backward_table(self, word: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through `table` in ordinary arithmetic: the gradient of the words."""
        picked = _product(SUM, gradient.flatten(2), weights.transpose(1, 2))
        return _deposit(picked, self.left if self.kind == BEFORE else self.right, word.shape[1])

    def backward_weights(self, word: Tensor, gradient: Tensor) -> Tensor:
        """The same for the weights."""
        picked = select(word, self.left if self.kind == BEFORE else self.right)
        return torch.bmm(picked.transpose(1, 2), gradient.flatten(2))

    def apply(self, algebra: Algebra, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """The parent cells, [cells, states].

        `one` and `two` are the left and right children, [cells, splits, lanes], or the rules with a word filled
        in and the other child, [cells, lanes].
        """
        rows = self.rows(algebra, one, two, weights)
        flat = rows.transpose(-1, -2).flatten(-3, -2)  # [rules * x, cells]
        return algebra.collect(flat, self.parent.flatten(), self.sources).transpose(-1, -2)

    def rows(self, algebra: Algebra, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """What each rule brings to its parent, [rules, cells, x]."""
        if self.kind in (BEFORE, AFTER):
            return _product(algebra, self._rest(two), one.transpose(-1, -2)).squeeze(-2)
        left, right = self._children(one, two)
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

    def backward(
        self,
        one: Tensor,
        two: Tensor,
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
            rest, rows = self._rest(two), rows.unsqueeze(-2)
            into_one.addcmul_(rows.transpose(-1, -2), rest)
            picked = _product(SUM, rows, one)
            into_two.add_(_deposit(picked.squeeze(-2), self.right if self.kind == BEFORE else self.left, two.shape[-1]))
            return
        left, right = self._children(one, two)
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
        into_one.add_(_deposit(left, self.left, one.shape[-1], 2))
        into_two.add_(_deposit(right, self.right, two.shape[-1], 2))

    def anchored(self, outside: Tensor, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """sum over states of O(parent) T I(left) I(right), [rules, cells, splits].

        `outside` is [cells, states], the derivative of log Z: these are posteriors.
        """
        parent = select(outside, self.parent)  # [rules, cells, x]
        if self.kind != INNER:
            return (parent * self.rows(SUM, one, two, weights)).sum(-1, keepdim=True)
        left, right = self._children(one, two)
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
class DenseBlock:
    """One rule tensor over all states (x, y, z): a block without a choice of states, all of it plain products."""

    kind: str
    shape: tuple[int, int, int]
    rules: Tensor  # [1]
    places: Tensor | None  # in `Grammar.binary`, in the shape of the weights

    # The weights are [x, y * z] where no child is a word, and there may be more rows than x; [x, y, z] where the right
    # child is one, and else [y, x, z]: such that a word is filled in by one product.

    @property
    def order(self) -> tuple[int, ...]:
        """Of the modes (rule, x, y, z) in the weights."""
        return (0, 1, 2, 3) if self.kind in (INNER, AFTER) else (0, 2, 1, 3)

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

    def apply(self, algebra: Algebra, one: Tensor, two: Tensor, weights: Tensor, room: Tensor | None = None) -> Tensor:
        """The parent cells, [cells, x]; arguments as those of a `Block`, and room for products."""
        if self.filled:
            return algebra.matmul(two.unsqueeze(-2), one.transpose(-1, -2)).squeeze(-2)
        left = one.transpose(-1, -2)
        room = None if room is None else room.view(-1, *self.shape[1:])
        # [cells, y, z]: the children's states, summed over the splits
        outer = algebra.matmul(left, two) if room is None else torch.bmm(left, two, out=room)
        return algebra.matmul(outer.flatten(-2), weights.transpose(-1, -2)).narrow(-1, 0, self.shape[0])

    def backward(
        self,
        one: Tensor,
        two: Tensor,
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
            into_one.copy_(gradient)
            into_two.add_(torch.bmm(gradient.unsqueeze(-2), one).squeeze(-2))
            return
        assert room is not None
        outer = room.view(-1, *self.shape[1:])  # [cells, y, z]
        if add is not None:
            torch.bmm(one.transpose(-1, -2), two, out=outer)
            add(gradient.T, room)
        torch.mm(gradient, weights.narrow(0, 0, self.shape[0]), out=room)
        into_one.add_(torch.bmm(two, outer.transpose(-1, -2)))
        into_two.add_(torch.bmm(one, outer))

    def chosen(self, weights: Tensor, rule: Tensor, x: Tensor) -> Tensor:
        """The weights with some parent states, [choices, y, z]."""
        if self.kind == INNER:
            return weights[x].unflatten(-1, self.shape[1:])
        return weights[x] if self.kind == AFTER else weights[:, x].transpose(0, 1)

    def backward_table(self, word: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through `table` in ordinary arithmetic: the gradient of the words."""
        return torch.mm(gradient.flatten(1), self._by_word(weights).T)

    def backward_weights(self, word: Tensor, gradient: Tensor) -> Tensor:
        """The same for the weights."""
        if self.kind == AFTER:
            return torch.mm(gradient.flatten(1).T, word).unflatten(0, gradient.shape[1:])
        return torch.mm(word.T, gradient.flatten(1)).unflatten(1, gradient.shape[1:])

    def anchored(self, outside: Tensor, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """As of a `Block`, [1, cells, splits]."""
        if self.filled:
            return (outside * self.apply(SUM, one, two, weights)).sum(-1, keepdim=True).unsqueeze(0)
        lifted = torch.mm(outside, weights.narrow(0, 0, self.shape[0])).unflatten(-1, self.shape[1:])  # [cells, y, z]
        return (torch.bmm(one, lifted) * two).sum(-1).unsqueeze(0)
