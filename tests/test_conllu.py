import gzip
import logging

import pytest

from lvpcfg import InputError, read_conllu
from lvpcfg.trees.conllu import conllu_from_text


def line(number, word, upos="NOUN", xpos="NN"):
    return "\t".join([str(number), word, "_", upos, xpos, "_", "_", "_", "_", "_"])


GOOD = "\n".join(
    [
        "# a comment",
        line("1-2", "vámonos"),
        line(1, "vamos", "VERB"),
        line(2, "nos", "PRON"),
        line("2.1", "x"),
        "",
        line(1, "Hi"),
    ]
)


def test_words_and_tags():
    assert conllu_from_text(GOOD) == [[("vamos", "VERB"), ("nos", "PRON")], [("Hi", "NOUN")]]
    assert conllu_from_text(GOOD, tag="xpos")[1] == [("Hi", "NN")]


def test_gzip(tmp_path):
    path = tmp_path / "a.conllu.gz"
    path.write_bytes(gzip.compress(GOOD.encode()))
    assert len(read_conllu(path)) == 2


@pytest.mark.parametrize(
    ("bad", "number", "expected"),
    [
        ("1 Hi NOUN", 1, "10 columns separated by tabs, found 1 in '1 Hi NOUN'"),
        (line(1, "a") + "\n" + line(3, "b"), 2, "expected word number 2 of the sentence, found '3'"),
        (line(1, "a", upos="_"), 1, "'a' has no upos tag"),
        (line(1, ""), 1, "the word is missing"),
        (line(1, " "), 1, "the word is missing"),
        ("\t" * 9, 1, "expected word number 1"),
    ],
)
def test_errors(bad, number, expected):
    with pytest.raises(InputError) as error:
        conllu_from_text(bad, "x.conllu")
    assert str(error.value).startswith(f"x.conllu, line {number}: ")
    assert expected in str(error.value)


def test_empty():
    for text in ("\n \n", "# nothing\n"):
        with pytest.raises(InputError, match=r"no sentence in x.conllu"):
            conllu_from_text(text, "x.conllu")
    with pytest.raises(InputError, match="tag is 'pos': expected upos or xpos"):
        read_conllu("x.conllu", tag="pos")


def test_skipping_drops_the_whole_sentence(caplog):
    text = line(1, "a") + "\nbroken\n" + line(2, "b") + "\n\n" + line(1, "c")
    with caplog.at_level(logging.WARNING):
        assert conllu_from_text(text, "x.conllu", on_error="skip") == [[("c", "NOUN")]]
    assert "skipped 1" in caplog.text


@pytest.mark.treebank
@pytest.mark.parametrize(
    ("name", "size"), [("ud-english-ewt/train", 12544), ("ud-english-ewt/dev", 2001), ("ud-indonesian-1.4/train", 4477)]
)
def test_treebanks(data, name, size):
    assert len(read_conllu(data / f"{name}.conllu")) == size
