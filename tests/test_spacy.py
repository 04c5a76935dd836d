"""The component for spaCy."""

import pytest
from nltk.tree import Tree

from lvpcfg import InputError, Parser, corpus, train
from lvpcfg.trees.brackets import trees_from_text

spacy = pytest.importorskip("spacy")
component = pytest.importorskip("lvpcfg.spacy_component")  # in an installed lvpcfg, spaCy finds it by itself

TEXT = "The dog (a cat)  barks.\n\n No. It sleeps! \n"
SPLIT = [["The", "dog", "-LRB-", "a", "cat", "-RRB-", "barks", "."], ["No", "."], ["It", "sleeps", "!"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train(corpus("train")).save(folder)
    return str(folder)


def pipeline(model, **config):
    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    nlp.add_pipe("lvpcfg", config={"model": model, "device": "cpu"} | config)
    return nlp


@pytest.fixture(scope="module")
def nlp(folder):
    return pipeline(folder)


def strings(doc):
    return [sentence._.parse_string for sentence in doc.sents]


def without_top(tree):
    return tree[0] if len(tree) == 1 else tree


def test_sentences_have_the_trees_of_the_parser(nlp, folder):
    """Without white space, and with brackets as trees have them."""
    expected = [without_top(tree) for tree in Parser.load(folder, device="cpu").parse_sents(SPLIT)]
    assert trees_from_text("\n".join(strings(nlp(TEXT)))) == expected


def document(nlp, words):
    """Of one sentence."""
    return spacy.tokens.Doc(nlp.vocab, words=words, sent_starts=[place == 0 for place in range(len(words))])


def tree_of(text):
    """A document with one tree, whoever found it."""
    tree = Tree.fromstring(text)
    doc = document(spacy.blank("en"), tree.leaves())
    component._set_extensions()
    doc._.lvpcfg = [list(row) for row in component._rows(tree, range(len(doc)), 0)]
    return doc


TREE = (
    "(TOP (S (VP (NP (DT The) (ADJP (JJ big) (JJ red)) (NN dog) (-LRB- -LRB-)) (NP (NNS birds)) (VBZ sees)"
    " (X (Y (Z (A a) (B b)))))))"
)


class TestConstituents:
    @pytest.fixture
    def doc(self):
        return tree_of(TREE)

    def test_have_all_labels_of_a_chain(self, doc):
        assert doc[:]._.labels == ("S", "VP")
        assert doc[7:9]._.labels == ("X", "Y", "Z")
        assert doc[5:6]._.labels == doc[5]._.labels == ("NP",)
        assert doc[0]._.labels == ()

    def test_are_written_as_trees(self, doc):
        assert f"(TOP {doc[:]._.parse_string})" == TREE
        assert doc[1:3]._.parse_string == "(ADJP (JJ big) (JJ red))"
        assert doc[5]._.parse_string == "(NP (NNS birds))"
        assert doc[4]._.parse_string == "(-LRB- -LRB-)"

    def test_come_in_preorder_with_the_words_among_them(self, doc):
        texts = [(span.start, span.end) for span in doc[:]._.constituents]
        inner = [(0, 9), (0, 5), (0, 1), (1, 3), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 9), (7, 8), (8, 9)]
        assert texts == inner
        assert all(isinstance(span, spacy.tokens.Span) for span in doc[:]._.constituents)

    def test_know_their_parents_and_children(self, doc):
        assert doc[:]._.parent is None
        assert (doc[1:3]._.parent.start, doc[1:3]._.parent.end) == (0, 5)
        assert doc[2]._.parent == doc[1:3]
        for span in doc[:]._.constituents:
            for child in span._.children:
                assert child._.parent == span
        assert [span.text for span in doc[:]._.children] == ["The big red dog -LRB-", "birds", "sees", "a b"]
        assert list(doc[0:1]._.children) == []

    @pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 9), (2, 4), (6, 9)])
    def test_that_are_none_are_refused(self, doc, start, end):
        for name in ("labels", "parse_string", "constituents", "children", "parent"):
            with pytest.raises(InputError, match="is no constituent: those of a sentence are in its"):
                doc[start:end]._.get(name)


def test_white_space_belongs_to_no_constituent(nlp):
    doc = nlp("\n\n The dog \n\n barks.  ")
    (sentence,) = list(doc.sents)[:1]
    constituents = list(sentence._.constituents)
    assert constituents[0].text.startswith("The")
    assert constituents[0].text.endswith(".")
    assert sentence._.parse_string == constituents[0]._.parse_string
    assert [token.text for token in doc if token._.parse_string == ""] == [t.text for t in doc if t.is_space]


