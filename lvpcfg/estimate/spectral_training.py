"""Spectral estimation as a training: the moments, and then, if asked for, a search for the numbers of states.

The search is that of Narayan & Cohen 2016: symbol by symbol, the commonest first, it tries other numbers of states for
this one in each of the best vectors of numbers so far, and keeps those with the best F1 on dev. Vectors of nodes are
computed once: fewer states are the first ones of more.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from lvpcfg import processes
from lvpcfg.errors import InputError
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.projections import Projections
from lvpcfg.estimate.spectral import SpectralOptions
from lvpcfg.estimate.spectral_grammar import SpectralGrammar
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model

MOMENTS = Step("moments", "moments", "always")
KEPT = 2  # vectors of numbers of states, from one symbol to the next
SHARES = (0.25, 0.5, 0.75)  # of the states of a symbol that are tried, beside one and all


class Spectral:
    start = None
    shown = ("states", "rank_deficient", "correlation")

    def __init__(self, options: SpectralOptions, task: Task) -> None:
        self.options, self.task, self.done = options, task, 0
        self.seconds = 0.0  # of the search
        self._last: Grammar | None = None
        self.f1 = torch.zeros(0, dtype=torch.float64)  # of the best vectors, best first
        if options.search_minutes and task.f1 is None:
            raise InputError("estimator.search_minutes needs trees to choose by: data.dev=FILE.")
        if options.search_minutes and processes.number() > 1:
            raise InputError("estimator.search_minutes is not for torchrun: processes would run out of time apart.")
        self.searched = self._commonest() if options.search_minutes else []
        names = task.treebank.symbols.names
        search = [Step(f"search, {names[symbol]}", f"search, {names[symbol]}", "never") for symbol in self.searched]
        self.steps = [MOMENTS, *search]

    def _commonest(self) -> list[int]:
        """Symbols that have more than one state, the commonest first."""
        order = self.projections.nodes.sizes.argsort(descending=True, stable=True)
        return [symbol for symbol in order.tolist() if self.projections.nodes.states[symbol] > 1]

    @property
    def finished(self) -> bool:
        out_of_time = self.seconds >= 60 * self.options.search_minutes > 0
        return self.done == len(self.steps) or (self.done > 0 and out_of_time)

    def run(self) -> Iterator[Step]:
        while not self.finished:
            step = self.steps[self.done]
            if self.done:
                self._search(self.searched[self.done - 1])
            else:
                self.projections.report(self.task.treebank.symbols.names)
            self._last = self.grammar(self.best[0])
            self.done += 1
            yield step

    @cached_property
    def projections(self) -> Projections:
        return Projections.of(self.options, self.task, self.task.seed)

    @cached_property
    def best(self) -> Int64[Tensor, "vectors symbols"]:
        """Numbers of states, the best vector first."""
        return self.projections.nodes.states.unsqueeze(0)

    @property
    def found(self) -> Grammar:
        """What the last step left."""
        if self._last is None:  # it was loaded
            self._last = self.grammar(self.best[0])
        return self._last

    def grammar(self, states: Int64[Tensor, "symbols"]) -> Grammar:
        nodes = replace(self.projections.nodes, states=states)
        task, options = self.task, self.options
        return SpectralGrammar(task.treebank, task.observed, nodes, options.backoff, options.words).grammar()

    def _search(self, symbol: int) -> None:
        begin, all_states = time.perf_counter(), int(self.projections.nodes.states[symbol])
        numbers = {1, all_states, *(max(1, round(share * all_states)) for share in SHARES)}
        if not len(self.f1):
            self.f1 = torch.tensor([self._score(self.best[0])], dtype=torch.float64)
        known = {tuple(states): f1 for states, f1 in zip(self.best.tolist(), self.f1.tolist(), strict=True)}
        for states in self.best:
            for number in sorted(numbers):
                tried = states.clone()
                tried[symbol] = number
                if tuple(tried.tolist()) not in known and self._in_time(begin):
                    known[tuple(tried.tolist())] = self._score(tried)
        ordered = sorted(known, key=lambda states: (-known[states], sum(states)))[:KEPT]
        self.best = torch.tensor(ordered)
        self.f1 = torch.tensor([known[states] for states in ordered], dtype=torch.float64)
        self.seconds += time.perf_counter() - begin

    def _in_time(self, begin: float) -> bool:
        return self.seconds + time.perf_counter() - begin < 60 * self.options.search_minutes

    def _score(self, states: Int64[Tensor, "symbols"]) -> float:
        assert self.task.f1 is not None
        return self.task.f1(self.task.model(self.options, self.done, self.grammar(states)))

    def figures(self) -> dict[str, float]:
        negative = sum(int((tensor < 0).sum()) for tensor in (self.found.unary, *self.found.binary.tensors.values()))
        found = self.projections.figures() | {"states": int(self.best[0].sum()), "negative_numbers": negative}
        return found | ({"searched_f1": float(self.f1[0])} if len(self.f1) else {})

    def model(self) -> Model:
        symbols = self.projections.description(self.task.treebank.symbols.names, self.best[0])
        return self.task.model(self.options, self.done, self.found, symbols=symbols)

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        """The moments are computed again where they are needed."""
        tensors = {"best": self.best, "f1": self.f1}
        return Checkpoint(self.task.made_of(self.options), self.done, notes, tensors, {"seconds": self.seconds})

    def load(self, path: Path) -> dict[str, Any]:
        found = Checkpoint.load(path, self.task.made_of(self.options))
        self.done, self.seconds = found.done, found.numbers["seconds"]
        self.best, self.f1 = found.tensors["best"], found.tensors["f1"]
        return found.notes
