"""An SVD of each slice of a tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lvpcfg import InputError, read_berkeley
from lvpcfg.decompose.svd import slice_svd


def sparse(x: int, y: int, z: int, share: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(x, y, z, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(x, y, z, generator=generator) < share, values, 0)


sizes = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, sizes, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0, 0.01, 0.1, 0.5]), st.integers(0, 9))
def test_keeps_the_largest_singular_values_of_all_slices(x, y, z, share, error, seed):
    tensor = sparse(x, y, z, share, seed)
    fit = slice_svd(tensor, error)
    again = slice_svd(tensor.to_sparse(), error)
    assert torch.equal(fit.factors.tensor(), again.factors.tensor())
    total = tensor.norm()
    assert float(fit.error) == pytest.approx(float((tensor - fit.factors.tensor()).norm()), abs=1e-12)
    assert float(fit.error) ** 2 <= error * float(total) ** 2 + 1e-12
    values = torch.linalg.svdvals(tensor).flatten().sort(descending=True).values.square()
    rest = values.sum() - torch.cat([values.new_zeros(1), values.cumsum(0)])  # after the first 0, 1, ... of them
    fewest = int((rest > error * values.sum() + 1e-12).sum())
    assert fit.factors.rank == fewest
    assert bool(((fit.factors.u != 0).sum(1) == 1).all())


def test_terms_stand_by_parent_and_by_length():
    fit = slice_svd(sparse(4, 5, 6, 1.0, 0), 0.05)
    parents = fit.factors.u.argmax(1)
    assert torch.equal(parents, parents.sort().values)
    for parent in range(4):
        lengths = fit.factors.u[parents == parent, parent]
        assert len(lengths) > 1
        assert torch.equal(lengths, lengths.sort(descending=True).values)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-30), ("float32", 1e30), ("float64", 1e-200)])
def test_the_scale_and_the_type_are_those_of_the_tensor(dtype, scale):
    tensor = sparse(3, 4, 5, 0.8, 1).to(getattr(torch, dtype))
    fit, scaled = slice_svd(tensor, 0.1), slice_svd(tensor * scale, 0.1)
    assert scaled.factors.u.dtype == tensor.dtype
    assert scaled.factors.rank == fit.factors.rank
    assert float(scaled.error) == pytest.approx(float(fit.error) * scale, rel=1e-5, abs=0)


def test_what_cannot_be_decomposed():
    tensor = sparse(2, 3, 4, 1.0, 0)
    with pytest.raises(InputError, match="3 x 4"):
        slice_svd(tensor[0], 0.1)
    with pytest.raises(InputError, match=r"error is 1\.5"):
        slice_svd(tensor, 1.5)


@pytest.mark.treebank
def test_the_treebank_grammar(data):
    grammar = read_berkeley(data / "grammars" / "wsj_0").grammar
    shape = (len(grammar.symbols.interminals), len(grammar.states), len(grammar.states))
    tensor = torch.sparse_coo_tensor(grammar.binary_rules.T, grammar.binary.values, shape, check_invariants=True)
    assert [slice_svd(tensor, error).factors.rank for error in (1e-2, 1e-3, 1e-4)] == [82, 133, 198]
