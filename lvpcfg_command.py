"""The command `lvpcfg`, and `python run.py`: what jobs need is imported here, where Ctrl-C can be answered.

It stands beside the package because whatever stands inside comes after the package's imports, which take seconds.
"""

import gc
import os
import signal
import sys

INTERRUPTED = "lvpcfg: interrupted.\n"


def main() -> None:
    # No exception yet: libraries that try whether others are there take it for the answer.
    before = signal.signal(signal.SIGINT, _leave)
    if "--version" in sys.argv[1:]:
        _show_version()
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large pages, which take a fifth less time to touch
    gc.disable()  # what is imported is no garbage; to look whether it is takes a tenth of the time
    from lvpcfg.jobs.main import main as run_job

    gc.enable()
    signal.signal(signal.SIGINT, before)
    try:
        run_job()
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        sys.exit(130)


def _leave(*_: object) -> None:
    """There is nothing to save."""
    os.write(2, INTERRUPTED.encode())
    os._exit(130)


def _show_version() -> None:
    from contextlib import suppress
    from importlib.metadata import version

    with suppress(BrokenPipeError):
        os.write(1, f"lvpcfg {version('lvpcfg')}\n".encode())  # at once: nothing is left for a reader that left