def test_sentences_without_words_have_no_constituents(nlp):
    assert strings(nlp("")) == []
    (sentence,) = nlp(" \n ").sents
    assert (sentence._.parse_string, sentence._.labels, sentence._.parent) == ("", (), None)
    assert list(sentence._.constituents) == list(sentence._.children) == []


def test_words_with_white_space_or_brackets_leave_trees_readable(nlp):
    doc = nlp(document(nlp, ["New York", "(", "a)b", "."]))
    (tree,) = trees_from_text(strings(doc)[0])
    assert tree.leaves() == ["New_York", "-LRB-", "a-RRB-b", "."]


def test_sentences_of_a_batch_of_documents_are_parsed_together(folder, monkeypatch):
    nlp, calls = pipeline(folder), []
    before = Parser.parse_sents
    monkeypatch.setattr(Parser, "parse_sents", lambda self, some: calls.append(len(some)) or before(self, some))
    texts = [TEXT, "", "No.", TEXT, "It sleeps."]
    docs = list(nlp.pipe(texts, batch_size=3))
    assert calls == [4, 4]
    assert [doc.text for doc in docs] == texts
    assert [strings(doc) for doc in docs] == [strings(nlp(text)) for text in texts]


def test_documents_are_saved_with_their_trees(nlp):
    doc = nlp(TEXT)
    again = spacy.tokens.Doc(nlp.vocab).from_bytes(doc.to_bytes())
    assert strings(again) == strings(doc)
    assert again[0:2]._.labels == doc[0:2]._.labels


class TestSaving:
    """A pipeline has its model with it."""

    @pytest.fixture
    def two(self, folder, tmp_path):
        """A product, with options, whose folders go away."""
        for name in "ab":
            train(corpus("train")[:200], estimator="em", states=2, iterations=1, seed=ord(name)).save(tmp_path / name)
        nlp = pipeline([str(tmp_path / name) for name in "ab"], decoder="recall", max_length=50)
        for name in "ab":
            (tmp_path / name).rename(tmp_path / f"moved_{name}")
        return nlp

    def test_to_disk(self, two, tmp_path):
        two.to_disk(tmp_path / "saved")
        again = spacy.load(tmp_path / "saved")
        parser = again.get_pipe("lvpcfg").parser
        assert (len(parser.models), parser.decoder, parser.max_length) == (2, "recall", 50)
        assert strings(again(TEXT)) == strings(two(TEXT))

    def test_to_bytes(self, two, tmp_path):
        again = pipeline(str(tmp_path / "gone"), decoder="recall")
        with pytest.raises(InputError, match="gone' is not a model folder"):
            again(TEXT)
        again.from_bytes(two.to_bytes())
        assert strings(again(TEXT)) == strings(two(TEXT))


def test_documents_without_sentences_get_a_hint(folder):
    nlp = spacy.blank("en")
    nlp.add_pipe("lvpcfg", config={"model": folder})
    with pytest.raises(ValueError, match=r"nlp.add_pipe\('sentencizer'\)"):
        nlp("A dog sleeps.")
    assert nlp.analyze_pipes()["problems"]["lvpcfg"] == ["doc.sents"]


def test_documents_that_were_not_parsed_are_named(nlp):
    with pytest.raises(InputError, match="'A dog' has no tree: its document did not go through the component 'lvpcfg'"):
        nlp.make_doc("A dog")[:]._.labels  # noqa: B018


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decoder": "best"}, "decoder is 'best': expected max-rule,"),
        ({"prune": 2.0}, "prune is 2.0: expected a posterior"),
        ({"batch_tokens": 0}, "batch_tokens is 0: expected a number of words"),
        ({"max_length": 0}, "max_length is 0: expected a number of words"),
        ({"device": "warp:9"}, "device is 'warp:9', which cannot be used here"),
        ({"model": []}, "a parser needs a model"),
        ({"model": "."}, "'.' is not a model folder"),
        ({"model": None}, "None is not"),
        ({"prune": "much"}, "prune"),
        ({"beam": 3}, "beam"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_added(folder, config, message):
    with pytest.raises(ValueError, match=message):
        pipeline(**{"model": folder} | config)
