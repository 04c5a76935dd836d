"""A latent-variable PCFG with its own number of states for each symbol; a PCFG is m = 1.

    pi^a             [m_a]             root
    T^{a -> b c}     [m_a, m_b, m_c]   binary
    R^{a -> b}       [m_a, m_b]        unary
    Q^{a -> x}       [m_a]             lexical

For every (a, h): sum of t over rules and states, plus r, plus sum of q over x, is 1; sum of pi is 1.
The blocks of pi and R differ in shape, so they are kept end to end in one vector each. T is kept by a
representation of binary rules, `BinaryRules`.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.grammar.rules import BinaryRules, starts_of
from lvpcfg.trees.lexicon import LexicalTable
from lvpcfg.trees.treebank import Symbols


@dataclass(frozen=True, eq=False)
class Grammar:
    symbols: Symbols
    binary: BinaryRules  # all T, and the numbers of states
    unary_rules: Int64[Tensor, "rules 2"]  # a, b
    unary: Float[Tensor, "numbers"]  # m_a m_b of each rule: all R, end to end, each in row-major order
    root: Float[Tensor, "states"]  # all pi^a, end to end
    lexical: LexicalTable  # Q over the states of the preterminals
    # The states that each state came from by splits, numbered within its symbol, the coarsest level first.
    hierarchy: Int64[Tensor, "levels _"] = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    closed: bool = False  # R holds chains of unary rules from end to end, one or none for a span, not single rules

    @property
    def states(self) -> Int64[Tensor, "symbols"]:
        """m_a of each symbol."""
        return self.binary.states

    @property
    def binary_rules(self) -> Int64[Tensor, "rules 3"]:
        """a, b, c"""
        return self.binary.rules

    @property
    def first_state(self) -> Int64[Tensor, "symbols_plus_1"]:
        """The number of the first state of each symbol, among the states of all symbols; then how many these are."""
        return self.binary.first_state

    @property
    def interminal_states(self) -> int:
        """How many there are; they are numbered first."""
        return self.binary.interminal_states

    @cached_property
    def symbol_of_state(self) -> Int64[Tensor, "states"]:
        """The symbol that each state belongs to."""
        return torch.repeat_interleave(self.states, output_size=len(self.root))

    @cached_property
    def unary_starts(self) -> Int64[Tensor, "rules_plus_1"]:
        """Where each R begins in `unary`, and the end of the last."""
        return starts_of(self.states[self.unary_rules].prod(1))

    def unary_tensor(self, rule: int) -> Float[Tensor, "x y"]:
        """R of one rule, [m_a, m_b], a view of `unary`."""
        begin, end = self.unary_starts[rule : rule + 2].tolist()
        return self.unary[begin:end].view(*self.states[self.unary_rules[rule]].tolist())

    def unary_states(self) -> tuple[Int64[Tensor, "numbers"], Int64[Tensor, "numbers"]]:
        """The parent state and the child state of each number of `unary`."""
        return self.binary.states_of(self.unary_rules, len(self.unary))

    def unary_matrix(self) -> Float[Tensor, "interminal_states states"]:
        """R of all unary rules as one matrix."""
        inner, states = self.interminal_states, len(self.root)
        parent, child = self.unary_states()
        return (
            self.unary.new_zeros(inner * states).index_add(0, parent * states + child, self.unary).view(inner, states)
        )

    def written_out(self) -> "Grammar":
        """The same grammar with every T as a tensor."""
        return replace(self, binary=self.binary.written_out())

    @property
    def signed(self) -> bool:
        """Whether some parameter is below zero."""
        tensors = (self.root, self.unary, self.lexical.value, self.lexical.backoff)
        return self.binary.signed or any(bool((tensor < 0).any()) for tensor in tensors)

    def row_sums(self) -> Float[Tensor, "states"]:
        """The sum of everything that each (a, h) rewrites to; 1 in a normalised grammar."""
        return self.binary.row_sums() + self.row_sums_without_binary()

    def row_sums_without_binary(self) -> Float[Tensor, "states"]:
        """The sum of the unary rules and words alone that each (a, h) rewrites to."""
        unary = self.unary.new_zeros(self.interminal_states).index_add(0, self.unary_states()[0], self.unary)
        return torch.cat([unary, self.lexical.column_sums()])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Grammar":
        """The same grammar on another device or in another floating-point type."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return replace(
            self,
            binary=self.binary.to(device, dtype),
            unary_rules=moved(self.unary_rules),
            root=moved(self.root),
            unary=moved(self.unary),
            hierarchy=moved(self.hierarchy),
            lexical=self.lexical.to(device, dtype),
        )
