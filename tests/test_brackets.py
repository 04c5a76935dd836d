import gzip
import logging
import os

import pytest
from hypothesis import given
from nltk.tree import Tree
from strategies import sentences

from lvpcfg import Binarisation, InputError, read_trees, write_trees
from lvpcfg.trees.binarise import binarise, debinarise
from lvpcfg.trees.brackets import format_tree, trees_from_text
from lvpcfg.trees.normalise import normalise
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import preorder, words


@given(sentences())
def test_what_is_written_is_read_again(tree):
    assert trees_from_text(format_tree(tree)) == [tree]


@given(sentences())
def test_reads_what_nltk_prints_over_many_lines(tree):
    assert trees_from_text(tree.pformat(margin=1)) == [tree]


def test_agrees_with_nltk_on_penn_style():
    text = "( (S (NP-SBJ (PRP$ My) (NN dog)) (VP (VBZ barks) (-LRB- -LRB-)) (. .)) )"
    assert trees_from_text(text) == [Tree.fromstring(text)]


def test_several_trees_a_line_comments_blank_lines_and_crlf(tmp_path):
    path = tmp_path / "trees.mrg"
    path.write_bytes(b"# a comment (with a bracket\r\n(A (X a))(B (X b))\r\n\r\n(C\r\n  (# #)\r\n  (X c))\r\n# end")
    assert [tree.label() for tree in read_trees(path)] == ["A", "B", "C"]
    assert words(read_trees(path)[2]) == ["#", "c"]


def test_gzip_and_byte_order_mark(tmp_path):
    path = tmp_path / "trees.mrg.gz"
    path.write_bytes(gzip.compress("\ufeff(S (NN año))".encode()))
    assert read_trees(path) == [Tree("S", [Tree("NN", ["año"])])]


def test_several_words_in_a_bracket_are_one_word(caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        path = tmp_path / "bank.mrg"
        path.write_text("(S (A a b) c)\n(NP (NN New \n York) (NN a\u00a0b ))\n(S (A a b)")
        trees = read_trees(path, on_error="skip")
    assert trees == [Tree("NP", [Tree("NN", ["New_York"]), Tree("NN", ["a\u00a0b"])])]
    assert "bank.mrg: joined the words of 1 brackets, as in New_York" in caplog.text


def test_a_constituent_may_be_empty_if_it_has_a_label():
    (tree,) = trees_from_text("(S (sn.e-SUJ) (V dijo))")
    assert len(tree[0]) == 0
    assert normalise(tree) == Tree.fromstring("(TOP (S (V dijo)))")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("(S (A a))\n(S (A a)\n(S (A b))\n", 2, "never closed"),
        ("(S (A a))\n(S (A a)))\n", 2, "closes nothing"),
        ("(S (A a))\nword (S (A a))", 2, "this word stands outside of any bracket"),
        ("(S (A a)) #1 (S (B b))", 1, "this word stands outside of any bracket"),
        ("(S\n (A a) word\n)", 2, "this word has no tag: expected (TAG word):  (A a)  >>> word"),
        ("(S (A a))\n\n()", 3, "nothing in this bracket"),
        ("(S (A a))\n(S ( ) (A b))", 2, "nothing in this bracket"),
        ("(S)", 1, "nothing in this bracket"),
        (" \n", None, "there is no tree in bank.mrg"),
        ("# nothing\n", None, "there is no tree in bank.mrg"),
    ],
)
def test_errors_name_file_line_and_text(text, line, expected):
    with pytest.raises(InputError) as error:
        trees_from_text(text, "bank.mrg")
    message = str(error.value)
    assert line is None or message.startswith(f"bank.mrg, line {line}: ")
    assert expected in message
    assert "\n" not in message


def test_skipping_keeps_the_good_trees_and_counts_the_bad(caplog):
    text = "(S (A a))\n(S (A b)\n(S (A c))\nword\n(S (A d) e) (S ( ) (A h))\n(S (A f))\n(S (A g))\n"
    errors = []
    kept = trees_from_text(text, on_error=errors.append)
    assert [words(tree) for tree in kept] == [["a"], ["c"], ["f"], ["g"]]
    assert [int(str(error).split("line ")[1].split(":")[0]) for error in errors] == [2, 4, 5, 5]
    with caplog.at_level(logging.WARNING):
        assert trees_from_text(text, "bank.mrg", on_error="skip") == kept
    assert "bank.mrg: skipped 4 malformed" in caplog.text


