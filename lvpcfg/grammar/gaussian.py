"""Rules that are mixtures of Gaussians over vectors that stand for symbols (Zhao, Zhang & Tu 2018, GM-LVeG).

    W_{a -> b c}(x, y, z) = sum_k rho_k N(x; parent Gaussian of k) N(y; left Gaussian of k) N(z; right Gaussian of k)

and likewise for unary rules, W(x, y), and the root, W(x). A tree is worth the product of its rules, integrated over the
vectors of all nodes. What is below a node of symbol a is a function of its vector x, and always a sum of the Gaussians
that a's rules have on their parent side. So these Gaussians are the states of a, its *lanes*, an inside score is
their coefficients, and no mixture grows or is pruned. What is left of the integrals are overlaps of two Gaussians,

    <N_1, N_2> = integral of N(x; m_1, s_1^2) N(x; m_2, s_2^2) dx = N(m_1; m_2, s_1^2 + s_2^2)

    T^{a -> b c} = sum_k rho_k e_k (x) v_k (x) w_k,   e_k: the lane of k,   v_k[j] = <left Gaussian of k, lane j of b>
    R^{a -> b}   = sum_k rho_k e_k (x) v_k,           pi^a[j] = sum_k rho_k <root Gaussian of k, lane j of a>

which charts and forests take as they take any other numbers. Lexical rules are coefficients of lanes as they stand. The
published system keeps the 40 or 50 largest components of a node; forests do so with `most`, to compare.

Rules have either K components each, with child Gaussians of their own and lanes that are their own or shared by the
rules of a symbol; or they are tied: the lanes of a symbol are all the Gaussians that it has, and each combination of
three has a weight. Then T = W x_2 G_b x_3 G_c, with G_b the overlaps of the lanes of b with each other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import (
    CHUNK,
    BinaryRules,
    ForestRules,
    Reader,
    representation,
    starts_of,
    transformed,
)

CHAINS = 0.99  # the spectral radius of unary rules, at the most, so that chains of them have a sum
SQUARINGS = 6


@representation
@dataclass(frozen=True, eq=False)
class GaussianRules(BinaryRules):
    """log sigma is one number for a Gaussian (spherical), or one for each dimension (diagonal)."""

    unary_rules: Int64[Tensor, "unary_rules 2"]  # those of the grammar
    mu: Float[Tensor, "states d"]  # of the lanes
    log_sigma: Float[Tensor, "states spreads"]
    child_mu: Float[Tensor, "children d"]  # of the K components of left children, right ones, unary ones, and roots
    child_log_sigma: Float[Tensor, "children spreads"]
    weight: Float[Tensor, "binary_components"]  # rho: K of each rule; tied, m_a m_b m_c
    unary_weight: Float[Tensor, "unary_components"]  # K of each; tied, m_a m_b
    root_weight: Float[Tensor, "root_components"]  # K of each symbol; tied, m_a
    lane: Int64[Tensor, "parents"]  # of each component of binary and unary rules, among those of its symbol; tied, none

    most: int = 0  # Gaussians of a node that forests keep, those with the largest coefficients; 0: all

    name: ClassVar[str] = "gaussian"
    weights: ClassVar[tuple[str, ...]] = ("weight", "unary_weight", "root_weight")
    of_reals: ClassVar[tuple[str, ...]] = ("mu", "log_sigma", "child_mu", "child_log_sigma")
    parameters: ClassVar[tuple[str, ...]] = (*of_reals, *weights)
    structure: ClassVar[tuple[str, ...]] = (
        *BinaryRules.structure,
        "tied",
        "symbol_of_state",
        "symbol_of_child",
        "lanes",
        "places_of_unary",
    )
    compressed: ClassVar[bool] = False

    @property
    def signed(self) -> bool:
        return any(bool((getattr(self, name) < 0).any()) for name in self.weights)

    @cached_property
    def tied(self) -> bool:
        """Whether each combination of lanes has a weight."""
        return not len(self.child_mu)

    @property
    def components(self) -> int:
        """K; of tied rules 0."""
        return 0 if self.tied else len(self.root_weight) // len(self.state_counts)

    def gaussians(self, states: list[int]) -> tuple[Float[Tensor, "some d"], Float[Tensor, "some d"]]:
        """mu and sigma of the lanes of some states."""
        mu = self.mu[states]
        return mu, self.log_sigma[states].exp().expand_as(mu)

    # Overlaps of Gaussians

    @cached_property
    def symbol_of_state(self) -> Int64[Tensor, "states"]:
        return torch.repeat_interleave(self.states, output_size=len(self.mu))

    @cached_property
    def symbol_of_child(self) -> Int64[Tensor, "children"]:
        """The symbol over whose vectors each child Gaussian is."""
        roots = torch.arange(len(self.states), device=self.states.device)
        symbols = torch.cat([self.rules[:, 1], self.rules[:, 2], self.unary_rules[:, 1], roots])
        return symbols.repeat_interleave(self.components)

    @cached_property
    def lanes(self) -> tuple[Int64[Tensor, "symbols widest"], Bool[Tensor, "symbols widest"]]:
        """The numbers of the lanes of each symbol among all states, and which of them there are; others are padding."""
        number = torch.arange(max(self.state_counts), device=self.states.device)
        inside = number < self.states.unsqueeze(1)
        return torch.where(inside, self.first_state[:-1].unsqueeze(1) + number, 0), inside

    @cached_property
    def overlaps(self) -> Float[Tensor, "symbols widest widest"]:
        """G of each symbol: its lanes with each other, padded by zeros."""
        lanes, inside = self.lanes
        rows = self._overlaps(self.mu, self.log_sigma, self.symbol_of_state)
        return torch.where(inside.unsqueeze(2), rows[lanes], 0)

    @cached_property
    def child_overlaps(self) -> tuple[Float[Tensor, "components widest"], ...]:
        """Child Gaussians with the lanes of their symbols: of left children, of right ones, of unary ones, of roots."""
        rows = self._overlaps(self.child_mu, self.child_log_sigma, self.symbol_of_child)
        binary, unary = len(self.weight), len(self.unary_weight)
        return rows.split([binary, binary, unary, len(rows) - 2 * binary - unary])

    def _overlaps(
        self, mu: Float[Tensor, "some d"], log_sigma: Float[Tensor, "some spreads"], symbol: Int64[Tensor, "some"]
    ) -> Float[Tensor, "some widest"]:
        """<N_i, N_j> of some Gaussians with all lanes j of their symbols, padded by zeros."""
        lanes, inside = self.lanes
        size = max(1, CHUNK // (lanes.shape[1] * mu.shape[1]))
        parts = (
            overlaps(m, s, self.mu[lanes[a]], self.log_sigma[lanes[a]])
            for m, s, a in _parts(size, mu, log_sigma, symbol)
        )
        return torch.where(inside[symbol], torch.cat([*parts, mu.new_zeros(0, lanes.shape[1])]), 0)

    # Binary rules

    def in_form(self) -> RuleTensors | RuleCP:
        """Tied rules as tensors, others in CP form."""
        about = self.state_counts, self.interminals, self.rules
        if self.tied:
            modes = (None, self.overlaps, self.overlaps)
            return RuleTensors(*about, transformed(self.states, self.states, self.rules, self.weight, modes))
        of_left, of_right, *_ = self.child_overlaps
        parents = self._parents(self.weight, self.lane[: len(self.weight)])
        shape = len(self.rules), self.components, parents.shape[1]
        factors = (factor.view(shape) for factor in (parents, of_left, of_right))
        every = torch.arange(len(self.rules), device=self.rules.device)
        return RuleCP(*about, self.mu.new_zeros(0), every, *factors)

    def _parents(
        self, weight: Float[Tensor, "components"], lane: Int64[Tensor, "components"]
    ) -> Float[Tensor, "components widest"]:
        """rho_k e_k"""
        return weight.new_zeros(len(weight), max(self.state_counts)).scatter(1, lane.unsqueeze(1), weight.unsqueeze(1))

    def written_out(self) -> RuleTensors:
        return self.in_form().written_out()

    def for_forests(self) -> ForestRules:
        return replace(self.in_form().for_forests(), most=self.most)

    # All else

    @property
    def beside(self) -> dict[str, Tensor]:
        return {"root": self.root(), "unary": self.unary()}

    def root(self) -> Float[Tensor, "states"]:
        """pi"""
        if self.tied:
            lanes, inside = self.lanes
            rows = torch.where(inside, self.root_weight[lanes], 0).unsqueeze(1) @ self.overlaps
        else:
            *_, of_root = self.child_overlaps
            shape = len(self.states), self.components
            rows = self.root_weight.view(shape).unsqueeze(1) @ of_root.unflatten(0, shape)
        return rows.squeeze(1)[self.lanes[1]]

    def unary(self) -> Float[Tensor, "numbers"]:
        """R, all end to end; where chains of unary rules would have no sum, scaled so that they have one."""
        if self.tied:
            values = transformed(self.states, self.states, self.unary_rules, self.unary_weight, (None, self.overlaps))
        else:
            place, total = self.places_of_unary
            rows = self.unary_weight.unsqueeze(1) * self.child_overlaps[2]
            values = rows.new_zeros(total + 1).index_add(0, place.flatten(), rows.flatten())[:-1]
        return values * self._bound(values.detach())

    @cached_property
    def places_of_unary(self) -> tuple[Int64[Tensor, "components widest"], int]:
        """Where components and lanes of children stand in R, all end to end, and its length, where padding goes."""
        a, b = self.unary_rules.unbind(1)
        volume = self.states[a] * self.states[b]
        starts, total = starts_of(volume), int(volume.sum())
        if self.tied:
            return volume.new_zeros(0, 0), total
        lane = self.lane[len(self.weight) :].view(len(a), self.components)
        row = starts[:-1].unsqueeze(1) + lane * self.states[b].unsqueeze(1)  # [rules, K]
        number = torch.arange(max(self.state_counts), device=a.device)
        place = torch.where(number < self.states[b].view(-1, 1, 1), row.unsqueeze(2) + number, total)
        return place.flatten(0, 1), total

    def _bound(self, values: Float[Tensor, "numbers"]) -> Float[Tensor, ""]:
        """What R is scaled by: 1 while its spectral radius is small. That is no larger than the n-th root of the norm
        of R^n, for any n and norm (Gelfand), here 2^SQUARINGS and the largest sum of a row."""
        inner = self.interminal_states
        parent, child = self.states_of(self.unary_rules, len(values))
        place = torch.where(child < inner, parent * inner + child, inner**2)
        power = values.new_zeros(inner**2 + 1).index_add(0, place, values.abs())[:-1].view(inner, inner)
        log_norm = values.new_zeros(())
        for _ in range(SQUARINGS):
            norm = power.sum(1).amax().clamp_min(torch.finfo(power.dtype).tiny)
            power = power / norm
            power, log_norm = power @ power, 2 * (log_norm + norm.log())
        radius = ((log_norm + power.sum(1).amax().log()) / 2**SQUARINGS).exp()
        return (CHAINS / radius).clamp_max(1)

    @classmethod
    def read(
        cls, state_counts: tuple[int, ...], interminals: int, rules: Int64[Tensor, "rules 3"], reader: Reader
    ) -> "GaussianRules":
        d, spreads, k = (reader.size(name) for name in ("dimension", "spreads", "components"))
        unary_rules, lane = reader.indices("unary_rules"), reader.indices("lane")
        if spreads not in (1, d) or len(unary_rules) % 2:
            reader.refuse(f"its Gaussians have {d} dimensions and {spreads} spreads: expected 1 spread or {d}")
        unary_rules = unary_rules.view(-1, 2)
        a, b = unary_rules.unbind(1)
        if not bool(((unary_rules >= 0) & (b.unsqueeze(1) < len(state_counts))).all()) or not bool(
            (a < interminals).all()
        ):
            reader.refuse("the tensor 'binary.unary_rules' should hold rules from interminals to symbols")
        m, states, symbols = torch.tensor(state_counts), sum(state_counts), len(state_counts)
        parents = m[torch.cat([rules[:, 0], a])].repeat_interleave(k)
        if len(lane) != len(parents) or bool(((lane < 0) | (lane >= parents)).any()):
            reader.refuse("the tensor 'binary.lane' should name a state of its parent for each component")
        children = (2 * len(rules) + len(a) + symbols) * k
        sizes = (len(rules) * k, len(a) * k, symbols * k)
        if not k:
            sizes = (int(m[rules].prod(1).sum()), int((m[a] * m[b]).sum()), states)
        gaussians = [
            reader.floats(name, rows * columns).view(rows, columns)
            for name, rows, columns in zip(
                cls.of_reals, (states, states, children, children), (d, spreads) * 2, strict=True
            )
        ]
        weights = [reader.floats(name, size) for name, size in zip(cls.weights, sizes, strict=True)]
        numbers = dict(zip(cls.parameters, [*gaussians, *weights], strict=True))
        return cls(state_counts, interminals, rules, unary_rules, lane=lane, most=reader.size("most"), **numbers)

    def sizes(self) -> dict[str, int]:
        d, spreads = self.mu.shape[1], self.log_sigma.shape[1]
        return {"dimension": d, "spreads": spreads, "components": self.components, "most": self.most}


def overlaps(
    mu: Float[Tensor, "some d"],
    log_sigma: Float[Tensor, "some spreads"],
    other_mu: Float[Tensor, "some others d"],
    other_log_sigma: Float[Tensor, "some others spreads"],
) -> Float[Tensor, "some others"]:
    """N(m_1; m_2, s_1^2 + s_2^2)"""
    variance = (2 * log_sigma).exp().unsqueeze(1) + (2 * other_log_sigma).exp()
    distance = (mu.unsqueeze(1) - other_mu).square()
    return (-0.5 * (distance / variance + (2 * math.pi * variance).log()).sum(2)).exp()


def _parts(size: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """So many rows at a time."""
    yield from zip(*(column.split(size) for column in columns), strict=True)
