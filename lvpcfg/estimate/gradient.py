"""Gradient descent: the parameters of a grammar, in any representation, trained for the trees it should prefer."""

from dataclasses import dataclass

from lvpcfg.errors import InputError, expect
from lvpcfg.estimate.estimator import Estimator, Options, Task, check_number
from lvpcfg.registry import ESTIMATORS

CONDITIONAL, JOINT = OBJECTIVES = ("conditional", "joint")
ADAM, ADAMW, LBFGS = OPTIMISERS = ("adam", "adamw", "lbfgs")
LOGITS, LOG_WEIGHTS, VALUES = PARAMETRISATIONS = ("logits", "log-weights", "values")
WORDS, CHARACTERS = LEXICONS = ("words", "characters")


@dataclass
class GradientOptions(Options):
    name: str = "gradient"
    init: str | None = None  # a model folder; None: a fresh grammar
    states: int = 4  # of every symbol of a fresh grammar
    noise: float = 0.1  # counts of a fresh grammar are multiplied by exp of a number up to this
    lexicon: str = WORDS  # that of the model, or "characters": times what a network says of how words are spelt
    objective: str = CONDITIONAL  # log p(tree | words), or "joint", log p(tree, words)
    parametrisation: str | None = None  # None: log-weights, or logits for the joint objective
    optimiser: str = ADAM
    learning_rate: float = 0.05  # falls to 0 over the updates of all epochs
    warm_up: int = 0  # updates over which the learning rate rises
    weight_decay: float = 3e-4  # towards the parameters of the start
    average: float = 0.9  # the model is a moving average of the parameters, which keeps this share at each update
    clip: float = 5.0  # the largest norm of a gradient; 0: any
    epochs: int = 3
    batch_tokens: int = 3000  # words of an update
    prune: float = 5e-5  # of the trees that an observed tree is compared with; 0: all trees
    unknown: float = 0.5  # how often words that occur once are taken for unknown ones

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("estimator.objective", self.objective, OBJECTIVES)
        expect("estimator.optimiser", self.optimiser, OPTIMISERS)
        if self.parametrisation is None:
            self.parametrisation = LOG_WEIGHTS if self.objective == CONDITIONAL else LOGITS
        expect("estimator.parametrisation", self.parametrisation, PARAMETRISATIONS)
        if self.objective == JOINT and self.parametrisation != LOGITS:
            raise InputError(
                f"estimator.parametrisation is {self.parametrisation!r}: the joint objective needs parameters that "
                f"are normalised, {LOGITS!r}; without that it has no maximum."
            )
        expect("estimator.lexicon", self.lexicon, LEXICONS)
        if self.objective == JOINT and self.lexicon == CHARACTERS:
            raise InputError(
                f"estimator.lexicon is {CHARACTERS!r}, which scores words but is no distribution over them: expected "
                f"estimator.objective={CONDITIONAL}."
            )
        for name in ("states", "epochs", "batch_tokens"):
            check_number(self, name, least=1)
        for name in ("noise", "warm_up", "weight_decay", "clip"):
            check_number(self, name)
        for name in ("prune", "unknown", "average"):
            check_number(self, name, most=1, otherwise="a fraction, 0 to 1")
        check_number(self, "learning_rate", least=1e-300)


@ESTIMATORS.register("gradient", GradientOptions)
def gradient(options: GradientOptions, task: Task) -> Estimator:
    from lvpcfg.estimate.gradient_descent import GradientDescent
    from lvpcfg.estimate.tree_likelihood import TreeLikelihood

    return GradientDescent(options, task, TreeLikelihood(options, task))
