"""Forms of a grammar: how its rules turn left and right cells into a parent cell, in ordinary numbers.

For all spans of one width at once (cells = spans x sentences, as one dimension) a form supplies

    words     what rules become when they are contracted with a word for one of their children
    project   a finished cell -> the lanes under which it serves as a left and as a right child
    terms     left and right lanes -> what each block of rules adds to the parent, combined over the splits
    lift      the sum of the terms -> parent cell
    anchored  the posterior of each skeletal rule at each split (of the blocks of `TensorForm`)

and `inside.py` drives them. States are numbered interminals first, and cells wider than a word hold those
only.

`TensorForm` holds T^{a -> b c} in batches of one shape: a PCFG (all m = 1), an L-PCFG with any number of
states for each symbol, or one dense tensor (one symbol whose states are all the nonterminals). `CPForm`, in
`cp.py`, is the other form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, WORDS, Block, DenseBlock
from lvpcfg.grammar.rules import BinaryRules


@dataclass(frozen=True, eq=False)
class Form:
    """What all forms have."""

    root: Float[Tensor, "states"]
    closure: Float[Tensor, "inner inner"] | None  # from bottom to top states: no, one or more unary rules
    promotion: Float[Tensor, "word_states inner"] | None  # one or more unary rules over a word
    weights: tuple[Float[Tensor, "..."], ...]
    interminals: int  # number of their states, `inner`

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

    def to(self: "AnyForm", dtype: torch.dtype) -> "AnyForm":
        return self.with_tensors([tensor.to(dtype) for tensor in self.tensors])

    @property
    def terms_of_derivations(self) -> int:
        """How many terms a derivation chooses from at each rule; 0 where it has states alone."""
        return 0

    @property
    def scored_rules(self) -> "TensorForm | None":
        """The skeletal rules that decoders score, over the same states; None where they are not known."""
        return None

    @property
    def unsorted(self: "AnyForm") -> "AnyForm":
        """With terms that all serve any children."""
        return self

    @property
    def for_log_z(self: "AnyForm") -> "AnyForm":
        """What is enough for log Z alone."""
        return self

    def with_binary(self: "AnyForm", binary: BinaryRules) -> "AnyForm":
        """The same rules with the numbers of `binary`, differentiable by them."""
        raise NotImplementedError

    def prepared(self: "AnyForm") -> "AnyForm":
        """In the layout that charts are fastest with."""
        return self

    def joined(self, weights: list[Tensor | None]) -> list[Tensor | None]:
        """From the gradients of the weights of the prepared form to those of the tensors it was prepared from."""
        return weights

    def shares(self, combined: Tensor, terms: Sequence[int]) -> Sequence[Tensor]:
        """The gradient of each term from that of their sum."""
        return [combined] * len(terms)


AnyForm = TypeVar("AnyForm", bound=Form)


@dataclass(frozen=True, eq=False)
class TensorForm(Form):
    blocks: tuple[Block | DenseBlock, ...]  # parallel to weights
    padded: bool  # cells end in a state that is always zero

    projects: ClassVar[bool] = False
    lifted_terms: ClassVar[int] = 0
    rest_lanes: ClassVar[tuple[int, ...]] = ()

    @property
    def scored_rules(self) -> "TensorForm":
        return self

    def with_binary(self, binary: BinaryRules) -> "TensorForm":
        values = binary.written_out().values
        flat = torch.cat([values, values.new_zeros(1)])  # the last for padding
        sources = [block.source for block in self.blocks if block.source is not None]
        weights = (flat.index_select(0, source.flatten()).view(source.shape) for source in sources)
        return replace(self, weights=tuple(weights))

    @cached_property
    def dense(self) -> bool:
        """Whether the rules are tensors over all states."""
        return any(isinstance(block, DenseBlock) for block in self.blocks)

    @property
    def narrowest(self) -> int:
        """Width of the narrowest span that is a child as a phrase: of 1 word, where there are unary rules."""
        return 2 if self.closure is None else 1

    def terms(self, width: int) -> list[int]:
        """The blocks whose rules have spans of this width as parents."""
        return self._terms[min(width, len(self._terms) - 1)]

    @cached_property
    def _terms(self) -> list[list[int]]:
        """By width, up to the first from which on it is the same for all widths."""
        least = {WORD_FIRST: 1 + self.narrowest, WORD_LAST: 1 + self.narrowest, PHRASES: 2 * self.narrowest}
        numbered = [*enumerate(block.child_types for block in self.blocks)]
        return [
            [i for i, types in numbered if (width == 2 if types == WORDS else width >= least[types])]
            for width in range(max(3, 2 * self.narrowest) + 1)
        ]

    @property
    def lanes(self) -> int:
        return self.interminals + self.padded

    def matrices_of(self, term: int) -> int:
        """The number of a block among those that are contracted with words."""
        return self._with_matrices.index(term)

    @cached_property
    def _with_matrices(self) -> list[int]:
        return [term for term, block in enumerate(self.blocks) if block.has_matrices]

    @cached_property
    def matrix_size(self) -> int:
        """Numbers in the matrices of one word."""
        blocks = [self.blocks[term] for term in self._with_matrices]
        return sum(
            len(block.rules) * block.shape[0] * block.shape[1 if block.child_types == WORD_LAST else 2]
            for block in blocks
        )

    def project(self, top: Float[Tensor, "cells inner"]) -> tuple[Float[Tensor, "1 cells lanes"], list[Tensor]]:
        """The states, which serve on both sides."""
        return self.pad(top).unsqueeze(-3), []

    def words(
        self, word: Float[Tensor, "words word_states"], top: Float[Tensor, "words inner"]
    ) -> tuple[Float[Tensor, "1 words lanes"] | None, list[Float[Tensor, "..."]]]:
        """The lanes of single words, and the matrices that they make of the rules."""
        padded = self.pad(word)
        matrices = [self.blocks[term].matrices(padded, self.weights[term]) for term in self._with_matrices]
        return None if self.closure is None else self.project(top)[0], matrices

    def pad(self, cells: Float[Tensor, "*cells states"]) -> Float[Tensor, "*cells padded"]:
        return torch.nn.functional.pad(cells, (0, 1)) if self.padded else cells


@dataclass(frozen=True, eq=False)
class DenseForm(TensorForm):
    """The weights are parts of one tensor, and so are their gradients: it is large, and copies of it cost time."""

    rules: Float[Tensor, "inner states states"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.root, self.rules

    def with_tensors(self, tensors: Sequence[Tensor]) -> "DenseForm":
        root, rules = tensors
        return replace(self, root=root, rules=rules, weights=tuple(by_child_types(rules.detach(), self.interminals)))

    @property
    def lanes(self) -> int:
        return self.blocks[0].shape[1]

    def prepared(self) -> "DenseForm":
        """With states of phrases that are always 0: products are slow where their number is no multiple of 8."""
        phrases, word_last, word_first, words = self.weights
        block, *blocks = self.blocks
        size = -(-self.interminals // 8) * 8
        block = replace(block, shape=(self.interminals, size, size))
        phrases = torch.nn.functional.pad(phrases, (0, size - self.interminals) * 3)
        word_first, words = (part.transpose(-2, -3).contiguous() for part in (word_first, words))
        weights = (phrases.flatten(-2), word_last.contiguous(), word_first, words)
        return replace(self, weights=weights, blocks=(block, *blocks))

    def joined(self, weights: list[Tensor | None]) -> list[Tensor | None]:
        rules = torch.empty_like(self.rules)
        parts = by_child_types(rules, self.interminals)
        parts[2:] = [part.transpose(-3, -2) for part in parts[2:]]
        for gradient, part in zip(weights, parts, strict=True):
            if gradient is None:
                part.zero_()
                continue
            if gradient.dim() < part.dim():
                gradient = gradient.unflatten(-1, self.blocks[0].shape[1:])
            part.copy_(gradient.narrow(-2, 0, part.shape[-2]).narrow(-1, 0, part.shape[-1]))
        return [rules]


def by_child_types(rules: Float[Tensor, "inner states states"], interminals: int) -> list[Float[Tensor, "inner _ _"]]:
    """The rules for two phrases; a phrase and a word; a word and a phrase; two words."""
    sizes = [interminals, rules.shape[-1] - interminals]
    return [part for half in rules.split(sizes, -2) for part in half.split(sizes, -1)]
