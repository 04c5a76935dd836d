"""Whether grammars are tight: against series of their definition, in every representation."""

import json
import logging
import math
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from cases import plain_grammar
from rich.console import Console
from running import run
from strategies import random_model

from lvpcfg import InputError, Model, compress, corpus, generate, renormalise, tightness, train
from lvpcfg.decompose.child_types import cover_by_child_types
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.distributions import ModelTrees
from lvpcfg.grammar.expectations import spectral_radius
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.jobs.material import TreeMaterial
from lvpcfg.jobs.run import Run

RULES = [(0, 1, 1), (0, 2, 1), (1, 0, 3), (1, 3, 2), (1, 1, 1), (0, 2, 3)]
GROWS = {(0, 1, 1), (0, 2, 1), (1, 0, 3), (1, 1, 1)}
KINDS = ("tensors", "some rules", "whole")
SENTENCES = [["dog", "barks"], ["barks", "dog", "dog"], ["dog", "cats", "barks", "dog"]]


def series(grammar, rounds=1000):
    """Z of the trees of so many levels at the most, from the rules one by one."""
    first, states = grammar.first_state.tolist(), len(grammar.root)
    rules = torch.zeros(states, states, states, dtype=torch.float64)
    written = grammar.binary.written_out()
    for number, (a, b, c) in enumerate(written.rules.tolist()):
        a, b, c = (slice(first[symbol], first[symbol + 1]) for symbol in (a, b, c))
        rules[a, b, c] = written.tensor(number).double()
    unary = torch.nn.functional.pad(grammar.unary_matrix().double(), (0, 0, 0, states - grammar.interminal_states))
    words = torch.nn.functional.pad(grammar.lexical.column_sums().double(), (grammar.interminal_states, 0))
    z = words
    for _ in range(rounds):
        binary = torch.einsum("xyz,y,z->x", rules, z, z)
        z = binary + words + unary @ (binary + words if grammar.closed else z)
    return z


def normalised(grammar):
    sums = grammar.row_sums()
    factor = torch.where(sums > 0, 1 / sums, 0)
    inner = grammar.interminal_states
    return replace(
        grammar,
        binary=grammar.binary.scaled(factor[:inner]),
        unary=grammar.unary * factor[grammar.unary_states()[0]],
        lexical=grammar.lexical.scale(torch.ones_like(grammar.lexical.weight), factor[inner:]),
    )


def grown(growth, kind="tensors", seed=0, unary=True):
    """A random grammar; `growth` multiplies the rules that make trees larger."""
    model = random_model(seed, (2, 3, 1, 4))
    generator = torch.Generator().manual_seed(seed)
    states = model.grammar.binary.state_counts
    values = [
        torch.rand(states[a] * states[b] * states[c], generator=generator, dtype=torch.float64)
        * (growth if (a, b, c) in GROWS else 1)
        for a, b, c in RULES
    ]
    binary = RuleTensors(states, 2, torch.tensor(RULES), torch.cat(values))
    if kind == "some rules":  # rank 1 in place of some
        sizes, some = binary.states[binary.rules], [0, 3]
        u, v, w = (
            torch.rand(2, 1, 4, generator=generator, dtype=torch.float64)
            * (torch.arange(4) < sizes[some, mode].view(-1, 1, 1))
            for mode in range(3)
        )
        u = u * torch.tensor([growth, 1]).view(-1, 1, 1)
        exact = torch.cat([binary.tensor(rule).flatten() for rule in range(len(RULES)) if rule not in some])
        binary = RuleCP(states, 2, binary.rules, exact, torch.tensor(some), u, v, w)
    grammar = replace(model.grammar, binary=binary)
    if kind == "few terms":  # that have no unary rules
        u, v, w = (torch.rand(3, size, generator=generator, dtype=torch.float64) for size in (5, 10, 10))
        u[0] *= growth
        v[0, 5:] = w[0, 5:] = v[1:, :5] = w[1:, :5] = 0
        binary = WholeCP(states, 2, binary.rules, u, v, w)
    elif kind == "whole":
        binary = WholeCP.from_factors(cover_by_child_types(rule_tensor(grammar)), binary)
    grammar = replace(grammar, binary=binary)
    if not unary or kind == "few terms":
        none = torch.zeros(0, 2, dtype=torch.int64)
        grammar = replace(grammar, unary_rules=none, unary=torch.zeros(0, dtype=torch.float64))
    return replace(model, grammar=normalised(grammar))


def critical(kind, seed):
    """With a spectral radius of 1, by bisection."""
    low, high, simple = 0.01, 500.0, "tensors" if kind == "whole" else kind  # a cover is exact
    for _ in range(45):
        growth = (low * high) ** 0.5
        low, high = (low, growth) if spectral_radius(grown(growth, simple, seed).grammar) > 1 else (growth, high)
    return grown(low, kind, seed)


