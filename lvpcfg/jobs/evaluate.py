"""job=evaluate: gold trees and test trees -> EVALB's scores."""

from lvpcfg.errors import InputError
from lvpcfg.evaluate.evalb import COLLINS, Scores, score
from lvpcfg.evaluate.evalb_files import read_pair, read_parameters, report
from lvpcfg.files import write_text
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.run import Run


def run(config: Config, run: Run) -> None:
    if config.gold is None or config.test is None:
        raise InputError("job=evaluate needs two files of trees: gold=FILE test=FILE.")
    parameters = COLLINS if config.parameters is None else read_parameters(config.parameters)
    scores = score(*read_pair(config.gold, config.test), parameters)
    run.result.update(scores.figures())
    write_text(run.folder / "evalb.txt", report(scores))
    show_scores(scores, run, "Scores")
    run.say(f"EVALB's report, a line a sentence, is in {run.folder / 'evalb.txt'}.")


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
