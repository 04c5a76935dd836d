"""Reading text (plain or gzip, UTF-8) and writing files that are never seen half-written."""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from lvpcfg.errors import InputError, show

TYPES = {  # as safetensors calls them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
}
PathLike = str | os.PathLike[str]


def place(path: PathLike) -> Path:
    """Of a file or a folder, if it is one."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{show(path)} is no file or folder: expected its name.")
    return Path(path)


def read_bytes(path: PathLike) -> bytes:
    place(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot read {show(os.fspath(path), 200)}: {reason}.") from None
    except ValueError as error:  # a name no file can have
        raise InputError(f"cannot read {show(os.fspath(path), 200)}: {error}.") from None


def read_text(path: PathLike) -> str:
    """The text of a UTF-8 file, gzipped or not, with line ends as ``\\n``."""
    data = read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: the gzip data is damaged ({error}).") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        around = data[max(0, error.start - 20) : error.start + 20]
        raise InputError(f"{path}, line {line}: expected UTF-8 text, found the bytes {around!r}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


@contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """What goes wrong on the disk, or on the way to it, becomes a sentence about `path`."""
    try:
        yield
    except InputError:
        raise
    except UnicodeEncodeError as error:
        text = error.object[error.start : error.end]
        raise InputError(f"cannot write {show(os.fspath(path), 200)}: {text!r} is no character of Unicode.") from None
    except (OSError, ValueError) as error:  # ValueError: a name no file can have
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(f"cannot write {show(os.fspath(path), 200)}: {reason}.") from None


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    write_all(path, parts)


def write_all(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file of these parts; until all of it is on the disk, the old file stays as it was."""
    with writing(path):
        path = path.resolve()  # a link stays a link
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                stream.writelines(parts)  # a pipe or a device
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                stream.writelines(parts)
                _sync(stream.fileno())
            os.replace(temporary, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                _sync(folder)  # and the new name is
            finally:
                os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)


def tensor_file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """The parts of a safetensors file, on the CPU. The numbers are not copied: there may be no room for that."""
    header: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers shall begin at a multiple of 8
    numbers = (tensor.contiguous().numpy().data.cast("B") for tensor in tensors.values() if tensor.numel())
    return [len(text).to_bytes(8, "little"), text, *numbers]


def write_text(path: PathLike, text: str) -> None:
    with writing(path):
        write_bytes(place(path), text.encode("utf-8"))


def _sync(descriptor: int) -> None:
    with suppress(OSError):  # some file systems and folders cannot
        os.fsync(descriptor)
