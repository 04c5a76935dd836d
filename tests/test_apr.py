"""CP-APR of count tensors, and the grammars that come of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import pyttb
import torch
from cases import RULES, make_grammar
from hypothesis import given, settings
from hypothesis import strategies as st

from lvpcfg import InputError, read_berkeley
from lvpcfg.decompose import apr as module
from lvpcfg.decompose.apr import apr, apr_from, conditional, expected_counts, random_start
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.grammar.expectations import expected_states, rewrites, spectral_radius
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.whole_cp import WholeCP

INNER = 5  # interminal states of the grammar below


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_counts(shape=(4, 6, 5), density=0.6, seed=0):
    random = torch.rand(*shape, generator=generator(seed), dtype=torch.float64) * 5
    return torch.where(torch.rand(shape, generator=generator(seed + 1)) < density, random, 0).to_sparse()


def tight_grammar():
    """Normalised, two interminals of 2 and 3 states, unary rules; the more phrases a rule makes the rarer it is."""
    grammar = make_grammar((2, 3, 1, 2), RULES, unary=True, signed=False, seed=5)
    phrases = (grammar.binary_rules[:, 1:] < 2).sum(1)
    sizes = grammar.binary.starts.diff()
    values = grammar.binary.values * 0.1 ** torch.repeat_interleave(phrases, sizes)
    grammar = replace(grammar, binary=replace(grammar.binary, values=values))
    sums = grammar.row_sums()
    at = [slice(begin, end) for begin, end in itertools.pairwise(grammar.first_state.tolist())]
    binary = [
        grammar.binary.tensor(rule) / sums[at[a]].view(-1, 1, 1) for rule, (a, *_) in enumerate(grammar.binary_rules)
    ]
    unary = [grammar.unary_tensor(rule) / sums[at[a]].view(-1, 1) for rule, (a, _) in enumerate(grammar.unary_rules)]
    values, unary = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (binary, unary))
    root = torch.zeros_like(grammar.root)
    root[0], root[1] = 0.7, 0.3
    return replace(grammar, root=root, binary=replace(grammar.binary, values=values), unary=unary)


@pytest.mark.parametrize(("rank", "sweeps", "tolerance"), [(3, 12, 0.0), (2, 500, 1e-3)])
def test_is_that_of_pyttb_from_the_same_start(rank, sweeps, tolerance):
    counts = random_counts()
    start = random_start(counts, rank, generator(3))
    fit = apr_from(start, counts, sweeps, tolerance)
    # pyttb takes the modes in their order; its kappa, which it also adds to zeros that should stay, is left out.
    peer = pyttb.tensor(counts.to_dense().permute(1, 2, 0).numpy().copy()).to_sptensor()
    init = pyttb.ktensor([factor.T.numpy().copy() for factor in (start.v, start.w, start.u)])
    options = {"stoptol": tolerance, "maxiters": sweeps, "kappa": 0.0, "epsDivZero": 1e-100, "printitn": 0}
    model, _, output = pyttb.cp_apr(peer, rank, init=init, **options)
    v, w, u = (torch.from_numpy(np.array(factor).T) for factor in model.normalize(2, normtype=1).factor_matrices)
    if tolerance:  # where its last sweep finds nothing to do, ours updates the parents all the same
        for _ in range(module.INNER):
            u = u * torch.einsum("xyz,ry,rz->rx", counts.to_dense() / Factors(u, v, w).tensor(), v, w)
    else:
        x = counts.values()
        assert fit.divergence == pytest.approx(float((x * x.log() - x).sum()) - output["obj"], rel=1e-9)
    assert torch.allclose(fit.factors.tensor(), Factors(u, v, w).tensor(), rtol=1e-9, atol=1e-12)
    assert fit.sweeps == len(output["kktViolations"])
    assert (fit.violation < tolerance) == (tolerance > 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.floats(0.1, 1))
def test_divergence_never_rises_and_is_that_of_the_tensors(seed, rank, density):
    counts = random_counts(density=density, seed=seed)
    start = random_start(counts, rank, generator(seed))
    start.v[start.v < 0.2] = 0  # zeros, some of which should not be there
    seen = []
    fit = apr_from(start, counts, 10, 0.0, lambda sweep, divergence, violation: seen.append(divergence))
    assert all(after <= before + 1e-12 * abs(before) for before, after in itertools.pairwise(seen) if before < 1e300)
    x, model = counts.to_dense(), fit.factors.tensor()
    expected = torch.where(x > 0, x * (x / model).log(), 0).sum() - x.sum() + model.sum()
    assert fit.divergence == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_a_zero_that_should_not_be_there_goes():
    truth = random_start(random_counts(), 1, generator(1))
    start = Factors(truth.u, truth.v.clone(), truth.w)
    start.v[0, 2] = 0
    fit = apr_from(start, truth.tensor().to_sparse(), 50, 1e-9)
    assert torch.allclose(fit.factors.tensor(), truth.tensor(), rtol=1e-6)


def test_a_zero_is_raised_no_further_than_the_divergence_falls():
    """A rare left child, nearly all of it in one of two terms that are much alike: kappa would put it in the other."""
    u = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]).double()
    v = torch.tensor([[1, 1e-6], [1, 5e-8]]).double()
    counts = Factors(u, v, torch.ones(2, 1).double()).tensor().to_sparse()
    start = Factors(u, torch.tensor([[1, 1e-6], [1, 0]]).double(), torch.ones(2, 1).double())
    seen = []
    apr_from(start, counts, 20, 0.0, lambda sweep, divergence, violation: seen.append(divergence))
    assert all(after <= before + 1e-14 for before, after in itertools.pairwise(seen))
    assert seen[-1] < seen[0] / 2


@pytest.mark.parametrize("start", ["random", "cover"])
def test_planted_factors_are_found(start):
    rows = torch.tensor([[1, 2, 0, 0, 1.0, 0], [0, 1, 3, 0, 0, 1], [2, 0, 0, 1, 0, 3]], dtype=torch.float64)
    planted = Factors(rows[:, :5], rows[[1, 2, 0]], rows[[2, 0, 1]].flip(1))
    fit = apr(planted.tensor().to_sparse(), 3, 400, 1e-9, start=start, starts=3)
    assert fit.divergence < 1e-8
    best = max(
        itertools.permutations(range(3)), key=lambda order: float((fit.factors.v[list(order)] * planted.v).sum())
    )
    found, truth = Factors(*(factor[list(best)] for factor in vars(fit.factors).values())), planted
    assert torch.allclose(found.v, truth.v / truth.v.sum(1, keepdim=True), atol=1e-4)
    assert torch.allclose(found.w, truth.w / truth.w.sum(1, keepdim=True), atol=1e-4)
    assert torch.allclose(found.tensor(), truth.tensor(), atol=1e-3)


def test_the_best_start_is_kept():
    counts, seen = random_counts(), []
    best = apr(counts, 3, 5, start="random", starts=4, progress=lambda s, d, v: seen.append(d) if s == 5 else None)
    assert len(set(seen)) == 4
    assert best.divergence == min(seen)


def test_chunks_change_nothing(monkeypatch):
    counts = random_counts((7, 9, 8), 0.3)
    start = random_start(counts, 3, generator())
    whole = apr_from(start, counts, 4, 0.0)
    monkeypatch.setattr(module, "LANES", 20)
    assert torch.allclose(apr_from(start, counts, 4, 0.0).factors.tensor(), whole.factors.tensor(), rtol=1e-12)


def test_counts_are_those_expected_in_a_tree():
    grammar = tight_grammar()
    counts, expected = expected_counts(grammar).to_dense(), expected_states(grammar)
    chains = expected[:INNER] @ rewrites(grammar)[1]
    assert torch.allclose(grammar.root + counts.sum((0, 2)) + counts.sum((0, 1)) + chains, expected)
    rules = rule_tensor(grammar).to_dense()
    assert torch.allclose(counts / counts.sum((1, 2), True), rules / rules.sum((1, 2), True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fitted_grammar_is_normalised_and_tight(dtype):
    grammar = tight_grammar().to(dtype=dtype)
    counts, expected = expected_counts(grammar), expected_states(grammar)[:INNER]
    early = conditional(apr(counts, 3, 1).factors, expected)
    fit = apr(counts, 3, 3000, 1e-8)
    late = conditional(fit.factors, expected)
    for rules in (early, late):
        sums = torch.einsum("rx,ry,rz->x", rules.u, rules.v, rules.w) + rewrites(grammar)[1].sum(1)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-6 if dtype == torch.float32 else 1e-12)
    assert fit.violation < 1e-8
    assert fit.divergence > 1e-3  # not the grammar itself
    model, truth = fit.factors.tensor(), counts.to_dense()
    for others in ((1, 2), (0, 2), (0, 1)):
        assert torch.allclose(model.sum(others), truth.sum(others), atol=1e-6)
    # What it is expected to produce is the same, so it comes to an end as the grammar does.
    binary = torch.einsum("rx,ry,rz->xyz", late.u, late.v, late.w)
    m = binary.sum(2) + binary.sum(1) + rewrites(grammar)[1]
    assert torch.allclose(grammar.root + expected.double() @ m, expected_states(grammar).double(), atol=1e-5)
    assert spectral_radius(replace(grammar, binary=WholeCP.from_factors(late, grammar.binary))) < 1


@pytest.mark.parametrize("sweeps", [1, 2000])
@pytest.mark.parametrize("lanes", [module.LANES, 20])
def test_rows_sum_to_one_at_any_tolerance(monkeypatch, sweeps, lanes):
    """Also where a sweep leaves some or all of the parents as they are."""
    monkeypatch.setattr(module, "LANES", lanes)
    grammar = tight_grammar()
    fit = apr(expected_counts(grammar), 3, sweeps, 1e-3)
    rules = conditional(fit.factors, expected_states(grammar)[:INNER])
    sums = rules.tensor().sum((1, 2)) + rewrites(grammar)[1].sum(1)
    assert torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-13)


def test_a_parent_that_is_never_met_has_no_rules():
    factors = Factors(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0]]), torch.tensor([[1.0]]))
    assert torch.equal(conditional(factors, torch.tensor([0.0, 4.0])).u, torch.tensor([[0.0, 0.75]]))


def test_clear_errors():
    with pytest.raises(InputError, match="found -1 among them"):
        apr(-torch.ones(2, 2, 2).to_sparse(), 1)
    with pytest.raises(InputError, match="found none"):
        apr(torch.zeros(2, 2, 2).to_sparse(), 1)
    with pytest.raises(InputError, match="start is 'best': expected cover or random"):
        apr(torch.ones(2, 2, 2).to_sparse(), 1, start="best")


@pytest.mark.gpu
def test_is_the_same_on_a_gpu():
    counts = random_counts()
    there, here = (apr(counts.to(device), 3, 5, 0.0).factors.tensor() for device in ("cuda", "cpu"))
    assert torch.allclose(there.cpu(), here, rtol=1e-6)


@pytest.mark.treebank
def test_a_real_grammar(data):
    grammar = read_berkeley(data / "grammars" / "wsj_0", lexicon=False).grammar
    counts = expected_counts(grammar)
    fit = apr(counts, 260, 3)
    assert fit.divergence < 0.05
    rules = conditional(fit.factors, expected_states(grammar)[: counts.shape[0]])
    exact = rule_tensor(grammar).to_dense().sum((1, 2))
    assert torch.allclose((rules.u * (rules.v.sum(1) * rules.w.sum(1)).unsqueeze(1)).sum(0), exact, atol=1e-12)
    assert spectral_radius(replace(grammar, binary=WholeCP.from_factors(rules, grammar.binary))) < 1
