"""Model folders: `model.safetensors` (numbers) and `model.json` (everything else), of grammars and of taggers.

Nothing in the folder is code or names code. A file that is truncated, foreign, newer than this
program, or made to harm is refused with one sentence before anything is built from it.
"""

import hashlib
import json
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import zstandard
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, place, read_bytes, tensor_file, write_bytes, writing
from lvpcfg.grammar.location import located, parts, provided
from lvpcfg.grammar.packing import SPARSE, pack, unpack
from lvpcfg.grammar.reader import JSON, MOST_STATES, TENSORS, Reader
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.spelling import CharacterNetwork, CharacterSizes

WAITING = "model.safetensors.new"
ZSTD, FRAME = ".zst", b"\x28\xb5\x2f\xfd"  # behind the name of compressed tensors, and how they begin
MOST_LARGER = 200  # times the size of a compressed file
DIGEST = "sha256"  # of all else in model.json
LEXICAL = ("row", "state", "value", "weight", "source", "backoff")
GRAMMAR, TAGGER = "lvpcfg", "lvpcfg tagger"  # what model.json says first, its "format"
KINDS = {GRAMMAR: "it is a grammar, for job=parse", TAGGER: "it is a tagger, for job=tag"}
Held = TypeVar("Held")


class FolderReader(Reader, Generic[Held]):
    """Builds what a folder holds of a description and tensors."""

    FORMAT: ClassVar[str]  # one of KINDS
    OLDEST: ClassVar[int]  # the versions of the format that are read
    VERSION: ClassVar[int]
    EXPECTED: ClassVar[str]  # of whoever asks for such a folder

    @abstractmethod
    def held(self) -> Held:
        """What the folder holds."""

    def needs_digest(self) -> bool:
        return True

    def check_version(self) -> None:
        version = self.get("version", int)
        if version > self.VERSION:
            self.refuse(f"it is in format {show(version)} of a newer lvpcfg, and this one reads up to {self.VERSION}")
        if version < 1:
            self.refuse(f"there is no format {show(version)}")
        if version < self.OLDEST:
            self.refuse(f"it is in format {version} of an older lvpcfg, which this one no longer reads: train it again")

    def check_digest(self) -> None:
        if DIGEST not in self.description and not self.needs_digest():
            return
        with suppress(RecursionError):  # nested without end
            if self.get(DIGEST, str) == digest_of(self.description):
                return
        self.refuse(f"{JSON} is damaged, or was changed: its digest is another one")

    def lexicon(self) -> Lexicon:
        words, classes, signature = self.names("words"), self.names("classes"), self.get("signature", str)
        try:
            return Lexicon(words, classes, signature, self.folded())
        except InputError as error:
            self.refuse(str(error).rstrip("."))

    def folded(self) -> bool:
        folded: bool = self.get("folded", bool)
        return folded

    def lexical(self, entries: int, states: int, name: str = "lexical") -> LexicalTable:
        weight, source = self.floats(f"{name}.weight", entries), self.indices(f"{name}.source")
        sources = int(source.max()) + 1 if len(source) else 0
        if len(source) != entries or not sources or int(source.min()) < 0 or sources > entries:
            self.refuse(f"the tensor '{name}.source' should have a row for each of {entries} entries")
        backoff = self.floats(f"{name}.backoff", sources * states).view(sources, states)
        row, state = self.indices(f"{name}.row"), self.indices(f"{name}.state")
        if len(row) != entries + 1 or row[0] != 0 or row[-1] != len(state) or bool((row[1:] < row[:-1]).any()):
            self.refuse(f"the tensor '{name}.row' does not divide '{name}.state' into rows")
        if bool(((state < 0) | (state >= states)).any()):
            self.refuse(f"the tensor '{name}.state' names a state outside of 0 .. {states - 1}")
        value = self.floats(f"{name}.value", len(state))
        return LexicalTable(row, state, value, weight, source, backoff, widest=int((row[1:] - row[:-1]).max()))

    def network(self, lexicon: Lexicon, states: int) -> CharacterNetwork | None:
        if self.description.get("characters", {}) is None:
            return None
        sizes = self.get("characters", dict)
        names = [each.name for each in fields(CharacterSizes)]
        if sizes.keys() != {*names} or not all(type(n) is int and 1 <= n <= MOST_STATES for n in sizes.values()):
            self.refuse(f"'characters' is {show(sizes)}: expected whole numbers for {', '.join(names)}")
        if sizes["width"] % 2 == 0:
            self.refuse(f"the 'width' of its 'characters' is {sizes['width']}: expected an odd number")
        shapes = CharacterSizes(**sizes).shapes(len(lexicon.alphabet), states)
        return CharacterNetwork(
            **{name: self.floats(f"characters.{name}", math.prod(shape)).view(shape) for name, shape in shapes.items()}
        )


