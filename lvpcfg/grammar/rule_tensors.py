"""Binary rules as tensors: exact, and what every other representation can be written out as."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

from lvpcfg.grammar.rules import BinaryRules, Reader, representation, starts_of, transformed

DENSE = 8  # numbers for each one that is not zero: with fewer, products of whole tensors are faster than lists


@representation
@dataclass(frozen=True, eq=False)
class RuleTensors(BinaryRules):
    """All T end to end in one vector, since they differ in shape."""

    values: Float[Tensor, "numbers"]  # m_a m_b m_c of each rule: T in row-major order

    name: ClassVar[str] = "tensors"
    parameters: ClassVar[tuple[str, ...]] = ("values",)
    structure: ClassVar[tuple[str, ...]] = (*BinaryRules.structure, "starts", "parent_states")
    compressed: ClassVar[bool] = False

    @cached_property
    def starts(self) -> Int64[Tensor, "rules_plus_1"]:
        """Where each T begins in `values`, and the end of the last."""
        return starts_of(self.states[self.rules].prod(1))

    def written_out(self) -> "RuleTensors":
        return self

    def tensor(self, rule: int) -> Float[Tensor, "x y z"]:
        """A view of `values`."""
        begin, end = self.starts[rule : rule + 2].tolist()
        return self.values[begin:end].view(*self.states[self.rules[rule]].tolist())

    @cached_property
    def parent_states(self) -> Int32[Tensor, "numbers"]:
        """The parent (a, h) that each number of `values` is a probability of."""
        m, (parent, left, right) = self.states, self.rules.unbind(1)
        state = torch.arange(max(self.state_counts), dtype=torch.int32, device=m.device)
        rows = self.first_state[parent].int().unsqueeze(1) + state  # of each rule, for each state of its parent
        lengths = torch.where(state < m[parent].unsqueeze(1), (m[left] * m[right]).unsqueeze(1), 0)
        return torch.repeat_interleave(rows.flatten(), lengths.flatten(), output_size=len(self.values))

    def row_sums(self) -> Float[Tensor, "states"]:
        return self.values.new_zeros(sum(self.state_counts)).index_add(0, self.parent_states, self.values)

    def scaled(
        self, parent: Float[Tensor, "interminal_states"], child: Float[Tensor, "states"] | None = None
    ) -> "RuleTensors":
        values = self.values * parent[self.parent_states]
        if child is not None:
            left, right = self.child_states()
            values = values * child[left] * child[right]
        return self.with_tensors({"values": values})

    def child_states(self) -> tuple[Int64[Tensor, "numbers"], Int64[Tensor, "numbers"]]:
        """The states of the left and of the right child that each number of `values` is of."""
        rule = torch.repeat_interleave(self.starts.diff(), output_size=len(self.values))
        return self._children_at(torch.arange(len(self.values), device=rule.device), rule)

    def _children_at(
        self, number: Int64[Tensor, "some"], rule: Int64[Tensor, "some"]
    ) -> tuple[Int64[Tensor, "some"], Int64[Tensor, "some"]]:
        """The same for some numbers of the rules they belong to."""
        _, left, right = self.rules.unbind(1)
        within, m_b, m_c = number - self.starts[rule], self.states[left][rule], self.states[right][rule]
        return self.first_state[left][rule] + within // m_c % m_b, self.first_state[right][rule] + within % m_c

    def entries(
        self,
    ) -> tuple[Float[Tensor, "entries"], Int64[Tensor, "entries"], tuple[Int64[Tensor, "entries"], ...]]:
        """The numbers other than zero, the rule of each, and its states: parent, left and right child.

        After some cycles of split-merge they are few: one in fifty of a grammar of 791 states.
        """
        number = self.values.nonzero().squeeze(1)
        rule = torch.searchsorted(self.starts, number, right=True) - 1
        a, b, c = self.rules.unbind(1)
        parent = self.first_state[a][rule] + (number - self.starts[rule]) // (self.states[b] * self.states[c])[rule]
        return self.values[number], rule, (parent, *self._children_at(number, rule))

    def rewrites(self, worth: Float64[Tensor, "states"] | None = None) -> Float64[Tensor, "interminal_states states"]:
        if DENSE * int(self.values.count_nonzero()) > len(self.values):
            return super().rewrites(worth)
        inner, states = self.interminal_states, sum(self.state_counts)
        values, _, (parent, left, right) = self.entries()
        values = values.double()
        total = values.new_zeros(inner * states)
        for child, sibling in ((left, right), (right, left)):
            total = total.index_add(0, parent * states + child, values if worth is None else values * worth[sibling])
        return total.view(inner, states)

    def projected(
        self, state_counts: tuple[int, ...], into: Int64[Tensor, "states"], share: Float[Tensor, "states"]
    ) -> "RuleTensors":
        """Over coarser states: each number, times the `share` of its parent, goes `into` that of the coarser ones."""
        coarse = RuleTensors(state_counts, self.interminals, self.rules, self.values[:0])
        values, rule, (parent, left, right) = self.entries()
        _, b, c = self.rules.unbind(1)
        x, y, z = (into[state] for state in (parent, left, right))
        place = coarse.starts[rule] + (x * coarse.states[b][rule] + y) * coarse.states[c][rule] + z
        summed = values.new_zeros(int(coarse.starts[-1])).index_add(0, place, values * share[parent].to(values.dtype))
        return coarse.with_tensors({"values": summed})

    def transformed(
        self,
        state_counts: tuple[int, ...],
        parent: Float[Tensor, "symbols m new_m"],
        child: Float[Tensor, "symbols m new_m"],
    ) -> "RuleTensors":
        states = torch.tensor(state_counts, device=self.rules.device)
        values = transformed(self.states, states, self.rules, self.values, (parent, child, child))
        return RuleTensors(state_counts, self.interminals, self.rules, values)

    @classmethod
    def read(
        cls, state_counts: tuple[int, ...], interminals: int, rules: Int64[Tensor, "rules 3"], reader: Reader
    ) -> "RuleTensors":
        volume = torch.tensor(state_counts)[rules].prod(1)
        return cls(state_counts, interminals, rules, reader.floats("values", int(volume.sum())))
