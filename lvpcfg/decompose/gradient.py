"""CP by gradient descent: U, V, W as parameters, fitted to a tensor here, or trained on log Z through the chart.

    squared   ||T - T^||_F^2 = ||T||^2 - 2 <T, T^> + ||T^||^2
    kl        sum T^ - sum_z x_z log T^_z, over the nonzero entries x_z of T (Chi & Kolda 2012), less its least value

Neither writes T^ out when T is sparse: ||T^||^2 comes from Gram matrices, sum T^ from the sums of rows.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lvpcfg.decompose.options import LOSSES, NONNEGATIVE, NORMALISED, OPTIMISERS, SIGNED, VALUES
from lvpcfg.errors import InputError, expect, show
from lvpcfg.grammar.factors import Factors


class CPGrammar(nn.Module):
    """A CP form with parameters U [rank, x], V [rank, y] and W [rank, z]; calling it returns `Factors`.

    With `values` "signed" the parameters are the factors, with "nonnegative" their square roots. With "normalised" they
    are logits of p(rho | a), p(b | rho) and p(c | rho), and T^[a] sums to `mass`: the share of binary rules in what a
    rewrites to, 1 unless given.
    """

    mass: Float[Tensor, "x"]

    def __init__(
        self,
        rank: int,
        shape: tuple[int, int, int],
        values: str = SIGNED,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mass: Float[Tensor, "x"] | None = None,
    ) -> None:
        super().__init__()
        expect("values", values, VALUES)
        self.values = values
        generator = torch.Generator().manual_seed(seed)

        def random(size: int) -> nn.Parameter:  # the same on every device
            start = torch.randn(rank, size, generator=generator, dtype=torch.float64)
            start = start if values == NORMALISED else start / size**0.5
            return nn.Parameter(start.to(device=device, dtype=dtype or torch.get_default_dtype()))

        self.u, self.v, self.w = map(random, shape)
        self.register_buffer("mass", torch.ones_like(self.u[0]) if mass is None else mass.detach().to(self.u))

    def forward(self) -> Factors:
        if self.values == NORMALISED:
            return Factors(self.mass * self.u.softmax(0), self.v.softmax(1), self.w.softmax(1))
        if self.values == NONNEGATIVE:
            return Factors(self.u.square(), self.v.square(), self.w.square())
        return Factors(self.u, self.v, self.w)

    def loss(self, target: Float[Tensor, "x y z"], name: str = "squared") -> Float[Tensor, ""]:
        """How far T^ is from a target, dense or sparse (COO), by the loss of this name; 0 where they are the same."""
        expect("loss", name, LOSSES)
        if name == "kl" and self.values == SIGNED:
            raise InputError(f"the loss is kl and values is {show(self.values)}: expected nonnegative or normalised.")
        factors: Factors = self()
        if name == "squared" and not target.is_sparse:
            return (target - factors.tensor()).square().sum()
        entries = (target if target.is_sparse else target.to_sparse()).coalesce()
        x, (a, b, c) = entries.values(), entries.indices()
        fitted = (factors.u[:, a] * factors.v[:, b] * factors.w[:, c]).sum(0)
        if name == "squared":
            return x.square().sum() - 2 * (x * fitted).sum() + factors.squared_norm()
        total = (factors.u.sum(1) * factors.v.sum(1) * factors.w.sum(1)).sum()
        return total - x.sum() + (x * (x / fitted).log()).sum()

    def fit(
        self,
        target: Tensor,
        loss: str = "squared",
        optimiser: str = "lbfgs",
        steps: int = 500,
        rate: float | None = None,
        progress: Callable[[int, Tensor], object] | None = None,
    ) -> Tensor:
        """Takes `steps` steps towards the target and returns the loss then; `progress` gets each step and its loss.

        The rate is 1 for L-BFGS, which searches along its steps, and 0.01 for Adam unless given.
        """
        expect("optimiser", optimiser, OPTIMISERS)
        expected = tuple(row.shape[1] for row in (self.u, self.v, self.w))
        if target.shape != expected:
            raise InputError(f"the tensor is {show(tuple(target.shape))}: the grammar expects {expected}.")
        target = target.coalesce() if target.is_sparse else target
        optimise: torch.optim.Optimizer
        if optimiser == "lbfgs":
            optimise = torch.optim.LBFGS(
                self.parameters(), rate or 1.0, max_iter=20, history_size=20, line_search_fn="strong_wolfe"
            )
        else:
            optimise = torch.optim.Adam(self.parameters(), rate or 0.01)

        def closure() -> Tensor:
            optimise.zero_grad()
            value = self.loss(target, loss)
            value.backward()
            return value

        for step in range(steps):
            value = optimise.step(closure)
            if progress is not None:
                progress(step, value.detach())
        return self.loss(target, loss).detach()
