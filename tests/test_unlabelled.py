"""Unlabelled sentence-F1, worked by hand."""

import pytest
from nltk.tree import Tree

from lvpcfg import evaluate

#         0       1       2       3       4
GOLD = "(S (NP (D a) (N b)) (VP (V c) (NP (D d) (N e))))"  # brackets: 0-2, 2-5, 3-5


def f1(gold, test):
    golds, tests = ([gold], [test]) if isinstance(gold, str) else (gold, test)
    parsed = [Tree.fromstring(text) if text else None for text in tests]
    return evaluate([Tree.fromstring(text) for text in golds], parsed).figures()["unlabelled_sentence_f1"]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (GOLD, 100),
        ("(X (X (T a) (T b)) (X (T c) (X (T d) (T e))))", 100),  # labels and tags do not count
        ("(X (T a) (X (T b) (X (T c) (X (T d) (T e)))))", 200 * 2 / 6),  # right-branching: 1-5, 2-5, 3-5
        ("(X (X (X (X (T a) (T b)) (T c)) (T d)) (T e))", 200 * 1 / 6),  # left-branching: 0-2, 0-3, 0-4
        ("(X (T a) (T b) (T c) (T d) (T e))", 0),  # the whole sentence does not count
        ("(X (X (T a)) (T b) (T c) (T d) (T e))", 0),  # nor do single words
        ("(X (Y (X (T a) (T b))) (X (T c) (X (T d) (T e))))", 100),  # a chain counts once
        ("", 0),
        ("(X (X (T a) (T b)) (T c))", 0),  # other words
    ],
)
def test_one_sentence(test, expected):
    assert f1(GOLD, test) == pytest.approx(expected)


def test_punctuation_is_removed_by_the_gold_tags():
    gold = "(S (NP (D a) (N b)) (, ,) (VP (V c) (NP (D d) (N e))) (. .))"
    # 0-3 is 0-2 without the comma; 2-7 and 3-7 are both 2-5; 4-6 is 3-5.
    test = "(X (X (X (T a) (T b)) (T ,)) (X (X (T c) (X (T d) (T e))) (T .)))"
    assert f1(gold, test) == 100
    crossing = "(X (X (T a) (X (T b) (T ,))) (X (T c) (X (T d) (X (T e) (T .)))))"  # 0-2, 2-5, 3-5; "b ," is one word
    assert f1(gold, crossing) == 100


def test_a_sentence_without_brackets():
    assert f1("(S (D a) (N b) (N c))", "(X (T a) (T b) (T c))") == 100
    assert f1("(S (D a) (N b) (N c))", "(X (T a) (X (T b) (T c)))") == 0


def test_the_mean_is_over_sentences_of_two_words_or_more():
    right = "(X (T a) (X (T b) (X (T c) (X (T d) (T e)))))"
    golds = [GOLD, GOLD, "(S (N a))", "(S (N a) (. .))", "(S (D a) (N b))"]
    tests = [GOLD, right, "(X (T z))", "(X (T a) (T .))", "(X (T a) (T b))"]
    assert f1(golds, tests) == pytest.approx((100 + 200 * 2 / 6 + 100) / 3)
