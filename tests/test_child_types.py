"""CP forms of all rules whose terms are for children of one type each."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_apr import INNER, tight_grammar

from lvpcfg import read_berkeley
from lvpcfg.chart.fast.build import cp_form, tensor_form
from lvpcfg.chart.fast.marginals import marginals
from lvpcfg.decompose.apr import apr, conditional, expected_counts
from lvpcfg.decompose.child_types import apr_by_child_types, cover_by_child_types, parts_by_child_types, shares
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.grammar.expectations import expected_states, spectral_radius
from lvpcfg.grammar.whole_cp import WholeCP


def test_the_parts_by_child_types_add_up_to_the_tensor():
    tensor = rule_tensor(tight_grammar())
    parts = parts_by_child_types(tensor)
    assert len(parts) == 4
    assert torch.equal(sum(part.to_dense() for part in parts), tensor.to_dense())
    words = torch.zeros(2, 3, 3)
    words[:, 2, 2] = 1
    assert [part._nnz() for part in parts_by_child_types(words.to_sparse())] == [0, 0, 0, 2]


def test_a_cover_by_child_types_parses_as_the_rules_do():
    grammar = tight_grammar()
    factors = cover_by_child_types(rule_tensor(grammar))
    form = cp_form(grammar.root, factors.u, factors.v, factors.w, grammar, sort_terms=True)
    assert form.term_counts == (12, 4, 0, 5)  # fibres of phrases cover all rules with a word on the left
    leaf = torch.rand(6, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, rules = (marginals(one, leaf) for one in (form, tensor_form(grammar)))
    assert torch.allclose(ours.log_z, rules.log_z, rtol=1e-12)
    assert torch.allclose(ours.top, rules.top, atol=1e-12)
    assert torch.allclose(ours.bottom, rules.bottom, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.floats(0, 1), st.integers(0, 1000))
def test_a_cover_by_child_types_is_exact(inner, outer, density, seed):
    """Also with values of 1, which the factors of a fibre have themselves; and with nothing."""
    generator = torch.Generator().manual_seed(seed)
    shape = (inner, inner + outer, inner + outer)
    values = torch.randint(-2, 3, shape, generator=generator) / 2
    tensor = torch.where(torch.rand(shape, generator=generator) < density, values, 0)
    assert torch.equal(cover_by_child_types(tensor.to_sparse()).tensor(), tensor)


def test_counts_fitted_by_child_types_keep_their_margins():
    grammar, seen = tight_grammar(), []
    counts = expected_counts(grammar)
    fit = apr_by_child_types(counts, 8, 2000, tolerance=1e-8, progress=lambda sweep, *_: seen.append(sweep))
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
    assert all(cp_form(grammar.root, rules.u, rules.v, rules.w, sort_terms=True).term_counts)
    assert spectral_radius(replace(grammar, binary=WholeCP.from_factors(rules, grammar.binary))) < 1


def test_too_few_terms_for_each_child_type_are_fitted_together():
    counts = expected_counts(tight_grammar())
    assert torch.equal(apr_by_child_types(counts, 3, 5).factors.tensor(), apr(counts, 3, 5).factors.tensor())


def test_shares():
    assert shares([10, 20, 30, 40], 50) == [5, 10, 15, 20]
    assert shares([1, 1, 1, 97], 10) == [1, 1, 1, 7]
    assert shares([3, 4], 9) == [3, 4]
    assert shares([5, 6, 7], 3) == [1, 1, 1]
    assert shares([142, 176, 161, 258], 260) == [48, 64, 56, 92]


@pytest.mark.treebank
def test_a_real_grammar(data):
    grammar = read_berkeley(data / "grammars" / "wsj_0", lexicon=False).grammar
    factors = cover_by_child_types(rule_tensor(grammar))
    form = cp_form(grammar.root, factors.u, factors.v, factors.w, sort_terms=True)
    assert all(found <= expected for found, expected in zip(form.term_counts, (143, 126, 144, 260), strict=True))
    assert apr_by_child_types(expected_counts(grammar), 260, 3).divergence < 0.3
