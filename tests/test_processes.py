"""Training in several processes: sums equal those of one process, one writes and speaks, and one may die."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from running import ROOT, run

from lvpcfg import InputError, Model, corpus, processes, write_trees
from lvpcfg.estimate import projections
from lvpcfg.estimate.cluster import ClusterOptions
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.estimator import TaggingTask, Task
from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation
from lvpcfg.estimate.gaussian import GaussianOptions
from lvpcfg.estimate.gradient import GradientOptions
from lvpcfg.estimate.kruskal_em import KruskalEMOptions
from lvpcfg.estimate.spectral import SpectralOptions
from lvpcfg.estimate.split_merge import SplitMergeOptions
from lvpcfg.estimate.states import merge_losses
from lvpcfg.estimate.terms import term_losses
from lvpcfg.jobs import board
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.registry import ESTIMATORS
from lvpcfg.trees.tagged import build_tagged
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import tagged_words

TREES = [tree for tree in corpus("train")[:60] if len(tree.leaves()) <= 10][:12]
EM = EMOptions(states=2, iterations=3)
SPLIT_MERGE = SplitMergeOptions(cycles=1, split_iterations=3, merge_iterations=2, smooth_iterations=1)
GRADIENT = GradientOptions(states=2, epochs=1, batch_tokens=100)
CLUSTER, SPECTRAL = ClusterOptions(states=2, iterations=2), SpectralOptions(states=2)
TRAININGS = {  # options of job=train
    "split_merge": {"estimator": SPLIT_MERGE, "dev": None},
    "restarts": {"estimator": EM, "restarts": 2, "evaluate_every": 2, "patience": 1},
    "gradient": {"estimator": GRADIENT, "dev": None},
    "cluster": {"estimator": CLUSTER, "dev": None},
    "spectral": {"estimator": SPECTRAL, "dev": None},
}


@pytest.fixture(autouse=True)
def small_symbols_have_states(monkeypatch):
    monkeypatch.setattr(projections, "FEW", 2)
    monkeypatch.setattr(projections, "MANY", 10)


def files(folder):
    return {"train": str(folder / "train.mrg"), "dev": str(folder / "dev.mrg")}


def computed():
    """What is summed over processes, counts, merge losses and gradients, and what each computes for itself; by name."""
    task, found = Task(build_treebank(TREES)), {}
    estimator = ESTIMATORS["em"].run(EM, task)
    steps = estimator.run()
    for step in (1, 2):
        next(steps)
        refinement = estimator.refinement
        found |= {f"em {step} {name}": tensor.double() for name, tensor in refinement.tensors().items()}
        found[f"em {step} log-likelihood"] = torch.tensor(estimator.log_likelihood, dtype=torch.float64)
    found["merge losses"] = merge_losses(refinement.latent, refinement.counts)[0]
    start = ESTIMATORS["kruskal_em"].run(KruskalEMOptions(states=2, rank=2, noise=1.0), task).refinement
    log_likelihood, refinement = start.expect(None)
    found["kruskal log-likelihood"] = torch.tensor(log_likelihood, dtype=torch.float64)
    found |= {f"kruskal {name}": tensor.double() for name, tensor in refinement.tensors().items()}
    found["kruskal term losses"] = term_losses(refinement.latent, refinement.counts)[0]
    clustering = ESTIMATORS["cluster"].run(CLUSTER, task)
    found |= {f"cluster {name}": tensor.double() for name, tensor in clustering.refinement.tensors().items()}
    next(clustering.run())
    found |= {f"cluster, em {name}": tensor.double() for name, tensor in clustering.refinement.tensors().items()}
    grammar = ESTIMATORS["spectral"].run(SPECTRAL, task).found
    found |= {"spectral rules": grammar.binary.values, "spectral words": grammar.lexical.value}
    for objective, words in (("conditional", 100), ("joint", 1)):  # a batch of one tree, so that a process has none
        options = GradientOptions(states=2, objective=objective, batch_tokens=words)
        training = ESTIMATORS["gradient"].run(options, task)
        loss = training._loss(training.objective.batches[:1], training.steps[0])
        found[f"{objective} loss"] = torch.tensor(loss, dtype=torch.float64)
        found |= {f"{objective} {name}": parameter.grad for name, parameter in training.module.named_parameters()}
    options = GradientOptions(states=2, objective="joint", optimiser="lbfgs", average=0.0)
    training = ESTIMATORS["gradient"].run(options, task)
    next(training.run())
    found |= {f"lbfgs {name}": parameter.detach() for name, parameter in training.module.named_parameters()}
    tagged = TaggingTask(build_tagged([tagged_words(tree) for tree in TREES]))
    for name, some in (("trees", task), ("tags", tagged)):
        training = ESTIMATORS["gaussian"].run(GaussianOptions(components=2, noise=0.5, batch_sentences=5), some)
        loss = training._loss(training.objective.batches[:1], training.steps[0])
        found[f"gaussian {name} loss"] = torch.tensor(loss, dtype=torch.float64)
        found |= {f"gaussian {name} {key}": value.grad for key, value in training.module.named_parameters()}
    return found


def work(folder):
    """What each of two processes does; the second has a folder of its own for what it should not write."""
    torch.set_num_threads(1)
    for name in ("draw_trees", "draw_states"):  # most of the time would go into drawing
        setattr(board, name, lambda *_, **__: Figure((0.1, 0.1)))
    projections.FEW, projections.MANY = 2, 10  # this process is only for this
    processes.begin()
    rank = processes.rank()
    settings = files(folder)
    torch.save(computed(), folder / f"computed_{rank}.pt")
    own = folder / ("written" if rank == 0 else "not_written")
    for name, options in TRAININGS.items():
        run("train", own / name, **settings | options)
    iterate = ExpectationMaximisation._iterate

    def stop(self, step):
        if self.done == 3:
            raise KeyboardInterrupt
        iterate(self, step)

    ExpectationMaximisation._iterate = stop
    try:
        run("train", folder / "resumed", **settings | TRAININGS["split_merge"])
    except KeyboardInterrupt:
        ExpectationMaximisation._iterate = iterate
        run("train", folder / "resumed", **settings | TRAININGS["split_merge"], resume=True)
    try:
        processes.expect_same("words", rank)
    except InputError as error:
        (folder / f"refused_{rank}").write_text(str(error))


def environments():
    """As torchrun makes them, but that it has a store of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"TORCHELASTIC_RUN_ID": "none", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def start(arguments, folder):
    """Two processes with these arguments."""
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_trees(TREES, folder / "train.mrg")
    write_trees(corpus("dev")[:2], folder / "dev.mrg")
    return folder


