"""Relative frequencies: the treebank PCFG, one state for each symbol; of tagged sentences, the hidden Markov model."""

from dataclasses import dataclass

from lvpcfg.estimate.estimator import Estimator, Options, TaggingTask, Task
from lvpcfg.registry import ESTIMATORS


@dataclass
class CountOptions(Options):
    name: str = "count"

    @property
    def heeds_seed(self) -> bool:
        return False

    def check_tags(self) -> None:
        pass


@ESTIMATORS.register("count", CountOptions)
def count(options: CountOptions, task: Task | TaggingTask) -> Estimator:
    """EM of no phase."""
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation

    return ExpectationMaximisation(options, task, [], task.refinement(rare=0), task.start)
