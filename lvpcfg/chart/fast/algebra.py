"""The arithmetic of charts: what "sum" and "product" mean while one routine fills the cells.

`SUM` is ordinary arithmetic: cells are scaled by powers of two (`potentials.py`), so that all the work inside is plain
matrix multiplication while the chart as a whole lives in log space. The others work on logarithms and are slower: `LOG`
where even float64 is not enough, `MAX` for the best derivation, `Sample` for random ones, `Expectation` for entropies
and divergences.

Derivations come out as gradients: d total / d value is 1 where the value is used and 0 elsewhere, since
the sums of `MAX` and `Sample` hand their gradient to the one term that was chosen.

Values may carry leading dimensions of the algebra (the parts of an expectation); everything
else addresses dimensions from the right.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lvpcfg.chart.semirings import safe_log

CHUNK = 1 << 24  # numbers held at once by a product in a logarithmic algebra


class Sum:
    """Real numbers, positive or not."""

    lead: tuple[int, ...] = ()

    def value(self, parameter: Tensor) -> Tensor:
        return parameter

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_zeros(shape)

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dim() == y.dim() == 3:  # `torch.matmul` would copy what it broadcasts
            return torch.bmm(x.expand(len(y), -1, -1) if len(x) == 1 else x, y)
        return torch.matmul(x, y)

    def multiply(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """The product of two matrices, written to a third."""
        return torch.mm(x, y, out=out)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """[..., k, lanes] twice -> [..., lanes], summed over k."""
        return (x * y).sum(-2)

    def collect(self, rows: Tensor, target: Tensor, sources: Tensor) -> Tensor:
        """[rows, cells] -> [targets, cells]: the sum of the rows of each target."""
        return rows.new_zeros(sources.shape[0] + 1, rows.shape[1]).index_add(0, target, rows).narrow(0, 0, len(sources))

    def keep(self, x: Tensor, allowed: Tensor) -> Tensor:
        return x * allowed

    def log(self, total: Tensor) -> Tensor:
        """log |total| in double precision."""
        return total.to(torch.float64).abs().log()

    def sign(self, total: Tensor) -> Tensor:
        return total.sign()

    def posterior(self, value: Tensor, gradient: Tensor) -> Tensor:
        return value * gradient


class Log:
    """Logarithms of non-negative numbers; sums are log-sum-exp."""

    lead: tuple[int, ...] = ()

    def value(self, parameter: Tensor) -> Tensor:
        return safe_log(parameter)

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_full((*self.lead, *shape), -math.inf)

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add([x, y])

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        return self.sum(torch.stack(list(parts), -1)) if len(parts) > 1 else parts[0]

    def sum(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        total: Tensor = _Sum.apply(x, self)
        return total

    def reduce(self, x: Tensor) -> Tensor:
        largest = x.amax(-1)
        finite = torch.where(largest > -math.inf, largest, 0)
        return (x - finite.unsqueeze(-1)).exp().sum(-1).log() + finite

    def weights(self, x: Tensor, total: Tensor) -> Tensor:
        """How much of a sum over the last dimension each term is; how its gradient is shared out."""
        finite = torch.where(total > -math.inf, total, 0)
        return (x - finite.unsqueeze(-1)).exp()

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        flat = [z.expand(*shape, *z.shape[-2:]).reshape(math.prod(shape), *z.shape[-2:]) for z in (x, y)]
        product: Tensor = _Matmul.apply(*flat, self)
        return product.reshape(*shape, *product.shape[-2:])

    def multiply(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self.matmul(x, y))

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return self.sum((x + y).transpose(-1, -2))

    def collect(self, rows: Tensor, target: Tensor, sources: Tensor) -> Tensor:
        padded = torch.cat([rows, self.zeros(rows, 1, rows.shape[-1])], -2)
        gathered = padded.index_select(-2, sources.flatten()).unflatten(-2, tuple(sources.shape))
        return self.sum(gathered.transpose(-1, -2))

    def keep(self, x: Tensor, allowed: Tensor) -> Tensor:
        return torch.where(allowed, x, self.zeros(x, *[1] * (x.dim() - len(self.lead))))

    def log(self, total: Tensor) -> Tensor:
        return total.to(torch.float64)

    def sign(self, total: Tensor) -> Tensor:
        return (total > -math.inf).to(total.dtype)

    def posterior(self, value: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class Max(Log):
    """Logarithms; sums are maxima, and the gradient goes to one term even where terms tie."""

    def reduce(self, x: Tensor) -> Tensor:
        return x.amax(-1)

    def weights(self, x: Tensor, total: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1) * (total > -math.inf).unsqueeze(-1)


class Sample(Log):
    """Log-sum-exp whose gradient goes to one term, drawn with its share of the sum as its probability."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def weights(self, x: Tensor, total: Tensor) -> Tensor:
        uniform = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=self.generator)
        drawn = (x - (-uniform.log()).log()).argmax(-1, keepdim=True)  # the largest of Gumbel-perturbed terms
        return torch.zeros_like(x).scatter(-1, drawn, 1) * (total > -math.inf).unsqueeze(-1)


