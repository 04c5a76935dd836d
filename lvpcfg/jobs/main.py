"""Reads the options and runs the job: all that `lvpcfg_command.py`, the one entry point, imports."""

import io
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lvpcfg.errors import InputError, is_out_of_memory
from lvpcfg.jobs import berkeley, compress, config, demo, evaluate, inspect, parse, profile, tradeoff, train
from lvpcfg.jobs.check import problem_with
from lvpcfg.jobs.run import Run, Terminal, leave_pipe

JOBS: dict[str, Callable[[config.Config, Run], None]] = {
    "demo": demo.run,
    "train": train.run,
    "import": berkeley.run,
    "inspect": inspect.run,
    "compress": compress.run,
    "tradeoff": tradeoff.run,
    "parse": parse.run,
    "profile": profile.run,
    "evaluate": evaluate.run,
}
CAREFUL = ("train", "compress", "tradeoff")  # they may be refused a folder, and then change nothing in it


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that work is saved on the way out
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, instead of being printed by Hydra over many lines
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a word the terminal cannot show stops no job
    try:
        config.register()
        problem = problem_with(sys.argv[1:])
        if problem:
            sys.exit(f"lvpcfg: {problem}")
        hydra.main(version_base="1.3", config_path=str(config.folder()), config_name="config")(_run)()
    except BrokenPipeError:
        leave_pipe()
    except OSError as error:
        sys.exit(f"lvpcfg: cannot use {error.filename}: {error.strerror}." if error.filename else f"lvpcfg: {error}.")
    except (InputError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"lvpcfg: {error}".partition("\n")[0])


def _run(options: DictConfig) -> float | None:
    """Runs one job in its folder; returns the F1 it reports, or else the log-likelihood, for sweepers."""
    to_stdout = options.job == "parse" and options.output is None  # trees alone go there
    run = Run(
        folder=Path(HydraConfig.get().runtime.output_dir),
        console=Terminal(stderr=to_stdout),
        config=OmegaConf.to_yaml(options, resolve=True),
        command=_command(),
    )
    try:
        settings = config.typed(options)
        if settings.job not in CAREFUL:
            run.begin()
        torch.set_num_threads(settings.threads)
        JOBS[settings.job](settings, run)
        run.finish()
    except BrokenPipeError:
        raise
    except (InputError, OSError) as error:  # as an exit, Hydra adds nothing to it
        sys.exit(f"lvpcfg: {error}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise  # a mistake of ours
        sys.exit("lvpcfg: there is not enough memory: a grammar with fewer states, or shorter sentences, need less.")
    return run.result.get("f1", run.result.get("log_likelihood_per_word"))


def _command() -> str:
    """How this job was started, for the shell."""
    program = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else [Path(sys.argv[0]).name]
    given = HydraConfig.get().overrides.task
    return shlex.join([*program, *(option for option in given if not option.startswith("resume="))])
