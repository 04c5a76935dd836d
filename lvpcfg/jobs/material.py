"""What job=train learns from, and looks at: trees, or tagged sentences. All else of a training is the same for both."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nltk.tree import Tree

from lvpcfg import processes
from lvpcfg.batch.records import words_of
from lvpcfg.errors import InputError
from lvpcfg.estimate.estimator import AnyTask, TaggingTask, Task
from lvpcfg.evaluation.evalb import evaluate
from lvpcfg.evaluation.tagging import score_tags
from lvpcfg.files import read_text
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.tightness import tightness
from lvpcfg.jobs.options import tagger_options
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.train import TrainOptions, is_text
from lvpcfg.parser import Parser
from lvpcfg.sequence.tagging import TaggingModel
from lvpcfg.tagger import Tagger
from lvpcfg.trees import signatures
from lvpcfg.trees.brackets import format_tree, read_trees
from lvpcfg.trees.conllu import TaggedSentence, read_conllu
from lvpcfg.trees.corpus import corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.sentences import flat
from lvpcfg.trees.tagged import build_tagged
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import words

if TYPE_CHECKING:
    from lvpcfg.jobs.board import Board

OF_TREES = {"precision": "P", "recall": "R", "f1": "F1", "errors": "dropped", "f1_all": "F1 all"}  # scores in tables
OF_SENTENCES = {"dev_perplexity": "perplexity", "unlabelled_sentence_f1": "sentence\nF1"}
OF_TAGS = {"token_accuracy": "tokens", "sentence_accuracy": "sentences", "unknown_accuracy": "unknown"}
Record = dict[str, float]  # the figures of a model: after how many steps, states, scores on dev and so on


class Material(Protocol):
    """What is learned from, and gold trees or tags that models are looked at by, if there are any."""

    @property
    def gold(self) -> Sequence[Any]:
        """Dev."""

    @property
    def chosen_by(self) -> str:
        """The figure on dev that the best model has the highest of."""

    @property
    def columns(self) -> dict[str, str]:
        """Figures on dev, and their titles in tables."""

    def task(self, seed: int, device: str) -> AnyTask:
        """What an estimator is given."""

    def look(self, model: Any) -> tuple[Record, Any]:
        """How well a model does on dev, and what it found."""

    def show(self, board: "Board", step: int, found: Any) -> None:
        """Some of what it found, for TensorBoard."""

    def line(self, record: Record) -> str:
        """The figures on dev, as a part of a sentence."""

    def gold_text(self) -> str:
        """All that dev is."""

    def states(self, model: Any) -> dict[str, list[tuple[str, int]]]:
        """The states of symbols, in columns."""

    def about(self, folder: Path) -> tuple[str, dict[str, int]]:
        """A title for the model in a folder that names its estimator, and its sizes."""

    def warn(self, folder: Path, run: Run) -> None:
        """Of what is wrong with the model in a folder, if anything is, and what helps."""


def read_material(config: TrainOptions, run: Run) -> Material:
    data = config.data
    if data.of_tags:
        train, gold = (_tagged(files, config, run) for files in (data.train_files, data.dev_files))
        return TaggedMaterial(train, gold, config, run)
    gold = _trees(data.dev_files, config, run)
    if data.train is None:
        run.say("data.train is not given: training on the embedded corpus.")
        return TreeMaterial(corpus("train"), gold or corpus("dev"), config)
    trees = _trees(data.train_files, config, run)
    return TreeMaterial(trees, gold, config)


class TreeMaterial:
    """A treebank, or sentences without trees."""

    def __init__(self, trees: list[Tree], gold: list[Tree], config: TrainOptions) -> None:
        self.config, options = config, config.estimator
        self.treebank = build_treebank(options.prepared(trees), config.binarisation.scheme(), progress=True)
        if len(self.treebank) < processes.number():
            raise InputError(f"there are {len(self.treebank)} trees for {processes.number()} processes: start fewer.")
        self.gold = normalise_all(options.prepared(gold))
        self.chosen_by: str = options.chosen_by
        self.columns = OF_TREES if self.chosen_by == "f1" else OF_SENTENCES

    def task(self, seed: int, device: str) -> Task:
        gold = self.gold or None
        return Task(
            self.treebank, self.config.signature or signatures.OF_TREES, seed, device, gold, self._f1 if gold else None
        )

    def _f1(self, model: Model) -> float:
        return self.look(model)[0]["f1"]

    def look(self, model: Model) -> tuple[Record, list[Tree]]:
        """With how many sentences the grammar has no tree for."""
        parser = Parser(model, **self.config.parser())
        found = parser.parse_sents(map(words, self.gold), progress=True)
        return evaluate(self.gold, found).figures() | {"fallbacks": parser.counts.fallbacks}, found

    def show(self, board: "Board", step: int, found: list[Tree]) -> None:
        board.parses(step, self.gold, found)

    def line(self, record: Record) -> str:
        if self.chosen_by != "f1":
            text = f"dev perplexity {record['dev_perplexity']:.1f}"
            return text + f", unlabelled sentence-F1 {record['unlabelled_sentence_f1']:.2f}"
        dropped = f" (EVALB drops {record['errors']} of {record['sentences']}; {record['f1_all']:.2f} with all)"
        return f"dev F1 {record['f1']:.2f}" + dropped * bool(record["errors"])

    def gold_text(self) -> str:
        return "\n".join(map(format_tree, self.gold))

    def states(self, model: Model) -> dict[str, list[tuple[str, int]]]:
        from lvpcfg.trees.binarisation import INTERMEDIATE

        grammar = model.grammar
        pairs = list(zip(grammar.symbols.names, grammar.states.tolist(), strict=True))
        inner, tags = pairs[: len(grammar.symbols.interminals)], pairs[len(grammar.symbols.interminals) :]
        return {
            "phrases": [pair for pair in inner if not pair[0].startswith(INTERMEDIATE)],
            "made by binarisation": [pair for pair in inner if pair[0].startswith(INTERMEDIATE)],
            "tags": tags,
        }

    def about(self, folder: Path) -> tuple[str, dict[str, int]]:
        return about_grammar(Model.load(folder))

    def warn(self, folder: Path, run: Run) -> None:
        """Where smoothing has moved so much probability to rules that grow that some trees never end."""
        grammar = Model.load(folder).grammar
        if grammar.signed:
            return
        found = tightness(grammar)
        if found.normalised and not found.tight:
            mass = "infinite weight" if found.mass is None else f"{100 * found.mass:.4g} % of the probability"
            run.say(
                f"Warning: the grammar is not tight. Its finite trees have {mass}, as smoothing can do. "
                f"The remedy: job=tightness model={folder} renormalised=FOLDER, or lvpcfg.renormalise(model), makes it "
                "tight and leaves the probabilities of trees given their words."
            )


class TaggedMaterial:
    """Sentences with the tags of their words."""

    chosen_by, columns = "token_accuracy", OF_TAGS

    def __init__(self, train: list[TaggedSentence], gold: list[TaggedSentence], config: TrainOptions, run: Run) -> None:
        self.config, self.gold, self.corpus = config, gold, build_tagged(train)
        self.words, self.tags = frozenset(self.corpus.words), frozenset(self.corpus.tags)
        if len(self.corpus) < processes.number():
            raise InputError(f"there are {len(self.corpus)} sentences for {processes.number()} processes: start fewer.")
        unseen = [tag for sentence in gold for _, tag in sentence if tag not in self.tags]
        if unseen:
            names = ", ".join(sorted({*unseen}))
            run.say(f"Words of dev with tags that data.train does not have ({names}): {len(unseen):,}.")

    def task(self, seed: int, device: str) -> TaggingTask:
        return TaggingTask(
            self.corpus, self.config.signature or signatures.OF_TAGS, seed, device, self.config.data.tags
        )

    def look(self, model: TaggingModel) -> tuple[Record, list[list[str]]]:
        tagger = Tagger(model, **tagger_options(self.config))
        found = tagger.tags_of([[word for word, _ in sentence] for sentence in self.gold], progress=True)
        figures = score_tags(self.gold, found, self.words, self.tags).figures()
        return figures | {"fallbacks": tagger.counts.fallbacks}, found

    def show(self, board: "Board", step: int, found: list[list[str]]) -> None:
        board.tags(step, self.gold, found)

    def line(self, record: Record) -> str:
        return ", ".join(
            f"{name} {record[figure]:.2f}"
            for figure, name in (
                ("token_accuracy", "dev tokens"),
                ("sentence_accuracy", "sentences"),
                ("unknown_accuracy", "unknown words"),
            )
            if figure in record
        )

    def gold_text(self) -> str:
        return "\n".join(" ".join("/".join(pair) for pair in sentence) for sentence in self.gold)

    def states(self, model: TaggingModel) -> dict[str, list[tuple[str, int]]]:
        return {"tags": [(tag, model.grammar.states) for tag in model.grammar.tags]}

    def about(self, folder: Path) -> tuple[str, dict[str, int]]:
        model = TaggingModel.load(folder)
        return f"Tagger ({model.provenance['estimator']})", {
            "train_sentences": int(model.provenance["sentences"]),
            "words": int(model.provenance["words"]),
            "vocabulary": len(model.lexicon.words),
            "unknown_word_classes": len(model.lexicon.classes),
            "tags": len(model.grammar.tags),
            "states": len(model.grammar.chain.initial),
        }

    def warn(self, folder: Path, run: Run) -> None:
        """Nothing: sentences have the length they have."""


def about_grammar(model: Model) -> tuple[str, dict[str, int]]:
    """A title that says how it was made, and its sizes."""
    grammar = model.grammar
    found = {name: int(model.provenance[name]) for name in ("trees", "words") if name in model.provenance}
    return f"Grammar ({model.provenance['estimator']})", found | {
        "vocabulary": len(model.lexicon.words),
        "unknown_word_classes": len(model.lexicon.classes),
        "interminals": len(grammar.symbols.interminals),
        "preterminals": len(grammar.symbols.preterminals),
        "states": int(grammar.states.sum()),
        "binary_rules": len(grammar.binary_rules),
        "unary_rules": len(grammar.unary_rules),
    }


def _trees(paths: list[str], config: TrainOptions, run: Run) -> list[Tree]:
    return [tree for path in paths for tree in _trees_of(path, config, run)]


def _trees_of(path: str, config: TrainOptions, run: Run) -> list[Tree]:
    if is_text(path):
        return [flat(found) for line in read_text(path).split("\n") if (found := words_of(line))]
    return _read(lambda on_error: read_trees(path, on_error=on_error), config, run)


def _tagged(paths: list[str], config: TrainOptions, run: Run) -> list[TaggedSentence]:
    def read(path: str) -> list[TaggedSentence]:
        return _read(lambda on_error: read_conllu(path, config.data.tags, on_error), config, run)

    return [sentence for path in paths for sentence in read(path)]


def _read(read: Callable[[Any], list[Any]], config: TrainOptions, run: Run) -> list[Any]:
    """What is malformed stops the job, or is left out, counted and reported."""
    if config.data.on_error == "raise":
        return read("raise")
    errors: list[InputError] = []
    found = read(errors.append)
    run.result["malformed"] = run.result.get("malformed", 0) + len(errors)
    for error in errors[:5]:
        run.say(f"skipped: {error}")
    if len(errors) > 5:
        run.say(f"... and {len(errors) - 5} more")
    return found
