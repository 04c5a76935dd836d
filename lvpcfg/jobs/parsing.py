"""What jobs that parse share: parsers in one process or in several, lines of words, what happened."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lvpcfg.device import usable_device
from lvpcfg.errors import InputError
from lvpcfg.jobs.corpora import Wording
from lvpcfg.jobs.options import ParserOptions
from lvpcfg.jobs.parse import PARSED
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.workers import Workers, workers
from lvpcfg.parser import Parser
from lvpcfg.processes import own_device

AnyParser = Parser | Workers


def make_parser(model: Any, options: ParserOptions, job: str) -> Parser:
    expect_model(model, job)
    device = own_device(usable_device(options.device))
    return Parser.load(model, **options.parser() | {"device": device})


def parsing(model: Any, options: ParserOptions, processes: int, job: str) -> AbstractContextManager[AnyParser]:
    """A parser, or as many as there are to be processes."""
    if processes == 1:
        return nullcontext(make_parser(model, options, job))
    expect_model(model, job)
    return workers(model, options.parser(), processes, options.threads)


def expect_model(model: Any, job: str) -> None:
    if model is None:
        raise InputError(f"job={job} needs a model folder: model=FOLDER, as job=train makes one.")


def report(parser: AnyParser, speed: float, run: Run) -> None:
    """What happened while parsing, as figures and, where it matters, as a sentence."""
    counts = dict(vars(parser.counts))
    run.result |= {name: number for name, number in counts.items() if name != "sentences"}
    say_what_happened(counts, speed, parser.device.type, run)


def say_what_happened(
    counts: Mapping[str, int], speed: float, device: str, run: Run, wording: Wording = PARSED
) -> None:
    run.result["sentences_per_second"] = speed
    run.say(f"Sentences {wording.done}: {counts['sentences']:,}, {speed:.1f} a second, on {device}.")
    for name, what in wording.happened:
        if counts.get(name):
            run.say(f"{what}: {counts[name]:,}.")
