"""Least-squares CP of many tensors at once, by alternating least squares (Cohen & Collins 2012, section 5).

    min ||T - T^||_F,  T^ = sum_rho u_rho v_rho w_rho.  With V and W held fixed, U solves
    G U = M,  G = V V^T * W W^T [rank, rank],  M_rho = T(v_rho, w_rho)

and so for the other two; or, non-negative, one pass of HALS over the same equations (Cichocki & Phan 2009). The step
is the proximal one, (G + e I) U = M + e U_before: along the null space of G it stays where it is, and the solutions
are its fixed points whatever e is. Sweeps over U, V and W start ahead of where the last one ended, by Nesterov's
momentum, which begins anew for each tensor whose error rose (Mitchell, Ye & De Sterck 2020): a third of the sweeps.

Where terms nearly cancel, sweeps all but stop far above the least error. Damped Gauss-Newton steps over U, V and W at
once (Levenberg-Marquardt; for CP: Tomasi & Bro 2006) go on from there,

    (J^T J + mu I) d = J^T (T - T^),  J the derivative of T^ by all factors

unless factors are to be non-negative, or there are so many unknowns that more sweeps gain as much in less time.

Everything is computed in float64: G of nearly parallel terms can still be solved there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from lvpcfg.decompose.options import ALS_STARTS
from lvpcfg.errors import InputError, expect
from lvpcfg.grammar.factors import Factors

ROUND = 10  # sweeps between two computations of the errors
FEW = 5  # Gauss-Newton steps, which take longer, between two of them
DAMPING = 1e-2  # mu at first, times the error
UNKNOWNS = 128  # rank * (x + y + z) of tensors that Gauss-Newton steps are taken for, at the most
NOISE = 1e-2  # on singular vectors: a term whose T(v_rho, w_rho) is zero would stay zero for ever
EPSILON = torch.finfo(torch.float64).eps
CACHE = 1 << 21  # bytes of tensors that are swept over together on a CPU
MEMORY = 1 << 28  # the same on other devices

Progress = Callable[[int], object]


@dataclass(frozen=True, eq=False)
class Fit:
    factors: Factors  # of the batch; rows of v and w have length 1
    error: Float64[Tensor, "batch"]  # gamma = ||T - T^||_F
    iterations: Int64[Tensor, "batch"]  # sweeps from the start that was best


def als(
    tensors: Tensor,
    rank: int,
    iterations: int = 1000,
    tolerance: float = 1e-3,
    start: str = "hosvd",
    restarts: int = 0,
    nonnegative: bool = False,
    seed: int = 0,
    steps: int = 100,
    progress: Progress | None = None,
) -> Fit:
    """A CP form of each of a batch of tensors, [batch, x, y, z], in their floating-point type.

    A tensor is done when ten sweeps take less than a share `tolerance` off its error, or after `iterations` sweeps.
    The best of `start` and of `restarts` random starts is kept, and made better by Gauss-Newton steps, up to `steps`,
    while five of them take such a share off. `progress` is called with the numbers of tensors as they are done by
    sweeps, which sum to batch * (restarts + 1).
    """
    expect("start", start, ALS_STARTS)
    shape = " x ".join(map(str, tensors.shape))
    if tensors.ndim != 4 or not tensors.is_floating_point() or 0 in tensors.shape[1:]:
        raise InputError(f"the tensors are {shape} of {tensors.dtype}: expected batch x y z of real numbers.")
    if not bool(tensors.isfinite().all()):
        raise InputError(f"the tensors, {shape}, hold numbers that are not finite.")
    if rank < 1:
        raise InputError(f"the rank is {rank}: expected at least 1.")
    generator = torch.Generator().manual_seed(seed)
    problem = _Problem(tensors, rank, nonnegative)
    best = problem.descend(problem.start(start, generator), iterations, tolerance, progress)
    for _ in range(restarts):
        other = problem.descend(problem.start("random", generator), iterations, tolerance, progress)
        better = other.error < best.error
        best = _Descent(*(torch.where(_expanded(better, new), new, old) for new, old in zip(other, best, strict=True)))
    if not nonnegative and rank * sum(tensors.shape[1:]) <= UNKNOWNS:
        best = problem.finish(best, steps, tolerance)
    return problem.fit(best)


class _Descent(NamedTuple):
    rows: Float64[Tensor, "batch rank xyz"]  # u, v and w side by side
    error: Float64[Tensor, "batch"]
    sweeps: Int64[Tensor, "batch"]


class _Problem:
    """Tensors divided by their largest entries, so that their scale does not matter."""

    def __init__(self, tensors: Float[Tensor, "batch x y z"], rank: int, nonnegative: bool) -> None:
        self.tensors, self.rank, self.nonnegative = tensors, rank, nonnegative
        self.sizes = tensors.shape[1:]
        largest = torch.linalg.vector_norm(tensors, torch.inf, (1, 2, 3)).double()
        self.scale = torch.where(largest > 0, largest, 1)
        self.every = torch.arange(len(tensors), device=tensors.device)
        each = max(rank, tensors.shape[1]) * tensors.shape[2] * tensors.shape[3] * 8
        self.at_once = max(1, (CACHE if tensors.device.type == "cpu" else MEMORY) // each)

    def scaled(self, which: Int64[Tensor, "some"]) -> Float64[Tensor, "some x y z"]:
        return self.tensors[which] / _expanded(self.scale[which], self.tensors)

    def start(self, name: str, generator: torch.Generator) -> Float64[Tensor, "batch rank xyz"]:
        """u = 0, v and w of length 1; random numbers are the same for every tensor and on every device."""
        random = normalize(torch.randn(2, self.rank, max(self.sizes), generator=generator, dtype=torch.float64), dim=2)
        random = random.to(self.tensors.device)
        x, y, z = self.sizes
        rows = self.scale.new_zeros(len(self.tensors), self.rank, x + y + z)
        rows[:, :, x : x + y], rows[:, :, x + y :] = random[0, :, :y], random[1, :, :z]
        if name == "hosvd":
            for which in self.every.split(self.at_once):
                scaled = self.scaled(which)
                rows[which, : min(self.rank, y), x : x + y] += _leading(scaled.transpose(1, 2), self.rank) / NOISE
                rows[which, : min(self.rank, z), x + y :] += _leading(scaled.transpose(1, 3), self.rank) / NOISE
        if self.nonnegative:
            rows = rows.abs()
        return _balanced(*rows.split(self.sizes, 2))

    def descend(
        self, rows: Float64[Tensor, "batch rank xyz"], iterations: int, tolerance: float, progress: Progress | None
    ) -> _Descent:
        """Sweeps, round by round, over the tensors whose error still falls."""
        error = torch.cat([_length(self.scaled(which)) for which in self.every.split(self.at_once)])  # of T^ = 0
        sweeps = torch.zeros_like(self.every)
        state = _State(rows, rows.clone(), torch.ones_like(error), torch.zeros_like(error))
        going = self.every
        for begin in range(0, iterations, ROUND):
            end = min(begin + ROUND, iterations)
            still = []
            for which in going.split(self.at_once):
                scaled = self.scaled(which)
                new = _State(*(part[which] for part in state))
                for _ in range(begin, end):
                    new = _sweep(scaled, new, self.nonnegative)
                before, after = error[which], _error(scaled, *new.rows.split(self.sizes, 2))
                less = after < before
                better = which[less]
                for part, values in zip(state, new, strict=True):
                    part[better] = values[less]
                error[better], sweeps[better] = after[less], end
                still.append(which[after < (1 - tolerance) * before])
            if progress is not None:
                progress(len(going) - sum(map(len, still)))
            going = torch.cat(still)
            if not len(going):
                break
        if progress is not None:
            progress(len(going))
        return _Descent(state.rows, error, sweeps)

    def finish(self, best: _Descent, steps: int, tolerance: float) -> _Descent:
        """Gauss-Newton steps, round by round, over the tensors whose error still falls."""
        rows, error, damping = best.rows.clone(), best.error.clone(), DAMPING * best.error
        unknowns = self.rank * sum(self.sizes)
        at_once = max(1, (MEMORY >> 4) // (unknowns * unknowns * 8))
        going = self.every[error > 0]
        for begin in range(0, steps, FEW):
            still = []
            for which in going.split(at_once):
                scaled, before = self.scaled(which), error[which]
                state = _Damped(rows[which], before, damping[which])
                for _ in range(min(FEW, steps - begin)):
                    state = _gauss_newton(scaled, state)
                rows[which], error[which], damping[which] = state
                still.append(which[state.error < (1 - tolerance) * before])
            going = torch.cat([going[:0], *still])
        return _Descent(_balanced(*rows.split(self.sizes, 2)), error, best.sweeps)

    def fit(self, best: _Descent) -> Fit:
        """The fit of the tensors as they were given: at their scale, in their type."""
        rows = torch.where(best.rows > EPSILON, best.rows, 0) if self.nonnegative else best.rows
        u, v, w = rows.split(self.sizes, 2)
        u, v, w = (part.to(self.tensors.dtype) for part in (u * _expanded(self.scale, u), v, w))
        errors = []
        for which in self.every.split(self.at_once):
            scale = self.scale[which]
            left = u[which] / _expanded(scale, u)
            errors.append(scale * _error(self.scaled(which), left, v[which].double(), w[which].double()))
        return Fit(Factors(u, v, w), torch.cat(errors), best.sweeps)


class _State(NamedTuple):
    rows: Float64[Tensor, "batch rank xyz"]
    before: Float64[Tensor, "batch rank xyz"]  # the rows a sweep earlier
    time: Float64[Tensor, "batch"]  # t of Nesterov's sequence
    loss: Float64[Tensor, "batch"]  # ||T - T^||^2 - ||T||^2: cheap, but exact to seven digits of ||T|| only


def _sweep(tensors: Float64[Tensor, "batch x y z"], state: _State, nonnegative: bool) -> _State:
    """Solves for U, V and W once each; rows are scaled to length 1, except those of the factor to solve for next."""
    sizes = tensors.shape[1:]
    solve = _hals if nonnegative else _least_squares
    following = (1 + (1 + 4 * state.time.square()).sqrt()) / 2
    momentum = _expanded((state.time - 1) / following, state.rows)
    ahead = state.rows + momentum * (state.rows - state.before)
    if nonnegative:
        ahead = ahead.clamp_min(0)
    u, v, w = _balanced(*ahead.split(sizes, 2)).split(sizes, 2)

    slices = tensors.flatten(2)  # [batch, x, y z]
    pairs = (v.unsqueeze(3) * w.unsqueeze(2)).flatten(2)  # [batch, rank, y z]
    u = solve(_gram(v) * _gram(w), pairs @ slices.mT, u)
    u, v = _hand_on(u, v)
    projected = (u @ slices).unflatten(2, sizes[1:])  # [batch, rank, y, z]
    v = solve(_gram(u) * _gram(w), (projected @ w.unsqueeze(3)).squeeze(3), v)
    v, w = _hand_on(v, w)
    gram, right = _gram(u) * _gram(v), (v.unsqueeze(2) @ projected).squeeze(2)
    w = solve(gram, right, w)
    loss = (gram * _gram(w)).sum((1, 2)) - 2 * (right * w).sum((1, 2))
    w, u = _hand_on(w, u)

    fell = loss <= state.loss + 100 * EPSILON * loss.abs()
    rows = torch.where(_expanded(fell, ahead), torch.cat([u, v, w], 2), state.rows)
    return _State(rows, state.rows, torch.where(fell, following, 1), torch.where(fell, loss, state.loss))


class _Damped(NamedTuple):
    rows: Float64[Tensor, "batch rank xyz"]
    error: Float64[Tensor, "batch"]  # ||T - T^||
    damping: Float64[Tensor, "batch"]  # mu


def _gauss_newton(tensors: Float64[Tensor, "batch x y z"], state: _Damped) -> _Damped:
    """A step for each tensor whose error it lowers, and more damping for the others."""
    sizes = tensors.shape[1:]
    u, v, w = _even(*state.rows.split(sizes, 2))
    rows = torch.cat([u, v, w], 2)
    residual = tensors - Factors(u, v, w).tensor()
    slope = torch.cat(
        [
            torch.einsum("nxyz,nry,nrz->nrx", residual, v, w),
            torch.einsum("nxyz,nrx,nrz->nry", residual, u, w),
            torch.einsum("nxyz,nrx,nry->nrz", residual, u, v),
        ],
        2,
    )
    curvature = _curvature(u, v, w)
    curvature.diagonal(dim1=1, dim2=2).add_(state.damping.unsqueeze(1))
    root, failed = torch.linalg.cholesky_ex(curvature)
    step = torch.cholesky_solve(slope.flatten(1).unsqueeze(2), root).view_as(rows)
    error = _error(tensors, *(rows + step).split(sizes, 2))
    fell = (error < state.error) & (failed == 0)
    return _Damped(
        torch.where(_expanded(fell, rows), rows + step, rows),
        torch.where(fell, error, state.error),
        torch.where(fell, state.damping / 5, state.damping * 4),
    )


def _curvature(
    u: Float64[Tensor, "batch rank x"], v: Float64[Tensor, "batch rank y"], w: Float64[Tensor, "batch rank z"]
) -> Float64[Tensor, "batch rank*(x+y+z) rank*(x+y+z)"]:
    """J^T J, from blocks of two modes each.

    One mode: (V V^T * W W^T)_rho,sigma on the diagonal of (i, i). Two, as u_rho,i and v_sigma,j: the derivatives
    v_rho w_rho at i and u_sigma w_sigma at j meet in (W W^T)_rho,sigma u_sigma,i v_rho,j.
    """
    modes, grams = (u, v, w), tuple(map(_gram, (u, v, w)))
    blocks = []
    for one in range(3):
        row = []
        for other in range(3):
            if one == other:
                second, third = (grams[mode] for mode in range(3) if mode != one)
                identity = torch.eye(modes[one].shape[2], dtype=u.dtype, device=u.device)
                row.append(torch.einsum("nrs,ij->nrisj", second * third, identity))
            else:
                row.append(torch.einsum("nrs,nsi,nrj->nrisj", grams[3 - one - other], modes[one], modes[other]))
        blocks.append(torch.cat(row, 4))
    return torch.cat(blocks, 2).flatten(3, 4).flatten(1, 2)


def _even(u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    """The same terms, with rows of u, v and w that have one length."""
    lengths = [torch.linalg.vector_norm(rows, dim=2, keepdim=True).clamp_min(EPSILON**2) for rows in (u, v, w)]
    common = (lengths[0] * lengths[1] * lengths[2]) ** (1 / 3)
    return [rows / length * common for rows, length in zip((u, v, w), lengths, strict=True)]


def _least_squares(
    gram: Float64[Tensor, "batch rank rank"],
    right: Float64[Tensor, "batch rank size"],
    before: Float64[Tensor, "batch rank size"],
) -> Float64[Tensor, "batch rank size"]:
    """(G + e I) U = M + e U_before, where e is more than rounding can take off the eigenvalues of G."""
    e = 10 * gram.shape[1] * EPSILON
    root, _ = torch.linalg.cholesky_ex(gram + e * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device))
    return torch.cholesky_solve(right + e * before, root)


def _hals(
    gram: Float64[Tensor, "batch rank rank"],
    right: Float64[Tensor, "batch rank size"],
    before: Float64[Tensor, "batch rank size"],
) -> Float64[Tensor, "batch rank size"]:
    """u_rho <- [u_rho + M_rho - G_rho U]_+, one rho after the other, G_rho,rho being 1; no row becomes all zero."""
    rows = before.clone()
    for term in range(gram.shape[1]):
        change = right[:, term] - (gram[:, term : term + 1] @ rows).squeeze(1)
        rows[:, term] = (rows[:, term] + change).clamp_min(EPSILON**2)
    return rows


def _balanced(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The same terms, side by side, with rows of v and w that have length 1."""
    v, u = _hand_on(v, u)
    w, u = _hand_on(w, u)
    return torch.cat([u, v, w], 2)


