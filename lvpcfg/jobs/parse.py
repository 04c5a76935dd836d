"""job=parse: sentences, one a line -> trees, one a line, in the same order."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.options import ParserOptions, expect_positive, folders
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.parsing import AnyParser
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class ParseOptions(ParserOptions):
    model: Any  # a folder, or a list of folders
    input: str | None
    output: str | None
    processes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)
        expect_positive(self, "processes")


@JOBS.register("parse", ParseOptions)
def run(options: ParseOptions, run: "Run") -> None:
    from lvpcfg.jobs.parsing import parsing

    run.begin()
    if options.output is None:
        run.use_stderr()  # trees alone go to the standard output
    lines = _lines(options.input)
    _keep_apart(options.input, options.output)
    with parsing(options.model, options, options.processes, "parse") as parser:
        _parse(parser, lines, options, run)


def _parse(parser: "AnyParser", lines: Iterable[str], options: ParseOptions, run: "Run") -> None:
    from tqdm import tqdm

    from lvpcfg.files import writing
    from lvpcfg.jobs.parsing import FIRST, chunks, report

    begin, size = time.perf_counter(), 1 if options.input is None and sys.stdin.isatty() else FIRST
    total = len(lines) if isinstance(lines, list) else None
    with (
        _output(options.output) as output,
        tqdm(total=total, unit=" sentences", disable=None, desc="parsing", file=sys.stderr) as bar,
    ):
        for chunk in chunks(lines, size):
            text = "".join(tree + "\n" for tree in _trees(parser, chunk, bar.update))
            with nullcontext() if options.output is None else writing(options.output):
                output.write(text)
                output.flush()
    run.result["sentences"] = parser.counts.sentences
    report(parser, parser.counts.sentences / (time.perf_counter() - begin), run)
    if options.output is not None:
        run.say(f"The trees are in {options.output}.")


def _keep_apart(source: str | None, target: str | None) -> None:
    if source is not None and target is not None and os.path.exists(target) and os.path.samefile(source, target):
        raise InputError(f"input and output are the same file, {show(target, 200)}: its sentences would be lost.")


def _trees(parser: "AnyParser", lines: list[str], update: Callable[[int], object]) -> Iterator[str]:
    """A tree for each line, and an empty line for an empty one."""
    from lvpcfg.jobs.parsing import words_of
    from lvpcfg.trees.brackets import format_tree

    sentences = [words_of(line) for line in lines]
    trees = iter(parser.parse_sents([words for words in sentences if words], update=update))
    update(sum(not words for words in sentences))
    return (format_tree(next(trees)) if words else "" for words in sentences)


def _lines(path: str | None) -> Iterable[str]:
    from lvpcfg.jobs.parsing import read_lines

    if path is not None:
        return read_lines(path)
    if sys.stdin.isatty():
        print("lvpcfg: reading sentences from the terminal, one a line; Ctrl-D ends.", file=sys.stderr)
    return _decoded(sys.stdin.buffer)


def _decoded(stream: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputError(f"standard input, line {number}: expected UTF-8 text, found {line[:40]!r}.") from None


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    """Trees are written as they come, so that what is done stays done."""
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the terminal's is
        yield sys.stdout
        return
    from lvpcfg.files import writing

    with writing(path):
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115
    with stream:
        yield stream
