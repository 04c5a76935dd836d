"""A training between two steps, in one file."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.files import read_bytes, tensor_file, write_bytes

NO_DIGEST = "0" * 64  # while it is computed


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All but the tensors is plain JSON."""

    made_of: dict[str, Any]  # see `Task.made_of`
    done: int  # steps
    notes: dict[str, Any]  # of whoever asked for it
    tensors: dict[str, Tensor]  # vectors and whatever else the estimator keeps,
    numbers: dict[str, float] = field(default_factory=dict)  # and single numbers

    def save(self, path: Path) -> None:
        """In one file that is there as a whole or not at all."""
        about = {name: value for name, value in vars(self).items() if name != "tensors"}
        size, header, *numbers = tensor_file(self.tensors, {"sha256": NO_DIGEST, "lvpcfg": json.dumps(about)})
        digest = _digest(size, header, *numbers)
        write_bytes(path, size, bytes(header).replace(NO_DIGEST.encode(), digest.encode(), 1), *numbers)

    @staticmethod
    def load(path: Path, made_of: dict[str, Any]) -> "Checkpoint":
        """Reads a file that `save` wrote; refuses one that was made of something else than `made_of`."""
        data = read_bytes(path)
        try:
            end = 8 + int.from_bytes(data[:8], "little")
            header = data[8:end]
            metadata = json.loads(header)["__metadata__"]
            about, digest = json.loads(metadata["lvpcfg"]), str(metadata["sha256"])
            whole = header.replace(digest.encode(), NO_DIGEST.encode(), 1)
            if _digest(data[:8], whole, memoryview(data)[end:]) != digest:
                raise ValueError("it is damaged: its digest is another one")
            found = Checkpoint(
                made_of=dict(about["made_of"]),
                done=int(about["done"]),
                notes=dict(about["notes"]),
                tensors=dict(tensors_from_bytes(data)),
                numbers=dict(about["numbers"]),
            )
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{show(str(path), 200)} is no checkpoint of a training ({show(str(error))}).") from None
        for name, mine in made_of.items():
            if found.made_of.get(name) != mine:
                raise InputError(
                    f"{show(str(path), 200)} was made with {name} {show(found.made_of.get(name))}, and this training "
                    f"has {show(mine)}: resume with the same data and options, or in another folder."
                )
        return found


def _digest(*parts: bytes | memoryview) -> str:
    """Of all of a file but the digest itself."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
