"""job=compress and lvpcfg.compress: smaller models, and what is said about them."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from omegaconf import OmegaConf
from running import ROOT, call, run
from strategies import random_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lvpcfg import InputError, Model, Parser, compress, corpus, train
from lvpcfg.decompose import bounds
from lvpcfg.decompose.compress import KINDS
from lvpcfg.decompose.options import METHODS, ALSOptions, APROptions, GradientOptions, Options, SVDOptions
from lvpcfg.decompose.whole import difference, divergence, row_sums, rule_tensor
from lvpcfg.grammar.kruskal import Factors
from lvpcfg.jobs.check import problem_with
from lvpcfg.trees.walk import words


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    train(corpus("train")[:200], estimator="em", states=4, iterations=5).save(folder)
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
        (["decompose=cp"], "decompose is 'cp': expected als, apr, cover, gradient or svd."),
        (["decompose=cover", "decompose.rank=3"], "'decompose.rank' is an option of decompose=als or decompose=apr or"),
        (["decompose.error=0.1"], "'decompose.error' is an option of decompose=svd: choose that first."),
        (["decompose.rank=0"], "decompose.rank is 0: expected a number from 1 on."),
        (["decompose.start=warm"], "decompose.start is 'warm': expected hosvd or random."),
        (["decompose.treshold=1"], "did you mean 'decompose.threshold'?"),
        (["gold=a.mrg"], "job=compress does not use 'gold'"),
    ],
)
def test_wrong_options_get_one_sentence(arguments, expected):
    assert expected in problem_with(["job=compress", "model=a", *arguments])


def test_rules_in_kruskal_form(tmp_path, latent):
    options = ALSOptions(rank=2, threshold=1e-2)
    result, printed = run("compress", tmp_path, model=latent, decompose=options)
    model, small = Model.load(latent), Model.load(tmp_path / "model")
    factored = small.grammar.factored
    assert result["approximated"] == len(factored.rules) > 10
    assert result["rules"] == len(model.grammar.binary_rules)
    assert sum(result[f"{kind.replace(' ', '_')}_rules"] for kind in KINDS) == result["rules"]
    # The errors of the rules, and those of the written-out grammar.
    errors = [
        float((model.grammar.binary_tensor(rule) - small.grammar.expanded().binary_tensor(rule)).norm())
        for rule in factored.rules.tolist()
    ]
    assert max(errors) <= 1e-2
    assert result["bound_gamma"] == pytest.approx(max(errors), rel=1e-6)
    assert result["error"] == pytest.approx(math.hypot(*errors), rel=1e-6)
    assert result["gamma_median"] <= result["gamma_90"] <= result["gamma_largest"]
    assert result["numbers_after"] == small.grammar.binary.numel() + len(factored.rules) * 2 * 3 * 4
    assert result["compression"] == result["numbers_before"] / result["numbers_after"] > 1
    assert 0 < result["bytes_after"] < result["bytes_before"]
    m, symbols = 4, len(model.grammar.symbols)
    assert result["bound_depth"] == bounds.covered_depth(result["bound_gamma"], m, 0.01)
    assert result["bound_length"] == bounds.covered_sentence(result["bound_gamma"], m, 0.01, symbols) == 0
    assert "Marginals of sentences of no size are sure to be within 0.01: vacuous." in printed
    assert small.provenance["compressed"] == asdict(options) | {"seed": 0}
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {f"log10_gamma/{kind.replace(' ', '_')}" for kind in (*KINDS, "all")} == set(log.Tags()["histograms"])
    assert (tmp_path / "gamma.png").read_bytes().startswith(b"\x89PNG")
    tree = Parser(small, device="cpu").parse(words(corpus("dev")[0]))
    assert words(tree) == words(corpus("dev")[0])


def test_a_threshold_of_zero_is_exact(tmp_path, latent):
    result, printed = run("compress", tmp_path, model=latent, decompose=ALSOptions(rank=2, threshold=0))
    assert (result["approximated"], result["compression"], result["error"]) == (0, 1, 0)
    assert "no rule is approximated, inference is exact." in printed
    assert torch.equal(Model.load(tmp_path / "model").grammar.binary, Model.load(latent).grammar.binary)


@pytest.mark.parametrize(
    "options", [Options(), SVDOptions(), APROptions(rank=10, iterations=20), GradientOptions(rank=4)]
)
def test_a_whole_grammar_as_one_sum(tmp_path, pcfg, options):
    result, printed = run("compress", tmp_path, model=pcfg, decompose=options)
    grammar = Model.load(tmp_path / "model").grammar
    assert result["rank"] == grammar.kruskal.rank
    beside = difference(rule_tensor(grammar), grammar.kruskal)
    assert result["error"] == pytest.approx(float(beside.error.norm()), abs=1e-6)
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
        assert result["row_sum_least"] == pytest.approx(1, abs=1e-2)
        assert result["row_sum_largest"] == pytest.approx(1, abs=1e-2)
        assert result["spectral_radius"] < 1
        assert result["kl"] > 0


def test_figures_of_whole_grammars_are_those_of_tensors_written_out():
    grammar = random_model(3, (2, 3, 1, 4)).grammar
    tensor = rule_tensor(grammar)
    inner, states, _ = tensor.shape
    u, v, w = torch.randn(3, 4, states, dtype=torch.float64)
    factors = Factors(u[:, :inner], v, w)
    exact, found = tensor.to_dense(), factors.tensor()
    beside = difference(tensor, factors)
    for kind in range(4):
        left, right = (slice(inner, None) if word else slice(inner) for word in (kind // 2, kind % 2))
        t, approximate = exact[:, left, right], found[:, left, right]
        assert beside.norm[kind] == pytest.approx(float(t.norm()))
        assert beside.error[kind] == pytest.approx(float((t - approximate).norm()))
        assert beside.mass[kind] == pytest.approx(float(approximate.abs().sum()))
        assert beside.negative[kind] == pytest.approx(-float(approximate.clamp_max(0).sum()))
        assert beside.added[kind] == pytest.approx(float(approximate.abs()[t == 0].sum()))
    assert divergence(grammar, factors) == math.inf
    changed = grammar.row_sums()
    changed[:inner] += found.sum((1, 2)) - exact.sum((1, 2))
    assert torch.allclose(row_sums(factors, grammar), changed)


def test_from_python(latent):
    small = compress(Model.load(latent), method="als", rank=2, threshold=1e-2)
    assert small.grammar.factored.factors.rank == 2
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
    with pytest.raises(InputError, match="the model is compressed already: expected one as job=train makes it"):
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
