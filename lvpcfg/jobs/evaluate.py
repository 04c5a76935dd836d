"""job=evaluate: gold trees, and test trees or a model that parses the gold words -> EVALB's scores; gold tags, and a
model that tags the gold words -> accuracies."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, expect
from lvpcfg.jobs.options import MOST_PROCESSES, ParserOptions, expect_positive, folders, one_folder, tagger_options
from lvpcfg.jobs.train import is_conllu
from lvpcfg.options import TAG_DECODERS
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.evaluation.evalb import Parameters, Scores
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class EvaluateOptions(ParserOptions):
    gold: str | None
    test: str | None
    model: Any  # a folder, or a list of folders
    parameters: str | None
    punctuation: bool
    processes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)
        expect_positive(self, "processes", most=MOST_PROCESSES)
        if self.of_tags:
            of_trees = {
                "test": self.test is not None,
                "parameters": self.parameters is not None,
                "punctuation": not self.punctuation,
                "processes": self.processes > 1,
            }
            for name, given in of_trees.items():
                if given:
                    raise InputError(f"{name} is for trees: expected gold={self.gold} and model=FOLDER alone.")
            if self.decoder is not None:
                expect("decoder", self.decoder, TAG_DECODERS)

    @property
    def of_tags(self) -> bool:
        return self.gold is not None and is_conllu(self.gold)


@JOBS.register("evaluate", EvaluateOptions)
def run(options: EvaluateOptions, run: "Run") -> None:
    from lvpcfg.evaluation.evalb import COLLINS, score
    from lvpcfg.evaluation.evalb_files import read_pair, read_parameters, report
    from lvpcfg.files import write_text

    run.begin()
    if options.gold is not None and options.of_tags:
        _tag(options.gold, options, run)
        return
    if options.gold is None or (options.test is None) == (options.model is None):
        raise InputError("job=evaluate needs gold=FILE, and either test=FILE (trees) or model=FOLDER (to parse with).")
    parameters = COLLINS if options.parameters is None else read_parameters(options.parameters)
    if options.test is not None:
        scores = score(*read_pair(options.gold, options.test), parameters)
    else:
        scores = _parse(options.gold, options, parameters, run)
    run.result.update(scores.figures())
    write_text(run.folder / "evalb.txt", report(scores))
    show_scores(scores, run, "Scores")
    run.say(f"EVALB's report, a line a sentence, is in {run.folder / 'evalb.txt'}.")


def _parse(path: str, options: EvaluateOptions, parameters: "Parameters", run: "Run") -> "Scores":
    """Parses the words of the gold trees, raw or clean, without their tags."""
    from lvpcfg.evaluation.evalb import evaluate
    from lvpcfg.evaluation.unknown import unknown_words
    from lvpcfg.jobs.parsing import parsing, report
    from lvpcfg.trees.brackets import read_trees, write_trees
    from lvpcfg.trees.normalise import normalise_all
    from lvpcfg.trees.sentences import without_punctuation
    from lvpcfg.trees.walk import words

    gold = normalise_all(read_trees(path))
    if not options.punctuation:
        gold = [kept for tree in gold if (kept := without_punctuation(tree)) is not None]
    with parsing(options.model, options, options.processes, "evaluate") as parser:
        begin = time.perf_counter()
        trees = parser.parse_sents([words(tree) for tree in gold], progress=True)
        report(parser, len(gold) / (time.perf_counter() - begin), run)
        unknown = unknown_words(gold, trees, parser.lexicon, parameters)
    run.result |= unknown
    if unknown["unknown_words"]:
        number, accuracy = unknown.values()
        run.say(f"Words that the model has not seen: {number:,}, of which {accuracy:.2f} % have the right tag.")
    write_trees(trees, run.folder / "parses.mrg")
    run.say(f"The parses are in {run.folder / 'parses.mrg'}.")
    return evaluate(gold, trees, parameters)


def _tag(path: str, options: EvaluateOptions, run: "Run") -> None:
    """Tags the words of gold sentences."""
    from lvpcfg.evaluation.tagging import score_tags
    from lvpcfg.tagger import Tagger
    from lvpcfg.trees.conllu import read_conllu

    tagger = Tagger.load(one_folder(options.model, "evaluate"), **tagger_options(options))
    gold = read_conllu(path, tagger.model.column)
    begin = time.perf_counter()
    found = tagger.tags_of([[word for word, _ in sentence] for sentence in gold], progress=True)
    run.result["sentences_per_second"] = len(gold) / (time.perf_counter() - begin)
    figures = score_tags(gold, found, frozenset(tagger.lexicon.words), tagger.tags).figures()
    run.result |= figures | {"fallbacks": tagger.counts.fallbacks}
    run.chosen_by = "token_accuracy"
    shown = {name: f"{value:.2f}" if type(value) is float else f"{value:,}" for name, value in run.result.items()}
    run.table("Tags", ["", "all"], [[name.replace("_", " "), value] for name, value in shown.items()])


def show_scores(scores: "Scores", run: "Run", title: str) -> None:
    short = f"up to {scores.cutoff} words"
    rows = [
        ["sentences", str(scores.all.sentences), str(scores.short.sentences)],
        ["dropped: words or punctuation tags differ", str(scores.all.errors), str(scores.short.errors)],
        ["skipped: no parse", str(scores.all.skipped), str(scores.short.skipped)],
    ]
    for name in ("recall", "precision", "f1", "complete_match", "tagging_accuracy", "average_crossing"):
        values = [f"{getattr(summary, name):.2f}" for summary in (scores.all, scores.short)]
        rows.append([name.replace("_", " ").replace("f1", "F1"), *values])
    rows.append(["F1, no sentence dropped", f"{scores.f1_all:.2f}", ""])
    rows.append(["unlabelled sentence-F1", f"{scores.unlabelled_sentence_f1:.2f}", ""])
    run.table(title, ["", "all", short], rows)
