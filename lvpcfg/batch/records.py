"""Corpora as records: one sentence each, from text, JSON lines or CoNLL-U, in files or from standard input.

Whatever is read is data. What cannot be used becomes a record that says so, and stops nothing; the same bytes are the
same records wherever they come from. A line of text ends with a line feed; a carriage return is white space.
"""

import codecs
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import zstandard
from nltk.tokenize import TreebankWordTokenizer

from lvpcfg.errors import InputError, show
from lvpcfg.options import CONLLU, JSONL, TEXT
from lvpcfg.trees.brackets import ESCAPED
from lvpcfg.trees.conllu import NO_WORD

SPACE = re.compile(r"[ \t\f\v\r\n]+")  # as between the words of trees; other white space may be part of a word
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # how such files begin
LINES = re.compile(r"[\t\r\n]+")  # what no word of a line, or of a column, can hold
COLUMNS = 10  # of CoNLL-U
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".conllu": CONLLU}


@dataclass(frozen=True)
class Record:
    words: list[str]  # none: an empty line, or a record that cannot be used
    tags: list[str | None] | None = None  # gold ones, where they are asked for
    id: Any = None
    problem: str | None = None  # why it cannot be used
    repaired: bool = False  # there were bytes or words that no tree can hold
    text: str | None = None  # the lines of CoNLL-U, where they are written again


