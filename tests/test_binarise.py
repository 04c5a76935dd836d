import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.tree import Tree
from strategies import sentences

from lvpcfg import Binarisation, InputError, binarise, debinarise, read_trees
from lvpcfg.trees.brackets import garbage_collection_paused
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import is_preterminal, preorder

schemes = st.builds(
    Binarisation,
    direction=st.sampled_from(["right", "left"]),
    horizontal=st.sampled_from([0, 1, 2, math.inf]),
    vertical=st.sampled_from([1, 2]),
    unaries=st.sampled_from(["collapse", "keep"]),
)


@given(sentences(), schemes)
def test_round_trip_and_shape(tree, scheme):
    binary = binarise(tree, scheme)
    assert debinarise(binary) == tree
    assert binary.leaves() == tree.leaves()
    for node in preorder(binary):
        assert len(node) <= 2
        if scheme.unaries == "collapse" and node is not binary:
            assert len(node) == 2 or is_preterminal(node)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Binarisation(unaries="collapse"), "(TOP (A (B b) (@A (C c) (@A (D d) (X+E e)))))"),
        (Binarisation(direction="left"), "(TOP (A (@A (@A (B b) (C c)) (D d)) (X (E e))))"),
        (Binarisation(horizontal=1), "(TOP (A (B b) (@A|B (C c) (@A|C (D d) (X (E e))))))"),
        (Binarisation(horizontal=math.inf), "(TOP (A (B b) (@A|B (C c) (@A|B|C (D d) (X (E e))))))"),
        (Binarisation("left", 2, unaries="collapse"), "(TOP (A (@A|X (@A|D|X (B b) (C c)) (D d)) (X+E e)))"),
        (Binarisation(vertical=2, unaries="collapse"), "(TOP (A^TOP (B b) (@A^TOP (C c) (@A^TOP (D d) (X^A+E e)))))"),
        (Binarisation(), "(TOP (A (B b) (@A (C c) (@A (D d) (X (E e))))))"),
    ],
)
def test_schemes(scheme, expected):
    tree = Tree.fromstring("(TOP (A (B b) (C c) (D d) (X (E e))))")
    assert binarise(tree, scheme) == Tree.fromstring(expected)


def test_top_is_not_collapsed_and_chains_keep_their_intermediates():
    tree = Tree.fromstring("(TOP (S (VP (V go) (A a) (B b))))")
    collapsed = binarise(tree, Binarisation(unaries="collapse"))
    assert collapsed == Tree.fromstring("(TOP (S+VP (V go) (@VP (A a) (B b))))")


@pytest.mark.parametrize(
    "wrong",
    [
        {"direction": "up"},
        {"vertical": 3},
        {"horizontal": -1},
        {"horizontal": 0.5},
        {"horizontal": "inf"},
        {"horizontal": math.nan},
        {"horizontal": True},
        {"unaries": "drop"},
    ],
)
def test_wrong_schemes(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))!r}: expected"):
        Binarisation(**wrong)


@pytest.mark.treebank
@pytest.mark.parametrize("name", ["wsj-sample", "craft", "gum", "cess-esp"])
@pytest.mark.parametrize(
    "scheme", [Binarisation(unaries="collapse"), Binarisation("left", 1, 2)], ids=["collapse", "keep"]
)
def test_every_tree_of_every_treebank_comes_back(data, name, scheme):
    with garbage_collection_paused():
        trees = normalise_all(read_trees(data / name / "train.mrg") + read_trees(data / name / "dev.mrg"))
        assert [debinarise(tree) for tree in build_treebank(trees, scheme).to_trees()] == trees
