"""Rule tensors without their smallest numbers."""

from dataclasses import replace

import pytest
import torch
from running import run

import lvpcfg
from lvpcfg.decompose.options import TrimOptions
from lvpcfg.errors import InputError
from lvpcfg.grammar.rule_tensors import DENSE
from lvpcfg.grammar.rules import BinaryRules


@pytest.fixture(scope="module")
def model():
    return lvpcfg.train(lvpcfg.corpus("train")[:80], "em", states=4, iterations=5)


def test_states_keep_their_sums_and_their_largest_numbers(model):
    grammar, small = model.grammar, lvpcfg.compress(model, "trim", threshold=0.3, dtype="float64").grammar
    assert torch.allclose(small.row_sums(), grammar.row_sums())
    before, after = grammar.binary.values, small.binary.values
    assert 0 < int(after.count_nonzero()) < int(before.count_nonzero())
    assert bool((after[after > 0] >= before[after > 0]).all())  # scaled up, for what is lost
    for state in range(grammar.interminal_states):
        numbers = [before[grammar.binary.parent_states == state], grammar.unary[grammar.unary_states()[0] == state]]
        kept = [after[grammar.binary.parent_states == state], small.unary[grammar.unary_states()[0] == state]]
        numbers, kept = torch.cat(numbers), torch.cat(kept)
        assert torch.equal(kept > 0, (numbers >= 0.3 * numbers.max()) & (numbers > 0))


@pytest.mark.parametrize("threshold", [0, 1e-12])
def test_next_to_nothing_is_lost_at_a_small_threshold(model, threshold):
    sentences = [tree.leaves() for tree in lvpcfg.corpus("dev")[:5]]
    small = lvpcfg.compress(model, "trim", threshold=threshold, dtype="float64")
    exact, trimmed = (lvpcfg.Parser(each, device="cpu", dtype="float64").analyse(sentences) for each in (model, small))
    for one, other in zip(exact, trimmed, strict=True):
        assert one.tree == other.tree
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-8)


def test_it_goes_on_to_other_methods_and_comes_back_from_a_folder(model, tmp_path):
    small = lvpcfg.compress(model, "trim", threshold=1e-6)
    assert small.grammar.root.dtype == torch.float32
    small.save(tmp_path)
    again = lvpcfg.Model.load(tmp_path)
    assert torch.equal(again.grammar.binary.values, small.grammar.binary.values)
    assert lvpcfg.compress(again, "als", rank=1, threshold=1.0).grammar.binary.compressed


@pytest.mark.parametrize("threshold", [0, 0.9])
def test_sparse_tensors_are_computed_with_as_dense_ones(model, threshold):
    binary = lvpcfg.compress(model, "trim", threshold=threshold, dtype="float64").grammar.binary
    assert (DENSE * int(binary.values.count_nonzero()) > len(binary.values)) == (threshold == 0)
    worth = torch.rand(len(model.grammar.root), dtype=torch.float64)
    for given in (None, worth):
        assert torch.allclose(binary.rewrites(given), BinaryRules.rewrites(binary, given))
    two = tuple(min(2, count) for count in binary.state_counts)  # of each symbol
    into = torch.cat([torch.arange(count) % 2 for count in binary.state_counts])
    parent, child = torch.zeros(2, len(two), max(binary.state_counts), 2, dtype=torch.float64)
    symbol = model.grammar.symbol_of_state
    within = torch.arange(len(symbol)) - model.grammar.first_state[symbol]
    parent[symbol, within, into], child[symbol, within, into] = worth, 1
    found = binary.projected(two, into, worth)
    assert torch.allclose(found.values, binary.transformed(two, parent, child).values)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threshold": 1.5}, "decompose.threshold is 1.5: expected a share of the largest number, up to 1"),
        ({"threshold": -1}, "expected a number from 0 on"),
        ({"dtype": "float16"}, "decompose.dtype"),
    ],
)
def test_wrong_options(model, options, says):
    with pytest.raises(InputError, match=says):
        lvpcfg.compress(model, "trim", **options)


def test_models_with_numbers_below_zero_are_refused(model):
    signed = replace(model, grammar=replace(model.grammar, unary=-model.grammar.unary))
    with pytest.raises(InputError, match="expected a non-negative one, or another method than trim"):
        lvpcfg.compress(signed, "trim")


def test_the_job_says_what_is_left(model, tmp_path):
    model.save(tmp_path / "model")
    options = TrimOptions(threshold=0.3)
    result, printed = run("compress", tmp_path / "run", model=str(tmp_path / "model"), decompose=options)
    assert 0 < result["nonzero_after"] < result["nonzero_before"]
    assert result["bytes_after"] < result["bytes_before"]
    assert f"{result['nonzero_after']:,} after" in printed
