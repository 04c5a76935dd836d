"""job=train: looks at dev, the best model, checkpoints, restarts, TensorBoard."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO

import pytest
from matplotlib.figure import Figure
from running import ROOT, arguments, begin, call, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lvpcfg import InputError, Model, Parser, corpus, write_trees
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation
from lvpcfg.estimate.split_merge import SplitMergeOptions
from lvpcfg.jobs import board, material
from lvpcfg.jobs import training as train_job

EM = EMOptions(states=2, iterations=5)
SPLIT_MERGE = SplitMergeOptions(cycles=2, split_iterations=2, merge_iterations=2, smooth_iterations=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small treebank and a smaller one."""
    folder = tmp_path_factory.mktemp("trees")
    write_trees(corpus("train")[:30], folder / "train.mrg")
    write_trees(corpus("dev")[:5], folder / "dev.mrg")
    return {"train": str(folder / "train.mrg"), "dev": str(folder / "dev.mrg")}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Most of the time would go into drawing; test_board.py looks at pictures."""
    for name in ("draw_trees", "draw_states"):
        monkeypatch.setattr(board, name, lambda *_, **__: Figure((0.1, 0.1)))


def model_files(folder):
    return [(folder / name).read_bytes() for name in ("model.json", "model.safetensors")]


def without_times(result):
    return {name: value for name, value in result.items() if "seconds" not in name}


@contextmanager
def stop_at(number):
    """The iteration with this number, over all trainings, is cut off by Ctrl-C."""
    count, iterate = 0, ExpectationMaximisation._iterate

    def cut(self, step):
        nonlocal count
        count += 1
        if count == number:
            iterate(self, step)  # what it did is forgotten
            raise KeyboardInterrupt
        iterate(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpectationMaximisation, "_iterate", cut)
        yield


# ---------------------------------------------------------------- what a training leaves


@pytest.mark.parametrize("estimator", [EM, SPLIT_MERGE])
def test_a_training_with_dev(tmp_path, files, estimator):
    result, printed = run("train", tmp_path, **files, estimator=estimator, evaluate_every=2)
    assert set(os.listdir(tmp_path)) == {"checkpoint.safetensors", "config.yaml", "model", "result.json", "tensorboard"}
    titles = ["treebank PCFG"]
    titles += ["cycle 1", "cycle 2"] if estimator is SPLIT_MERGE else ["iteration 2", "iteration 4", "iteration 5"]
    lines = [line.split(":")[0] for line in printed.split("\n") if ": " in line and "log-likelihood/word" in line]
    assert lines == titles
    for text in (*titles, "Training with seed 0", "per word", "dropped", "F1 all", "seconds"):
        assert text in printed[printed.index("Grammar (") :]
    names = "f1 precision recall f1_all tagging_accuracy errors sentences states rules log_likelihood_per_word"
    for name in (*names.split(), "last_f1", "last_f1_all", "last_states", "train_seconds", "seed"):
        assert name in result
    assert result["last_iterations"] == (10 if estimator is SPLIT_MERGE else 5)
    model = Model.load(tmp_path / "model")
    assert model.provenance["iterations"] == result["iterations"]
    assert int(model.grammar.states.sum()) == result["states"]
    again, _ = run("evaluate", tmp_path / "again", model=str(tmp_path / "model"), gold=files["dev"])
    assert again["f1"] == result["f1"]


def test_the_best_model_is_kept(tmp_path, files, monkeypatch):
    scores = iter([50.0, 70.0, 60.0])
    real = material.evaluate

    class Scored:
        def __init__(self, *pair):
            self.pair = pair

        def figures(self):
            return real(*self.pair).figures() | {"f1": next(scores)}

    monkeypatch.setattr(material, "evaluate", Scored)
    result, printed = run("train", tmp_path, **files, estimator=SPLIT_MERGE)
    assert (result["f1"], result["last_f1"]) == (70, 60)
    assert (result["iterations"], result["last_iterations"]) == (5, 10)
    assert Model.load(tmp_path / "model").provenance["iterations"] == 5
    assert printed.count("the best so far") == 2
    assert "cycle 1 *" in printed


def test_without_dev_the_last_model_is_kept(tmp_path, files):
    result, printed = run("train", tmp_path, train=files["train"], estimator=SPLIT_MERGE)
    assert result["iterations"] == result["last_iterations"] == 10
    assert Model.load(tmp_path / "model").provenance["iterations"] == 10
    assert "f1" not in result
    assert "F1" not in printed


def test_counting_needs_no_checkpoint(tmp_path, files):
    for resume in (False, True):
        result, printed = run("train", tmp_path, **files, resume=resume)
        assert result["iterations"] == 0
        assert ("There is no checkpoint" in printed) == resume
        assert not list(tmp_path.glob("checkpoint*"))


def test_trees_of_several_files_are_one_treebank(tmp_path, files):
    both = [files["train"], files["dev"]]
    of_both, _ = run("train", tmp_path / "both", train=both, dev=both)
    write_trees([*corpus("train")[:30], *corpus("dev")[:5]], tmp_path / "one.mrg")
    one = str(tmp_path / "one.mrg")
    of_one, _ = run("train", tmp_path / "one", train=one, dev=[one])
    assert of_both["sentences"] == 35
    assert without_times(of_both) == without_times(of_one)
    assert model_files(tmp_path / "both/model")[1] == model_files(tmp_path / "one/model")[1]


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ([], "data.train is []: expected a file, or a list of files"),
        (["a.mrg", 3], "expected a file, or a list of files"),
        (["a.mrg", "b.conllu"], "b.conllu' holds tagged sentences, and 'a.mrg' holds trees: expected the same"),
        (["a.conllu", "b.mrg"], "b.mrg' holds trees, and 'a.conllu' holds tagged sentences: expected the same"),
        (["a.mrg", "b.txt"], "b.txt' is text, and this estimator learns from trees"),
    ],
)
def test_files_that_do_not_go_together(tmp_path, train, says):
    with pytest.raises(InputError) as raised:
        run("train", tmp_path, train=train)
    assert says in str(raised.value)


def test_a_dev_file_without_trees(tmp_path, files):
    (tmp_path / "empty.mrg").write_text("")
    with pytest.raises(InputError, match=r"there is no tree in .*empty\.mrg"):
        run("train", tmp_path / "out", train=files["train"], dev=str(tmp_path / "empty.mrg"))


# ---------------------------------------------------------------- stopped and taken up


@pytest.mark.parametrize(("estimator", "stops"), [(EM, (1, 4)), (SPLIT_MERGE, (3, 6, 8))])
def test_a_training_that_is_stopped_is_taken_up(tmp_path, files, estimator, stops):
    settings = {**files, "estimator": estimator, "evaluate_every": 2, "checkpoint_every": 100}
    expected, _ = run("train", tmp_path / "whole", **settings)
    for stop in stops:
        folder, printed = tmp_path / str(stop), StringIO()
        with stop_at(stop), pytest.raises(KeyboardInterrupt):
            begin("train", folder, printed, **settings)
        text = printed.getvalue()
        assert f"Stopped after {stop - 1} of {expected['last_iterations']} iterations. To go on:" in text
        assert text.strip().split("\n")[-1] == f"lvpcfg job=train resume=true hydra.run.dir={folder}"
        Model.load(folder / "model")
        result, printed = run("train", folder, **settings, resume=True)
        assert f"goes on after iteration {stop - 1}." in printed
        assert without_times(result) == without_times(expected)
        assert model_files(folder / "model") == model_files(tmp_path / "whole/model")
        assert printed.count("cycle 1") + printed.count("iteration 2") >= 1  # in the table, whoever trained it
        log = EventAccumulator(str(folder / "tensorboard")).Reload()
        steps = [event.step for event in log.Scalars("log_likelihood_per_word")]
        assert steps == list(range(1, expected["last_iterations"] + 1))


@pytest.mark.parametrize("reason", [KeyboardInterrupt, InputError("the disk is full."), RuntimeError("a mistake")])
def test_work_is_saved_whatever_stops_a_look_at_dev(tmp_path, files, monkeypatch, reason):
    settings = {**files, "estimator": SPLIT_MERGE, "checkpoint_every": 100}
    expected, _ = run("train", tmp_path / "whole", **settings)
    looks = 0
    parse = Parser.parse_sents

    def parse_sents(self, *arguments, **options):
        nonlocal looks
        looks += 1
        if looks == 3:
            raise reason
        return parse(self, *arguments, **options)

    monkeypatch.setattr(Parser, "parse_sents", parse_sents)
    with pytest.raises(type(reason) if isinstance(reason, Exception) else reason):
        begin("train", tmp_path / "out", **settings)
    result, printed = run("train", tmp_path / "out", **settings, resume=True)
    assert "goes on after iteration 10." in printed  # what was not looked at is, and no iteration is done again
    assert without_times(result) == without_times(expected)


def test_checkpoints_are_made_every_so_often(tmp_path, files, monkeypatch):
    saved = []
    monkeypatch.setattr(train_job.Checkpoint, "save", lambda self, path: saved.append(self.done))
    run("train", tmp_path, **files, estimator=replace(EM, iterations=8), checkpoint_every=3)
    assert saved == [3, 6, 8]


def test_a_finished_training_says_so(tmp_path, files):
    settings = {**files, "estimator": EM}
    first, _ = run("train", tmp_path, **settings)
    files_before = model_files(tmp_path / "model")
    (tmp_path / "result.json").unlink()
    again, printed = run("train", tmp_path, **settings, resume=True)
    assert "is finished already." in printed
    assert again == first == json.loads((tmp_path / "result.json").read_text())
    assert model_files(tmp_path / "model") == files_before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": False}, "holds a training already: resume=true goes on with it"),
        ({"estimator": replace(EM, states=3)}, "was made with estimator.states 2, and this training has 3"),
        ({"seed": 7}, "was made with seed 0, and this training has 7"),
        ({"dev": None}, "was made with another data.dev: resume with the same one"),
        ({"decoder": "viterbi"}, "was made with another decoder"),
        ({"restarts": 2}, "was not made with restarts=2: resume with the same number"),
    ],
)
def test_another_training_is_refused_and_nothing_is_changed(tmp_path, files, change, message):
    settings = {**files, "estimator": EM, "resume": True}
    run("train", tmp_path, **settings)
    (tmp_path / "config.yaml").write_text("as it was")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=message):
        run("train", tmp_path, **(settings | change))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_a_crash_left_half_written_is_removed(tmp_path, files):
    for name in (".checkpoint.safetensors.17.tmp", "model/.model.json.17.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    run("train", tmp_path, **files, estimator=EM, resume=True)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


# ---------------------------------------------------------------- restarts


def test_a_second_signal_does_not_cost_the_checkpoint(tmp_path, files, monkeypatch):
    save = Checkpoint.save

    def disturbed(self, path):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        save(self, path)

    monkeypatch.setattr(Checkpoint, "save", disturbed)
    with stop_at(3), pytest.raises(KeyboardInterrupt):
        run("train", tmp_path, train=files["train"], estimator=EM)
    monkeypatch.undo()
    _, printed = run("train", tmp_path, train=files["train"], estimator=EM, resume=True)
    assert "goes on after iteration 2." in printed


@pytest.mark.parametrize("dev", [True, False])
def test_restarts_keep_every_model_and_the_best(tmp_path, files, dev):
    settings = {**files, "estimator": EM, "restarts": 3, "seed": 4}
    if not dev:
        del settings["dev"]
    result, printed = run("train", tmp_path / "whole", **settings)
    models = [model_files(tmp_path / f"whole/model_{i}") for i in range(3)]
    seeds = [Model.load(tmp_path / f"whole/model_{i}").provenance["seed"] for i in range(3)]
    assert seeds == [4, 5, 6]
    assert model_files(tmp_path / "whole/model") == models[result["seed"] - 4]
    assert f"The best of 3 restarts is the one with seed {result['seed']}." in printed
    assert printed.count("Training with seed") == 3
    score, scores = "f1" if dev else "log_likelihood_per_word", []
    for i in range(3):  # the same as one by one
        alone, _ = run("train", tmp_path / str(i), **(settings | {"restarts": 1, "seed": 4 + i}))
        assert model_files(tmp_path / f"{i}/model") == models[i]
        scores.append(alone[score])
    assert result[score] == max(scores)
    assert result["seed"] == 4 + scores.index(max(scores))

    with stop_at(8), pytest.raises(KeyboardInterrupt):  # in the second one
        begin("train", tmp_path / "stopped", **settings)
    again, printed = run("train", tmp_path / "stopped", **settings, resume=True)
    assert printed.count("is finished already.") == printed.count("goes on after iteration 2.") == 1
    assert without_times(again) == without_times(result)
    for name in ("model", "model_0", "model_1", "model_2"):
        assert model_files(tmp_path / "stopped" / name) == model_files(tmp_path / "whole" / name)
    assert sorted(os.listdir(tmp_path / "whole/tensorboard")) == ["restart_0", "restart_1", "restart_2"]


# ---------------------------------------------------------------- as commands


STOPPING = """
import os, sys
from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation
from lvpcfg.command import main

