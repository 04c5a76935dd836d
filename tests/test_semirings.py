"""Semirings: their laws, torch-struct's where nothing is impossible, and zeros; sparse maps in each of them."""

import math

import pytest
import torch
import torch_struct
from hypothesis import given, settings
from hypothesis import strategies as st

from lvpcfg.chart.lanes import Map
from lvpcfg.chart.semirings import CrossEntropy, Entropy, KLDivergence, KMax, Log, Max, Sampled, Signed, ones, zeros

F64 = torch.float64
PAIRS = {
    "log": (Log, torch_struct.LogSemiring),
    "max": (Max, torch_struct.MaxSemiring),
    "3 best": (KMax(3), torch_struct.KMaxSemiring(3)),
    "sampled": (Sampled(), torch_struct.SampledSemiring),
    "entropy": (Entropy, torch_struct.EntropySemiring),
    "cross-entropy": (CrossEntropy, torch_struct.CrossEntropySemiring),
    "divergence": (KLDivergence, torch_struct.KLDivergenceSemiring),
}
SEMIRINGS = {**{name: mine for name, (mine, _) in PAIRS.items()}, "signed": Signed}
each = pytest.mark.parametrize("name", SEMIRINGS)


def random_values(name, *shape, seed=0, impossible=0.0):
    """What the user gives, some of it impossible; and the values of the semiring."""
    generator = torch.Generator().manual_seed(seed)
    lead = (2,) if name in ("cross-entropy", "divergence") else ()
    given = torch.randn(*lead, *shape, generator=generator, dtype=F64)
    none = torch.rand(*shape, generator=generator) < impossible
    given = given.masked_fill(none, 0.0 if name == "signed" else -math.inf)
    return given, SEMIRINGS[name].convert(given)


def same(name, x, y):
    """Equal, whatever belongs to what is impossible: the exponent of a signed zero, the entropy of no derivation."""
    if name == "signed":
        return torch.allclose(*(s * torch.where(s != 0, log, 0).exp() for s, log in (x, y)), atol=1e-12)
    possible = x[0] > -math.inf
    return torch.allclose(x[0], y[0], atol=1e-12) and torch.allclose(x[:, possible], y[:, possible], atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_where_nothing_is_impossible_they_are_torch_structs(name):
    mine, peer = PAIRS[name]
    given, x = random_values(name, 4, 5)
    _, y = random_values(name, 5, 3, seed=1)
    if name == "3 best":  # but for those of which there are fewer
        x, y = x.clone(), y.clone()
        x[1:], y[1:] = x[:1] - 1, y[:1] - 1
    else:
        assert torch.equal(x, peer.convert(given))
    assert torch.allclose(mine.sum(x), peer.sum(x))
    assert torch.allclose(mine.mul(x, x), peer.mul(x, x))
    assert torch.allclose(mine.matmul(x, y), peer.matmul(x, y))
    assert torch.equal(mine.unconvert(x), peer.unconvert(x))


@each
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), impossible=st.sampled_from([0.0, 0.5]))
def test_laws(name, seed, impossible):
    """Zero and one are neutral, sums and products are associative, products distribute over sums."""
    semiring = SEMIRINGS[name]
    x, y, z = (random_values(name, 6, seed=3 * seed + i, impossible=impossible)[1] for i in range(3))
    zero, one, mul = zeros(semiring, x, 6), ones(semiring, x, 6), semiring.mul

    def plus(a, b):
        return semiring.sum(torch.stack([a, b], -1))

    assert same(name, plus(x, zero), x)
    assert same(name, mul(x, one), x)
    assert same(name, mul(x, zero), zero)
    assert same(name, plus(plus(x, y), z), plus(x, plus(y, z)))
    assert same(name, mul(mul(x, y), z), mul(x, mul(y, z)))
    assert same(name, mul(plus(x, y), z), plus(mul(x, z), mul(y, z)))


@each
def test_sums_without_possible_terms_have_derivatives(name):
    """0 by terms that are impossible, and those of the others as if they were not there."""
    semiring = SEMIRINGS[name]
    given, _ = random_values(name, 3, 4)
    given[..., 1, :] = given[..., 2, 2:] = 0.0 if name == "signed" else -math.inf
    given.requires_grad_()
    total = semiring.sum(semiring.convert(given))
    assert total[0, 1] == (0 if name == "signed" else -math.inf)
    finite = torch.where(total.isfinite(), total, 0)[:, [0, 2]].sum()
    gradient = torch.autograd.grad(finite, given, create_graph=name != "sampled")[0]
    assert gradient.isfinite().all()
    assert not gradient[..., 1, :].any()
    if name != "signed":  # there a zero has a derivative
        assert not gradient[..., 2, 2:].any()
        some = given.detach()[..., 2, :2].clone().requires_grad_()
        if name != "sampled":
            alone = torch.autograd.grad(semiring.sum(semiring.convert(some)).sum(), some)[0]
            assert torch.allclose(gradient[..., 2, :2], alone, atol=1e-12)


