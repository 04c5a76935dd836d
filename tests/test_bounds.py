"""Bounds on the error of approximate grammars: against the errors themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lvpcfg import InputError
from lvpcfg.decompose.bounds import (
    VACUOUS,
    covered_depth,
    covered_length,
    covered_sentence,
    depth_limit,
    downwards,
    growth,
    node_bound,
    sufficient_error,
    tail_sums,
    tree_sum_bound,
    upwards,
)
from lvpcfg.decompose.cover import cover
from lvpcfg.grammar.factors import Factors

# S and A are phrases, N and V words.
RULES = torch.tensor([(0, 1, 2), (0, 0, 1), (0, 2, 3), (1, 2, 3), (1, 3, 0), (1, 1, 1), (0, 3, 2)])


class Pair:
    """A stochastic L-PCFG and an approximation of its rules."""

    def __init__(self, m, scale, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.m = m
        exact = self.random(len(RULES), m, m, m)
        for a in (0, 1):
            exact[RULES[:, 0] == a] /= exact[RULES[:, 0] == a].sum((0, 2, 3)).view(1, m, 1, 1)
        self.exact, self.approximate = exact, exact + scale * (self.random(*exact.shape) - 0.5)
        self.gamma = (self.exact - self.approximate).flatten(1).norm(dim=1)

    def random(self, *shape):
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def tree(self, depth):
        """A random skeletal tree with a node of that depth: of all nodes the exact and approximate y, and the depth."""
        exact, approximate, depths = [], [], []

        def build(symbol, depth):
            if depth == 0 or symbol > 1:
                y = self.random(self.m)
                found = (y, y, 0)
            else:
                fitting = [
                    r
                    for r, (a, *pair) in enumerate(RULES.tolist())
                    if a == symbol and (min(pair) < 2 if depth > 1 else True)
                ]
                rule = fitting[int(torch.randint(len(fitting), (1,), generator=self.generator))]
                left, right = (build(child, depth - 1) for child in RULES[rule, 1:].tolist())
                found = (
                    torch.einsum("xyz,y,z->x", self.exact[rule], exact[left], exact[right]),
                    torch.einsum("xyz,y,z->x", self.approximate[rule], approximate[left], approximate[right]),
                    1 + max(depths[left], depths[right]),
                )
            for column, value in zip((exact, approximate, depths), found, strict=True):
                column.append(value)
            return len(depths) - 1

        build(0, depth)
        return exact, approximate, depths


pairs = st.builds(Pair, st.integers(1, 3), st.floats(-9, 0).map(lambda power: 10**power), st.integers(0, 1000))


def at_least(bound, error):
    return bool((bound >= error * (1 - 1e-9) - 1e-15).all())


@settings(max_examples=30, deadline=None)
@given(pairs, st.integers(0, 5))
def test_a_tree_is_within_the_theorem(pair, depth):
    exact, approximate, depths = pair.tree(depth)
    error = torch.stack([(y - z).norm() for y, z in zip(exact, approximate, strict=True)])
    theorem = torch.tensor([node_bound(float(pair.gamma.max()), pair.m, depth) for depth in depths]).double()
    assert at_least(theorem, error)


def test_the_theorem_is_not_vacuous_on_deep_trees_of_a_close_approximation():
    pair = Pair(2, 1e-7, 0)
    exact, approximate, depths = pair.tree(6)
    bound = node_bound(float(pair.gamma.max()), 2, depths[-1])
    assert depths[-1] == 6
    assert float((exact[-1] - approximate[-1]).norm()) <= bound < 0.01


@given(st.floats(0, 1e300), st.integers(1, 5))
def test_what_is_shown_of_a_bound_is_a_bound(number, digits):
    above, below = float(upwards(number, digits)), float(downwards(number, digits))
    assert below <= number <= above
    assert (above - below) <= 10 ** (1 - digits) * above * (1 + 1e-9) + 1e-323


def test_bounds_are_shown_in_a_few_digits():
    assert [upwards(x) for x in (0.0, 3e-9, 1.0001e-9, 22.801, math.inf)] == [
        "0",
        "3.00e-09",
        "1.01e-09",
        "22.9",
        "inf",
    ]
    assert [downwards(x) for x in (0.0, 1.0099e-9, 22.899)] == ["0", "1.00e-09", "22.8"]


def test_node_bound_is_the_geometric_sum_of_the_theorem():
    x = 2 * (math.sqrt(8) + 1) * (1e-9 + math.sqrt(8))
    assert growth(1e-9, 8) == pytest.approx(x)
    for depth in (0, 1, 2, 5):
        assert node_bound(1e-9, 8, depth) == pytest.approx(1e-9 * 8 * (x**depth - 1) / (x - 1))
    assert node_bound(1e-9, 8, 1) == pytest.approx(8e-9)  # one step from exact words: gamma m
    assert node_bound(0.01, 8, 50) == node_bound(0.2, 8, 1) == VACUOUS
    assert node_bound(0.0, 8, 10**5) == 0


def test_depths_and_lengths_covered():
    gamma, m, epsilon, x = 1e-12, 4, 1e-3, growth(1e-12, 4)
    assert x ** depth_limit(gamma, m) == pytest.approx(math.e / gamma)
    depth = covered_depth(gamma, m, epsilon)
    assert m * gamma * x**depth <= epsilon < m * gamma * x ** (depth + 1)
    assert node_bound(gamma, m, int(depth)) <= epsilon
    length, step = covered_sentence(gamma, m, epsilon, 3), 12**2 * x
    assert m * gamma * step**length <= epsilon < m * gamma * step ** (length + 1)
    assert (depth, length) == (7, 2)
    assert covered_depth(0.1, m, epsilon) == covered_sentence(0.1, m, epsilon, 3) == 0
    assert covered_depth(gamma, m, 1e9) == covered_depth(gamma, m, 1)
    assert covered_depth(0.0, m, epsilon) == covered_sentence(0.0, m, epsilon, 3) == depth_limit(0.0, m) == math.inf


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_sum_over_trees_is_within_its_bound(length):
    """S -> S S | x: every tree of n words has n - 1 binary rules, and n lexical ones that are exact."""
    p, near = 0.4, 0.41
    trees = math.comb(2 * (length - 1), length - 1) // length
    error = trees * abs(p ** (length - 1) - near ** (length - 1)) * 0.6**length
    bound = tree_sum_bound(near - p, p, 1, length)
    assert error <= bound == pytest.approx((near / p) ** length - 1)
    assert tree_sum_bound(near - p, p, 3, length) == pytest.approx(3 * bound)
    assert tree_sum_bound(1, 1e-6, 3, 1000) == VACUOUS


@given(st.floats(1e-3, 0.249), st.floats(1e-6, 1), st.integers(1, 100), st.integers(1, 200))
def test_first_theorem_agrees_with_the_bound_that_it_comes_from(epsilon, nu, m, length):
    delta = sufficient_error(epsilon, nu, m, length)
    assert delta == pytest.approx(epsilon * nu / (2 * length * m))
    assert tree_sum_bound(delta, nu, m, length) <= epsilon
    longest = covered_length(delta, nu, m, epsilon)
    assert length <= longest
    assert tree_sum_bound(delta, nu, m, int(longest)) <= epsilon * (1 + 1e-9)
    assert tree_sum_bound(delta, nu, m, int(longest) + 1) > epsilon * (1 - 1e-9)


def test_first_theorem_says_where_it_ends():
    with pytest.raises(InputError, match=r"epsilon is 0\.5"):
        sufficient_error(0.5, 0.1, 2, 3)
    assert covered_length(0.0, 0.1, 2, 0.1) == math.inf
    assert covered_length(0.1, 0.1, 2, 0.1) == 0


def test_tail_sums_bound_what_the_largest_terms_leave():
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    exact = cover(tensor.to_sparse())
    weights = exact.tensor().new_tensor([float(term.norm()) for term in terms(exact)])
    order, tails = weights.argsort(descending=True), tail_sums(exact)
    assert tails[-1] == 0
    assert float(tails[-2]) == pytest.approx(float(weights.min()))
    assert len(tails) == exact.rank + 1
    for rank in range(exact.rank):
        kept = Factors(exact.u[order[:rank]], exact.v[order[:rank]], exact.w[order[:rank]])
        assert float((tensor - kept.tensor()).norm()) <= float(tails[rank]) * (1 + 1e-12)
        assert float(tails[rank]) == pytest.approx(float(weights[order[rank:]].sum()))


def terms(factors):
    return torch.einsum("rx,ry,rz->rxyz", factors.u, factors.v, factors.w)