@dataclass(frozen=True)
class Reader:
    """How bytes become records."""

    kind: str
    tokenize: bool = False  # split raw text into words
    tags: bool = False  # take gold tags
    plain: bool = False  # words as they can stand in a line, not in a tree; and the lines of CoNLL-U are kept

    def records(self, lines: Iterable[bytes]) -> Iterator[Record]:
        return map(self.record, self.units(lines))

    def units(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """What each record is read from."""
        lines = (line.removesuffix(b"\n") for line in lines)
        return _blocks(lines) if self.kind == CONLLU else lines

    def record(self, unit: bytes) -> Record:
        try:
            text, repaired = unit.decode("utf-8"), False
        except UnicodeDecodeError:
            text, repaired = unit.decode("utf-8", "replace"), True
        read: Callable[[str, bool], Record] = {TEXT: self._text, JSONL: self._json, CONLLU: self._conllu}[self.kind]
        found = read(text, repaired)
        return replace(found, text=text) if self.plain and self.kind == CONLLU else found

    def _text(self, text: str, repaired: bool, name: Any = None) -> Record:
        if self.tokenize:
            text = " ".join(TreebankWordTokenizer().tokenize(text))
        words = [word for word in SPACE.split(text) if word] if self.plain else words_of(text)
        if not self.tags:
            return Record(words, None, name, None, repaired)
        pairs = [_word_and_tag(word) for word in words]
        return Record([word for word, _ in pairs], [tag for _, tag in pairs], name, None, repaired)

    def _json(self, text: str, repaired: bool) -> Record:
        if not words_of(text):
            return Record([])
        try:
            found = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            return Record([], problem=f"no JSON: {str(error).partition(':')[0]}", repaired=repaired)
        if not isinstance(found, dict):
            return Record([], problem='expected a JSON object, such as {"id": 1, "tokens": ["A", "dog"]}')
        return self.of_object(found, repaired)

    def of_object(self, found: dict[str, Any], repaired: bool = False) -> Record:
        """Of what stands in a JSON object."""
        name, tokens, tags = found.get("id"), found.get("tokens"), found.get("tags")
        if isinstance(name, list | dict):
            return Record([], problem='expected "id", a text or a number', repaired=repaired)
        if tokens is None and isinstance(found.get("text"), str):
            clean = _characters(found["text"])
            return self._text(clean, repaired or clean != found["text"], name)
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            return Record([], id=name, problem='expected "tokens", a list of words, or "text"', repaired=repaired)
        words = [self._word(token) for token in tokens]
        repaired = repaired or words != [token.translate({} if self.plain else ESCAPED) for token in tokens]
        if not self.tags or tags is None:
            return Record(words, None, name, None, repaired)
        if not isinstance(tags, list) or len(tags) != len(words) or not all(_is_tag(tag) for tag in tags):
            return Record([], id=name, problem='expected "tags", one for each word, or null', repaired=repaired)
        return Record(words, tags, name, None, repaired)

    def _conllu(self, text: str, repaired: bool) -> Record:
        name, words, tags = None, list[str](), list[str | None]()
        for line in text.split("\n"):
            line = line.rstrip("\r")
            key, _, value = line.partition("=")
            if line.startswith("#"):
                name = value.strip() if key.strip("# \t") == "sent_id" else name
                continue
            columns = line.split("\t")
            if len(columns) < 2 or (self.plain and len(columns) != COLUMNS):
                expected = f"{COLUMNS} columns" if self.plain else "columns"
                return Record([], id=name, problem=f"expected {expected} separated by tabs: {show(line)}")
            if NO_WORD.fullmatch(columns[0]):
                continue
            words.append(self._word(columns[1]))
            repaired = repaired or words[-1] != (columns[1] if self.plain else columns[1].translate(ESCAPED))
            tags.append(columns[4] if len(columns) > 4 and columns[4] not in ("", "_") else None)
        return Record(words, tags if self.tags else None, name, None, repaired)

    def _word(self, token: str) -> str:
        return (LINES.sub("_", token) if token.strip() else "_") if self.plain else _word(token)


@dataclass(frozen=True)
class Corpus:
    """Files, one after the other."""

    files: tuple[tuple[str, Reader], ...]

    def records(self) -> Iterator[Record]:
        for path, reader in self.files:
            with opened(path) as stream:
                yield from reader.records(stream)

    def survey(self) -> tuple[str, int]:
        """A digest of all that is read, and the number of records."""
        digest, number = hashlib.sha256(), 0

        def seen(lines: Iterable[bytes]) -> Iterator[bytes]:
            for line in lines:
                digest.update(line)
                yield line

        for path, reader in self.files:
            with opened(path) as stream:
                number += sum(1 for _ in reader.units(seen(stream)))
            digest.update(b"\0end of file\0")
        return digest.hexdigest(), number

    def stamps(self) -> list[tuple[int, int]]:
        """When the files were written last, and their sizes."""
        return [(found.st_mtime_ns, found.st_size) for path, _ in self.files for found in [os.stat(path)]]


def kind_of(path: str) -> str:
    """The format of a file, by its name."""
    plain = path.lower().removesuffix(".gz").removesuffix(".zst")
    return next((kind for ending, kind in ENDINGS.items() if plain.endswith(ending)), TEXT)


def words_of(line: str) -> list[str]:
    return [word for word in SPACE.split(line.translate(ESCAPED)) if word]


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, packed by gzip or Zstandard or plain."""
    with _reading(path), open(path, "rb") as raw:
        yield unpacked(raw)


def unpacked(raw: BinaryIO) -> BinaryIO:
    """What a stream holds, after a byte order mark."""
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, raw))
    begin = stream.peek(4)
    if begin.startswith(GZIP):
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream))
    elif begin.startswith(ZSTANDARD):
        reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        stream = io.BufferedReader(cast(io.RawIOBase, reader))
    begin = stream.peek(4)
    if begin.startswith(WIDE):
        raise InputError("it is in UTF-16: expected UTF-8 text.")
    if begin.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"cannot read {show(path, 200)}: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise InputError(f"cannot read {show(path, 200)}: the compressed data is damaged ({error}).") from None
    except OSError as error:
        raise InputError(f"cannot read {show(path, 200)}: {(error.strerror or str(error)).lower()}.") from None
    except ValueError as error:  # a name no file can have
        raise InputError(f"cannot read {show(path, 200)}: {error}.") from None


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines up to an empty one, joined."""
    block = list[bytes]()
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield b"\n".join(block)
            block = []
    if block:
        yield b"\n".join(block)


def _characters(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _word(token: str) -> str:
    """As it can stand in a tree: nothing becomes _, and so does white space."""
    return SPACE.sub("_", _characters(token)).translate(ESCAPED) or "_"


def _word_and_tag(word: str) -> tuple[str, str | None]:
    """Of word/TAG; a word without a tag may have any."""
    before, _, tag = word.rpartition("/")
    return (before, tag) if before and tag else (word, None)


def _is_tag(tag: object) -> bool:
    return tag is None or isinstance(tag, str)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
