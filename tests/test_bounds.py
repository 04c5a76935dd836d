"""Bounds on the error of approximate grammars: against the errors themselves."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cases import RULES as CHART_RULES
from cases import make_grammar
from hypothesis import given, settings
from hypothesis import strategies as st

from lvpcfg import InputError
from lvpcfg.decompose.bounds import (
    VACUOUS,
    chart_certificate,
    closure_norms,
    covered_depth,
    covered_length,
    covered_sentence,
    depth_limit,
    downwards,
    growth,
    marginal_certificate,
    node_bound,
    sufficient_error,
    tail_sums,
    tree_certificate,
    tree_sum_bound,
    upwards,
)
from lvpcfg.decompose.cover import cover
from lvpcfg.decompose.dense import block_errors
from lvpcfg.decompose.svd import slice_svd
from lvpcfg.grammar.expectations import rewrites
from lvpcfg.grammar.factors import Factors

# S and A are phrases, N and V words.
RULES = torch.tensor([(0, 1, 2), (0, 0, 1), (0, 2, 3), (1, 2, 3), (1, 3, 0), (1, 1, 1), (0, 3, 2)])
SYMBOLS = 4


class Pair:
    """A stochastic L-PCFG and an approximation of its rules."""

    def __init__(self, m, scale, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.m = m
        exact = self.random(len(RULES), m, m, m)
        for a in (0, 1):
            exact[RULES[:, 0] == a] /= exact[RULES[:, 0] == a].sum((0, 2, 3)).view(1, m, 1, 1)
        self.exact, self.approximate = exact, exact + scale * (self.random(*exact.shape) - 0.5)
        self.gamma, self.norm = self.of_rules(self.exact - self.approximate), self.of_rules(self.approximate)
        self.root = self.random(2, m)
        self.root /= self.root.sum()
        unary = 0.3 * self.random(2 * m, 2 * m) / m
        self.closure = torch.linalg.inv(torch.eye(2 * m, dtype=torch.float64) - unary).view(2, m, 2, m)
        self.closure_norms = torch.eye(SYMBOLS, dtype=torch.float64)
        self.closure_norms[:2, :2] = torch.linalg.matrix_norm(self.closure.transpose(1, 2), ord=2)

    def random(self, *shape):
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    @staticmethod
    def of_rules(tensors):
        return tensors.flatten(1).norm(dim=1)

    def words(self, length):
        words = torch.zeros(length, SYMBOLS, self.m, dtype=torch.float64)
        words[:, 2:] = self.random(length, 2, self.m)
        return words

    def charts(self, rules, words, symbols=RULES):
        """alpha and beta of the top layer, [n, n + 1, symbols, m], as they are defined."""
        n = len(words)
        alpha = torch.zeros(n, n + 1, SYMBOLS, self.m, dtype=torch.float64)
        beta = torch.zeros_like(alpha)
        for i in range(n):
            alpha[i, i + 1] = words[i]
        spans = [(i, i + width) for width in range(2, n + 1) for i in range(n - width + 1)]
        every = list(zip(rules, symbols.tolist(), strict=True))
        for i, j in spans:
            for (t, (a, b, c)), k in itertools.product(every, range(i + 1, j)):
                alpha[i, j, a] += torch.einsum("xyz,y,z->x", t, alpha[i, k, b], alpha[k, j, c])
            alpha[i, j, :2] = torch.einsum("axby,by->ax", self.closure, alpha[i, j, :2])
        beta[0, n, :2] = self.root
        for i, j in reversed(spans):
            bottom = torch.einsum("axby,ax->by", self.closure, beta[i, j, :2])
            for (t, (a, b, c)), k in itertools.product(every, range(i + 1, j)):
                beta[i, k, b] += torch.einsum("xyz,x,z->y", t, bottom[a], alpha[k, j, c])
                beta[k, j, c] += torch.einsum("xyz,x,y->z", t, bottom[a], alpha[i, k, b])
        return alpha, beta

    def tree(self, depth):
        """A random skeletal tree with a node of that depth: rules, children, and the exact and approximate y."""
        rules, children, exact, approximate, depths = [], [], [], [], []

        def build(symbol, depth):
            if depth == 0 or symbol > 1:
                y = self.random(self.m)
                found = (-1, None, y, y, 0)
            else:
                fitting = [
                    r
                    for r, (a, *pair) in enumerate(RULES.tolist())
                    if a == symbol and (min(pair) < 2 if depth > 1 else True)
                ]
                rule = fitting[int(torch.randint(len(fitting), (1,), generator=self.generator))]
                left, right = (build(child, depth - 1) for child in RULES[rule, 1:].tolist())
                found = (
                    rule,
                    (left, right),
                    torch.einsum("xyz,y,z->x", self.exact[rule], exact[left], exact[right]),
                    torch.einsum("xyz,y,z->x", self.approximate[rule], approximate[left], approximate[right]),
                    1 + max(depths[left], depths[right]),
                )
            for column, value in zip((rules, children, exact, approximate, depths), found, strict=True):
                column.append(value)
            return len(rules) - 1

        build(0, depth)
        return rules, children, exact, approximate, depths


pairs = st.builds(Pair, st.integers(1, 3), st.floats(-9, 0).map(lambda power: 10**power), st.integers(0, 1000))


def at_least(bound, error):
    return bool((bound >= error * (1 - 1e-9) - 1e-15).all())


@settings(max_examples=30, deadline=None)
@given(pairs, st.integers(0, 5))
def test_a_tree_is_within_its_certificate_and_the_theorem(pair, depth):
    rules, children, exact, approximate, depths = pair.tree(depth)
    error = torch.stack([(y - z).norm() for y, z in zip(exact, approximate, strict=True)])
    certificate = tree_certificate(rules, children, approximate, pair.gamma, pair.norm)
    theorem = torch.tensor([node_bound(float(pair.gamma.max()), pair.m, depth) for depth in depths]).double()
    assert at_least(certificate, error)
    assert at_least(theorem, error)
    assert at_least(theorem, torch.where(theorem < VACUOUS, certificate, 0))
    assert bool(certificate.isfinite().all())


def test_the_theorem_is_not_vacuous_on_deep_trees_of_a_close_approximation():
    pair = Pair(2, 1e-7, 0)
    *_, exact, approximate, depths = pair.tree(6)
    bound = node_bound(float(pair.gamma.max()), 2, depths[-1])
    assert depths[-1] == 6
    assert float((exact[-1] - approximate[-1]).norm()) <= bound < 0.01


@settings(max_examples=12, deadline=None)
@given(pairs, st.integers(1, 4))
def test_a_chart_is_within_its_certificate(pair, length):
    words = pair.words(length)
    alpha, beta = pair.charts(pair.exact, words)
    near_alpha, near_beta = pair.charts(pair.approximate, words)
    norms = near_alpha.norm(dim=-1), near_beta.norm(dim=-1)
    errors = chart_certificate(RULES, pair.gamma, pair.norm, pair.closure_norms, *norms)
    assert at_least(errors[0], (alpha - near_alpha).norm(dim=-1))
    assert at_least(errors[1], (beta - near_beta).norm(dim=-1))
    marginal = ((alpha * beta).sum(-1) - (near_alpha * near_beta).sum(-1)).abs()
    certificate = marginal_certificate(*norms, *errors)
    assert at_least(certificate, marginal)
    assert bool(certificate.isfinite().all())


@settings(max_examples=12, deadline=None)
@given(pairs, st.floats(0.001, 0.5), st.integers(1, 4))
def test_a_chart_of_a_sum_of_terms_is_within_its_certificate(pair, error, length):
    """Terms that stand for a whole grammar also have numbers where there is no rule."""
    alpha, beta, near_alpha, near_beta, blocks = charts_of_sum(pair, error, pair.words(length))
    norms = near_alpha.norm(dim=-1), near_beta.norm(dim=-1)
    errors = chart_certificate(*blocks, pair.closure_norms, *norms)
    assert at_least(errors[0], (alpha - near_alpha).norm(dim=-1))
    assert at_least(errors[1], (beta - near_beta).norm(dim=-1))
    assert bool(errors[0].isfinite().all())


def test_the_rules_alone_would_give_no_certificate_of_a_sum_of_terms():
    """V V is no right-hand side, but T^ has numbers there."""
    pair = Pair(2, 0.0, 0)
    words = pair.words(2)
    words[:, 2] = 0
    alpha, _, near_alpha, near_beta, (rules, gamma, norm) = charts_of_sum(pair, 0.3, words)
    has_rule = (rules.unsqueeze(1) == RULES).all(2).any(1)
    assert len(RULES) == int(has_rule.sum()) < len(rules)
    norms = near_alpha.norm(dim=-1), near_beta.norm(dim=-1)
    error, _ = chart_certificate(rules[has_rule], gamma[has_rule], norm[has_rule], pair.closure_norms, *norms)
    assert not at_least(error, (alpha - near_alpha).norm(dim=-1))


def charts_of_sum(pair, error, words):
    """Exact and approximate charts of the rules as one sum of terms, and its blocks."""
    m = pair.m
    whole = torch.zeros(2, m, SYMBOLS, m, SYMBOLS, m, dtype=torch.float64)
    for tensor, (a, b, c) in zip(pair.exact, RULES.tolist(), strict=True):
        whole[a, :, b, :, c] = tensor
    tensor = whole.view(2 * m, SYMBOLS * m, SYMBOLS * m).to_sparse()
    factors = slice_svd(tensor, error).factors
    factors = Factors(factors.u, *(rows + 0.1 * error * pair.random(*rows.shape) for rows in (factors.v, factors.w)))
    near = factors.tensor().view(whole.shape)
    every = torch.cartesian_prod(torch.arange(2), torch.arange(SYMBOLS), torch.arange(SYMBOLS))
    charts = [
        chart
        for tensors in (whole, near)
        for chart in pair.charts([tensors[a, :, b, :, c] for a, b, c in every.tolist()], words, every)
    ]
    return *charts, block_errors(tensor, factors, torch.arange(SYMBOLS).repeat_interleave(m))


def test_certificates_are_exact_for_numbers_that_are_all_too_small():
    """m = 1 and T^ < T: every step of the proof is an equality, so that no term of it can be left out."""
    pair = Pair(1, 0.0, 3)
    pair.approximate = 0.8 * pair.exact
    pair.gamma, pair.norm = 0.2 * pair.of_rules(pair.exact), pair.of_rules(pair.approximate)
    rules, children, exact, approximate, _ = pair.tree(4)
    certificate = tree_certificate(rules, children, approximate, pair.gamma, pair.norm)
    assert torch.allclose(certificate, torch.cat(exact) - torch.cat(approximate), rtol=1e-9, atol=0)
    words = pair.words(4)
    (alpha, beta), (near_alpha, near_beta) = (pair.charts(t, words) for t in (pair.exact, pair.approximate))
    norms = near_alpha.norm(dim=-1), near_beta.norm(dim=-1)
    errors = chart_certificate(RULES, pair.gamma, pair.norm, pair.closure_norms, *norms)
    assert torch.allclose(errors[0], (alpha - near_alpha).squeeze(-1), rtol=1e-9, atol=1e-18)
    assert torch.allclose(errors[1], (beta - near_beta).squeeze(-1), rtol=1e-9, atol=1e-18)
    marginal = (alpha * beta - near_alpha * near_beta).squeeze(-1)
    assert torch.allclose(marginal_certificate(*norms, *errors), marginal, rtol=1e-9, atol=1e-18)
    assert float(marginal.max()) > 1e-6


@pytest.mark.parametrize("closed", [False, True])
def test_closure_norms_are_those_of_its_blocks(closed):
    grammar = replace(make_grammar((2, 3, 1, 2), CHART_RULES, unary=True, signed=True, seed=1), closed=closed)
    unary = rewrites(grammar)[1][:, :5]
    power, chains = torch.eye(5).double(), torch.eye(5).double()
    for _ in range(1 if closed else 100):
        power = power @ unary
        chains = chains + power
    norms = closure_norms(grammar)
    for a, b in itertools.product(range(2), repeat=2):
        block = chains[(slice(2), slice(2, 5))[a], (slice(2), slice(2, 5))[b]]
        assert float(norms[a, b]) == pytest.approx(float(torch.linalg.svdvals(block).max()), rel=1e-9)
    assert torch.equal(norms[2:], torch.eye(4).double()[2:])
    nothing = make_grammar((2, 3, 1, 2), CHART_RULES, unary=False, signed=True, seed=1)
    assert torch.equal(closure_norms(nothing), torch.eye(4).double())


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
