import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tree import Tree
from safetensors.torch import load_file, save_file
from strategies import random_model

from lvpcfg import Binarisation, InputError, Model, Parser, compress, corpus, train
from lvpcfg.decompose.coarse import with_coarse
from lvpcfg.files import write_bytes
from lvpcfg.grammar import folder as folder_file
from lvpcfg.grammar.coarse import projected_coarse
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.projection import projected


def tensors(model):
    grammar = model.grammar
    named = {name: getattr(grammar, name) for name in ("states", "binary_rules", "unary_rules", "root", "unary")}
    named |= {f"binary.{name}": tensor for name, tensor in grammar.binary.saved().items()}
    return named | {name: getattr(grammar.lexical, name) for name in folder_file.LEXICAL}


def assert_same(one, other):
    assert one.grammar.symbols == other.grammar.symbols
    assert one.lexicon == other.lexicon
    assert one.binarisation == other.binarisation
    assert one.provenance == other.provenance
    for name, tensor in tensors(one).items():
        assert torch.equal(tensor, tensors(other)[name]), name
        assert tensor.dtype == tensors(other)[name].dtype


@given(st.integers(0, 1000), st.tuples(*[st.integers(1, 5)] * 4), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=25, deadline=None)
def test_round_trip_is_exact_for_any_number_of_states(tmp_path_factory, seed, states, dtype):
    folder = tmp_path_factory.mktemp("model")
    model = random_model(seed, states, dtype)
    model.save(folder)
    assert_same(model, Model.load(folder))
    assert sorted(os.listdir(folder)) == ["model.json", "model.safetensors"]


def same_coarse(one, other):
    """Whether two coarse grammars have the same numbers."""
    one, other = (model.coarse.grammar for model in (one, other))
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("root", "unary", "states")]
    pairs.append((one.binary.values, other.binary.values))
    pairs += [(getattr(one.lexical, name), getattr(other.lexical, name)) for name in folder_file.LEXICAL]
    return one.closed == other.closed and all(torch.equal(*pair) for pair in pairs)


def test_what_pruning_needs_is_saved_and_loaded(tmp_path):
    model = with_coarse(random_model())
    model.save(tmp_path)
    loaded = Model.load(tmp_path)
    assert same_coarse(model, loaded)
    cover = loaded.coarse.cover
    assert all(
        torch.equal(one, other)
        for one, other in zip(vars(model.coarse.cover).values(), vars(cover).values(), strict=True)
    )
    coarsest = projected(model.grammar, expected_states(model.grammar), torch.zeros_like(model.grammar.symbol_of_state))
    exact = torch.zeros(cover.tensor().shape)
    values = coarsest.grammar.binary.values.tolist()
    for (a, b, c), value in zip(model.grammar.binary_rules.tolist(), values, strict=True):
        exact[a, b, c] = value
    assert torch.allclose(cover.tensor(), exact.to(cover.u), atol=1e-7)
    assert with_coarse(loaded) is loaded
    plain = train(corpus("dev")[:20])
    assert with_coarse(plain).coarse is None  # its charts are not pruned


def test_a_model_without_a_coarse_grammar_stays_so(tmp_path):
    random_model().save(tmp_path)
    assert Model.load(tmp_path).coarse is None


def test_a_coarse_grammar_without_its_cover_is_saved_too(tmp_path):
    model = replace(random_model(), coarse=projected_coarse(random_model().grammar))
    model.save(tmp_path)
    loaded = Model.load(tmp_path)
    assert same_coarse(model, loaded)
    assert loaded.coarse.cover is None


@pytest.mark.parametrize("cover", [True, False])
def test_the_coarse_grammar_of_an_older_folder_is_projected(tmp_path, cover):
    model = with_coarse(random_model()) if cover else random_model()
    model.save(tmp_path)
    as_format_4(tmp_path)
    loaded = Model.load(tmp_path)
    assert same_coarse(with_coarse(model), loaded)
    assert (loaded.coarse.cover is not None) == cover


