"""Operations on flat arrays, by which forests are built.

CUDA runs asynchronously, and the program has to wait for it wherever it reads a number: for a Python number, and for an
operation whose result has a size that depends on the numbers. Pruning and planning a batch do so a fixed number of
times, however many sentences, spans and edges it has.
"""

import numpy as np
import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether its numbers can be read at once. All choices between a way for the CPU, which may read numbers as often
    as it likes, and one for CUDA ask here; a test answers no, and counts what is read."""
    return tensor.device.type == "cpu"


def take(column: Tensor, index: Tensor) -> Tensor:
    """column[index], several times as fast."""
    return column.index_select(0, index)


def true_indices(mask: Tensor) -> Tensor:
    """Where a mask is true, its dimensions counted as one; on the CPU by NumPy, which is three times as fast."""
    if on_host(mask):
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero().squeeze(1)


def worth_computing(mask: Tensor) -> Tensor:
    """The indices for which a result is wanted. CUDA computes all of them, which is faster than to wait for the mask;
    so what is done with the result must be right for the others too."""
    return true_indices(mask) if on_host(mask) else torch.arange(mask.numel(), device=mask.device)


def repeated(sizes: Tensor, first: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Ranges of these sizes, each from its `first` number on, end to end: the range of each element, and the element.

    `total` is the sum of the sizes, if it is known.
    """
    which = torch.repeat_interleave(sizes, output_size=total)
    begin = sizes.cumsum(0) - sizes
    return which, take(first - begin, which).add_(torch.arange(len(which), device=sizes.device))
