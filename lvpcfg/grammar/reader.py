"""The pieces of a model folder, each checked against what it must be before anything is built from it."""

from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.errors import InputError, show

JSON, TENSORS = "model.json", "model.safetensors"
MOST_STATES = 1_000_000
PART = 1 << 22  # numbers that are checked at once
# Before format 5, representations of binary rules and their tensors had other names.
FORMER = {"factored": "rule_cp", "kruskal": "whole_cp"}
FORMER_TENSORS = {
    (new, name): f"{old}.{'rules' if name == 'cp_rules' else name}"
    for old, new in FORMER.items()
    for name in ("cp_rules", "u", "v", "w")
}


class Reader:
    """A description and tensors, and what to say before what is wrong with them."""

    TYPED_BY = "root"  # a tensor that says of which floating-point type all of them are

    def __init__(self, complaint: str, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.complaint, self.description, self.tensors = complaint, description, tensors

    def refuse(self, reason: str) -> NoReturn:
        raise InputError(f"{self.complaint}: {reason}.") from None

    def get(self, key: str, expected: type) -> Any:
        value = self.description.get(key)
        if type(value) is not expected:
            self.refuse(f"{JSON} should have {expected.__name__} under {key!r}, found {show(value)}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        names = self.get(key, list)
        if not all(type(name) is str for name in names) or len(set(names)) != len(names):
            self.refuse(f"{key!r} should be a list of different strings")
        return tuple(names)

    def integers(self, key: str) -> list[int]:
        numbers: list[int] = self.get(key, list)
        if not all(type(number) is int and 1 <= number <= MOST_STATES for number in numbers):
            self.refuse(f"{key!r} should be a list of whole numbers from 1 to {MOST_STATES}")
        return numbers

    def floats(self, name: str, size: int) -> Float[Tensor, "{size}"]:
        """A vector of `size` finite numbers, of the one floating-point type that all tensors of the model have."""
        tensor = self.tensor(name)
        if len(tensor) != size:
            self.refuse(f"the tensor {name!r} has {len(tensor)} numbers, expected {show(size)}")
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.dtype != self.tensor(self.TYPED_BY).dtype:
            self.refuse(f"the tensor {name!r} is of type {tensor.dtype}, expected float32 or float64 for all tensors")
        if not all(bool(part.isfinite().all()) for part in tensor.split(PART)):
            self.refuse(f"the tensor {name!r} holds numbers that are not finite")
        return tensor

    def indices(self, name: str) -> Int64[Tensor, "_"]:
        tensor = self.tensor(name)
        if tensor.dtype != torch.int64:
            self.refuse(f"the tensor {name!r} is of type {tensor.dtype}, expected int64")
        return tensor

    def tensor(self, name: str) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            self.refuse(f"{TENSORS} lacks the tensor {name!r}")
        if tensor.dim() != 1:
            self.refuse(f"the tensor {name!r} has the shape {tuple(tensor.shape)}, expected a vector")
        return tensor


class BinaryReader:
    """The part of a model folder that holds the binary rules; in folders before format 5 under other names."""

    def __init__(self, reader: Reader, representation: str, about: dict[str, Any], former: bool = False) -> None:
        self.reader, self.representation, self.about, self.former = reader, representation, about, former

    def name(self, tensor: str) -> str:
        if not self.former:
            return f"binary.{tensor}"
        return FORMER_TENSORS.get((self.representation, tensor), "binary")

    def floats(self, name: str, size: int) -> Float[Tensor, "{size}"]:
        return self.reader.floats(self.name(name), size)

    def indices(self, name: str) -> Int64[Tensor, "_"]:
        return self.reader.indices(self.name(name))

    def size(self, name: str) -> int:
        number = self.about.get(name)
        if type(number) is not int or not 0 <= number <= MOST_STATES:
            self.refuse(f"'{name}' of its binary rules is {show(number)}: expected a number from 0 to {MOST_STATES}")
        return number

    def refuse(self, reason: str) -> NoReturn:
        self.reader.refuse(reason)