def _hand_on(rows: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length 1, and the rows of the factor that takes their lengths."""
    length = torch.linalg.vector_norm(rows, dim=2, keepdim=True).clamp_min(EPSILON**2)
    return rows / length, following * length


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.mT


def _leading(tensors: Tensor, number: int) -> Tensor:
    """The leading left singular vectors of the unfolding [batch, size, the rest] of tensors, as rows."""
    unfolding = tensors.flatten(2)
    gram = unfolding @ unfolding.mT
    gram = torch.where(gram.abs() > EPSILON**2, gram, 0)  # eigh can fail on numbers that are further apart
    return torch.linalg.eigh(gram).eigenvectors.flip(2).mT[:, :number]


def _error(
    tensors: Float64[Tensor, "batch x y z"],
    u: Float64[Tensor, "batch rank x"],
    v: Float64[Tensor, "batch rank y"],
    w: Float64[Tensor, "batch rank z"],
) -> Float64[Tensor, "batch"]:
    """||T - T^||_F from the residuals, which may be far smaller than T."""
    slices = max(1, MEMORY // (tensors[:, 0].numel() * 8 + 1))
    parts = [
        _length(some - Factors(left, v, w).tensor())
        for some, left in zip(tensors.split(slices, 1), u.split(slices, 2), strict=True)
    ]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def _length(tensors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensors, dim=(1, 2, 3))


def _expanded(values: Tensor, like: Tensor) -> Tensor:
    """[batch] -> [batch, 1, ...]"""
    return values.view(-1, *[1] * (like.ndim - 1))
