"""The method of moments for L-PCFGs (Cohen et al. 2012, 2013): features, singular vectors, means of products.

One pass over the trees, and no local optima. Parameters have signs. `features.py` has phi and psi, `moments.py` the
projections Y and Z, `spectral_grammar.py` what becomes of them, `spectral_training.py` a search for the numbers of
states.
"""

from dataclasses import dataclass
from typing import Any

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Estimator, Options, Task, check_number
from lvpcfg.registry import ESTIMATORS


@dataclass
class ProjectionOptions(Options):
    """Of the vectors of nodes."""

    states: int = 20  # of symbols that occur 500 times or more; one up to 50 times, in between as a line has it
    least: float = 0.01  # singular values below this give no state,
    share: float = 0.01  # nor do those below this share of the largest of a symbol
    inside: Any = None  # names of features; all
    outside: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "states", least=1, most=1024)
        check_number(self, "least")
        check_number(self, "share", most=1)
        for name in ("inside", "outside"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list) and value and all(type(one) is str for one in value)):
                raise InputError(f"estimator.{name} is {show(value)}: expected a list of names of features.")


@dataclass
class SpectralOptions(ProjectionOptions):
    name: str = "spectral"
    backoff: float = 30.0  # C: of a rule that occurs n < 1,000 times, its own mean has the weight sqrt(n)/(C + sqrt(n))
    words: float = 0.8  # weight of the mean of a word that occurs less than 1,000 times; words like it have the rest
    search_minutes: float = 0.0  # for numbers of states that are better on dev

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "backoff")
        check_number(self, "words", most=1)
        check_number(self, "search_minutes", most=100_000)


@ESTIMATORS.register("spectral", SpectralOptions)
def spectral(options: SpectralOptions, task: Task) -> Estimator:
    from lvpcfg.estimate.spectral_training import Spectral

    return Spectral(options, task)
