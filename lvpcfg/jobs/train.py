"""job=train: a treebank, or tagged sentences -> a model folder.

In the run folder, `model/` is the best model so far and `checkpoint.safetensors` what `resume=true` goes on from.
With several restarts each has its own, `model_0/`, `checkpoint_0.safetensors`, ..., and `model/` is the best of all.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, expect, show
from lvpcfg.jobs.options import TreebankOptions, expect_positive, several
from lvpcfg.options import TAG_COLUMNS, TAG_DECODERS
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run

EMBEDDED = "the embedded corpus"


@dataclass(kw_only=True)
class DataOptions:
    train: Any  # a file, or a list of files
    dev: Any
    tags: str
    on_error: str

    def __post_init__(self) -> None:
        expect("data.on_error", self.on_error, ("raise", "skip"))
        expect("data.tags", self.tags, TAG_COLUMNS)
        first, *others = self.files or [""]
        if self.dev_files and not self.train_files:
            first, others = EMBEDDED, self.dev_files
        for path in others:
            if is_conllu(path) != is_conllu(first):
                kinds = ["tagged sentences" if is_conllu(each) else "trees" for each in (path, first)]
                raise InputError(
                    f"{show(path, 200)} holds {kinds[0]}, and {first if first == EMBEDDED else show(first, 200)} holds "
                    f"{kinds[1]}: expected the same of all files of data.train and data.dev."
                )

    @cached_property
    def train_files(self) -> list[str]:
        """None: the embedded corpus."""
        return several("data.train", self.train, "a file", "a list of files")

    @cached_property
    def dev_files(self) -> list[str]:
        return several("data.dev", self.dev, "a file", "a list of files")

    @property
    def files(self) -> list[str]:
        return [*self.train_files, *self.dev_files]

    @property
    def of_tags(self) -> bool:
        """Whether they are tagged sentences."""
        return any(map(is_conllu, self.train_files))


@dataclass(kw_only=True)
class TrainOptions(TreebankOptions):
    data: DataOptions
    estimator: Any  # the options of one of ESTIMATORS
    restarts: int
    evaluate_every: int
    checkpoint_every: int
    patience: int
    resume: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_positive(self, "restarts", "evaluate_every", "checkpoint_every")
        for path in self.data.files:
            if is_text(path) and self.estimator.needs_trees:
                raise InputError(
                    f"{show(path, 200)} is text, and this estimator learns from trees: expected a treebank, or "
                    "estimator.objective=sentence, which only the estimators em and gradient have."
                )
        if self.data.of_tags:
            self.estimator.check_tags()
            if self.decoder is not None:
                expect("decoder", self.decoder, TAG_DECODERS)
        if self.restarts > 1 and not self.estimator.heeds_seed:
            raise InputError(f"restarts is {self.restarts}, but this training is the same for every seed: expected 1.")
        if self.patience < 0:
            raise InputError(f"patience is {self.patience}: expected a number of looks at dev, or 0 for no end.")


def is_conllu(path: str) -> bool:
    """Whether a file holds tagged sentences."""
    return path.lower().removesuffix(".gz").endswith(".conllu")


def is_text(path: str) -> bool:
    """Whether a file holds a tokenised sentence a line, not trees."""
    return path.endswith((".txt", ".txt.gz"))


@JOBS.register("train", TrainOptions)
def run(options: TrainOptions, run: "Run") -> None:
    from lvpcfg.jobs import training

    training.run(options, run)