iterate, (number, kind, *sys.argv) = ExpectationMaximisation._iterate, sys.argv[1:]

def stop(self, step):
    if self.done == int(number):
        os.kill(os.getpid(), int(kind))
    iterate(self, step)

ExpectationMaximisation._iterate = stop
main()
"""


def test_killed_terminated_interrupted_and_taken_up(tmp_path):
    """The command, sent a signal after so many iterations. Without dev, and so without pictures."""
    write_trees(corpus("train")[:50], tmp_path / "train.mrg")
    options = [
        *("job=train", f"data.train={tmp_path / 'train.mrg'}", "checkpoint_every=1", "threads=1"),
        *("estimator=em", "estimator.states=2", "estimator.iterations=12"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = tmp_path / "out"
    for number, kind, code in ((3, signal.SIGKILL, -9), (6, signal.SIGTERM, 143), (9, signal.SIGINT, 130)):
        _, *line = arguments(*options, "resume=true", f"hydra.run.dir={folder}")
        done = subprocess.run(
            [sys.executable, "-c", STOPPING, str(number), str(int(kind)), *line],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert len(Model.load(folder / "model").grammar.states) > 10
        if kind != signal.SIGKILL:
            line = f"python {ROOT / 'run.py'} {' '.join(options)} resume=true hydra.run.dir={folder}"
            assert done.stdout.strip().split("\n")[-1] == line
    settings = {"train": str(tmp_path / "train.mrg"), "estimator": EMOptions(states=2, iterations=12)}
    _, printed = run("train", folder, **settings, resume=True)
    assert "goes on after iteration 9." in printed
    run("train", tmp_path / "whole", **settings)
    assert model_files(folder / "model") == model_files(tmp_path / "whole/model")
    results = [json.loads((path / "result.json").read_text()) for path in (folder, tmp_path / "whole")]
    assert without_times(results[0]) == without_times(results[1])


def test_sweeps_compare_by_dev(tmp_path, files, capfd):
    call(
        *(
            "-m",
            "job=train",
            "estimator=em",
            "estimator.states=1,2",
            "estimator.iterations=2",
            f"hydra.sweep.dir={tmp_path}",
        ),
        *(f"data.train={files['train']}", f"data.dev={files['dev']}"),
        "+hydra.callbacks.returned._target_=running.Returned",
    )
    results = [json.loads((tmp_path / f"{i}/result.json").read_text()) for i in (0, 1)]
    assert [f"returned {result['f1']}" for result in results] == [
        line for line in capfd.readouterr().out.split("\n") if line.startswith("returned")
    ]
    for i, result in enumerate(results):
        log = EventAccumulator(str(tmp_path / f"{i}/tensorboard")).Reload()
        assert log.Scalars("best/f1")[-1].value == pytest.approx(result["f1"], abs=0.01)
        data = HParamsPluginData.FromString(log.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
        assert data.session_start_info.hparams["estimator.states"].number_value == i + 1