@pytest.mark.parametrize(("p", "length"), [(0.4, 3.0), (0.5, None), (0.6, None)])
def test_one_symbol(p, length):
    found = tightness(plain_grammar(["S"], ["X"], [("S", "S", "S", p)], [("S", "X", 1 - p)]))
    mass = min(1, (1 - p) / p)
    assert found.mass == pytest.approx(mass, abs=2e-8)
    assert found.spectral_radius == pytest.approx(2 * p)
    assert found.tight == (p <= 0.5)
    assert found.expected_length == (length and pytest.approx(length))
    assert [leak.rule for leak in found.leaks] == ["S -> S S"] * (p > 0.5)
    assert [(one.symbol, one.tight) for one in found.symbols] == [("S", p <= 0.5), ("X", True)]
    assert ("critical" in found.line()) == (p == 0.5)


def test_a_chain_that_never_ends_has_radius_1_and_no_mass():
    found = tightness(plain_grammar(["S"], ["X"], [], [("S", "S", 1.0)]))
    assert (found.spectral_radius, found.mass, found.tight, found.expected_length) == (1.0, 0.0, False, None)
    assert found.leaks[0].rule == "S -> S"
    assert found.leaks[0].share == 1


def test_weights_without_a_finite_sum():
    found = tightness(
        plain_grammar(["T", "S"], ["X"], [("S", "S", "S", 1.0), ("T", "S", "X", 1.0)], [("S", "X", 1.0)], "T")
    )
    assert (found.mass, found.tight, found.expected_length) == (None, False, None)
    assert "no finite sum" in found.line()


def test_symbols_that_no_tree_reaches_do_not_matter():
    found = tightness(plain_grammar(["S", "A"], ["X"], [("A", "A", "A", 1.0)], [("S", "X", 1.0)]))
    assert (found.mass, found.tight, found.expected_length) == (1.0, True, 1.0)
    assert [one.tight for one in found.symbols] == [True, False, True]


def test_rules_that_leak_most_come_first():
    rules = [("S", "A", "X", 0.5), ("S", "B", "X", 0.5), ("A", "A", "A", 0.9), ("B", "B", "B", 0.6)]
    found = tightness(plain_grammar(["S", "A", "B"], ["X"], rules, [("A", "X", 0.1), ("B", "X", 0.4)]))
    assert found.mass == pytest.approx(0.5 * (1 / 9 + 2 / 3))
    assert found.leaks[0].rule == "A -> A A"
    assert found.leaks[0].share > 0.5


@pytest.mark.parametrize("kind", [*KINDS, "few terms"])
@pytest.mark.parametrize("growth", [0.1, 1.0, 40.0])
def test_mass_and_length_are_those_of_the_series(kind, growth):
    for seed in range(2):
        grammar = grown(growth, kind, seed).grammar
        found = tightness(grammar)
        if abs(found.spectral_radius - 1) < 0.02:
            continue
        truth = series(grammar)
        assert torch.allclose(found.partition, truth, rtol=1e-9)
        assert found.residual < 1e-12
        assert found.mass == pytest.approx(float(grammar.root @ truth), rel=1e-9)
        assert found.tight == (found.spectral_radius < 1)
        # The expected number of words is the derivative by a factor of each word.
        if found.tight:
            more = [
                float(
                    grammar.root
                    @ series(
                        replace(
                            grammar,
                            lexical=grammar.lexical.scale(
                                torch.full_like(grammar.lexical.weight, factor),
                                torch.ones_like(grammar.lexical.backoff[0]),
                            ),
                        )
                    )
                )
                for factor in (1 - 1e-5, 1 + 1e-5)
            ]
            assert found.expected_length == pytest.approx((more[1] - more[0]) / 2e-5, rel=1e-4)


def test_both_verdicts_are_among_those_that_are_tested():
    for kind in (*KINDS, "few terms"):
        assert {tightness(grown(growth, kind)).tight for growth in (0.1, 40.0)} == {True, False}


def test_closed_chains():
    grammar = replace(grown(0.1).grammar, closed=True)
    found = tightness(replace(grammar, unary=grammar.unary * 0.5))
    assert torch.allclose(found.partition, series(replace(grammar, unary=grammar.unary * 0.5)), rtol=1e-9)


def test_rounding_is_no_leak():
    model = grown(0.3)
    rounded = tightness(model.grammar.to(dtype=torch.float32))
    assert rounded.tight
    assert rounded.mass == pytest.approx(1, abs=1e-12)
    less = replace(model.grammar, binary=model.grammar.binary.scaled(torch.full((5,), 0.9, dtype=torch.float64)))
    assert not tightness(less).tight


def test_a_cp_form_of_many_states_is_never_written_out():
    generator = torch.Generator().manual_seed(0)
    inner, tags, rank = 15_000, 15_000, 4
    u, v, w = (torch.rand(rank, size, generator=generator) for size in (inner, inner + tags, inner + tags))
    counts = (inner, tags)
    binary = WholeCP(counts, 1, torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]), u, v, w)
    binary = binary.scaled(1 / binary.row_sums()[:inner])
    small = plain_grammar(["S"], ["X"], [("S", "X", "X", 1.0)])
    lexical = replace(small.lexical, backoff=torch.ones(1, tags))
    root = torch.nn.functional.pad(torch.full((inner,), 1 / inner), (0, tags))
    grammar = replace(small, binary=binary, root=root, lexical=lexical)
    found = tightness(grammar)
    assert found.spectral_radius == pytest.approx(1, abs=0.05)  # half of all children are phrases
    assert len(found.partition) == inner + tags


