"""Batches of rule tensors: what they bring to the cells of a width, and the way back.

    T(y2, y3) = sum_jk T_ijk y2_j y3_k, summed over the splits of a span

`Block` is a batch of rules T^{a -> b c} of one shape, `DenseBlock` one tensor over all states. A preterminal child is
one word, so that its rules are contracted with the word once: in the chart they are matrices, not tensors.

A block is given two operands: both children, [cells, splits, states]; or the matrices that a word at one end of the
span makes of the rules, and the rest of the span, [cells, states].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

AddProduct = Callable[[Tensor, Tensor], None]
# The types of the children: two phrases; a word and a phrase; a phrase and a word; two words.
PHRASES, WORD_FIRST, WORD_LAST, WORDS = "phrases", "word first", "word last", "words"


@dataclass(frozen=True, eq=False)
class Block:
    """A batch of rules with children of the same types and of one shape (x, y, z).

    States are padded to the shape by the one past the last, which is zero in every cell.
    """

    child_types: str
    shape: tuple[int, int, int]
    rules: Tensor  # [rules]: numbers of skeletal rules
    pair: Tensor | None  # [rules]: the pair of children of each, where rules share them
    left: Tensor  # [pairs, y]: states
    right: Tensor  # [pairs, z]
    parent: Tensor  # [rules, x]
    parents: int  # number of states that parents may have
    source: Tensor  # in `RuleTensors.values`, in the shape of the weights; one past the last is zero

    # The weights of a block are [rules, x, y * z], or where a word is contracted with them
    # [rules, y, x * z] (word first) and [rules, z, x * y] (word last).

    @property
    def order(self) -> tuple[int, ...]:
        """Of the modes (rule, x, y, z) in the weights."""
        return {WORD_FIRST: (0, 2, 1, 3), WORD_LAST: (0, 3, 1, 2)}.get(self.child_types, (0, 1, 2, 3))

    @property
    def has_matrices(self) -> bool:
        """Whether the rules are contracted with each word beforehand."""
        return self.child_types in (WORD_FIRST, WORD_LAST)

    @property
    def word_states(self) -> Tensor:
        """[rules, y]: of the child that is a word."""
        return self.left if self.child_types == WORD_FIRST else self.right

    @property
    def rest_states(self) -> Tensor:
        """[rules, z]: of the other child."""
        return self.right if self.child_types == WORD_FIRST else self.left

    def matrices(self, word: Tensor, weights: Tensor) -> Tensor:
        """The rules contracted with each word: [rules, words, x, states of the other child]."""
        return _product(select(word, self.word_states), weights).unflatten(-1, (self.shape[0], -1))

    def backward_matrices(self, word: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through `matrices`: the gradient of the words."""
        selected = _product(gradient.flatten(2), weights.transpose(1, 2))
        return _add_up(selected, self.word_states, word.shape[1])

    def backward_weights(self, word: Tensor, gradient: Tensor) -> Tensor:
        """The same for the weights."""
        return torch.bmm(select(word, self.word_states).transpose(1, 2), gradient.flatten(2))

    def apply(self, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """The parent cells, [cells, states]."""
        rows = self.rows(one, two, weights).transpose(-1, -2).flatten(0, 1)  # [rules * x, cells]
        cells = rows.new_zeros(self.parents + 1, rows.shape[1]).index_add(0, self.parent.flatten(), rows)
        return cells.narrow(0, 0, self.parents).transpose(0, 1)

    def rows(self, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """What each rule brings to its parent, [rules, cells, x]."""
        if self.has_matrices:
            return _product(self._rest(two), one.transpose(-1, -2)).squeeze(-2)
        left, right = self._children(one, two)
        return _product(self._outer(left, right), weights.transpose(-1, -2))

    def chosen(self, weights: Tensor, rule: Tensor, x: Tensor) -> Tensor:
        """The weights of some rules with some parent states, [choices, y, z]."""
        if not self.has_matrices:
            return weights[rule, x].unflatten(-1, self.shape[1:])
        matrices = weights.unflatten(-1, (self.shape[0], -1))[rule, :, x]
        return matrices if self.child_types == WORD_FIRST else matrices.transpose(1, 2)

    def _rest(self, cells: Tensor) -> Tensor:
        """[rules, cells, 1, states of the child that is no word]"""
        return select(cells, self.rest_states).unsqueeze(-2)

    def _children(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        """[pairs, cells, splits, y] and [pairs, cells, splits, z]"""
        return select(one, self.left, 2), select(two, self.right, 2)

    def _outer(self, left: Tensor, right: Tensor) -> Tensor:
        """The products of the children's states, summed over the splits, [rules, cells, y * z]."""
        if left.shape[-1] == right.shape[-1] == 1:
            outer = (left * right).sum(-2)
        else:
            outer = _product(left.transpose(-1, -2), right).flatten(-2)
        return outer if self.pair is None else outer.index_select(0, self.pair)

    def backward(
        self,
        one: Tensor,
        two: Tensor,
        weights: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
    ) -> None:
        """Backwards through `apply`: adds the gradients of the operands and of the weights.

        Written by hand, because it is where the time goes. `add` takes the gradient of the weights as two factors, at
        once, while they are in the cache.
        """
        into_one, into_two = into
        rows = select(gradient, self.parent)  # [rules, cells, x]
        if self.has_matrices:
            rest, rows = self._rest(two), rows.unsqueeze(-2)
            into_one.addcmul_(rows.transpose(-1, -2), rest)
            into_two.add_(_add_up(_product(rows, one).squeeze(-2), self.rest_states, two.shape[-1]))
            return
        left, right = self._children(one, two)
        if add is not None:
            add(rows.transpose(-1, -2), self._outer(left, right))
        outer = _product(rows, weights)  # [rules, cells, y * z]
        if self.pair is not None:
            outer = outer.new_zeros(left.shape[0], *outer.shape[1:]).index_add_(0, self.pair, outer)
        outer = outer.unflatten(-1, (left.shape[-1], -1))
        if outer.shape[-1] == outer.shape[-2] == 1:
            left, right = outer * right, outer * left
        else:
            left, right = torch.matmul(outer, right.transpose(-1, -2)).transpose(-1, -2), torch.matmul(left, outer)
        into_one.add_(_add_up(left, self.left, one.shape[-1], 2))
        into_two.add_(_add_up(right, self.right, two.shape[-1], 2))

    def anchored(self, outside: Tensor, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """sum over states of O(parent) T I(left) I(right), [rules, cells, splits].

        `outside` is [cells, states], the derivative of log Z: these are posteriors.
        """
        parent = select(outside, self.parent)  # [rules, cells, x]
        if self.child_types != PHRASES:
            return (parent * self.rows(one, two, weights)).sum(-1, keepdim=True)
        left, right = self._children(one, two)
        lifted = _product(parent, weights)  # [rules, cells, y * z]
        if lifted.shape[-1] == 1:
            product = (left * right).squeeze(-1)
            return lifted * (product if self.pair is None else product.index_select(0, self.pair))
        if self.pair is not None:
            left, right = left.index_select(0, self.pair), right.index_select(0, self.pair)
        return (torch.matmul(left, lifted.unflatten(-1, (left.shape[-1], -1))) * right).sum(-1)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`torch.matmul`, which would copy a single matrix for each of a batch."""
    if x.dim() == y.dim() == 3:
        return torch.bmm(x.expand(len(y), -1, -1) if len(x) == 1 else x, y)
    return torch.matmul(x, y)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """A matrix product; where there is nothing to sum over, elementwise."""
    return x * y if x.shape[-1] == 1 else matmul(x, y)


def select(cells: Tensor, states: Tensor, dimensions: int = 1) -> Tensor:
    """[cells, (splits,) states] -> [groups, cells, (splits,) m], by rows of states: fast where m is 1."""
    rows = cells.movedim(-1, -dimensions - 1).contiguous().index_select(-dimensions - 1, states.flatten())
    return rows.unflatten(-dimensions - 1, tuple(states.shape)).movedim(-dimensions - 1, -1)


def _add_up(selected: Tensor, states: Tensor, size: int, dimensions: int = 1) -> Tensor:
    """Backwards through `select`: [groups, cells, (splits,) m] -> [cells, (splits,) states]."""
    rows = selected.movedim(-1, 1).flatten(0, 1)
    return rows.new_zeros(size, *rows.shape[1:]).index_add_(0, states.flatten(), rows).movedim(0, -1)


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """One rule tensor over all states (x, y, z): a block without a choice of states, all of it plain products."""

    child_types: str
    shape: tuple[int, int, int]
    rules: Tensor  # [1]
    source: Tensor | None  # in `RuleTensors.values`, in the shape of the weights

    # The weights are [x, y * z] where no child is a word, and there may be more rows than x; [x, y, z] where the right
    # child is one, and else [y, x, z]: such that it is contracted with a word by one product.

    @property
    def order(self) -> tuple[int, ...]:
        """Of the modes (rule, x, y, z) in the weights."""
        return (0, 1, 2, 3) if self.child_types in (PHRASES, WORD_LAST) else (0, 2, 1, 3)

    @property
    def has_matrices(self) -> bool:
        """Whether it is contracted with each word beforehand; of two words, with the first."""
        return self.child_types != PHRASES

    def matrices(self, word: Tensor, weights: Tensor) -> Tensor:
        """The rules contracted with each word: [words, x, states of the other child]."""
        x, y, z = self.shape
        rest = y if self.child_types == WORD_LAST else z
        return torch.mm(word, self._by_word(weights)).unflatten(-1, (x, rest))

    def _by_word(self, weights: Tensor) -> Tensor:
        """[states of the word, x * states of the other child]"""
        return weights.flatten(0, 1).T if self.child_types == WORD_LAST else weights.flatten(1)

    def apply(self, one: Tensor, two: Tensor, weights: Tensor, workspace: Tensor | None = None) -> Tensor:
        """The parent cells, [cells, x]; there may be a workspace for products."""
        if self.has_matrices:
            return matmul(two.unsqueeze(-2), one.transpose(-1, -2)).squeeze(-2)
        outer = None if workspace is None else workspace.view(-1, *self.shape[1:])
        # [cells, y, z]: the children's states, summed over the splits
        outer = torch.bmm(one.transpose(-1, -2), two, out=outer)
        return torch.mm(outer.flatten(1), weights.T).narrow(-1, 0, self.shape[0])

    def backward(
        self,
        one: Tensor,
        two: Tensor,
        weights: Tensor,
        gradient: Tensor,
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
        workspace: Tensor | None = None,
    ) -> None:
        """Backwards through `apply`.

        Where a word was contracted with the rules, the first of `into` takes the gradient of what its matrices brought
        to each span: a word begins spans of all widths, whose shares of the matrices are added up in one product later.
        """
        into_one, into_two = into
        if self.has_matrices:
            into_one.copy_(gradient)
            into_two.add_(torch.bmm(gradient.unsqueeze(-2), one).squeeze(-2))
            return
        assert workspace is not None
        outer = workspace.view(-1, *self.shape[1:])  # [cells, y, z]
        if add is not None:
            torch.bmm(one.transpose(-1, -2), two, out=outer)
            add(gradient.T, workspace)
        torch.mm(gradient, weights.narrow(0, 0, self.shape[0]), out=workspace)
        into_one.add_(torch.bmm(two, outer.transpose(-1, -2)))
        into_two.add_(torch.bmm(one, outer))

    def chosen(self, weights: Tensor, rule: Tensor, x: Tensor) -> Tensor:
        """The weights with some parent states, [choices, y, z]."""
        if self.child_types == PHRASES:
            return weights[x].unflatten(-1, self.shape[1:])
        return weights[x] if self.child_types == WORD_LAST else weights[:, x].transpose(0, 1)

    def backward_matrices(self, word: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Backwards through `matrices`: the gradient of the words."""
        return torch.mm(gradient.flatten(1), self._by_word(weights).T)

    def backward_weights(self, word: Tensor, gradient: Tensor) -> Tensor:
        """The same for the weights."""
        if self.child_types == WORD_LAST:
            return torch.mm(gradient.flatten(1).T, word).unflatten(0, gradient.shape[1:])
        return torch.mm(word.T, gradient.flatten(1)).unflatten(1, gradient.shape[1:])

    def anchored(self, outside: Tensor, one: Tensor, two: Tensor, weights: Tensor) -> Tensor:
        """As of a `Block`, [1, cells, splits]."""
        if self.has_matrices:
            return (outside * self.apply(one, two, weights)).sum(-1, keepdim=True).unsqueeze(0)
        lifted = torch.mm(outside, weights.narrow(0, 0, self.shape[0])).unflatten(-1, self.shape[1:])  # [cells, y, z]
        return (torch.bmm(one, lifted) * two).sum(-1).unsqueeze(0)
