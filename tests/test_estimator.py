"""Estimators of a user's own: all that training knows of them is the protocol."""

import importlib
import subprocess
import sys
from dataclasses import asdict, dataclass

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from pages import blocks
from running import ROOT, begin, every_entry, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lvpcfg
from lvpcfg import InputError, Model, build_treebank, corpus, write_trees
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import Options, Step, Task
from lvpcfg.estimate.latent import observed_counts
from lvpcfg.jobs import board
from lvpcfg.registry import ESTIMATORS
from lvpcfg.trees.lexicon import build_lexicon


@dataclass
class MineOptions(Options):
    name: str = "mine"
    enough: int = 4


class Mine:
    """Takes the first trees of the treebank, two more in each step, until it has enough words from them.

    It has no model before the first step, no log-likelihood, and may be finished before its last step.
    """

    start = None
    shown = ("surprise",)
    tasks = ()  # all that were given

    def __init__(self, options, task):
        type(self).tasks += (task,)
        self.options, self.task, self.done = options, task, 0
        evaluate = {0: "sometimes", 1: "never"}
        self.steps = [Step(f"step {i + 1}", f"{2 * i + 2} trees", evaluate[i % 2]) for i in range(10)]

    @property
    def finished(self):
        return self.done == self.options.enough

    def run(self):
        while not self.finished:
            self.done += 1
            yield self.steps[self.done - 1]

    def figures(self):
        return {"surprise": float(-((self.task.seed - 1) ** 2)), "taken": 2 * self.done}

    def model(self):
        treebank = build_treebank(self.task.treebank.to_trees()[: 2 * self.done])
        lexicon, unseen = build_lexicon(treebank, self.task.signature)
        latent, counts = observed_counts(treebank, lexicon, unseen)
        provenance = {"estimator": "mine", "iterations": self.done}
        return Model(latent.grammar(counts), lexicon, self.task.treebank.binarisation, provenance)

    def checkpoint(self, notes):
        return Checkpoint(self.task.made_of(self.options), self.done, notes, {"nothing": torch.zeros(0)})

    def load(self, path):
        found = Checkpoint.load(path, self.task.made_of(self.options))
        self.done = found.done
        return found.notes


@pytest.fixture
def registry(monkeypatch):
    """What is registered here is forgotten afterwards."""
    monkeypatch.setattr(ESTIMATORS, "_entries", every_entry(ESTIMATORS))
    return ESTIMATORS


@pytest.fixture
def mine(registry, monkeypatch):
    monkeypatch.setattr(Mine, "tasks", ())
    return registry.register("mine", MineOptions)(Mine)


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name in ("draw_trees", "draw_states"):
        monkeypatch.setattr(board, name, lambda *_, **__: Figure((0.1, 0.1)))
    write_trees(corpus("train")[:30], tmp_path / "train.mrg")
    write_trees(corpus("dev")[:5], tmp_path / "dev.mrg")
    return {"train": str(tmp_path / "train.mrg"), "dev": str(tmp_path / "dev.mrg")}


def test_an_estimator_of_ones_own_from_python(mine):
    trees = corpus("dev")
    model = lvpcfg.train(trees[:30], "mine", seed=7, dev=trees[30:32], enough=3)
    assert model.provenance["estimator"] == "mine"
    assert model.provenance["iterations"] == 3
    assert model.lexicon.words == build_treebank(trees[:6]).words
    (task,) = mine.tasks
    assert (len(task.treebank), task.seed, task.device, len(task.dev)) == (30, 7, "cpu", 2)
    with pytest.raises(InputError, match="the estimator mine has no option 'states': it has enough"):
        lvpcfg.train(trees[:3], "mine", states=2)
    with pytest.raises(
        InputError,
        match="estimator is 'mein': expected cluster, count, em, gaussian, gradient, kruskal_em, mine, spectral or",
    ):
        lvpcfg.train(trees[:3], "mein")


def test_the_job_asks_the_protocol_alone(tmp_path, files, mine):
    result, printed = run("train", tmp_path / "out", **files, estimator=MineOptions(enough=6), evaluate_every=1)
    lines = [line.split(":")[0] for line in printed.split("\n") if ": surprise -1.0000, dev F1" in line]
    assert lines == ["2 trees", "6 trees", "10 trees", "12 trees"]  # the last is looked at, whatever its step says
    assert (result["surprise"], result["last_iterations"], result["last_taken"]) == (-1, 6, 12)
    assert Model.load(tmp_path / "out/model").provenance["iterations"] == result["iterations"]
    assert len(mine.tasks[0].dev) == 5
    log = EventAccumulator(str(tmp_path / "out/tensorboard")).Reload()
    assert [event.value for event in log.Scalars("taken")] == [2, 4, 6, 8, 10, 12]
    assert log.Scalars("best/surprise")[-1].value == -1