@pytest.fixture(scope="module")
def together(folder):
    """The folder in which two processes have done their `work`."""
    started = start([__file__, str(folder)], folder)
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    return folder


def test_sums_are_those_of_one_process(together):
    expected = computed()
    first, second = (torch.load(together / f"computed_{rank}.pt") for rank in (0, 1))
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        largest = float(value.nan_to_num(neginf=0).abs().max()) if value.numel() else 0
        rounded = name.endswith("losses") or name.startswith("gaussian")  # log(1 - x), or posteriors less posteriors
        tolerance = 1e-6 if rounded else 1e-6 * largest
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=tolerance, msg=name)
    assert float(expected["kruskal term losses"].max()) > 1e-3
    assert float(expected["spectral rules"].min()) < 0
    assert float(expected["cluster states"].max()) == 2
    assert all(float(expected[f"gaussian {name}mu"].abs().max()) > 1e-3 for name in ("trees binary_", "tags "))


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_ends_as_in_one_process(together, tmp_path, name, monkeypatch):
    for picture in ("draw_trees", "draw_states"):
        monkeypatch.setattr(board, picture, lambda *_, **__: Figure((0.1, 0.1)))
    expected, _ = run("train", tmp_path, **files(together) | TRAININGS[name])
    written = together / "written" / name
    found = json.loads((written / "result.json").read_text())
    for figure, value in expected.items():
        assert "seconds" in figure or found[figure] == pytest.approx(value, rel=1e-4, abs=1e-6), figure
    assert {path.name for path in written.iterdir()} == {path.name for path in tmp_path.iterdir()}
    one, two = (Model.load(path / "model").grammar for path in (tmp_path, written))
    assert torch.equal(one.states, two.states)
    for rule in range(len(one.binary)):
        torch.testing.assert_close(one.binary.tensor(rule), two.binary.tensor(rule), rtol=1e-3, atol=1e-5)


