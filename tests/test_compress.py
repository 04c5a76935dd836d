"""job=compress and lvpcfg.compress: smaller models, and what is said about them."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from omegaconf import OmegaConf
from running import ROOT, call, run
from strategies import random_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lvpcfg import Binarisation, InputError, Model, Parser, compress, corpus, train
from lvpcfg.chart.fast.build import tensor_form as form
from lvpcfg.chart.fast.partition import log_partition
from lvpcfg.decompose import bounds
from lvpcfg.decompose.compress import CHILD_TYPE_NAMES, decompose
from lvpcfg.decompose.dense import difference, divergence, rule_tensor
from lvpcfg.decompose.options import METHODS, ALSOptions, APROptions, GradientOptions, Options, SVDOptions
from lvpcfg.grammar.expectations import rewrites
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.trees.treebank import Symbols
from lvpcfg.trees.walk import words


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    train(corpus("train")[:200], estimator="em", states=4, iterations=5).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def without_unaries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without_unaries")
    trees, scheme = corpus("train")[:200], Binarisation(unaries="collapse")
    train(trees, estimator="em", states=4, iterations=5, binarisation=scheme).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pcfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pcfg")
    train(corpus("train")[:200]).save(folder)
    return str(folder)


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_of_methods_are_the_same_from_python_and_from_the_command_line(name):
    written = dict(OmegaConf.load(ROOT / f"conf/decompose/{name}.yaml"))
    assert written == asdict(METHODS[name]())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["decompose=cp"], "decompose is 'cp': expected als, apr, cover, gradient, svd or trim."),
        (["decompose=cover", "decompose.rank=3"], "'decompose.rank' is an option of decompose=als or decompose=apr or"),
        (["decompose.error=0.1"], "'decompose.error' is an option of decompose=svd: choose that first."),
        (["decompose.rank=0"], "decompose.rank is 0: expected a number from 1 on."),
        (["decompose=apr", "decompose.child_types=one"], "decompose.child_types is 'one': expected apart or together."),
        (["decompose.start=warm"], "decompose.start is 'warm': expected hosvd or random."),
        (["decompose.treshold=1"], "did you mean 'decompose.threshold'?"),
        (["gold=a.mrg"], "job=compress does not use 'gold'"),
    ],
)
def test_wrong_options_get_one_sentence(arguments, expected):
    assert expected in problem_with(["job=compress", "model=a", *arguments])


@pytest.mark.parametrize("source", ["latent", "without_unaries"])
def test_rules_in_cp_form(tmp_path, request, source):
    latent = request.getfixturevalue(source)
    options = ALSOptions(rank=2, threshold=1e-2)
    result, printed = run("compress", tmp_path, model=latent, decompose=options)
    model, small = Model.load(latent), Model.load(tmp_path / "model")
    binary = small.grammar.binary
    assert result["approximated"] == len(binary.cp_rules) > 10
    assert result["rules"] == len(model.grammar.binary_rules)
    assert sum(result[f"{name.replace(' ', '_')}_rules"] for name in CHILD_TYPE_NAMES) == result["rules"]
    # The errors of the rules, and those of the written-out grammar.
    errors = [
        float((model.grammar.binary.tensor(rule) - small.grammar.written_out().binary.tensor(rule)).norm())
        for rule in binary.cp_rules.tolist()
    ]
    assert max(errors) <= 1e-2
    assert result["bound_gamma"] == pytest.approx(max(errors), rel=1e-6)
    assert result["error"] == pytest.approx(math.hypot(*errors), rel=1e-6)
    assert result["gamma_median"] <= result["gamma_90"] <= result["gamma_largest"]
    assert result["numbers_after"] == binary.values.numel() + len(binary.cp_rules) * 2 * 3 * 4
    assert result["compression"] == result["numbers_before"] / result["numbers_after"] > 1
    assert 0 < result["bytes_after"] < result["bytes_before"]
    m, symbols = 4, len(model.grammar.symbols)
    if len(model.grammar.unary_rules):  # the theorem is about grammars without
        assert not {"bound_depth", "bound_length", "bound_depth_limit"} & set(result)
        assert "says nothing about trees of this grammar: it has unary rules." in printed
        assert "sure" not in printed
    else:
        assert result["bound_depth"] == bounds.covered_depth(result["bound_gamma"], m, 0.01)
        assert result["bound_length"] == bounds.covered_sentence(result["bound_gamma"], m, 0.01, symbols) == 0
        assert "Marginals of sentences of no size are sure to be within 0.01: vacuous." in printed
    assert small.provenance["compressed"] == asdict(options) | {"seed": 0}
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {f"log10_gamma/{name.replace(' ', '_')}" for name in (*CHILD_TYPE_NAMES, "all")} == set(
        log.Tags()["histograms"]
    )
    assert (tmp_path / "gamma.png").read_bytes().startswith(b"\x89PNG")
    tree = Parser(small, device="cpu").parse(words(corpus("dev")[0]))
    assert words(tree) == words(corpus("dev")[0])


def with_a_near_critical_unary_rule(rare=1e-4):
    """S_h -> S_h 1 - rare | N_h N_h rare or a bit less; the words are those of two preterminals."""
    model = random_model(0, (2, 1, 1, 1))
    eye = torch.eye(2, dtype=torch.float64)
    binary = torch.zeros(2, 2, 2, dtype=torch.float64)
    binary[0, 0, 0], binary[1, 1, 1] = rare, 0.9 * rare
    grammar = replace(
        model.grammar,
        symbols=Symbols(("S",), ("N",)),
        binary=RuleTensors((2, 2), 1, torch.tensor([[0, 1, 1]]), binary.flatten()),
        unary_rules=torch.tensor([[0, 0]]),
        root=torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64),
        unary=((1 - rare) * eye).flatten(),
    )
    return replace(model, grammar=grammar)


def test_nothing_is_promised_of_a_near_critical_unary_rule(tmp_path):
    """Without the unary rule two levels would be sure to be within 0.01; with it p falls from 0.45 to 0."""
    with_a_near_critical_unary_rule().save(tmp_path / "source")
    options = ALSOptions(rank=1, threshold=1e-3)
    result, printed = run("compress", tmp_path / "run", model=str(tmp_path / "source"), decompose=options)
    assert result["approximated"] == 1
    assert bounds.covered_depth(result["bound_gamma"], 2, 0.01) == 2
    exact, near = (Model.load(tmp_path / name).grammar.written_out() for name in ("source", "run/model"))
    leaf = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(2, 1, 2)  # two words of N_1
    p, p_near = (float(log_partition(form(grammar), leaf)[0].exp()) for grammar in (exact, near))
    assert p == pytest.approx(0.45, rel=1e-3)
    assert abs(p - p_near) > 0.4
    assert "bound_depth" not in result
    assert "bound_length" not in result
    assert "for sure" not in printed


def test_a_theorem_about_probabilities_says_nothing_of_other_numbers():
    grammar = random_model(0, (2, 2, 2, 2)).grammar
    free = replace(grammar, unary_rules=grammar.unary_rules[:0], unary=grammar.unary[:0])
    assert bounds.outside_theorem(grammar) == "it has unary rules"
    assert bounds.outside_theorem(free) == "its rules are not probabilities"  # they sum to more than 1

    def with_values(values):
        return replace(free, binary=free.binary.with_tensors({"values": values}))

    small = with_values(free.binary.values / 100)
    assert bounds.outside_theorem(small) is None
    assert bounds.outside_theorem(with_values(small.binary.values - 0.001)) == "its rules are not probabilities"


def test_a_threshold_of_zero_is_exact(tmp_path, latent):
    result, printed = run("compress", tmp_path, model=latent, decompose=ALSOptions(rank=2, threshold=0))
    assert (result["approximated"], result["compression"], result["error"]) == (0, 1, 0)
    assert "no rule is approximated, inference is exact." in printed
    assert torch.equal(Model.load(tmp_path / "model").grammar.binary.values, Model.load(latent).grammar.binary.values)


@pytest.mark.parametrize(
    "options", [Options(), SVDOptions(), APROptions(rank=10, iterations=20), GradientOptions(rank=4)]
)
def test_a_whole_grammar_as_one_sum(tmp_path, pcfg, options):
    result, printed = run("compress", tmp_path, model=pcfg, decompose=options)
    grammar = Model.load(tmp_path / "model").grammar
    assert result["rank"] == grammar.binary.factors.rank
    against_source = difference(rule_tensor(Model.load(pcfg).grammar), grammar.binary.factors)
    assert result["error"] == pytest.approx(float(against_source.error.norm()), abs=1e-6)
    assert "adds up to" in printed
    assert result["spectral_radius"] < 1.1
    if options.name == "cover":
        assert result["error"] == result["added_mass"] == 0
        assert result["kl"] < 1e-9
        assert "of any size are exact" in printed
        tails = [value for name, value in result.items() if name.startswith("tail_sum_")]
        assert len(tails) == 5
        assert tails == sorted(tails, reverse=True)
    else:
        assert result["bound_length"] == 0
        assert "vacuous" in printed
    if options.name == "apr":
        assert result["row_sum_least"] == pytest.approx(1, abs=1e-6)
        assert result["row_sum_largest"] == pytest.approx(1, abs=1e-6)
        assert result["spectral_radius"] < 1
        assert result["kl"] > 0


def with_a_rare_rule():
    """A -> V N has probability 0.3, A -> N V 3e-9."""
    model = random_model(0, (1, 1, 1, 1))
    values = torch.tensor([0.2, 0.1, 0.3, 3e-9], dtype=torch.float64)
    return replace(model, grammar=replace(model.grammar, binary=model.grammar.binary.with_tensors({"values": values})))


def test_an_error_as_small_as_a_rare_rule_is_not_lost(tmp_path):
    """||T||^2 - 2 <T, T^> + ||T^||^2 is 0 here; sentences that need the rule have become impossible."""
    with_a_rare_rule().save(tmp_path / "source")
    options = SVDOptions(error=1e-12)
    result, printed = run("compress", tmp_path / "run", model=str(tmp_path / "source"), decompose=options)
    assert result["error"] == result["bound_delta"] == pytest.approx(3e-9, rel=1e-6)
    assert result["bound_delta"] == pytest.approx(result["bound_nu"])
    assert "Delta = 3" in printed
    assert "exact" not in printed
    grammar = Model.load(tmp_path / "run/model").grammar
    assert divergence(with_a_rare_rule().grammar, grammar.binary.factors) == math.inf


def test_an_error_is_that_of_the_numbers_that_are_saved():
    """Which are rounded to the type of the model."""
    model = random_model(1, (2, 3, 1, 4), torch.float32)
    found = decompose(model, SVDOptions(error=0))
    exact, near = rule_tensor(model.grammar).to_dense().double(), found.model.grammar.binary.factors
    residual = float((exact - near.map(torch.Tensor.double).tensor()).norm())
    assert 1e-9 < residual < 1e-5
    assert found.error == pytest.approx(residual, rel=1e-6)


@pytest.mark.parametrize("loss", ["squared", "kl"])
def test_normalised_values_keep_what_states_rewrite_to(pcfg, loss):
    """In a grammar with unary rules, which leave less for binary ones."""
    source = Model.load(pcfg).grammar
    small = compress(Model.load(pcfg), "gradient", rank=4, loss=loss, values="normalised", iterations=3).grammar
    inner = small.interminal_states
    assert bool((rewrites(source)[1].sum(1) > 0.1).any())
    assert torch.allclose(small.row_sums()[:inner], source.row_sums()[:inner], atol=1e-6)


@pytest.mark.parametrize(
    ("rank", "asked", "ran"), [(12, "apart", "apart"), (12, "together", "together"), (3, "apart", "together")]
)
def test_rules_of_all_child_types_are_fitted_apart_or_together(tmp_path, pcfg, rank, asked, ran):
    """Three terms are too few for four types of children."""
    options = APROptions(rank=rank, iterations=3, child_types=asked)
    _, printed = run("compress", tmp_path, model=pcfg, decompose=options)
    model = Model.load(tmp_path / "model")
    found, inner = model.grammar.binary.factors, model.grammar.interminal_states
    both = ((found.v[:, :inner] > 0).any(1) & (found.v[:, inner:] > 0).any(1)).any()
    assert bool(both) == (ran == "together")
    assert found.rank == rank
    assert model.provenance["compressed"]["child_types"] == ran
    assert f"child_types {ran}" in printed


def test_figures_of_whole_grammars_are_those_of_tensors_written_out():
    grammar = random_model(3, (2, 3, 1, 4)).grammar
    tensor = rule_tensor(grammar)
    inner, states, _ = tensor.shape
    u, v, w = torch.randn(3, 4, states, dtype=torch.float64)
    factors = Factors(u[:, :inner], v, w)
    exact, found = tensor.to_dense(), factors.tensor()
    against_source = difference(tensor, factors)
    for types in range(4):
        left, right = (slice(inner, None) if word else slice(inner) for word in (types // 2, types % 2))
        t, approximate = exact[:, left, right], found[:, left, right]
        assert against_source.norm[types] == pytest.approx(float(t.norm()))
        assert against_source.error[types] == pytest.approx(float((t - approximate).norm()))
        assert against_source.mass[types] == pytest.approx(float(approximate.abs().sum()))
        assert against_source.negative[types] == pytest.approx(-float(approximate.clamp_max(0).sum()))
        assert against_source.added[types] == pytest.approx(float(approximate.abs()[t == 0].sum()))
    assert divergence(grammar, factors) == math.inf
    changed = grammar.row_sums()
    changed[:inner] += found.sum((1, 2)) - exact.sum((1, 2))
    small = WholeCP.from_factors(factors, grammar.binary)
    assert torch.allclose(replace(grammar, binary=small).row_sums(), changed)


def test_from_python(latent):
    small = compress(Model.load(latent), method="als", rank=2, threshold=1e-2)
    assert small.grammar.binary.factors.rank == 2
    with pytest.raises(InputError, match="the method cover has no option 'rank'"):
        compress(small, method="cover", rank=3)
    with pytest.raises(InputError, match="method is 'cp': expected als, cover,"):
        compress(small, method="cp")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "job=compress needs one model folder: model=FOLDER"),
        (["a", "b"], "job=compress needs one model folder: model=FOLDER"),
        ("none", "'none' is not a model folder"),
    ],
)
def test_a_model_that_is_none(tmp_path, model, message):
    with pytest.raises(InputError, match=message):
        run("compress", tmp_path, model=model)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_compressed_already(tmp_path, latent):
    run("compress", tmp_path / "one", model=latent, decompose=ALSOptions(rank=2, threshold=1))
    with pytest.raises(InputError, match="the model is compressed already: expected one whose rules are tensors"):
        run("compress", tmp_path / "two", model=str(tmp_path / "one/model"))


def test_a_model_is_not_written_over(tmp_path, latent):
    Model.load(latent).save(tmp_path / "model")
    with pytest.raises(InputError, match=r"is the model to compress: choose another run folder"):
        run("compress", tmp_path, model=str(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_from_the_command_line(tmp_path, latent, capfd):
    call(
        *("job=compress", f"model={latent}", "decompose=als", "decompose.rank=3", "decompose.threshold=1e-2"),
        *("seed=1", f"hydra.run.dir={tmp_path}"),
    )
    assert capfd.readouterr().out.strip().split("\n")[-1] == str(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["approximated"] > 0
    assert Model.load(tmp_path / "model").provenance["compressed"]["rank"] == 3
