"""Requests that come together are parsed together: a queue, and one thread that owns the parser.

All else happens in the thread of the event loop, so that nothing is locked. A batch takes one sentence of each waiting
request in turn, so that a request of a thousand sentences delays others by no more than a request of one does.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from lvpcfg.errors import InputError, is_out_of_memory
from lvpcfg.serve.asked import Asked, Details, RefusedError

log = logging.getLogger(__name__)
SPANS = 1 << 15  # of the sentences of a batch: long ones are parsed a few at a time
BUSY, BROKEN = 503, 500
Parse = Callable[[list[list[str]], Details], list[Any]]
Answer = Any  # what is found for a sentence, or the exception that came instead


@dataclass(eq=False)
class Ticket:
    """A request that waits, wholly or in part."""

    asked: Asked
    answer: "asyncio.Future[list[Any]]"
    begun: int = 0  # sentences that are parsed, or being parsed
    found: dict[int, Any] = field(default_factory=dict)  # by the place of the sentence

    def left(self) -> int:
        return len(self.asked.sentences) - self.begun


@dataclass(frozen=True)
class Size:
    """Of a batch, at the most."""

    sentences: int
    words: int
    spans: int = SPANS


class Waiting:
    """Requests in the order of their turns."""

    def __init__(self, most: Size) -> None:
        self.most, self.tickets = most, deque[Ticket]()
        self.sentences = 0

    def add(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.sentences += ticket.left()

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            self.sentences -= ticket.left()

    def take(self) -> list[tuple[Ticket, int]]:
        """The sentences of the next batch: each with its request and its place there.

        The first request, and all that ask for the same, have a sentence in it each, then another, until it is full.
        """
        turns = deque(ticket for ticket in self.tickets if ticket.asked.details == self.tickets[0].asked.details)
        batch, served = list[tuple[Ticket, int]](), set[Ticket]()
        words = spans = 0
        while turns:
            ticket = turns.popleft()
            length = len(ticket.asked.sentences[ticket.begun])
            words, spans = words + length, spans + length**2
            if batch and (len(batch) == self.most.sentences or words > self.most.words or spans > self.most.spans):
                break
            batch.append((ticket, ticket.begun))
            served.add(ticket)
            ticket.begun += 1
            if ticket.left():
                turns.append(ticket)
        behind = [ticket for ticket in self.tickets if ticket in served and ticket.left()]
        self.tickets = deque(ticket for ticket in self.tickets if ticket not in served)
        self.tickets.extend(behind)
        self.sentences -= len(batch)
        return batch


@dataclass
class Figures:
    """What has been done."""

    requests: int = 0  # that were taken in
    answered: int = 0
    left: int = 0  # whose clients did not wait
    refused: int = 0  # since too many waited
    sentences: int = 0  # parsed
    words: int = 0
    batches: int = 0
    seconds: float = 0.0  # of parsing


class Batcher:
    """Answers requests by a function that parses the sentences of many."""

    def __init__(self, parse: Parse, most: Size, wait: float, max_waiting: int, threads: int = 1) -> None:
        """`wait`: seconds that a request waits for others, if there is nothing else to do."""
        self.parse, self.wait, self.max_waiting = parse, wait, max_waiting
        self.waiting, self.figures = Waiting(most), Figures()
        self.open = set[Ticket]()  # waiting or being parsed
        self._filled = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "parser", torch.set_num_threads, (threads,))

    async def ask(self, asked: Asked) -> list[Any]:
        """What is found for each sentence. Who cancels this does not wait any more."""
        number = len(asked.sentences)
        if self.waiting.sentences + number > self.max_waiting:
            self.figures.refused += 1
            raise RefusedError(
                BUSY,
                f"{self.waiting.sentences} sentences are waiting already: try again later.",
                {"Retry-After": str(self.seconds_to_wait())},
            )
        ticket = Ticket(asked, asyncio.get_running_loop().create_future())
        self.figures.requests += 1
        self.waiting.add(ticket)
        self.open.add(ticket)
        self._filled.set()
        try:
            found = await ticket.answer
            self.figures.answered += 1
            return found
        except asyncio.CancelledError:
            self.figures.left += 1
            raise
        finally:
            self.open.remove(ticket)
            self.waiting.drop(ticket)

    def seconds_to_wait(self) -> int:
        """Until those that wait are done, as fast as it went so far."""
        each = self.figures.seconds / max(1, self.figures.sentences)
        return max(1, math.ceil(self.waiting.sentences * each))

    async def run(self) -> None:
        """Parses what is asked for, until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.waiting.tickets:
                self._filled.clear()
                await self._filled.wait()
                await self._gather()
            if self.waiting.tickets:  # they may have left
                batch, begin = self.waiting.take(), perf_counter()
                answers = await loop.run_in_executor(self._thread, self._answers, batch)
                self.figures.seconds += perf_counter() - begin
                self.figures.batches += 1
                self._deliver(batch, answers)

    async def _gather(self) -> None:
        """Waits for requests that come at the same time. While a batch is parsed they gather without it."""
        end = perf_counter() + self.wait
        while self.waiting.sentences < self.waiting.most.sentences and (rest := end - perf_counter()) > 0:
            self._filled.clear()
            try:
                await asyncio.wait_for(self._filled.wait(), rest)
            except asyncio.TimeoutError:
                return

    def _answers(self, batch: list[tuple[Ticket, int]]) -> list[Answer]:
        """In the thread of the parser. What is wrong with one request is no harm to others."""
        sentences, details = [ticket.asked.sentences[place] for ticket, place in batch], batch[0][0].asked.details
        try:
            return self.parse(sentences, details)
        except Exception as error:
            if len(batch) > 1:
                return [answer for one in batch for answer in self._answers([one])]
            return [_explained(error, sentences[0])]

    def _deliver(self, batch: list[tuple[Ticket, int]], answers: Iterable[Answer]) -> None:
        for (ticket, place), answer in zip(batch, answers, strict=True):
            self.figures.sentences += 1
            self.figures.words += len(ticket.asked.sentences[place])
            if ticket.answer.done():
                continue
            if isinstance(answer, Exception):
                ticket.answer.set_exception(answer)
                self.waiting.drop(ticket)
                continue
            ticket.found[place] = answer
            if len(ticket.found) == len(ticket.asked.sentences):
                ticket.answer.set_result([found for _, found in sorted(ticket.found.items())])

    def give_up(self) -> None:
        """All that wait are told so."""
        for ticket in self.open:
            if not ticket.answer.done():
                ticket.answer.set_exception(RefusedError(BUSY, "the server is stopping: nothing more is parsed."))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _explained(error: Exception, words: list[str]) -> RefusedError:
    if isinstance(error, InputError):
        return RefusedError(422, str(error))
    if is_out_of_memory(error):
        return RefusedError(BROKEN, f"there is not enough memory for a sentence of {len(words)} words.")
    log.error("A sentence of %d words could not be parsed.", len(words), exc_info=error)
    return RefusedError(BROKEN, "the server made a mistake, which its log describes.")