class _Sum(torch.autograd.Function):
    """Sum over the last dimension in `Log`, `Max` or `Sample`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, algebra: Log) -> Tensor:
        total = algebra.reduce(x)
        ctx.save_for_backward(x, total)
        ctx.algebra = algebra
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, total = ctx.saved_tensors
        return gradient.unsqueeze(-1) * ctx.algebra.weights(x, total), None


class _Matmul(torch.autograd.Function):
    """[batch, i, k] x [batch, k, j] -> [batch, i, j] in `Log`, `Max` or `Sample`, a chunk of i at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, algebra: Log) -> Tensor:
        columns = y.transpose(-1, -2)  # [batch, j, k]
        product = torch.cat(
            [algebra.reduce(part.unsqueeze(2) + columns.unsqueeze(1)) for part in _Matmul.parts(x, y)], 1
        )
        ctx.save_for_backward(x, y, product)
        ctx.algebra = algebra
        return product

    @staticmethod
    def parts(x: Tensor, y: Tensor) -> Sequence[Tensor]:
        return x.split(max(1, CHUNK // max(1, y.numel())), 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y, product = ctx.saved_tensors
        columns, dx, dy = y.transpose(-1, -2), [], torch.zeros_like(y)
        at = 0
        for part in _Matmul.parts(x, y):
            rows = slice(at, at + part.shape[1])
            at = rows.stop
            weights = ctx.algebra.weights(part.unsqueeze(2) + columns.unsqueeze(1), product[:, rows])
            shared = weights * gradient[:, rows].unsqueeze(-1)  # [batch, i, j, k]
            dx.append(shared.sum(2))
            dy += shared.sum(1).transpose(-1, -2)
        return torch.cat(dx, 1), dy, None


class _Parts(Log):
    """An algebra whose values have a leading dimension: `times` and `sum` say what it means."""

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Products of chart values with chart values or parameters."""
        return x + y

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        return self.combine(*self._aligned(x, y))

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._aligned(x.unsqueeze(-2), y.transpose(-1, -2).unsqueeze(-3))
        return self.sum(self.combine(x, y))

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return self.sum(self.times(x, y).transpose(-1, -2))

    def _aligned(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The same number of dimensions behind the leading one."""
        longest = max(x.dim(), y.dim())
        return self._padded(x, longest), self._padded(y, longest)

    def _padded(self, x: Tensor, dimensions: int) -> Tensor:
        return x.reshape(x.shape[0], *[1] * (dimensions - x.dim()), *x.shape[1:])


class Expectation(_Parts):
    """(log p, E[f]) for a function f that adds up over a derivation: E under p of what has been built.

    A parameter t carries (log t, f(t)). With f = log t this gives the entropy, log Z - E[f], and with
    f = log t_p - log t_q the divergence.
    """

    lead = (2,)

    def value(self, parameter: Tensor) -> Tensor:
        """`parameter` is [2, ...]: t, and f(t)."""
        t, f = parameter.unbind(0)
        return torch.stack([safe_log(t), torch.where(t > 0, f, 0)])

    def sum(self, x: Tensor) -> Tensor:
        log, f = x.unbind(0)
        total = super().sum(log)
        share = (log - torch.where(total > -math.inf, total, 0).unsqueeze(-1)).exp()
        return torch.stack([total, (share * f).sum(-1)])

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        return torch.stack([like.new_full(shape, -math.inf), like.new_zeros(shape)])


SUM, LOG, MAX = Sum(), Log(), Max()
