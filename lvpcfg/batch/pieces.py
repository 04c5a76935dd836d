"""A corpus in pieces: sentences of similar length, which are parsed together.

The records of a window of the input are sorted by length and cut into pieces of so many words. Nothing but the input
decides where a piece ends, so that the trees do not depend on how many processes or machines share the pieces, or on
when they were stopped and begun again.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import accumulate, islice, pairwise, repeat
from typing import Any

from lvpcfg.batch.formats import AnyWriter
from lvpcfg.batch.records import Corpus, Record
from lvpcfg.parses import Counts
from lvpcfg.trees.sentences import of_similar_length

WINDOW = 2048  # records that are sorted by length
WORDS = 4096  # of a piece: on the CPU, more at once are no faster
COUNTED = ("records", "words", "unreadable", "repaired", *(field.name for field in fields(Counts)))


@dataclass(frozen=True)
class Piece:
    number: int
    window: int
    of_window: int  # pieces
    records: list[tuple[int, Record]]  # each with its place in the window

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"records": [[place, vars(record)] for place, record in self.records]})

    @staticmethod
    def from_json(text: str) -> "Piece":
        values = json.loads(text)
        return Piece(**values | {"records": [(place, Record(**record)) for place, record in values["records"]]})


@dataclass(frozen=True)
class Parsed:
    """What became of a piece."""

    number: int
    window: int
    of_window: int
    places: list[int]
    trees: list[bytes]  # of each record, in the format of the output
    counts: Counter[str] = field(default_factory=Counter)
    batches: list[tuple[int, float]] = field(default_factory=list)  # sentences parsed together, and their seconds

    def to_bytes(self) -> bytes:
        """A digest of all that follows, a line of JSON, and the trees."""
        header = json.dumps(vars(self) | {"trees": [len(tree) for tree in self.trees]}).encode()
        content = b"\n".join((header, b"".join(self.trees)))
        return b"\n".join((_digest(content), content))

    @staticmethod
    def from_bytes(data: bytes) -> "Parsed | None":
        """None, if they are damaged."""
        digest, _, content = data.partition(b"\n")
        if digest != _digest(content):
            return None
        header, _, trees = content.partition(b"\n")
        values = json.loads(header)
        ends = [*accumulate(values["trees"], initial=0)]
        found = [trees[begin:end] for begin, end in pairwise(ends)]
        return Parsed(**values | {"trees": found, "counts": Counter(values["counts"])})


@dataclass(frozen=True)
class Summary:
    """What happened in all."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    batches: list[tuple[int, float]] = field(default_factory=list)

    def add(self, parsed: Parsed) -> None:
        self.counts.update(parsed.counts)
        self.batches.extend(parsed.batches)


@dataclass(frozen=True)
class Work:
    """The pieces of a corpus but for those that are done."""

    corpus: Corpus
    words: int
    done: Collection[int] = ()

    def __iter__(self) -> Iterator[Piece]:
        return (piece for piece in pieces(self.corpus.records(), self.words) if piece.number not in self.done)


def pieces(records: Iterable[Record], words: int = WORDS, windows: Iterable[int] = repeat(WINDOW)) -> Iterator[Piece]:
    """`windows` are the numbers of records in each."""
    rest = iter(records)
    number = 0
    for window, size in enumerate(windows):
        some = list(islice(rest, size))
        if not some:
            return
        # longest first, so that what is left for the end is quickly done
        cut = list(of_similar_length([len(record.words) for record in some], words))
        for places in cut:
            yield Piece(number, window, len(cut), [(place, some[place]) for place in places])
            number += 1


def parse(parser: Any, piece: Piece, writer: AnyWriter) -> Parsed:
    """By a parser or a tagger, as the writer needs it."""
    counts: Counter[str] = Counter()
    some = [record for _, record in piece.records if record.words]
    counts["records"] = len(piece.records)
    counts["words"] = sum(len(record.words) for record in some)
    counts["unreadable"] = sum(record.problem is not None for _, record in piece.records)
    counts["repaired"] = sum(record.repaired for _, record in piece.records)
    batches = list[tuple[int, float]]()
    begin = time.perf_counter()

    def done(number: int) -> None:
        nonlocal begin
        batches.append((number, time.perf_counter() - begin))
        begin = time.perf_counter()

    parser.counts = Counts()
    parses = iter(writer.parse(parser, some, done))
    counts.update(vars(parser.counts))
    trees = [writer.bytes(record, next(parses) if record.words else []) for _, record in piece.records]
    places = [place for place, _ in piece.records]
    return Parsed(piece.number, piece.window, piece.of_window, places, trees, counts, batches)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
