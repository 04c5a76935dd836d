"""job=check: a model folder and sentences -> whether charts are right, by changes of basis and two checks more."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError
from lvpcfg.jobs.options import expect_positive, folders, one_folder
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run

SENTENCES = 5  # drawn from the model where none are given
LONGEST = 6  # words of those


@dataclass(kw_only=True)
class CheckOptions:
    model: Any  # a folder
    sentences: str | None
    trials: int
    seed: int

    def __post_init__(self) -> None:
        folders(self.model)
        expect_positive(self, "trials")


@JOBS.register("check", CheckOptions)
def run(options: CheckOptions, run: "Run") -> None:
    from lvpcfg.batch.records import words_of
    from lvpcfg.evaluation.invariance import check_invariance
    from lvpcfg.files import read_text
    from lvpcfg.generation import generate
    from lvpcfg.grammar.model import Model

    model = Model.load(one_folder(options.model, "check"))
    run.begin()
    if options.sentences is not None:
        lines = read_text(options.sentences).split("\n")
        sentences = [words for line in lines if (words := words_of(line))]
    else:
        sentences = [tree.leaves() for tree in generate(model, SENTENCES, options.seed, LONGEST)]
    if not sentences:
        raise InputError("there are no sentences to check: expected a file with one a line.")
    found = check_invariance(model, sentences, options.trials, options.seed, progress=True)
    run.result |= {"passed": int(found.passed), "compared": found.compared, "largest_difference": found.largest}
    run.say(found.line())
    for difference in found.differences[1:]:
        run.say(f"Also, {difference}.")
