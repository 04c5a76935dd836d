"""One run of a job: its folder, its figures, what it prints."""

import json
import os
import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from lvpcfg import processes
from lvpcfg.errors import InputError, printable
from lvpcfg.files import write_text, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


IN_FILES = 200  # columns of a table, at the most


class Terminal(Console):
    """Prints nothing that a terminal would obey but its own styles.

    It goes on in silence when the reader of the output, such as `head`, has left. In a file, tables are as wide as they
    have to be.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = IN_FILES

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:  # the disk is full
            where = "error" if self.stderr else "output"
            if not self.stderr:
                leave_pipe()  # else Python tries again at its end, and complains
            raise InputError(f"cannot write to standard {where}: {(error.strerror or str(error)).lower()}.") from None

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        leave_pipe()


def leave_pipe() -> None:
    """What is printed from now on goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def peak_memory() -> float:
    """The most that this process has held so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@dataclass
class Run:
    folder: Path
    console: Console
    result: dict[str, Any] = field(default_factory=dict)  # what scripts and sweeps read
    config: str = ""  # as it was composed
    command: str = "lvpcfg"  # as it was called, but for what chooses the run folder
    chosen_by: str = "f1"  # the figure that sweepers are given
    resumes: bool = True  # whether it goes on where it is told to, by resume=true; else always, where it can

    def use_stderr(self) -> None:
        """For a job whose results are on the standard output."""
        self.console = Terminal(stderr=True)

    def say(self, text: str) -> None:
        """Prints text as it is, however long its lines are."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table: text to the left in the first column, numbers to the right in the others."""
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def picture(self, name: str, figure: "Figure", kinds: Sequence[str] = ("png",)) -> None:
        """Saves a picture in the run folder and shows it in TensorBoard."""
        for kind in reversed(kinds):
            path = self.folder / f"{name}.{kind}"
            with writing(path):
                figure.savefig(path, dpi=120)
        self.board.add_figure(name, figure)
        self.say(f"{name.replace('_', ' ')}: {path}")

    @cached_property
    def board(self) -> "SummaryWriter":
        """The TensorBoard log of the run, for pictures."""
        from torch.utils.tensorboard import SummaryWriter  # a second that other jobs need not wait

        return SummaryWriter(str(self.folder / "tensorboard"))

    def say_how_to_go_on(self, done: str) -> None:
        """For a job that was stopped and can be resumed."""
        self.say(f"Stopped after {done}. To go on:")
        self.say(self.command_to_go_on)

    @property
    def command_to_go_on(self) -> str:
        if not self.resumes:
            return self.command
        return f"{self.command} resume=true {shlex.quote(f'hydra.run.dir={self.folder}')}"

    def begin(self) -> None:
        """Writes the configuration, and removes the figures of an earlier run in the same folder.

        A job calls it first, or as soon as it knows that it may change what is in the folder.
        """
        if not processes.is_first():
            return
        try:
            write_text(self.folder / "config.yaml", self.config)
        except InputError as error:
            reason = str(error).rstrip(".")
            raise InputError(f"{reason}; hydra.run.dir=FOLDER chooses another folder for the job.") from None
        (self.folder / "result.json").unlink(missing_ok=True)

    def finish(self) -> None:
        """Writes `result.json`, says where the TensorBoard log is if there is one, and prints the folder, last."""
        if not processes.is_first():
            return
        if "board" in self.__dict__:
            with writing(self.folder / "tensorboard"):
                self.board.close()
        if (self.folder / "tensorboard").is_dir():
            self.say(f"TensorBoard: tensorboard --logdir {self.folder / 'tensorboard'}")
        write_text(self.folder / "result.json", json.dumps(self.result, indent=2) + "\n")
        self.say(str(self.folder))