def test_a_coarse_grammar_has_nothing_below_zero(tmp_path):
    model = with_coarse(random_model())
    model.coarse.grammar.unary[0] = -0.1
    with pytest.raises(InputError, match="cannot be saved: its coarse grammar has numbers below zero"):
        model.save(tmp_path)


@pytest.mark.parametrize("unaries", ["collapse", "keep"])
def test_a_counted_model_round_trips_and_is_normalised(tmp_path, unaries):
    model = train(corpus("dev"), binarisation=Binarisation(horizontal=math.inf, unaries=unaries))
    model.save(tmp_path / "new" / "folder")
    loaded = Model.load(tmp_path / "new" / "folder")
    assert_same(model, loaded)
    ones = torch.ones(len(model.grammar.root), dtype=torch.float64)
    assert torch.allclose(loaded.grammar.row_sums(), ones, atol=1e-10)
    assert float(loaded.grammar.root.sum()) == pytest.approx(1)


def test_saving_twice_gives_the_same_bytes(tmp_path):
    random_model().save(tmp_path / "a")
    random_model().save(tmp_path / "b")
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_row_sums_against_loops():
    grammar = random_model(3).grammar
    expected = torch.zeros_like(grammar.root)
    for i, (a, _, _) in enumerate(grammar.binary_rules.tolist()):
        first = int(grammar.first_state[a])
        expected[first : first + int(grammar.states[a])] += grammar.binary.tensor(i).sum((1, 2))
    for i, (a, _) in enumerate(grammar.unary_rules.tolist()):
        first = int(grammar.first_state[a])
        expected[first : first + int(grammar.states[a])] += grammar.unary_tensor(i).sum(1)
    emitting = grammar.lexical.lookup(torch.arange(4)).sum(0)
    expected[-len(emitting) :] += emitting
    assert torch.allclose(grammar.row_sums(), expected)


def test_moving_and_casting():
    model = random_model()
    grammar = model.grammar.to(dtype=torch.float32)
    assert grammar.binary.dtype == grammar.lexical.value.dtype == torch.float32
    assert grammar.binary_rules.dtype == grammar.lexical.state.dtype == torch.int64
    meta = grammar.to("meta")
    assert all(tensor.device.type == "meta" for tensor in tensors(replace(model, grammar=meta)).values())
    assert meta.row_sums().device.type == "meta"
    assert meta.lexical.lookup(torch.zeros(3, 4, dtype=torch.int64, device="meta")).shape == (3, 4, 5)


@pytest.mark.gpu
def test_lookup_and_row_sums_on_a_gpu():
    grammar = random_model().grammar
    moved = grammar.to("cuda")
    assert torch.allclose(moved.row_sums().cpu(), grammar.row_sums())
    entries = torch.arange(4)
    assert torch.allclose(moved.lexical.lookup(entries.cuda()).cpu(), grammar.lexical.lookup(entries))


# ---------------------------------------------------------------- folders that cannot be used


@pytest.fixture
def folder(tmp_path):
    random_model().save(tmp_path / "model")
    return tmp_path / "model"


def refused(folder, expected):
    with pytest.raises(InputError) as error:
        Model.load(folder)
    message = str(error.value)
    assert expected in message
    assert str(folder) in message
    assert "\n" not in message
    return message


def edit(folder, **changes):
    description = json.loads((folder / "model.json").read_text())
    for key, value in changes.items():
        if value is None:
            description.pop(key, None)
        else:
            description[key] = value
    if "sha256" not in changes:
        description["sha256"] = folder_file.digest_of(description)
    (folder / "model.json").write_text(json.dumps(description))


def edit_tensors(folder, **changes):
    """Changes tensors and makes model.json agree with the new file."""
    named = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del named[key]
        else:
            named[key] = value
    save_file(named, folder / "model.safetensors")
    resign(folder)


