"""What jobs share that go through a corpus, record by record, in its order: job=parse and job=tag.

What they make of a record is said by their options, so that `batch.py` knows neither trees nor tags.
"""

import os
import stat
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from glob import glob, has_magic
from typing import TYPE_CHECKING, Any, ClassVar

from lvpcfg.errors import InputError, expect, show
from lvpcfg.jobs.options import MOST_PROCESSES, DeviceOptions, expect_positive, folders
from lvpcfg.options import INPUT_FORMATS

if TYPE_CHECKING:
    from lvpcfg.batch.formats import AnyWriter
    from lvpcfg.batch.records import Reader
    from lvpcfg.jobs.batch import Engine
    from lvpcfg.jobs.run import Run

OWN = ("config.yaml", "result.json", "tensorboard")  # what a job writes into its run folder


@dataclass(frozen=True)
class Wording:
    """How a job speaks of its work."""

    job: str
    made: str  # what a record gets
    done: str  # what becomes of sentences
    doing: str
    fallback: str  # what a sentence is that the model has nothing for
    happened: Sequence[tuple[str, str]]  # counts, and sentences for those that are not zero


@dataclass(kw_only=True)
class CorpusOptions(DeviceOptions):
    model: Any
    input: Any  # a file, a pattern, or a list of them
    output: str | None
    input_format: str | None
    output_format: str | None
    tokenize: bool
    processes: int
    dtype: str
    batch_tokens: int

    WORDING: ClassVar[Wording]
    FORMATS: ClassVar[Sequence[str]]  # of the output

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)
        expect_positive(self, "processes", most=MOST_PROCESSES)
        if self.input_format is not None:
            expect("input_format", self.input_format, INPUT_FORMATS)
        if self.output_format is not None:
            expect("output_format", self.output_format, self.FORMATS)
        if self.input is not None and not _names(self.input):
            raise InputError(f"input is {show(self.input)}: expected a file, a pattern such as part*.txt, or a list.")

    @abstractmethod
    def reader(self, kind: str) -> "Reader":
        """How records of a format are read."""

    @abstractmethod
    def writer(self, path: str) -> "AnyWriter":
        """What is written for a record into such a file."""

    @abstractmethod
    def engine(self, writer: "AnyWriter") -> "AbstractContextManager[Engine]":
        """What works on pieces of the corpus."""

    def made_with(self) -> dict[str, Any]:
        """What the output depends on, and other options do not say."""
        return {}


def go_through(options: CorpusOptions, run: "Run") -> None:
    from lvpcfg.jobs import batch

    if options.output is None:
        run.use_stderr()  # what is made goes alone to the standard output
    paths = None if options.input is None else _files(options.input)
    _keep_apart(options, paths, run)
    run.begin()
    if paths is not None and options.output is not None and _is_file(options.output):
        batch.to_file(options, paths, options.output, run)
    else:
        batch.to_stream(options, paths, run)


def _names(given: Any) -> list[str]:
    """None at all, if something else is given."""
    names: list[Any] = given if isinstance(given, list) else [given]
    return names if all(isinstance(name, str) and name for name in names) else []


def _files(given: Any) -> tuple[str, ...]:
    """Those that names and patterns stand for; a pattern's in alphabetical order."""
    found = list[str]()
    for name in _names(given):
        matching = sorted(glob(name, recursive=True)) if has_magic(name) and not os.path.exists(name) else [name]
        if not matching:
            raise InputError(f"input is {show(name, 200)}: there is no such file.")
        found += [path for path in matching if len(matching) == 1 or not os.path.isdir(path)]
    return tuple(found)


def _is_file(path: str) -> bool:
    """Or will be one; a pipe or a device takes no parts."""
    return not os.path.exists(path) or os.path.isfile(path)


def _keep_apart(options: CorpusOptions, paths: tuple[str, ...] | None, run: "Run") -> None:
    """The output replaces nothing that the job reads or writes otherwise."""
    from lvpcfg.grammar.location import parts

    target = options.output
    if target is None:
        return
    if os.path.isdir(target):
        raise InputError(f"output is {show(target, 200)}, a folder: expected a file.")
    sources = [os.stat(path) for path in paths or () if os.path.exists(path)]
    if paths is None and sys.stdin is not None:
        with suppress(OSError):  # it is no file
            sources.append(os.fstat(sys.stdin.fileno()))
    if os.path.exists(target):
        here = os.stat(target)
        if stat.S_ISREG(here.st_mode) and any(os.path.samestat(here, source) for source in sources):
            raise InputError(f"input and output are the same file, {show(target, 200)}: its sentences would be lost.")
    real = os.path.realpath(target)
    for part in (part for folder in folders(options.model) for part in parts(folder)):
        if os.path.dirname(real) == os.path.realpath(part):
            raise InputError(f"output is {show(target, 200)}, in the folder of the model: choose another place.")
    if os.path.dirname(real) == os.path.realpath(run.folder) and os.path.basename(real) in OWN:
        raise InputError(f"output is {show(target, 200)}, a file of the job's own: choose another name.")
