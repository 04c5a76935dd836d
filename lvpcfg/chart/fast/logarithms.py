"""Charts that even float64 cannot hold: the textbook chart replaces them, by log-sum-exp and with autograd.

These classes offer the same as `Chart` and `Outside`: log Z, its derivatives, and posteriors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.derivations import Allowed
from lvpcfg.chart.fast.as_textbook import as_textbook
from lvpcfg.chart.semirings import Log, safe_log
from lvpcfg.chart.textbook import Weights, inside, only_allowed


class LogChart:
    """log Z of sentences under a form with no number below zero; arguments are those of `Chart`."""

    def __init__(
        self,
        form: Any,  # of any layout
        leaf: Float[Tensor, "length batch word_states"],
        lengths: Int[Tensor, "batch"] | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        self.form, self.leaf, self.lengths, self.allowed = form, leaf, lengths, allowed
        with torch.no_grad():
            self.log_z = self._total(form.tensors, leaf)
        self.sign = (self.log_z > -torch.inf).to(leaf.dtype)

    def _total(self, tensors: Sequence[Tensor], leaf: Tensor, weights: Weights | None = None) -> Tensor:
        grammar = as_textbook(self.form.with_tensors(tensors)).change(safe_log)
        total, _ = inside(Log, grammar, safe_log(leaf.transpose(0, 1)), self.lengths, weights or self._weights())
        return total[0]

    def _weights(self) -> Weights:
        return Weights() if self.allowed is None else only_allowed(Log, self.leaf.transpose(0, 1), self.allowed)

    def near_underflow(self) -> bool:
        return False

    def gradients(
        self, gradient: Float[Tensor, "batch"]
    ) -> tuple[Float[Tensor, "length batch word_states"], list[Tensor]]:
        """The derivative of log Z, weighted by `gradient`, by the words and by the tensors of the form.

        By entries that are zero it is 0.
        """
        inputs = [tensor.detach().requires_grad_() for tensor in (self.leaf, *self.form.tensors)]
        with torch.enable_grad():
            log_z = self._total(inputs[1:], inputs[0])
            total = (torch.where(log_z > -torch.inf, log_z, 0) * gradient).sum()
            leaf, *tensors = torch.autograd.grad(total, inputs, materialize_grads=True)
        return leaf, tensors

    def posteriors(self) -> tuple[Float[Tensor, "batch i j states"], Float[Tensor, "batch i j states"]]:
        """Of the top and of the bottom states of spans."""
        n, batch = self.leaf.shape[:2]
        known, shape = self._weights(), (1, batch, n, n, len(self.form.root))
        ones = [self.leaf.new_zeros(shape).requires_grad_() for _ in range(2)]  # logarithms
        with torch.enable_grad():
            top, bottom = (
                weight if mask is None else weight + mask
                for weight, mask in zip(ones, (known.top, known.bottom), strict=True)
            )
            log_z = self._total(self.form.tensors, self.leaf, Weights(top, bottom))
            of_top, of_bottom = torch.autograd.grad(torch.where(log_z > -torch.inf, log_z, 0).sum(), ones)
        return of_top[0], of_bottom[0]


class LogOutside:
    """The derivative of log Z, weighted by a number for each sentence; attributes are those of `Outside`."""

    def __init__(self, chart: LogChart, gradient: Float[Tensor, "batch"], parameters: bool = False) -> None:
        self.leaf, tensors = chart.gradients(gradient)
        self.tensors: list[Tensor | None] = [*tensors] if parameters else [None] * len(tensors)