def resign(folder):
    data = (folder / "model.safetensors").read_bytes()
    edit(folder, tensors_sha256=folder_file.hashlib.sha256(data).hexdigest())


FORMER = {"tensors": "", "rule_cp": "factored", "whole_cp": "kruskal"}


def as_format_4(folder):
    """What a folder looked like before the representation of its binary rules was named in it."""
    about = json.loads((folder / "model.json").read_text())["binary"]
    former = FORMER[about["representation"]]
    named = load_file(folder / "model.safetensors")
    for name in [name for name in named if name.startswith("binary.")]:
        field = name.removeprefix("binary.")
        field = {"values": "binary", "cp_rules": f"{former}.rules"}.get(field, f"{former}.{field}")
        named[field] = named.pop(name)
    save_file(named, folder / "model.safetensors")
    resign(folder)
    ranks = {f"{name}_rank": about["rank"] if name == former else 0 for name in ("factored", "kruskal")}
    edit(folder, version=4, binary=None, coarse=None, sha256=None, **ranks)


@pytest.mark.parametrize("method", [None, "als", "cover"])
def test_folders_of_an_older_format_load(tmp_path, method):
    model = random_model()
    if method is not None:
        model = compress(model, method, **({"rank": 1, "threshold": 10.0} if method == "als" else {}))
    model.save(tmp_path)
    as_format_4(tmp_path)
    assert_same(model, Model.load(tmp_path))


def test_missing_folder_and_files(folder, tmp_path):
    refused(tmp_path / "nowhere", "is not a model folder")
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors is missing")
    (folder / "model.json").unlink()
    refused(folder, "no file model.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "\x00\xff",
        "null",
        '{"format": "other"}',
        "[" * 100_000,
        '{"format": "lvpcfg", "version": NaN}',
        "9" * 5000,
    ],
)
def test_damaged_or_foreign_json(folder, text):
    (folder / "model.json").write_bytes(text.encode("latin-1"))
    refused(folder, "model.json")


@pytest.mark.parametrize(("version", "says"), [(99, "newer lvpcfg"), (1, "older lvpcfg"), (0, "no format 0")])
def test_other_formats(folder, version, says):
    edit(folder, version=version, tensors_sha256=None, words=None)  # whatever it may look like
    refused(folder, says)


@pytest.mark.parametrize(
    "key", ["version", "interminals", "words", "states", "binary_rules", "binarisation", "signature"]
)
def test_missing_keys(folder, key):
    edit(folder, **{key: None})
    refused(folder, key)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"states": [2, 3, 1]}, "4 symbols but 3 numbers of states"),
        ({"states": [2, 3, 1, 10**30]}, "'states'"),
        ({"states": [2, 3, 1, 10**6]}, "'root' has 10 numbers, expected 1000006"),
        ({"states": [2, 3, 1, -4]}, "'states'"),
        ({"states": [2, 3, 1, 4.5]}, "'states'"),
        ({"states": [2, 3, 1, True]}, "'states'"),
        ({"words": ["dog", "dog"]}, "'words'"),
        ({"words": ["dog", 3]}, "'words'"),
        ({"words": ["dog"]}, "lexical.weight"),
        ({"binary_rules": [[0, 1, 9]]}, "[0, 1, 9]"),
        ({"binary_rules": [[0, 1]]}, "[0, 1]"),
        ({"binary_rules": [[0, 2, 1]]}, "'binary.values'"),
        ({"binary_rules": [[2, 0, 1]]}, "[2, 0, 1]"),
        ({"unary_rules": [[0, 1], [0, 1]]}, "twice"),
        ({"preterminals": ["@N", "V"]}, "its preterminal '@N' begins with @"),
        ({"interminals": ["S", "@"]}, "its interminal '@' is no symbol that binarisation makes"),
        ({"interminals": ["S", "@@S"]}, "its interminal '@@S' is no symbol that binarisation makes"),
        ({"interminals": ["S", "@S|"]}, "its interminal '@S|' is no symbol that binarisation makes"),
        ({"interminals": ["@|S", "S"]}, "its interminal '@|S' is no symbol that binarisation makes"),
        ({"version": 0}, "no format 0"),
        ({"version": 10**400}, "newer lvpcfg"),
        (
            {"binarisation": {"direction": "right", "horizontal": 0, "vertical": True, "unaries": "keep"}},
            "'binarisation'",
        ),
        ({"unary_rules": [[0, -1]]}, "[0, -1]"),
        ({"binarisation": {"direction": "up", "horizontal": 0}}, "'binarisation'"),
        ({"binarisation": {"horizontal": 0, "code": "os.system"}}, "'binarisation'"),
        ({"binarisation": {"direction": "right", "vertical": 1, "unaries": "keep"}}, "'binarisation'"),
        ({"signature": "os.system"}, "os.system"),
        ({"tensors_sha256": "../../etc/passwd"}, "model.safetensors"),
        ({"provenance": "me"}, "provenance"),
        ({"closed": 1}, "'closed'"),
    ],
)
def test_wrong_values(folder, change, expected):
    edit(folder, **change)
    assert len(refused(folder, expected)) < 600


