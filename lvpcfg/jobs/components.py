"""job=components: what it costs to keep only some components of a mixture (Zhao, Zhang & Tu 2018, the supplement).

Inside scores of Gaussian mixtures are sums of many Gaussians, and the published system keeps the largest, 10 to 80 of
them. Here nothing grows, and all are kept; this job trains with both, each component with Gaussians of its own. Each
number of components adds a row to `components.csv` when its training is finished; `resume=true` continues after the
last row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.options import TreebankOptions, expect_positive
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class Settings:
    """What is measured."""

    kept: list[int]
    longest_train: int
    longest_test: int

    def __post_init__(self) -> None:
        expect_positive(self, "longest_train", "longest_test", prefix="components.")
        if not self.kept or min(self.kept) < 0 or len(set(self.kept)) < len(self.kept):
            raise InputError(
                f"components.kept is {show(self.kept)}: expected different numbers of components, 0 for all of them."
            )


@dataclass(kw_only=True)
class ComponentsOptions(TreebankOptions):
    trees: str | None
    gold: str | None
    estimator: Any  # the options of estimator=gaussian
    components: Settings
    resume: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator.name != "gaussian":
            raise InputError(f"estimator is {self.estimator.name!r}: components are those of 'gaussian'.")


@JOBS.register("components", ComponentsOptions)
def run(options: ComponentsOptions, run: "Run") -> None:
    from lvpcfg.jobs import keeping

    keeping.run(options, run)
