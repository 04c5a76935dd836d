"""EM over the states of observed trees, or of tagged sentences, in phases; `count`, `em`, `split_merge` and
`kruskal_em` differ in their phases and in where they begin.

Without smoothing the log-likelihood never falls within a phase; this is checked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from lvpcfg.errors import InputError
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import Options, Step, TaggingTask, Task
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.sequence.tagging import TagChain, TaggingModel

COUNTED = Step("counting", "treebank PCFG", "always")
ROUNDING = 1e-6  # of the log-likelihood, and for each word: scores on trees are float32


class States(Protocol):
    """Latent states with their expected counts: a `Refinement` of a treebank, or `TaggedStates`."""

    def expect(self, smoothing: Any) -> tuple[float, Any]:
        """One iteration: the log-likelihood, and the same states with their expected counts."""

    def smoothing(self, rules: float, words: float) -> Any:
        """What smoothes with these weights."""

    def figures(self) -> dict[str, float]:
        """How many there are."""

    def grammar(self, smoothing: Any) -> Any:
        """What the counts make."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All there is to them, for checkpoints."""

    def with_tensors(self, found: dict[str, torch.Tensor]) -> Any:
        """Backwards through `tensors`."""


@dataclass(frozen=True)
class Phase:
    """EM iterations that have one beginning."""

    name: str
    cycle: int  # phases of the same cycle begin with the same noise
    iterations: int
    begin: Callable[[Any, torch.Generator], States] | None = None  # what happens to the states before it
    smooth: tuple[float, float] | None = None  # weights of the mean over related states: of rules, of words
    title: str = "cycle {cycle}"  # of the models of its iterations
    evaluate: Literal["sometimes", "never"] = "never"  # but for the last iteration of a cycle


@dataclass(frozen=True, kw_only=True)
class Iteration(Step):
    phase: Phase
    number: int  # from 1, within the phase


def iterations(phases: Sequence[Phase]) -> list[Iteration]:
    """Of all phases, in order. The model that a cycle leaves is always looked at."""
    numbered = [(phase, number) for phase in phases for number in range(1, phase.iterations + 1)]
    last = {phase.cycle: place for place, (phase, _) in enumerate(numbered)}
    return [
        Iteration(
            name=f"cycle {phase.cycle}, {phase.name}, iteration {number}",
            title=phase.title.format(cycle=phase.cycle, iteration=number),
            evaluate="always" if last[phase.cycle] == place else phase.evaluate,
            phase=phase,
            number=number,
        )
        for place, (phase, number) in enumerate(numbered)
    ]


class ExpectationMaximisation:
    """EM at work. Between two iterations, its expected counts are all there is to it."""

    shown = ("states", "log_likelihood_per_word")

    def __init__(
        self,
        options: Options,
        task: Task | TaggingTask,
        phases: Sequence[Phase],
        refinement: States,
        start: Step | None = COUNTED,
        made_of: dict[str, Any] | None = None,
    ) -> None:
        """`refinement` is where it begins; `start` describes that, if there is a model yet that is worth a look;
        `made_of` is what else a training that takes this one up must share with it."""
        self.options, self.task, self.refinement, self.start = options, task, refinement, start
        self.made_of = task.made_of(options) | (made_of or {})
        self.phases, self.steps, self.done = phases, iterations(phases), 0
        self.log_likelihood = -torch.inf  # under the counts before the last iteration

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)

    def run(self) -> Iterator[Iteration]:
        while not self.finished:
            step = self.steps[self.done]
            self._iterate(step)
            self.done += 1
            yield step

    def _iterate(self, step: Iteration) -> None:
        phase = step.phase
        if step.number == 1 and phase.begin:
            # A phase that was cut off is begun again with the same noise.
            generator = torch.Generator().manual_seed((self.task.seed * 1_000_003 + phase.cycle) % 2**63)
            self.refinement = phase.begin(self.refinement, generator)
        log_likelihood, self.refinement = self.refinement.expect(self._smoothing(phase))
        if not log_likelihood > -torch.inf:
            raise InputError(f"a tree or a tagged sentence became impossible at {step}: its probability underflowed.")
        fell = self.log_likelihood - log_likelihood
        if phase.smooth is None and step.number > 1 and fell > ROUNDING * (abs(log_likelihood) + self.task.words):
            raise InputError(
                f"the log-likelihood fell at {step}, from {self.log_likelihood:.3f} to {log_likelihood:.3f}: "
                "this cannot happen in exact arithmetic."
            )
        self.log_likelihood = log_likelihood

    def _smoothing(self, phase: Phase) -> Any:
        return None if phase.smooth is None else self.refinement.smoothing(*phase.smooth)

    @property
    def _smoothing_now(self) -> Any:
        """That of the last iteration; at the start, that of the first phase."""
        phases = [step.phase for step in self.steps[: self.done][-1:]] or self.phases[:1]
        return self._smoothing(phases[0]) if phases else None

    def figures(self) -> dict[str, float]:
        log_likelihood = self.log_likelihood if self.done else self.refinement.expect(self._smoothing_now)[0]
        return self.refinement.figures() | {"log_likelihood_per_word": log_likelihood / self.task.words}

    def grammar(self) -> Grammar | TagChain:
        grammar: Grammar | TagChain = self.refinement.grammar(self._smoothing_now)
        return grammar

    def model(self) -> Model | TaggingModel:
        found = {"log_likelihood": self.log_likelihood} if self.done else {}
        grammar: Any = self.grammar()
        return self.task.model(self.options, self.done, grammar, **found)

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        return Checkpoint(
            made_of=self.made_of,
            done=self.done,
            notes=notes,
            tensors=self.refinement.tensors(),
            numbers={"log_likelihood": self.log_likelihood},
        )

    def load(self, path: Path) -> dict[str, Any]:
        found = Checkpoint.load(path, self.made_of)
        self.refinement = self.refinement.with_tensors(found.tensors)
        self.done, self.log_likelihood = found.done, found.numbers["log_likelihood"]
        return found.notes
