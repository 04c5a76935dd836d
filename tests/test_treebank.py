import pytest
import torch
from hypothesis import given
from nltk.tree import Tree
from strategies import sentences
from test_binarise import schemes

from lvpcfg import Binarisation, InputError, build_treebank, debinarise, normalise
from lvpcfg.trees.walk import words


def bank(*texts, **options):
    return build_treebank([Tree.fromstring(text) for text in texts], **options)


def test_a_small_treebank_by_hand():
    texts = ("( (S (NP (DT the) (NN dog)) (VP (VBZ barks))))", "(NN (NN dog))", "( (S (-NONE- *)))")
    treebank = bank(*texts, scheme=Binarisation(unaries="collapse"))
    assert treebank.symbols.interminals == ("NP", "S")
    assert treebank.symbols.preterminals == ("DT", "NN", "VP+VBZ")
    assert treebank.words == ("the", "dog", "barks")
    assert treebank.symbol.tolist() == [1, 0, 2, 3, 4, 3]
    assert treebank.left.tolist() == [1, 2, -1, -1, -1, -1]
    assert treebank.right.tolist() == [4, 3, -1, -1, -1, -1]
    assert treebank.start.tolist() == [0, 0, 0, 1, 2, 0]
    assert treebank.end.tolist() == [3, 2, 1, 2, 3, 1]
    assert treebank.roots.tolist() == [0, 5, 6]
    assert treebank.lengths.tolist() == [3, 1]
    assert treebank.binary_rules.tolist() == [[0, 2, 3], [1, 0, 4]]
    assert treebank.lexical_rules.tolist() == [[2, 0], [3, 1], [4, 2]]
    assert treebank.rule.tolist() == [1, 0, 0, 1, 2, 1]
    assert len(treebank.unary_rules) == 0


def test_a_label_of_phrases_and_words_is_two_symbols():
    treebank = bank("(S (NN (NN a) (X b)) (NN c))")
    assert "NN" in treebank.symbols.interminals
    assert "NN" in treebank.symbols.preterminals


def test_top_over_several_children_is_a_symbol():
    treebank = bank("( (S (A a) (B b)) (. .))")
    assert treebank.symbols.interminals == ("S", "TOP")
    assert treebank.to_trees() == [Tree.fromstring("(TOP (S (A a) (B b)) (. .))")]


@given(sentences(), sentences(), schemes)
def test_the_arrays_hold_the_trees(one, other, scheme):
    expected = [tree for tree in map(normalise, (one, other)) if tree is not None]
    if not expected:
        with pytest.raises(InputError, match="no tree with words"):
            build_treebank([one, other], scheme)
        return
    treebank = build_treebank([one, other], scheme)
    assert [debinarise(tree) for tree in treebank.to_trees()] == expected
    assert treebank.lengths.tolist() == [len(words(tree)) for tree in expected]
    # Spans: a parent begins where its left child begins, and ends where its last child ends.
    inner = treebank.left >= 0
    last = torch.where(treebank.right >= 0, treebank.right, treebank.left)[inner]
    assert torch.equal(treebank.start[inner], treebank.start[treebank.left[inner]])
    assert torch.equal(treebank.end[inner], treebank.end[last])
    binary = treebank.is_binary
    assert torch.equal(treebank.end[treebank.left[binary]], treebank.start[treebank.right[binary]])
    rules = treebank.binary_rules[treebank.rule[binary]]
    nodes = torch.stack([torch.arange(len(binary))[binary], treebank.left[binary], treebank.right[binary]], 1)
    assert torch.equal(rules, treebank.symbol[nodes])


def test_no_tree_is_an_error():
    with pytest.raises(InputError, match="no tree with words"):
        build_treebank([])
