"""The start of training Gaussian mixtures: mixtures with the same weights of trees as a grammar, or nearly so.

Gaussians with mu = 0 and sigma = 1 overlap by f^-1 = (4 pi)^(-d/2). So mixtures of K of them are a treebank PCFG
exactly, if rho = p f / K for all rules but those of the root, and p / K for these. Tensors over several states become

    rho = T f / (g_b g_c),     g_b[j] = f times the sum over the lanes of b of their overlaps with lane j

A lane then sees a mean of the states below it, by how much their Gaussians overlap. Where all lanes are the same, that
is the mean of all states, and where they are far apart, the state itself: the grammar as it was.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.estimate.gaussian import DIAGONAL, GaussianOptions
from lvpcfg.grammar.gaussian import GaussianRules
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rules import starts_of, transformed
from lvpcfg.trees.lexicon import LexicalTable


@dataclass(frozen=True)
class Shape:
    """Of the Gaussians of a grammar."""

    dimension: int
    diagonal: bool  # a sigma for each dimension, or one for all

    @staticmethod
    def of(options: GaussianOptions) -> "Shape":
        return Shape(options.dimension, options.covariance == DIAGONAL)

    @property
    def factor(self) -> float:
        """f"""
        return (4 * math.pi) ** (self.dimension / 2)

    def standard(self, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """mu = 0 and log sigma = 0 of so many Gaussians."""
        spreads = self.dimension if self.diagonal else 1
        return torch.zeros(number, self.dimension, dtype=dtype), torch.zeros(number, spreads, dtype=dtype)


def mixtures(pcfg: Grammar, shape: Shape, components: int, words: int, own: bool) -> Grammar:
    """Of K components for each rule with phrases and for the root, and `words` Gaussians for each tag.

    Each component of a rule has a lane of its `own`, or the rules of a symbol share K lanes: component k has lane k.
    """
    binary, inner = pcfg.binary.written_out(), len(pcfg.symbols.interminals)
    symbols, rules, k, f = len(pcfg.symbols), binary.rules, components, shape.factor
    parents = torch.cat([rules[:, 0], pcfg.unary_rules[:, 0]]).repeat_interleave(k)
    states = torch.tensor([k] * inner + [words] * (symbols - inner))
    lane = torch.arange(k).repeat(len(parents) // k)
    if own:
        states[:inner] = torch.bincount(parents, minlength=inner)[:inner].clamp_min(1)
        lane = _number_among_equals(parents)
    dtype = pcfg.root.dtype
    lanes = shape.standard(int(states.sum()), dtype)
    children = shape.standard((2 * len(rules) + len(pcfg.unary_rules) + symbols) * k, dtype)

    def weights(values: Tensor, factor: float) -> Tensor:
        return (values * (factor / k)).repeat_interleave(k)

    mixed = GaussianRules(
        tuple(states.tolist()),
        inner,
        rules,
        pcfg.unary_rules,
        *lanes,
        *children,
        weights(binary.values, f),
        weights(pcfg.unary, f),
        weights(pcfg.root, 1.0),
        lane,
    )
    return with_mixtures(pcfg, mixed, _in_equal_parts(pcfg.lexical, words, f / words))


def tied(grammar: Grammar, shape: Shape, mu: Float[Tensor, "states d"]) -> Grammar:
    """The states of a grammar as lanes with means `mu`."""
    binary, f = grammar.binary.written_out(), shape.factor
    _, log_sigma = shape.standard(len(mu), mu.dtype)
    none = shape.standard(0, mu.dtype)
    nothing = torch.zeros(0, dtype=torch.int64)
    mixed = GaussianRules(
        binary.state_counts,
        binary.interminals,
        binary.rules,
        grammar.unary_rules,
        mu,
        log_sigma,
        *none,
        binary.values,
        grammar.unary,
        grammar.root,
        nothing,
    )
    sums = f * mixed.overlaps.sum(2)  # g
    means = torch.diag_embed(torch.where(sums > 0, 1 / sums.where(sums > 0, torch.ones_like(sums)), 0))
    values = transformed(grammar.states, grammar.states, binary.rules, f * binary.values, (None, means, means))
    unary = transformed(grammar.states, grammar.states, grammar.unary_rules, f * grammar.unary, (None, means))
    root = grammar.root / sums[mixed.lanes[1]]
    mixed = mixed.with_tensors(mixed.tensors | {"weight": values, "unary_weight": unary, "root_weight": root})
    return with_mixtures(grammar, mixed, _in_equal_parts(grammar.lexical, 1, f))


def with_mixtures(grammar: Grammar, mixed: GaussianRules, lexical: LexicalTable) -> Grammar:
    """With all vectors that are made of Gaussians."""
    hierarchy = torch.zeros(0, len(mixed.mu), dtype=torch.int64)
    return replace(grammar, binary=mixed, lexical=lexical, hierarchy=hierarchy, root=mixed.root(), unary=mixed.unary())


def _number_among_equals(values: Int64[Tensor, "some"]) -> Int64[Tensor, "some"]:
    """How many equal ones stand before each."""
    order = values.argsort(stable=True)
    first = starts_of(torch.bincount(values))
    number = torch.arange(len(values)) - first[values[order]]
    return torch.empty_like(values).index_copy_(0, order, number)


def _in_equal_parts(table: LexicalTable, parts: int, factor: float) -> LexicalTable:
    """Each column so many times, times `factor`."""
    state = (table.state.unsqueeze(1) * parts + torch.arange(parts)).flatten()
    return replace(
        table,
        row=table.row * parts,
        state=state,
        value=(table.value * factor).repeat_interleave(parts),
        backoff=(table.backoff * factor).repeat_interleave(parts, 1),
        widest=table.widest * parts,
    )


def places(
    states: Int64[Tensor, "symbols"], dimension: int, apart: float, dtype: torch.dtype
) -> Float[Tensor, "states d"]:
    """Means of the lanes of each symbol on a grid around 0, so far from their neighbours."""
    symbol = torch.repeat_interleave(states)
    number = torch.arange(len(symbol)) - starts_of(states)[symbol]
    side = states.double().pow(1 / dimension).sub(1e-9).ceil().long()[symbol]  # of the cube that holds all lanes
    columns = []
    for _ in range(dimension):
        columns.append(number % side)
        number = number // side
    grid = torch.stack(columns, 1).to(dtype)
    sums, sizes = torch.zeros(len(states), dimension, dtype=dtype).index_add(0, symbol, grid), states.unsqueeze(1)
    return apart * (grid - (sums / sizes)[symbol])


def near(places: Float[Tensor, "some d"], noise: float, generator: torch.Generator) -> Float[Tensor, "some d"]:
    """Up to the noise away from some places."""
    return places + noise * (2 * torch.rand(places.shape, generator=generator, dtype=places.dtype) - 1)
