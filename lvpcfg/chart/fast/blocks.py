"""Batches of rule tensors: their contribution to the cells of a width, and its gradients.

    T(y2, y3) = sum_jk T_ijk y2_j y3_k, summed over the splits of a span

`Block` is a batch of rules T^{a -> b c} of one shape, `DenseBlock` one tensor over all states. A preterminal child is
one word, so that its rules are contracted with the word once: in the chart they are matrices, not tensors.

A block is applied to two operands, `first` and `second`: both children, [cells, splits, states] each; or the matrices
that a word at one end of the span makes of the rules, [(rules,) cells, x, states], and the rest of the span, [cells,
states].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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
    rules: Int[Tensor, "rules"]  # numbers of skeletal rules
    pair: Int[Tensor, "rules"] | None  # the pair of children of each, where rules share them
    left: Int[Tensor, "pairs y"]  # states
    right: Int[Tensor, "pairs z"]
    parent: Int[Tensor, "rules x"]
    parents: int  # number of states that parents may have
    source: Int[Tensor, "rules ..."]  # of each weight its index in `RuleTensors.values`; one past the last is zero

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
    def word_states(self) -> Int[Tensor, "rules y"]:
        """Of the child that is a word."""
        return self.left if self.child_types == WORD_FIRST else self.right

    @property
    def rest_states(self) -> Int[Tensor, "rules z"]:
        """Of the other child."""
        return self.right if self.child_types == WORD_FIRST else self.left

    def matrices(
        self, word: Float[Tensor, "words word_states"], weights: Float[Tensor, "rules y xz"]
    ) -> Float[Tensor, "rules words x z"]:
        """The rules contracted with each word; z are the states of the other child."""
        return _product(select(word, self.word_states), weights).unflatten(-1, (self.shape[0], -1))

    def backward_matrices(
        self,
        word: Float[Tensor, "words word_states"],
        weights: Float[Tensor, "rules y xz"],
        gradient: Float[Tensor, "rules words x z"],
    ) -> Float[Tensor, "words word_states"]:
        """Backwards through `matrices`: the gradient of the words."""
        selected = _product(gradient.flatten(2), weights.transpose(1, 2))
        return _add_up(selected, self.word_states, word.shape[1])

    def backward_weights(
        self, word: Float[Tensor, "words word_states"], gradient: Float[Tensor, "rules words x z"]
    ) -> Float[Tensor, "rules y xz"]:
        """The same for the weights."""
        return torch.bmm(select(word, self.word_states).transpose(1, 2), gradient.flatten(2))

    def apply(
        self, first: Float[Tensor, "..."], second: Float[Tensor, "cells ..."], weights: Float[Tensor, "rules _ _"]
    ) -> Float[Tensor, "cells states"]:
        """The parent cells."""
        rows = self.rows(first, second, weights).transpose(-1, -2).flatten(0, 1)  # [rules * x, cells]
        cells = rows.new_zeros(self.parents + 1, rows.shape[1]).index_add(0, self.parent.flatten(), rows)
        return cells.narrow(0, 0, self.parents).transpose(0, 1)

    def rows(
        self, first: Float[Tensor, "..."], second: Float[Tensor, "cells ..."], weights: Float[Tensor, "rules _ _"]
    ) -> Float[Tensor, "rules cells x"]:
        """What each rule adds to its parent."""
        if self.has_matrices:
            return _product(self._rest(second), first.transpose(-1, -2)).squeeze(-2)
        left, right = self._children(first, second)
        return _product(self._outer(left, right), weights.transpose(-1, -2))

    def chosen(
        self, weights: Float[Tensor, "rules _ _"], rule: Int[Tensor, "choices"], x: Int[Tensor, "choices"]
    ) -> Float[Tensor, "choices y z"]:
        """The weights of some rules with some parent states."""
        if not self.has_matrices:
            return weights[rule, x].unflatten(-1, self.shape[1:])
        matrices = weights.unflatten(-1, (self.shape[0], -1))[rule, :, x]
        return matrices if self.child_types == WORD_FIRST else matrices.transpose(1, 2)

    def _rest(self, cells: Tensor) -> Tensor:
        """[rules, cells, 1, states of the child that is no word]"""
        return select(cells, self.rest_states).unsqueeze(-2)

    def _children(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """[pairs, cells, splits, y] and [pairs, cells, splits, z]"""
        return select(first, self.left, 2), select(second, self.right, 2)

    def _outer(self, left: Tensor, right: Tensor) -> Tensor:
        """The products of the children's states, summed over the splits, [rules, cells, y * z]."""
        if left.shape[-1] == right.shape[-1] == 1:
            outer = (left * right).sum(-2)
        else:
            outer = _product(left.transpose(-1, -2), right).flatten(-2)
        return outer if self.pair is None else outer.index_select(0, self.pair)

    def backward(
        self,
        first: Tensor,
        second: Tensor,
        weights: Float[Tensor, "rules _ _"],
        gradient: Float[Tensor, "cells states"],
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
    ) -> None:
        """Backwards through `apply`: adds the gradients of the operands and of the weights.

        Written by hand, because it is where the time goes. `add` takes the gradient of the weights as two factors, at
        once, while they are in the cache.
        """
        into_first, into_second = into
        rows = select(gradient, self.parent)  # [rules, cells, x]
        if self.has_matrices:
            rest, rows = self._rest(second), rows.unsqueeze(-2)
            into_first.addcmul_(rows.transpose(-1, -2), rest)
            into_second.add_(_add_up(_product(rows, first).squeeze(-2), self.rest_states, second.shape[-1]))
            return
        left, right = self._children(first, second)
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
        into_first.add_(_add_up(left, self.left, first.shape[-1], 2))
        into_second.add_(_add_up(right, self.right, second.shape[-1], 2))

    def anchored(
        self,
        outside: Float[Tensor, "cells states"],
        first: Float[Tensor, "..."],
        second: Float[Tensor, "cells ..."],
        weights: Float[Tensor, "rules _ _"],
    ) -> Float[Tensor, "rules cells splits"]:
        """sum over states of O(parent) T I(left) I(right), [rules, cells, splits].

        `outside` is [cells, states], the derivative of log Z: these are posteriors.
        """
        parent = select(outside, self.parent)  # [rules, cells, x]
        if self.child_types != PHRASES:
            return (parent * self.rows(first, second, weights)).sum(-1, keepdim=True)
        left, right = self._children(first, second)
        lifted = _product(parent, weights)  # [rules, cells, y * z]
        if lifted.shape[-1] == 1:
            product = (left * right).squeeze(-1)
            return lifted * (product if self.pair is None else product.index_select(0, self.pair))
        if self.pair is not None:
            left, right = left.index_select(0, self.pair), right.index_select(0, self.pair)
        return (torch.matmul(left, lifted.unflatten(-1, (left.shape[-1], -1))) * right).sum(-1)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`torch.matmul`, without copying a single matrix for each of a batch."""
    if x.dim() == y.dim() == 3:
        return torch.bmm(x.expand(len(y), -1, -1) if len(x) == 1 else x, y)
    return torch.matmul(x, y)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """A matrix product; where there is nothing to sum over, elementwise."""
    return x * y if x.shape[-1] == 1 else matmul(x, y)


def select(
    cells: Float[Tensor, "*cells all"], states: Int[Tensor, "groups m"], dimensions: int = 1
) -> Float[Tensor, "groups *cells m"]:
    """[cells, (splits,) all states] -> [groups, cells, (splits,) m]: the states of each group; fast if m is 1."""
    rows = cells.movedim(-1, -dimensions - 1).contiguous().index_select(-dimensions - 1, states.flatten())
    return rows.unflatten(-dimensions - 1, tuple(states.shape)).movedim(-dimensions - 1, -1)


def _add_up(
    selected: Float[Tensor, "groups *cells m"], states: Int[Tensor, "groups m"], size: int, dimensions: int = 1
) -> Float[Tensor, "*cells {size}"]:
    """Backwards through `select`: [groups, cells, (splits,) m] -> [cells, (splits,) states]."""
    rows = selected.movedim(-1, 1).flatten(0, 1)
    return rows.new_zeros(size, *rows.shape[1:]).index_add_(0, states.flatten(), rows).movedim(0, -1)


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """One rule tensor over all states (x, y, z): a block without a choice of states, all of it plain products."""

    child_types: str
    shape: tuple[int, int, int]
    rules: Int[Tensor, "1"]
    source: Int[Tensor, "..."] | None  # of each weight its index in `RuleTensors.values`

    # The weights are [x, y * z] where no child is a word, and may have more rows than x. Where the right child alone is
    # a word they are [x, y, z], and else [y, x, z], so that one product contracts them with a word.

    @property
    def order(self) -> tuple[int, ...]:
        """Of the modes (rule, x, y, z) in the weights."""
        return (0, 1, 2, 3) if self.child_types in (PHRASES, WORD_LAST) else (0, 2, 1, 3)

    @property
    def has_matrices(self) -> bool:
        """Whether it is contracted with each word beforehand; of two words, with the first."""
        return self.child_types != PHRASES

    def matrices(
        self, word: Float[Tensor, "words word_states"], weights: Float[Tensor, "_ _ _"]
    ) -> Float[Tensor, "words x rest"]:
        """The rules contracted with each word; `rest` are the states of the other child."""
        x, y, z = self.shape
        rest = y if self.child_types == WORD_LAST else z
        return torch.mm(word, self._by_word(weights)).unflatten(-1, (x, rest))

    def _by_word(self, weights: Tensor) -> Tensor:
        """[states of the word, x * states of the other child]"""
        return weights.flatten(0, 1).T if self.child_types == WORD_LAST else weights.flatten(1)

    def apply(
        self,
        first: Float[Tensor, "cells _ _"],
        second: Float[Tensor, "cells ..."],
        weights: Float[Tensor, "..."],
        workspace: Float[Tensor, "cells pairs"] | None = None,
    ) -> Float[Tensor, "cells x"]:
        """The parent cells; there may be a workspace for products."""
        if self.has_matrices:
            return matmul(second.unsqueeze(-2), first.transpose(-1, -2)).squeeze(-2)
        outer = None if workspace is None else workspace.view(-1, *self.shape[1:])
        # [cells, y, z]: the children's states, summed over the splits
        outer = torch.bmm(first.transpose(-1, -2), second, out=outer)
        return torch.mm(outer.flatten(1), weights.T).narrow(-1, 0, self.shape[0])

    def backward(
        self,
        first: Float[Tensor, "cells _ _"],
        second: Float[Tensor, "cells ..."],
        weights: Float[Tensor, "..."],
        gradient: Float[Tensor, "cells _"],
        into: tuple[Tensor, Tensor],
        add: AddProduct | None,
        workspace: Float[Tensor, "cells pairs"] | None = None,
    ) -> None:
        """Backwards through `apply`.

        Where a word was contracted with the rules, the first of `into` takes the gradient of what its matrices added to
        each span. A word begins spans of all widths: the gradient of its matrices is one product over them, later.
        """
        into_first, into_second = into
        if self.has_matrices:
            into_first.copy_(gradient)
            into_second.add_(torch.bmm(gradient.unsqueeze(-2), first).squeeze(-2))
            return
        assert workspace is not None
        outer = workspace.view(-1, *self.shape[1:])  # [cells, y, z]
        if add is not None:
            torch.bmm(first.transpose(-1, -2), second, out=outer)
            add(gradient.T, workspace)
        torch.mm(gradient, weights.narrow(0, 0, self.shape[0]), out=workspace)
        into_first.add_(torch.bmm(second, outer.transpose(-1, -2)))
        into_second.add_(torch.bmm(first, outer))

    def chosen(
        self, weights: Float[Tensor, "..."], rule: Int[Tensor, "choices"], x: Int[Tensor, "choices"]
    ) -> Float[Tensor, "choices y z"]:
        """The weights with some parent states."""
        if self.child_types == PHRASES:
            return weights[x].unflatten(-1, self.shape[1:])
        return weights[x] if self.child_types == WORD_LAST else weights[:, x].transpose(0, 1)

    def backward_matrices(
        self,
        word: Float[Tensor, "words word_states"],
        weights: Float[Tensor, "_ _ _"],
        gradient: Float[Tensor, "words x rest"],
    ) -> Float[Tensor, "words word_states"]:
        """Backwards through `matrices`: the gradient of the words."""
        return torch.mm(gradient.flatten(1), self._by_word(weights).T)

    def backward_weights(
        self, word: Float[Tensor, "words word_states"], gradient: Float[Tensor, "words x rest"]
    ) -> Float[Tensor, "_ _ _"]:
        """The same for the weights."""
        if self.child_types == WORD_LAST:
            return torch.mm(gradient.flatten(1).T, word).unflatten(0, gradient.shape[1:])
        return torch.mm(word.T, gradient.flatten(1)).unflatten(1, gradient.shape[1:])

    def anchored(
        self,
        outside: Float[Tensor, "cells _"],
        first: Float[Tensor, "cells _ _"],
        second: Float[Tensor, "cells ..."],
        weights: Float[Tensor, "..."],
    ) -> Float[Tensor, "1 cells splits"]:
        """The same as of a `Block`."""
        if self.has_matrices:
            return (outside * self.apply(first, second, weights)).sum(-1, keepdim=True).unsqueeze(0)
        lifted = torch.mm(outside, weights.narrow(0, 0, self.shape[0])).unflatten(-1, self.shape[1:])  # [cells, y, z]
        return (torch.bmm(first, lifted) * second).sum(-1).unsqueeze(0)
