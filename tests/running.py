"""Jobs, run in this process or as commands."""

import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.experimental.callback import Callback
from omegaconf import open_dict
from rich.console import Console

from lvpcfg.command import main
from lvpcfg.jobs.config import typed
from lvpcfg.jobs.profile import Amounts
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.tradeoff import Settings
from lvpcfg.registry import JOBS, configuration_folder

ROOT = Path(__file__).parents[1]
SETTINGS = Settings(ranks=[2], thresholds=[1e-1, 0], terms=[3], max_length=40)


def run(job, folder, **options):
    """Runs a job in this process; returns its figures and what it printed."""
    result, printed = begin(job, folder, **options)
    result.finish()
    return result.result, printed.getvalue()


def begin(job, folder, printed=None, **options):
    """Runs a job up to the writing of its figures."""
    printed = StringIO() if printed is None else printed
    result = Run(Path(folder), Console(file=printed, width=120), config="seed: 0\n", command="lvpcfg job=train")
    JOBS[job].run(options_of(job, **options), result)
    return result, printed


def options_of(job, **options):
    """The options of a job: those that are given, smaller amounts for tests, and the defaults in `conf/`."""
    smaller = {"device": "cpu", "tradeoff": SETTINGS, "profile": Amounts(sentences=20, traced=1)}
    data = {name: options.pop(name) for name in ("train", "dev", "on_error") if name in options}
    with initialize_config_dir(str(configuration_folder()), version_base="1.3"):
        composed = compose("config", overrides=[f"job={job}"], return_hydra_config=True)
    choices = composed.hydra.runtime.choices
    with open_dict(composed):
        del composed["hydra"]
    settings = typed(composed, choices)
    if data:
        options["data"] = replace(settings.data, **data)
    used = {field.name for field in fields(settings)}
    return replace(settings, **{name: value for name, value in smaller.items() if name in used} | options)


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


def every_entry(registry):
    """The entries of a registry, to put back after a test: a module registers itself once, and for good."""
    return {name: registry[name] for name in registry.names()}
