"""One run of a job: its folder, its figures, what it prints."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lvpcfg.files import write_text


class Terminal(Console):
    """Goes on in silence when the reader of the output, such as `head`, has left."""

    def on_broken_pipe(self) -> None:
        leave_pipe()


def leave_pipe() -> None:
    """What is printed from now on goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass
class Run:
    folder: Path
    console: Console
    result: dict[str, float] = field(default_factory=dict)  # what scripts and sweeps read

    def say(self, text: str) -> None:
        """Prints text as it is, however long its lines are."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table: text to the left in the first column, numbers to the right in the others."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def begin(self, config: str) -> None:
        """Writes the configuration, and removes the figures of an earlier run in the same folder."""
        write_text(self.folder / "config.yaml", config)
        (self.folder / "result.json").unlink(missing_ok=True)

    def finish(self) -> None:
        """Writes `result.json` and prints the folder, last."""
        write_text(self.folder / "result.json", json.dumps(self.result, indent=2) + "\n")
        self.say(str(self.folder))
