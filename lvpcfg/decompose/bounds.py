"""How far scores can be from those of the exact grammar: Cohen & Collins 2012, Cohen, Satta & Collins 2013.

The theorems are worst cases and mostly vacuous. Certificates of sentences (`envelope.py`) are not.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

import torch
from jaxtyping import Float64
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar

VACUOUS = math.inf


def upwards(number: float, digits: int = 3) -> str:
    """A number as it is shown where it is a bound: 1.001e-9 -> 1.01e-09, never less than it is."""
    return _shown(number, digits, ROUND_CEILING)


def downwards(number: float, digits: int = 3) -> str:
    """A number as it is shown where a larger one would promise too much."""
    return _shown(number, digits, ROUND_FLOOR)


def _shown(number: float, digits: int, rounding: str) -> str:
    value = float(Context(prec=digits, rounding=rounding).create_decimal(number))
    plain = value == 0 or 1 <= value < 10**digits
    return f"{value:.{digits}g}" if plain else f"{value:.{digits - 1}e}"


def growth(gamma: float, m: int) -> float:
    """X = 2 (sqrt m + 1)(gamma + sqrt m) of CC12, Theorem 4.2; gamma is the largest ||T - T^||_F of a rule."""
    return 2 * (math.sqrt(m) + 1) * (gamma + math.sqrt(m))


def node_bound(gamma: float, m: int, depth: int) -> float:
    """CC12, Theorem 4.2: |y - y^| <= gamma m (X^d - 1)/(X - 1) at a node of depth d; leaves are of depth 0.

    It holds for stochastic parameters and while it is at most 1, and is vacuous beyond.
    """
    x = growth(gamma, m)
    bound = 0.0
    for _ in range(depth):
        bound = gamma * m + x * bound
        if bound > 1:
            return VACUOUS
    return bound


def outside_theorem(grammar: Grammar) -> str | None:
    """Why CC12's Theorem 4.2 says nothing about a grammar; None where it applies.

    Its proof needs |y| <= sqrt m and ||T||_F <= sqrt m, which hold for probabilities, and nothing but one binary rule
    between a node and its children. Unary rules multiply an error by (I - R)^{-1}, which is as large as chains of them
    are long, however small the y above them.
    """
    if len(grammar.unary_rules):
        return "it has unary rules"
    sums = grammar.row_sums()[: grammar.interminal_states]
    if grammar.binary.signed or bool((sums > 1 + 1e-5).any()):
        return "its rules are not probabilities"
    return None


def depth_limit(gamma: float, m: int) -> float:
    """CC12's d* = (log(1/gamma) + 1)/log X, up to which the bound is said to hold; it may overshoot 1 slightly."""
    return math.inf if gamma == 0 else (1 - math.log(gamma)) / math.log(growth(gamma, m))


def covered_depth(gamma: float, m: int, epsilon: float) -> float:
    """CC12: the depth of the deepest skeletal trees with |p - p^| <= epsilon for sure; 0, a word alone, is vacuous."""
    return _floor(_logarithm(gamma, m, epsilon) / math.log(growth(gamma, m)))


def covered_sentence(gamma: float, m: int, epsilon: float, symbols: int) -> float:
    """CC12: the length of the longest sentences with |mu - mu^| <= epsilon at all (a, i, j) for sure; 0 is vacuous."""
    return _floor(_logarithm(gamma, m, epsilon) / (2 * math.log(4 * symbols) + math.log(growth(gamma, m))))


def _logarithm(gamma: float, m: int, epsilon: float) -> float:
    """log(1/gamma) - log(m/epsilon); an error above 1 is outside the theorem."""
    return math.inf if gamma == 0 else math.log(min(epsilon, 1) / m) - math.log(gamma)


def _floor(number: float) -> float:
    """The largest integer up to a number, at least 0; infinity stays."""
    return number if number == math.inf else float(max(0, math.floor(number)))


def tree_sum_bound(delta: float, nu: float, m: int, length: int) -> float:
    """CSC13: the sum of |p - p^| over the trees of so many words is at most m ((1 + Delta/nu)^n - 1).

    Delta is ||T - T^||_F, nu the smallest probability of a rule. Trees of the exact grammar only: the approximation may
    have others. A bound of 1 or more is vacuous.
    """
    power = length * math.log1p(delta / nu)
    return m * math.expm1(power) if power < 700 else VACUOUS


def sufficient_error(epsilon: float, nu: float, m: int, length: int) -> float:
    """CSC13, Theorem 1: with Delta <= epsilon nu / (2 n m) the sum over trees is at most epsilon."""
    if not 0 < epsilon < 0.25:
        raise InputError(f"epsilon is {epsilon:g}: the theorem is for 0 < epsilon < 1/4.")
    return epsilon * nu / (2 * length * m)


def covered_length(delta: float, nu: float, m: int, epsilon: float) -> float:
    """CSC13: the longest sentences with a sum over trees of at most epsilon for sure; 0 is vacuous."""
    return math.inf if delta == 0 else _floor(math.log1p(epsilon / m) / math.log1p(delta / nu))


def tail_sums(exact: Factors) -> Float64[Tensor, "rank_plus_1"]:
    """CSC13, Theorem 2: the best error at each rank r is at most the sum of |lambda_i| over i > r.

    lambda_i are the weights of the terms of an exact decomposition with unit vectors, largest first.
    """
    weights = exact.u.double().norm(dim=-1) * exact.v.double().norm(dim=-1) * exact.w.double().norm(dim=-1)
    sums = weights.sort().values.cumsum(0)
    return torch.cat([sums.new_zeros(1), sums]).flip(0)
