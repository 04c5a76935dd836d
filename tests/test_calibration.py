"""Calibration: posteriors that are right as often as they say."""

import json
import math

import numpy as np
import pytest
from running import run

from lvpcfg import Calibration, InputError, Parser, calibrate, corpus, evaluate, normalise, train, write_trees
from lvpcfg.calibration import Outcomes, Scaling, outcomes
from lvpcfg.evaluation.evalb import Parameters
from lvpcfg.trees.walk import words


@pytest.fixture(scope="module")
def model():
    return train(corpus("train"))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gold():
    """Short ones."""
    return [normalise(tree) for tree in corpus("dev") if len(words(tree)) < 8][:25]


HALF = Calibration(Scaling(0.5, 0.0), Scaling(0.5, -1.0))


class TestScaling:
    def test_finds_what_posteriors_were_changed_by(self):
        generator = np.random.default_rng(0)
        true = generator.random(100_000)
        right = generator.random(len(true)) < true
        shown = 1 / (1 + np.exp(-(2 * np.log(true / (1 - true)) + 0.5)))  # logit = 2 logit(true) + 0.5
        scaling = Scaling.fit(Outcomes(shown, right), "phrases")
        assert (scaling.slope, scaling.offset) == pytest.approx((0.5, -0.25), abs=0.02)
        before = Outcomes(shown, right)
        assert before.error() > 0.05
        assert scaling.scaled(before).error() < 0.01

    def test_keeps_the_order_and_the_range(self):
        values = [HALF.trees(posterior) for posterior in (0.0, 1e-300, 1e-9, 0.2, 0.5, 0.99, 1.0)]
        assert values == sorted(set(values))
        assert values[0] == 0
        assert values[-1] < 1
        assert values[4] == pytest.approx(1 / (1 + math.e))

    def test_of_large_offsets_overflows_nowhere(self):
        assert Scaling(100.0, -1e6)(1e-300) == pytest.approx(0)
        assert Scaling(100.0, 1e6)(1e-300) == 1

    @pytest.mark.parametrize(
        "pairs",
        [[], [(0.5, True)], [(0.5, False)] * 3, [(0.0, False), (0.3, True)], [(0.1, True), (0.9, False)] * 9],
    )
    def test_needs_posteriors_that_say_something(self, pairs):
        with pytest.raises(InputError, match=r"phrases, .* do not show what their posteriors are worth: expected more"):
            Scaling.fit(Outcomes.of(pairs), "phrases")


def test_bins_and_their_error_by_hand():
    known = Outcomes.of([(0.9, True), (0.1, False), (0.7, False), (0.3, True)])
    assert known.bins(2) == [(2, pytest.approx(0.2), 0.5), (2, pytest.approx(0.8), 0.5)]
    assert known.error(2) == pytest.approx(0.3)
    assert known.error(100) == pytest.approx((0.1 + 0.1 + 0.7 + 0.7) / 4)
    assert Outcomes.of([]).bins() == []
    assert Outcomes.of([]).error() == 0


def test_outcomes_are_what_evalb_counts(model, gold):
    parser = Parser(model)
    spans, trees = outcomes(parser, gold)
    found = parser.analyse([words(tree) for tree in gold], spans=True)
    same = sum(parse.tree == tree for parse, tree in zip(found, gold, strict=True))
    assert 0 < same <= trees.right.sum() <= len(gold)
    assert len(spans.right) == sum(len(parse.spans) for parse in found)
    everything = Parameters(delete=frozenset(), equal_labels=frozenset())
    expected = evaluate(gold, [parse.tree for parse in found], everything).figures()["precision"]
    assert 100 * spans.right.mean() == pytest.approx(expected)


def test_changes_posteriors_and_no_trees(model, gold):
    sentences = [words(tree) for tree in gold[:5]]
    plain, scaled = Parser(model), Parser(model, calibration=HALF)
    for some, others in zip(
        *(parser.k_best_sents(sentences, 3, spans=True) for parser in (plain, scaled)), strict=True
    ):
        for one, other in zip(some, others, strict=True):
            assert (other.tree, other.log_prob) == (one.tree, one.log_prob)
            assert other.posterior == HALF.trees(one.posterior)
            assert [span.posterior for span in other.spans] == [HALF.spans(span.posterior) for span in one.spans]
    (flat,) = Parser(model, max_length=2, calibration=HALF).analyse([["a", "b", "c"]], spans=True)
    assert [flat.posterior, *(span.posterior for span in flat.spans)] == [0.0] * (1 + len(flat.spans))


def test_is_fitted_once(model, gold):
    calibration = calibrate(Parser(model), gold)
    with pytest.raises(InputError, match="has a calibration already"):
        calibrate(Parser(model, calibration=calibration), gold)


def test_is_saved_and_loaded(model, folder, tmp_path):
    HALF.save(tmp_path / "half.json")
    assert Calibration.load(tmp_path / "half.json") == HALF
    assert Parser.load(folder, calibration=tmp_path / "half.json").calibration == HALF
    with pytest.raises(InputError, match=r"calibration is 'half.json': expected a Calibration. Parser.load takes"):
        Parser(model, calibration="half.json")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '{"spans": {"slope": 1, "offset": 0}}', "[" * 100_000]
    + [
        json.dumps({name: {"slope": slope, "offset": offset} for name in ("spans", "trees")})
        for slope, offset in ((0, 0), (-1, 0), (1, math.nan), (math.inf, 0), ("x", 0), (None, 0))
    ],
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match="is no calibration: expected a file that job=calibrate wrote"):
        Calibration.load(tmp_path / "x.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none.json': no such file"):
        Calibration.load(tmp_path / "none.json")


class TestJob:
    def test_calibrates_and_parses_with_it(self, folder, gold, tmp_path):
        write_trees(gold, tmp_path / "gold.mrg")
        (tmp_path / "in.txt").write_text("A dog sleeps .\nNo .\n")
        result, printed = run("calibrate", tmp_path / "run", model=folder, gold=str(tmp_path / "gold.mrg"))
        path = str(tmp_path / "run/calibration.json")
        assert path in printed
        assert result["phrases"] > 25 < result["trees"]
        assert 0 <= result["phrases_error_calibrated"] < 100
        calibration = Calibration.load(path)
        assert calibration == calibrate(Parser.load(folder), gold)
        options = {"model": folder, "input": str(tmp_path / "in.txt"), "output": str(tmp_path / "out.jsonl")}
        run("parse", tmp_path / "parse", calibration=path, spans=True, **options)
        expected = Parser.load(folder, calibration=path).analyse([["A", "dog", "sleeps", "."], ["No", "."]])
        records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [one["posterior"] for one in records] == pytest.approx([parse.posterior for parse in expected])

    def test_needs_gold_and_a_model(self, folder, tmp_path):
        with pytest.raises(InputError, match="job=calibrate needs gold trees: gold=FILE"):
            run("calibrate", tmp_path, model=folder)
        with pytest.raises(InputError, match="job=calibrate needs a model folder"):
            run("calibrate", tmp_path, gold="gold.mrg")
