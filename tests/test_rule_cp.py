"""Rules in CP form: the same numbers as their tensors written out, in forests, charts, files and trees."""

from dataclasses import replace

import pytest
import torch
from cases import make
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import random_model
from test_coarse_to_fine import coarse_to_fine_of, flat

from lvpcfg import InputError, Model, Parser, compress, corpus, train
from lvpcfg.chart.decode.coarse_to_fine import Fine
from lvpcfg.chart.forest.forest import Plan, log_likelihood
from lvpcfg.chart.forest.prune import FineRules
from lvpcfg.decompose.compress import ALSOptions, Options, decompose, fit_rules
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.options import DECODERS, PRODUCT, RECALL


def factored(grammar, rules, rank=2, seed=0, signed=False):
    """The grammar with random CP forms for some rules."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(rules), rank, int(grammar.states.max())
    sizes = grammar.states[grammar.binary_rules[rules]]
    parts = []
    for mode in range(3):
        values = torch.rand(shape, generator=generator, dtype=grammar.root.dtype) - 0.2 * signed
        parts.append(values * (torch.arange(shape[2]) < sizes[:, mode, None, None]))
    volume = grammar.states[grammar.binary_rules].prod(1)
    kept = torch.ones_like(volume, dtype=torch.bool).index_fill(0, torch.tensor(rules), False)
    values = grammar.binary.values[torch.repeat_interleave(kept, volume)]
    binary = grammar.binary
    cp = RuleCP(binary.state_counts, binary.interminals, binary.rules, values, torch.tensor(rules), *parts)
    return replace(grammar, binary=cp)


@given(st.sets(st.integers(0, 7), min_size=1), st.integers(1, 3), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_a_grammar_written_out_has_each_tensor_in_its_place(rules, rank, seed):
    original = make("rule tensors").grammar
    grammar = factored(original, sorted(rules), rank, seed)
    expanded = grammar.written_out()
    assert isinstance(expanded.binary, RuleTensors)
    for rule in range(len(original.binary_rules)):
        expected = original.binary.tensor(rule)
        if rule in rules:
            place = sorted(rules).index(rule)
            form = grammar.binary.factors.map(lambda factor, place=place: factor[place])
            expected = form.tensor()[tuple(slice(size) for size in expected.shape)]
        else:
            assert torch.equal(grammar.binary.tensor(rule), expected)
        assert torch.allclose(expanded.binary.tensor(rule), expected)


@pytest.mark.parametrize("name", ["rule tensors", "rule tensors, unary"])
@pytest.mark.parametrize("signed", [False, True])
def test_forests_have_the_sums_of_the_tensors(name, signed):
    case = make(name)
    grammar = factored(case.grammar, [0, 1, 4, 6], signed=signed)
    words, lengths = flat(case.leaf(5, 2))
    parser = coarse_to_fine_of([case.grammar], PRODUCT)
    forest, kept = parser.pruning.coarse.forest(words @ parser.fold, lengths, 0.0)
    at = torch.tensor([0, 5])[kept.sentence[forest.leaves]] + kept.start[forest.leaves]
    results = []
    for one in (grammar, grammar.written_out()):
        rules = FineRules(one)
        results.append(Fine(forest, rules, rules.leaf(words, at, kept.symbol[forest.leaves])).posteriors())
    small, full = results
    assert bool(full.log_z.isfinite().any())
    for quantity in ("log_z", "nodes", "edges"):
        assert torch.allclose(getattr(small, quantity), getattr(full, quantity), atol=1e-12), quantity


def test_forests_are_differentiable_by_the_factors():
    case = make("rule tensors, unary")
    grammar = factored(case.grammar, [0, 1, 4, 6])
    words, lengths = flat(case.leaf(4, 2))
    parser = coarse_to_fine_of([case.grammar], PRODUCT)
    forest, kept = parser.pruning.coarse.forest(words @ parser.fold, lengths, 0.0)
    rules = FineRules(grammar)
    leaf = rules.leaf(words, 4 * kept.sentence[forest.leaves] + kept.start[forest.leaves], kept.symbol[forest.leaves])

    def log_z(values, leaf, *factors):
        plan = Plan(forest, rules.sizes, grammar.binary.with_tensors(dict(zip("uvw", factors, strict=True))))
        return log_likelihood(plan, values, leaf)

    inputs = (rules.values, leaf, *vars(grammar.binary.factors).values())
    assert torch.autograd.gradcheck(log_z, [tensor.clone().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("decoder", sorted(set(DECODERS) - {RECALL}))  # which has ties here
def test_trees_are_those_of_the_tensors(decoder):
    case = make("rule tensors, unary")
    grammar = factored(case.grammar, [0, 1, 4, 6])
    words, lengths = flat(case.leaf(6, 3))
    one, two = (
        coarse_to_fine_of([each], decoder).parse([words], lengths, 0.0, probabilities=True)
        for each in (grammar, grammar.written_out())
    )
    assert [found.skeleton for found in one] == [found.skeleton for found in two]
    assert [found.log_prob for found in one] == pytest.approx([found.log_prob for found in two])


@pytest.mark.parametrize("worth", [0.5, -0.5])
def test_negative_posteriors_are_counted(worth):
    case = make("rule tensors")
    words, lengths = flat(case.leaf(6, 3))
    grammar = factored(case.grammar, [0], rank=1)
    grammar.root[0] = 0  # the sentence is of the second state of S,
    grammar.binary.u[0, 0, :2] = torch.tensor([3.0, worth])  # to which the rule is worth little, or less
    coarse_to_fine = coarse_to_fine_of([grammar], PRODUCT)
    coarse_to_fine.parse([words], lengths, 0.0, probabilities=False)
    assert (coarse_to_fine.decoder.negative > 0) == (worth < 0)


@pytest.fixture(scope="module")
def model():
    return train(corpus("train")[:300], estimator="em", states=6, iterations=8)


@pytest.fixture(scope="module")
def sentences():
    return [tree.leaves() for tree in corpus("dev")][:12]


def test_a_compressed_model_parses_as_its_tensors_do(model, sentences):
    small = compress(model, rank=2, threshold=1.0)
    assert len(small.grammar.binary.cp_rules) > 10
    full = replace(small, grammar=small.grammar.written_out())
    parses = [Parser(one, dtype="float64").analyse(sentences) for one in (small, full)]
    for one, other in zip(*parses, strict=True):
        assert one.sentence_log_prob == pytest.approx(other.sentence_log_prob, rel=1e-9)
        assert one.tree == other.tree


def test_threshold_zero_is_exact(model):
    assert compress(model, rank=2, threshold=0.0).grammar is model.grammar


def test_only_rules_within_the_threshold_are_approximated(model):
    fitted = fit_rules(model.grammar, ALSOptions(rank=2))
    tried = fitted.gamma[fitted.rules]
    threshold = float(tried.median())
    small = fitted.within(threshold)
    chosen = set(small.binary.cp_rules.tolist())
    assert chosen == {rule for rule in fitted.rules.tolist() if float(fitted.gamma[rule]) <= threshold}
    expanded = small.written_out()
    for rule in range(len(model.grammar.binary_rules)):
        error = float((model.grammar.binary.tensor(rule) - expanded.binary.tensor(rule)).norm())
        assert error == pytest.approx(float(fitted.gamma[rule]) if rule in chosen else 0.0, abs=1e-9)


def test_rules_that_would_not_get_smaller_keep_their_tensors(model):
    assert not len(fit_rules(model.grammar, ALSOptions(rank=12)).rules)


def test_cover_parses_as_the_rules_do(sentences):
    rules = train(corpus("train")[:300])
    found = decompose(rules, Options())
    small = found.model
    assert found.error == 0
    assert small.grammar.binary.factors.rank < len(rules.grammar.binary_rules)
    parses = [Parser(one, dtype="float64").analyse(sentences) for one in (rules, small)]
    for one, other in zip(*parses, strict=True):
        assert one.sentence_log_prob == pytest.approx(other.sentence_log_prob, rel=1e-9)
        assert one.tree == other.tree


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("svd", {"error": 0.01}),
        ("apr", {"rank": 40, "iterations": 5}),
        ("gradient", {"rank": 10, "iterations": 3}),
    ],
)
def test_every_method_gives_a_model_that_parses(tmp_path, sentences, method, options):
    small = compress(train(corpus("train")[:300]), method, **options)
    small.save(tmp_path)
    loaded = Model.load(tmp_path)
    for name in ("u", "v", "w"):
        assert torch.equal(getattr(loaded.grammar.binary, name), getattr(small.grammar.binary, name))
    trees = Parser(loaded).parse_sents(sentences)
    assert [tree.leaves() for tree in trees] == sentences


def test_rules_in_cp_form_round_trip(tmp_path, model):
    small = compress(model, rank=2, threshold=0.05)
    small.save(tmp_path / "small")
    loaded = Model.load(tmp_path / "small")
    assert torch.equal(loaded.grammar.binary.cp_rules, small.grammar.binary.cp_rules)
    assert torch.equal(loaded.grammar.written_out().binary.values, small.grammar.written_out().binary.values)
    model.save(tmp_path / "model")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "model")]
    assert sizes[0] < sizes[1]


def test_what_cannot_be_compressed_says_so(model):
    small = compress(model, rank=2, threshold=1.0)
    with pytest.raises(InputError, match="compressed already"):
        compress(small)
    with pytest.raises(InputError, match="has no option 'rang'"):
        compress(model, rang=3)
    with pytest.raises(InputError, match="method is 'tucker'"):
        compress(model, "tucker")
    with pytest.raises(InputError, match=r"decompose.rank is 0"):
        compress(model, rank=0)


def test_products_of_compressed_models(model, sentences):
    small = compress(model, rank=2, threshold=0.05)
    trees = Parser([small, model]).parse_sents(sentences)
    assert [tree.leaves() for tree in trees] == sentences


def test_random_models_are_no_exception():
    small = compress(random_model(3, (3, 4, 2, 3)), rank=1, threshold=10.0)
    tree = Parser(small, decoder=PRODUCT).parse(["a", "b", "a"])
    assert len(tree.leaves()) == 3
