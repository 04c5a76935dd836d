"""EM on sentences without trees: a dense PCFG from a random start.

    E-step   c(rule) = p * d log p(sentences) / d p      (by autograd, over whole charts)
    M-step   p(rule) = c(rule) / c(parent)

The log-likelihood never falls; this is checked. Entries of the lexicon that are in no sentence keep the probability
that they have at the start, so that sentences with new kinds of words are possible.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lvpcfg import processes
from lvpcfg.errors import InputError
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.expectation_maximisation import ROUNDING
from lvpcfg.estimate.induction import Dev, batches_of, random_model, seen, training_sentences
from lvpcfg.grammar.model import Model
from lvpcfg.nn import VALUES, GrammarLayer, normalised

TOKENS = 3000  # words that are computed at once


class SentenceEM:
    """EM at work. Between two iterations, the parameters are all there is."""

    start = None  # random
    shown = ("states", "log_likelihood_per_word")

    def __init__(self, options: EMOptions, task: Task) -> None:
        self.options, self.task = options, task
        sentences = training_sentences(task)
        model = random_model(options, 0, task, sentences)
        self.layer = GrammarLayer(model, VALUES).to(task.device, torch.float32)
        self.batches = batches_of(sentences, model.lexicon, TOKENS, torch.device(task.device))
        self.dev = Dev(task, model.lexicon, TOKENS)
        unseen = ~seen(self.batches, len(model.lexicon)).unsqueeze(1)
        self.kept = self.layer.unknown_words.detach() * unseen  # [entries, tags]
        self.words = sum(batch.words for batch in self.batches)
        self.steps = [
            Step(f"iteration {number}", f"iteration {number}") for number in range(1, (options.iterations or 0) + 1)
        ]
        self.done = 0
        self.log_likelihood = -torch.inf  # under the parameters before the last iteration
        self.measured: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)

    def run(self) -> Iterator[Step]:
        while not self.finished:
            step = self.steps[self.done]
            before, self.log_likelihood = self.log_likelihood, self._iterate()
            if before - self.log_likelihood > ROUNDING * (abs(before) + self.words):
                raise InputError(
                    f"the log-likelihood fell at {step}, from {before:.3f} to {self.log_likelihood:.3f}: "
                    "this cannot happen in exact arithmetic."
                )
            self.done += 1
            self.measured = self.dev.figures(self.layer.log_likelihood)
            yield step

    def _iterate(self) -> float:
        """Returns the log-likelihood under the parameters as they were."""
        layer, total = self.layer, 0.0
        layer.zero_grad()
        for batch in tqdm(self.batches, desc="E-step", unit="batch", disable=None, leave=False):
            log_likelihood = batch.log_likelihood(layer)
            if len(log_likelihood):
                log_likelihood.sum().backward()
            total += float(log_likelihood.detach().sum())
        total = float(processes.sum_over_processes(torch.tensor(total, dtype=torch.float64)))
        with torch.no_grad():
            for parameter in layer.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.mul_(processes.sum_over_processes(gradient))  # the expected counts
            grammar = normalised(layer.grammar())
            words = self.kept + (1 - self.kept.sum(0)) * grammar.lexical.backoff
            grammar = replace(grammar, lexical=replace(grammar.lexical, backoff=words))
            self.layer.load_state_dict(GrammarLayer(replace(layer.model, grammar=grammar), VALUES).state_dict())
        return total

    def figures(self) -> dict[str, float]:
        states = int(self.layer.model.grammar.states.sum())
        return {"states": states} | self.measured | {"log_likelihood_per_word": self.log_likelihood / self.words}

    def model(self) -> Model:
        return replace(self.layer.to_model(), provenance=self.task.provenance(self.options, self.done))

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        tensors = {name: value.detach().clone() for name, value in self.layer.named_parameters()}
        numbers = {"log_likelihood": self.log_likelihood} | self.measured
        return Checkpoint(self.task.made_of(self.options), self.done, notes, tensors, numbers)

    def load(self, path: Path) -> dict[str, Any]:
        found = Checkpoint.load(path, self.task.made_of(self.options))
        self.layer.load_state_dict(found.tensors)
        self.measured = dict(found.numbers)
        self.done, self.log_likelihood = found.done, self.measured.pop("log_likelihood")
        return found.notes
