"""Where models are found: folders, products of several grammars, and models that come with lvpcfg."""

import hashlib
import os

import pytest
import zstandard
from running import run
from test_model import edit

import lvpcfg
from lvpcfg.errors import InputError
from lvpcfg.grammar import location

SENTENCE = ["The", "dog", "barks", "."]


@pytest.fixture(scope="module")
def models():
    trees = lvpcfg.corpus("train")[:60]
    return [lvpcfg.train(trees, "em", states=2, iterations=2, seed=seed) for seed in range(2)]


@pytest.fixture
def product(models, tmp_path):
    """A folder that holds two grammars."""
    for number, model in enumerate(models):
        model.save(tmp_path / "two" / str(number), compressed=number == 1)
    return tmp_path / "two"


@pytest.fixture
def provided(product, monkeypatch, tmp_path):
    """`two` and `two/0` as models that come with lvpcfg."""
    monkeypatch.setattr(location, "PROVIDED", product.parent)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_a_folder_of_numbered_grammars_is_their_product(models, product):
    expected = lvpcfg.Parser(models, device="cpu").parse(SENTENCE)
    parser = lvpcfg.Parser.load(product, device="cpu")
    assert len(parser.models) == 2
    assert parser.parse(SENTENCE) == expected
    with pytest.raises(InputError, match="is a product of 2 grammars: expected one of them, such as"):
        lvpcfg.Model.load(product)


def test_models_are_found_by_their_names(provided, tmp_path):
    assert "two" in location.provided()
    assert len(lvpcfg.Parser.load("two", device="cpu").models) == 2
    assert lvpcfg.Model.load("two/1").grammar.symbols == lvpcfg.Model.load("two/0").grammar.symbols
    (tmp_path / "in.txt").write_text("The dog barks .\n")
    run("parse", tmp_path / "run", model="two", input=str(tmp_path / "in.txt"), output=str(tmp_path / "out.mrg"))
    assert len(lvpcfg.read_trees(tmp_path / "out.mrg")) == 1


@pytest.mark.parametrize("missing", [0, 1])
def test_a_product_with_a_gap_is_refused(models, tmp_path, missing):
    for number in {0, 1, 2} - {missing}:
        models[0].save(tmp_path / str(number))
    with pytest.raises(InputError, match=f"and there is no grammar in {missing}: expected those of a product"):
        lvpcfg.Parser.load(tmp_path, device="cpu")


def test_a_folder_without_a_model_hides_no_name(provided, tmp_path):
    (tmp_path / "elsewhere/two").mkdir()
    assert len(lvpcfg.Parser.load("two", device="cpu").models) == 2


def test_a_folder_of_that_name_comes_first(provided, models):
    models[0].save("two")
    assert len(lvpcfg.Parser.load("two", device="cpu").models) == 1


@pytest.mark.parametrize("name", ["three", "two/7", "../two", "elsewhere/../two"])
def test_names_that_are_none(provided, name):
    with pytest.raises(InputError, match="is not a model folder"):
        lvpcfg.Model.load("/nowhere/" + name if name.startswith("..") else name)


def test_compressed_folders_hold_the_same_numbers(models, tmp_path):
    for compressed in (True, False, True):
        models[0].save(tmp_path, compressed=compressed)
        name = "model.safetensors.zst" if compressed else "model.safetensors"
        assert sorted(os.listdir(tmp_path)) == ["model.json", name]
        loaded = lvpcfg.Model.load(tmp_path)
        assert loaded.grammar.binary.values.equal(models[0].grammar.binary.values)


def test_damaged_compressed_tensors(models, tmp_path):
    models[0].save(tmp_path, compressed=True)
    data = (tmp_path / "model.safetensors.zst").read_bytes()
    (tmp_path / "model.safetensors.zst").write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"model.safetensors.zst is missing, truncated, or not the one"):
        lvpcfg.Model.load(tmp_path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda data: data[:-20], "is damaged"),
        (lambda _: zstandard.compress(bytes(10**6)), "more than 200 times its size"),
    ],
)
def test_hostile_compressed_tensors(models, tmp_path, make, says):
    models[0].save(tmp_path, compressed=True)
    data = make((tmp_path / "model.safetensors.zst").read_bytes())
    (tmp_path / "model.safetensors.zst").write_bytes(data)
    edit(tmp_path, tensors_sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(InputError, match=says):
        lvpcfg.Model.load(tmp_path)
