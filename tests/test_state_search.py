"""The search for numbers of states: symbol by symbol, by a score that is handed in."""

from dataclasses import replace

import pytest
import torch

from lvpcfg import InputError, build_treebank, corpus, train
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.spectral import SpectralOptions
from lvpcfg.estimate.spectral_training import Spectral
from lvpcfg.evaluation.directions import directions_of

SYMBOLS = ("NP", "VP")


@pytest.fixture(scope="module")
def task():
    """The best model has one state for VP, half of its states for NP, and all for the others."""
    treebank = build_treebank(corpus("train")[:400])

    def f1(model):
        states = dict(zip(model.grammar.symbols.names, model.grammar.states.tolist(), strict=True))
        return float(sum(states.values()) - 5 * abs(states["NP"] - 2) - 5 * abs(states["VP"] - 1))

    return Task(treebank, f1=f1)


def done(task, minutes=100.0, steps=None, checkpoint=None):
    training = Spectral(SpectralOptions(states=4, search_minutes=minutes), task)
    if checkpoint is not None:
        training.load(checkpoint)
    for number, _ in enumerate(training.run(), 1):
        if number == steps:
            break
    return training


def test_the_numbers_with_the_best_score_are_found(task):
    training = done(task)
    names = list(task.treebank.symbols.names)
    found, at_first = training.best[0], training.projections.nodes.states
    assert [found[names.index(name)] for name in SYMBOLS] == [2, 1]
    others = torch.tensor([name not in SYMBOLS for name in names])
    assert torch.equal(found[others], at_first[others])
    model = training.model()
    assert model.grammar.states.tolist() == found.tolist()
    for name, about in directions_of(model).items():
        assert len(about.inside) == found[names.index(name)] - 1
    assert training.figures()["searched_f1"] == task.f1(training.model())


def test_a_search_that_was_stopped_goes_on(task, tmp_path):
    whole = done(task)
    training = done(task, steps=3)
    training.checkpoint({}).save(tmp_path / "checkpoint")
    again = done(task, checkpoint=tmp_path / "checkpoint")
    assert again.done == whole.done == len(whole.steps)
    assert torch.equal(again.best, whole.best)
    assert torch.equal(again.f1, whole.f1)


def test_the_time_is_bounded(task):
    training = done(task, minutes=1e-9)
    assert training.finished
    assert training.done == 2 < len(training.steps)  # the first symbol was begun
    assert torch.equal(training.best[0], training.projections.nodes.states)


def test_dev_is_needed(task):
    with pytest.raises(InputError, match=r"estimator\.search_minutes needs trees to choose by"):
        Spectral(SpectralOptions(search_minutes=1.0), replace(task, f1=None))
    trees = corpus("train")[:400]
    model = train(trees, "spectral", states=4, search_minutes=1e-9, dev=trees[:2])
    assert model.provenance["iterations"] == 2
