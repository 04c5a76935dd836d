"""What packs the tensors of model folders, and what cannot be unpacked."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_model import resign

import lvpcfg
from lvpcfg.errors import InputError
from lvpcfg.grammar.packing import LEAST, PLACES, SPARSE, pack, unpack
from lvpcfg.grammar.reader import Reader


def returned(tensors):
    packed, lengths = pack(tensors)
    reader = Reader("the model cannot be used", {SPARSE: lengths}, packed)
    unpack(reader)
    return reader.tensors


@given(
    st.integers(LEAST - 2, LEAST + 20),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_what_is_packed_comes_back(length, share, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(length, generator=generator, dtype=dtype)
    numbers[torch.rand(length, generator=generator) < share] = 0
    found = returned({"x": numbers})
    assert found.keys() == {"x"}
    assert torch.equal(found["x"], numbers)
    assert found["x"].dtype == dtype


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([], torch.int64),
        ([0, 255], torch.uint8),
        ([0, 256], torch.int16),
        ([-1, 3], torch.int16),
        ([2**15], torch.int32),
        ([-(2**31) - 1], torch.int64),
    ],
)
def test_whole_numbers_take_the_narrowest_type(numbers, dtype):
    tensor = torch.tensor(numbers, dtype=torch.int64)
    packed, _ = pack({"x": tensor})
    assert packed["x"].dtype == dtype
    assert torch.equal(returned({"x": tensor})["x"], tensor)
    assert returned({"x": tensor})["x"].dtype == torch.int64


def test_a_sparse_tensor_takes_the_room_of_its_numbers():
    numbers = torch.zeros(100_000, dtype=torch.float64)
    numbers[::50] = 1
    packed, lengths = pack({"x": numbers})
    assert lengths == {"x": 100_000}
    assert sum(tensor.nbytes for tensor in packed.values()) == 2000 * 8 + 12_500


@pytest.fixture(scope="module")
def sparse():
    """A model whose rule tensors are sparse."""
    model = lvpcfg.train(lvpcfg.corpus("train")[:60], "em", states=8, iterations=2)
    return lvpcfg.compress(model, "trim", threshold=0.5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"binary.values": 10**15}, "does not have a bit for each of 1000000000000000 numbers"),
        ({"binary.values": -1}, "does not have a bit for each"),
        ({"binary.values": "many"}, "should have the lengths of sparse tensors"),
        ([3], "should have the lengths of sparse tensors"),
        ({"no.such": 8}, "lacks the tensor 'no.such'"),
        ({}, "the tensor 'binary.values' has"),
    ],
)
def test_lengths_that_are_wrong_are_refused(sparse, tmp_path, change, expected):
    sparse.save(tmp_path)
    description = json.loads((tmp_path / "model.json").read_text())
    assert description[SPARSE].keys() >= {"binary.values"}
    (tmp_path / "model.json").write_text(json.dumps(description | {SPARSE: change}))
    resign(tmp_path)
    with pytest.raises(InputError, match=expected):
        lvpcfg.Model.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"binary.values": torch.zeros(8, dtype=torch.bfloat16)}, "'binary.values' is of type torch.bfloat16"),
        (
            {"root.places": torch.zeros(10**6, dtype=torch.uint8), "root": torch.zeros(0)},
            "have a place for each number",
        ),
    ],
)
def test_tensors_made_to_harm_are_refused(sparse, tmp_path, change, expected):
    sparse.save(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | change, tmp_path / "model.safetensors")
    description = json.loads((tmp_path / "model.json").read_text())
    description[SPARSE] |= {name[:-7]: 8 * len(tensor) for name, tensor in change.items() if name.endswith(PLACES)}
    (tmp_path / "model.json").write_text(json.dumps(description))
    resign(tmp_path)
    with pytest.raises(InputError, match=expected):
        lvpcfg.Model.load(tmp_path)


def test_places_that_do_not_fit_are_refused(sparse, tmp_path):
    sparse.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["binary.values" + PLACES][0] ^= 1
    save_file(tensors, tmp_path / "model.safetensors")
    resign(tmp_path)
    with pytest.raises(InputError, match="does not have a place for each number of"):
        lvpcfg.Model.load(tmp_path)
