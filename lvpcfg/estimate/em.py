"""EM with m states for every symbol, from relative frequencies with noise (Matsuzaki et al. 2005).

With `objective=sentence`, EM for a PCFG of its own symbols on sentences alone.
"""

from dataclasses import dataclass

from lvpcfg.errors import expect
from lvpcfg.estimate.estimator import Estimator, Task, check_number
from lvpcfg.estimate.sentences import SENTENCE, SentenceOptions
from lvpcfg.registry import ESTIMATORS


@dataclass
class EMOptions(SentenceOptions):
    name: str = "em"
    objective: str = "joint"  # log p(tree, words), or "sentence", log p(words)
    states: int = 16  # of every symbol
    iterations: int = 50
    noise: float = 0.1  # counts are multiplied by exp of a number up to this
    rare: int = 20  # words that occur no more often than this share one profile over the states of a tag

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("estimator.objective", self.objective, ("joint", SENTENCE))
        check_number(self, "states", least=1)
        check_number(self, "iterations", least=1)
        check_number(self, "noise", most=100, otherwise="100 at the most, since exp of it is multiplied with")
        check_number(self, "rare")


@ESTIMATORS.register("em", EMOptions)
def em(options: EMOptions, task: Task) -> Estimator:
    """One phase, before which every symbol gets its states."""
    if options.objective == SENTENCE:
        from lvpcfg.estimate.sentence_em import SentenceEM

        return SentenceEM(options, task)
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
