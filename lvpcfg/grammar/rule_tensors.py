"""Binary rules as tensors: exact, and what every other representation can be written out as."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from lvpcfg.grammar.rules import BinaryRules, Reader, representation, starts_of, transformed


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
        m, (_, b, c) = self.states, self.rules.unbind(1)
        volume = m[self.rules].prod(1)
        within = torch.arange(len(self.values), device=m.device) - torch.repeat_interleave(self.starts[:-1], volume)
        first_b, first_c, m_b, m_c = (
            torch.repeat_interleave(of_rule, volume)
            for of_rule in (self.first_state[b], self.first_state[c], m[b], m[c])
        )
        return first_b + within // m_c % m_b, first_c + within % m_c

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
