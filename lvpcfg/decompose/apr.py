"""CP-APR by multiplicative updates (Chi & Kolda 2012) of the sparse tensor of all rule counts of a grammar.

With B = A diag(lambda) of one mode, and for each nonzero z the product Pi[z, rho] of the other two modes,

    Phi = scatter(x_z / (B Pi^T)_z * Pi)        B <- B * Phi

lowers the Kullback-Leibler divergence of the model from the counts. It is EM with rho as a latent class, so that at a
fixed point the model has all three margins of the counts. The last step is an update of the parent mode, after which
sum_rho lambda_rho A_a,rho is how often a is rewritten by binary rules, but for rounding. So

    u_rho,a = lambda_rho A_a,rho / count(a)

is normalised if the grammar is: row sums are exact. The margins of the children, and with them how often each state
is expected, are kept only as far as the tolerance goes: the fitted grammar is tight where the counts come from a tight
grammar and the tolerance is small. A sweep is O(nonzeros * rank).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg.decompose.cover import cover
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.decompose.options import APR_STARTS
from lvpcfg.errors import InputError, expect
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar

PARENT, LEFT, RIGHT = range(3)
INNER = 10  # updates of one mode in a sweep, at the most
KAPPA, ZERO = 0.01, 1e-10  # KAPPA is added to a factor below ZERO that the KKT conditions do not allow to be zero
NOISE = 0.1  # the share of random numbers in a start from the cover
LANES = 1 << 18  # nonzeros x rank at once on a CPU: what its cache holds

Progress = Callable[[int, float, float], object]  # sweep, divergence after it, violation before it


@dataclass(frozen=True, eq=False)
class Fit:
    factors: Factors  # of counts: v and w are distributions, u has the weight of the term
    divergence: float  # sum x log(x / model) - x + model
    violation: float  # max |min(B, 1 - Phi)|, at the last sweep
    sweeps: int


def expected_counts(grammar: Grammar) -> Float64[Tensor, "interminal_states states states"]:
    """How often each binary rule between states is used in a tree, as a sparse tensor."""
    rules = rule_tensor(grammar)
    values = rules.values().double() * expected_states(grammar).double()[rules.indices()[PARENT]]
    return torch.sparse_coo_tensor(rules.indices(), values, rules.shape, check_invariants=True).coalesce()


def conditional(factors: Factors, counts: Float[Tensor, "interminal_states"]) -> Factors:
    """Probabilities from counts: u over count(a), how often a is rewritten, by a binary rule or any other."""
    return Factors(torch.where(counts > 0, factors.u / counts, 0), factors.v, factors.w)


def apr(
    counts: Float[Tensor, "parents lefts rights"],
    rank: int,
    sweeps: int = 100,
    tolerance: float = 1e-4,
    start: str = "cover",
    starts: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """The best of the fits from `starts` starts. `counts` is sparse and has no negative value."""
    expect("start", start, tuple(STARTS))
    counts = _checked(counts)
    generator = torch.Generator().manual_seed(seed)
    fits = (
        apr_from(STARTS[start](counts, rank, generator), counts, sweeps, tolerance, progress) for _ in range(starts)
    )
    return min(fits, key=lambda fit: fit.divergence)


def random_start(counts: Float[Tensor, "parents lefts rights"], rank: int, generator: torch.Generator) -> Factors:
    """Uniform, as in Chi & Kolda; drawn on the CPU, so that it is the same on every device."""
    u, v, w = (torch.rand(rank, size, generator=generator, dtype=torch.float64).to(counts) for size in counts.shape)
    return Factors(u, v, w)


def cover_start(counts: Float[Tensor, "parents lefts rights"], rank: int, generator: torch.Generator) -> Factors:
    """The largest terms of the exact cover, with noise: fits from there are far better than from a random start."""
    exact = cover(counts)
    factors, noise = (exact.u, exact.v, exact.w), random_start(counts, rank, generator)
    masses = [factor.sum(1) for factor in factors]
    weight = masses[0] * masses[1] * masses[2]
    largest = weight.argsort(descending=True)[torch.arange(rank, device=weight.device) % exact.rank]
    u, v, w = (
        (1 - NOISE) * factor[largest] / mass[largest].unsqueeze(1) + NOISE * random / random.sum(1, keepdim=True)
        for factor, mass, random in zip(factors, masses, (noise.u, noise.v, noise.w), strict=True)
    )
    return Factors(u * weight[largest].unsqueeze(1), v, w)


STARTS = dict(zip(APR_STARTS, (cover_start, random_start), strict=True))


def apr_from(
    start: Factors,
    counts: Float[Tensor, "parents lefts rights"],
    sweeps: int = 100,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
) -> Fit:
    """Sweeps over left, right and parent until no mode violates the KKT conditions by `tolerance` or more.

    An update of the parents makes their sums those of the counts. Where the last sweep had nothing to update there,
    one more update of the parents follows, so that row sums are exact.
    """
    counts = _checked(counts)
    model = _Model(start, counts)
    violation, sweep = float("inf"), 0
    while violation >= tolerance and sweep < sweeps:
        violation = max(model.update(mode, tolerance) for mode in (LEFT, RIGHT, PARENT))
        sweep += 1
        if progress is not None:
            progress(sweep, model.divergence(), violation)
    if model.skipped:
        model.update(PARENT, 0.0)
    return Fit(model.factors(), model.divergence(), violation, sweep)


def _checked(counts: Tensor) -> Tensor:
    counts = counts.detach().coalesce()
    if not bool((counts.values() >= 0).all()):
        raise InputError(f"expected counts, found {float(counts.values().min()):g} among them.")
    if not bool(counts.values().any()):
        raise InputError("expected counts of binary rules, found none.")
    return counts


@dataclass(frozen=True)
class _Chunk:
    """The nonzeros of a few neighbouring rows of a mode."""

    rows: slice
    row: Int64[Tensor, "nonzeros"]  # counted from the first of the rows
    others: tuple[Int64[Tensor, "nonzeros"], Int64[Tensor, "nonzeros"]]  # indices in the other two modes
    x: Float[Tensor, "nonzeros"]

    def product(
        self, left: Float[Tensor, "lefts rank"], right: Float[Tensor, "rights rank"]
    ) -> Float[Tensor, "nonzeros rank"]:
        """Pi"""
        return left[self.others[0]] * right[self.others[1]]

    def model(self, b: Float[Tensor, "rows rank"], pi: Float[Tensor, "nonzeros rank"]) -> Float[Tensor, "nonzeros"]:
        """(B Pi^T)_z"""
        return torch.linalg.vecdot(b[self.row], pi)

    def scatter(
        self, values: Float[Tensor, "nonzeros"], pi: Float[Tensor, "nonzeros rank"]
    ) -> Float[Tensor, "rows rank"]:
        """The sum of value_z Pi[z] over the nonzeros of each row; a sparse product adds up without a copy."""
        index = torch.stack([self.row, torch.arange(len(values), device=values.device)])
        shape = (self.rows.stop - self.rows.start, len(values))
        return torch.sparse_coo_tensor(index, values, shape, is_coalesced=True, check_invariants=False) @ pi


class _Model:
    def __init__(self, start: Factors, counts: Tensor) -> None:
        given = [factor.T.to(counts.dtype) for factor in (start.u, start.v, start.w)]  # [size, rank]
        sums = [factor.sum(0) for factor in given]
        self.weight = sums[0] * sums[1] * sums[2]  # lambda
        self.a = [_over(factor, total) for factor, total in zip(given, sums, strict=True)]
        self.phi = [torch.zeros_like(factor) for factor in given]
        self.skipped = False  # whether the last update changed nothing in some rows
        self.floor = torch.finfo(counts.dtype).tiny ** 0.5  # in place of a model that is zero where a count is not
        nonzero = counts.values() > 0
        index, self.x = counts.indices()[:, nonzero], counts.values()[nonzero]
        self.chunks = [_chunks(index, self.x, mode, len(self.a[mode]), start.rank) for mode in range(3)]

    def update(self, mode: int, tolerance: float) -> float:
        """Updates one mode; returns by how much it violated the KKT conditions before."""
        left, right = (self.a[other] for other in range(3) if other != mode)
        b, worst, self.skipped = torch.empty_like(self.a[mode]), 0.0, False
        for chunk in self.chunks[mode]:
            pi = chunk.product(left, right)
            a, phi = self.a[mode][chunk.rows], self.phi[mode][chunk.rows]
            now = self.raised(chunk, pi, a, (a < ZERO) & (phi > 1))
            for inner in range(INNER):
                phi = chunk.scatter(chunk.x / chunk.model(now, pi).clamp_min(self.floor), pi)
                violation = float(torch.minimum(now, 1 - phi).abs().max())
                worst = worst if inner else max(worst, violation)
                if violation < tolerance:
                    self.skipped |= not inner
                    break
                now = now * phi
            b[chunk.rows], self.phi[mode][chunk.rows] = now, phi
        self.weight = b.sum(0)
        self.a[mode] = _over(b, self.weight)
        return worst

    def raised(self, chunk: _Chunk, pi: Tensor, a: Tensor, zeros: Tensor) -> Tensor:
        """B with `zeros` raised by kappa * lambda, or by less, so far that no row's divergence rises."""
        b, kappa = a * self.weight, KAPPA
        if not bool(zeros.any()):
            return b
        before = self.objective(chunk, b, pi)
        while kappa > ZERO and bool(zeros.any()):
            higher = torch.where(zeros, b + kappa * self.weight, b)
            better = (self.objective(chunk, higher, pi) <= before).unsqueeze(1)
            b, zeros, kappa = torch.where(better, higher, b), zeros & ~better, kappa / 10
        return b

    def objective(
        self, chunk: _Chunk, b: Float[Tensor, "rows rank"], pi: Float[Tensor, "nonzeros rank"]
    ) -> Float[Tensor, "rows"]:
        """The divergence of each row but for a constant."""
        logs = chunk.x * chunk.model(b, pi).log()
        return b.sum(1).index_add(0, chunk.row, logs, alpha=-1)

    def divergence(self) -> float:
        b = self.a[PARENT] * self.weight
        parts = [
            self.objective(chunk, b[chunk.rows], chunk.product(self.a[LEFT], self.a[RIGHT])).double().sum()
            for chunk in self.chunks[PARENT]
        ]
        x = self.x.double()
        return float(torch.stack(parts).sum() + (x * x.log() - x).sum())

    def factors(self) -> Factors:
        return Factors((self.a[PARENT] * self.weight).T, self.a[LEFT].T, self.a[RIGHT].T)


def _over(b: Tensor, weight: Tensor) -> Tensor:
    """Columns that add up to 1; those of terms that have become zero stay zero."""
    return torch.where(weight > 0, b / weight, 0)


def _chunks(
    index: Int64[Tensor, "3 nonzeros"], x: Float[Tensor, "nonzeros"], mode: int, size: int, rank: int
) -> list[_Chunk]:
    """The nonzeros sorted by their rows of a mode, in chunks of full rows that fit into the cache."""
    order = index[mode].argsort(stable=True)
    index, x = index[:, order], x[order]
    begin = torch.searchsorted(index[mode], torch.arange(size + 1, device=x.device)).tolist()
    most = max(1, (LANES if x.device.type == "cpu" else LANES << 7) // rank)
    others = [other for other in range(3) if other != mode]
    chunks, first = [], 0
    for row in range(1, size + 1):
        if row == size or begin[row + 1] - begin[first] > most:
            span = slice(begin[first], begin[row])
            left, right = (index[other, span].contiguous() for other in others)
            chunks.append(_Chunk(slice(first, row), index[mode, span] - first, (left, right), x[span]))
            first = row
    return chunks
