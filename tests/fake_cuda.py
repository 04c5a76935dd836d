"""Run as a script: the hot path on fake CUDA tensors, form by form, in a torch that may have no CUDA at all.

A CPU build of torch refuses three things on such tensors, which are replaced here by what they come to: `contiguous`,
`copy_`, and the autograd engine, whose gradients have the shapes of what they are gradients of.
"""

import torch
from cases import FORMS
from test_placement import Placed, tensors_in
from torch import Tensor

from lvpcfg.chart import outside

DEVICE = "cuda:0"


def contiguous(self: Tensor) -> Tensor:
    return self.clone(memory_format=torch.contiguous_format)


def copy_(self: Tensor, other: Tensor) -> Tensor:
    return self.zero_().add_(other)


def backward(function, inputs, gradients, wanted):
    if not gradients or not any(wanted):
        return [None] * len(inputs)
    outputs = function(*inputs)
    for output, gradient in zip([outputs] if isinstance(outputs, Tensor) else outputs, gradients, strict=True):
        output + gradient  # on one device
    return [torch.zeros_like(tensor) if want else None for tensor, want in zip(inputs, wanted, strict=True)]


def main() -> None:
    Tensor.contiguous, Tensor.copy_ = contiguous, copy_
    outside._backward = backward
    for name in FORMS:
        made = Placed(name, fake=True, device=DEVICE).run()
        devices = {str(tensor.device) for one in made for tensor in tensors_in(one)}
        print(name, len(made), *devices, sep="|")


if __name__ == "__main__":
    main()
