"""job=parse: a corpus -> trees, one record for each of its records, in the same order."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg import processes
from lvpcfg.errors import InputError, expect, show
from lvpcfg.jobs.corpora import CorpusOptions, Wording, go_through
from lvpcfg.jobs.options import ParserOptions, expect_positive
from lvpcfg.options import BACKENDS, EXACT, JSONL, OUTPUT_FORMATS, RAY
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.batch.formats import AnyWriter, Writer
    from lvpcfg.batch.records import Reader
    from lvpcfg.jobs.batch import Engine
    from lvpcfg.jobs.run import Run

PARSED = Wording(
    job="parse",
    made="trees",
    done="parsed",
    doing="parsing",
    fallback="flat",
    happened=(
        ("unreadable", "Records that hold no sentence, given no tree"),
        ("repaired", "Records with bytes or words that no tree can hold, replaced"),
        ("fallbacks", "Sentences without a path through the grammar, given a flat tree"),
        ("too_long", "Among them those of more than max_length words"),
        ("bounded", "Among them those whose charts would have been too large"),
        ("unknown_tags", "Tags that the model does not know, not minded"),
        ("float64", "Sentences recomputed in float64"),
        ("log_sum_exp", "Sentences recomputed by log-sum-exp"),
        ("looser", "Sentences parsed again, since pruning left no tree of theirs"),
        ("exhaustive", "Sentences parsed without pruning, since lower thresholds left none either"),
        ("by_recall", "Sentences decoded by labelled recall, since rule scores below zero left no tree"),
        ("certified", "Sentences whose tree is for sure that of the exact model"),
        ("uncertified", "Sentences parsed by the exact model, since another tree might be its best"),
        ("split", "Batches parsed in halves, since they did not fit into the memory"),
    ),
)


@dataclass(kw_only=True)
class ParseOptions(CorpusOptions, ParserOptions):
    tags: bool
    k_best: int
    spans: bool
    calibration: str | None
    certify: Any  # false, true or EXACT
    exact: str | None
    backend: str

    WORDING, FORMATS = PARSED, OUTPUT_FORMATS

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_positive(self, "k_best")
        expect("backend", self.backend, BACKENDS)
        if self.tokenize and self.tags:
            raise InputError("tokenize and tags are both true: words that are not split yet have no tags.")
        if self.certify not in (False, True, EXACT):
            raise InputError(f"certify is {show(self.certify)}: expected false, true or exact.")
        if (self.certify == EXACT) != (self.exact is not None):
            raise InputError("certify=exact and exact=FOLDER, the model before it was compressed, go together.")
        if self.certify and (self.k_best > 1 or (self.certify == EXACT and self.needs_jsonl)):
            raise InputError(
                "certify is for the best tree, and certify=exact for trees alone: leave out other options."
            )
        self._expect_format(self.output_format)
        to_file = self.input is not None and self.output is not None
        if not to_file and (self.backend == RAY or processes.number() > 1):
            how = "torchrun" if processes.number() > 1 else "backend=ray"
            raise InputError(f"job=parse by {how} needs input=FILE and output=FILE: streams have one reader.")
        if processes.number() > 1 and self.processes > 1:
            raise InputError("torchrun starts the processes: leave out processes, or torchrun.")

    @property
    def needs_jsonl(self) -> bool:
        return self.k_best > 1 or self.spans or self.calibration is not None or self.certify is True

    def _expect_format(self, kind: str | None) -> None:
        if self.needs_jsonl and kind not in (None, JSONL):
            raise InputError(
                "k_best, spans, calibration and certify=true need output_format=jsonl, or an output whose name ends in "
                f".jsonl: found {kind}."
            )
        if self.certify == EXACT and kind == JSONL:
            raise InputError("certify=exact gives trees alone: expected output_format=brackets or conll.")

    def parser(self) -> dict[str, Any]:
        return super().parser() | {"calibration": self.calibration, "exact": self.exact}

    def reader(self, kind: str) -> "Reader":
        from lvpcfg.batch.records import Reader

        return Reader(kind, self.tokenize, self.tags)

    def writer(self, path: str) -> "Writer":
        from lvpcfg.batch import formats

        kind = self.output_format or formats.kind_of(path)
        self._expect_format(kind)
        return formats.Writer(kind, self.k_best, self.spans, certify=self.certify is True)

    def engine(self, writer: "AnyWriter") -> "AbstractContextManager[Engine]":
        from lvpcfg.jobs.batch import local
        from lvpcfg.jobs.parsing import parsing

        if self.backend == RAY:
            from lvpcfg.jobs.cluster import cluster

            return cluster(self, writer)
        return local(parsing(self.model, self, self.processes, "parse"), writer)

    def made_with(self) -> dict[str, Any]:
        from lvpcfg.calibration import Calibration

        return {"calibration": None if self.calibration is None else asdict(Calibration.load(self.calibration))}


@JOBS.register("parse", ParseOptions)
def run(options: ParseOptions, run: "Run") -> None:
    go_through(options, run)
