"""job=tradeoff: models and gold trees -> what approximations of their rules gain in time and lose in F1.

Grammars with latent states are approximated rule by rule, at several ranks and thresholds (Cohen & Collins 2012), those
without by one CP form of all rules (Cohen, Satta & Collins 2013). Each setting adds a row to `tradeoff.csv` when it is
finished; `resume=true` continues after the last row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.options import ParserOptions, expect_positive, folders
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class Settings:
    """What is measured."""

    ranks: list[int]
    thresholds: list[float]
    terms: list[int]
    max_length: int

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("thresholds", 0), ("terms", 1)):
            numbers = getattr(self, name)
            if not all(least <= number < float("inf") for number in numbers) or len(set(numbers)) != len(numbers):
                raise InputError(f"tradeoff.{name} is {show(numbers)}: expected different numbers from {least} on.")
        expect_positive(self, "max_length", prefix="tradeoff.")


@dataclass(kw_only=True)
class TradeoffOptions(ParserOptions):
    model: Any  # a folder, or a list of folders
    gold: str | None
    tradeoff: Settings
    seed: int
    resume: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)


@JOBS.register("tradeoff", TradeoffOptions)
def run(options: TradeoffOptions, run: "Run") -> None:
    from lvpcfg.jobs import candidates

    candidates.run(options, run)
