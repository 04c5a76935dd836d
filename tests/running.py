"""Jobs, run in this process or as commands."""

import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from hydra.experimental.callback import Callback
from rich.console import Console

from lvpcfg.decompose.compress import ALSOptions
from lvpcfg.estimate.count import CountOptions
from lvpcfg.jobs.config import BinarisationConfig, Config, DataConfig, ProfileConfig, TradeoffConfig
from lvpcfg.jobs.main import CAREFUL, JOBS
from lvpcfg.jobs.run import Run
from lvpcfg_command import main

ROOT = Path(__file__).parents[1]


def run(job, folder, **options):
    """Runs a job in this process; returns its figures and what it printed."""
    result, printed = begin(job, folder, **options)
    result.finish()
    return result.result, printed.getvalue()


def begin(job, folder, printed=None, **options):
    """Runs a job up to the writing of its figures."""
    settings = {
        "data": DataConfig(options.pop("train", None), options.pop("dev", None), options.pop("on_error", "raise")),
        "binarisation": BinarisationConfig("right", 0, 1, "keep"),
        "estimator": CountOptions(),
        "decompose": ALSOptions(),
        "tradeoff": TradeoffConfig([2], [1e-1, 0], [3], 40),
        "profile": ProfileConfig(sentences=20, traced=1),
        "signature": "english",
        **{"seed": 0, "restarts": 1, "evaluate_every": 10, "checkpoint_every": 5, "resume": False},
        **dict.fromkeys(("berkeley", "symbol", "model", "input", "output", "gold", "test", "parameters")),
        "decoder": "max-rule",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "processes": 1,
        "prune": 5e-5,
        "batch_tokens": 16384,
    }
    printed = StringIO() if printed is None else printed
    result = Run(Path(folder), Console(file=printed, width=120), config="seed: 0\n", command="lvpcfg job=train")
    if job not in CAREFUL:
        result.begin()
    JOBS[job](Config(job=job, **(settings | options)), result)
    return result, printed


def arguments(*options):
    return [sys.executable, str(ROOT / "run.py"), *options]


def command(*options, cwd, path=(), reader=True):
    """Runs a job as a command; this folder, and those in `path` before all others, can be imported from.

    Without a reader, whatever it prints meets a pipe whose other end is closed.
    """
    folders = [*path, ROOT, Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    source, target = os.pipe()
    os.close(source)
    done = subprocess.run(
        arguments(*options),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE if reader else target,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(target)
    return done


def call(*options):
    """What the command does, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
        patch.setattr(sys, "argv", ["lvpcfg", *options])
        main()


class Returned(Callback):
    """Prints what a job returns to the sweeper."""

    def on_job_end(self, config, job_return, **rest):
        print("returned", job_return.return_value, flush=True)
