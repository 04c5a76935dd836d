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
    """Times are seconds a sentence; what does not apply is nan."""

    setting: str  # its name
    model: str  # folder
    label: str  # of the model
    states: int  # m, the most that a symbol has
    method: str  # one of METHODS
    rank: int  # 0: exact
    threshold: float  # of als; 0: exact
    rules: int
    approximated: int
    gamma: float  # largest ||T - T^||_F of a rule that is approximated; Delta, of all together, for whole grammars
    kl: float  # nats a tree, for whole grammars
    numbers: int  # that the binary rules take
    fit_seconds: float  # of the decomposition, once
    sentences: int
    precision: float
    recall: float
    f1: float
    f1_all: float
    fallbacks: int
    negative_rules: int
    seconds: float  # without decoding: the sum of the next four
    coarse: float  # charts without states
    gather: float  # what they leave
    middle: float  # grammars with few states
    plan: float
    inside_outside: float
    decode: float
    ratio: float  # of `seconds` to those of the exact grammar, measured in the same minutes
    ratio_inside_outside: float
    made_with: str  # a digest of the model, the sentences and the options

    @property
    def share(self) -> float:
        """Of the rules that are approximated, in percent."""
        return 100 * self.approximated / max(1, self.rules)


KINDS: dict[str, Any] = {field.name: field.type for field in fields(Row)}


def write_rows(rows: Sequence[Row]) -> str:
    stream = io.StringIO()
    table = csv.DictWriter(stream, list(KINDS), lineterminator="\n")
    table.writeheader()
    table.writerows(map(asdict, rows))
    return stream.getvalue()


def read_rows(path: PathLike) -> list[Row]:
    """The rows of a `tradeoff.csv`."""
    found = csv.DictReader(io.StringIO(read_text(path)))
    try:
        return [Row(**{name: kind(row[name]) for name, kind in KINDS.items()}) for row in found]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{show(str(path), 200)} is not a table of job=tradeoff: {show(str(error))}.") from None


def plain(row: Row) -> dict[str, object]:
    """As JSON, which has no infinity, can hold it."""
    values = asdict(row) | {"share": row.share}
    missing = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in missing else value for name, value in values.items()}
