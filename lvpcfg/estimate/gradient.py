"""Gradient descent on the parameters of a grammar in any representation, for trees, or of a chain, for tags."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from lvpcfg.errors import InputError, expect
from lvpcfg.estimate.estimator import MOST_ITERATIONS, Estimator, Options, TaggingTask, Task, check_number
from lvpcfg.estimate.sentences import SENTENCE, SentenceOptions
from lvpcfg.registry import ESTIMATORS

CONDITIONAL, JOINT, _ = OBJECTIVES = ("conditional", "joint", SENTENCE)
ADAM, ADAMW, LBFGS = OPTIMISERS = ("adam", "adamw", "lbfgs")
LOGITS, LOG_WEIGHTS, VALUES, NEURAL = PARAMETRISATIONS = ("logits", "log-weights", "values", "neural")
WORDS, CHARACTERS = LEXICONS = ("words", "characters")
Filled = TypeVar("Filled", bound="DescentOptions")


@dataclass(frozen=True)
class Descent:
    """How to descend. What is best for trees, for sentences and for tags is not the same."""

    learning_rate: float  # falls to 0 over the updates of all epochs
    momentum: float
    weight_decay: float
    average: float
    clip: float
    epochs: int
    batch_tokens: int = 0
    short_first: float = 0.0  # share of the updates over which longer and longer sentences join in
    noise: float = 0.0  # counts of a fresh grammar are multiplied by exp of a number up to this


FOR_TREES = Descent(0.05, 0.9, 3e-4, 0.9, 5.0, 3, 3000, 0.0, 0.1)
FOR_SENTENCES = Descent(1e-3, 0.75, 0.0, 0.0, 3.0, 16, 100, 0.4, 0.1)
FOR_TAGS = Descent(0.1, 0.9, 3e-4, 0.9, 5.0, 8, 3000, 0.0, 1.0)


@dataclass
class DescentOptions(Options):
    """What is common to all that train a module. What is None is usual for what is learned from: see `Descent`."""

    init: str | None = None  # a model folder; None: a fresh grammar
    lexicon: str = WORDS  # that of the model, or "characters": times what a network says of how words are spelt
    optimiser: str = ADAM
    learning_rate: float | None = None
    momentum: float | None = None  # the first beta of Adam
    warm_up: int = 0  # updates over which the learning rate rises
    weight_decay: float | None = None  # towards the parameters of the start
    average: float | None = None  # the model is a moving average of the parameters: this share is kept at each update
    clip: float | None = None  # the largest norm of a gradient; 0: any
    epochs: int | None = None
    prune: float = 5e-5  # of the trees that an observed tree is compared with; 0: all trees
    unknown: float = 0.5  # how often words that occur once are taken for unknown ones

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("estimator.optimiser", self.optimiser, OPTIMISERS)
        expect("estimator.lexicon", self.lexicon, LEXICONS)
        check_number(self, "warm_up")
        for name in ("prune", "unknown"):
            check_number(self, name, most=1, otherwise="a fraction, 0 to 1", whole=False)
        if self.epochs is not None:
            check_number(self, "epochs", least=1, most=MOST_ITERATIONS, whole=True)
        for name in ("weight_decay", "clip"):
            if getattr(self, name) is not None:
                check_number(self, name, whole=False)
        for name in ("average", "momentum"):
            if getattr(self, name) is not None:
                check_number(self, name, most=1, otherwise="a fraction, 0 to 1", whole=False)
        if self.learning_rate is not None:
            check_number(self, "learning_rate", least=1e-300, whole=False)

    @property
    def descent(self) -> Descent:
        raise NotImplementedError

    def batch(self, lengths: Sequence[int]) -> tuple[Sequence[int], int]:
        """How much each sentence counts in a batch, and how much a batch holds: their words."""
        return lengths, self.descent.batch_tokens

    def filled(self: Filled, usual: Descent) -> Filled:
        """With what is usual where they do not say."""
        usually = {name: value for name, value in vars(usual).items() if getattr(self, name, value) is None}
        return replace(self, **dict[str, Any](usually))


@dataclass
class GradientOptions(SentenceOptions, DescentOptions):
    name: str = "gradient"
    states: int = 4  # of every symbol of a fresh grammar
    noise: float | None = None  # counts of a fresh grammar are multiplied by exp of a number up to this
    objective: str = CONDITIONAL  # log p(tree | words); "joint", log p(tree, words); or "sentence", log p(words)
    # None: log-weights; logits for the joint objective, and neural for sentences, or logits where there is a model
    parametrisation: str | None = None
    rank: int = 0  # of the rules of an induced grammar; 0: one tensor
    dimension: int = 256  # of embeddings
    batch_tokens: int | None = None  # words of an update
    short_first: float | None = None  # share of the updates over which longer and longer sentences join in

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("estimator.objective", self.objective, OBJECTIVES)
        self._check_parametrisation()
        if self.objective != CONDITIONAL and self.lexicon == CHARACTERS:
            raise InputError(
                f"estimator.lexicon is {CHARACTERS!r}, which scores words but is no distribution over them: expected "
                f"estimator.objective={CONDITIONAL}."
            )
        for name in ("states", "dimension"):
            check_number(self, name, least=1)
        check_number(self, "rank")
        if self.noise is not None:
            check_number(self, "noise", whole=False)
        if self.batch_tokens is not None:
            check_number(self, "batch_tokens", least=1, whole=True)
        if self.short_first is not None:
            check_number(self, "short_first", most=1, otherwise="a fraction, 0 to 1", whole=False)
        if self.short_first and self.objective != SENTENCE:
            raise InputError(
                f"estimator.short_first is {self.short_first}: only estimator.objective={SENTENCE} begins with short "
                "sentences, expected 0."
            )

    def _check_parametrisation(self) -> None:
        if self.parametrisation is None:
            of_sentences = NEURAL if self.init is None else LOGITS
            defaults = {CONDITIONAL: LOG_WEIGHTS, JOINT: LOGITS, SENTENCE: of_sentences}
            self.parametrisation = defaults[self.objective]
        expect("estimator.parametrisation", self.parametrisation, PARAMETRISATIONS)
        if self.parametrisation == NEURAL and (self.objective != SENTENCE or self.init is not None):
            raise InputError(
                "estimator.parametrisation is 'neural': networks stand for a fresh grammar of estimator.objective="
                f"{SENTENCE}, without estimator.init."
            )
        if self.objective != CONDITIONAL and self.parametrisation not in (LOGITS, NEURAL):
            either = f"{LOGITS!r} or {NEURAL!r}" if self.objective == SENTENCE else repr(LOGITS)
            raise InputError(
                f"estimator.parametrisation is {self.parametrisation!r}: the {self.objective} objective needs "
                f"parameters that are normalised, {either}; without that it has no maximum."
            )

    @property
    def figure(self) -> str:
        """What the log-likelihood per word is called."""
        prefix = "conditional_" if self.objective == CONDITIONAL else ""
        return f"{prefix}log_likelihood_per_word"

    def check_tags(self) -> None:
        if self.objective == SENTENCE or self.parametrisation == VALUES:
            wrong = f"objective={SENTENCE}" if self.objective == SENTENCE else f"parametrisation={VALUES}"
            raise InputError(f"estimator.{wrong} is for grammars: expected another for tagged sentences.")

    @property
    def descent(self) -> Descent:
        return Descent(**{field.name: getattr(self, field.name) for field in fields(Descent)})


@ESTIMATORS.register("gradient", GradientOptions)
def gradient(options: GradientOptions, task: Task | TaggingTask) -> Estimator:
    from lvpcfg.estimate.gradient_descent import GradientDescent, Objective
    from lvpcfg.estimate.sentence_likelihood import SentenceLikelihood
    from lvpcfg.estimate.tag_likelihood import TagLikelihood
    from lvpcfg.estimate.tree_likelihood import TreeLikelihood

    objective: Objective
    if isinstance(task, TaggingTask):
        if options.init is None:
            task.expect_states(options.states)
        options = options.filled(FOR_TAGS)
        objective = TagLikelihood(options, task)
    elif options.objective == SENTENCE:
        options = options.filled(FOR_SENTENCES)
        objective = SentenceLikelihood(options, task)
    else:
        options = options.filled(FOR_TREES)
        objective = TreeLikelihood(options, task)
    return GradientDescent(options, task, objective)
