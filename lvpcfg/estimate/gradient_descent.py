"""A module trained by an optimiser of torch: updates, regularisation, and resuming from a checkpoint.

The objective is an `Objective`: batches, their log-likelihood under a module, and the model of that module. Each
objective has a file (`tree_likelihood.py`).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from lvpcfg import processes
from lvpcfg.errors import InputError
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import AnyTask, Step
from lvpcfg.estimate.gradient import ADAMW, LBFGS, DescentOptions
from lvpcfg.grammar.model import Model
from lvpcfg.sequence.tagging import TaggingModel

FIRST = 0.05  # share of the batches that a training with `short_first` begins with
HISTORY = 10  # updates that L-BFGS remembers,
LISTS = ("old_dirs", "old_stps", "ro")  # and torch's names for where it does


class Batch(Protocol):
    """What one update learns from, in all processes together."""

    @property
    def sentences(self) -> int:
        """How many there are."""

    @property
    def words(self) -> int:
        """How many they have in all."""


def random_batches(lengths: Sequence[int], most: int, seed: int) -> list[list[int]]:
    """The sentences of each batch, in random order, but the same in every epoch; `most` is of their lengths in all."""
    batches: list[list[int]] = [[]]
    words = 0
    for sentence in torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist():
        if batches[-1] and words + lengths[sentence] > most:
            batches.append([])
            words = 0
        batches[-1].append(sentence)
        words += lengths[sentence]
    return batches


class Objective(Protocol):
    """A log-likelihood, as a function of the parameters of a module."""

    @property
    def module(self) -> nn.Module:
        """Its parameters are what is trained."""

    @property
    def figure(self) -> str:
        """What the log-likelihood per word is called."""

    @property
    def start(self) -> Step | None:
        """The step that is named for the model before the first; None where that is not worth a look."""

    @property
    def at_start(self) -> dict[str, float]:
        """What is measured of that model."""

    @property
    def made_of(self) -> dict[str, Any]:
        """What a training that takes this one up must share with it."""

    @property
    def updates(self) -> int:
        """The number of batches, known before they are made."""

    @property
    def batches(self) -> Sequence[Any]:
        """Those of each epoch, made when they are asked for first; None where nothing of a batch is left."""

    def log_likelihood(self, batch: Any, generator: torch.Generator) -> Tensor:
        """Of each sentence of a batch that is computed in this process; differentiable."""

    def measure(self) -> dict[str, float]:
        """Figures that take a while, found after each epoch."""

    def figures(self) -> dict[str, float]:
        """Figures that do not."""

    def model(self, done: int) -> Model | TaggingModel:
        """The model of the parameters as they are, after so many steps."""


class GradientDescent:
    """Gradient descent at work. Between two updates, the parameters and what the optimiser keeps are all there is."""

    def __init__(self, options: DescentOptions, task: AnyTask, objective: Objective) -> None:
        self.options, self.settings, self.seed = options, options.descent, task.seed
        self.objective, self.module = objective, objective.module
        self.start_values = [parameter.detach().clone() for parameter in self.module.parameters()]
        self.averages = [value.clone() for value in self.start_values] if self.settings.average else []
        self.optimiser = self._optimiser()
        self.updates = 1 if options.optimiser == LBFGS else objective.updates
        self.steps = [
            Step(
                name=f"epoch {epoch}, update {update}",
                title=f"epoch {epoch}",
                evaluate="always" if update == self.updates else "never",
            )
            for epoch in range(1, self.settings.epochs + 1)
            for update in range(1, self.updates + 1)
        ]
        self.done = 0
        self.total, self.words = 0.0, 0  # of this epoch so far
        self.measured = dict(objective.at_start)  # after the last epoch

    @property
    def start(self) -> Step | None:
        return self.objective.start

    @property
    def shown(self) -> tuple[str, ...]:
        return ("states", self.objective.figure)

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)

    # Updates

    def _optimiser(self) -> torch.optim.Optimizer:
        rate = self.settings.learning_rate
        if self.options.optimiser == LBFGS:
            return torch.optim.LBFGS(
                self.module.parameters(), rate, max_iter=1, history_size=HISTORY, line_search_fn="strong_wolfe"
            )
        return torch.optim.Adam(self.module.parameters(), rate, betas=(self.settings.momentum, 0.999), fused=True)

    def run(self) -> Iterator[Step]:
        while not self.finished:
            step = self.steps[self.done]
            self._update(step)
            self.done += 1
            if self.done % self.updates == 0:
                with self._averaged():
                    self.measured = self.objective.measure()
            yield step

    def _update(self, step: Step) -> None:
        epoch, update = divmod(self.done, self.updates)
        if update == 0:
            self.total, self.words = 0.0, 0
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        batches = self.objective.batches
        numbers = torch.randperm(len(batches), generator=self._generator(epoch)).tolist()
        if self.options.optimiser != LBFGS:
            numbers = [numbers[update] % self._reach(len(batches))]
        some = [batch for number in numbers if (batch := batches[number]) is not None]
        sentences = sum(batch.sentences for batch in some)
        first = []  # L-BFGS looks at several points; the first is where the parameters are now

        def loss() -> float:
            """What `_loss` leaves the gradient of: the line search of L-BFGS compares the two."""
            value = self._loss(some, step)
            first.append(value)
            decay = self.settings.weight_decay
            away = sum(float(change.double().square().sum()) for _, change in self._changes()) if decay else 0.0
            return value / sentences + decay / 2 * away

        if some:
            self.optimiser.step(loss)
            self._decay()
            self._average()
            parameters = self.module.parameters()
            if not all(bool(parameter.max() < torch.inf) for parameter in parameters if parameter.numel()):
                self._diverged("a parameter", step)
            self.total -= first[0]
            self.words += sum(batch.words for batch in some)

    def _reach(self, batches: int) -> int:
        """How many batches are learned from: with `short_first`, the shortest first, then more and more."""
        over = self.settings.short_first * len(self.steps)
        share = FIRST + (1 - FIRST) * self.done / over if over else 1.0
        return max(1, math.floor(batches * min(1.0, share)))

    def _learning_rate(self) -> float:
        """Rises while it warms up, and falls to 0 with the last update; L-BFGS has a line search instead."""
        options = self.options
        left = 1.0 if options.optimiser == LBFGS else 1 - self.done / len(self.steps)
        return self.settings.learning_rate * left * min(1.0, (self.done + 1) / max(1, options.warm_up))

    def _loss(self, batches: Sequence[Batch], step: Step) -> float:
        """Leaves the gradient of the mean over the sentences, and returns the sum of - log p."""
        self.optimiser.zero_grad()
        generator, sentences, total = self._generator(-1 - self.done), sum(batch.sentences for batch in batches), 0.0
        computed: float = 0
        for batch in batches:
            log_likelihood = self.objective.log_likelihood(batch, generator)
            if len(log_likelihood):
                (-log_likelihood.sum() / sentences).backward()
            total -= float(log_likelihood.detach().sum())
            computed += len(log_likelihood)
        total, computed = self._sum_over_processes(total, computed)
        assert computed == sentences
        if not math.isfinite(total):
            self._diverged("the loss", step)
        if self.options.optimiser != ADAMW and self.settings.weight_decay:
            for parameter, change in self._changes():
                assert parameter.grad is not None
                parameter.grad.add_(change, alpha=self.settings.weight_decay)
        clip = 0 if self.options.optimiser == LBFGS else self.settings.clip
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip or torch.inf)
        if not bool(norm.isfinite()):
            self._diverged("the gradient", step)
        return total

    def _sum_over_processes(self, *numbers: float) -> list[float]:
        """Of gradients, and of numbers."""
        for parameter in self.module.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = processes.sum_over_processes(gradient)
        return processes.sum_over_processes(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def _changes(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """How far parameters have gone from where they started; those of zeros, which are -inf, nowhere."""
        for parameter, start in zip(self.module.parameters(), self.start_values, strict=True):
            yield parameter, torch.where(start.isfinite(), parameter.detach() - start, 0)

    def _decay(self) -> None:
        """AdamW: beside the gradient, not in it."""
        if self.options.optimiser == ADAMW:
            rate = self.optimiser.param_groups[0]["lr"] * self.settings.weight_decay
            with torch.no_grad():
                for parameter, change in self._changes():
                    parameter.sub_(change, alpha=rate)

    @torch.no_grad()
    def _average(self) -> None:
        if not self.averages:
            return
        kept = min(self.settings.average, (1 + self.done) / (10 + self.done))  # less of it at first
        for parameter, average in zip(self.module.parameters(), self.averages, strict=True):
            gone = torch.where(average.isfinite(), parameter - average, 0)
            average.add_(gone, alpha=1 - kept)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The module with the moving average of its parameters, if there is one."""
        if not self.averages:
            yield
            return
        parameters = [*self.module.parameters()]
        now = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, average in zip(parameters, self.averages, strict=True):
                parameter.copy_(average)
            try:
                yield
            finally:
                for parameter, value in zip(parameters, now, strict=True):
                    parameter.copy_(value)

    def _diverged(self, what: str, step: Step) -> NoReturn:
        raise InputError(
            f"{what} is no finite number any more at {step}: estimator.learning_rate="
            f"{self.settings.learning_rate} is too large. What was learned before is kept."
        )

    def _generator(self, number: int) -> torch.Generator:
        """The same for the same number, so that a training that is taken up sees what it would have seen."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)

    # What is known of it

    def figures(self) -> dict[str, float]:
        total, words = (self.total, self.words) if self.words else self._start
        return self.objective.figures() | self.measured | {self.objective.figure: total / max(1, words)}

    @cached_property
    def _start(self) -> tuple[float, int]:
        """The log-likelihood before the first update, and of how many words it is."""
        generator, batches = self._generator(-1), [batch for batch in self.objective.batches if batch is not None]
        with torch.no_grad():
            found = [float(self.objective.log_likelihood(batch, generator).sum()) for batch in batches]
        total = processes.sum_over_processes(torch.tensor(sum(found), dtype=torch.float64))
        return float(total), sum(batch.words for batch in batches)

    def model(self) -> Model | TaggingModel:
        with self._averaged():
            return self.objective.model(self.done)

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        tensors = {f"parameter.{name}": value.detach().clone() for name, value in self.module.named_parameters()}
        tensors |= {f"average.{place}": value.clone() for place, value in enumerate(self.averages)}
        numbers: dict[str, float] = {"total": self.total, "words": self.words}
        numbers |= {f"measured.{name}": value for name, value in self.measured.items()}
        for name, value in _flat(self.optimiser.state_dict()["state"], "optimiser"):
            if isinstance(value, Tensor):
                tensors[name] = value.detach().clone()
            else:
                numbers[name] = value
        return Checkpoint(self.objective.made_of, self.done, notes, tensors, numbers)

    def load(self, path: Path) -> dict[str, Any]:
        found = Checkpoint.load(path, self.objective.made_of)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(found.tensors[f"parameter.{name}"])
        for place, average in enumerate(self.averages):
            average.copy_(found.tensors[f"average.{place}"])
        state = _nested({**found.tensors, **found.numbers}, "optimiser")
        if self.options.optimiser == LBFGS:
            state = {number: {name: [] for name in LISTS} | known for number, known in state.items()}
        self.optimiser.load_state_dict(self.optimiser.state_dict() | {"state": state})
        self.done = found.done
        self.total, self.words = found.numbers["total"], int(found.numbers["words"])
        prefix = "measured."
        self.measured = {
            name.removeprefix(prefix): value for name, value in found.numbers.items() if name.startswith(prefix)
        }
        return found.notes


def _flat(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of nested dictionaries and lists, by names such as optimiser.0.old_dirs.2."""
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _flat(value, f"{name}.{key}")
    elif state is not None:
        yield name, state


def _nested(flat: dict[str, Any], name: str) -> dict[Any, Any]:
    """Backwards through `_flat`, for the state of an optimiser: parameters and places of lists are numbers."""
    state: dict[Any, Any] = {}
    for key, value in flat.items():
        if key.startswith(f"{name}."):
            _, parameter, entry, *place = key.split(".")
            into = state.setdefault(int(parameter), {})
            if place:
                into.setdefault(entry, {})[int(place[0])] = value
            else:
                into[entry] = value
    for into in state.values():
        for entry, value in into.items():
            if isinstance(value, dict):
                into[entry] = [value[place] for place in sorted(value)]
    return state
