"""All binary rules of a grammar as one CP form over the states of all symbols (Cohen, Satta & Collins 2013)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import (
    BinaryRules,
    ForestRules,
    Reader,
    end_to_end,
    representation,
    similar,
    starts_of,
    within_padding,
)

MOST = 1 << 28  # numbers that are written out, at the most
PRODUCTS = 1 << 25  # numbers that the terms of some rules add, at the most


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
    of_terms: ClassVar[tuple[str, ...]] = ("v", "w")
    structure: ClassVar[tuple[str, ...]] = (*BinaryRules.structure, "forest_places")
    of_zeros: ClassVar[tuple[str, ...]] = ("forest_terms",)
    only_listed: ClassVar[bool] = False

    @property
    def prunable(self) -> bool:  # type: ignore[override]
        """Charts over single states are as fast whole, with all rules that the terms make. With more states they are
        pruned, which is faster: forests hold the rules of `rules` alone."""
        return sum(self.state_counts) > len(self.state_counts)

    @classmethod
    def from_factors(cls, factors: Factors, source: BinaryRules) -> "WholeCP":
        """`factors` in place of the numbers of `source`, whose skeletal rules are kept."""
        return cls(source.state_counts, source.interminals, source.rules, factors.u, factors.v, factors.w)

    @property
    def factors(self) -> Factors:
        return Factors(self.u, self.v, self.w)

    @property
    def cp_rules(self) -> Int64[Tensor, "rules"]:
        """Those in CP form: all."""
        return torch.arange(len(self.rules), device=self.rules.device)

    def for_charts(self) -> "WholeCP":
        return self

    def listed(self) -> RuleTensors:
        return self.of_rules(self.rules)

    def for_forests(self) -> ForestRules:
        """Each rule in CP form by its states alone; as a tensor, where those are smaller."""
        if self.forest_places is not None:
            total, groups = self.forest_places
            values = self.u.new_zeros(total + 1)  # the last takes the padding
            # A term that is zero for a symbol of a rule adds nothing, but where zeros may change it has a derivative.
            leave_out = "forest_terms" in vars(self) or not any(x.requires_grad for x in self.tensors.values())
            terms = self.forest_terms if leave_out else [None] * len(groups)
            for (some, shape, place), of_rules in zip(groups, terms, strict=True):
                tensors = self._tensors(self.rules.index_select(0, some), shape, of_rules)
                values = values.index_copy_(0, place.flatten(), tensors.flatten())
            return ForestRules(values[:-1])
        widest = max(self.state_counts)
        u, v, w = self._blocks(self.rules, (widest, widest, widest))
        every = torch.arange(len(self.rules), device=self.rules.device)
        none = self.u.new_zeros(0)
        return ForestRules(none, RuleCP(self.state_counts, self.interminals, self.rules, none, every, u, v, w))

    @cached_property
    def forest_places(self) -> tuple[int, list[tuple[Tensor, list[int], Tensor]]] | None:
        """How the rules are written out, all T end to end; None, where that takes more numbers than CP forms.

        The number of numbers, and for groups of similar rules: which they are, the shape they are padded to, and where
        their numbers go, [some, x, y, z].
        """
        sizes = self.states[self.rules]
        starts = starts_of(sizes.prod(1))
        total = int(starts[-1])
        if total > self.factors.rank * int(sizes.sum()):
            return None
        return total, [
            (some, shape, within_padding(starts[some], sizes[some], shape, total))
            for some, shape in self._groups(self.rules)
        ]

    def _groups(self, rules: Int64[Tensor, "rules 3"]) -> Iterator[tuple[Int64[Tensor, "group"], list[int]]]:
        """As `similar`, but few enough that there is room for what all terms add to them."""
        for group, shape in similar(self.states[rules]):
            for some in group.split(max(1, PRODUCTS // max(1, self.factors.rank * math.prod(shape)))):
                yield some, shape

    @cached_property
    def forest_terms(self) -> list[tuple[Tensor, Tensor]]:
        """The terms of each of these groups, see `_terms`."""
        groups = [] if self.forest_places is None else self.forest_places[1]
        return [self._terms(self.rules[some]) for some, *_ in groups]

    def of_rules(self, rules: Int64[Tensor, "rules 3"]) -> RuleTensors:
        """The blocks of T for these rules, as tensors."""
        groups = (
            (group, self._tensors(rules[group], shape, self._terms(rules[group])))
            for group, shape in self._groups(rules)
        )
        return RuleTensors(self.state_counts, self.interminals, rules, end_to_end(groups, self.states[rules], self.u))

    def _terms(self, rules: Int64[Tensor, "rules 3"]) -> tuple[Int64[Tensor, "pairs"], Int64[Tensor, "pairs"]]:
        """All pairs of a rule and a term that has a number other than zero for each of its three symbols."""
        symbol_of_state = torch.repeat_interleave(self.states, output_size=sum(self.state_counts))
        meets = torch.ones(self.factors.rank, len(rules), dtype=torch.bool, device=rules.device)
        for factor, symbols in zip((self.u, self.v, self.w), rules.unbind(1), strict=True):
            numbers = self.states.new_zeros(len(factor), len(self.states))  # that are not zero, of each symbol
            numbers = numbers.index_add(1, symbol_of_state[: factor.shape[1]], (factor != 0).long())
            meets &= numbers[:, symbols] > 0
        rule, term = meets.T.nonzero().unbind(1)
        return rule, term

    def _tensors(
        self,
        rules: Int64[Tensor, "rules 3"],
        shape: tuple[int, ...] | list[int],
        terms: tuple[Int64[Tensor, "pairs"], Int64[Tensor, "pairs"]] | None,
    ) -> Float[Tensor, "rules x y z"]:
        """T of some rules, padded by zeros to `shape`: the sums of these terms of theirs, or of all terms."""
        if terms is None or len(terms[0]) == len(rules) * self.factors.rank:
            return Factors(*self._blocks(rules, shape)).tensor()
        rule, term = terms
        u, v, w = (factor[term.unsqueeze(1), columns[rule]] for factor, columns in self._columns(rules, shape))
        return self.u.new_zeros(len(rules), *shape).index_add(0, rule, torch.einsum("px,py,pz->pxyz", u, v, w))

    def written_out(self) -> RuleTensors:
        """Every a, b, c as a rule, if that is not too much for the memory."""
        numbers = self.u.shape[1] * self.v.shape[1] ** 2
        if numbers > MOST:
            raise InputError(f"one CP form of all rules, written out, has {numbers:,} numbers: more than {MOST:,}.")
        symbols = torch.arange(len(self.states), device=self.states.device)
        return self.of_rules(torch.cartesian_prod(symbols[: self.interminals], symbols, symbols))

    def tensor(self, rule: int) -> Float[Tensor, "x y z"]:
        return self.factors_of(rule).tensor()

    def factors_of(self, rule: int) -> Factors:
        """The columns of U, V and W for the states of one rule."""
        a, b, c = self.rules[rule].tolist()
        first = self.first_state.tolist()
        u, v, w = (factor[:, first[s] : first[s + 1]] for factor, s in ((self.u, a), (self.v, b), (self.w, c)))
        return Factors(u, v, w)

    def _blocks(
        self, rules: Int64[Tensor, "rules 3"], shape: tuple[int, ...] | list[int]
    ) -> tuple[Float[Tensor, "rules rank x"], Float[Tensor, "rules rank y"], Float[Tensor, "rules rank z"]]:
        """The columns of U, V and W for the states of each rule, padded by zeros to `shape`, [x, y, z]."""
        u, v, w = (factor[:, columns].transpose(0, 1) for factor, columns in self._columns(rules, shape))
        return u, v, w

    def _columns(
        self, rules: Int64[Tensor, "rules 3"], shape: tuple[int, ...] | list[int]
    ) -> list[tuple[Float[Tensor, "rank _"], Int64[Tensor, "rules _"]]]:
        """U, V and W, each with a column of zeros behind it, and the columns of the states of each rule."""
        found = []
        for factor, symbols, size in zip((self.u, self.v, self.w), rules.unbind(1), shape, strict=True):
            state = torch.arange(size, device=rules.device)
            inside = state < self.states[symbols].unsqueeze(1)
            columns = torch.where(inside, self.first_state[symbols].unsqueeze(1) + state, factor.shape[1])
            found.append((torch.nn.functional.pad(factor, (0, 1)), columns))
        return found

    def rewrites(self, worth: Float64[Tensor, "states"] | None = None) -> Float64[Tensor, "interminal_states states"]:
        u, v, w = (factor.detach().double() for factor in (self.u, self.v, self.w))
        worth = v.new_ones(v.shape[1]) if worth is None else worth
        return u.T @ (v * (w @ worth).unsqueeze(1) + w * (v @ worth).unsqueeze(1))

    @property
    def few_terms(self) -> Factors | None:
        return self.factors if self.factors.rank < self.interminal_states else None

    def row_sums(self) -> Float[Tensor, "states"]:
        sums = (self.v.sum(1) * self.w.sum(1)) @ self.u
        return torch.nn.functional.pad(sums, (0, self.v.shape[1] - len(sums)))

    def scaled(
        self, parent: Float[Tensor, "interminal_states"], child: Float[Tensor, "states"] | None = None
    ) -> "WholeCP":
        v, w = (self.v, self.w) if child is None else (self.v * child, self.w * child)
        return self.with_tensors({"u": self.u * parent, "v": v, "w": w}, zeros_stay=True)

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