def test_the_second_process_writes_nothing(together):
    assert [path for path in (together / "not_written").rglob("*") if path.is_file()] == []


def test_a_training_that_is_taken_up_is_the_same_bit_for_bit(together):
    for name in ("model.json", "model.safetensors"):
        paths = (together / "resumed/model" / name, together / "written/split_merge/model" / name)
        assert len({path.read_bytes() for path in paths}) == 1


def test_processes_with_different_files_are_refused(together):
    for rank in (0, 1):
        assert (together / f"refused_{rank}").read_text().startswith("the 2 processes have read different words")


# ---------------------------------------------------------------- as commands


STOPPING = """
import os, sys
from lvpcfg import processes
from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation
from lvpcfg.command import main

iterate, (rank, *sys.argv) = ExpectationMaximisation._iterate, sys.argv[1:]

def stop(self, step):
    if self.done == 3 and os.environ["RANK"] == rank and not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        os.kill(os.getpid(), 9)
    iterate(self, step)

ExpectationMaximisation._iterate = stop
main()
"""


def lines_of_ours(text):
    return [line for line in text.split("\n") if line.startswith("lvpcfg")]


def test_the_first_is_killed_and_the_training_taken_up_by_one(folder, tmp_path):
    """Without dev, and so without pictures."""
    (tmp_path / "stopping.py").write_text(STOPPING)
    options = ["job=train", "estimator=em", "estimator.states=2", "estimator.iterations=6", "checkpoint_every=2"]
    options += [f"data.train={folder / 'train.mrg'}", "threads=1", f"hydra.run.dir={tmp_path / 'out'}"]
    started = start([str(tmp_path / "stopping.py"), "0", "run.py", *options], tmp_path)
    said = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [-9, 1]
    go_on = f"torchrun --nproc_per_node=2 run.py {' '.join(options[:-1])} resume=true {options[-1]}"
    assert said[1][0] == ""
    assert lines_of_ours(said[1][1]) == [f"lvpcfg: the first of the 2 processes has ended; to go on: {go_on}"]
    settings = {"train": files(folder)["train"], "estimator": EMOptions(states=2, iterations=6)}
    result, printed = run("train", tmp_path / "out", **settings, resume=True)
    assert "goes on after iteration 2." in printed
    expected, _ = run("train", tmp_path / "whole", **settings)
    assert result["log_likelihood_per_word"] == pytest.approx(expected["log_likelihood_per_word"], rel=1e-9)


def test_torchrun_begins_again_where_another_one_was_killed(folder, tmp_path):
    (tmp_path / "stopping.py").write_text(STOPPING)
    options = ["job=train", "estimator=em", "estimator.states=2", "estimator.iterations=5", "resume=true"]
    options += [f"data.train={folder / 'train.mrg'}", "threads=1", f"hydra.run.dir={tmp_path / 'out'}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "stopping.py"), "1", "run.py", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    stopped, ended = done.stdout.split("The training in ")
    assert stopped.count("Stopped after 3 of 5 iterations. To go on:\ntorchrun ") == 1
    assert ended.count("goes on after iteration 3.") == 1
    assert done.stdout.endswith(f"{tmp_path / 'out'}\n")
    # torchrun may be faster than the connection between the two.
    assert len(lines_of_ours(done.stderr)) <= 1
    assert all("another of the 2 processes has ended" in line for line in lines_of_ours(done.stderr))
    left = {"checkpoint.safetensors", "config.yaml", "model", "result.json", "tensorboard"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left
    assert len(list((tmp_path / "out/tensorboard").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["job=inspect", "model=a"],
            "job=inspect runs in one process: start it without torchrun, which is for job=train",
        ),
        (["-m", "job=train", "seed=0,1"], "-m runs one job after the other"),
    ],
)
def test_what_runs_in_one_process_alone_is_refused(monkeypatch, arguments, message):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert problem_with(arguments).startswith(message)


def test_each_process_has_a_cuda_device(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "_store", object())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert processes.own_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(InputError, match="device is 'cuda', for 2 processes on 1 CUDA device: expected"):
        processes.own_device(torch.device("cuda"))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
