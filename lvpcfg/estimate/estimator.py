"""The protocol of estimators: from a treebank, or tagged sentences, and options to a model, step by step.

An estimator is two files: a module of this folder, or of a user's own, that registers it together with the class of its
options, and `conf/estimator/<name>.yaml`. Callers use the protocol below and nothing else.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from lvpcfg.errors import InputError, expect, show

if TYPE_CHECKING:  # options are checked without torch and nltk
    from nltk.tree import Tree

    from lvpcfg.estimate.checkpoint import Checkpoint
    from lvpcfg.estimate.latent import Observed
    from lvpcfg.estimate.states import Refinement
    from lvpcfg.estimate.tagged_states import TaggedStates, TagLayout
    from lvpcfg.grammar.grammar import Grammar
    from lvpcfg.grammar.model import Model
    from lvpcfg.sequence.tagging import TagChain, TaggingModel
    from lvpcfg.trees.tagged import TaggedCorpus
    from lvpcfg.trees.treebank import Treebank


# Steps are listed beforehand, so that there must not be too many.
MOST = 1_000_000  # of whole numbers that have no other bound
LEARN_TAGS = "count, em, gaussian or gradient"
MOST_TRANSITIONS = 1 << 28  # numbers of a chain
MOST_CYCLES, MOST_ITERATIONS = 20, 10_000  # of split-merge training, and in one phase of a cycle, or of epochs


@dataclass
class Options:
    """Options of an estimator. Each class has its defaults, and refuses what makes no sense in `__post_init__`."""

    name: str = ""  # under which the estimator is registered

    def __post_init__(self) -> None:
        expect("estimator.name", self.name, (type(self).name,))

    @property
    def chosen_by(self) -> str:
        """The figure on dev that the best model has the highest of."""
        return "f1"

    @property
    def needs_trees(self) -> bool:
        """Whether sentences without trees are not enough."""
        return True

    @property
    def heeds_seed(self) -> bool:
        """Whether trainings with other seeds differ."""
        return True

    def check_tags(self) -> None:
        """Refuses to learn from tagged sentences, or options that make no sense for them."""
        raise InputError(f"estimator={self.name} learns from trees: expected {LEARN_TAGS} for tagged sentences.")

    def prepared(self, trees: "Iterable[Any]") -> "list[Tree]":
        """What is learned from, and looked at, of a treebank."""
        from lvpcfg.trees.walk import trees_of

        return trees_of("what is to be learned from", trees)


def check_number(
    options: Options,
    name: str,
    least: float = 0,
    most: float | None = None,
    otherwise: str | None = None,
    whole: bool | None = None,
) -> None:
    """Refuses an option that is no number from `least` to `most`.

    It is a whole number where its default is no float, unless `whole` says otherwise. Without `most`, a whole number
    is at most a million, and another one has no bound.
    """
    value = getattr(options, name)
    whole = not isinstance(getattr(type(options), name), float) if whole is None else whole
    if type(value) is not int and (whole or type(value) is not float):
        raise InputError(f"estimator.{name} is {show(value)}: expected a {'whole ' if whole else ''}number.")
    if most is None:
        most = MOST if whole else math.inf
    if not value >= least:  # so that NaN is refused too
        raise InputError(f"estimator.{name} is {value}: expected {least} or more.")
    if value > most:
        raise InputError(f"estimator.{name} is {value}: expected {otherwise or f'{most} at the most'}.")


def check_folder(options: Options, name: str) -> None:
    """Refuses an option that is no name of a model folder, nor None."""
    value = getattr(options, name)
    if not (value is None or isinstance(value, str)):
        raise InputError(f"estimator.{name} is {show(value)}: expected a model folder.")


class AnyTask(ABC):
    """What is learned from, and how."""

    @property
    @abstractmethod
    def seed(self) -> int: ...

    start_title: ClassVar[str] = "treebank PCFG"  # of what counting alone makes

    @property
    def start(self) -> "Step":
        """Describes that."""
        return Step("counting", self.start_title, "always")

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Of what is learned from, for whom takes up a training."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """The same for the same trees or sentences in the same order, read alike."""

    @property
    @abstractmethod
    def counted(self) -> dict[str, int]:
        """Trees or sentences, and words."""

    def made_of(self, options: Options) -> dict[str, Any]:
        """What two trainings must share so that one can take up the other."""
        made = {f"estimator.{name}": value for name, value in asdict(options).items()}
        return made | {"seed": self.seed} | self.sizes | self.fingerprint

    def provenance(self, options: Options, done: int) -> dict[str, Any]:
        """How a model was made that is there after so many steps."""
        made = {"estimator": options.name, "options": asdict(options), "seed": self.seed}
        return made | self.counted | {"iterations": done}


@dataclass(frozen=True, eq=False)
class Task(AnyTask):
    """What an estimator of grammars is given, beside its options."""

    treebank: "Treebank"
    signature: str = "english"  # the classes of unknown words
    seed: int = 0
    device: str = "cpu"
    dev: "Sequence[Tree] | None" = None  # normalised trees that are not trained on, if there are any
    f1: "Callable[[Model], float] | None" = None  # how well a model parses them

    @property
    def sizes(self) -> dict[str, int]:
        bank = self.treebank
        rules = len(bank.binary_rules) + len(bank.unary_rules)
        return {"trees": len(bank), "nodes": len(bank.symbol), "rules": rules, "vocabulary": len(bank.words)}

    @property
    def counted(self) -> dict[str, int]:
        return {"trees": len(self.treebank), "words": self.words}

    @property
    def words(self) -> int:
        return int(self.treebank.lengths.sum())

    def refinement(self, rare: int) -> "Refinement":
        """One state for each symbol, with the counts of the treebank."""
        from lvpcfg.estimate.states import Refinement

        return Refinement.of(self.observed, rare)

    def model(self, options: Options, done: int, grammar: "Grammar", **provenance: Any) -> "Model":
        """The model of a grammar over the treebank's symbols, rules and words, after so many steps.

        Its coarse grammar is the treebank PCFG. `provenance` is what else it says of how it was made.
        """
        from lvpcfg.grammar.coarse import is_large
        from lvpcfg.grammar.model import Model

        made = self.provenance(options, done) | provenance
        coarse = self.observed.coarse if is_large(grammar) else None
        return Model(grammar, self.observed.lexicon, self.treebank.binarisation, made, coarse)

    @cached_property
    def observed(self) -> "Observed":
        """The lexicon, and the counts of the treebank as it stands, one state for each symbol."""
        import torch

        from lvpcfg.estimate.latent import Observed

        return Observed.of(self.treebank, self.signature, torch.device(self.device))

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        bank = self.treebank
        digest = hashlib.sha256(json.dumps([bank.symbols.names, bank.words]).encode())
        for column in (bank.symbol, bank.rule, bank.binary_rules, bank.unary_rules, bank.lexical_rules):
            digest.update(column.numpy().tobytes())
        return {"signature": self.signature, "treebank": digest.hexdigest()[:16]}


@dataclass(frozen=True, eq=False)
class TaggingTask(AnyTask):
    """What an estimator of taggers is given, beside its options."""

    corpus: "TaggedCorpus"
    signature: str = "affixes"  # the classes of unknown words
    seed: int = 0
    device: str = "cpu"
    column: str = "upos"  # of CoNLL-U, that the tags are from

    start_title: ClassVar[str] = "hidden Markov model"

    @property
    def sizes(self) -> dict[str, int]:
        corpus = self.corpus
        return {
            "sentences": len(corpus),
            "words": self.words,
            "tags": len(corpus.tags),
            "vocabulary": len(corpus.words),
        }

    @property
    def counted(self) -> dict[str, int]:
        return {"sentences": len(self.corpus), "words": self.words}

    @property
    def words(self) -> int:
        return len(self.corpus.tag)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        corpus = self.corpus
        digest = hashlib.sha256(json.dumps([corpus.tags, corpus.words]).encode())
        for column in (corpus.tag, corpus.word, corpus.lengths):
            digest.update(column.numpy().tobytes())
        return {"signature": self.signature, "data.tags": self.column, "tagged sentences": digest.hexdigest()[:16]}

    @cached_property
    def layout(self) -> "TagLayout":
        """The lexicon, and where the tokens are counted."""
        import torch

        from lvpcfg.estimate.tagged_states import TagLayout

        return TagLayout(self.corpus, self.signature, torch.device(self.device))

    def expect_states(self, states: int) -> None:
        """Refuses so many for each tag, if no transition could hold them."""
        tags, most = len(self.corpus.tags), math.isqrt(MOST_TRANSITIONS)
        if tags * states > most:
            raise InputError(
                f"estimator.states is {states}: with {tags} tags there would be {tags * states:,} states, expected "
                f"{most:,} at the most."
            )

    def refinement(self, rare: int) -> "TaggedStates":
        """One state for each tag, with the counts of the corpus."""
        from lvpcfg.estimate.tagged_states import TaggedStates

        return TaggedStates.of(self.layout, rare)

    def model(self, options: Options, done: int, grammar: "TagChain", **provenance: Any) -> "TaggingModel":
        """That of a chain, after so many steps; `provenance` is what else it says of how it was made."""
        from lvpcfg.sequence.tagging import TaggingModel

        return TaggingModel(grammar, self.layout.lexicon, self.column, self.provenance(options, done) | provenance)


@dataclass(frozen=True)
class Step:
    """One step of an estimator, such as an iteration of EM."""

    name: str  # in messages: "cycle 2, merge, iteration 3"
    title: str  # of the model it leaves, in lines and tables: "cycle 2"
    # Whether that model is looked at: "always"; "sometimes", once in `evaluate_every` steps; or "never", where it is
    # unfinished.
    evaluate: Literal["always", "sometimes", "never"] = "sometimes"

    def __str__(self) -> str:
        return self.name


class Estimator(Protocol):
    """An estimator at work. What is registered is a function or a class that makes one of (options, task).

    Between two steps it can be stopped; taken up from its checkpoint, it ends with the same model, bit for bit.
    """

    @property
    def start(self) -> Step | None:
        """Describes the model before the first step; None where there is none yet."""

    @property
    def steps(self) -> Sequence[Step]:
        """All steps, known beforehand, so that progress can be shown."""

    @property
    def done(self) -> int:
        """The number of steps that are done."""

    @property
    def finished(self) -> bool:
        """Whether no step is left. This may come before the last of `steps`, where an estimator stops early."""

    @property
    def shown(self) -> Sequence[str]:
        """The names of the figures for the terminal. The last is what restarts are compared by where there are no dev
        trees: the higher, the better."""

    def run(self) -> Iterator[Step]:
        """Does the steps that are left; gives out each when it is done."""

    def figures(self) -> dict[str, float]:
        """Numbers that describe the estimator as it is now: for TensorBoard, `result.json` and the terminal."""

    def model(self) -> "Model | TaggingModel":
        """The model as it is now."""

    def checkpoint(self, notes: dict[str, Any]) -> "Checkpoint":
        """All that `load` needs to go on from here, and notes of the caller, plain JSON."""

    def load(self, path: Path) -> dict[str, Any]:
        """Takes up where a checkpoint of the same training was made; returns its notes."""
