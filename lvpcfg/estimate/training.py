"""Estimators as sequences of EM iterations that can be stopped after any of them and taken up again.

    count         no iteration: relative frequencies, m = 1
    em            m states for every symbol, from relative frequencies with noise (Matsuzaki et al. 2005)
    split_merge   cycles of: split all states, EM; merge what was worth least, EM; smooth, EM (Petrov et al. 2006)

Without smoothing the log-likelihood never falls; it is watched.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

from lvpcfg.decompose.coarse import with_cover
from lvpcfg.errors import InputError, expect, show
from lvpcfg.estimate.latent import Counts, Smoothing, observed_counts
from lvpcfg.estimate.split_merge import merge, split
from lvpcfg.files import read_bytes, tensor_file, write_bytes
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.trees.lexicon import build_lexicon
from lvpcfg.trees.treebank import Treebank

EM, SPLIT, MERGE, SMOOTH = "em", "split", "merge", "smooth"
ROUNDING = 1e-6  # of the log-likelihood, and for each node: scores on trees are float32


@dataclass
class Options:
    """Of the estimator `count`, which has none, and of all others. What they mean stands in `conf/estimator/`."""

    name: str = "count"


@dataclass
class EMOptions(Options):
    name: str = "em"
    rare: int = 20  # words that occur no more often than this share one profile over the states of a tag
    states: int = 16  # of every symbol
    iterations: int = 50
    noise: float = 0.1  # counts are multiplied by exp of a number up to this


@dataclass
class SplitMergeOptions(Options):
    name: str = "split_merge"
    rare: int = 20
    cycles: int = 4
    split_iterations: int = 50
    merge_iterations: int = 20
    smooth_iterations: int = 10
    merged: float = 0.5  # the fraction of the pairs of states that is merged again
    noise: float = 0.01
    smooth_rules: float = 0.01  # weight of the mean over related states
    smooth_words: float = 0.1


ESTIMATORS: dict[str, type[Options]] = {"count": Options, "em": EMOptions, "split_merge": SplitMergeOptions}


@dataclass(frozen=True)
class Step:
    """One EM iteration."""

    cycle: int
    phase: str
    iteration: int  # from 1, within the phase
    last: bool  # of its cycle

    def __str__(self) -> str:
        return f"cycle {self.cycle}, {self.phase}, iteration {self.iteration}"


def steps(options: Options) -> list[Step]:
    """All iterations of an estimator, in order."""
    if isinstance(options, EMOptions):
        phases = [(1, EM, options.iterations)]
    elif isinstance(options, SplitMergeOptions):
        lengths = (options.split_iterations, options.merge_iterations, options.smooth_iterations)
        phases = [
            (cycle, phase, length)
            for cycle in range(1, options.cycles + 1)
            for phase, length in zip((SPLIT, MERGE, SMOOTH), lengths, strict=True)
        ]
    else:
        phases = []
    found = [(cycle, phase, i) for cycle, phase, length in phases for i in range(1, length + 1)]
    following = [*(cycle for cycle, _, _ in found), 0][1:]
    return [Step(*step, last=step[0] != then) for step, then in zip(found, following, strict=True)]


def check(options: Options) -> None:
    """Values that make no sense stop here."""
    expect("estimator.name", options.name, (type(options)().name,))
    numbers = asdict(options)
    del numbers["name"]
    for name, value in numbers.items():
        whole = isinstance(getattr(type(options), name), int)
        if type(value) is not int and (whole or type(value) is not float):
            raise InputError(f"estimator.{name} is {show(value)}: expected a {'whole ' if whole else ''}number.")
        least = 1 if name in ("states", "cycles", "iterations", "split_iterations", "merge_iterations") else 0
        if not value >= least:  # so that NaN is refused too
            raise InputError(f"estimator.{name} is {value}: expected {least} or more.")
        if name == "noise" and value > 100:
            raise InputError(
                f"estimator.noise is {value}: expected 100 at the most, since exp of it is multiplied with."
            )
        if name in ("merged", "smooth_rules", "smooth_words") and value > 1:
            raise InputError(f"estimator.{name} is {value}: expected a fraction, 0 to 1.")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A training between two iterations."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]  # plain JSON

    def save(self, path: Path) -> None:
        """In one file that is there as a whole or not at all."""
        write_bytes(path, *tensor_file(self.tensors, {"lvpcfg": json.dumps(self.about)}))


class Trainer:
    """An estimator at work on a treebank. Between two iterations, its expected counts are all there is to it."""

    def __init__(
        self,
        treebank: Treebank,
        options: Options,
        signature: str = "english",
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check(options)
        self.treebank, self.options, self.seed = treebank, options, seed
        self.lexicon, unseen = build_lexicon(treebank, signature)
        rare = options.rare if isinstance(options, EMOptions | SplitMergeOptions) else 0
        self.latent, self.counts = observed_counts(treebank, self.lexicon, unseen, rare, torch.device(device))
        self.hierarchy = torch.zeros(0, len(treebank.symbols), dtype=torch.int64)
        self.steps, self.done, self.nodes = steps(options), 0, len(treebank.symbol)
        self.log_likelihood = -torch.inf

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)

    def run(self) -> Iterator[Step]:
        """The iterations that are still to come; each is given out when it is done."""
        while not self.finished:
            step = self.steps[self.done]
            self._iterate(step)
            self.done += 1
            yield step

    def _iterate(self, step: Step) -> None:
        if step.iteration == 1:
            self._begin(step)
        log_likelihood, self.counts = self.latent.expect(self.counts, self.smoothing(step))
        if not log_likelihood > -torch.inf:
            raise InputError(f"a tree of the treebank became impossible at {step}: its probability underflowed.")
        fell = self.log_likelihood - log_likelihood
        if step.phase != SMOOTH and step.iteration > 1 and fell > ROUNDING * (abs(log_likelihood) + self.nodes):
            raise InputError(
                f"the log-likelihood fell at {step}, from {self.log_likelihood:.3f} to {log_likelihood:.3f}: "
                "this cannot happen in exact arithmetic."
            )
        self.log_likelihood = log_likelihood

    def _begin(self, step: Step) -> None:
        """What happens to the states before a phase."""
        options = self.options
        # A phase that was cut off is begun again with the same noise.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step.cycle) % 2**63)
        if isinstance(options, EMOptions):
            self.latent, self.counts = split(self.latent, self.counts, options.states, options.noise, generator)
            self.hierarchy = torch.zeros(0, len(self.counts.root), dtype=torch.int64)
        elif isinstance(options, SplitMergeOptions) and step.phase == SPLIT:
            old = self.latent
            self.latent, self.counts = split(old, self.counts, 2, options.noise, generator)
            symbol = torch.repeat_interleave(self.latent.states)
            factor = (self.latent.states // old.states)[symbol]
            came_from = (torch.arange(len(symbol)) - self.latent.first[symbol]) // factor
            self.hierarchy = torch.cat([self.hierarchy[:, old.first[symbol] + came_from], came_from.unsqueeze(0)])
        elif isinstance(options, SplitMergeOptions) and step.phase == MERGE:
            old = self.latent
            self.latent, self.counts, place = merge(old, self.counts, options.merged)
            hierarchy = self.hierarchy.new_empty(len(self.hierarchy), len(self.counts.root))
            self.hierarchy = hierarchy.index_copy(1, place, self.hierarchy)  # merged states are siblings

    def smoothing(self, step: Step | None) -> Smoothing | None:
        if step is None or step.phase != SMOOTH or not isinstance(self.options, SplitMergeOptions):
            return None
        return Smoothing(self._branches(), self.options.smooth_rules, self.options.smooth_words)

    def _branches(self) -> Tensor:
        """[states]: which half of the first split of its symbol that was not undone."""
        symbol = torch.repeat_interleave(self.latent.states)
        own = torch.arange(len(symbol)) - self.latent.first[symbol]
        branch = torch.zeros_like(own)
        for ancestor in reversed([*self.hierarchy, own]):
            split_then = torch.zeros_like(self.latent.states).scatter_reduce(0, symbol, ancestor, "amax") > 0
            branch = torch.where(split_then[symbol], ancestor, branch)
        return branch

    def grammar(self) -> Grammar:
        step = self.steps[self.done - 1] if self.done else None
        return self.latent.grammar(self.counts, self.smoothing(step), self.hierarchy)

    def model(self) -> Model:
        provenance = {
            "estimator": self.options.name,
            "options": asdict(self.options),
            "seed": self.seed,
            "trees": len(self.treebank),
            "words": int(self.treebank.lengths.sum()),
            "iterations": self.done,
        }
        if self.done:
            provenance["log_likelihood"] = self.log_likelihood
        return with_cover(Model(self.grammar(), self.lexicon, self.treebank.binarisation, provenance))

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        """What `load` needs to go on from here; `notes` are plain JSON."""
        tensors = {"states": self.latent.states, "hierarchy": self.hierarchy.flatten(), **vars(self.counts)}
        return Checkpoint(
            tensors,
            {
                "made_of": self._made_of,
                "done": self.done,
                "log_likelihood": self.log_likelihood,
                "notes": notes,
            },
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Takes up where a checkpoint of the same training was made; returns its notes."""
        data = read_bytes(path)
        try:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            about = json.loads(header["__metadata__"]["lvpcfg"])
            tensors = tensors_from_bytes(data)
            states, hierarchy, *counts = (tensors[name] for name in ("states", "hierarchy", "root", "rules", "lexical"))
            made_of, done, notes = dict(about["made_of"]), int(about["done"]), dict(about["notes"])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{show(str(path), 200)} is no checkpoint of a training ({show(str(error))}).") from None
        mine = self._made_of
        for name in mine:
            if made_of.get(name) != mine[name]:
                raise InputError(
                    f"{show(str(path), 200)} was made with {name} {show(made_of.get(name))}, and this training has "
                    f"{show(mine[name])}: resume with the same data and options, or in another folder."
                )
        self.latent = self.latent.with_states(states)
        self.counts = Counts(*counts)
        self.hierarchy = hierarchy.view(-1, len(self.counts.root))
        self.done, self.log_likelihood = done, about["log_likelihood"]
        return notes

    @cached_property
    def _made_of(self) -> dict[str, Any]:
        """What two trainings must share to be one."""
        options = {f"estimator.{name}": value for name, value in asdict(self.options).items()}
        return options | {
            "seed": self.seed,
            "trees": len(self.treebank),
            "nodes": len(self.treebank.symbol),
            "rules": len(self.latent.rules),
            "vocabulary": len(self.lexicon.words),
            "signature": self.lexicon.signature,
            "treebank": _fingerprint(self.treebank),
        }


def _fingerprint(treebank: Treebank) -> str:
    """The same for the same trees in the same order, binarised alike."""
    digest = hashlib.sha256(json.dumps([treebank.symbols.names, treebank.words]).encode())
    for column in (treebank.symbol, treebank.rule, treebank.binary_rules, treebank.unary_rules, treebank.lexical_rules):
        digest.update(column.numpy().tobytes())
    return digest.hexdigest()[:16]
