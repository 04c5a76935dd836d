"""The likelihood of trees under a grammar as a module (`lvpcfg.nn`), for gradient descent.

    conditional   log p(tree | words) = log w(tree) - log Z(words)
    joint         log p(tree, words)  = log w(tree)

Numerator and denominator are forests that are found once. Each update computes them with the present parameters.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from nltk.tree import Tree
from torch import Tensor
from tqdm import tqdm

from lvpcfg import processes
from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.gaussian import GaussianOptions
from lvpcfg.estimate.gradient import CHARACTERS, CONDITIONAL, VALUES, GradientOptions
from lvpcfg.estimate.gradient_descent import random_batches
from lvpcfg.estimate.start import made_of
from lvpcfg.grammar.model import Model
from lvpcfg.nn import GrammarLayer, Observed
from lvpcfg.trees.binarise import debinarise
from lvpcfg.trees.spelling import CharacterNetwork

SAMPLE, SHORT = 10, 20  # sentences of up to so many words on which pruned and whole charts are compared


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Trees of one update."""

    sentences: int  # in all processes
    words: int
    shape: tuple[int, int]  # of all trees, those included that the grammar does not make, and their words
    here: "TreesHere | None"


@dataclass(frozen=True, eq=False)
class TreesHere:
    """Those of them that are computed in this process."""

    rows: Tensor  # [batch]: their places among all
    observed: Observed
    unknown: Tensor  # [batch, length]: entries of the words, if they were unknown
    once: Tensor  # [batch, length]: whether a word occurs once in the treebank, and may be taken for an unknown one


