"""Tensors as a model folder holds them: whole numbers in the narrowest type, and zeros as bits.

EM leaves few of the numbers of a rule tensor above zero: on a treebank of 21,000 trees three in ten after four cycles
of split-merge, and one in thirty above 1e-9. Where more than half of the numbers of a tensor are zero, the folder holds
the others alone, and in `NAME.places` a bit for each number of the tensor: whether it is one of them.
"""

import numpy
import torch
from jaxtyping import UInt8
from torch import Tensor

from lvpcfg.errors import show
from lvpcfg.grammar.reader import JSON, Reader

PLACES = ".places"
SPARSE = "sparse"  # in the description: how many numbers a tensor had
NARROW = (torch.uint8, torch.int16, torch.int32)
LEAST = 1024  # numbers of a tensor that is worth it
MOST_SPARSE = (
    4096  # places for each number: more than in any tensor that is packed, so that no small file becomes large
)
ONES = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1).sum(1)  # bits of each byte


def pack(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Vectors as a folder holds them, and the lengths of those that are sparse."""
    packed: dict[str, Tensor] = {}
    lengths: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            packed[name] = _narrowed(tensor)
        elif (
            len(tensor) >= LEAST
            and len(tensor) < MOST_SPARSE * (some := int(tensor.count_nonzero()))
            and 2 * some < len(tensor)
        ):
            there = tensor != 0
            packed[name], packed[name + PLACES] = tensor[there], _bits(there)
            lengths[name] = len(tensor)
        else:
            packed[name] = tensor
    return packed, lengths


def unpack(reader: Reader) -> None:
    """Makes the tensors of a folder those that were packed; all others stay as they are."""
    lengths = reader.description.get(SPARSE, {})
    if not isinstance(lengths, dict) or not all(type(length) is int for length in lengths.values()):
        reader.refuse(f"{JSON} should have the lengths of sparse tensors under {SPARSE!r}, found {show(lengths)}")
    for name, length in lengths.items():
        values, bits = reader.tensor(name), reader.tensor(name + PLACES)
        if values.dtype not in (torch.float32, torch.float64):
            reader.refuse(f"the tensor {name!r} is of type {values.dtype}, expected float32 or float64")
        if bits.dtype != torch.uint8 or len(bits) != -(-length // 8) or length < 0:
            reader.refuse(f"the tensor {name + PLACES!r} does not have a bit for each of {show(length)} numbers")
        if int(ONES[bits].sum()) != len(values) or 8 * len(bits) > MOST_SPARSE * len(values):
            reader.refuse(f"the tensor {name + PLACES!r} does not have a place for each number of {name!r}")
        there = _booleans(bits, length)
        whole = numpy.zeros(length, values.numpy().dtype)
        whole[there] = values.numpy()
        reader.tensors[name] = torch.from_numpy(whole)
        del reader.tensors[name + PLACES]
    for name, tensor in reader.tensors.items():
        if tensor.dtype in NARROW:
            reader.tensors[name] = tensor.long()


def _narrowed(tensor: Tensor) -> Tensor:
    if not len(tensor):
        return tensor
    least, most = (int(end) for end in tensor.aminmax())
    for dtype in NARROW:
        range_of = torch.iinfo(dtype)
        if range_of.min <= least and most <= range_of.max:
            return tensor.to(dtype)
    return tensor


def _bits(there: Tensor) -> UInt8[Tensor, "bytes"]:
    return torch.from_numpy(numpy.packbits(there.numpy()))


def _booleans(bits: UInt8[Tensor, "bytes"], length: int) -> numpy.ndarray:
    return numpy.unpackbits(bits.numpy(), count=length).view(bool)
