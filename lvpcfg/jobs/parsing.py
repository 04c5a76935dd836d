"""What jobs that parse share: parsers in one process or in several, lines of words, what happened."""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from lvpcfg.errors import InputError
from lvpcfg.files import read_text
from lvpcfg.jobs.options import ParserOptions
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.workers import Workers, workers
from lvpcfg.parser import Parser
from lvpcfg.trees.brackets import ESCAPED

SPACE = re.compile(r"[ \t\f\v]+")  # as between the words of trees; other white space may be part of a word
AnyParser = Parser | Workers
FIRST, CHUNK = 256, 2048  # sentences that are sorted by length, parsed and written together, at first and later on


def make_parser(model: Any, options: ParserOptions, job: str) -> Parser:
    _expect_model(model, job)
    return Parser.load(model, **options.parser())


def parsing(model: Any, options: ParserOptions, processes: int, job: str) -> AbstractContextManager[AnyParser]:
    """A parser, or as many as there are to be processes."""
    if processes == 1:
        return nullcontext(make_parser(model, options, job))
    _expect_model(model, job)
    return workers(model, options.parser(), processes, options.threads)


def _expect_model(model: Any, job: str) -> None:
    if model is None:
        raise InputError(f"job={job} needs a model folder: model=FOLDER, as job=train makes one.")


def chunks(lines: Iterable[str], size: int = FIRST) -> Iterator[list[str]]:
    """The first trees come soon, later ones in batches that pay; lines from a terminal come one by one."""
    rest = iter(lines)
    while chunk := list(islice(rest, size)):
        yield chunk
        size = min(CHUNK, 2 * size) if size > 1 else 1


def words_of(line: str) -> list[str]:
    return [word for word in SPACE.split(line.translate(ESCAPED)) if word]


def read_lines(path: str) -> list[str]:
    text = read_text(path)
    return text.removesuffix("\n").split("\n") if text else []  # at no other line ends that Unicode has


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
