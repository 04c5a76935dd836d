"""Forms of a grammar: how its rules turn left and right cells into a parent cell.

For all spans of one width at once (cells = spans x sentences, as one dimension) a form supplies

    words     what the rules become once a word is filled in for one of their children
    project   a finished cell -> the lanes under which it serves as a left and as a right child
    terms     left and right lanes -> what each term brings to the parent, combined over the splits
    lift      the sum of the terms -> parent cell
    anchored  the posterior of each skeletal rule at each split (of the blocks of `TensorForm`)

and `inside.py` drives them. States are numbered interminals first, and cells wider than a word hold those
only.

`TensorForm` holds T^{a -> b c} in batches of one shape: a PCFG (all m = 1), an L-PCFG with any number of
states for each symbol, or one dense tensor (one symbol whose states are all the nonterminals). `CPForm`, in
`kruskal.py`, is the other kind of form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lvpcfg.chart.fast.algebra import SUM
from lvpcfg.chart.fast.blocks import AFTER, BEFORE, INNER, WORDS, Algebra, Block, DenseBlock


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

    def shares(self, combined: Tensor, terms: Sequence[int]) -> Sequence[Tensor]:
        """The gradients of the terms from that of what they come to together, in ordinary arithmetic."""
        return [combined] * len(terms)


AnyForm = TypeVar("AnyForm", bound=Form)


@dataclass(frozen=True, eq=False)
class TensorForm(Form):
    blocks: tuple[Block | DenseBlock, ...]  # parallel to weights
    padded: bool  # cells end in a state that is always zero

    @cached_property
    def whole(self) -> bool:
        """Whether the rules are whole tensors, without a choice of states."""
        return any(isinstance(block, DenseBlock) for block in self.blocks)

    @property
    def narrowest(self) -> int:
        """Width of the narrowest span that serves as a child otherwise than as a word filled in."""
        return 2 if self.closure is None else 1

    def terms(self, width: int) -> list[int]:
        """The blocks that make spans of this width."""
        return self._terms[min(width, len(self._terms) - 1)]

    @cached_property
    def _terms(self) -> list[list[int]]:
        """For spans of each width, up to the narrowest that all blocks but those for two words make."""
        least = {BEFORE: 1 + self.narrowest, AFTER: 1 + self.narrowest, INNER: 2 * self.narrowest}
        kinds = [*enumerate(block.kind for block in self.blocks)]
        return [
            [i for i, kind in kinds if (width == 2 if kind == WORDS else width >= least[kind])]
            for width in range(max(3, 2 * self.narrowest) + 1)
        ]

    projects, terms_lifted = False, 0
    beside: ClassVar[tuple[int, ...]] = ()

    @property
    def lanes(self) -> int:
        return self.interminals + self.padded

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
class DenseForm(TensorForm):
    """The weights are parts of one tensor, and so are their gradients: it is large, and copies of it cost time."""

    rules: Tensor  # [interminals, states, states]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.root, self.rules

    def with_tensors(self, tensors: Sequence[Tensor]) -> "DenseForm":
        root, rules = tensors
        return replace(self, root=root, rules=rules, weights=tuple(quarters(rules.detach(), self.interminals)))

    @property
    def lanes(self) -> int:
        return self.blocks[0].shape[1]

    def prepared(self, algebra: Algebra) -> "DenseForm":
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
