"""Powers of two that keep the numbers of a chart within the range of floats.

    alpha(i,j) is held as alpha(i,j) * 2^-(P_j - P_{i-1}), with a potential P for every place between words

The potentials of two neighbouring spans add up to that of both together, so that sums and products of cells need not
know of them, and all potentials of a sentence come back into log Z as one number, P_n. They are constants to the
derivative: alpha * beta is a posterior as it stands.

P rises by the largest probability of each word, and by the same for every word of a sentence: what its structure
takes from the likeliest of its spans. Spans of two words show that roughly, wider ones better, and whenever it is found
anew what is finished is scaled once more. Where parts of a sentence differ too much for that, numbers get out of
range, which is seen (`partition.py`).
"""

import math

import torch
from torch import Tensor

WIDTHS = frozenset((2, 8, 64, 512))  # of the spans by which sentences are scaled
LOG2 = math.log(2)


def of_words(words: Tensor) -> Tensor:
    """[length, batch, states] -> [length + 1, batch]"""
    least = math.log2(torch.finfo(words.dtype).tiny)  # a larger factor would be infinite
    exponent = _log2_of_largest(words, -1).floor_().clamp_min_(least)
    return torch.nn.functional.pad(exponent, (0, 0, 1, 0)).cumsum(0)


def of_spans(spans: Tensor, width: int, length: int) -> Tensor:
    """[starts, batch, states] of one width -> [length + 1, batch]: zero where a sentence has no such spans."""
    slope = _log2_of_largest(spans, (0, 2)) / width
    return torch.arange(length + 1, device=slope.device).unsqueeze(1).mul(slope).floor_()


def scales(potential: Tensor, width: int) -> Tensor:
    """What the spans of a width are multiplied by, [cells, 1]."""
    starts = len(potential) - width
    return torch.exp2(potential.narrow(0, 0, starts) - potential.narrow(0, width, starts)).view(-1, 1)


def _log2_of_largest(x: Tensor, dimensions: int | tuple[int, int]) -> Tensor:
    """0 where there is none, or no other than 0."""
    if not x.shape[-1]:  # a grammar without interminals
        x = x.new_ones(*x.shape[:-1], 1)
    largest = x.abs().amax(dimensions)
    return torch.where(largest != 0, largest, 1).log2_()
