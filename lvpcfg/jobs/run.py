"""One run of a job: its folder, its figures, what it prints."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lvpcfg.files import write_text


@dataclass
class Run:
    folder: Path
    console: Console
    result: dict[str, float] = field(default_factory=dict)  # what scripts and sweeps read

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table: text to the left in the first column, numbers to the right in the others."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def finish(self) -> None:
        """Writes `result.json` and prints the folder, last."""
        write_text(self.folder / "result.json", json.dumps(self.result, indent=2) + "\n")
        print(self.folder)
