"""The work of job=parse and job=tag: a corpus in pieces goes through parsers or taggers, and out in its order.

Into a file, through parts that outlast the job (`batch/parts.py`); into a stream, as the windows of the input are done.
"""

import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from itertools import chain, repeat
from types import TracebackType
from typing import Any, Protocol, TextIO, TypeVar

import torch
from tqdm import tqdm

from lvpcfg import processes
from lvpcfg.batch import pieces, records
from lvpcfg.batch.formats import AnyWriter
from lvpcfg.batch.parts import Parts, in_order, packed
from lvpcfg.batch.pieces import Parsed, Piece, Summary, Work
from lvpcfg.batch.records import Corpus, Reader
from lvpcfg.errors import InputError, printable
from lvpcfg.files import read_bytes, writing
from lvpcfg.grammar.location import parts
from lvpcfg.grammar.reader import JSON
from lvpcfg.jobs.corpora import CorpusOptions, Wording
from lvpcfg.jobs.options import folders
from lvpcfg.jobs.parsing import say_what_happened
from lvpcfg.jobs.run import Run, leave_pipe, peak_memory
from lvpcfg.jobs.workers import Workers
from lvpcfg.processes import LostError

Item = TypeVar("Item")
FIRST = (256, 512, 1024)  # records in the first windows of a stream, so that trees come soon
WAITING = 4  # parts that wait for the disk
MOMENT = 10.0  # seconds between two points in TensorBoard
# Told in another way.
WHERE = ("model", "exact", "calibration", "input", "output", "processes", "backend", "input_format", "output_format")


def to_file(options: CorpusOptions, paths: tuple[str, ...], path: str, run: Run) -> None:
    """Through parts. Where torchrun has started several processes, they share the pieces."""
    corpus, writer = _corpus(options, paths), options.writer(path)
    with options.engine(writer) as engine:
        begin = time.perf_counter()
        (digest, number), stamps = corpus.survey(), corpus.stamps()
        manifest = _manifest(options, corpus, writer, engine, digest)
        processes.expect_same("input, models or options", manifest)
        parts = Parts(path, manifest)
        with parts.begun() if processes.is_first() else nullcontext(), _told_how_to_go_on(run, options.WORDING):
            done = dict(processes.from_first(sorted(parts.done().items()) if processes.is_first() else None))
            work = Work(corpus, _words(options, engine), frozenset(done))
            before = sum(done.values())
            with Progress(number, run, options.WORDING, before) as progress, Disk() as disk:
                for parsed in engine.results(work if processes.number() == 1 else _claimed(work)):
                    disk.put(parts.write, parsed)
                    progress.add(parsed)
            processes.from_first(None)  # all of them are done
            if corpus.stamps() != stamps:
                what = options.WORDING.done
                raise InputError(f"the input was changed while it was {what}: expected the same sentences to the end.")
            if processes.is_first():
                summary = parts.join(number, writer.begin, writer.end)
                _report(summary, before, time.perf_counter() - begin, engine.device, options.WORDING, run)
                run.say(f"The {options.WORDING.made} are in {path}.")


def to_stream(options: CorpusOptions, paths: tuple[str, ...] | None, run: Run) -> None:
    """In order, window by window."""
    writer = options.writer(options.output or "")
    live = paths is None and _standard_input().isatty()
    if live:
        print("lvpcfg: reading sentences from the terminal, one a line; Ctrl-D ends.", file=sys.stderr)
    with options.engine(writer) as engine:
        begin, summary = time.perf_counter(), Summary()
        if paths is None:
            number, source = None, _reader(options, "").records(records.unpacked(_standard_input().buffer))
        else:
            corpus = _corpus(options, paths)
            number, source = corpus.survey()[1], corpus.records()
        windows = repeat(1) if live else chain(FIRST, repeat(pieces.WINDOW))
        work = pieces.pieces(source, _words(options, engine), windows)
        with _output(options.output) as write, Progress(number, run, options.WORDING) as progress:
            write(writer.begin)
            for window in _windows(engine.results(work), progress):
                write(in_order(window))
                for parsed in window:
                    summary.add(parsed)
            write(writer.end)
        _report(summary, 0, time.perf_counter() - begin, engine.device, options.WORDING, run)
        if options.output is not None:
            run.say(f"The {options.WORDING.made} are in {options.output}.")


