"""Every consumer of a grammar gives the same for every representation of its binary rules.

The truth is the grammar written out, rule by rule, as tensors.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from jaxtyping import TypeCheckError
from pages import python_of
from running import SETTINGS, run
from strategies import gaussians, random_model

from lvpcfg import InputError, Model, Parser, compress, write_trees
from lvpcfg.decompose.child_types import cover_by_child_types
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.distributions import ModelTrees
from lvpcfg.estimate.gaussian_start import with_mixtures
from lvpcfg.evaluation.inspect import look_inside
from lvpcfg.grammar import model as model_folder
from lvpcfg.grammar import rules as rules_module
from lvpcfg.grammar.expectations import expected_states, rewrites, spectral_radius
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.projection import projected
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.options import DECODERS

SENTENCES = [["dog", "barks"], ["barks", "dog", "dog"], ["dog", "barks", "cats", "dog"], ["barks"]]


MIXTURES = ("Gaussians", "tied Gaussians")


def rule_cp(binary: RuleTensors, rules: list[int], signed: bool) -> RuleCP:
    """Random CP forms of rank 2 in place of some tensors."""
    generator = torch.Generator().manual_seed(len(rules))
    sizes = binary.states[binary.rules[rules]]
    widest = max(binary.state_counts)
    factors = []
    for mode in range(3):
        values = torch.rand(len(rules), 2, widest, generator=generator, dtype=binary.dtype) - 0.1 * signed
        factors.append(0.4 * values * (torch.arange(widest) < sizes[:, mode, None, None]))
    exact = [binary.tensor(rule).flatten() for rule in range(len(binary)) if rule not in rules]
    values = torch.cat([*exact, binary.values.new_zeros(0)])
    return RuleCP(binary.state_counts, binary.interminals, binary.rules, values, torch.tensor(rules), *factors)


def make(name: str) -> Model:
    signed = name.endswith("signed")
    model = random_model(1, (2, 3, 1, 4))
    grammar = replace(model.grammar, unary=model.grammar.unary * 0.05)
    if name.startswith(MIXTURES):
        mixed = gaussians(grammar, 2 if name.startswith(MIXTURES[0]) else 0, signed)
        return replace(model, grammar=with_mixtures(grammar, mixed, grammar.lexical))
    binary = grammar.binary.with_tensors({"values": grammar.binary.values * 0.1})
    if name.startswith("some rules"):
        binary = rule_cp(binary, [0, 2], signed)
    elif name.startswith("all rules"):
        binary = rule_cp(binary, [0, 1, 2, 3], signed)
    elif name.startswith("whole"):
        # An exact cover: derivations are those of the tensors, since each rule is in one term.
        cover = cover_by_child_types(rule_tensor(replace(grammar, binary=binary)))
        flip = 1 - 2 * (torch.arange(len(cover.v)) % 2).unsqueeze(1).to(cover.v) if signed else 1
        binary = WholeCP.from_factors(replace(cover, v=cover.v * flip, u=cover.u * flip), binary)
    elif signed:
        binary = binary.with_tensors({"values": binary.values - 0.02})
    return replace(model, grammar=replace(grammar, binary=binary))


def written_out(model: Model) -> Model:
    """Through `tensor`, one rule at a time."""
    binary = model.grammar.binary
    values = torch.cat([binary.tensor(rule).flatten() for rule in range(len(binary))])
    tensors = RuleTensors(binary.state_counts, binary.interminals, binary.rules, values)
    return replace(model, grammar=replace(model.grammar, binary=tensors))


PLAIN = ["tensors", "some rules", "all rules", "whole", *MIXTURES]
# Tied Gaussians are computed with as tensors.
EVERY = PLAIN + [f"{name}, signed" for name in PLAIN if name != MIXTURES[1]]


@pytest.fixture(params=EVERY)
def model(request):
    return make(request.param)


@pytest.fixture(params=PLAIN)
def plain(request):
    return make(request.param)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_written_out_it_has_the_tensors_of_its_rules(model):
    truth, found = written_out(model).grammar.binary, model.grammar.binary.written_out()
    rules = found.rules.tolist()
    for rule, row in enumerate(truth.rules.tolist()):
        close(found.tensor(rules.index(row)), truth.tensor(rule))
    close(found.values.abs().sum(), truth.values.abs().sum())  # and no others
    for some, tensors in model.grammar.binary.padded():
        for row, tensor in zip(some.tolist(), tensors, strict=True):
            if row in truth.rules.tolist():
                exact = truth.tensor(truth.rules.tolist().index(row))
                close(tensor[tuple(slice(size) for size in exact.shape)], exact)
                close(tensor.sum(), exact.sum())


def test_sums_and_expectations(model):
    grammar, truth = model.grammar, written_out(model).grammar
    close(grammar.row_sums(), truth.row_sums())
    close(rewrites(grammar)[0], rewrites(truth)[0])
    close(expected_states(grammar), expected_states(truth))
    assert spectral_radius(grammar) == pytest.approx(spectral_radius(truth), rel=1e-9)
    assert grammar.signed == grammar.binary.signed


def test_projection_to_fewer_states(model):
    grammar, truth = model.grammar, written_out(model).grammar
    expected, zeros = expected_states(grammar), torch.zeros_like(grammar.symbol_of_state)
    coarse, exact = (projected(one, expected, zeros).grammar for one in (grammar, truth))
    close(written_out(replace(model, grammar=coarse)).grammar.binary.values, exact.binary.values)


def test_a_change_of_basis_changes_no_sum(model):
    grammar = model.grammar
    counts, widest = grammar.binary.state_counts, max(grammar.binary.state_counts)
    generator = torch.Generator().manual_seed(0)
    basis, inverse = torch.zeros(2, len(counts), widest, widest, dtype=torch.float64)
    for symbol, m in enumerate(counts):
        matrix = torch.eye(m, dtype=torch.float64) + 0.2 * torch.rand(m, m, generator=generator, dtype=torch.float64)
        basis[symbol, :m, :m], inverse[symbol, :m, :m] = matrix, torch.linalg.inv(matrix)
    changed = grammar.binary.transformed(counts, basis, inverse.transpose(1, 2))
    back = changed.transformed(counts, inverse, basis.transpose(1, 2))
    for rule, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        x, y, z = (counts[symbol] for symbol in (a, b, c))
        exact = torch.einsum(
            "xyz,xi,jy,kz->ijk", grammar.binary.tensor(rule), basis[a, :x, :x], inverse[b, :y, :y], inverse[c, :z, :z]
        )
        close(changed.tensor(rule), exact)
        close(back.tensor(rule), grammar.binary.tensor(rule))


def test_distributions(model):
    found, truth = ModelTrees(model, SENTENCES), ModelTrees(written_out(model), SENTENCES)
    close(found.partition, truth.partition)
    for name in ("top", "bottom"):
        close(getattr(found.marginals, name), getattr(truth.marginals, name))
    trees = [tree for (tree,) in ModelTrees(make("tensors"), SENTENCES).topk(1)]
    if isinstance(model.grammar.binary, WholeCP):
        pytest.skip("the derivations of a sum of terms have their terms in them")
    close(found.log_prob(trees), truth.log_prob(trees))


def test_distributions_over_derivations(plain):
    found, truth = ModelTrees(plain, SENTENCES), ModelTrees(written_out(plain), SENTENCES)
    close(found.entropy, truth.entropy)
    close(found.kl(found), torch.zeros(len(SENTENCES), dtype=torch.float64))
    close(found.log_prob(found.argmax), truth.log_prob(truth.argmax))
    for mine, others in zip(found.topk(3), truth.topk(3), strict=True):
        assert [(node.start, node.top, node.bottom) for node in mine[0].nodes] == [
            (node.start, node.top, node.bottom) for node in others[0].nodes
        ]
    drawn = found.sample(2, torch.Generator().manual_seed(0))
    close(found.log_prob([some[0] for some in drawn]).isfinite(), torch.ones(len(SENTENCES), dtype=torch.bool))


def test_divergence_from_the_exact_grammar(plain):
    """Of the compressed grammar, and not of the one that it was made of."""
    exact = ModelTrees(make("tensors"), SENTENCES)
    found, truth = ModelTrees(plain, SENTENCES), ModelTrees(written_out(plain), SENTENCES)
    if isinstance(plain.grammar.binary, WholeCP):
        with pytest.raises(InputError, match="kl needs two distributions of the same form"):
            found.kl(exact)
        return
    close(found.kl(exact), truth.kl(exact))
    changed = not torch.equal(plain.grammar.written_out().binary.values, make("tensors").grammar.binary.values)
    assert bool((found.kl(exact)[1:3] > 1e-6).all()) == changed


@pytest.mark.parametrize("name", [name for name in EVERY if name.endswith("signed")])
def test_what_signed_grammars_cannot_do_says_so(name):
    model = make(name)
    trees = ModelTrees(model, SENTENCES)
    for ask in (lambda: trees.argmax, lambda: trees.topk(2), lambda: trees.sample(), lambda: trees.entropy):
        with pytest.raises(InputError, match="non-negative"):
            ask()
    with pytest.raises(InputError, match="non-negative"):
        Parser(model, "viterbi")


@pytest.mark.parametrize("prune", [0.0, 1e-9])
@pytest.mark.parametrize("decoder", DECODERS)
def test_parsing(model, decoder, prune):
    if model.grammar.signed and decoder == "viterbi":
        pytest.skip("needs non-negative parameters, and says so")
    parsers = [Parser(one, decoder, "cpu", "float64", prune) for one in (model, written_out(model))]
    found, truth = (parser.analyse(SENTENCES) for parser in parsers)
    assert [one.tree for one in found] == [one.tree for one in truth]
    assert not any(one.flat for one in truth)
    assert [one.sentence_log_prob for one in found] == pytest.approx([one.sentence_log_prob for one in truth])
    assert [one.log_prob for one in found] == pytest.approx([one.log_prob for one in truth])


@pytest.mark.parametrize("place", [0, 1])
def test_products(model, place):
    others = [make("tensors"), make("tensors")]
    pairs = [[*others[:place], one, *others[place:1]] for one in (model, written_out(model))]
    found, truth = (Parser(pair, device="cpu", dtype="float64").parse_sents(SENTENCES) for pair in pairs)
    assert found == truth


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("rank_one", [False, True])
def test_a_product_takes_one_cp_form_of_all_rules_as_it_is(place, rank_one):
    """It has other weights than the rules it stands for, and these decide about trees."""
    exact, sentences = make("tensors"), [list(words) for n in (3, 4) for words in product(["dog", "barks"], repeat=n)]
    binary = exact.grammar.binary
    other = binary.with_tensors({"values": binary.values.flip(0).square()})
    if rank_one:
        rest = torch.rand(2, 1, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        factors = Factors(torch.ones(1, 5, dtype=torch.float64), *rest)
    else:
        factors = cover_by_child_types(rule_tensor(replace(exact.grammar, binary=other)))
    whole = replace(exact, grammar=replace(exact.grammar, binary=WholeCP.from_factors(factors, binary)))

    def trees(second):
        models = [second, exact] if place == 0 else [exact, second]
        return Parser(models, device="cpu", dtype="float64").parse_sents(sentences)

    assert trees(whole) == trees(written_out(whole)) != trees(exact)


def test_a_look_inside(model):
    for symbol, truth in zip(look_inside(model), look_inside(written_out(model)), strict=True):
        assert symbol.name == truth.name
        for state, other in zip(symbol.states, truth.states, strict=True):
            assert state.expected == pytest.approx(other.expected)
            assert [rule.children for rule in state.rules] == [rule.children for rule in other.rules]
            assert [rule.probability for rule in state.rules] == pytest.approx([r.probability for r in other.rules])


def test_save_and_load(model, tmp_path):
    model.save(tmp_path)
    loaded = Model.load(tmp_path)
    assert type(loaded.grammar.binary) is type(model.grammar.binary)
    for name, tensor in model.grammar.binary.saved().items():
        assert torch.equal(loaded.grammar.binary.saved()[name], tensor), name


@pytest.mark.parametrize("prune", [0.0, 1e-9])
def test_evaluation(model, tmp_path, prune):
    options = {"dtype": "float64", "prune": prune, "gold": str(tmp_path / "gold.mrg")}
    model.save(tmp_path / "model")
    truth = Parser(written_out(model), device="cpu", dtype="float64", prune=prune)
    write_trees(truth.parse_sents(SENTENCES), tmp_path / "gold.mrg")
    result, _ = run("evaluate", tmp_path / "run", model=str(tmp_path / "model"), **options)
    assert result["f1_all"] == result["complete_match"] == 100
    assert result["fallbacks"] == 0


@pytest.mark.parametrize("name", EVERY)
def test_trade_offs_are_of_models_that_are_not_compressed(name, tmp_path):
    model = make(name)
    model.save(tmp_path / "model")
    write_trees(Parser(model, device="cpu").parse_sents(SENTENCES), tmp_path / "gold.mrg")
    options = {"model": str(tmp_path / "model"), "gold": str(tmp_path / "gold.mrg")}
    settings = replace(SETTINGS, ranks=[1], thresholds=[10.0])
    if model.grammar.binary.compressed:
        with pytest.raises(InputError, match="is compressed already: expected one whose rules are tensors"):
            run("tradeoff", tmp_path / "run", tradeoff=settings, **options)
    else:
        result, _ = run("tradeoff", tmp_path / "run", tradeoff=settings, **options)
        assert result["m4_exact_f1_all"] == 100
        assert result["m4_als_r1_t10_gamma"] > 0


def test_moving(model):
    moved = model.grammar.to("meta", torch.float32).binary
    for tensor in (moved.rules, moved.states, *moved.saved().values()):
        assert tensor.device.type == "meta"
    assert {tensor.dtype for tensor in moved.tensors.values()} == {torch.float32}


def test_compressing(plain):
    if plain.grammar.binary.compressed:
        with pytest.raises(InputError, match="compressed already"):
            compress(plain)
    else:
        assert compress(plain, rank=1, threshold=10.0).grammar.binary.compressed


def test_signatures_are_checked():
    """By the import hook in conftest.py: u, v and w have one rank."""
    u, v = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(TypeCheckError):
        Factors(u, u, v)
    with pytest.raises(TypeCheckError):
        make("tensors").grammar.binary.scaled(u)


def test_the_worked_example(tmp_path, monkeypatch):
    """The blocks of docs/add_a_representation.md are what they say they are, and every consumer takes the class."""
    module, use = python_of("docs/add_a_representation.md")
    (tmp_path / "independent.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rules_module, "REPRESENTATIONS", dict(rules_module.REPRESENTATIONS))
    monkeypatch.setattr(model_folder, "REPRESENTATIONS", rules_module.REPRESENTATIONS)
    names: dict = {}
    exec(use, names)
    small, layer = names["small"], names["layer"]
    assert names["tree"].leaves() == ["The", "dog", "barks", "."]
    assert type(names["again"].grammar.binary) is type(small.grammar.binary)
    for parameter in (layer.binary_probability, layer.binary_left, layer.binary_right):
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()
    close(small.grammar.row_sums(), written_out(small).grammar.row_sums())
    sentences = [["The", "dog", "barks", "."], ["No", "."]]
    found, truth = ModelTrees(small, sentences), ModelTrees(written_out(small), sentences)
    close(found.partition, truth.partition)
    close(found.marginals.top, truth.marginals.top)
    for decoder in DECODERS:
        parses = [Parser(one, decoder, "cpu", "float64").parse_sents(sentences) for one in (small, written_out(small))]
        assert parses[0] == parses[1]
    assert len(look_inside(small)) == len(small.grammar.symbols)
