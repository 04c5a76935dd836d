"""Relative frequencies: the treebank PCFG, one state for each symbol."""

from dataclasses import dataclass

from lvpcfg.estimate.estimator import Estimator, Options, Task
from lvpcfg.registry import ESTIMATORS


@dataclass
class CountOptions(Options):
    name: str = "count"

    @property
    def heeds_seed(self) -> bool:
        return False


@ESTIMATORS.register("count", CountOptions)
def count(options: CountOptions, task: Task) -> Estimator:
    """EM of no phase."""
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation
    from lvpcfg.estimate.states import Refinement

    return ExpectationMaximisation(options, task, phases=[], refinement=Refinement.of(task.observed, rare=0))
