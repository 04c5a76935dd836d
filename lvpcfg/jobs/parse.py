"""job=parse: a corpus -> trees, one record for each of its records, in the same order."""

import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from glob import glob, has_magic
from typing import TYPE_CHECKING, Any

from lvpcfg import processes
from lvpcfg.errors import InputError, expect, show
from lvpcfg.jobs.options import MOST_PROCESSES, ParserOptions, expect_positive, folders
from lvpcfg.options import BACKENDS, INPUT_FORMATS, JSONL, OUTPUT_FORMATS
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run

OWN = ("config.yaml", "result.json", "tensorboard")  # what a job writes into its run folder


@dataclass(kw_only=True)
class ParseOptions(ParserOptions):
    model: Any  # a folder, or a list of folders
    input: Any  # a file, a pattern, or a list of them
    output: str | None
    input_format: str | None
    output_format: str | None
    tokenize: bool
    tags: bool
    k_best: int
    spans: bool
    calibration: str | None
    processes: int
    backend: str

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)
        expect_positive(self, "processes", most=MOST_PROCESSES)
        expect_positive(self, "k_best")
        expect("backend", self.backend, BACKENDS)
        if self.input_format is not None:
            expect("input_format", self.input_format, INPUT_FORMATS)
        if self.output_format is not None:
            expect("output_format", self.output_format, OUTPUT_FORMATS)
        if self.input is not None and not _names(self.input):
            raise InputError(f"input is {show(self.input)}: expected a file, a pattern such as part*.txt, or a list.")
        if self.tokenize and self.tags:
            raise InputError("tokenize and tags are both true: words that are not split yet have no tags.")
        if self.needs_jsonl and self.output_format not in (None, JSONL):
            raise InputError(f"k_best, spans and calibration need output_format=jsonl: found {self.output_format}.")
        to_file = self.input is not None and self.output is not None
        if not to_file and (self.backend == "ray" or processes.number() > 1):
            how = "torchrun" if processes.number() > 1 else "backend=ray"
            raise InputError(f"job=parse by {how} needs input=FILE and output=FILE: streams have one reader.")
        if processes.number() > 1 and self.processes > 1:
            raise InputError("torchrun starts the processes: leave out processes, or torchrun.")

    @property
    def needs_jsonl(self) -> bool:
        return self.k_best > 1 or self.spans or self.calibration is not None

    def parser(self) -> dict[str, Any]:
        return super().parser() | {"calibration": self.calibration}


@JOBS.register("parse", ParseOptions)
def run(options: ParseOptions, run: "Run") -> None:
    from lvpcfg.jobs import batch

    if options.output is None:
        run.use_stderr()  # trees alone go to the standard output
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


def _keep_apart(options: ParseOptions, paths: tuple[str, ...] | None, run: "Run") -> None:
    """The output replaces nothing that the job reads or writes otherwise."""
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
    for folder in folders(options.model):
        if os.path.dirname(real) == os.path.realpath(folder):
            raise InputError(f"output is {show(target, 200)}, in the folder of the model: choose another place.")
    if os.path.dirname(real) == os.path.realpath(run.folder) and os.path.basename(real) in OWN:
        raise InputError(f"output is {show(target, 200)}, a file of the job's own: choose another name.")
