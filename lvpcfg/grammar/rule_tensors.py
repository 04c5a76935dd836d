"""Binary rules as tensors: exact, and what every other representation can be written out as."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.grammar.rules import BinaryRules, Reader, end_to_end, padded, representation, starts_of


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
    def parent_states(self) -> Int64[Tensor, "numbers"]:
        """The parent (a, h) that each number of `values` is a probability of."""
        sizes = self.states[self.rules].prod(1)
        rule = torch.repeat_interleave(sizes, output_size=len(self.values))
        within = torch.arange(len(self.values), device=rule.device) - self.starts[rule]
        parents = self.rules[:, 0]
        return self.first_state[parents[rule]] + within // (sizes // self.states[parents])[rule]

    def row_sums(self) -> Float[Tensor, "states"]:
        return self.values.new_zeros(sum(self.state_counts)).index_add(0, self.parent_states, self.values)

    def scaled(self, factor: Float[Tensor, "interminal_states"]) -> "RuleTensors":
        return self.with_tensors({"values": self.values * factor[self.parent_states]})

    def transformed(
        self,
        state_counts: tuple[int, ...],
        parent: Float[Tensor, "symbols m new_m"],
        child: Float[Tensor, "symbols m new_m"],
    ) -> "RuleTensors":
        def groups() -> Iterator[tuple[Tensor, Tensor]]:
            for group, tensors in padded(self.states, self.rules, self.starts, self.values):
                for basis, symbols in zip((parent, child, child), self.rules[group].unbind(1), strict=True):
                    tensors = torch.einsum("rx...,rxk->r...k", tensors, basis[symbols, : tensors.shape[1]])
                yield group, tensors

        new = RuleTensors(state_counts, self.interminals, self.rules, self.values)
        return replace(new, values=end_to_end(groups(), new.states[self.rules], self.values))

    @classmethod
    def read(
        cls, state_counts: tuple[int, ...], interminals: int, rules: Int64[Tensor, "rules 3"], reader: Reader
    ) -> "RuleTensors":
        volume = torch.tensor(state_counts)[rules].prod(1)
        return cls(state_counts, interminals, rules, reader.floats("values", int(volume.sum())))
