"""Cycles of: split all states in two, EM; merge the least useful pairs, EM; smooth, EM (Petrov et al. 2006)."""

from dataclasses import dataclass

from lvpcfg.estimate.estimator import MOST_CYCLES, MOST_ITERATIONS, Estimator, Options, Task, check_number
from lvpcfg.registry import ESTIMATORS


@dataclass
class SplitMergeOptions(Options):
    name: str = "split_merge"
    cycles: int = 4
    split_iterations: int = 50
    merge_iterations: int = 20
    smooth_iterations: int = 10
    merged: float = 0.5  # the fraction of the pairs of states that is merged again
    noise: float = 0.01  # counts are multiplied by exp of a number up to this
    smooth_rules: float = 0.01  # weight of the mean over related states
    smooth_words: float = 0.1
    rare: int = 20  # words that occur no more often than this share one profile over the states of a tag

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "cycles", least=1, most=MOST_CYCLES)
        for name in ("split_iterations", "merge_iterations"):
            check_number(self, name, least=1, most=MOST_ITERATIONS)
        check_number(self, "smooth_iterations", most=MOST_ITERATIONS)
        for name in ("merged", "smooth_rules", "smooth_words"):
            check_number(self, name, most=1, otherwise="a fraction, 0 to 1")
        check_number(self, "noise", most=100, otherwise="100 at the most, since exp of it is multiplied with")
        check_number(self, "rare")


@ESTIMATORS.register("split_merge", SplitMergeOptions)
def split_merge(options: SplitMergeOptions, task: Task) -> Estimator:
    """Three phases in each cycle; models are looked at when a cycle is over."""
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation, Phase
    from lvpcfg.estimate.states import Refinement

    phases = []
    for cycle in range(1, options.cycles + 1):
        phases += [
            Phase(
                name="split",
                cycle=cycle,
                iterations=options.split_iterations,
                begin=lambda states, generator: states.split(2, options.noise, generator),
            ),
            Phase(
                name="merge",
                cycle=cycle,
                iterations=options.merge_iterations,
                begin=lambda states, _: states.merge(options.merged),
            ),
            Phase(
                name="smooth",
                cycle=cycle,
                iterations=options.smooth_iterations,
                smooth=(options.smooth_rules, options.smooth_words),
            ),
        ]
    return ExpectationMaximisation(options, task, phases, Refinement.of(task.observed, options.rare))