def save_folder(
    path: PathLike,
    description: dict[str, Any],
    tensors: dict[str, Tensor],
    reader: type[FolderReader[Any]],
    compressed: bool = False,
) -> None:
    """Writes the folder `path`; a crash leaves the old model or the new one.

    What could not be loaded again is refused before anything is written. `compressed` tensors are in a file of zstd.
    """
    folder = place(path)
    tensors = {name: tensor.detach().flatten().cpu() for name, tensor in tensors.items()}
    description = {"format": reader.FORMAT, "version": reader.VERSION, "tensors_sha256": ""} | description
    complaint = f"the model for {show(str(folder), 200)} cannot be saved"
    reader(complaint, _through_json(description), {**tensors}).held()
    packed, description[SPARSE] = pack(tensors)
    data = tensor_file(packed, {})
    if compressed:
        data = [zstandard.compress(b"".join(data), level=19)]
    description |= {"compressed": compressed, "tensors_sha256": _digest(data)}
    description[DIGEST] = digest_of(description)
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in description.items()]
    with writing(folder):
        text = ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        _finish_save(folder)
        # The new numbers wait beside the old ones until model.json, in one step, names them.
        write_bytes(folder / WAITING, *data)
        write_bytes(folder / JSON, text)
        _take_place(folder, compressed)


def load_folder(
    path: PathLike, reader_of: "Callable[[str, dict[str, Any], dict[str, Tensor]], FolderReader[Held]]"
) -> Held:
    """Reads a folder that `save_folder` wrote, in the precision it was saved in, on the CPU."""
    folder = located(path)
    if not os.path.isfile(folder / JSON):
        _refuse_place(path)
    reader = reader_of(f"the model in {show(str(folder), 200)} cannot be used", {}, {})
    for _ in range(3):  # another process may be saving
        reader.description = _read_description(folder, reader)
        reader.check_version()
        reader.check_digest()
        data = _matching_tensors(folder, reader)
        if data is not None:
            reader.tensors = _parse_tensors(_decompressed(data, reader), reader)
            unpack(reader)
            return reader.held()
    name = _tensors_name(reader.description)
    reader.refuse(f"{name} is missing, truncated, or not the one {JSON} was written with")


def _refuse_place(path: PathLike) -> NoReturn:
    given, grammars = show(os.fspath(path), 200), parts(path)
    if grammars != [located(path)]:
        first = show(os.path.join(path, "0"), 200)
        raise InputError(f"{given} is a product of {len(grammars)} grammars: expected one of them, such as {first}.")
    names = ", ".join([*provided(), *(f"{name}/{part.name}" for name in provided() for part in parts(name))])
    own = f". Models that come with lvpcfg: {names}" if names else ""
    raise InputError(f"{given} is not a model folder: there is no file {JSON} in it{own}.")


