"""A long output as parts, in a folder beside it: what is done stays done, and nothing is done twice or left out.

    trees.mrg.parts/manifest.json    what the trees are made of and how: digests of input and models, options
    trees.mrg.parts/00000012.part    what became of the twelfth piece of the input

A part has its name when all of it is on the disk. When all parts are there, they are joined into the output, which has
its name when all of that is on the disk; then the folder goes. Whenever a job is stopped, the same command goes on.
"""

import fcntl
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import zstandard

from lvpcfg.batch.pieces import Parsed, Summary
from lvpcfg.errors import InputError, show
from lvpcfg.files import write_all, write_bytes, write_text, writing

MANIFEST, LOCK = "manifest.json", "lock"
NAME = re.compile(r"(\d{8,})\.part")


class Parts:
    """Of the output `path`; `manifest`, plain JSON, says what it is made of and how."""

    def __init__(self, path: str, manifest: dict[str, Any]) -> None:
        self.path, self.folder, self.manifest = Path(path), Path(f"{path}.parts"), manifest

    @contextmanager
    def begun(self) -> Iterator[None]:
        """For the one process that begins and ends the work on the output; the others come in between."""
        with writing(self.path):
            self.folder.mkdir(exist_ok=True)
            lock = open(self.folder / LOCK, "w")  # noqa: SIM115
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another job is writing {show(str(self.path), 200)} now: its parts are taken."
                ) from None
            except OSError:  # a file system without locks
                pass
            self._begin()
            yield

    def _begin(self) -> None:
        file = self.folder / MANIFEST
        try:
            before = json.loads(file.read_bytes())
        except (OSError, ValueError):
            before = None
        if not isinstance(before, dict):
            self._clear()  # of what is unknown
            write_text(file, json.dumps(self.manifest, indent=1) + "\n")
            return
        different = [name for name in self.manifest if before.get(name) != self.manifest[name]]
        if different:
            name = different[0]
            raise InputError(
                f"{self.folder} holds trees of an earlier job, and its {name} was {show(before.get(name))}, not "
                f"{show(self.manifest[name])}: they would be mixed. Remove that folder, or choose another output."
            )

    def write(self, parsed: Parsed) -> None:
        write_bytes(self.folder / f"{parsed.number:08}.part", parsed.to_bytes())

    def done(self) -> dict[int, int]:
        """The numbers of the parts that are there, and whole, and how many records each has."""
        numbers = {int(found[1]) for name in os.listdir(self.folder) if (found := NAME.fullmatch(name))}
        parts = ((number, self._read(number)) for number in numbers)
        return {number: len(parsed.places) for number, parsed in parts if parsed is not None}

    def _read(self, number: int) -> Parsed | None:
        try:
            return Parsed.from_bytes((self.folder / f"{number:08}.part").read_bytes())
        except OSError:
            return None

    def join(self, records: int, begin: bytes, end: bytes) -> Summary:
        """Writes the output, which has so many records, and removes the parts; returns what happened in all."""
        summary = Summary()

        def read() -> Iterator[Parsed]:
            number = 0
            while summary.counts["records"] < records:
                parsed = self._read(number)
                if parsed is None:
                    raise InputError(f"part {number} in {self.folder} is lost or damaged: the same command makes it.")
                summary.add(parsed)
                yield parsed
                number += 1

        def trees() -> Iterator[bytes]:
            yield begin
            for _, parts in groupby(read(), key=lambda parsed: parsed.window):
                yield in_order(parts)
            yield end

        write_all(self.path, packed(trees(), self.path.name))
        self._clear()
        for name in (MANIFEST, LOCK):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something that is not ours
            self.folder.rmdir()
        return summary

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            if NAME.match(name.removeprefix(".")):
                (self.folder / name).unlink()


def in_order(window: Iterable[Parsed]) -> bytes:
    """The trees of a window, from all pieces of it."""
    trees = {place: tree for parsed in window for place, tree in zip(parsed.places, parsed.trees, strict=True)}
    return b"".join(trees[place] for place in sorted(trees))


def packed(chunks: Iterable[bytes], name: str) -> Iterable[bytes]:
    """As the name of the file asks for."""
    if name.endswith(".gz"):
        return (gzip.compress(chunk, mtime=0) for chunk in chunks if chunk)
    if name.endswith(".zst"):
        return (zstandard.compress(chunk) for chunk in chunks if chunk)
    return chunks
