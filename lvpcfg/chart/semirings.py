"""The algebras of the textbook chart: torch-struct's semirings, mended at zeros, and one for signed numbers.

A semiring, as in torch-struct, is a class or an object. Its values have a leading dimension, `size`:

    convert(x)          what the user gives -> values, [...] -> [size, ...]
    unconvert(x)        values -> what the user asks for, [size, ...] -> [...]
    mul(x, y)           the product
    sum(x)              the sum over the last dimension
    matmul(x, y)        [..., i, k] x [..., k, j] -> [..., i, j]
    zero_(x), one_(x)   fill values with the neutral elements of sum and product

One whose `matmul` needs little more room than its operands says so by `products_fit = True`. The user gives logarithms;
for two distributions (cross-entropy and KL) a pair of them, [2, ...]; to `Signed` ordinary numbers. Any class
that has these methods will do, of torch-struct or of a user. Those below differ from torch-struct's at zeros: its
zero is -1e5, which many a long sentence falls below, and where all terms of a sum are -inf its derivatives, entropies
and samples are not numbers.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch_struct
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lvpcfg.errors import InputError

PRODUCTS = 1 << 22  # numbers held at once, where products are summed one by one
LARGEST = {torch.float32: 40.0, torch.float64: 340.0}  # the square of exp of it is a finite number


@runtime_checkable
class Semiring(Protocol):
    def convert(self, potentials: Tensor) -> Tensor: ...
    def unconvert(self, potentials: Tensor) -> Tensor: ...
    def mul(self, a: Tensor, b: Tensor) -> Tensor: ...
    def sum(self, xs: Tensor) -> Tensor: ...
    def matmul(self, a: Tensor, b: Tensor) -> Tensor: ...
    def zero_(self, xs: Tensor) -> Tensor: ...
    def one_(self, xs: Tensor) -> Tensor: ...
    def size(self) -> int: ...


def zeros(semiring: Semiring, like: Tensor, *shape: int) -> Tensor:
    return semiring.zero_(like.new_empty(semiring.size(), *shape))


def ones(semiring: Semiring, like: Tensor, *shape: int) -> Tensor:
    return semiring.one_(like.new_empty(semiring.size(), *shape))


def logsumexp(x: Tensor) -> Tensor:
    """Over the last dimension; -inf, with derivatives zero, where all terms are -inf (torch's are not numbers)."""
    possible = (x != -torch.inf).any(-1)
    return torch.where(possible, torch.where(possible.unsqueeze(-1), x, 0).logsumexp(-1), -torch.inf)


def log_shares(x: Tensor) -> tuple[Tensor, Tensor]:
    """log-sum-exp over the last dimension, and the logarithm of each term's share of it: 0 for impossible terms."""
    total = logsumexp(x)
    possible = x != -torch.inf
    return total, torch.where(possible, torch.where(possible, x, 0) - torch.where(possible, total.unsqueeze(-1), 0), 0)


def _one_by_one(semiring: Any, a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices by sums of every product, [..., i, j, k], some rows at a time."""

    def some(rows: Tensor) -> Tensor:
        return semiring.sum(semiring.mul(rows.unsqueeze(-2), b.mT.unsqueeze(-3)))

    each = b.numel() * a.shape[1:-2].numel()
    parts = a.split(max(1, PRODUCTS // max(1, each)), -2)
    if len(parts) == 1:
        return some(a)
    return torch.cat([checkpoint(some, rows, use_reentrant=False) for rows in parts], -2)


class _Scaled:
    """Products of matrices of logarithms by ordinary ones of their exponentials, each row and column divided by its
    largest; where that leaves the range of numbers there is none, and sums are taken one by one."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.shift = tuple(
            torch.where(largest > -torch.inf, largest, 0)
            for largest in (a.detach().amax(-1, keepdim=True), b.detach().amax(-2, keepdim=True))
        )
        self.logs = tuple(
            torch.where(x != -torch.inf, x - shift, 0) for x, shift in zip((a, b), self.shift, strict=True)
        )
        self.factors = tuple(
            torch.where(x != -torch.inf, log.exp(), 0) for x, log in zip((a, b), self.logs, strict=True)
        )
        self.product = self.factors[0] @ self.factors[1]
        self.possible = self.product != 0  # not a number is possible, and stays what it is

    @staticmethod
    def of(a: Tensor, b: Tensor) -> "_Scaled | None":
        if not a.shape[-1]:
            return None
        scaled = _Scaled(a, b)
        small = scaled.product.detach() < torch.finfo(a.dtype).tiny ** 0.5
        if bool(small.any()):  # those that have a possible term must not be small
            terms = (a.detach() > -torch.inf).to(a.dtype) @ (b.detach() > -torch.inf).to(a.dtype)
            if bool((small & (terms > 0)).any()):
                return None
        return scaled

    @property
    def log_of_product(self) -> Tensor:
        return torch.where(self.possible, self.product, 1).log()

    @property
    def log_sum(self) -> Tensor:
        return torch.where(self.possible, self.log_of_product + self.shift[0] + self.shift[1], -torch.inf)

    def expected(self, of_a: Tensor, of_b: Tensor) -> Tensor:
        """The expectation of the sum of a function of both factors, by their share of the product."""
        (a, b), (some, others) = self.factors, (of_a, of_b)
        some, others = (torch.where(x > 0, of, 0) for x, of in ((a, some), (b, others)))
        total = (a * some) @ b + a @ (b * others)
        return torch.where(self.possible, total / torch.where(self.possible, self.product, 1), 0)


class _ZeroIsMinusInfinity:
    """For semirings of logarithms. (torch-struct's zero is -1e5.)"""

    zero = -torch.inf

    @staticmethod
    def zero_(xs: Tensor) -> Tensor:
        return xs.fill_(-torch.inf)


class Log(_ZeroIsMinusInfinity, torch_struct.LogSemiring):
    """(logsumexp, +, -inf, 0). Derivatives are posteriors."""

    products_fit = True

    @staticmethod
    def sum(xs: Tensor, dim: int = -1) -> Tensor:
        return logsumexp(xs.movedim(dim, -1))

    @staticmethod
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        scaled = _Scaled.of(a, b)
        return _one_by_one(Log, a, b) if scaled is None else scaled.log_sum


class Max(_ZeroIsMinusInfinity, torch_struct.MaxSemiring):
    """(max, +, -inf, 0). Derivatives mark one best derivation."""

    @staticmethod
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        """The same, with derivatives by the place of the largest. (torch-struct's fill all that was compared.)"""
        if not torch.is_grad_enabled():  # places, which take most of the time, are not asked for
            return (a.unsqueeze(-2) + b.mT.unsqueeze(-3)).amax(-1)
        product: Tensor = _MaxProduct.apply(a, b)
        return product


class _MaxProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        largest, place = (a.unsqueeze(-2) + b.mT.unsqueeze(-3)).max(-1)
        ctx.save_for_backward(place)
        ctx.shapes = a.shape, b.shape
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (place,), (of_a, of_b) = ctx.saved_tensors, ctx.shapes
        by_a = by_b = None
        if ctx.needs_input_grad[0]:
            by_a = gradient.new_zeros(*gradient.shape[:-1], of_a[-1]).scatter_add(-1, place, gradient)
            by_a = by_a.sum_to_size(of_a)
        if ctx.needs_input_grad[1]:
            by_b = gradient.new_zeros(*gradient.mT.shape[:-1], of_b[-2]).scatter_add(-1, place.mT, gradient.mT)
            by_b = by_b.mT.sum_to_size(of_b)
        return by_a, by_b


def KMax(k: int) -> Any:  # noqa: N802 -- a class for each k, as in torch-struct
    """The k largest, largest first; -inf where there are fewer. The derivative of each marks its derivation."""

    class KMax(_ZeroIsMinusInfinity, torch_struct.KMaxSemiring(k)):  # type: ignore[misc]
        pass

    return KMax


class Sampled(torch_struct.SampledSemiring):
    """(logsumexp, +, -inf, 0). Derivatives mark a derivation drawn at random, another one each time they are taken.

    torch-struct's draws from sums without possible terms too, which raises an error.
    """

    zero_ = staticmethod(_ZeroIsMinusInfinity.zero_)

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def sum(self, xs: Tensor, dim: int = -1) -> Tensor:
        total: Tensor = _DrawnSum.apply(xs.movedim(dim, -1), self.generator)
        return total

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.sum(self.mul(a.unsqueeze(-2), b.mT.unsqueeze(-3)))


class _DrawnSum(torch.autograd.Function):
    """Log-sum-exp whose gradient goes to one term, drawn with its share of the sum as its probability."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.generator = generator
        return logsumexp(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        uniform = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=ctx.generator)
        drawn = (x - (-uniform.log()).log()).argmax(-1, keepdim=True)  # the largest of Gumbel-perturbed terms
        return torch.zeros_like(x).scatter(-1, drawn, gradient.unsqueeze(-1)), None


class Entropy(torch_struct.EntropySemiring):
    """(log p, entropy). torch-struct's has 0 * -inf in sums with impossible terms."""

    products_fit = True

    @staticmethod
    def zero_(xs: Tensor) -> Tensor:
        return _fill(xs, -torch.inf, 0)

    @staticmethod
    def sum(xs: Tensor, dim: int = -1) -> Tensor:
        log_p, entropy = xs.movedim(dim, -1).unbind(0)
        total, log_share = log_shares(log_p)
        share = torch.where(log_p != -torch.inf, log_share.exp(), 0)
        return torch.stack([total, (share * (entropy - log_share)).sum(-1)])

    @staticmethod
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        scaled = _Scaled.of(a[0], b[0])
        if scaled is None:
            return _one_by_one(Entropy, a, b)
        entropy = scaled.expected(a[1] - scaled.logs[0], b[1] - scaled.logs[1]) + scaled.log_of_product
        return torch.stack([scaled.log_sum, entropy])


class CrossEntropy(torch_struct.CrossEntropySemiring):
    """(log p, log q, - sum p log q); infinite where q is 0 and p is not. The mending is that of `Entropy`."""

    products_fit = True

    @staticmethod
    def zero_(xs: Tensor) -> Tensor:
        return _fill(xs, -torch.inf, -torch.inf, 0)

    @staticmethod
    def sum(xs: Tensor, dim: int = -1) -> Tensor:
        return _sum_of_two(xs.movedim(dim, -1), 0.0)

    @staticmethod
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return _product_of_two(CrossEntropy, a, b, 0.0)


class KLDivergence(torch_struct.KLDivergenceSemiring):
    """(log p, log q, sum p log (p / q)); infinite where q is 0 and p is not. The mending is that of `Entropy`."""

    products_fit = True

    zero_ = staticmethod(CrossEntropy.zero_)

    @staticmethod
    def sum(xs: Tensor, dim: int = -1) -> Tensor:
        return _sum_of_two(xs.movedim(dim, -1), 1.0)

    @staticmethod
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return _product_of_two(KLDivergence, a, b, 1.0)


def _sum_of_two(xs: Tensor, of_p: float) -> Tensor:
    """Expectations under p of what a term was worth, less log q's share of it, plus `of_p` times log p's."""
    log_p, log_q, worth = xs.unbind(0)
    (total_p, share_p), (total_q, share_q) = log_shares(log_p), log_shares(log_q)
    possible = log_p != -torch.inf
    share_q = torch.where(log_q != -torch.inf, share_q, -torch.inf)
    worth = torch.where(possible, share_p.exp() * (worth - share_q + of_p * share_p), 0)
    return torch.stack([total_p, total_q, worth.sum(-1)])


def _product_of_two(semiring: Any, a: Tensor, b: Tensor, of_p: float) -> Tensor:
    p, q = _Scaled.of(a[0], b[0]), _Scaled.of(a[1], b[1])
    lost = any(bool(((x[0] > -torch.inf) & (x[1] == -torch.inf)).any()) for x in (a, b))  # q is 0 and p is not
    if p is None or q is None or lost:
        return _one_by_one(semiring, a, b)
    of_a, of_b = (x[2] - q_log + of_p * p_log for x, q_log, p_log in zip((a, b), q.logs, p.logs, strict=True))
    worth = p.expected(of_a, of_b) + q.log_of_product - of_p * p.log_of_product
    return torch.stack([p.log_sum, q.log_sum, torch.where(p.possible, worth, 0)])


class Signed:
    """Real numbers x = s e^l, s being -1, 0 or 1: (s, l). The user gives x and asks for log |x|.

    l is a constant to the derivative, so that x is linear in s: first and second derivatives are those of ordinary
    numbers, by entries that are zero too (but for derivatives beyond e^40, in float64 e^340, which are cut off there).
    """

    @staticmethod
    def size() -> int:
        return 2

    @staticmethod
    def convert(potentials: Tensor) -> Tensor:
        return Signed._scaled(potentials, torch.zeros_like(potentials))

    @staticmethod
    def unconvert(potentials: Tensor) -> Tensor:
        s, log = potentials.unbind(0)
        possible = s != 0
        return torch.where(
            possible, torch.where(possible, s, 1).abs().log() + torch.where(possible, log, 0), -torch.inf
        )

    @staticmethod
    def mul(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a[0] * b[0], a[1] + b[1]])

    @staticmethod
    def sum(xs: Tensor, dim: int = -1) -> Tensor:
        s, log = xs.movedim(dim, -1).unbind(0)
        log = log.detach()
        largest, of_zeros = torch.where(s != 0, log, -torch.inf).amax(-1), log.amax(-1)
        largest = torch.where(largest > -torch.inf, largest, torch.where(of_zeros > -torch.inf, of_zeros, 0))
        share = (log - largest.unsqueeze(-1)).clamp(max=LARGEST[s.dtype]).exp()
        return Signed._scaled((s * share).sum(-1), largest)

    @staticmethod
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return Signed.sum(Signed.mul(a.unsqueeze(-2), b.mT.unsqueeze(-3)))

    @staticmethod
    def zero_(xs: Tensor) -> Tensor:
        return _fill(xs, 0, -torch.inf)

    @staticmethod
    def one_(xs: Tensor) -> Tensor:
        return _fill(xs, 1, 0)

    @staticmethod
    def _scaled(x: Tensor, log: Tensor) -> Tensor:
        """x e^log, x not being -1, 0 or 1."""
        size = torch.where(x != 0, x, 1).detach().abs()
        return torch.stack([x / size, log.detach() + size.log()])


def _fill(xs: Tensor, *values: float) -> Tensor:
    for part, value in zip(xs, values, strict=True):
        part.fill_(value)
    return xs


def safe_log(x: Tensor) -> Tensor:
    """log x, -inf at zero with gradient zero there; not-a-number stays what it is."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).log(), torch.where(x.isnan(), x, -torch.inf))


def require_nonnegative(tensors: Sequence[Tensor], what: str) -> None:
    """What works on logarithms cannot serve signed parameters."""
    if any(bool((tensor < 0).any()) for tensor in tensors):
        raise InputError(f"{what} needs non-negative parameters, and this grammar has negative ones.")
