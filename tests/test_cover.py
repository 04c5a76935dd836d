"""The exact fibre cover."""

import itertools

import pytest
import torch
from cases import RULES, make_grammar, of_grammar
from hypothesis import given, settings
from hypothesis import strategies as st

from lvpcfg import InputError, read_berkeley
from lvpcfg.decompose.cover import cover
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.grammar.expectations import rewrites, spectral_radius


def random_tensor(shape, density, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=dtype)
    return torch.where(torch.rand(shape, generator=generator) < density, values, 0)


def fewest(tensor):
    """The size of the smallest cover by fibres, from all subsets of the fibres."""
    entries = {place: 1 << number for number, place in enumerate(map(tuple, tensor.nonzero().tolist()))}
    masks = [
        sum(bit for place, bit in entries.items() if place[:mode] + place[mode + 1 :] == fixed)
        for mode in range(3)
        for fixed in itertools.product(*(range(size) for i, size in enumerate(tensor.shape) if i != mode))
    ]
    best = {0: 0}  # of each set of entries, the fewest fibres with that union
    for mask in masks:
        for union, number in list(best.items()):
            best[union | mask] = min(best.get(union | mask, len(masks)), number + 1)
    return best[sum(entries.values())]


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.integers(1, 7)] * 3), st.floats(0, 1), st.integers(0, 1000), st.booleans())
def test_is_exact_and_in_fibres(shape, density, seed, double):
    tensor = random_tensor(shape, density, seed, torch.float64 if double else torch.float32)
    factors = cover(tensor.to_sparse())
    assert torch.equal(factors.tensor(), tensor)
    assert factors.u.dtype == tensor.dtype
    used = [(factor != 0).int() for factor in (factors.u, factors.v, factors.w)]
    terms = torch.einsum("rx,ry,rz->xyz", *used)
    assert torch.equal(terms, (tensor != 0).int())  # each entry in one term
    lengths = torch.stack([factor.sum(1) for factor in used], 1)
    assert bool((lengths.sort(1).values[:, :2] == 1).all())


def test_has_the_fewest_terms_but_for_a_few():
    tensors = [random_tensor((2, 3, 3) if seed % 2 else (2, 2, 4), 0.5, seed) for seed in range(20)]
    terms = [cover(tensor.to_sparse()).rank for tensor in tensors]
    smallest = [fewest(tensor) for tensor in tensors]
    assert all(fewer <= number for fewer, number in zip(smallest, terms, strict=True))
    assert sum(terms) <= sum(smallest) + 1


def test_zeros_and_repeated_entries_and_nothing():
    place, values = [[0, 0, 1], [1, 1, 0], [2, 2, 0]], [2.0, -0.5, 0.0]
    factors = cover(torch.sparse_coo_tensor(place, values, (2, 2, 3), check_invariants=True))
    assert factors.rank == 1
    assert factors.tensor()[0, 1, 2] == 1.5
    empty = cover(torch.zeros(2, 3, 4).to_sparse())
    assert [tuple(factor.shape) for factor in (empty.u, empty.v, empty.w)] == [(0, 2), (0, 3), (0, 4)]


def test_wants_a_sparse_tensor_of_order_three():
    with pytest.raises(InputError, match=r"strided \(2, 2, 2\)"):
        cover(torch.ones(2, 2, 2))
    with pytest.raises(InputError, match=r"sparse_coo \(2, 2\)"):
        cover(torch.ones(2, 2).to_sparse())


def test_rule_tensor_is_the_grammar_over_states():
    grammar = make_grammar((2, 5, 1, 3), RULES, unary=True, signed=False, seed=3)
    grammar.binary.values[::3] = 0
    tensor = rule_tensor(grammar)
    assert torch.equal(tensor.to_dense(), of_grammar(grammar).full.rules[0])
    assert bool((tensor.values() != 0).all())


@pytest.mark.parametrize("closed", [False, True])
def test_spectral_radius_is_that_of_the_rules(closed):
    grammar = make_grammar((2, 3, 1, 2), RULES, unary=True, signed=False, seed=4)
    object.__setattr__(grammar, "closed", closed)
    binary, unary = (matrix[:, :5] for matrix in rewrites(grammar))
    m = binary @ (torch.eye(5) + unary) if closed else binary + unary
    vector = torch.ones(5, dtype=m.dtype)
    for _ in range(200):
        vector = m @ vector / vector.norm()
    assert spectral_radius(grammar) == pytest.approx(float(vector.norm()), rel=1e-9)


@pytest.mark.treebank
@pytest.mark.parametrize(
    ("name", "rules", "fewest"), [("wsj_0", 3839, 542), ("wsj_1", 6617, 1019), ("wsj_2", 17228, 2105)]
)
def test_real_grammars(data, name, rules, fewest):
    """`fewest` is the optimum of the linear programme, so that no cover is smaller."""
    tensor = rule_tensor(read_berkeley(data / "grammars" / name, lexicon=False).grammar)
    factors = cover(tensor)
    assert tensor.values().numel() == rules
    assert fewest <= factors.rank <= 1.005 * fewest
    mass = (factors.u.sum(1) * factors.v.sum(1) * factors.w.sum(1)).sum()
    assert float(mass) == pytest.approx(float(tensor.values().sum()))
    assert float(factors.squared_norm()) == pytest.approx(float(tensor.values().square().sum()))