@pytest.mark.parametrize("name", ["@S", "@S|NP", "@NP^S|DT|NN", "@S+VP^X|V", "@%40|%7C", "@a@b", "@NP->_DT"])
def test_symbols_that_binarisation_makes_are_accepted(folder, name):
    edit(folder, interminals=["S", name])
    model = Model.load(folder)
    assert model.grammar.symbols.interminals == ("S", name)
    for words in (["dog"], ["dog", "barks", "dog"]):
        tree = Parser(model, device="cpu", dtype="float64").parse(words)
        assert all(isinstance(child, Tree) for child in tree)
        assert not any(subtree.label().startswith("@") for subtree in tree.subtrees())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"root": None}, "lacks the tensor 'root'"),
        ({"root": torch.zeros(3)}, "'root' has 3 numbers, expected 10"),
        ({"root": torch.zeros(10, 1)}, "'root' has the shape (10, 1)"),
        ({"root": torch.full((10,), math.nan)}, "'root' holds numbers that are not finite"),
        ({"root": torch.full((10,), math.inf)}, "'root' holds numbers that are not finite"),
        ({"root": torch.zeros(10, dtype=torch.float16)}, "'root' is of type torch.float16"),
        ({"binary__values": torch.zeros(48, dtype=torch.float32)}, "'binary.values' is of type torch.float32"),
        ({"lexical__row": torch.tensor([0, 2**62, -(2**63), -(2**62), 6])}, "does not divide"),
        ({"lexical__row": torch.tensor([0, 2, 9, 6, 6])}, "does not divide"),
        ({"lexical__row": torch.tensor([0, 2, 5, 5, 5])}, "does not divide"),
        ({"lexical__row": torch.tensor([1, 2, 6, 6, 6])}, "does not divide"),
        ({"lexical__state": torch.tensor([0, 1, 1, 2, 3, 99])}, "outside of 0 .. 4"),
        ({"lexical__state": torch.tensor([0, 1, 1, 2, 3, -1])}, "outside of 0 .. 4"),
        ({"lexical__value": torch.zeros(5, dtype=torch.float64)}, "'lexical.value' has 5 numbers"),
    ],
)
def test_wrong_tensors(folder, change, expected):
    edit_tensors(folder, **change)
    refused(folder, expected)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_flipped_bit_is_noticed(folder, name):
    data, generator = (folder / name).read_bytes(), random.Random(0)
    for bit in generator.sample(range(8 * len(data)), 200):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(flipped)
        if name == "model.json" and {data[bit // 8], flipped[bit // 8]} <= {*b" \n\t\r"}:
            assert_same(Model.load(folder), random_model())  # between the tokens of JSON
        else:
            refused(folder, "the model in")


def test_a_digest_is_needed_from_format_7_on(folder):
    edit(folder, sha256=None)
    refused(folder, "model.json should have str under 'sha256'")
    edit(folder, sha256=None, version=6)
    assert_same(Model.load(folder), random_model())


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_tensors(folder, size):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:size])
    refused(folder, "truncated")
    resign(folder)
    refused(folder, "no safetensors file")


