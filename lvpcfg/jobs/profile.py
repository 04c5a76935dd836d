"""job=profile: a model folder and sentences -> where the time of parsing them goes.

The sentences are parsed as job=parse would, and the stages are timed. A few of them are then parsed once more under
PyTorch's profiler, which slows down what it looks at and writes some hundred kilobytes a sentence.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.jobs.options import ParserOptions, expect_positive, folders
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class Amounts:
    sentences: int
    traced: int

    def __post_init__(self) -> None:
        expect_positive(self, "sentences", "traced", prefix="profile.")


@dataclass(kw_only=True)
class ProfileOptions(ParserOptions):
    model: Any  # a folder, or a list of folders
    input: str | None
    profile: Amounts

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)


@JOBS.register("profile", ProfileOptions)
def run(options: ProfileOptions, run: "Run") -> None:
    from lvpcfg.jobs import profiling

    profiling.run(options, run)
