"""The command `lvpcfg`, and `python run.py`.

Help and the version are answered without Hydra, torch and nltk, which take seconds to import; wrong options without the
latter two. Nothing of this package is imported before Ctrl-C is answered.
"""

import os
import signal
import sys
from contextlib import suppress

INTERRUPTED = "lvpcfg: interrupted.\n"


def main() -> None:
    # No exception yet: libraries that try whether others are there take it for the answer.
    before = signal.signal(signal.SIGINT, _leave)
    _open_closed_streams()
    arguments = sys.argv[1:]
    if "--version" in arguments:
        from importlib.metadata import version

        _print(f"lvpcfg {version('lvpcfg')}\n")
    elif "--help" in arguments or "-h" in arguments:
        _show_help(arguments)
    else:
        from lvpcfg import processes
        from lvpcfg.jobs.main import main as run_job

        try:
            with processes.one_speaks():
                run_job(interrupt=before)
        except KeyboardInterrupt:
            sys.stderr.write(INTERRUPTED)
            sys.exit(130)


def _open_closed_streams() -> None:
    """A file that is opened later shall not take the place of a standard stream, and libraries print to one."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # becomes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _leave(*_: object) -> None:
    """There is nothing to save. Of processes of torchrun the first one says so: `processes.py` may not be there yet."""
    if os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        os.write(2, INTERRUPTED.encode())
    os._exit(130)


def _show_help(arguments: list[str]) -> None:
    from lvpcfg.errors import InputError
    from lvpcfg.jobs.help import page

    try:
        _print(page(arguments))
    except InputError as error:
        sys.exit(f"lvpcfg: {error}")


def _print(text: str) -> None:
    """At once, so that nothing is left for a reader that left."""
    try:
        with suppress(BrokenPipeError):
            os.write(1, text.encode())
    except OSError as error:
        sys.exit(f"lvpcfg: cannot write to standard output: {(error.strerror or str(error)).lower()}.")
