"""Powers of two that keep the numbers of a chart within the range of floats.

    alpha(i,j) is held as alpha(i,j) * 2^-(P_j - P_{i-1}), with a potential P at every boundary between words

The exponents of two neighbouring spans add up to that of both together. So sums and products of cells need no other
scale, and all that has to be put back into log Z is one number, P_n. Potentials are constants to the derivative: alpha
* beta is a posterior as it is.

P rises at each word by the logarithm of its largest probability, and by a slope that is the same for all words of a
sentence: what the rules take from its likeliest spans, per word. Spans of two words give a first estimate of the slope,
wider ones better estimates; after each of them all finished cells are scaled once more. Where the parts of a sentence
differ too much for one slope, numbers leave the range of floats, and `partition.py` notices.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

WIDTHS = frozenset((2, 8, 64, 512))  # of the spans by which sentences are scaled
LOG2 = math.log(2)


def of_words(words: Float[Tensor, "length batch states"]) -> Float[Tensor, "length+1 batch"]:
    """By the largest probability of each word."""
    least = math.log2(torch.finfo(words.dtype).tiny)  # a larger factor would be infinite
    exponent = log2_of_largest(words, -1).floor_().clamp_min_(least)
    return torch.nn.functional.pad(exponent, (0, 0, 1, 0)).cumsum(0)


def of_spans(spans: Float[Tensor, "starts batch states"], width: int, length: int) -> Float[Tensor, "{length}+1 batch"]:
    """By the spans of one width: zero where all those of a sentence are."""
    slope = log2_of_largest(spans, (0, 2)) / width
    return torch.arange(length + 1, device=slope.device).unsqueeze(1).mul(slope).floor_()


def scales(potential: Float[Tensor, "boundaries batch"], width: int) -> Float[Tensor, "cells 1"]:
    """What the spans of a width are multiplied by."""
    starts = len(potential) - width
    return torch.exp2(potential.narrow(0, 0, starts) - potential.narrow(0, width, starts)).view(-1, 1)


def log2_of_largest(x: Tensor, dimensions: int | tuple[int, int]) -> Tensor:
    """0 where there is none, or no other than 0."""
    if not x.shape[-1]:  # a grammar without interminals
        x = x.new_ones(*x.shape[:-1], 1)
    largest = x.abs().amax(dimensions)
    return torch.where(largest != 0, largest, 1).log2_()
