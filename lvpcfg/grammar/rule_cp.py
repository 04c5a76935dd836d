"""Binary rules of which some are in CP form, each for itself (Cohen & Collins 2012)."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import (
    BinaryRules,
    ForestRules,
    Reader,
    representation,
    similar,
    starts_of,
    within_padding,
)


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
    structure: ClassVar[tuple[str, ...]] = (*BinaryRules.structure, "is_cp", "exact_rules", "places", "parent_states")

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
    def exact_rules(self) -> RuleTensors:
        """The rules that are tensors, whatever their numbers."""
        exact = RuleTensors(self.state_counts, self.interminals, self.rules[~self.is_cp], self.values.detach())
        for name in exact.structure:  # found out now, and kept by `with_tensors`
            getattr(exact, name)
        return exact

    @property
    def exact(self) -> RuleTensors:
        """The rules that are tensors."""
        return self.exact_rules.with_tensors({"values": self.values})

    @cached_property
    def places(self) -> tuple[int, Tensor, list[tuple[Tensor, list[int], Tensor]]]:
        """How rules are written out, all T end to end.

        The number of numbers, where those of `values` go, and for groups of similar rules in CP form: which they are,
        the shape they are padded to, and where their numbers go, [some, x, y, z].
        """
        sizes = self.states[self.rules]
        volume = sizes.prod(1)
        starts, total = starts_of(volume), int(volume.sum())
        exact = torch.repeat_interleave(~self.is_cp, volume).nonzero().squeeze(1)
        groups = []
        for some, shape in similar(sizes[self.cp_rules]):
            rules = self.cp_rules[some]
            groups.append((some, shape, within_padding(starts[rules], sizes[rules], shape, total)))
        return total, exact, groups

    def written_out(self) -> RuleTensors:
        total, exact, groups = self.places
        values = self.values.new_zeros(total + 1).index_copy(0, exact, self.values)  # the last takes the padding
        for some, (x, y, z), place in groups:
            u, v, w = (factor.index_select(0, some) for factor in (self.u, self.v, self.w))
            tensors = Factors(u[..., :x], v[..., :y], w[..., :z]).tensor()
            values = values.index_copy(0, place.flatten(), tensors.flatten())
        return RuleTensors(self.state_counts, self.interminals, self.rules, values[:-1])

    def tensor(self, rule: int) -> Tensor:
        if not bool(self.is_cp[rule]):
            return self.exact.tensor(int((~self.is_cp[:rule]).sum()))
        place = int(self.is_cp[:rule].sum())
        x, y, z = self.states[self.rules[rule]].tolist()
        return Factors(self.u[place, :, :x], self.v[place, :, :y], self.w[place, :, :z]).tensor()

    @cached_property
    def parent_states(self) -> Tensor:
        """[some, widest]: the (a, h) that each column of U belongs to; those that a symbol lacks have some other."""
        state = self.first_state[self.rules[self.cp_rules, 0]].unsqueeze(1) + torch.arange(
            self.u.shape[2], device=self.rules.device
        )
        return state.clamp_max(self.interminal_states - 1)

    def row_sums(self) -> Tensor:
        sums = (self.u * (self.v.sum(2) * self.w.sum(2)).unsqueeze(2)).sum(1)  # [some, widest]
        return self.exact.row_sums().index_add(0, self.parent_states.flatten(), sums.flatten())

    def scaled(self, factor: Tensor) -> "RuleCP":
        return self.with_tensors(
            {"values": self.exact.scaled(factor).values, "u": self.u * factor[self.parent_states].unsqueeze(1)}
        )

    def for_forests(self) -> ForestRules:
        return ForestRules(self.values, self)

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
