"""EM with m states for every symbol, from relative frequencies with noise (Matsuzaki et al. 2005).

With `init`, EM goes on from the states of a model that was trained on these trees; from a spectral model, with its
clusters. With `objective=sentence`, EM for a PCFG of its own symbols on sentences alone.
"""

from dataclasses import dataclass, replace

from lvpcfg.errors import InputError, expect
from lvpcfg.estimate.estimator import Estimator, Task, check_folder, check_number
from lvpcfg.estimate.sentences import SENTENCE, SentenceOptions
from lvpcfg.registry import ESTIMATORS


@dataclass
class EMOptions(SentenceOptions):
    name: str = "em"
    objective: str = "joint"  # log p(tree, words), or "sentence", log p(words)
    init: str | None = None  # a model folder to start from; it has states, and `states` and `noise` are not heeded
    states: int = 16  # of every symbol
    iterations: int = 50
    noise: float = 0.1  # counts are multiplied by exp of a number up to this
    rare: int = 20  # words that occur no more often than this share one profile over the states of a tag

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("estimator.objective", self.objective, ("joint", SENTENCE))
        check_folder(self, "init")
        if self.init is not None and self.objective == SENTENCE:
            raise InputError(
                f"estimator.init is for estimator.objective=joint: estimator.objective={SENTENCE} begins with a random "
                "grammar."
            )
        check_number(self, "states", least=1)
        check_number(self, "iterations", least=1)
        check_number(self, "noise", most=100, otherwise="100 at the most, since exp of it is multiplied with")
        check_number(self, "rare")

    @property
    def heeds_seed(self) -> bool:
        return self.init is None


@ESTIMATORS.register("em", EMOptions)
def em(options: EMOptions, task: Task) -> Estimator:
    """One phase; without a model to start from, every symbol gets its states before it."""
    if options.objective == SENTENCE:
        from lvpcfg.estimate.sentence_em import SentenceEM

        return SentenceEM(options, task)
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation, Phase
    from lvpcfg.estimate.start import START, made_of, of_any_model
    from lvpcfg.estimate.states import Refinement

    phase = Phase("em", cycle=1, iterations=options.iterations, title="iteration {iteration}", evaluate="sometimes")
    if options.init is not None:
        begin = of_any_model(options.init, task, options.rare)
        return ExpectationMaximisation(options, task, [phase], begin, START, made_of(options.init))
    phase = replace(
        phase, begin=lambda states, generator: states.split(options.states, options.noise, generator, remember=False)
    )
    return ExpectationMaximisation(options, task, [phase], Refinement.of(task.observed, options.rare))
