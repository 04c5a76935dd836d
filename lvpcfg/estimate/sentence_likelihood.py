"""log p(words) under a grammar as a module, for gradient descent: whole charts, no trees."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.gradient import NEURAL, GradientOptions
from lvpcfg.estimate.induction import Batch, Dev, batches_of, random_model, training_sentences
from lvpcfg.estimate.start import made_of
from lvpcfg.grammar.model import Model
from lvpcfg.neural import NeuralGrammarLayer
from lvpcfg.nn import GrammarLayer


class SentenceLikelihood:
    """The sentences of a treebank, whatever its trees are."""

    figure = "log_likelihood_per_word"

    def __init__(self, options: GradientOptions, task: Task) -> None:
        self.options, self.task = options, task
        sentences, self.made_of = training_sentences(task), task.made_of(options)
        # A random start is not worth a look.
        self.start = None if options.init is None else Step("start", "start", "always")
        if options.init is None:
            model = random_model(options, options.rank, task, sentences)
        else:
            model = Model.load(options.init)
            if model.grammar.lexical.network is not None:
                raise InputError(
                    f"the model in {show(options.init, 200)} has a character lexicon, which scores words but is no "
                    "distribution over them: the sentence objective needs one without."
                )
            self.made_of |= made_of(options.init)
        self.module = self._module(model).to(task.device, torch.float32)
        self.batches = batches_of(sentences, model.lexicon, options.descent.batch_tokens, torch.device(task.device))
        self.updates = len(self.batches)
        self.at_start = self.measure() if self.start else {}

    def _module(self, model: Model) -> GrammarLayer:
        options = self.options
        if options.parametrisation == NEURAL:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.task.seed)
                return NeuralGrammarLayer(model, options.dimension)
        return GrammarLayer(model, str(options.parametrisation))

    @cached_property
    def _dev(self) -> Dev:
        return Dev(self.task, self.module.model.lexicon, 10 * self.options.descent.batch_tokens)

    def log_likelihood(self, batch: Batch, generator: torch.Generator) -> Tensor:
        return batch.log_likelihood(self.module)

    def measure(self) -> dict[str, float]:
        return self._dev.figures(self.module.log_likelihood)

    def figures(self) -> dict[str, float]:
        return {"states": int(self.module.model.grammar.states.sum())}

    def model(self, done: int) -> Model:
        start = {} if self.options.init is None else {"start": self.module.model.provenance}
        return replace(self.module.to_model(), provenance=self.task.provenance(self.options, done) | start)