class Engine(Protocol):
    """What parses pieces."""

    @property
    def device(self) -> str:
        """Its type."""

    def results(self, work: Iterable[Piece]) -> Iterator[Parsed]:
        """In any order."""


@dataclass(frozen=True)
class Local:
    """In this process, or in several beside it."""

    parser: Any
    writer: AnyWriter

    @property
    def device(self) -> str:
        return self.parser.device.type

    def results(self, work: Iterable[Piece]) -> Iterator[Parsed]:
        parse = partial(pieces.parse, writer=self.writer)
        if isinstance(self.parser, Workers):
            yield from self.parser.unordered(parse, work)
        else:
            for piece in _prefetched(work):
                yield parse(self.parser, piece)


@contextmanager
def local(parser: AbstractContextManager[Any], writer: AnyWriter) -> Iterator[Engine]:
    """A parser or a tagger here, or several in processes."""
    with parser as one:
        yield Local(one, writer)


def _windows(results: Iterable[Parsed], progress: "Progress") -> Iterator[list[Parsed]]:
    """One after the other, each when all of its pieces are there."""
    waiting, window = dict[int, list[Parsed]](), 0
    for parsed in results:
        progress.add(parsed)
        waiting.setdefault(parsed.window, []).append(parsed)
        while window in waiting and len(waiting[window]) == waiting[window][0].of_window:
            yield waiting.pop(window)
            window += 1


def _claimed(work: Iterable[Piece]) -> Iterator[Piece]:
    """Those that no other process has taken."""
    mine = processes.total("pieces", 1) - 1
    for number, piece in enumerate(work):
        if number == mine:
            yield piece
            mine = processes.total("pieces", 1) - 1


def _prefetched(items: Iterable[Item]) -> Iterator[Item]:
    """Read by another thread, one ahead."""
    rest = iter(items)
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(next, rest, None)
        while (item := ahead.result()) is not None:
            ahead = reader.submit(next, rest, None)
            yield item


class Disk:
    """Writes in a thread of its own, a few ahead."""

    def __enter__(self) -> "Disk":
        self.thread, self.waiting = ThreadPoolExecutor(1), deque[Future[None]]()
        return self

    def put(self, write: Callable[..., None], *arguments: Any) -> None:
        self.waiting.append(self.thread.submit(write, *arguments))
        if len(self.waiting) > WAITING:
            self.waiting.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.thread.shutdown()
        if kind is None:
            for one in self.waiting:
                one.result()


class Progress:
    """A bar, and points in TensorBoard."""

    def __init__(self, number: int | None, run: Run, wording: Wording, before: int = 0) -> None:
        """`before` were done by an earlier job."""
        self.run, self.wording, self.before, self.records, self.words, self.fallbacks = run, wording, before, 0, 0, 0
        self.begin = self.shown = time.perf_counter()
        self.bar = tqdm(
            total=number,
            initial=before,
            unit=" sentences",
            disable=None,
            desc=wording.doing,
            file=sys.stderr,
            smoothing=0.1,
            leave=False,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.bar.close()
        if kind is None and self.shown > self.begin:  # short jobs need no TensorBoard, which takes a second to begin
            self._point()

    def add(self, parsed: Parsed) -> None:
        counts = parsed.counts
        if not self.records:
            self.run.result["first_sentences"] = counts["sentences"]
            self.run.result["first_seconds"] = time.perf_counter() - self.begin
        self.words += counts["words"]
        self.fallbacks += counts["fallbacks"]
        seen = self.records
        if processes.number() == 1:
            self.records += counts["records"]
        else:  # those of all processes
            self.records = processes.total("records", counts["records"])
        rate = self.words / (time.perf_counter() - self.begin)
        self.bar.set_postfix_str(
            f"{rate:,.0f} words/s" + f", {self.fallbacks} without a path" * bool(self.fallbacks), refresh=False
        )
        self.bar.update(self.records - seen)
        if time.perf_counter() - self.shown > MOMENT:
            self._point()

    def _point(self) -> None:
        if processes.is_first():
            self.shown = time.perf_counter()
            seconds, step = self.shown - self.begin, self.before + self.records
            with writing(self.run.folder / "tensorboard"):
                self.run.board.add_scalar(f"{self.wording.job}/sentences_per_second", self.records / seconds, step)
                self.run.board.add_scalar(f"{self.wording.job}/words_per_second", self.words / seconds, step)
                self.run.board.add_scalar(f"{self.wording.job}/fallbacks", self.fallbacks, step)


def _words(options: CorpusOptions, engine: Engine) -> int:
    """Of a piece. GPUs want large batches."""
    return min(options.batch_tokens, pieces.WORDS) if engine.device == "cpu" else options.batch_tokens


def _standard_input() -> TextIO:
    if sys.stdin is None:
        raise InputError("standard input is closed: expected sentences there, or input=FILE.")
    return sys.stdin


def _reader(options: CorpusOptions, path: str) -> Reader:
    return options.reader(options.input_format or records.kind_of(path))


def _corpus(options: CorpusOptions, paths: tuple[str, ...]) -> Corpus:
    return Corpus(tuple((path, _reader(options, path)) for path in paths))


def _manifest(options: CorpusOptions, corpus: Corpus, writer: AnyWriter, engine: Engine, digest: str) -> dict[str, Any]:
    """All that decides what the trees are, as plain JSON."""
    grammars = [part for folder in folders(options.model) for part in parts(folder)]
    return {
        "input": digest,
        # model.json holds the digest of the numbers.
        "model": [hashlib.sha256(read_bytes(grammar / JSON)).hexdigest() for grammar in grammars],
        **{field.name: getattr(options, field.name) for field in fields(options) if field.name not in WHERE},
        **options.made_with(),
        "device": engine.device,
        "input_format": [reader.kind for _, reader in corpus.files],
        "output_format": writer.kind,
        "window": pieces.WINDOW,
        "lvpcfg": version("lvpcfg"),
        "torch": torch.__version__,
    }


@contextmanager
def _told_how_to_go_on(run: Run, wording: Wording) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, LostError):
        run.say(f"Stopped. What is {wording.done} is kept. To go on:\n{run.command_to_go_on}")
        raise