def test_huge_header(folder):
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    resign(folder)
    refused(folder, "no safetensors file")


def test_pickles_are_not_loaded(folder):
    torch.save({"root": torch.zeros(10)}, folder / "model.safetensors")
    resign(folder)
    refused(folder, "no safetensors file")


def test_saving_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        random_model().save(tmp_path / "file")


@pytest.fixture
def cut_off(monkeypatch):
    """Saves a model, but dies when it comes to a given step."""

    def die(*_):
        raise KeyboardInterrupt

    die.path, die.replace = os.path, die  # for the step "os", which is os.replace

    def die_at_second(path, *parts):
        return die() if path.name == "model.json" else write_bytes(path, *parts)

    def save(model, folder, step):
        with monkeypatch.context() as patch:
            second = step.startswith("second ")
            patch.setattr(f"lvpcfg.grammar.folder.{step.split()[-1]}", die_at_second if second else die)
            with pytest.raises(KeyboardInterrupt):
                model.save(folder)

    return save


@pytest.mark.parametrize(("step", "survivor"), [("write_bytes", "old"), ("second write_bytes", "old"), ("os", "new")])
def test_a_save_that_is_cut_off_leaves_the_old_model_or_the_new_one(folder, cut_off, step, survivor):
    models = {"old": random_model(), "new": random_model(seed=1, states=(1, 2, 3, 1))}
    cut_off(models["new"], folder, step)
    assert_same(Model.load(folder), models[survivor])
    for again in ("write_bytes", "second write_bytes"):
        cut_off(models["old"], folder, again)
        assert_same(Model.load(folder), models[survivor])
    models["new"].save(folder)
    assert_same(Model.load(folder), models["new"])
    assert sorted(os.listdir(folder)) == ["model.json", "model.safetensors"]


def test_what_could_not_be_loaded_is_not_saved(folder):
    model = random_model(seed=1)
    nan = replace(model.grammar, root=model.grammar.root * math.nan)
    no_strings = replace(model, provenance={})
    no_strings.provenance[1] = (1, 2)
    for bad, expected in (
        (replace(model, provenance={"loss": math.nan}), "provenance"),
        (no_strings, "provenance"),
        (replace(model, provenance={"x": torch.zeros(1)}), "provenance"),
        (replace(model, grammar=nan), "'root' holds numbers that are not finite"),
        (replace(model, grammar=model.grammar.to(dtype=torch.bfloat16)), "torch.bfloat16"),
        (replace(model, lexicon=replace(model.lexicon, words=("dog", "\ud800"))), "no character of Unicode"),
    ):
        with pytest.raises(InputError, match=expected):
            bad.save(folder)
        assert sorted(os.listdir(folder)) == ["model.json", "model.safetensors"]
        assert_same(Model.load(folder), random_model())


SAVING = """
import os, signal, sys, time
from strategies import random_model
from lvpcfg import Model
models = [random_model(0), random_model(1, (1, 2, 3, 1))]
models[0].save(sys.argv[1])
for number in range(10):
    child = os.fork()
    while child == 0:
        for model in models:
            model.save(sys.argv[1])
    time.sleep(0.001 * number)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(Model.load(sys.argv[1]).grammar.states) == 4
print("loaded")
"""


def test_killing_a_saving_process_never_breaks_the_model(tmp_path):
    """A process saves two models in turn until it is killed; what is left must load."""
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    line = [sys.executable, "-c", SAVING, str(tmp_path / "model")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "loaded\n", done.stderr
