"""Mixtures that keep their largest components alone, and the experiment about them."""

import csv
from dataclasses import replace

import pytest
import torch
from nltk.tree import Tree
from running import options_of, run
from strategies import gaussians, random_model

import lvpcfg
from lvpcfg import InputError, Model
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.gaussian import GaussianOptions
from lvpcfg.estimate.gaussian_start import with_mixtures
from lvpcfg.jobs.components import Settings
from lvpcfg.nn import GrammarLayer
from lvpcfg.trees.brackets import write_trees

TREES = [tree for tree in lvpcfg.corpus("train")[:60] if len(tree.leaves()) <= 12][:12]
DEV = [tree for tree in lvpcfg.corpus("dev")[:20] if len(tree.leaves()) <= 12]
OF_GRAMMAR = [
    Tree.fromstring(tree)
    for tree in ("(TOP (S (N dog) (A (V barks) (N dog))))", "(TOP (S (A (V barks) (N dog)) (A (V dog) (N dog))))")
]
OPTIONS = GaussianOptions(sharing="own", components=2, epochs=1, batch_sentences=6)


def layer(most: int) -> GrammarLayer:
    model = random_model(1, (6, 6, 2, 2))
    rules = replace(gaussians(model.grammar, 2), most=most)
    model = replace(model, grammar=with_mixtures(model.grammar, rules, model.grammar.lexical))
    return GrammarLayer(model, "log-weights")


def test_what_is_kept_is_a_part_of_the_whole():
    exact = layer(0).log_weight(OF_GRAMMAR)
    assert torch.equal(layer(6).log_weight(OF_GRAMMAR), exact)
    totals = [layer(most).log_weight(OF_GRAMMAR) for most in (1, 2, 3)]
    assert bool((totals[0] < totals[1] - 1e-6).any())
    for less, more in zip(totals, [*totals[1:], exact], strict=True):
        assert bool((less <= more + 1e-12).all())


@pytest.mark.parametrize("most", [1, 2])
def test_gradients_are_those_of_what_is_kept(most):
    found = layer(most)
    observed = found.observe(OF_GRAMMAR, 1e-9)
    for value in (lambda: found.log_weight(observed).sum(), lambda: found.log_prob(observed).sum()):
        found.zero_grad()
        value().backward()
        for parameter in (found.binary_weight, found.binary_mu, found.words):
            step = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            step = torch.where(parameter.isfinite(), step, 0).detach()
            slope, ends = float((parameter.grad * step).sum()), []
            for size in (1e-6, -1e-6):
                with torch.no_grad():
                    parameter += size * step
                    ends.append(float(value()))
                    parameter -= size * step
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_a_folder_says_what_is_kept(tmp_path):
    layer(3).to_model().save(tmp_path)
    assert Model.load(tmp_path).grammar.binary.most == 3


def test_the_job(tmp_path):
    write_trees(TREES, tmp_path / "train.mrg")
    write_trees(DEV, tmp_path / "test.mrg")
    files = {"trees": str(tmp_path / "train.mrg"), "gold": str(tmp_path / "test.mrg"), "estimator": OPTIONS}
    two = Settings(kept=[1, 1000], longest_train=11, longest_test=12)
    run("components", tmp_path / "run", components=two, **files)
    with pytest.raises(InputError, match="exists already: resume=true goes on with it"):
        run("components", tmp_path / "run", components=two, **files)
    with pytest.raises(InputError, match="was made with other trees or options"):
        run("components", tmp_path / "run", components=two, resume=True, **files, seed=7)
    three = replace(two, kept=[1, 1000, 0])
    result, printed = run("components", tmp_path / "run", components=three, resume=True, **files)
    rows = list(csv.DictReader((tmp_path / "run" / "components.csv").open()))
    assert [row["kept"] for row in rows] == ["1", "1000", "0"]
    assert rows[1]["log_likelihood"] == rows[2]["log_likelihood"] != rows[0]["log_likelihood"]  # all are kept
    assert result["kept_1000_f1_all"] == result["exact_f1_all"]
    assert (tmp_path / "run" / "components.png").exists()
    assert "components" in printed


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"components": {"kept": []}}, "components.kept is"),
        ({"components": {"kept": [3, 3]}}, "expected different numbers"),
        ({"components": {"longest_test": 0}}, "components.longest_test is 0"),
    ],
)
def test_options_that_make_no_sense(options, complaint):
    with pytest.raises(InputError, match=complaint):
        Settings(**{"kept": [10], "longest_train": 20, "longest_test": 25} | options["components"])


def test_its_options_are_those_of_gaussians():
    assert options_of("components").estimator.name == "gaussian"
    with pytest.raises(InputError, match="components are those of 'gaussian'"):
        replace(options_of("components"), estimator=EMOptions())
