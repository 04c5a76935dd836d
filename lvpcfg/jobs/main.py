"""The one entry point: `python run.py` and the command `lvpcfg`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lvpcfg.errors import InputError
from lvpcfg.files import write_text
from lvpcfg.jobs import config, demo, evaluate, train
from lvpcfg.jobs.check import problem_with
from lvpcfg.jobs.run import Run

JOBS: dict[str, Callable[[config.Config, Run], None]] = {
    "demo": demo.run,
    "train": train.run,
    "evaluate": evaluate.run,
}


def main() -> None:
    config.register()
    problem = problem_with(sys.argv[1:])
    if problem:
        sys.exit(f"lvpcfg: {problem}")
    hydra.main(version_base="1.3", config_path=str(config.folder()), config_name="config")(_run)()


def _run(options: DictConfig) -> float | None:
    """Runs one job in its folder; returns the F1 it reports, for sweepers."""
    run = Run(Path(HydraConfig.get().runtime.output_dir), Console())
    try:
        settings = config.typed(options)
        write_text(run.folder / "config.yaml", OmegaConf.to_yaml(options, resolve=True))
        JOBS[settings.job](settings, run)
        run.finish()
    except InputError as error:
        sys.exit(f"lvpcfg: {error}")
    except KeyboardInterrupt:
        sys.exit(f"lvpcfg: interrupted; what was written is in {run.folder}")
    except BrokenPipeError:  # the reader of our output, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return run.result.get("f1")
