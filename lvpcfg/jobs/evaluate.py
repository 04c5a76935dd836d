"""job=evaluate: gold trees, and test trees or a model that parses the gold words -> EVALB's scores."""

import time

from lvpcfg.errors import InputError
from lvpcfg.evaluate.evalb import COLLINS, Parameters, Scores, evaluate, score
from lvpcfg.evaluate.evalb_files import read_pair, read_parameters, report
from lvpcfg.files import write_text
from lvpcfg.jobs import parse
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.run import Run
from lvpcfg.trees.brackets import read_trees, write_trees
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words


def run(config: Config, run: Run) -> None:
    if config.gold is None or (config.test is None) == (config.model is None):
        raise InputError("job=evaluate needs gold=FILE, and either test=FILE (trees) or model=FOLDER (to parse with).")
    parameters = COLLINS if config.parameters is None else read_parameters(config.parameters)
    if config.test is not None:
        scores = score(*read_pair(config.gold, config.test), parameters)
    else:
        scores = _parse(config, parameters, run)
    run.result.update(scores.figures())
    write_text(run.folder / "evalb.txt", report(scores))
    show_scores(scores, run, "Scores")
    run.say(f"EVALB's report, a line a sentence, is in {run.folder / 'evalb.txt'}.")


def _parse(config: Config, parameters: Parameters, run: Run) -> Scores:
    """Parses the words of the gold trees, raw or clean, without their tags."""
    gold = normalise_all(read_trees(config.gold or ""))
    with parse.parsing(config) as parser:
        begin = time.perf_counter()
        trees = parser.parse_sents([words(tree) for tree in gold], progress=True)
        parse.report(parser, len(gold) / (time.perf_counter() - begin), run)
    write_trees(trees, run.folder / "parses.mrg")
    run.say(f"The parses are in {run.folder / 'parses.mrg'}.")
    return evaluate(gold, trees, parameters)


def show_scores(scores: Scores, run: Run, title: str) -> None:
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
    run.table(title, ["", "all", short], rows)
