"""Mixtures of Gaussians in place of states (GM-LVeG, Zhao, Zhang & Tu 2018), trained for log p(tree | words)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lvpcfg.errors import InputError, expect
from lvpcfg.estimate.estimator import Estimator, TaggingTask, Task, check_number
from lvpcfg.estimate.gradient import CONDITIONAL, LOG_WEIGHTS, Descent, DescentOptions
from lvpcfg.registry import ESTIMATORS

OWN, SHARED, TIED = SHARING = ("own", "shared", "tied")
DIAGONAL, SPHERICAL = COVARIANCES = ("diagonal", "spherical")
DISTURBED = 0.5  # counts of tied rules of a fresh grammar are multiplied by exp of a number up to this


@dataclass
class GaussianOptions(DescentOptions):
    name: str = "gaussian"
    sharing: str = TIED  # of Gaussians by the rules of a symbol
    covariance: str = DIAGONAL
    dimension: int = 3
    components: int = 4  # of each rule with phrases and of the root; tied, Gaussians of each phrase symbol
    lexical: int = 2  # Gaussians of each tag
    kept: int = 0  # Gaussians of a node that charts keep, those with the largest coefficients; 0: all
    noise: float = 0.05  # means begin up to this away from their places
    apart: float = 0.0  # how far from each other these places are for the Gaussians of a symbol
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    average: float = 0.9
    clip: float = 5.0
    epochs: int = 10
    batch_sentences: int = 180  # of an update

    objective: ClassVar[str] = CONDITIONAL
    parametrisation: ClassVar[str] = LOG_WEIGHTS
    figure: ClassVar[str] = "conditional_log_likelihood_per_word"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("estimator.sharing", self.sharing, SHARING)
        expect("estimator.covariance", self.covariance, COVARIANCES)
        for name in ("dimension", "components", "lexical", "batch_sentences"):
            check_number(self, name, least=1)
        check_number(self, "kept")
        for name in ("noise", "apart"):
            check_number(self, name, whole=False)
        if self.init is not None and self.sharing != TIED:
            raise InputError(
                f"estimator.sharing is {self.sharing!r}: a model of estimator.init has weights for all combinations of "
                f"states, expected {TIED!r}."
            )

    def check_tags(self) -> None:
        if self.sharing != TIED:
            raise InputError(f"estimator.sharing is {self.sharing!r}: taggers are tied, expected {TIED!r}.")

    def batch(self, lengths: Sequence[int]) -> tuple[list[int], int]:
        return [1] * len(lengths), self.batch_sentences

    @property
    def descent(self) -> Descent:
        return Descent(
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            average=self.average,
            clip=self.clip,
            epochs=self.epochs,
        )


@ESTIMATORS.register("gaussian", GaussianOptions)
def gaussian(options: GaussianOptions, task: Task | TaggingTask) -> Estimator:
    from lvpcfg.estimate.gaussian_likelihood import GaussianLikelihood
    from lvpcfg.estimate.gaussian_tags import GaussianTags
    from lvpcfg.estimate.gradient_descent import GradientDescent

    if isinstance(task, TaggingTask):
        return GradientDescent(options, task, GaussianTags(options, task))
    return GradientDescent(options, task, GaussianLikelihood(options, task))
