from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.tree import Tree
from strategies import constituents

from lvpcfg import InputError, evaluate
from lvpcfg.evaluation.evalb import COLLINS, Parameters, score, sentence
from lvpcfg.evaluation.evalb_files import read_pair, read_parameters, read_sentences, report


def scores(gold, test, parameters=COLLINS):
    return evaluate([Tree.fromstring(gold)], [Tree.fromstring(test)], parameters)


GOLD = "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ eats) (NP (NN meat)) (ADVP (RB now))) (. .)))"


def test_a_perfect_parse():
    result = scores(GOLD, GOLD)
    assert result.figures() == {
        "precision": 100,
        "recall": 100,
        "f1": 100,
        "f1_40": 100,
        "f1_all": 100,
        "unlabelled_sentence_f1": 100,
        "tagging_accuracy": 100,
        "complete_match": 100,
        "sentences": 1,
        "errors": 0,
        "skipped": 0,
    }
    assert (result.rows[0].gold, result.rows[0].length, result.rows[0].words) == (5, 6, 5)


def test_brackets_tags_and_crossing_by_hand():
    test = "(TOP (S (NP (DT the)) (VP (NN dog) (VBZ eats) (NP (NN meat)) (PRT (RP now))) (. .)))"
    row = scores(GOLD, test).rows[0]
    # S, NP over "meat" and ADVP = PRT match; the test VP crosses the gold NP.
    assert (row.matched, row.gold, row.test, row.crossing, row.tags, row.words) == (3, 5, 5, 1, 4, 5)


def test_a_wrong_punctuation_tag_drops_the_sentence_but_not_from_f1_all():
    result = scores(GOLD, GOLD.replace("(. .)", "(NN .)"))
    assert result.rows[0].message == "Length unmatch (5|6)"
    assert (result.all.errors, result.all.f1) == (1, 0)
    assert result.f1_all == 100


def test_a_word_tagged_as_punctuation_is_kept_in_f1_all():
    result = scores("(S (NP (NN a)) (VP (VB b)))", "(S (NP (. a)) (VP (VB b)))")
    assert result.all.errors == 1
    assert result.f1_all == 100


@pytest.mark.parametrize("test", ['(S (`` ") (NP (NN a)) (VP (VB b)))', "(S (NP (NN a)) (VP (VB b)))"])
def test_other_or_missing_punctuation_is_no_error(test):
    result = scores("(S (`` ``) (NP (NN a)) (VP (VB b)))", test)
    assert (result.all.f1, result.f1_all, result.all.errors) == (100, 100, 0)


def test_traces_count_where_the_parameters_keep_them():
    tree = "(S (NP (-NONE- *)) (VP (VB b)))"
    result = scores(tree, tree, Parameters(delete=frozenset()))
    assert (result.rows[0].gold, result.f1_all) == (3, 100)


def test_crossing_on_either_side_extra_brackets_and_the_cut_off():
    words = "(A a) (A b) (A c)"
    left, right = "(S (X (A a) (A b)) (A c))", "(S (A a) (X (A b) (A c)))"
    assert scores(left, right).rows[0].crossing == scores(right, left).rows[0].crossing == 1
    assert scores(f"(S {words})", left).all.complete_match == 0
    assert scores(left, f"(S {words})").all.complete_match == 0
    long = [Tree("S", [Tree("A", ["a"])] * size) for size in (40, 41)]
    result = evaluate(long, [long[0], Tree("X", list(long[1]))])
    assert result.short.sentences == 1
    assert (result.all.f1, result.figures()["f1_40"]) == (50, 100)


def test_nothing_to_score():
    with pytest.raises(InputError, match="no gold sentence"):
        evaluate([], [])


def test_no_parse_and_other_words_count_against_f1_all():
    gold = [Tree.fromstring(GOLD)] * 3
    result = evaluate(gold, [None, Tree.fromstring(GOLD.replace("meat", "bones")), gold[0]])
    assert (result.all.sentences, result.all.skipped, result.all.errors, result.all.valid) == (3, 1, 1, 1)
    assert result.all.f1 == 100
    assert result.f1_all == pytest.approx(100 * 2 * 5 / (15 + 10))  # 5 of 15 gold and of 10 test brackets


@pytest.mark.parametrize("wrapper", ["", "TOP", "ROOT"])
def test_wrappers_are_never_brackets(wrapper):
    inner = "(S (NP (NN a)) (VP (VB b)))"
    parameters = Parameters(delete=frozenset({"-NONE-"}))
    for gold, test in ((f"({wrapper} {inner})", inner), (inner, f"({wrapper} ({wrapper} {inner}))")):
        row = scores(gold, test, parameters).rows[0]
        assert (row.matched, row.gold, row.test) == (3, 3, 3)