@pytest.mark.parametrize(
    ("text", "kept", "errors"),
    [
        ("(S (A a) b)\n(S\n(A c)\n(B d))\n(S (A e))\n", [["c", "d"], ["e"]], 1),
        ("(S (A a) b) (S (A c)) (S (A d))", [["c"], ["d"]], 1),
        (" (S (A a)\n (S (A b))\n (S\n  (A c))\n (S (A d))", [["b"], ["c"], ["d"]], 1),
        ("(S (A a))) ) )\n(S (A b))", [["a"], ["b"]], 1),
    ],
)
def test_skipping_loses_only_what_is_broken(text, kept, errors):
    found = []
    assert [words(tree) for tree in trees_from_text(text, on_error=found.append)] == kept
    assert len(found) == errors


def test_skipping_many_unclosed_trees_takes_linear_time():
    errors = []
    assert len(trees_from_text("(S (A a)\n" * 20_000 + "(S (A b))", on_error=errors.append)) == 1
    assert len(errors) == 20_000


def test_on_error_must_be_known():
    with pytest.raises(InputError, match="'ignore'"):
        trees_from_text("(S (A a))", on_error="ignore")


@pytest.mark.parametrize("content", [b"\x1f\x8bnot gzip", b"(S (A \xff))"])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "trees"
    path.write_bytes(content)
    with pytest.raises(InputError, match="trees"):
        read_trees(path)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_trees(tmp_path / "none.mrg")
    with pytest.raises(InputError, match="is a directory"):
        read_trees(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        read_trees("a\0b")


def test_writing_through_a_link_and_to_a_pipe(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_trees([Tree("A", ["a"])], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "(A a)\n"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_trees([Tree("A", ["a"])], tmp_path / "pipe")
    assert os.read(reader, 100) == b"(A a)\n"
    os.close(reader)
    with pytest.raises(InputError, match="cannot write"):
        write_trees([], "a\0b")


def test_words_with_brackets_are_escaped_and_with_spaces_refused(tmp_path):
    write_trees([Tree("S", [Tree("-LRB-", ["("])])], tmp_path / "out.mrg")
    assert (tmp_path / "out.mrg").read_text() == "(S (-LRB- -LRB-))\n"
    for tree in (Tree("X", [""]), Tree("", ["dog"])):
        with pytest.raises(InputError, match="tag or its word is empty"):
            format_tree(tree)
    with pytest.raises(InputError, match="no character of Unicode"):
        write_trees([Tree("X", ["\ud800"])], tmp_path / "out.mrg")
    with pytest.raises(InputError, match="'a b'"):
        write_trees([Tree("S", [Tree("X", ["a b"])])], tmp_path / "out.mrg")
    assert (tmp_path / "out.mrg").read_text() == "(S (-LRB- -LRB-))\n"


def test_nesting_of_100_000_levels():
    depth = 100_000
    labels = [f"L{i % 2}" for i in range(depth)]
    text = "".join(f"({label} " for label in labels) + "(X x)" + ")" * depth
    (tree,) = trees_from_text(text)
    assert format_tree(tree) == text
    normal = normalise(tree)
    assert len(preorder(normal)) == depth + 2
    assert format_tree(debinarise(binarise(normal))) == format_tree(normal)
    bank = build_treebank([tree], Binarisation(unaries="keep"))
    assert format_tree(debinarise(bank.to_trees()[0])) == format_tree(normal)


@pytest.mark.treebank
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("wsj-sample/train", 3396),
        ("craft/train", 18951),
        ("craft/dev", 2780),
        ("gum/train", 10224),
        ("cess-esp/train", 4860),
    ],
)
def test_treebanks_are_read_whole(data, name, size):
    trees = read_trees(data / f"{name}.mrg")
    assert len(trees) == size
    assert all(words(tree) for tree in trees)
