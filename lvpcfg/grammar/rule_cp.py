"""Binary rules of which some are in CP form, each with factors of its own (Cohen & Collins 2012)."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
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

    values: Float[Tensor, "numbers"]  # all other T, end to end
    cp_rules: Int64[Tensor, "cp_rules"]  # rows of `rules`, ascending
    u: Float[Tensor, "cp_rules rank widest"]  # zeros for states that a symbol does not have
    v: Float[Tensor, "cp_rules rank widest"]
    w: Float[Tensor, "cp_rules rank widest"]

    name: ClassVar[str] = "rule_cp"
    parameters: ClassVar[tuple[str, ...]] = ("values", "u", "v", "w")
    of_terms: ClassVar[tuple[str, ...]] = ("v", "w")
    structure: ClassVar[tuple[str, ...]] = (*BinaryRules.structure, "is_cp", "exact_rules", "layout", "parent_states")

    @property
    def factors(self) -> Factors:
        return Factors(self.u, self.v, self.w)

    @property
    def size(self) -> int:
        return self.values.numel() + self.factors.rank * int(self.states[self.rules[self.cp_rules]].sum())

    @cached_property
    def is_cp(self) -> Bool[Tensor, "rules"]:
        """Which rules are in CP form."""
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
        """The rules that are kept as tensors."""
        return self.exact_rules.with_tensors({"values": self.values})

    @cached_property
    def layout(
        self,
    ) -> tuple[int, Int64[Tensor, "numbers"], list[tuple[Int64[Tensor, "_"], list[int], Int64[Tensor, "_ _ _ _"]]]]:
        """How all rules are written out into one vector, all T end to end.

        Returns the length of that vector, the position in it of each number of `values`, and for each group of rules
        in CP form that are nearly of one shape: which of `cp_rules` they are, the shape [x, y, z] that they are padded
        to, and the positions of their numbers, [group, x, y, z].
        """
        sizes = self.states[self.rules]
        volume = sizes.prod(1)
        starts, total = starts_of(volume), int(volume.sum())
        exact = torch.repeat_interleave(~self.is_cp, volume).nonzero().squeeze(1)
        groups = []
        for group, shape in similar(sizes[self.cp_rules]):
            rules = self.cp_rules[group]
            groups.append((group, shape, within_padding(starts[rules], sizes[rules], shape, total)))
        return total, exact, groups

    def written_out(self) -> RuleTensors:
        total, exact, groups = self.layout
        values = self.values.new_zeros(total + 1).index_copy(0, exact, self.values)  # padding goes to the last number
        for group, (x, y, z), position in groups:
            u, v, w = (factor.index_select(0, group) for factor in (self.u, self.v, self.w))
            tensors = Factors(u[..., :x], v[..., :y], w[..., :z]).tensor()
            values = values.index_copy(0, position.flatten(), tensors.flatten())
        return RuleTensors(self.state_counts, self.interminals, self.rules, values[:-1])

    def tensor(self, rule: int) -> Float[Tensor, "x y z"]:
        if not bool(self.is_cp[rule]):
            return self.exact.tensor(int((~self.is_cp[:rule]).sum()))
        return self.factors_of(rule).tensor()

    def factors_of(self, rule: int) -> Factors:
        """Of one of `cp_rules`, over the states of its symbols."""
        row = int(self.is_cp[:rule].sum())
        x, y, z = self.states[self.rules[rule]].tolist()
        return Factors(self.u[row, :, :x], self.v[row, :, :y], self.w[row, :, :z])

    @cached_property
    def parent_states(self) -> Int64[Tensor, "cp_rules widest"]:
        """The parent (a, h) of each column of U; where the symbol has no such state, the column is zero and any do."""
        state = self.first_state[self.rules[self.cp_rules, 0]].unsqueeze(1) + torch.arange(
            self.u.shape[2], device=self.rules.device
        )
        return state.clamp_max(self.interminal_states - 1)

    def row_sums(self) -> Float[Tensor, "states"]:
        sums = (self.u * (self.v.sum(2) * self.w.sum(2)).unsqueeze(2)).sum(1)  # [some, widest]
        return self.exact.row_sums().index_add(0, self.parent_states.flatten(), sums.flatten())

    def scaled(
        self, parent: Float[Tensor, "interminal_states"], child: Float[Tensor, "states"] | None = None
    ) -> "RuleCP":
        v, w = self.v, self.w
        if child is not None:
            first, last = self.first_state[self.rules[self.cp_rules]].unsqueeze(2), sum(self.state_counts) - 1
            state = (first + torch.arange(v.shape[2], device=first.device)).clamp_max(last)  # padding is zero
            v, w = v * child[state[:, 1]].unsqueeze(1), w * child[state[:, 2]].unsqueeze(1)
        values = self.exact.scaled(parent, child).values
        u = self.u * parent[self.parent_states].unsqueeze(1)
        return self.with_tensors({"values": values, "u": u, "v": v, "w": w})

    def for_forests(self) -> ForestRules:
        return ForestRules(self.values, self)

    def economical(self) -> "RuleCP":
        """Terms that are zero are left out, and rules whose tensors are no larger than their CP forms are tensors."""
        used = self.u.abs().sum(2) > 0  # [cp_rules, rank]
        sizes, terms = self.states[self.rules[self.cp_rules]], used.sum(1)
        stays = terms * sizes.sum(1) < sizes.prod(1)
        rank = int(torch.where(stays, terms, 0).amax()) if len(terms) else 0
        stays &= rank * sizes.sum(1) < sizes.prod(1)  # all rules in CP form have one rank
        order = used.long().argsort(dim=1, descending=True, stable=True)[stays, :rank].unsqueeze(2)
        u, v, w = (
            factor[stays].gather(1, order.expand(-1, -1, factor.shape[2])) for factor in (self.u, self.v, self.w)
        )
        written, cp_rules = self.written_out(), self.cp_rules[stays]
        is_exact = torch.ones_like(self.is_cp).index_fill(0, cp_rules, False)
        values = written.values[torch.repeat_interleave(is_exact, written.starts.diff())]
        return RuleCP(self.state_counts, self.interminals, self.rules, values, cp_rules, u, v, w)

    def transformed(
        self,
        state_counts: tuple[int, ...],
        parent: Float[Tensor, "symbols m new_m"],
        child: Float[Tensor, "symbols m new_m"],
    ) -> "RuleCP":
        widest, symbols = max(state_counts), self.rules[self.cp_rules].unbind(1)
        u, v, w = (
            torch.einsum("srx,sxk->srk", factor, basis[of, : factor.shape[2], :widest])
            for factor, basis, of in zip((self.u, self.v, self.w), (parent, child, child), symbols, strict=True)
        )
        values = self.exact.transformed(state_counts, parent, child).values
        return RuleCP(state_counts, self.interminals, self.rules, values, self.cp_rules, u, v, w)

    @classmethod
    def read(
        cls, state_counts: tuple[int, ...], interminals: int, rules: Int64[Tensor, "rules 3"], reader: Reader
    ) -> "RuleCP":
        rank, widest = reader.size("rank"), max(state_counts)
        numbers = reader.indices("cp_rules")
        if not bool(((numbers >= 0) & (numbers < len(rules))).all()) or bool((numbers[1:] <= numbers[:-1]).any()):
            reader.refuse(f"the tensor 'rule_cp.cp_rules' should have numbers of its {len(rules)} rules, ascending")
        volume = torch.tensor(state_counts)[rules].prod(1).index_fill(0, numbers, 0)
        factors = (reader.floats(name, len(numbers) * rank * widest).view(len(numbers), rank, widest) for name in "uvw")
        return cls(state_counts, interminals, rules, reader.floats("values", int(volume.sum())), numbers, *factors)

    def sizes(self) -> dict[str, int]:
        return {"rank": self.factors.rank}