def format_of(path: PathLike) -> str | None:
    """What a folder says that it holds, one of KINDS; None, if it holds no model."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        named = json.loads((located(path) / JSON).read_bytes()).get("format")
        return named if isinstance(named, str) and named in KINDS else None
    return None


def lexical_tensors(lexical: LexicalTable, name: str = "lexical") -> dict[str, Tensor]:
    found = {f"{name}.{each}": getattr(lexical, each) for each in LEXICAL}
    if lexical.network is not None:
        found |= {f"characters.{each}": tensor for each, tensor in lexical.network.tensors.items()}
    return found


def lexicon_description(lexicon: Lexicon, lexical: LexicalTable) -> dict[str, Any]:
    return {
        "characters": None if lexical.network is None else asdict(lexical.network.sizes),
        "signature": lexicon.signature,
        "folded": lexicon.folded,
        "classes": list(lexicon.classes),
        "words": list(lexicon.words),
    }


def _through_json(description: dict[str, Any]) -> Any:
    try:
        returned = json.loads(json.dumps(description, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the model cannot be saved: its provenance is not plain JSON ({error}).") from None
    if returned != description:
        raise InputError("the model cannot be saved: its provenance is not plain JSON (keys are strings, no tuples).")
    return returned


def digest_of(description: dict[str, Any]) -> str:
    """Of what a description says, however it is spaced."""
    rest = {name: value for name, value in description.items() if name != DIGEST}
    return _digest([json.dumps(rest, sort_keys=True).encode()])


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _finish_save(folder: Path) -> None:
    """Where a save was cut off behind its writing of model.json, its numbers take their place."""
    try:
        description = json.loads((folder / JSON).read_bytes())
        waiting = (folder / WAITING).read_bytes()
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(description, dict) and description.get("tensors_sha256") == _digest([waiting]):
        _take_place(folder, description.get("compressed") is True)


def _take_place(folder: Path, compressed: bool) -> None:
    """The numbers that wait become those of the model; there are no others."""
    names = (TENSORS + ZSTD, TENSORS) if compressed else (TENSORS, TENSORS + ZSTD)
    os.replace(folder / WAITING, folder / names[0])
    (folder / names[1]).unlink(missing_ok=True)


def _tensors_name(description: dict[str, Any]) -> str:
    return TENSORS + ZSTD if description.get("compressed") is True else TENSORS


def _read_description(folder: Path, reader: FolderReader[Any]) -> dict[str, Any]:
    try:
        description = json.loads(read_bytes(folder / JSON), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        reader.refuse(f"{JSON} is damaged or no JSON")
    named = description.get("format") if isinstance(description, dict) else None
    if named != reader.FORMAT and isinstance(named, str) and named in KINDS:
        reader.refuse(f"{KINDS[named]}: expected {reader.EXPECTED}")
    if named != reader.FORMAT:
        reader.refuse(f'{JSON} was not written by lvpcfg: it should say "format": "{reader.FORMAT}"')
    return dict(description)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _matching_tensors(folder: Path, reader: FolderReader[Any]) -> bytes | None:
    digest = reader.get("tensors_sha256", str)
    for name in (_tensors_name(reader.description), WAITING):
        if os.path.isfile(folder / name):
            with suppress(InputError):  # it may have been renamed since
                data = read_bytes(folder / name)
                if _digest([data]) == digest:
                    return data
    return None


def _decompressed(data: bytes, reader: FolderReader[Any]) -> bytes:
    """As it is, if it is not compressed."""
    if not data.startswith(FRAME):
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MOST_LARGER * len(data):
            reader.refuse(f"{TENSORS}{ZSTD} would be {size:,} bytes, more than {MOST_LARGER} times its size")
        return zstandard.decompress(data)
    except zstandard.ZstdError as error:
        reader.refuse(f"{TENSORS}{ZSTD} is damaged ({error})")


def _parse_tensors(data: bytes, reader: Reader) -> dict[str, Tensor]:
    try:
        return dict(tensors_from_bytes(data))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        reader.refuse(f"{TENSORS} is no safetensors file ({show(str(error))})")
