"""Least-squares CP of batches of tensors."""

from itertools import permutations

import pytest
import tensorly
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorly.decomposition import parafac
from torch import Tensor

from lvpcfg import InputError
from lvpcfg.decompose import als as module
from lvpcfg.decompose.als import als
from lvpcfg.grammar.factors import Factors


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(batch: int, rank: int, *sizes: int, seed: int = 0) -> Factors:
    return Factors(*(random(batch, rank, size, seed=seed + place) for place, size in enumerate(sizes)))


def norms(tensors: Tensor) -> Tensor:
    return tensors.flatten(1).double().norm(dim=1)


def finite(fit: module.Fit) -> bool:
    parts = (fit.factors.u, fit.factors.v, fit.factors.w, fit.error)
    return all(bool(part.isfinite().all()) for part in parts)


def congruence(found: Factors, true: Factors) -> float:
    """The least cosine between terms, over the best matching of those of one tensor; 1 if they are the same."""
    cosines = torch.ones(())
    for mine, yours in zip((found.u, found.v, found.w), (true.u, true.v, true.w), strict=True):
        unit = (torch.nn.functional.normalize(rows[0], dim=1) for rows in (mine, yours))
        cosines = cosines * torch.einsum("ix,jx->ij", *unit)
    return max(float(cosines[list(order), range(true.rank)].min()) for order in permutations(range(true.rank)))


@pytest.mark.parametrize("start", ["hosvd", "random"])
def test_finds_planted_factors(start):
    true = planted(1, 3, 6, 5, 7)
    fit = als(true.tensor(), 3, tolerance=1e-6, start=start, restarts=2)
    assert fit.error[0] < 1e-7 * norms(true.tensor())[0]
    assert congruence(fit.factors, true) > 1 - 1e-9
    for rows in (fit.factors.v, fit.factors.w):
        assert torch.allclose(rows.norm(dim=2), torch.ones(1, 3, dtype=torch.float64))


def test_finds_planted_nonnegative_factors():
    true = planted(1, 3, 6, 5, 7)
    true = Factors(*(rows.clamp_min(0) for rows in (true.u, true.v, true.w)))
    fit = als(true.tensor(), 3, iterations=1000, tolerance=1e-6, restarts=2, nonnegative=True)
    assert fit.error[0] < 1e-5 * norms(true.tensor())[0]
    assert congruence(fit.factors, true) > 1 - 1e-5


def test_nonnegative_factors_of_signed_tensors():
    tensors = random(5, 4, 6, 5)
    fit = als(tensors, 3, nonnegative=True)
    assert all(bool((rows >= 0).all()) for rows in (fit.factors.u, fit.factors.v, fit.factors.w))
    assert any(bool((rows == 0).any()) for rows in (fit.factors.u, fit.factors.v, fit.factors.w))
    assert bool((als(tensors, 3).error < fit.error).all())
    assert bool((fit.error < norms(tensors)).all())


def test_fits_as_well_as_tensorly_from_the_same_start(monkeypatch):
    """Where the least error is unique: tensors near one of low rank."""
    tensors = planted(6, 3, 8, 6, 7).tensor() + 0.1 * random(6, 8, 6, 7, seed=9)
    monkeypatch.setattr(module, "NOISE", 1e-12)
    fit = als(tensors, 3, tolerance=1e-6)
    for tensor, error in zip(tensors, fit.error, strict=True):
        peer = parafac(tensor.numpy(), 3, n_iter_max=2000, init="svd", tol=1e-12)
        expected = tensorly.norm(tensor.numpy() - tensorly.cp_to_tensor(peer))
        assert float(error) == pytest.approx(expected, rel=1e-5)


def test_one_sweep_is_that_of_tensorly(monkeypatch):
    """The same singular vectors, the same order of the modes, the same equations."""
    tensors = random(1, 5, 6, 4)
    monkeypatch.setattr(module, "NOISE", 1e-12)
    fit = als(tensors, 3, iterations=1, steps=0)
    peer = parafac(tensors[0].numpy(), 3, n_iter_max=1, init="svd", tol=0)
    assert int(fit.iterations) == 1
    assert torch.allclose(fit.factors.tensor()[0], torch.from_numpy(tensorly.cp_to_tensor(peer)), atol=1e-9)


sizes = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(
    sizes, sizes, sizes, st.integers(1, 7), st.integers(0, 3), st.booleans(), st.sampled_from(["float32", "float64"])
)
def test_the_error_is_that_of_the_factors(x, y, z, rank, seed, nonnegative, dtype):
    tensors = random(3, x, y, z, seed=seed).to(getattr(torch, dtype))
    fit = als(tensors, rank, iterations=20, nonnegative=nonnegative, seed=seed)
    assert finite(fit)
    assert fit.factors.u.dtype == tensors.dtype
    assert [rows.shape for rows in (fit.factors.u, fit.factors.v, fit.factors.w)] == [(3, rank, n) for n in (x, y, z)]
    u, v, w = fit.factors.u.double(), fit.factors.v.double(), fit.factors.w.double()
    written = (u[:, :, :, None, None] * v[:, :, None, :, None] * w[:, :, None, None, :]).sum(1)
    assert torch.allclose(fit.error, norms(tensors.double() - written), rtol=1e-9, atol=1e-14)
    assert bool((fit.error <= norms(tensors) * (1 + 1e-6)).all())


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 4, 5), (4, 1, 5), (4, 5, 1), (1, 1, 1)])
def test_matrices_are_decomposed_exactly(sizes):
    tensors = random(4, *sizes)
    fit = als(tensors, min(5, max(sizes)), tolerance=1e-4)
    assert bool((fit.error < 1e-6 * norms(tensors)).all())


