"""Decompositions whose terms serve rules of one kind each."""

import pytest
import torch
from test_apr import INNER, tight_grammar

from lvpcfg import read_berkeley
from lvpcfg.chart.build import kruskal
from lvpcfg.decompose.apr import apr, conditional, expected_counts
from lvpcfg.decompose.kinds import apr_by_kind, cover_by_kind, kinds_of, shares
from lvpcfg.decompose.whole import rule_tensor, spectral_radius
from lvpcfg.grammar.expectations import expected_states


def test_the_kinds_are_the_tensor():
    tensor = rule_tensor(tight_grammar())
    parts = kinds_of(tensor)
    assert len(parts) == 4
    assert torch.equal(sum(part.to_dense() for part in parts), tensor.to_dense())
    words = torch.zeros(2, 3, 3)
    words[:, 2, 2] = 1
    assert [part._nnz() for part in kinds_of(words.to_sparse())] == [2]


def test_a_cover_by_kind_is_exact_and_its_terms_are_of_one_kind():
    grammar = tight_grammar()
    factors = cover_by_kind(rule_tensor(grammar))
    assert torch.equal(factors.tensor(), rule_tensor(grammar).to_dense())
    form = kruskal(grammar.root, factors.u, factors.v, factors.w, by_kind=True)
    assert all(form.kinds)
    assert sum(form.kinds) == factors.rank
    assert form.kinds[0] == cover_by_kind(kinds_of(rule_tensor(grammar))[0]).rank
    assert cover_by_kind(torch.zeros(2, 3, 3).to_sparse()).rank == 0


def test_counts_fitted_by_kind_keep_their_margins():
    grammar, seen = tight_grammar(), []
    counts = expected_counts(grammar)
    fit = apr_by_kind(counts, 8, 2000, 1e-8, progress=lambda sweep, *_: seen.append(sweep))
    assert fit.factors.rank == 8
    assert fit.violation < 1e-8
    assert seen == sorted(seen)
    assert seen[-1] <= 2000
    model, truth = fit.factors.tensor(), counts.to_dense()
    for others in ((1, 2), (0, 2), (0, 1)):
        assert torch.allclose(model.sum(others), truth.sum(others), atol=1e-6)
    ratio = torch.where(truth > 0, truth * (truth / model).log(), 0)
    assert fit.divergence == pytest.approx(float(ratio.sum() - truth.sum() + model.sum()), abs=1e-9)
    rules = conditional(fit.factors, expected_states(grammar)[:INNER])
    assert all(kruskal(grammar.root, rules.u, rules.v, rules.w, by_kind=True).kinds)
    assert spectral_radius(rules, grammar) < 1


def test_too_few_terms_for_each_kind_are_fitted_together():
    counts = expected_counts(tight_grammar())
    assert torch.equal(apr_by_kind(counts, 3, 5).factors.tensor(), apr(counts, 3, 5).factors.tensor())


def test_shares():
    assert shares([10, 20, 30, 40], 50) == [5, 10, 15, 20]
    assert shares([1, 1, 1, 97], 10) == [1, 1, 1, 7]
    assert shares([3, 4], 9) == [3, 4]
    assert shares([5, 6, 7], 3) == [1, 1, 1]


@pytest.mark.treebank
def test_a_real_grammar(data):
    grammar = read_berkeley(data / "grammars" / "wsj_0", lexicon=False).grammar
    factors = cover_by_kind(rule_tensor(grammar))
    form = kruskal(grammar.root, factors.u, factors.v, factors.w, by_kind=True)
    assert all(found <= expected for found, expected in zip(form.kinds, (144, 178, 163, 260), strict=True))
    assert apr_by_kind(expected_counts(grammar), 260, 3).divergence < 0.3
