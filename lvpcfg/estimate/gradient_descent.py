"""A grammar as a module (`lvpcfg.nn`), trained on trees by an optimiser of torch.

    conditional   log p(tree | words) = log w(tree) - log Z(words)
    joint         log p(tree, words)  = log w(tree)

Both sides are forests that are found once; each update computes them with the parameters of the day.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from nltk.tree import Tree
from torch import Tensor, nn
from tqdm import tqdm

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.gradient import ADAMW, CONDITIONAL, LBFGS, GradientOptions
from lvpcfg.estimate.states import Refinement
from lvpcfg.grammar.model import JSON, Model
from lvpcfg.nn import GrammarLayer, Observed
from lvpcfg.trees.binarise import debinarise

HISTORY = 10  # updates that L-BFGS remembers,
LISTS = ("old_dirs", "old_stps", "ro")  # and torch's names for where it does
SAMPLE, SHORT = 10, 20  # sentences of up to so many words on which pruned and whole charts are compared


@dataclass(frozen=True, eq=False)
class Batch:
    """Trees of one update."""

    observed: Observed
    unknown: Tensor  # [batch, length]: entries of the words, if they were unknown
    once: Tensor  # [batch, length]: whether a word occurs once in the treebank


class GradientDescent:
    """Gradient descent at work. Between two updates, the parameters and what the optimiser keeps are all there is."""

    def __init__(self, options: GradientOptions, task: Task) -> None:
        self.options, self.task = options, task
        model, self.made_of = self._start_model()
        assert options.parametrisation is not None
        self.layer = GrammarLayer(model, options.parametrisation).to(task.device, torch.float32)
        self.start_values, self.averages = (
            [parameter.detach().clone() for parameter in self.layer.parameters()] for _ in range(2)
        )
        self.optimiser = self._optimiser()
        self.members = self._members()
        updates = 1 if options.optimiser == LBFGS else len(self.members)
        self.steps = [
            Step(
                name=f"epoch {epoch}, update {update}",
                title=f"epoch {epoch}",
                evaluate="always" if update == updates else "never",
            )
            for epoch in range(1, options.epochs + 1)
            for update in range(1, updates + 1)
        ]
        self.updates, self.done = updates, 0
        self.total, self.words = 0.0, 0  # of this epoch so far
        self.gap = 0.0  # see `_measure_gap`
        self.left_out = 0  # trees that the grammar does not make

    start = Step("start", "start", "always")

    @property
    def shown(self) -> tuple[str, ...]:
        return ("states", self._objective)

    @property
    def _objective(self) -> str:
        prefix = "conditional_" if self.options.objective == CONDITIONAL else ""
        return f"{prefix}log_likelihood_per_word"

    @property
    def finished(self) -> bool:
        return self.done == len(self.steps)

    # The start

    def _start_model(self) -> tuple[Model, dict[str, Any]]:
        """The model, and what a training that takes this one up must share with it."""
        options, task = self.options, self.task
        if options.init is None:
            counts = task.observed.counts
            states = Refinement(task.observed.latent, counts, torch.zeros(0, len(counts.root), dtype=torch.int64))
            generator = torch.Generator().manual_seed(task.seed)
            states = states.split(options.states, options.noise, generator, remember=False)
            grammar = states.latent.grammar(states.counts)
            return task.model(options, 0, grammar), task.made_of(options)
        model = Model.load(options.init)
        if model.binarisation != task.treebank.binarisation:
            raise InputError(
                f"the model in {show(options.init, 200)} was made with {model.binarisation}, and the trees are "
                f"binarised with {task.treebank.binarisation}: give the same binarisation."
            )
        missing = set(task.treebank.symbols.names) - set(model.grammar.symbols.names)
        if missing:
            raise InputError(
                f"the model in {show(options.init, 200)} has no symbol {show(min(missing))}, which the trees have: "
                "expected one that was trained on such trees."
            )
        if model.coarse is None:
            model = replace(model, coarse=task.observed.coarse) if self._same_rules(model) else model
        digest = hashlib.sha256((Path(options.init) / JSON).read_bytes()).hexdigest()[:16]
        return model, task.made_of(options) | {"model of estimator.init": digest}

    def _same_rules(self, model: Model) -> bool:
        grammar, bank = model.grammar, self.task.treebank
        return grammar.symbols == bank.symbols and all(
            torch.equal(getattr(grammar, name), getattr(bank, name)) for name in ("binary_rules", "unary_rules")
        )

    def _members(self) -> list[list[int]]:
        """The trees of each batch, in random order, but the same in every epoch."""
        lengths = self.task.treebank.lengths.tolist()
        generator = torch.Generator().manual_seed(self.task.seed)
        batches: list[list[int]] = [[]]
        words = 0
        for tree in torch.randperm(len(lengths), generator=generator).tolist():
            if batches[-1] and words + lengths[tree] > self.options.batch_tokens:
                batches.append([])
                words = 0
            batches[-1].append(tree)
            words += lengths[tree]
        return batches

    @cached_property
    def batches(self) -> list[Batch | None]:
        """All trees that the grammar makes, and what they are compared with."""
        trees = [debinarise(tree) for tree in self.task.treebank.to_trees()]
        occurrences = Counter(word for tree in trees for word in tree.leaves())
        found = []
        for members in tqdm(self.members, desc="pruning", unit="batch", disable=None, leave=False):
            batch = [trees[tree] for tree in members]
            made = self.layer.observe(batch).forest
            kept = [] if made is None else made.sentences.tolist()
            self.left_out += len(batch) - len(kept)
            found.append(self._batch([batch[tree] for tree in kept], occurrences))
        if self.left_out == len(trees):
            raise InputError(f"the model in {show(self.options.init, 200)} makes none of the {len(trees)} trees.")
        return found

    def _batch(self, trees: Sequence[Tree], occurrences: Counter[str]) -> Batch | None:
        if not trees:
            return None
        lexicon, options = self.layer.model.lexicon, self.options
        observed = self.layer.observe(trees, options.prune if options.objective == CONDITIONAL else 0.0)
        unknown, once = torch.zeros_like(observed.entries), torch.zeros_like(observed.entries, dtype=torch.bool)
        for row, sentence in enumerate(observed.words):
            known = [lexicon.unknown(word, place == 0) for place, word in enumerate(sentence)]
            unknown[row, : len(known)] = torch.tensor(known)
            once[row, : len(known)] = torch.tensor([occurrences[word] == 1 for word in sentence])
        return Batch(observed, unknown, once)

    # Updates

    def _optimiser(self) -> torch.optim.Optimizer:
        rate = self.options.learning_rate
        if self.options.optimiser == LBFGS:
            return torch.optim.LBFGS(
                self.layer.parameters(), rate, max_iter=1, history_size=HISTORY, line_search_fn="strong_wolfe"
            )
        return torch.optim.Adam(self.layer.parameters(), rate)

    def run(self) -> Iterator[Step]:
        while not self.finished:
            step = self.steps[self.done]
            self._update(step)
            self.done += 1
            if self.done % self.updates == 0:
                self._measure_gap()
            yield step

    def _update(self, step: Step) -> None:
        epoch, update = divmod(self.done, self.updates)
        if update == 0:
            self.total, self.words = 0.0, 0
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.learning_rate * min(1.0, (self.done + 1) / max(1, self.options.warm_up))
        numbers = torch.randperm(len(self.batches), generator=self._generator(epoch)).tolist()
        numbers = numbers if self.options.optimiser == LBFGS else numbers[update : update + 1]
        some = [batch for number in numbers if (batch := self.batches[number]) is not None]
        first = []  # L-BFGS looks at several points; the first is where the parameters are now

        def loss() -> float:
            value = self._loss(some, step)
            first.append(value)
            return value

        if some:
            self.optimiser.step(loss)
            self._decay()
            self._average()
            if not all(bool((parameter < torch.inf).all()) for parameter in self.layer.parameters()):
                self._diverged("a parameter", step)
            self.total -= first[0]
            self.words += sum(int(batch.observed.lengths.sum()) for batch in some)

    def _loss(self, batches: Sequence[Batch], step: Step) -> float:
        """Leaves the gradient of the mean over the trees, and returns the sum of - log p."""
        self.optimiser.zero_grad()
        generator, trees, total = self._generator(-1 - self.done), sum(len(b.observed.words) for b in batches), 0.0
        for batch in batches:
            log_likelihood = self._log_likelihood(batch, generator).sum()
            (-log_likelihood / trees).backward()
            total -= float(log_likelihood.detach())
        if not math.isfinite(total):
            self._diverged("the loss", step)
        if self.options.optimiser != ADAMW:
            for parameter, change in self._changes():
                assert parameter.grad is not None
                parameter.grad.add_(change, alpha=self.options.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(self.layer.parameters(), self.options.clip or torch.inf)
        if not bool(norm.isfinite()):
            self._diverged("the gradient", step)
        return total

    def _log_likelihood(self, batch: Batch, generator: torch.Generator) -> Tensor:
        observed = batch.observed
        drawn = torch.rand(observed.entries.shape, generator=generator).to(observed.entries.device)
        entries = torch.where(batch.once & (drawn < self.options.unknown), batch.unknown, observed.entries)
        observed = replace(observed, entries=entries)
        return (self.layer.log_prob if self.options.objective == CONDITIONAL else self.layer.log_weight)(observed)

    def _changes(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """How far parameters have gone from where they started; those of zeros, which are -inf, nowhere."""
        for parameter, start in zip(self.layer.parameters(), self.start_values, strict=True):
            yield parameter, torch.where(start.isfinite(), parameter.detach() - start, 0)

    def _decay(self) -> None:
        """AdamW: beside the gradient, not in it."""
        if self.options.optimiser == ADAMW:
            rate = self.optimiser.param_groups[0]["lr"] * self.options.weight_decay
            with torch.no_grad():
                for parameter, change in self._changes():
                    parameter.sub_(change, alpha=rate)

    @torch.no_grad()
    def _average(self) -> None:
        kept = min(self.options.average, (1 + self.done) / (10 + self.done))  # less of it at first
        for parameter, average in zip(self.layer.parameters(), self.averages, strict=True):
            gone = torch.where(average.isfinite(), parameter - average, 0)
            average.add_(gone, alpha=1 - kept)

    @contextmanager
    def _averaged(self) -> Iterator[GrammarLayer]:
        """The layer with the moving average of its parameters."""
        parameters = [*self.layer.parameters()]
        now = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, average in zip(parameters, self.averages, strict=True):
                parameter.copy_(average)
            try:
                yield self.layer
            finally:
                for parameter, value in zip(parameters, now, strict=True):
                    parameter.copy_(value)

    def _diverged(self, what: str, step: Step) -> NoReturn:
        raise InputError(
            f"{what} is no finite number any more at {step}: estimator.learning_rate="
            f"{self.options.learning_rate} is too large. What was learned before is kept."
        )

    def _generator(self, number: int) -> torch.Generator:
        """The same for the same number, so that a training that is taken up sees what it would have seen."""
        return torch.Generator().manual_seed((self.task.seed * 1_000_003 + number) % 2**63)

    def _measure_gap(self) -> None:
        """By how much pruning makes log p(tree | words) too high, in the mean over a few short sentences."""
        if self.options.objective != CONDITIONAL or not self.options.prune:
            return
        with self._averaged() as layer:
            whole, pruned = (layer.log_prob(some) for some in self._sample)
        self.gap = float((pruned - whole).mean())

    @cached_property
    def _sample(self) -> tuple[Observed, Observed]:
        """Some trees, to compare with all trees of their sentences and with those that pruning leaves."""
        trees = [debinarise(tree) for tree in self.task.treebank.to_trees() if len(tree.leaves()) <= SHORT]
        return self.layer.observe(trees[:SAMPLE]), self.layer.observe(trees[:SAMPLE], self.options.prune)

    # What is known of it

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"states": int(self.layer.model.grammar.states.sum())}
        if self.left_out:
            figures["left_out"] = self.left_out
        if self.gap:
            figures["pruning_gap"] = self.gap
        return figures | {self._objective: self.total / max(1, self.words)}

    def model(self) -> Model:
        with self._averaged() as layer:
            model = layer.to_model()
        made = self.task.model(self.options, self.done, model.grammar).provenance
        return replace(model, provenance=made | {"start": model.provenance})

    def checkpoint(self, notes: dict[str, Any]) -> Checkpoint:
        tensors = {f"parameter.{name}": value.detach().clone() for name, value in self.layer.named_parameters()}
        tensors |= {f"average.{place}": value.clone() for place, value in enumerate(self.averages)}
        numbers: dict[str, float] = {"total": self.total, "words": self.words, "gap": self.gap}
        for name, value in _flat(self.optimiser.state_dict()["state"], "optimiser"):
            if isinstance(value, Tensor):
                tensors[name] = value.detach().clone()
            else:
                numbers[name] = value
        return Checkpoint(self.made_of, self.done, notes, tensors, numbers)

    def load(self, path: Path) -> dict[str, Any]:
        found = Checkpoint.load(path, self.made_of)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.copy_(found.tensors[f"parameter.{name}"])
        for place, average in enumerate(self.averages):
            average.copy_(found.tensors[f"average.{place}"])
        state = _nested({**found.tensors, **found.numbers}, "optimiser")
        if self.options.optimiser == LBFGS:
            state = {number: {name: [] for name in LISTS} | known for number, known in state.items()}
        self.optimiser.load_state_dict(self.optimiser.state_dict() | {"state": state})
        self.done = found.done
        self.total, self.words, self.gap = found.numbers["total"], int(found.numbers["words"]), found.numbers["gap"]
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