def test_errors_far_below_the_tensor_are_not_lost():
    """By ||T||^2 - 2 <T, T^> + ||T^||^2 nothing below 1e-8 could be seen."""
    tensors = planted(3, 1, 4, 5, 6).tensor() + 1e-11 * random(3, 4, 5, 6, seed=7)
    fit = als(tensors, 1)
    assert torch.allclose(fit.error, norms(tensors - fit.factors.tensor()), rtol=1e-3)
    assert bool(((fit.error > 5e-11) & (fit.error < 2e-10)).all())


def test_a_batch_is_its_tensors_one_by_one(monkeypatch):
    """Some converge at once and some never; pieces of three."""
    easy, hard = planted(4, 2, 5, 4, 6).tensor(), random(5, 5, 4, 6)
    tensors = torch.cat([easy, hard])[torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    monkeypatch.setattr(module, "CACHE", 3 * 5 * 4 * 6 * 8)
    done: list[int] = []
    fit = als(tensors, 2, iterations=100, restarts=1, progress=done.append)
    assert sum(done) == 18
    assert len(fit.iterations.unique()) > 2
    for place in range(9):
        one = als(tensors[place : place + 1], 2, iterations=100, restarts=1)
        assert int(one.iterations) == int(fit.iterations[place])
        assert torch.allclose(one.factors.tensor()[0], fit.factors.tensor()[place], atol=1e-8)
    order = torch.arange(8, -1, -1)
    assert torch.allclose(als(tensors[order], 2, iterations=100, restarts=1).error, fit.error[order], atol=1e-8)


@pytest.mark.parametrize("nonnegative", [False, True])
def test_zero_tensors_and_tensors_of_low_rank(nonnegative):
    tensors = torch.zeros(4, 5, 4, 3, dtype=torch.float64)
    tensors[1, 2, 1, 0] = 3
    tensors[2] = 1
    fit = als(tensors, 4, nonnegative=nonnegative)
    assert finite(fit)
    assert torch.equal(fit.factors.tensor()[[0, 3]], tensors[[0, 3]])
    assert torch.equal(fit.error[[0, 3]], torch.zeros(2, dtype=torch.float64))
    assert bool((fit.error[1:3] < 1e-6).all())


def test_a_term_that_starts_at_zero_is_not_lost():
    """The leading singular vectors of both sides are e_0, and T(e_0, e_0) = 0: least squares alone would stay there."""
    tensor = torch.zeros(1, 4, 3, 3, dtype=torch.float64)
    for parent, (left, right) in enumerate([(0, 1), (0, 2), (1, 0), (2, 0)]):
        tensor[0, parent, left, right] = 2
    assert als(tensor, 1).error[0] < 3.5  # ||T|| is 4


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-30), ("float32", 1e30), ("float64", 1e-300)])
def test_the_scale_does_not_matter(dtype, scale):
    tensors = random(3, 4, 5, 4).to(getattr(torch, dtype))
    fit, scaled = als(tensors, 2), als(tensors * scale, 2)
    assert torch.allclose(scaled.error / scale, fit.error, rtol=1e-4)
    assert finite(scaled)
    both = torch.cat([tensors, tensors * scale])  # side by side
    assert torch.allclose(als(both, 2).error[3:] / scale, fit.error, rtol=1e-4)


def test_more_starts_are_never_worse_and_sometimes_better():
    tensors = random(12, 4, 4, 4)
    one, many = als(tensors, 3), als(tensors, 3, restarts=4)
    assert bool((many.error <= one.error).all())
    assert bool((many.error < 0.999 * one.error).any())


def test_what_cannot_be_decomposed():
    tensors = random(2, 3, 3, 3)
    with pytest.raises(InputError, match="3 x 3 x 3"):
        als(tensors[0], 2)
    with pytest.raises(InputError, match="int64"):
        als(tensors.long(), 2)
    with pytest.raises(InputError, match="rank is 0"):
        als(tensors, 0)
    with pytest.raises(InputError, match="hosvd or random"):
        als(tensors, 2, start="svd")
    tensors[1, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        als(tensors, 2)
    assert als(tensors[:0], 2).factors.u.shape == (0, 2, 3)


def test_terms_that_nearly_cancel_are_found():
    """Sweeps alone stop at errors from 1e-8 to 3e-7 of the tensors, which are sums of three nearly parallel terms."""
    parallel = planted(8, 1, 6, 5, 7)
    apart = planted(8, 3, 6, 5, 7, seed=3)
    tensors = Factors(parallel.u + 0.3 * apart.u, parallel.v + 0.3 * apart.v, parallel.w + 0.3 * apart.w).tensor()
    fit, sweeps = als(tensors, 3), als(tensors, 3, steps=0)
    assert bool((fit.error < 1e-12 * norms(tensors)).all())
    assert bool((fit.error < sweeps.error).all())
    assert bool((als(tensors, 3, nonnegative=True).factors.u >= 0).all())
