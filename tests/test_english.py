"""The English model that comes with lvpcfg."""

import re

import pytest

import lvpcfg
from lvpcfg.grammar.location import PROVIDED, parts

MOST_BYTES = 15_000_000


@pytest.fixture(scope="module")
def parser():
    return lvpcfg.Parser.load("english", device="cpu")


def test_it_is_small_and_a_product_of_grammars():
    assert sum(path.stat().st_size for path in PROVIDED.joinpath("english").rglob("*")) < MOST_BYTES
    assert len(parts("english")) > 1


@pytest.mark.parametrize(
    ("sentence", "shape"),
    [
        ("The old man who lives next door feeds the cats every morning .", r"\(S \(NP .*\(VP \(VBZ feeds\)"),
        ("What do you think ?", r"\(SBARQ \(WHNP \(WP What\)\)"),
        ("i think that the president visited london .", r"\(VP \(VBP think\) \(SBAR \(IN that\)"),
        ("I THINK THAT THE PRESIDENT VISITED LONDON .", r"\(PRP I\)\) \(VP \(VBP THINK\) \(SBAR \(IN THAT\)"),
        ("She bought 1,234 shares at $ 56.78 .", r"\(VBD bought\) \(NP .*\(CD 1,234\) \(NNS shares\)"),
        ("I love it 😀 !", r"\(VP \(VBP love\) \(NP \(PRP it\)\)"),
        ("We analysed the expression of BRCA1 in mice .", r"\(VBD analysed\) \(NP \(NP .*\(PP \(IN of\)"),
    ],
)
def test_trees_make_sense(parser, sentence, shape):
    tree = parser.parse(sentence.split())
    assert re.search(shape, tree.pformat(margin=10**6)), tree


@pytest.mark.parametrize(
    "sentence",
    ["Mail bob.smith@example.com .", "?", "x", "🎉 🎉 🎉", "http://example.com/a?b=1 works", "naïve Ωmega – «ok»"],
)
def test_every_sentence_has_a_tree(parser, sentence):
    assert parser.parse(sentence.split()).leaves() == sentence.split()
