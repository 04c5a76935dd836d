import pytest
from hypothesis import given
from nltk.tree import Tree
from strategies import sentences

from lvpcfg import InputError, binarise, evaluate, normalise, read_trees
from lvpcfg.trees.normalise import bare_label, normalise_all
from lvpcfg.trees.walk import is_preterminal, preorder


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("( (S (NP-SBJ-1 (PRP it)) (VP (VBZ is) (NP=2 (-NONE- *T*-1)))) )", "(TOP (S (NP (PRP it)) (VP (VBZ is))))"),
        ("(ROOT (S (NP (NP (PRP$ my) (NN dog)))))", "(TOP (S (NP (PRP$ my) (NN dog))))"),
        ("(S (-LRB- -LRB-) (ADVP|PRT (RB up)) (-RRB- -RRB-))", "(TOP (S (-LRB- -LRB-) (ADVP (RB up)) (-RRB- -RRB-)))"),
        ("( (ROOT (TOP (NN dog))))", "(TOP (NN dog))"),
        ("( (S (NN dog)) (. .))", "(TOP (S (NN dog)) (. .))"),
        ("(TOP dog)", "(TOP (TOP dog))"),
        ("(S (sn.e-SUJ *0*) (V (V va)))", "(TOP (S (V va)))"),
        ("(NN dog)", "(TOP (NN dog))"),
    ],
)
def test_examples(raw, clean):
    assert normalise(Tree.fromstring(raw)) == Tree.fromstring(clean)


def test_nothing_but_traces_is_no_tree():
    assert normalise(Tree.fromstring("( (S (NP (-NONE- *)) (VP (-NONE- *?*))))")) is None


def test_a_word_beside_a_constituent_is_refused():
    for function in (normalise, binarise, lambda tree: evaluate([tree], [tree])):
        with pytest.raises(InputError, match="the word 'b' under 'S' has no tag"):
            function(Tree("S", [Tree("NN", ["dog"]), "b"]))


def test_labels():
    names = ("NP-SBJ-1", "NP=2", "-NONE-", "-LRB-", "PRP$", "ADVP|PRT", "-", "S.NF.C", "WHNP-1", "``", "")
    bare = ("NP", "NP", "-NONE-", "-LRB-", "PRP$", "ADVP", "-", "S.NF.C", "WHNP", "``", "")
    assert tuple(map(bare_label, names)) == bare


@given(sentences())
def test_normalising_twice_changes_nothing(tree):
    once = normalise(tree)
    if once is not None:
        assert normalise(once) == once
        assert once.label() == "TOP"
        for node in preorder(once):
            assert len(node) > 0
            assert is_preterminal(node) or not (len(node) == 1 and node[0].label() == node.label())


@pytest.mark.treebank
def test_cleans_wsj_as_the_berkeley_parser_does(data):
    assert normalise_all(read_trees(data / "wsj-sample/dev.mrg")) == read_trees(data / "evalb/wsj-dev.gld")