def _output(path: str | None) -> AbstractContextManager[Callable[[bytes], object]]:
    """Trees are written as they come, so that what is done stays done."""
    return _to_standard_output() if path is None else _to_stream(path)


@contextmanager
def _to_standard_output() -> Iterator[Callable[[bytes], object]]:
    if sys.stdout is None:
        raise InputError("standard output is closed: expected a place for the results there, or output=FILE.")
    stream = sys.stdout.buffer
    seen = sys.stdout.isatty()

    def write(data: bytes) -> None:
        try:
            stream.write(printable(data.decode()).encode() if seen else data)
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            leave_pipe()
            raise InputError(f"cannot write to standard output: {(error.strerror or str(error)).lower()}.") from None

    yield write


@contextmanager
def _to_stream(path: str) -> Iterator[Callable[[bytes], object]]:
    """What is in a file stays there until there is something to write in its place."""
    with writing(path):
        stream = open(path, "ab")  # noqa: SIM115
    emptied = not os.path.isfile(path)  # pipes and devices hold nothing

    def empty() -> None:
        nonlocal emptied
        if not emptied:
            stream.truncate(0)
            emptied = True

    def write(data: bytes) -> None:
        if not data:
            return
        with writing(path):
            empty()
            stream.writelines(packed([data], path))
            stream.flush()

    try:
        yield write
        with writing(path):
            empty()
    finally:
        with writing(path):  # what could not be written is tried again
            stream.close()


def _report(summary: Summary, before: int, seconds: float, device: str, wording: Wording, run: Run) -> None:
    """`before` of the records were parsed by an earlier job, in other seconds."""
    counts = summary.counts
    share = 1 - before / max(1, counts["records"])
    run.result |= counts
    run.result |= {"seconds": seconds, "words_per_second": share * counts["words"] / seconds}
    run.result |= {f"latency_{name}": value for name, value in _quantiles(summary.batches).items()}
    run.result["memory_mb"] = peak_memory()
    say_what_happened(counts, share * counts["sentences"] / seconds, device, run, wording)


def _quantiles(batches: list[tuple[int, float]]) -> dict[str, float]:
    """Seconds from the begin of a batch to its end, as its sentences see them."""
    ordered, number = sorted(batches, key=lambda batch: batch[1]), sum(size for size, _ in batches)
    found, seen = dict[str, float](), 0
    shares = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    for size, seconds in ordered:
        seen += size
        found |= {name: seconds for name, share in shares.items() if name not in found and seen >= share * number}
    return found
