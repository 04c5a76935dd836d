"""Training mixtures of Gaussians: where it begins, that it climbs, goes on from checkpoints, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
from running import run

import lvpcfg
from lvpcfg import InputError, Model, Parser, Tagger
from lvpcfg.estimate.estimator import TaggingTask, Task
from lvpcfg.estimate.gaussian import SHARING, GaussianOptions, gaussian
from lvpcfg.estimate.gradient_descent import GradientDescent
from lvpcfg.evaluation.pictures import draw_gaussians
from lvpcfg.grammar.gaussian import GaussianRules
from lvpcfg.nn import GrammarLayer
from lvpcfg.trees.brackets import write_trees
from lvpcfg.trees.tagged import build_tagged
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import tagged_words

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


# Taggers

TAGGED = [tagged_words(tree) for tree in TREES]


def tagger(**options) -> GradientDescent:
    task = TaggingTask(build_tagged(TAGGED))
    return gaussian(GaussianOptions(**{"epochs": 2, "batch_sentences": 5, "unknown": 0.0} | options), task)


def test_the_weight_of_tagged_words_is_an_integral():
    """Over the vectors of all tags; by the trapezoid rule."""
    objective = tagger(dimension=1, noise=0.7).objective
    layer, lexicon = objective.module, objective.task.layout.lexicon
    r = torch.linspace(-9, 9, 91, dtype=torch.float64)
    grammar, m, tags = layer.grammar(), 2, objective.task.corpus.tags
    with torch.no_grad():
        layer.log_sigma += torch.linspace(-0.3, 0.3, len(layer.mu)).unsqueeze(1)
        mu, sigma = layer.mu.double(), layer.log_sigma.double().exp()
        density = (-0.5 * ((r - mu) / sigma) ** 2).exp() / (sigma * math.sqrt(2 * math.pi))  # [states, points]
        step = float(r[1] - r[0])
        members = objective.members[0]
        found = objective.log_likelihood(objective.batches[0], torch.Generator())
        log_z = []
        for number in members:
            entries = torch.tensor(lexicon.encode([word for word, _ in TAGGED[number]]))
            words = grammar.lexical.lookup(entries).double()
            gold = [tags.index(tag) for _, tag in TAGGED[number]]
            weights = []
            for allowed in ([[tag] for tag in gold], [range(len(tags))] * len(gold)):
                rest: dict[int, torch.Tensor] = {}  # functions of the vector of the next tag
                for place in reversed(range(len(gold))):
                    new = {}
                    for tag in allowed[place]:
                        own = slice(tag * m, tag * m + m)
                        value = layer.final.double().exp()[own]
                        if rest:
                            rows = layer.transition.double().exp()[own]
                            value = sum(
                                rows[:, t * m : t * m + m] @ (density[t * m : t * m + m] @ f) * step
                                for t, f in rest.items()
                            )
                        new[tag] = (words[place, own] * value) @ density[own]
                    rest = new
                first = layer.initial.double().exp()
                weights.append(
                    sum(
                        float(first[t * m : t * m + m] @ (density[t * m : t * m + m] @ f)) * step
                        for t, f in rest.items()
                    )
                )
            log_z.append(math.log(weights[0] / weights[1]))
    assert found.tolist() == pytest.approx(log_z, rel=1e-4, abs=1e-4)


def test_taggers_begin_as_the_states_they_are_made_of_and_climb(tmp_path):
    states = lvpcfg.train(TAGGED, "em", states=2, iterations=3)
    states.save(tmp_path)
    found = tagger(init=str(tmp_path), apart=20.0, noise=0.0)
    chain, truth = found.model().grammar.chain, states.grammar.chain
    for one, other in zip(chain.tensors, truth.tensors, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-6)
    start = found.figures()[found.shown[-1]]
    list(found.run())
    assert found.figures()[found.shown[-1]] > start
    assert Tagger(found.model()).tag_sents([["No", "."]])
    with pytest.raises(InputError, match="sharing is 'own': taggers are tied"):
        GaussianOptions(sharing="own").check_tags()


@pytest.mark.parametrize("dimension", [1, 3])
def test_inspect_draws_the_gaussians(dimension, tmp_path):
    training(dimension=dimension, components=3).model().save(tmp_path / "model")
    figures, printed = run("inspect", tmp_path / "run", model=str(tmp_path / "model"), symbol=["NP", "NN"])
    assert "gaussians.png" in printed
    assert (tmp_path / "run" / "gaussians.png").read_bytes().startswith(b"\x89PNG")
    assert figures["states"] > 3


def test_a_picture_has_a_mark_for_each_gaussian():
    sigma = torch.ones(3, 2)
    figure = draw_gaussians({"NP": (torch.arange(6.0).view(3, 2), sigma), "NN": (torch.zeros(2, 1), sigma[:2, :1])})
    of_phrase, of_tag = figure.axes
    assert len(of_phrase.patches) == 3
    assert len(of_tag.lines) == 2