class TreeLikelihood:
    """The trees of a treebank, joint with their words or given them."""

    start, at_start = Step("start", "start", "always"), dict[str, float]()

    def __init__(self, options: GradientOptions | GaussianOptions, task: Task) -> None:
        self.options, self.task = options, task
        model, self.made_of = self._start_model()
        if options.lexicon == CHARACTERS:
            model = _with_network(model, torch.Generator().manual_seed(task.seed))
        assert options.parametrisation is not None
        self.module = GrammarLayer(model, options.parametrisation).to(task.device, torch.float32)
        self.members = random_batches(*options.batch(task.treebank.lengths.tolist()), task.seed)
        self.left_out = 0  # trees that the grammar does not make

    @property
    def figure(self) -> str:
        return self.options.figure

    @property
    def updates(self) -> int:
        return len(self.members)

    def _start_model(self) -> tuple[Model, dict[str, Any]]:
        """The model, and what a training that takes this one up must share with it."""
        options, task = self.options, self.task
        if options.init is None:
            return self._fresh(), task.made_of(options)
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
        if model.grammar.signed and options.parametrisation != VALUES:
            raise InputError(
                f"the model in {show(options.init, 200)} has negative parameters: expected one without, or "
                f"estimator.objective={CONDITIONAL} with estimator.parametrisation={VALUES}."
            )
        if model.coarse is None:
            model = replace(model, coarse=task.observed.coarse) if self._same_rules(model) else model
        return self._taken_up(model), task.made_of(options) | made_of(options.init)

    def _fresh(self) -> Model:
        """Where there is no model to begin with."""
        options = self.options
        assert isinstance(options, GradientOptions)
        generator = torch.Generator().manual_seed(self.task.seed)
        states = self.task.refinement(rare=0)
        states = states.split(options.states, options.descent.noise, generator, remember=False)
        return self.task.model(options, 0, states.latent.grammar(states.counts))

    def _taken_up(self, model: Model) -> Model:
        """What becomes of a model to begin with."""
        return model

    def _same_rules(self, model: Model) -> bool:
        grammar, bank = model.grammar, self.task.treebank
        return grammar.symbols == bank.symbols and all(
            torch.equal(getattr(grammar, name), getattr(bank, name)) for name in ("binary_rules", "unary_rules")
        )

    @cached_property
    def batches(self) -> list[TreeBatch | None]:
        """All trees that the grammar makes, and what they are compared with."""
        trees = [debinarise(tree) for tree in self.task.treebank.to_trees()]
        occurrences = Counter(word for tree in trees for word in tree.leaves())
        found = []
        for members in tqdm(self.members, desc="pruning", unit="batch", disable=None, leave=False):
            batch = [trees[tree] for tree in members]
            here = self._here(batch, occurrences)
            words = 0 if here is None else int(here.observed.lengths.sum())
            shape = len(batch), max(len(tree.leaves()) for tree in batch)
            found.append(TreeBatch(0 if here is None else len(here.rows), words, shape, here))
        sizes = processes.sum_over_processes(torch.tensor([[batch.sentences, batch.words] for batch in found]))
        self.left_out = len(trees) - int(sizes[:, 0].sum())
        if self.left_out == len(trees):
            raise InputError(f"the model in {show(self.options.init, 200)} makes none of the {len(trees)} trees.")
        return [
            replace(batch, sentences=sentences, words=words) if sentences else None
            for batch, (sentences, words) in zip(found, sizes.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _made(self, observed: Observed) -> list[int]:
        """The trees that the grammar gives weight to, by rules that it lists."""
        if observed.forest is None:
            return []
        trees = observed.forest.sentences
        return trees[self.module.log_weight(observed)[trees].isfinite()].tolist()

    def _here(self, batch: Sequence[Tree], occurrences: Counter[str]) -> TreesHere | None:
        """The share of this process, as far as the grammar makes it."""
        rows = torch.tensor(processes.share(range(len(batch))))
        made = self._made(self.module.observe([batch[row] for row in rows])) if len(rows) else []
        if not made:
            return None
        rows = rows[torch.tensor(made)]
        trees = [batch[row] for row in rows]
        lexicon, options = self.module.model.lexicon, self.options
        observed = self.module.observe(trees, options.prune if options.objective == CONDITIONAL else 0.0)
        entries = observed.tokens.entries
        unknown, once = torch.zeros_like(entries), torch.zeros_like(entries, dtype=torch.bool)
        for row, sentence in enumerate(observed.words):
            known = [lexicon.unknown(word, place == 0) for place, word in enumerate(sentence)]
            unknown[row, : len(known)] = torch.tensor(known)
            once[row, : len(known)] = torch.tensor([occurrences[word] == 1 for word in sentence])
        with torch.no_grad():  # a tree may need a tag that no unknown word has
            without = replace(observed, tokens=replace(observed.tokens, entries=torch.where(once, unknown, entries)))
            possible = self.module.log_weight(without) > -torch.inf
        return TreesHere(rows, observed, unknown, once & possible.unsqueeze(1))

    def log_likelihood(self, batch: TreeBatch, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(batch.shape, generator=generator)  # the same in all processes
        here = batch.here
        if here is None:
            return torch.zeros(0)
        observed, tokens = here.observed, here.observed.tokens
        drawn = drawn[here.rows, : tokens.entries.shape[1]].to(tokens.entries.device)
        entries = torch.where(here.once & (drawn < self.options.unknown), here.unknown, tokens.entries)
        observed = replace(observed, tokens=replace(tokens, entries=entries))
        return (self.module.log_prob if self.options.objective == CONDITIONAL else self.module.log_weight)(observed)

    def measure(self) -> dict[str, float]:
        """By how much pruning makes log p(tree | words) too high, in the mean over a few short sentences."""
        if self.options.objective != CONDITIONAL or not self.options.prune or not self._sample:
            return {}
        with torch.no_grad():
            whole, pruned = (self.module.log_prob(some) for some in self._sample)
        return {"pruning_gap": float((pruned - whole).mean())}

    @cached_property
    def _sample(self) -> tuple[Observed, ...]:
        """Some trees, to compare with all trees of their sentences and with those that pruning leaves."""
        trees = [debinarise(tree) for tree in self.task.treebank.to_trees() if len(tree.leaves()) <= SHORT][:SAMPLE]
        made = self._made(self.module.observe(trees)) if trees else []
        trees = [trees[tree] for tree in made]
        return (self.module.observe(trees), self.module.observe(trees, self.options.prune)) if trees else ()

    def figures(self) -> dict[str, float]:
        states: dict[str, float] = {"states": int(self.module.model.grammar.states.sum())}
        return states | ({"left_out": self.left_out} if self.left_out else {})

    def model(self, done: int) -> Model:
        model = self.module.to_model()
        return replace(model, provenance=self.task.provenance(self.options, done) | {"start": model.provenance})


def _with_network(model: Model, generator: torch.Generator) -> Model:
    """The model with a network over the characters of words, unless it has one already. Its scores stay what they are
    until the network has learned something."""
    grammar = model.grammar
    if grammar.lexical.network is not None:
        return model
    states = len(grammar.root) - grammar.interminal_states
    network = CharacterNetwork.new(len(model.lexicon.alphabet), states, generator)
    lexical = replace(grammar.lexical, network=network.to(dtype=grammar.root.dtype))
    return replace(model, grammar=replace(grammar, lexical=lexical))
