"""EM with m states for every symbol, from relative frequencies with noise (Matsuzaki et al. 2005)."""

from dataclasses import dataclass

from lvpcfg.estimate.estimator import Estimator, Options, Task, check_number
from lvpcfg.registry import ESTIMATORS


@dataclass
class EMOptions(Options):
    name: str = "em"
    states: int = 16  # of every symbol
    iterations: int = 50
    noise: float = 0.1  # counts are multiplied by exp of a number up to this
    rare: int = 20  # words that occur no more often than this share one profile over the states of a tag

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "states", least=1)
        check_number(self, "iterations", least=1)
        check_number(self, "noise", most=100, otherwise="100 at the most, since exp of it is multiplied with")
        check_number(self, "rare")


@ESTIMATORS.register("em", EMOptions)
def em(options: EMOptions, task: Task) -> Estimator:
    """One phase, before which every symbol gets its states."""
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation, Phase
    from lvpcfg.estimate.states import Refinement

    phase = Phase(
        name="em",
        cycle=1,
        iterations=options.iterations,
        begin=lambda states, generator: states.split(options.states, options.noise, generator, remember=False),
        title="iteration {iteration}",
        evaluate="sometimes",
    )
    return ExpectationMaximisation(options, task, [phase], Refinement.of(task.observed, options.rare))
