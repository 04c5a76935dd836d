"""CP (Kruskal) form, T = sum_rho u_rho v_rho w_rho: of one tensor, or of each of a batch of tensors of one shape."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Factors:
    """U, V, W with rows u_rho, v_rho, w_rho; the weight of a term is in its u."""

    u: Float[Tensor, "*batch rank x"]  # parent
    v: Float[Tensor, "*batch rank y"]  # left child
    w: Float[Tensor, "*batch rank z"]  # right child

    @property
    def rank(self) -> int:
        return self.u.shape[-2]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Factors":
        return Factors(function(self.u), function(self.v), function(self.w))

    def tensor(self) -> Float[Tensor, "*batch x y z"]:
        """T written out."""
        return torch.einsum("...rx,...ry,...rz->...xyz", self.u, self.v, self.w)

    def squared_norm(self) -> Float[Tensor, "*batch"]:
        """||T||_F^2, without writing T out."""
        grams = (factor @ factor.transpose(-1, -2) for factor in (self.u, self.v, self.w))
        product = torch.ones((), dtype=self.u.dtype, device=self.u.device)
        for gram in grams:
            product = product * gram
        return product.sum((-1, -2))
