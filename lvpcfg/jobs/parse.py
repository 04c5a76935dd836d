"""job=parse: sentences, one a line -> trees, one a line, in the same order."""

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import BinaryIO, TextIO

from tqdm import tqdm

from lvpcfg.errors import InputError, show
from lvpcfg.files import read_text, writing
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.workers import Workers, workers
from lvpcfg.parser import Parser
from lvpcfg.trees.brackets import ESCAPED, format_tree

SPACE = re.compile(r"[ \t\f\v]+")  # as between the words of trees; other white space may be part of a word
AnyParser = Parser | Workers
FIRST, CHUNK = 256, 2048  # sentences that are sorted by length, parsed and written together, at first and later on


def run(config: Config, run: Run) -> None:
    lines = _lines(config.input)
    _keep_apart(config.input, config.output)
    with parsing(config) as parser:
        _parse(parser, lines, config, run)


def _parse(parser: AnyParser, lines: Iterable[str], config: Config, run: Run) -> None:
    begin, size = time.perf_counter(), 1 if config.input is None and sys.stdin.isatty() else FIRST
    total = len(lines) if isinstance(lines, list) else None
    with (
        _output(config.output) as output,
        tqdm(total=total, unit=" sentences", disable=None, desc="parsing", file=sys.stderr) as bar,
    ):
        for chunk in chunks(lines, size):
            text = "".join(tree + "\n" for tree in _trees(parser, chunk, bar.update))
            with nullcontext() if config.output is None else writing(config.output):
                output.write(text)
                output.flush()
    run.result["sentences"] = parser.counts.sentences
    report(parser, parser.counts.sentences / (time.perf_counter() - begin), run)
    if config.output is not None:
        run.say(f"The trees are in {config.output}.")


def chunks(lines: Iterable[str], size: int = FIRST) -> Iterator[list[str]]:
    """The first trees come soon, later ones in batches that pay; lines from a terminal come one by one."""
    rest = iter(lines)
    while chunk := list(islice(rest, size)):
        yield chunk
        size = min(CHUNK, 2 * size) if size > 1 else 1


def _keep_apart(source: str | None, target: str | None) -> None:
    if source is not None and target is not None and os.path.exists(target) and os.path.samefile(source, target):
        raise InputError(f"input and output are the same file, {show(target, 200)}: its sentences would be lost.")


def make_parser(config: Config) -> Parser:
    _expect_model(config)
    return Parser.load(config.model, **config.parsing())


def parsing(config: Config) -> AbstractContextManager[AnyParser]:
    """A parser, or as many as there are to be processes."""
    if config.processes == 1:
        return nullcontext(make_parser(config))
    _expect_model(config)
    return workers(config.model, config.parsing(), config.processes, config.threads)


def _expect_model(config: Config) -> None:
    if config.model is None:
        raise InputError(f"job={config.job} needs a model folder: model=FOLDER, as job=train makes one.")


def _trees(parser: AnyParser, lines: list[str], update: Callable[[int], object]) -> Iterator[str]:
    """A tree for each line, and an empty line for an empty one."""
    sentences = [words_of(line) for line in lines]
    trees = iter(parser.parse_sents([words for words in sentences if words], update=update))
    update(sum(not words for words in sentences))
    return (format_tree(next(trees)) if words else "" for words in sentences)


def words_of(line: str) -> list[str]:
    return [word for word in SPACE.split(line.translate(ESCAPED)) if word]


def read_lines(path: str) -> list[str]:
    text = read_text(path)
    return text.removesuffix("\n").split("\n") if text else []  # at no other line ends that Unicode has


def _lines(path: str | None) -> Iterable[str]:
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
    with writing(path):
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115
    with stream:
        yield stream


def report(parser: AnyParser, speed: float, run: Run) -> None:
    """What happened while parsing, as figures and, where it matters, as a sentence."""
    counts = parser.counts
    run.result["sentences_per_second"] = speed
    run.result |= {name: number for name, number in vars(counts).items() if name != "sentences"}
    run.say(f"Sentences parsed: {counts.sentences:,}, {speed:.1f} a second, on {parser.device.type}.")
    for number, what in (
        (counts.fallbacks, "without a path through the grammar, given a flat tree"),
        (counts.float64, "recomputed in float64"),
        (counts.log_sum_exp, "recomputed by log-sum-exp"),
        (counts.looser, "parsed again, since pruning left no tree of theirs"),
        (counts.exhaustive, "parsed without pruning, since lower thresholds left none either"),
        (counts.by_recall, "decoded by labelled recall, since rule scores below zero left no tree"),
    ):
        if number:
            run.say(f"Sentences {what}: {number:,}.")
    if counts.split:
        run.say(f"Batches parsed in halves, since they did not fit into the memory: {counts.split:,}.")
