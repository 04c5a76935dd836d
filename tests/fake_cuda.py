"""Run as a script: the hot path, form by form, and ALS on fake CUDA tensors, in a torch that may have no CUDA at all.

A CPU build of torch refuses three things on such tensors, which are replaced here by what they come to: `contiguous`,
`copy_` and indexing. For ALS, which looks at numbers that fake tensors do not have, `nonzero` is replaced too: whatever
it asks is so, and masks select all.
"""

import torch
from cases import FORMS
from test_placement import Placed, tensors_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lvpcfg.decompose.als import als

DEVICE = "cuda:0"


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


def main() -> None:
    Tensor.contiguous, Tensor.copy_, Tensor.__getitem__ = contiguous, copy_, get
    for name in FORMS:
        made = Placed(name, fake=True, device=DEVICE).run()
        devices = {str(tensor.device) for one in made for tensor in tensors_in(one)}
        print(name, len(made), *devices, sep="|")
    Tensor.__setitem__, Tensor.__bool__ = put, lambda _: True
    Tensor.nonzero = nonzero
    for nonnegative in (False, True):
        with FakeTensorMode() as mode:
            tensors = mode.from_tensor(torch.ones(5, 2, 3, 4)).to(DEVICE)
            fit = als(tensors, rank=2, iterations=20, restarts=1, nonnegative=nonnegative)
        devices = {str(tensor.device) for tensor in tensors_in(fit)}
        print("als", len(list(tensors_in(fit))), *devices, sep="|")


if __name__ == "__main__":
    main()
