"""What jobs that parse share: parsers in one process or in several, lines of words, what happened."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lvpcfg.device import usable_device
from lvpcfg.errors import InputError
from lvpcfg.jobs.options import ParserOptions
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.workers import Workers, workers
from lvpcfg.parser import Parser
from lvpcfg.processes import own_device

AnyParser = Parser | Workers


def make_parser(model: Any, options: ParserOptions, job: str) -> Parser:
    _expect_model(model, job)
    device = own_device(usable_device(options.device))
    return Parser.load(model, **options.parser() | {"device": device})


def parsing(model: Any, options: ParserOptions, processes: int, job: str) -> AbstractContextManager[AnyParser]:
    """A parser, or as many as there are to be processes."""
    if processes == 1:
        return nullcontext(make_parser(model, options, job))
    _expect_model(model, job)
    return workers(model, options.parser(), processes, options.threads)


def _expect_model(model: Any, job: str) -> None:
    if model is None:
        raise InputError(f"job={job} needs a model folder: model=FOLDER, as job=train makes one.")


def report(parser: AnyParser, speed: float, run: Run) -> None:
    """What happened while parsing, as figures and, where it matters, as a sentence."""
    counts = dict(vars(parser.counts))
    run.result |= {name: number for name, number in counts.items() if name != "sentences"}
    say_what_happened(counts, speed, parser.device.type, run)


def say_what_happened(counts: Mapping[str, int], speed: float, device: str, run: Run) -> None:
    run.result["sentences_per_second"] = speed
    run.say(f"Sentences parsed: {counts['sentences']:,}, {speed:.1f} a second, on {device}.")
    for name, what in (
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
        ("split", "Batches parsed in halves, since they did not fit into the memory"),
    ):
        if counts.get(name):
            run.say(f"{what}: {counts[name]:,}.")
