"""EM with m states for every symbol, from relative frequencies with noise (Matsuzaki et al. 2005).

With `init`, EM goes on from the states of a model that was trained on these trees; from a spectral model, with its
clusters. It is then smoothed, and short: from a good start EM soon overfits its trees. With `objective=sentence`,
EM for a PCFG of its own symbols on sentences alone. From tagged sentences EM makes a chain of m states for every tag.
"""

from dataclasses import dataclass, replace
from typing import Any

from lvpcfg.errors import InputError, expect
from lvpcfg.estimate.estimator import Estimator, TaggingTask, Task, check_folder, check_number
from lvpcfg.estimate.sentences import SENTENCE, SentenceOptions
from lvpcfg.registry import ESTIMATORS


@dataclass(frozen=True)
class Usual:
    """What is best where the options do not say."""

    iterations: int
    smooth_rules: float
    smooth_words: float
    noise: float


FRESH, TAKEN_UP, OF_TAGS = Usual(50, 0.0, 0.0, 0.1), Usual(10, 0.01, 0.1, 0.1), Usual(30, 0.05, 0.05, 0.3)


@dataclass
class EMOptions(SentenceOptions):
    name: str = "em"
    objective: str = "joint"  # log p(tree, words), or "sentence", log p(words)
    init: str | None = None  # a model folder to start from; it has states, and `states` and `noise` are not heeded
    states: int = 16  # of every symbol
    iterations: int | None = None  # this and what is None below: see FRESH, TAKEN_UP (with `init`) and OF_TAGS
    noise: float | None = None  # counts are multiplied by exp of a number up to this
    smooth_rules: float | None = None  # weight of the mean over related states
    smooth_words: float | None = None
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
        if self.iterations is not None:
            check_number(self, "iterations", least=1, whole=True)
        for name in ("smooth_rules", "smooth_words"):
            if getattr(self, name) is not None:
                check_number(self, name, most=1, otherwise="a fraction, 0 to 1", whole=False)
        if self.objective == SENTENCE and self.weights is not None:
            raise InputError(
                "estimator.smooth_rules and estimator.smooth_words are for estimator.objective=joint: expected 0."
            )
        if self.noise is not None:
            otherwise = "100 at the most, since exp of it is multiplied with"
            check_number(self, "noise", most=100, otherwise=otherwise, whole=False)
        check_number(self, "rare")

    @property
    def weights(self) -> tuple[float, float] | None:
        """Of smoothing: of rules, of words."""
        found = (self.smooth_rules or 0, self.smooth_words or 0)
        return found if any(found) else None

    @property
    def heeds_seed(self) -> bool:
        return self.init is None

    def check_tags(self) -> None:
        if self.objective == SENTENCE or self.init is not None:
            wrong = "init" if self.init is not None else f"objective={SENTENCE}"
            raise InputError(f"estimator.{wrong} is for grammars: tagged sentences are learned from without it.")

    def filled(self, usual: Usual) -> "EMOptions":
        """With what is usual where they do not say."""
        return replace(self, **{name: value for name, value in vars(usual).items() if getattr(self, name) is None})


@ESTIMATORS.register("em", EMOptions)
def em(options: EMOptions, task: Task | TaggingTask) -> Estimator:
    """One phase; without a model to start from, every symbol gets its states before it."""
    if isinstance(task, TaggingTask):
        task.expect_states(options.states)
        options = options.filled(OF_TAGS)
    else:
        options = options.filled(FRESH if options.init is None else TAKEN_UP)
    if options.objective == SENTENCE:
        assert isinstance(task, Task)
        from lvpcfg.estimate.sentence_em import SentenceEM

        return SentenceEM(options, task)
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation, Phase
    from lvpcfg.estimate.start import START, made_of, of_any_model

    phase = Phase(
        "em",
        cycle=1,
        iterations=options.iterations or 0,
        smooth=options.weights,
        title="iteration {iteration}",
        evaluate="sometimes",
    )
    if options.init is not None:
        assert isinstance(task, Task)
        begin = of_any_model(options.init, task, options.rare)
        return ExpectationMaximisation(options, task, [phase], begin, START, made_of(options.init))
    noise = options.noise or 0.0

    def split(states: Any, generator: Any) -> Any:
        return states.split(options.states, noise, generator, remember=False)

    phase = replace(phase, begin=split)
    return ExpectationMaximisation(options, task, [phase], task.refinement(options.rare), task.start)