def test_restarts_are_compared_by_the_objective(tmp_path, files, mine):
    result, _ = run("train", tmp_path / "out", train=files["train"], estimator=MineOptions(), restarts=3)
    assert (result["seed"], result["surprise"]) == (1, 0)
    assert all(task.dev is None for task in mine.tasks)


def test_a_stopped_training_is_taken_up(tmp_path, files, mine, monkeypatch):
    settings = {**files, "estimator": MineOptions(enough=6), "evaluate_every": 3}
    expected, _ = run("train", tmp_path / "whole", **settings)
    figures = Mine.figures

    def stop(self):
        if self.done == 4:
            raise KeyboardInterrupt
        return figures(self)

    monkeypatch.setattr(Mine, "figures", stop)
    with pytest.raises(KeyboardInterrupt):
        begin("train", tmp_path / "out", **settings)
    monkeypatch.setattr(Mine, "figures", figures)
    result, printed = run("train", tmp_path / "out", **settings, resume=True)
    assert "goes on after iteration 3." in printed
    assert {name: value for name, value in result.items() if "seconds" not in name} == {
        name: value for name, value in expected.items() if "seconds" not in name
    }
    with pytest.raises(InputError, match=r"was made with estimator\.enough 6, and this training has 5"):
        begin("train", tmp_path / "out", **(settings | {"estimator": MineOptions(enough=5)}), resume=True)


def test_two_estimators_of_one_name_are_refused(mine):
    with pytest.raises(InputError, match="'mine' already"):
        ESTIMATORS.register("mine", MineOptions)(lambda options, task: Mine(options, task))


def test_the_worked_example(tmp_path, files, registry, monkeypatch):
    """The blocks of docs/add_an_estimator.md are what they say they are."""
    module, options, use = (block.text for block in blocks(ROOT / "docs/add_an_estimator.md") if block.test)
    assert module.startswith("# lvpcfg/estimate/laplace.py")
    (tmp_path / "laplace_of_the_page.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    laplace = importlib.import_module("laplace_of_the_page")

    written = yaml.safe_load(options)
    assert written == asdict(laplace.LaplaceOptions())

    trees = corpus("train")[:30]
    names = {"lvpcfg": lvpcfg, "trees": trees}
    exec(use, names)
    model, counted = names["model"], lvpcfg.train(trees)
    assert model.provenance["options"] == {"name": "laplace", "constant": 0.5}
    sums = model.grammar.row_sums()
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert not torch.allclose(model.grammar.unary, counted.grammar.unary)
    torch.testing.assert_close(lvpcfg.train(trees, "laplace", constant=0.0).grammar.unary, counted.grammar.unary)
    with pytest.raises(InputError, match=r"estimator\.constant is -1: expected 0 or more"):
        lvpcfg.train(trees, "laplace", constant=-1)

    result, printed = run("train", tmp_path / "out", **files, estimator=laplace.LaplaceOptions())
    assert "with the constant: " in printed
    assert result["f1"] > 0
    again, printed = run("train", tmp_path / "out", **files, estimator=laplace.LaplaceOptions(), resume=True)
    assert "is finished already." in printed
    assert again == result


LIGHT = """
import sys, types
package = types.ModuleType("lvpcfg")  # without what the package itself imports
package.__path__ = [sys.argv[1]]
sys.modules["lvpcfg"] = package
from lvpcfg.registry import ESTIMATORS
for name in ESTIMATORS.names():
    print(ESTIMATORS[name].options().name)
print([name for name in ("torch", "nltk", "numpy") if name in sys.modules])
"""


def test_options_are_made_without_torch_and_nltk():
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(ROOT / "lvpcfg")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == [*ESTIMATORS.names(), "[]"]


def test_a_task_is_told_apart_from_others():
    treebank = build_treebank(corpus("dev")[:3])
    task = Task(treebank, seed=1)
    assert task.made_of(MineOptions()) == Task(build_treebank(corpus("dev")[:3]), seed=1).made_of(MineOptions())
    for other in (Task(build_treebank(corpus("dev")[2::-1]), seed=1), Task(treebank), Task(treebank, "suffix", 1)):
        assert task.made_of(MineOptions()) != other.made_of(MineOptions())
    assert task.made_of(MineOptions()) != task.made_of(MineOptions(enough=5))
