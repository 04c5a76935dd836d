"""Binary rules of which some are in CP form, each for itself (Cohen & Collins 2012)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lvpcfg.grammar.kruskal import Factors
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import BinaryRules, Reader, end_to_end, padded, representation, similar


@representation
@dataclass(frozen=True, eq=False)
class RuleCP(BinaryRules):
    """T = sum_rho u_rho v_rho w_rho for the rules `cp_rules`, all of one rank; the others are tensors."""

    values: Tensor  # all other T, end to end
    cp_rules: Tensor  # [some]: numbers of rules, ascending
    u: Tensor  # [some, rank, widest]: states that a symbol does not have are zeros
    v: Tensor
    w: Tensor

    name: ClassVar[str] = "rule_cp"
    parameters: ClassVar[tuple[str, ...]] = ("values", "u", "v", "w")

    @property
    def factors(self) -> Factors:
        return Factors(self.u, self.v, self.w)

    @property
    def size(self) -> int:
        return self.values.numel() + self.factors.rank * int(self.states[self.rules[self.cp_rules]].sum())

    @cached_property
    def is_cp(self) -> Tensor:
        """[rules]"""
        none = torch.zeros(len(self.rules), dtype=torch.bool, device=self.rules.device)
        return none.index_fill(0, self.cp_rules, True)

    @cached_property
    def exact(self) -> RuleTensors:
        """The rules that are tensors."""
        return RuleTensors(self.state_counts, self.interminals, self.rules[~self.is_cp], self.values)

    def written_out(self) -> RuleTensors:
        exact = (~self.is_cp).nonzero().squeeze(1)

        def pieces() -> Iterator[tuple[Tensor, Tensor]]:
            for some, tensors in padded(self.states, self.exact.rules, self.exact.starts, self.values):
                yield exact[some], tensors
            for some, (x, y, z) in similar(self.states[self.rules[self.cp_rules]]):
                u, v, w = (factor[some] for factor in (self.u, self.v, self.w))
                yield self.cp_rules[some], Factors(u[..., :x], v[..., :y], w[..., :z]).tensor()

        values = end_to_end(pieces(), self.states[self.rules], self.values)
        return RuleTensors(self.state_counts, self.interminals, self.rules, values)

    def tensor(self, rule: int) -> Tensor:
        if not bool(self.is_cp[rule]):
            return self.exact.tensor(int((~self.is_cp[:rule]).sum()))
        place = int(self.is_cp[:rule].sum())
        x, y, z = self.states[self.rules[rule]].tolist()
        return Factors(self.u[place, :, :x], self.v[place, :, :y], self.w[place, :, :z]).tensor()

    def for_forests(self) -> "RuleCP":
        return self

    def transformed(self, state_counts: tuple[int, ...], parent: Tensor, child: Tensor) -> "RuleCP":
        a, b, c = self.rules[self.cp_rules].unbind(1)
        u, v, w = (
            torch.einsum("srx,sxk->srk", factor, basis[symbols, : factor.shape[2]])
            for factor, basis, symbols in ((self.u, parent, a), (self.v, child, b), (self.w, child, c))
        )
        values = self.exact.transformed(state_counts, parent, child).values
        return RuleCP(state_counts, self.interminals, self.rules, values, self.cp_rules, u, v, w)

    @classmethod
    def read(cls, state_counts: tuple[int, ...], interminals: int, rules: Tensor, reader: Reader) -> "RuleCP":
        rank, widest = reader.size("rank"), max(state_counts)
        numbers = reader.indices("cp_rules")
        if not bool(((numbers >= 0) & (numbers < len(rules))).all()) or bool((numbers[1:] <= numbers[:-1]).any()):
            reader.refuse(f"the tensor 'rule_cp.cp_rules' should have numbers of its {len(rules)} rules, ascending")
        volume = torch.tensor(state_counts)[rules].prod(1).index_fill(0, numbers, 0)
        factors = (reader.floats(name, len(numbers) * rank * widest).view(len(numbers), rank, widest) for name in "uvw")
        return cls(state_counts, interminals, rules, reader.floats("values", int(volume.sum())), numbers, *factors)

    def sizes(self) -> dict[str, int]:
        return {"rank": self.factors.rank}
