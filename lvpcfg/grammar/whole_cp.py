"""All binary rules of a grammar as one CP form over the states of all symbols (Cohen, Satta & Collins 2013)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import BinaryRules, Reader, end_to_end, representation, similar

MOST = 1 << 28  # numbers that are written out, at the most


@representation
@dataclass(frozen=True, eq=False)
class WholeCP(BinaryRules):
    """T = sum_rho u_rho v_rho w_rho over (symbol, state) pairs.

    It may give weight to rules that are not in `rules`. Those of `rules` are what decoders score and forests hold.
    """

    u: Float[Tensor, "rank interminal_states"]
    v: Float[Tensor, "rank states"]
    w: Float[Tensor, "rank states"]

    name: ClassVar[str] = "whole_cp"
    parameters: ClassVar[tuple[str, ...]] = ("u", "v", "w")
    prunable: ClassVar[bool] = False

    @classmethod
    def from_factors(cls, factors: Factors, source: BinaryRules) -> "WholeCP":
        """`factors` in place of the numbers of `source`, whose skeletal rules are kept."""
        return cls(source.state_counts, source.interminals, source.rules, factors.u, factors.v, factors.w)

    @property
    def factors(self) -> Factors:
        return Factors(self.u, self.v, self.w)

    def for_charts(self) -> "WholeCP":
        return self

    def for_forests(self) -> RuleTensors | RuleCP:
        """Each rule in CP form by its states alone; as a tensor, where those are smaller."""
        sizes = self.states[self.rules]
        if int(sizes.prod(1).sum()) <= self.factors.rank * int(sizes.sum()):
            return self.of_rules(self.rules)
        widest = max(self.state_counts)
        u, v, w = self._blocks(self.rules, (widest, widest, widest))
        every = torch.arange(len(self.rules), device=self.rules.device)
        return RuleCP(self.state_counts, self.interminals, self.rules, self.u.new_zeros(0), every, u, v, w)

    def of_rules(self, rules: Int64[Tensor, "rules 3"]) -> RuleTensors:
        """The blocks of T for these rules, as tensors."""
        groups = (
            (group, Factors(*self._blocks(rules[group], shape)).tensor())
            for group, shape in similar(self.states[rules])
        )
        return RuleTensors(self.state_counts, self.interminals, rules, end_to_end(groups, self.states[rules], self.u))

    def written_out(self) -> RuleTensors:
        """Every a, b, c as a rule, if that is not too much for the memory."""
        numbers = self.u.shape[1] * self.v.shape[1] ** 2
        if numbers > MOST:
            raise InputError(f"one CP form of all rules, written out, has {numbers:,} numbers: more than {MOST:,}.")
        symbols = torch.arange(len(self.states), device=self.states.device)
        return self.of_rules(torch.cartesian_prod(symbols[: self.interminals], symbols, symbols))

    def tensor(self, rule: int) -> Float[Tensor, "x y z"]:
        a, b, c = self.rules[rule].tolist()
        first = self.first_state.tolist()
        u, v, w = (factor[:, first[s] : first[s + 1]] for factor, s in ((self.u, a), (self.v, b), (self.w, c)))
        return Factors(u, v, w).tensor()

    def _blocks(
        self, rules: Int64[Tensor, "rules 3"], shape: tuple[int, ...] | list[int]
    ) -> tuple[Float[Tensor, "rules rank x"], Float[Tensor, "rules rank y"], Float[Tensor, "rules rank z"]]:
        """The columns of U, V and W for the states of each rule, padded by zeros to `shape`, [x, y, z]."""
        blocks = []
        for factor, symbols, size in zip((self.u, self.v, self.w), rules.unbind(1), shape, strict=True):
            state = torch.arange(size, device=rules.device)
            inside = state < self.states[symbols].unsqueeze(1)
            column = torch.where(inside, self.first_state[symbols].unsqueeze(1) + state, factor.shape[1])
            blocks.append(torch.nn.functional.pad(factor, (0, 1))[:, column].transpose(0, 1))
        u, v, w = blocks
        return u, v, w

    def rewrites(self) -> Float64[Tensor, "interminal_states states"]:
        u, v, w = (factor.detach().double() for factor in (self.u, self.v, self.w))
        return u.T @ (v * w.sum(1, keepdim=True) + w * v.sum(1, keepdim=True))

    def row_sums(self) -> Float[Tensor, "states"]:
        sums = (self.v.sum(1) * self.w.sum(1)) @ self.u
        return torch.nn.functional.pad(sums, (0, self.v.shape[1] - len(sums)))

    def scaled(self, factor: Float[Tensor, "interminal_states"]) -> "WholeCP":
        return self.with_tensors({"u": self.u * factor})

    def transformed(
        self,
        state_counts: tuple[int, ...],
        parent: Float[Tensor, "symbols m new_m"],
        child: Float[Tensor, "symbols m new_m"],
    ) -> "WholeCP":
        sizes = [*zip(self.state_counts, state_counts, strict=True)]
        p, c = (
            torch.block_diag(*(matrix[:m, :n] for matrix, (m, n) in zip(basis, sizes, strict=True)))
            for basis in (parent, child)
        )
        p = p[: self.interminal_states, : sum(state_counts[: self.interminals])]
        return WholeCP(state_counts, self.interminals, self.rules, self.u @ p, self.v @ c, self.w @ c)

    @classmethod
    def read(
        cls, state_counts: tuple[int, ...], interminals: int, rules: Int64[Tensor, "rules 3"], reader: Reader
    ) -> "WholeCP":
        rank, states = reader.size("rank"), sum(state_counts)
        sizes = (sum(state_counts[:interminals]), states, states)
        factors = (reader.floats(name, rank * size).view(rank, size) for name, size in zip("uvw", sizes, strict=True))
        return cls(state_counts, interminals, rules, *factors)

    def sizes(self) -> dict[str, int]:
        return {"rank": self.factors.rank}
