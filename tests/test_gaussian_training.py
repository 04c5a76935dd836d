"""Training mixtures of Gaussians: where it begins, that it climbs, goes on from checkpoints, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from running import run

import lvpcfg
from lvpcfg import InputError, Model, Parser
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.gaussian import SHARING, GaussianOptions, gaussian
from lvpcfg.estimate.gradient_descent import GradientDescent
from lvpcfg.grammar.gaussian import GaussianRules
from lvpcfg.nn import GrammarLayer
from lvpcfg.trees.brackets import write_trees
from lvpcfg.trees.treebank import build_treebank

TREES = [tree for tree in lvpcfg.corpus("train")[:60] if len(tree.leaves()) <= 12][:12]
FAST = {"epochs": 2, "components": 2, "batch_sentences": 5}


def training(**options) -> GradientDescent:
    found = gaussian(GaussianOptions(**FAST | options), Task(build_treebank(TREES)))
    assert isinstance(found, GradientDescent)
    return found


def likelihood(model: Model) -> float:
    with torch.no_grad():
        return float(GrammarLayer(model, "values").log_prob(TREES).sum())


@pytest.mark.parametrize("sharing", SHARING)
def test_it_begins_with_the_treebank_pcfg_and_climbs(sharing):
    found = training(sharing=sharing, noise=1e-6)
    pcfg = lvpcfg.train(TREES, "count")
    start = likelihood(found.model())
    if sharing == "tied":  # its states differ at random
        assert abs(start - likelihood(pcfg)) < 0.3 * abs(start)
    else:
        assert start == pytest.approx(likelihood(pcfg), rel=1e-4)
    assert len(found.steps) == 2 * 3  # of 5, 5 and 2 sentences
    list(found.run())
    assert likelihood(found.model()) > start + 0.1


def test_options_shape_the_grammar():
    rules = training(covariance="spherical", dimension=2, sharing="shared", components=3).model().grammar.binary
    assert isinstance(rules, GaussianRules)
    assert (rules.mu.shape[1], rules.log_sigma.shape[1], rules.components) == (2, 1, 3)
    assert set(rules.state_counts) == {3, 2}  # of phrases and of tags
    far = training(apart=3.0, noise=0.0).model().grammar.binary
    assert far.mu[:2].diff(dim=0).abs().max() == pytest.approx(3.0)
    near = training(noise=0.01).model().grammar.binary.mu
    assert 0.005 < near.abs().max() <= 0.01


def test_states_of_a_model_become_gaussians_and_these_are_taken_up(tmp_path):
    states = lvpcfg.train(TREES, "em", states=2, iterations=5)
    states.save(tmp_path / "states")
    init = {"init": str(tmp_path / "states"), "apart": 20.0, "noise": 0.0}
    found = training(**init)
    assert likelihood(found.model()) == pytest.approx(likelihood(states), rel=1e-4)
    list(found.run())
    found.model().save(tmp_path / "gaussians")
    again = training(init=str(tmp_path / "gaussians"))
    for name, tensor in found.model().grammar.binary.tensors.items():
        torch.testing.assert_close(again.model().grammar.binary.tensors[name], tensor)
    with pytest.raises(InputError, match="sharing is 'own': a model"):
        training(sharing="own", **init)


def test_the_job_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path):
    write_trees(TREES, tmp_path / "trees.mrg")
    data = {"train": str(tmp_path / "trees.mrg"), "dev": str(tmp_path / "trees.mrg")}
    result, printed = run("train", tmp_path / "whole", estimator=GaussianOptions(**FAST), **data)
    assert "conditional log-likelihood/word" in printed
    one, other = training(), training()
    steps = one.run()
    next(steps)
    one.checkpoint({}).save(tmp_path / "checkpoint.safetensors")
    other.load(tmp_path / "checkpoint.safetensors")
    list(steps)
    list(other.run())
    for name, tensor in one.model().grammar.binary.tensors.items():
        assert torch.equal(other.model().grammar.binary.tensors[name], tensor)
    model = Model.load(tmp_path / "whole" / "model")
    assert isinstance(model.grammar.binary, GaussianRules)
    assert Parser(model, device="cpu").parse(TREES[0].leaves()).leaves() == TREES[0].leaves()
    assert result["f1"] > 50


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sharing": "none"}, "estimator.sharing is 'none': expected own, shared or tied"),
        ({"covariance": "full"}, "estimator.covariance is 'full': expected diagonal or spherical"),
        ({"dimension": 0}, "estimator.dimension is 0: expected 1 or more"),
        ({"noise": -1.0}, "estimator.noise is -1.0: expected 0 or more"),
        ({"average": 2.0}, "estimator.average is 2.0: expected a fraction, 0 to 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(InputError, match=complaint):
        GaussianOptions(**options)


def test_models_with_negative_parameters_are_refused(tmp_path):
    model = lvpcfg.train(TREES, "count")
    values = -model.grammar.binary.values
    signed = replace(model.grammar, binary=model.grammar.binary.with_tensors({"values": values}))
    replace(model, grammar=signed).save(tmp_path)
    with pytest.raises(InputError, match="negative parameters"):
        training(init=str(tmp_path))
