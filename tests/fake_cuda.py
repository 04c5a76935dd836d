"""Run as a script: the hot path, form by form, chains and ALS on fake CUDA tensors, in a torch that may have no CUDA.

A CPU build of torch refuses three things on such tensors, which are replaced here by what they come to: `contiguous`,
`copy_` and indexing. For ALS, which looks at numbers that fake tensors do not have, `nonzero` is replaced too: whatever
it asks is so, and masks select all. Nothing that chains ask is so; `~` and their lengths are replaced as well.
"""

import numpy as np
import torch
from cases import FORMS
from test_placement import LENGTH, Placed, tensors_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lvpcfg.chart.fast.partition import solve_outside
from lvpcfg.decompose.als import als
from lvpcfg.options import TAG_DECODERS
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.decode import best_tags
from lvpcfg.sequence.distribution import HMMDistribution
from lvpcfg.sequence.fast import ChainProblem

DEVICE = "cuda:0"
LENGTHS = [LENGTH, 2]


def contiguous(self: Tensor) -> Tensor:
    return self.clone(memory_format=torch.contiguous_format)


def copy_(self: Tensor, other: Tensor) -> Tensor:
    return self.zero_().add_(other)


real_get = Tensor.__getitem__


def get(self: Tensor, index) -> Tensor:
    if not isinstance(self, FakeTensor):
        return real_get(self, index)
    dimension = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int):
            self = self.select(dimension, part)
            continue
        if isinstance(part, slice):
            begin, end, _ = part.indices(self.shape[dimension])
            self = self.narrow(dimension, begin, end - begin)
        elif part.dtype == torch.bool:
            assert part.device == self.device
        else:
            self = self.index_select(dimension, part.flatten()).unflatten(dimension, part.shape or (1,))
        dimension += 1
    return self


def nonzero(self: Tensor) -> Tensor:
    return torch.arange(len(self), device=self.device).unsqueeze(1)


def put(self: Tensor, index, values) -> None:
    get(self, index) + values  # on one device


def chains(low_rank: bool, final: bool) -> list[Tensor]:
    """What distributions over sequences and taggers make of a chain."""
    with FakeTensorMode() as mode:

        def some(*shape: int) -> Tensor:
            return mode.from_tensor(torch.ones(shape)).to(DEVICE)

        factors = (some(6, 2), some(2, 6)) if low_rank else (some(6, 6),)
        chain, words = Chain(some(6), factors, some(6) if final else None), some(len(LENGTHS), LENGTH, 6)
        distribution = HMMDistribution(chain, words)
        (solution,) = solve_outside(ChainProblem(chain, words.transpose(0, 1)), some(len(LENGTHS)), parameters=True)
        gradients = [solution.outside.leaf, *solution.outside.tensors]  # a CPU build of torch has no autograd for them
        found = [*gradients, distribution.partition, distribution.marginals, distribution.argmax]
        for decoder in TAG_DECODERS:
            found += best_tags(chain, words, torch.tensor(LENGTHS), 3, decoder)
    return found


def main() -> None:
    Tensor.contiguous, Tensor.copy_, Tensor.__getitem__ = contiguous, copy_, get
    for name in FORMS:
        made = Placed(name, fake=True, device=DEVICE).run()
        devices = {str(tensor.device) for one in made for tensor in tensors_in(one)}
        print(name, len(made), *devices, sep="|")
    Tensor.__setitem__, Tensor.nonzero, Tensor.__bool__ = put, nonzero, lambda _: False
    Tensor.__invert__, Tensor.numpy = lambda self: self.eq(False), lambda _: np.array(LENGTHS)
    for low_rank in (False, True):
        made = chains(low_rank, final=not low_rank)
        devices = {str(tensor.device) for tensor in made}
        print("chain", len(made), *devices, sep="|")
    Tensor.__bool__ = lambda _: True
    for nonnegative in (False, True):
        with FakeTensorMode() as mode:
            tensors = mode.from_tensor(torch.ones(5, 2, 3, 4)).to(DEVICE)
            fit = als(tensors, rank=2, iterations=20, restarts=1, nonnegative=nonnegative)
        devices = {str(tensor.device) for tensor in tensors_in(fit)}
        print("als", len(list(tensors_in(fit))), *devices, sep="|")


if __name__ == "__main__":
    main()
