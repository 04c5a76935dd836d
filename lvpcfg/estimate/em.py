"""EM with m states for every symbol, from relative frequencies with noise (Matsuzaki et al. 2005).

With `init`, EM goes on from the states of a model that was trained on these trees; from a spectral model, with its
clusters. It is smoothed then, and short: what has a good start soon fits its trees too well. With `objective=sentence`,
EM for a PCFG of its own symbols on sentences alone.
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
    iterations: int | None = None  # 10 with `init`, 50 without
    noise: float = 0.1  # counts are multiplied by exp of a number up to this
    smooth_rules: float | None = None  # weight of the mean over related states; 0.01 with `init`, 0 without
    smooth_words: float | None = None  # 0.1 with `init`, 0 without
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
        if self.iterations is None:
            self.iterations = 50 if self.init is None else 10
        if self.smooth_rules is None:
            self.smooth_rules = 0.0 if self.init is None else 0.01
        if self.smooth_words is None:
            self.smooth_words = 0.0 if self.init is None else 0.1
        check_number(self, "states", least=1)
        check_number(self, "iterations", least=1)
        for name in ("smooth_rules", "smooth_words"):
            check_number(self, name, most=1, otherwise="a fraction, 0 to 1", whole=False)
        if self.objective == SENTENCE and self.weights is not None:
            raise InputError(
                "estimator.smooth_rules and estimator.smooth_words are for estimator.objective=joint: expected 0."
            )
        check_number(self, "noise", most=100, otherwise="100 at the most, since exp of it is multiplied with")
        check_number(self, "rare")

    @property
    def weights(self) -> tuple[float, float] | None:
        """Of smoothing: of rules, of words."""
        found = (self.smooth_rules or 0, self.smooth_words or 0)
        return found if any(found) else None

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

    phase = Phase(
        "em",
        cycle=1,
        iterations=options.iterations or 0,
        smooth=options.weights,
        title="iteration {iteration}",
        evaluate="sometimes",
    )
    if options.init is not None:
        begin = of_any_model(options.init, task, options.rare)
        return ExpectationMaximisation(options, task, [phase], begin, START, made_of(options.init))
    phase = replace(
        phase, begin=lambda states, generator: states.split(options.states, options.noise, generator, remember=False)
    )
    return ExpectationMaximisation(options, task, [phase], Refinement.of(task.observed, options.rare))
