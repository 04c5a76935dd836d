"""CP factors as parameters."""

import pytest
import torch
from torch import Tensor

from lvpcfg import InputError
from lvpcfg.chart.fast.build import cp_form, dense_form
from lvpcfg.chart.fast.partition import log_partition
from lvpcfg.decompose.gradient import LOSSES, VALUES, CPGrammar

SHAPE = (3, 4, 5)


def grammar(values: str, rank: int = 2, seed: int = 0) -> CPGrammar:
    return CPGrammar(rank, SHAPE, values, seed, dtype=torch.float64)


def target(values: str) -> Tensor:
    """What a grammar of these values can be fitted to without error."""
    return grammar(values, seed=5)().tensor().detach()


@pytest.mark.parametrize(
    ("values", "loss"), [(values, loss) for values in VALUES for loss in LOSSES if (values, loss) != ("signed", "kl")]
)
def test_the_losses_without_writing_the_tensor_out(values, loss):
    model = grammar(values)
    x = target(values)
    x[1, 2] = 0
    fitted = model().tensor().detach()
    if loss == "squared":
        expected = (x - fitted).square().sum()
    else:
        expected = (fitted - x + torch.xlogy(x, x) - torch.xlogy(x, fitted)).sum()
    for given in (x, x.to_sparse()):
        assert float(model.loss(given, loss).detach()) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("optimiser", ["adam", "lbfgs"])
@pytest.mark.parametrize(("values", "loss"), [("signed", "squared"), ("nonnegative", "kl"), ("normalised", "kl")])
def test_fits_what_can_be_fitted(values, loss, optimiser):
    x, model = target(values), grammar(values, rank=3)
    seen: list[float] = []
    steps, rate = (200, 0.05) if optimiser == "adam" else (20, None)
    last = model.fit(x.to_sparse(), loss, optimiser, steps, rate, lambda step, value: seen.append(float(value)))
    assert len(seen) == steps
    assert float(last) == pytest.approx(float(model.loss(x, loss).detach()), abs=1e-9)
    assert float(last) < 1e-2 * seen[0]
    assert float((model().tensor() - x).norm()) < (0.1 if optimiser == "adam" else 0.01) * float(x.norm())


def test_the_factors_have_the_values_asked_for():
    assert bool((grammar("signed")().u < 0).any())
    assert all(bool((rows >= 0).all()) for rows in vars(grammar("nonnegative")()).values())
    normalised = CPGrammar(3, SHAPE, "normalised", dtype=torch.float64)
    assert torch.allclose(normalised().tensor().sum((1, 2)), torch.ones(3, dtype=torch.float64))
    assert normalised().u.dtype == torch.float64
    assert CPGrammar(3, SHAPE).u.dtype == torch.float32


def test_what_a_parent_rewrites_to_by_binary_rules_can_be_given():
    mass = torch.tensor([0.2, 0.0, 0.9], dtype=torch.float64)
    model = CPGrammar(3, SHAPE, "normalised", dtype=torch.float64, mass=mass)
    model.fit((target("normalised") * mass.view(3, 1, 1)).to_sparse(), "kl", steps=2)
    assert torch.allclose(model().tensor().sum((1, 2)), mass)


def test_log_z_has_gradients_by_the_parameters():
    """Those of the same grammar written out as a dense tensor."""
    model = CPGrammar(4, (3, 5, 5), "normalised", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    root = torch.rand(5, generator=generator, dtype=torch.float64)
    leaf = torch.rand(6, 2, 2, generator=generator, dtype=torch.float64)  # [length, batch, preterminals]
    found = []
    for written in (False, True):
        factors = model()
        form = dense_form(root, factors.tensor()) if written else cp_form(root, factors.u, factors.v, factors.w)
        log_z, _ = log_partition(form, leaf)
        found.append((log_z, torch.autograd.grad(log_z.sum(), list(model.parameters()))))
    (one, gradients), (two, others) = found
    assert torch.allclose(one, two)
    for gradient, other in zip(gradients, others, strict=True):
        assert float(gradient.abs().max()) > 1e-3
        assert torch.allclose(gradient, other, atol=1e-10)


def test_gradient_descent_on_log_z():
    model = CPGrammar(4, (3, 5, 5), "normalised", dtype=torch.float64)
    root, leaf = torch.full((5,), 0.2, dtype=torch.float64), torch.rand(5, 3, 2, dtype=torch.float64)
    optimiser = torch.optim.Adam(model.parameters(), 0.1)
    seen = []
    for _ in range(15):
        factors = model()
        loss = -log_partition(cp_form(root, factors.u, factors.v, factors.w), leaf)[0].sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seen.append(float(loss))
    assert seen[-1] < seen[0] - 1


def test_losses_stay_on_the_device():
    model = CPGrammar(2, SHAPE, "nonnegative", device="meta")
    loss = model.loss(torch.ones(SHAPE, device="meta"))
    loss.backward()
    assert {loss.device.type, *(parameter.grad.device.type for parameter in model.parameters())} == {"meta"}


def test_what_cannot_be_fitted():
    with pytest.raises(InputError, match="nonnegative or normalised"):
        grammar("signed").loss(target("signed"), "kl")
    with pytest.raises(InputError, match=r"expects \(3, 4, 5\)"):
        grammar("signed").fit(torch.ones(3, 4, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="adam or lbfgs"):
        grammar("signed").fit(target("signed"), optimiser="sgd")
    with pytest.raises(InputError, match="signed, nonnegative or normalised"):
        grammar("positive")
