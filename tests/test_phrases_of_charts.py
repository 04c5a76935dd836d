"""Parser.chart: the phrases over all spans of a sentence."""

from collections import Counter

import pytest
from nltk.tree import Tree

from lvpcfg import Calibration, InputError, Parser, train
from lvpcfg.calibration import Scaling

TREES = [
    "(S (NP (N dogs)) (VP (V saw) (NP (N cats)) (PP (P in) (NP (N boxes)))))",
    "(S (NP (N cats)) (VP (V saw) (NP (NP (N dogs)) (PP (P in) (NP (N cats))))))",
    "(S (VP (V saw) (NP (NP (N boxes)) (PP (P in) (NP (N dogs))))))",
]
WORDS = ["dogs", "saw", "cats", "in", "boxes", "in", "dogs", "in", "cats"]


@pytest.fixture(scope="module")
def latent():
    return train([Tree.fromstring(tree) for tree in TREES], estimator="em", states=2, iterations=3)


def summed(parses):
    """The posteriors of phrases, over some trees."""
    found = Counter()
    for parse in parses:
        for phrase in {(span.label, span.start, span.end) for span in parse.spans}:
            found[phrase] += parse.posterior
    return found


@pytest.mark.parametrize("prune", [0, 1e-9])
def test_are_sums_over_all_trees(latent, prune):
    parser = Parser(latent, device="cpu", dtype="float64", prune=prune)
    parses = parser.k_best(WORDS, 10_000, spans=True)
    assert sum(parse.posterior for parse in parses) == pytest.approx(1, abs=1e-5)
    assert len(parses) > 10
    (found,) = parser.chart([WORDS], least=1e-3)
    expected = {phrase: posterior for phrase, posterior in summed(parses).items() if posterior >= 1e-3}
    assert {(span.label, span.start, span.end): span.posterior for span in found} == pytest.approx(expected, abs=1e-5)
    assert [span.end - span.start for span in found] == sorted(span.end - span.start for span in found)


@pytest.mark.parametrize("decoder", ["max-rule", "viterbi", "recall"])
@pytest.mark.parametrize("prune", [0, 5e-5])
def test_hold_the_phrases_of_the_best_tree(latent, decoder, prune):
    parser = Parser(latent, decoder, device="cpu", prune=prune)
    sentences = [WORDS[:3], WORDS, WORDS[:5], WORDS[1:7], ["boxes"]]
    charts = parser.chart(sentences)
    for parse, chart in zip(parser.analyse(sentences, spans=True), charts, strict=True):
        known = {(span.label, span.start, span.end): span.posterior for span in chart}
        assert len(known) == len(chart)
        for span in parse.spans:
            if span.posterior > 0.011:
                assert known[span.label, span.start, span.end] == pytest.approx(span.posterior, abs=1e-5)


def test_of_flat_trees_there_are_none(latent):
    assert Parser(latent, device="cpu", max_length=2).chart([WORDS, ["dogs"]])[0] == []


def test_are_calibrated(latent):
    half = Scaling(0.5, -1)
    (plain,) = Parser(latent, device="cpu").chart([WORDS], 1e-6)
    (scaled,) = Parser(latent, device="cpu", calibration=Calibration(half, half)).chart([WORDS], 1e-6)
    assert [span.posterior for span in scaled] == [half(span.posterior) for span in plain]


def test_exact_pruning_has_no_chart(latent):
    with pytest.raises(InputError, match="prune=exact keeps the best tree alone"):
        Parser(latent, "viterbi", device="cpu", prune="exact").chart([["dogs"]])