@pytest.mark.parametrize("name", ["log", "entropy", "cross-entropy", "divergence", "signed"])
def test_derivatives(name):
    semiring = SEMIRINGS[name]
    given, _ = random_values(name, 2, 3)
    given[..., 1, 1] = 0.0 if name == "signed" else -30.0
    values = given.requires_grad_()

    def function(x):
        return semiring.unconvert(semiring.sum(semiring.mul(semiring.convert(x), semiring.convert(x.flip(-1)))))

    assert torch.autograd.gradcheck(function, [values])
    assert torch.autograd.gradgradcheck(function, [values])


def test_a_draw_is_one_of_the_terms_by_its_share():
    x = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=F64).log().expand(4000, 4).clone().requires_grad_()
    total = Sampled(torch.Generator().manual_seed(0)).sum(x)
    drawn = torch.autograd.grad(total.sum(), x)[0]
    assert torch.equal(drawn.sum(1), torch.ones(4000, dtype=F64))
    assert drawn.mean(0).tolist() == pytest.approx([0.5, 0.25, 0.25, 0.0], abs=0.03)
    assert not drawn[:, 3].any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=6), st.integers(-3, 3))
def test_signed_sums_beyond_floating_point(numbers, power):
    """Numbers times 1e300 to a power: the sum of what is left when that is divided out."""
    x = torch.tensor(numbers, dtype=F64)
    scale = torch.stack([torch.ones_like(x), torch.full_like(x, 690.0 * power)])
    sign, log = Signed.sum(Signed.mul(Signed.convert(x), scale))
    largest = max(map(abs, numbers)) or 1.0
    expected = math.fsum(one / largest for one in numbers)
    if abs(expected) > 1e-12:
        assert sign == math.copysign(1, expected)
        assert log.item() == pytest.approx(math.log(abs(expected)) + math.log(largest) + 690.0 * power, abs=1e-3)


class TestMaps:
    """Rows of 0, 1, 3, 5 and 17 entries, with places that are no entries, against the matrix."""

    ROWS, COLUMNS = 6, 20

    @pytest.fixture
    def places(self):
        generator = torch.Generator().manual_seed(0)
        lengths = (0, 1, 3, 5, 17, 1)
        places = [(r, c) for r, n in enumerate(lengths) for c in torch.randperm(20, generator=generator)[:n].tolist()]
        places += [(6, 0), (0, 20)]  # padding
        order = torch.randperm(len(places), generator=generator)
        return torch.tensor(places)[order].unbind(1)

    @pytest.mark.parametrize("batch", [False, True])
    @each
    def test_sparse_ones_are_dense_ones_with_zeros(self, name, places, batch):
        semiring, (rows, columns) = SEMIRINGS[name], places
        given, values = random_values(name, *([2] if batch else []), len(rows))
        x = random_values(name, 2, 3, self.COLUMNS, seed=1)[1]
        sparse = Map.sparse(rows, columns, given, (self.ROWS, self.COLUMNS)).change(semiring.convert)
        matrix = zeros(semiring, values, *([2] if batch else []), self.ROWS + 1, self.COLUMNS + 1)
        matrix[..., rows, columns] = values
        dense = Map(matrix[..., : self.ROWS, : self.COLUMNS])
        found, expected = sparse(semiring, x), dense(semiring, x)
        assert found.shape == (semiring.size(), 2, 3, self.ROWS)
        assert same(name, found, expected)
        assert (found[0, :, :, 0] == zeros(semiring, x, 1)[0]).all()  # a row without entries

    def test_no_entries_at_all(self):
        none = torch.zeros(0, dtype=torch.int64)
        sparse = Map.sparse(none, none, torch.zeros(0, dtype=F64), (2, 3)).change(Log.convert)
        assert torch.equal(sparse(Log, torch.zeros(1, 1, 1, 3, dtype=F64)), torch.full((1, 1, 1, 2), -math.inf).to(F64))


def test_a_zero_of_torch_structs_is_a_number():
    """Why it is mended: the two best of one tree of weight e^-200000 are that tree, and nothing."""
    log = torch.tensor([-2e5])
    best = [semiring.sum(semiring.convert(log)).tolist() for semiring in (torch_struct.KMaxSemiring(2), KMax(2))]
    assert best == [[-1e5, -2e5], [-2e5, -math.inf]]
