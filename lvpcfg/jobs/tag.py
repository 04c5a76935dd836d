"""job=tag: a corpus -> the tags of its words, one record for each of its records, in the same order."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import expect
from lvpcfg.jobs.corpora import CorpusOptions, Wording, go_through
from lvpcfg.jobs.options import expect_positive, one_folder, tagger_options
from lvpcfg.options import DTYPE_NAMES, TAG_DECODERS, TAG_FORMATS, TEXT
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.batch.formats import AnyWriter, TagWriter
    from lvpcfg.batch.records import Reader
    from lvpcfg.jobs.batch import Engine
    from lvpcfg.jobs.run import Run
    from lvpcfg.sequence.tagging import TaggingModel

TAGGED = Wording(
    job="tag",
    made="tags",
    done="tagged",
    doing="tagging",
    fallback="without a sequence",
    happened=(
        ("unreadable", "Records that hold no sentence, left as they were"),
        ("repaired", "Records with bytes that are no text, or words that are none, replaced"),
        ("fallbacks", "Sentences of which the model makes no sequence of tags, tagged word by word"),
    ),
)


@dataclass(kw_only=True)
class TagOptions(CorpusOptions):
    decoder: str | None

    WORDING, FORMATS = TAGGED, TAG_FORMATS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder is not None:
            expect("decoder", self.decoder, TAG_DECODERS)
        expect("dtype", self.dtype, DTYPE_NAMES)
        expect_positive(self, "batch_tokens")

    def reader(self, kind: str) -> "Reader":
        from lvpcfg.batch.records import Reader

        return Reader(kind, self.tokenize, plain=True)

    def writer(self, path: str) -> "TagWriter":
        from lvpcfg.batch import formats, records

        inputs = [self.input] if isinstance(self.input, str) else self.input or [""]
        kind = self.output_format or formats.kind_of(path, records.ENDINGS, "")
        kind = kind or (TEXT if path else self.input_format or records.kind_of(inputs[0]))
        return formats.TagWriter(kind, self.loaded.column)

    @cached_property
    def loaded(self) -> "TaggingModel":
        """The model, for the writer and the tagger of this process."""
        from lvpcfg.sequence.tagging import TaggingModel

        return TaggingModel.load(one_folder(self.model, "tag"))

    def engine(self, writer: "AnyWriter") -> "AbstractContextManager[Engine]":
        from lvpcfg.jobs.batch import local
        from lvpcfg.jobs.workers import workers
        from lvpcfg.tagger import Tagger

        made: AbstractContextManager[Any]
        if self.processes == 1:
            made = nullcontext(Tagger(self.loaded, **tagger_options(self)))
        else:
            made = workers(self.model, tagger_options(self), self.processes, self.threads, Tagger.load)
        return local(made, writer)


@JOBS.register("tag", TagOptions)
def run(options: TagOptions, run: "Run") -> None:
    go_through(options, run)
