"""EM that goes on from a model: estimator.init."""

from dataclasses import replace

import pytest
import torch
from running import begin, run
from test_training import estimator

import lvpcfg
from lvpcfg import InputError, build_treebank, corpus, write_trees
from lvpcfg.estimate import projections
from lvpcfg.estimate.cluster import ClusterOptions
from lvpcfg.estimate.em import FRESH, TAKEN_UP, EMOptions
from lvpcfg.estimate.kruskal_em import KruskalEMOptions
from lvpcfg.grammar.rule_cp import RuleCP

TRAIN = corpus("dev")[:60]


@pytest.fixture(autouse=True)
def small_symbols_have_states(monkeypatch):
    monkeypatch.setattr(projections, "FEW", 2)
    monkeypatch.setattr(projections, "MANY", 20)


def saved(folder, name, trees=TRAIN, **options):
    lvpcfg.train(trees, name, **options).save(folder)
    return str(folder)


PLAIN = {"smooth_rules": 0.0, "smooth_words": 0.0}


def going_on(init, **options):
    return estimator(build_treebank(TRAIN), EMOptions(init=init, **options))


def likelihoods(training):
    return [training.log_likelihood for _ in training.run()]


def test_its_own_model_goes_on_where_it_stopped(tmp_path):
    whole = estimator(build_treebank(TRAIN), EMOptions(states=2, iterations=6))
    expected = likelihoods(whole)
    again = going_on(saved(tmp_path / "em", "em", states=2, iterations=4), iterations=1, **PLAIN)
    found = likelihoods(again)
    assert found[0] > expected[3]  # that of the model: the first E-step was made when it was read
    assert found[0] == pytest.approx(expected[5], rel=2e-3)  # but for the smoothing of the lexicon
    assert again.figures()["states"] == whole.figures()["states"]  # `states`, 16, is not heeded


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cluster", {"states": 3}),
        ("split_merge", {"cycles": 1, "split_iterations": 2, "merge_iterations": 1, "smooth_iterations": 1}),
        ("kruskal_em", {"cycles": 0, "states": 2, "rank": 1, "split_iterations": 2}),
    ],
)
def test_it_takes_up_models_of_other_estimators(name, options, tmp_path):
    init = saved(tmp_path / "model", name, **options)
    start = lvpcfg.Model.load(init).grammar
    training = going_on(init, iterations=3, **PLAIN)
    found = likelihoods(training)
    assert found == sorted(found)
    model = training.model()
    assert model.grammar.states.tolist() == start.states.tolist()
    assert max(start.states.tolist()) > 1
    assert isinstance(model.grammar.binary, RuleCP) == (name == "kruskal_em")
    assert model.provenance["options"]["init"] == init


@pytest.mark.parametrize("options", [{"states": 3}, {"states": 4, "inside": ["rule", "word"], "share": 0.2}])
def test_a_spectral_model_gives_its_clusters(options, tmp_path):
    init = saved(tmp_path / "model", "spectral", seed=5, **options)
    assert lvpcfg.Model.load(init).grammar.signed
    found = going_on(init, rare=7).refinement.tensors()
    expected = estimator(build_treebank(TRAIN), ClusterOptions(rare=7, **options), seed=5).refinement.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    other = estimator(build_treebank(TRAIN), ClusterOptions(rare=7, **options), seed=0).refinement.tensors()
    assert not all(torch.equal(found[name], other[name]) for name in found)


def test_it_is_smoothed_as_clusters_are(tmp_path):
    init = saved(tmp_path / "model", "cluster", states=3, iterations=2)
    start = lvpcfg.Model.load(init).grammar
    training = going_on(init, iterations=1)
    log_likelihood = training.figures()["log_likelihood_per_word"]
    list(training.run())
    longer = lvpcfg.train(TRAIN, "cluster", states=3, iterations=4).grammar
    found = training.grammar()  # the E-step under the model was the third, and this is the fourth
    torch.testing.assert_close(found.binary.values.float(), longer.binary.values.float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.unary.float(), longer.unary.float(), rtol=1e-3, atol=1e-5)
    assert training.figures()["log_likelihood_per_word"] == pytest.approx(log_likelihood)
    plain = going_on(init, iterations=1, **PLAIN)
    list(plain.run())
    assert int((plain.grammar().binary.values > 0).sum()) < int((found.binary.values > 0).sum())
    assert start.states.tolist() == found.states.tolist()


