"""Time, size and F1 of grammars and of their approximations: one row a setting, kept as CSV."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, read_text

EXACT, ALS, APR, COVER, SVD = METHODS = ("exact", "als", "apr", "cover", "svd")


@dataclass(frozen=True)
class Row:
    """Times are seconds a sentence; figures that do not apply are nan."""

    setting: str  # its name
    model: str  # folder
    label: str  # of the model
    states: int  # m, the most that a symbol has
    method: str  # one of METHODS
    rank: int  # 0: exact
    threshold: float  # of als; 0: exact
    rules: int
    approximated: int
    gamma: float  # the largest ||T - T^||_F of a rule in CP form; for one CP form of all rules Delta, of all together
    kl: float  # nats a tree, for one CP form of all rules
    numbers: int  # how many the binary rules are
    fit_seconds: float  # what the decomposition took
    sentences: int
    precision: float
    recall: float
    f1: float
    f1_all: float
    fallbacks: int
    negative_rules: int
    seconds: float  # without decoding: the sum of the next four
    coarse: float  # charts of the coarse grammar
    gather: float  # collecting what they leave
    middle: float  # forests of grammars with few states
    plan: float  # of the forests
    inside_outside: float
    decode: float
    ratio: float  # of `seconds` to those of the exact grammar, measured in the same minutes
    ratio_inside_outside: float
    made_with: str  # a digest of the model, the sentences and the options

    @property
    def share(self) -> float:
        """The share of the rules that are approximated, in percent."""
        return 100 * self.approximated / max(1, self.rules)


COLUMNS: dict[str, Any] = {field.name: field.type for field in fields(Row)}  # their types by their names


def write_rows(rows: Sequence[Row]) -> str:
    stream = io.StringIO()
    table = csv.DictWriter(stream, list(COLUMNS), lineterminator="\n")
    table.writeheader()
    table.writerows(map(asdict, rows))
    return stream.getvalue()


def read_rows(path: PathLike) -> list[Row]:
    """The rows of a `tradeoff.csv`."""
    found = csv.DictReader(io.StringIO(read_text(path)))
    try:
        return [Row(**{name: column(row[name]) for name, column in COLUMNS.items()}) for row in found]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{show(str(path), 200)} is not a table of job=tradeoff: {show(str(error))}.") from None


def plain(row: Row) -> dict[str, object]:
    """A row for JSON, which has neither infinity nor nan: None in their place."""
    values = asdict(row) | {"share": row.share}
    missing = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in missing else value for name, value in values.items()}
