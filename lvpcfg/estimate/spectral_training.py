"""Spectral estimation as a training of one step."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.projections import Projections
from lvpcfg.estimate.spectral import SpectralOptions
from lvpcfg.estimate.spectral_grammar import SpectralGrammar
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model


class Spectral:
    start = None
    steps = (Step("moments", "moments", "always"),)
    shown = ("states", "rank_deficient", "correlation")

    def __init__(self, options: SpectralOptions, task: Task) -> None:
        self.options, self.task, self.done = options, task, 0

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)

    def run(self) -> Iterator[Step]:
        if not self.finished:
            _ = self.grammar  # it is made now
            self.done = 1
            yield self.steps[0]

    @cached_property
    def projections(self) -> Projections:
        return Projections.of(self.options, self.task, self.task.seed)

    @cached_property
    def grammar(self) -> Grammar:
        task, options = self.task, self.options
        nodes = self.projections.nodes
        return SpectralGrammar(task.treebank, task.observed, nodes, options.backoff, options.words).grammar()

    def figures(self) -> dict[str, float]:
        return self.projections.figures() | {"negative_numbers": int((self.grammar.binary.tensors["values"] < 0).sum())}

    def model(self) -> Model:
        symbols = self.projections.description(self.task.treebank.symbols.names)
        return self.task.model(self.options, self.done, self.grammar, symbols=symbols)

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        """Its one step is done again where it is needed."""
        return Checkpoint(self.task.made_of(self.options), self.done, notes, {})

    def load(self, path: Path) -> dict[str, Any]:
        found = Checkpoint.load(path, self.task.made_of(self.options))
        self.done = found.done
        return found.notes