@pytest.mark.parametrize("kind", [*KINDS, "few terms"])
@pytest.mark.parametrize("growth", [0.1, 40.0, None])
def test_renormalised_grammars_are_tight_and_give_trees_the_same_probability(kind, growth):
    model = critical(kind, 0) if growth is None else grown(growth, kind)
    before, made = tightness(model), renormalise(model)
    after = tightness(made)
    assert after.tight
    assert after.spectral_radius < 1 + 1e-9
    sums = made.grammar.row_sums()
    assert torch.allclose(sums[sums > 0], torch.ones_like(sums), atol=1e-6 if growth is None else 1e-10)
    assert type(made.grammar.binary) is type(model.grammar.binary)
    shapes = [{name: x.shape for name, x in one.grammar.binary.tensors.items()} for one in (made, model)]
    assert shapes[0] == shapes[1]
    one, two = ModelTrees(model, SENTENCES), ModelTrees(made, SENTENCES)
    assert torch.allclose(two.partition, one.partition - math.log(before.mass), atol=1e-7)
    assert one.partition.isfinite().any()
    assert torch.allclose(one.marginals.top, two.marginals.top, atol=1e-7)
    if isinstance(model.grammar.binary, RuleTensors):
        for rank in range(2):
            trees = [some[rank] for some in one.topk(2)]
            assert torch.allclose(one.log_prob(trees), two.log_prob(trees), atol=1e-7)


def test_the_critical_grammars_are_critical():
    for kind in ("tensors", "few terms"):
        found = tightness(critical(kind, 0))
        assert found.spectral_radius == pytest.approx(1, abs=1e-7)
        assert found.mass == pytest.approx(1, abs=1e-6)


def test_what_cannot_be_renormalised():
    model = grown(1.0)
    signed = replace(model, grammar=replace(model.grammar, unary=-model.grammar.unary))
    with pytest.raises(InputError, match="numbers below zero"):
        renormalise(signed)
    assert "below zero" in tightness(signed).line()
    with pytest.raises(InputError, match="closed chains"):
        renormalise(replace(model, grammar=replace(model.grammar, closed=True)))
    for rules, message in (([("S", "S", "S", 1.0)], "no tree of the model ends"),):
        with pytest.raises(InputError, match=message):
            renormalise(replace(model, grammar=plain_grammar(["S"], ["X"], rules)))
    both = plain_grammar(["S"], ["X"], [("S", "S", "S", 1.0)], [("S", "X", 1.0)])
    with pytest.raises(InputError, match="no finite sum"):
        renormalise(replace(model, grammar=both))


def test_trained_and_compressed_models():
    model = train(corpus("dev")[:60], "em", states=2, iterations=2)
    found = tightness(model)
    assert found.tight
    assert 5 < found.expected_length < 40
    cover = tightness(compress(model, "cover"))
    assert cover.mass == pytest.approx(found.mass, abs=1e-5)
    assert cover.expected_length == pytest.approx(found.expected_length, rel=1e-3)
    assert tightness(compress(train(corpus("dev")[:60]), "apr", rank=20)).mass == pytest.approx(1, abs=1e-3)


def test_sampling_says_that_a_model_is_not_tight(caplog):
    model = renormalise(grown(0.3))
    with caplog.at_level(logging.WARNING):
        generate(model, 10, longest=2)
        assert not any("not tight" in record.getMessage() for record in caplog.records)
        generate(grown(40.0), 1, longest=50)
    share = 100 * tightness(grown(40.0)).mass
    assert caplog.records[-1].getMessage() == f"The model is not tight: only {share:.4g} % of its trees end."


def test_job(tmp_path):
    grown(4.0).save(tmp_path / "model")
    folder, output = tmp_path / "run", tmp_path / "tight"
    _, said = run("tightness", folder, model=str(tmp_path / "model"), renormalised=str(output))
    result = json.loads((folder / "result.json").read_text())
    assert result.keys() == {"spectral_radius", "mass", "tight", "expected_length"}
    assert (result["tight"], result["expected_length"]) == (0, None)
    assert tightness(Model.load(output)).tight
    assert "Rules that leak most" in said
    with pytest.raises(InputError, match="the model itself"):
        run("tightness", folder, model=str(tmp_path / "model"), renormalised=f"{tmp_path}/run/../model")


def test_jobs_warn_of_grammars_that_are_not_tight(tmp_path):
    for growth, said in ((4.0, 1), (0.1, 0)):
        model = grown(growth)
        model.save(tmp_path / "model")
        printed = StringIO()
        TreeMaterial.warn(SimpleNamespace(), tmp_path / "model", Run(tmp_path, Console(file=printed, width=1000)))
        assert printed.getvalue().count("Warning: the grammar is not tight") == said
        assert printed.getvalue().count("job=tightness model=") == said
