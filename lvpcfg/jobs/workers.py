"""Parsing in several processes: each has a parser of its own, and takes more sentences when it has done with some.

Threads gain little, since what takes time is a great many short operations, between which Python runs one thread alone.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import torch
from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg.errors import InputError
from lvpcfg.parser import Parser
from lvpcfg.parses import Counts
from lvpcfg.trees.sentences import of_similar_length

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # items that wait for each process, or are in it
TURNS = 3  # that each process takes of the sentences, at the least: so that the last ones end together
_parsers: list[Any] = []  # the one of this process, where it is a worker


class Workers:
    """As a `Parser`, for many sentences."""

    def __init__(self, pool: ProcessPoolExecutor, processes: int, parser: Any) -> None:
        self.pool, self.processes, self.device, self.tokens = pool, processes, parser.device, parser.batch_tokens
        self.counts, self.lexicon = Counts(), parser.lexicon

    def parse_sents(
        self, sents: Sequence[Sequence[str]], progress: bool = False, update: Callable[[int], object] | None = None
    ) -> list[Tree]:
        """The trees of many sentences, in their order."""
        found: dict[int, Tree] = {}
        some = ((piece, [sents[number] for number in piece]) for piece in self._pieces(sents))
        with tqdm(
            total=len(sents), unit=" sentences", desc="parsing", disable=None if progress else True, leave=False
        ) as bar:
            for piece, trees, counts in self.unordered(_parse, some):
                found.update(zip(piece, trees, strict=True))
                for field in fields(Counts):
                    setattr(self.counts, field.name, getattr(self.counts, field.name) + getattr(counts, field.name))
                for each in (bar.update, update):
                    if each is not None:
                        each(len(trees))
        return [found[number] for number in range(len(sents))]

    def unordered(self, function: Callable[[Parser, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """What a function makes of items, given a parser; what is done first comes first.

        Few items are taken ahead of those that are done.
        """
        rest = iter(items)
        running = set[Future[Result]]()
        with _told_if_ended(self.processes):
            while True:
                for item in islice(rest, AHEAD * self.processes - len(running)):
                    running.add(self.pool.submit(_call, function, item))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    yield one.result()

    def _pieces(self, sents: Sequence[Sequence[str]]) -> Iterator[list[int]]:
        most = min(self.tokens, sum(map(len, sents)) // (TURNS * self.processes))
        return of_similar_length([len(words) for words in sents], most)


@contextmanager
def workers(
    model: Any, options: dict[str, Any], processes: int, threads: int, load: Callable[..., Any] = Parser.load
) -> Iterator[Workers]:
    """`load` makes a parser or a tagger of a model folder."""
    parser = load(model, **options)  # what is wrong with them shows here
    with _quiet_tracker():
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (load, model, options, threads))
    with pool:
        several = Workers(pool, processes, parser)
        del parser
        try:
            with _ignored():  # by those that begin now: Ctrl-C is answered here
                begun = [pool.submit(_begun) for _ in range(processes)]
            with _told_if_ended(processes):
                for one in begun:
                    one.result()
            yield several
        except BaseException:
            for process in active_children():  # whatever they are doing is not wanted any more
                process.terminate()
            raise


@contextmanager
def _told_if_ended(processes: int) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise InputError(
            f"one of the {processes} processes was ended from outside, perhaps for lack of memory: "
            "fewer processes, or a smaller batch_tokens, need less."
        ) from None


@contextmanager
def _quiet_tracker() -> Iterator[None]:
    """Python's process that cleans up behind killed ones begins here, and would print a warning when it does."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def _ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(load: Callable[..., Any], model: Any, options: dict[str, Any], threads: int) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _parsers.append(load(model, **options))


def _end_with_parent() -> None:
    """However it ends."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _begun() -> None:
    """A process begins when there is something to do."""


def _call(function: Callable[[Parser, Item], Result], item: Item) -> Result:
    (parser,) = _parsers
    return function(parser, item)


def _parse(parser: Parser, some: tuple[list[int], list[Sequence[str]]]) -> tuple[list[int], list[Tree], Counts]:
    parser.counts = Counts()
    numbers, sentences = some
    return numbers, parser.parse_sents(sentences), parser.counts
