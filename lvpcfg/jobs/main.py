"""Reads the options and runs the job, for `lvpcfg/command.py`."""

import errno
import gc
import io
import os
import shlex
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lvpcfg import processes
from lvpcfg.errors import InputError, is_out_of_memory, printable, show
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.jobs.config import typed
from lvpcfg.jobs.help import WELCOME
from lvpcfg.processes import LostError
from lvpcfg.registry import JOBS, configuration_folder

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def main(interrupt: Any) -> None:
    """`interrupt` is what answers Ctrl-C when the job runs."""

    def run(options: DictConfig) -> float | None:
        _import_libraries()
        processes.begin()
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that work is saved on the way out
        return _run(options)

    hook, threading.excepthook = threading.excepthook, _thread_ended
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, instead of being printed by Hydra over many lines
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a word the terminal cannot show stops no job
    try:
        problem = problem_with(sys.argv[1:])
        if problem:
            sys.exit(printable(f"lvpcfg: {problem}"))
        if not sys.argv[1:]:
            print(f"{WELCOME}\n", flush=True)
        if not processes.is_first():
            # Hydra would make a folder, named by the time. `_run` takes the first one's.
            first = next(place for place, argument in enumerate(sys.argv) if "=" in argument and argument[0] != "-")
            sys.argv.insert(first, "hydra.run.dir=.")
        hydra.main(version_base="1.3", config_path=str(configuration_folder()), config_name="config")(run)()
    except BrokenPipeError:
        from lvpcfg.jobs.run import leave_pipe

        leave_pipe()
    except OSError as error:
        sys.exit(_sentence(error))
    except (InputError, HydraException, OmegaConfBaseException) as error:
        sys.exit(printable(f"lvpcfg: {error}".partition("\n")[0]))
    finally:
        threading.excepthook = hook


def _thread_ended(arguments: threading.ExceptHookArgs) -> None:
    """That of TensorBoard ends when the disk is full; the error comes again where the next figure is written."""
    if not isinstance(arguments.exc_value, OSError):
        threading.__excepthook__(arguments)


def _sentence(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    hint = "; hydra.run.dir=FOLDER chooses where a job writes" if error.errno in READ_ONLY else ""
    about = f"cannot use {show(os.fspath(error.filename), 200)}: " if error.filename else ""
    return f"lvpcfg: {about}{reason}{hint}."


def _import_libraries() -> None:
    """What takes seconds, now that the options are right: torch, nltk and what jobs need of this package."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large pages, which take a fifth less time to touch
    gc.disable()  # what is imported is no garbage; to look whether it is takes a tenth of the time
    if "scipy.stats" not in sys.modules:  # nltk would import it, for a measure that no job needs: half a second
        sys.modules["scipy.stats"] = None  # type: ignore[assignment]
        import_module("nltk")
        del sys.modules["scipy.stats"]
    import_module("lvpcfg.parser")
    gc.enable()


def _run(options: DictConfig) -> float | None:
    """Runs one job in its folder; returns what models are chosen by, or else the log-likelihood, for sweepers."""
    import torch

    from lvpcfg.jobs.run import Run, Terminal, leave_pipe

    hydra_config = HydraConfig.get()
    run = Run(
        folder=Path(processes.from_first(hydra_config.runtime.output_dir)),
        console=Terminal(),
        config=OmegaConf.to_yaml(options, resolve=True),
        command=_command(),
        resumes="resume" in options,
    )
    try:
        settings = typed(options, hydra_config.runtime.choices)
        torch.set_num_threads(getattr(settings, "threads", 1))
        JOBS[options.job].run(settings, run)
        run.finish()
    except BrokenPipeError:  # who reads has left; as an exit, Hydra adds nothing to it
        leave_pipe()
        sys.exit(0)
    except (KeyboardInterrupt, SystemExit, LostError) as error:
        if not processes.is_first():  # and if the first one was killed, so that it cannot say the same
            ended = f"the first of the {processes.number()} processes has ended"
            sys.exit(f"lvpcfg: {ended}; to go on: {run.command_to_go_on}")
        if isinstance(error, LostError):
            sys.exit(f"lvpcfg: {error}")
        raise
    except InputError as error:  # as an exit, Hydra adds nothing to it
        sys.exit(printable(f"lvpcfg: {error}"))
    except OSError as error:
        sys.exit(_sentence(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise  # a mistake of ours
        sys.exit("lvpcfg: there is not enough memory: a grammar with fewer states, or shorter sentences, need less.")
    return run.result.get(run.chosen_by, run.result.get("log_likelihood_per_word"))


def _command() -> str:
    """How this job was started, for the shell."""
    script = sys.argv[0].endswith(".py")
    program = [sys.argv[0]] if script else [Path(sys.argv[0]).name]
    if processes.number() > 1:
        program = ["torchrun", f"--nproc_per_node={processes.number()}", *(() if script else ["--no-python"]), *program]
    elif script:
        program = ["python", *program]
    given = HydraConfig.get().overrides.task
    return shlex.join([*program, *(option for option in given if not option.startswith("resume="))])