def test_what_goes_on_is_short_and_smoothed():
    fresh, taken_up = EMOptions().filled(FRESH), EMOptions(init="a").filled(TAKEN_UP)
    assert (fresh.iterations, fresh.weights) == (50, None)
    assert (taken_up.iterations, taken_up.weights) == (10, (0.01, 0.1))
    assert EMOptions(init="a", iterations=3).filled(TAKEN_UP).iterations == 3
    assert EMOptions(init="a", **PLAIN).filled(TAKEN_UP).weights is None
    assert EMOptions(smooth_rules=0.3).filled(FRESH).weights == (0.3, 0.0)


def test_models_that_it_cannot_take_up(tmp_path):
    other = saved(tmp_path / "other", "cluster", trees=corpus("dev")[60:90], states=2)
    with pytest.raises(InputError, match=r"has other symbols, rules or binarisation than the trees: expected one that"):
        going_on(other)
    signed = lvpcfg.compress(lvpcfg.train(TRAIN, "em", states=2, iterations=2), method="svd")
    signed.save(tmp_path / "signed")
    with pytest.raises(InputError, match="has negative parameters: expected a non-negative one"):
        going_on(str(tmp_path / "signed"))
    with pytest.raises(InputError, match="is not a model folder"):
        going_on(str(tmp_path / "nothing"))
    spectral = lvpcfg.train(TRAIN, "spectral", states=2)
    for wrong in ({"options": None}, {"options": {}}, {"seed": "x"}):
        replace(spectral, provenance=spectral.provenance | wrong).save(tmp_path / "wrong")
        with pytest.raises(InputError, match="does not say with which options and seed it was made"):
            going_on(str(tmp_path / "wrong"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": 5}, "estimator.init is 5: expected a model folder"),
        ({"init": "a", "objective": "sentence"}, "estimator.init is for estimator.objective=joint"),
        ({"smooth_rules": 0.1, "objective": "sentence"}, "are for estimator.objective=joint: expected 0"),
        ({"iterations": 0}, "estimator.iterations is 0: expected 1 or more"),
        ({"iterations": 1.5}, "estimator.iterations is 1.5: expected a whole number"),
        ({"smooth_words": 2}, "estimator.smooth_words is 2: expected a fraction, 0 to 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        EMOptions(**options)


@pytest.mark.parametrize("options", [EMOptions(init="a"), KruskalEMOptions(init="a")])
def test_restarts_that_would_all_be_the_same(options, tmp_path):
    with pytest.raises(InputError, match="restarts is 2, but this training is the same for every seed: expected 1"):
        run("train", tmp_path, estimator=options, restarts=2)


def test_the_seed_matters_where_there_is_noise():
    assert EMOptions().heeds_seed
    assert KruskalEMOptions().heeds_seed
    assert KruskalEMOptions(init="a", cycles=1).heeds_seed


def test_the_job_begins_with_the_model_and_knows_it_again(tmp_path):
    write_trees(TRAIN, tmp_path / "train.mrg")
    init = saved(tmp_path / "model", "cluster", states=2)
    settings = {"train": str(tmp_path / "train.mrg"), "estimator": EMOptions(init=init, iterations=2)}
    _, printed = run("train", tmp_path / "run", **settings)
    assert "start: 66 states, log-likelihood/word" in printed
    _, printed = run("train", tmp_path / "run", **settings, resume=True)
    assert "is finished already" in printed
    replace(lvpcfg.Model.load(init), provenance={}).save(init)
    with pytest.raises(InputError, match=r"was made with model of estimator\.init"):
        begin("train", tmp_path / "run", **settings, resume=True)