def test_raw_gold_trees_need_no_cleaning():
    raw = (
        "( (S (NP-SBJ-1 (DT the) (NN dog)) (VP (VBZ eats) (NP=2 (NN meat)) (NP (-NONE- *T*-1)) (ADVP (RB now))) (. .)))"
    )
    assert scores(raw, GOLD).all.complete_match == 100
    assert scores(raw, GOLD).f1_all == 100


def test_unlabelled():
    parameters = Parameters(labeled=False)
    assert scores(GOLD, GOLD.replace("(VP", "(X"), parameters).all.f1 == 100
    assert scores(GOLD, GOLD.replace("(VP", "(X")).all.f1 == 80


def test_the_number_of_sentences_must_agree():
    with pytest.raises(InputError, match="1 gold and 0 test"):
        evaluate([Tree.fromstring(GOLD)], [])


def test_files_with_trees_over_several_lines_and_failed_parses(tmp_path):
    gold, test = tmp_path / "gold.mrg", tmp_path / "test.mrg"
    gold.write_text("# comment\n" + (Tree.fromstring(GOLD).pformat(margin=20) + "\n") * 2)
    test.write_text(GOLD + "\n")
    with pytest.raises(InputError, match="2 gold and 1 test"):
        score(*read_pair(gold, test))
    for text, status in (("\n" + GOLD + "\n", [2, 0]), (GOLD + "\n\n", [0, 2]), (GOLD + "\n" + GOLD + "\n\n", [0, 0])):
        test.write_text(text)
        assert [row.status for row in score(*read_pair(gold, test)).rows] == status
    for failure in ("(())", "(TOP )", "( (S))", "()"):
        test.write_text(failure + "\n" + GOLD)
        assert [row.status for row in score(*read_pair(gold, test)).rows] == [2, 0]
    test.write_text("( " * 50 + "(A a)" + " )" * 50 + "\n" + GOLD)  # no exponential search for words
    assert [row.status for row in score(*read_pair(gold, test)).rows] == [1, 0]
    gold.write_text("  # indented\n" + GOLD + "\n\n\n")
    test.write_text(GOLD)
    assert score(*read_pair(gold, test)).all.f1 == 100


def test_a_malformed_test_file_is_named(tmp_path):
    path = tmp_path / "test.mrg"
    path.write_text(GOLD + "\n(S (NN a)\n" + GOLD)
    with pytest.raises(InputError, match=r"test.mrg, line 2: this bracket is never closed"):
        read_sentences(path)


def test_parameter_files(tmp_path):
    path = tmp_path / "my.prm"
    path.write_text(
        "# mine\nDEBUG 0\nMAX_ERROR 10\nCUTOFF_LEN 10\nLABELED 0\nDELETE_LABEL TOP\nEQ_LABEL A B\nEQ_WORD x y\n"
    )
    parameters = read_parameters(path)
    assert parameters.cutoff == 10
    assert parameters.equal_labels == {("A", "B"), ("B", "A")}
    for wrong in ("QUOTE_LABEL POS", "COTOFF_LEN 10", "EQ_LABEL A", "CUTOFF_LEN ten"):
        path.write_text(f"DEBUG 0\n{wrong}\n")
        with pytest.raises(InputError, match=f"my.prm, line 2: .*{wrong.split()[0]}"):
            read_parameters(path)


@given(st.lists(constituents(), min_size=1, max_size=4), st.randoms())
def test_labelled_matches_agree_with_a_multiset(trees, random):
    """Without equivalent labels, EVALB's greedy matching is multiset intersection."""
    parameters = Parameters(delete=frozenset(), delete_for_length=frozenset(), equal_labels=frozenset())
    gold = [sentence([Tree("TOP", [tree])]) for tree in trees]
    for one in gold:
        other = type(one)(one.words, one.tags, [b for b in one.brackets if random.random() < 0.7])
        random.shuffle(other.brackets)
        row = score([one], [other], parameters).rows[0]
        assert row.matched == sum((Counter(one.brackets) & Counter(other.brackets)).values())
        assert row.crossing == 0


@pytest.mark.treebank
@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("sample", "sample.prm", "sample.rsl"),
        ("sample", "COLLINS.prm", "sample.collins.rsl"),
        ("wsj-dev", "COLLINS.prm", "wsj-dev.rsl"),
    ],
)
def test_the_report_is_evalbs_to_the_letter(data, name, parameters, expected):
    folder = data / "evalb"
    gold, test = (read_sentences(folder / f"{name}.{side}") for side in ("gld", "tst"))
    result = score(gold, test, read_parameters(folder / parameters))
    assert report(result) == (folder / expected).read_text()


@pytest.mark.treebank
def test_the_built_in_parameters_are_those_of_collins(data):
    assert read_parameters(data / "evalb/COLLINS.prm") == COLLINS
