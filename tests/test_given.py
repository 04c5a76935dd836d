"""What callers give in place of lists, words, trees, models and names: it works where it is clear, else a sentence."""

import numpy as np
import pytest
import torch
from jaxtyping import config
from nltk.tree import Tree

import lvpcfg
from lvpcfg import InputError, Model, Parser, build_treebank, compress, corpus, evaluate, read_trees, train, write_trees
from lvpcfg.distributions import ModelTrees
from lvpcfg.nn import GrammarLayer

TREES = corpus("train")[:20]
DOG = ["The", "dog"]
NO_LIST = [None, 5, "The dog", {"The": 1}, {"The", "dog"}, b"The dog"]


@pytest.fixture(autouse=True)
def _as_users_call_it(monkeypatch):
    """Without the checks of types that tests add."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def model():
    return train(TREES, estimator="em", states=2, iterations=1)


@pytest.fixture(scope="module")
def parser(model):
    return Parser(model, device="cpu")


@pytest.mark.parametrize("give", [tuple, iter, np.array, lambda words: (word for word in words)])
def test_words_in_any_order_that_is_one(parser, model, give):
    assert parser.parse(give(DOG)) == parser.parse(DOG)
    assert parser.parse_sents(give([DOG, DOG])) == parser.parse_sents([DOG, DOG])
    assert parser.parse_sents([DOG], tags=give([["DT", "NN"]])) == parser.parse_sents([DOG], tags=[["DT", "NN"]])
    assert torch.equal(ModelTrees(model, give([DOG])).partition, ModelTrees(model, [DOG]).partition)
    layer = GrammarLayer(model)
    assert torch.equal(layer(give([DOG])).partition, layer([DOG]).partition)


@pytest.mark.parametrize(
    "words", [*NO_LIST, [], [None], [["The"]], np.array([1, 2]), ["", "dog"], ["New York"], ["a\n"]]
)
def test_what_is_no_sentence(parser, model, words):
    with pytest.raises(InputError, match=r"^sentence 1 "):
        parser.parse(words)
    with pytest.raises(InputError, match=r"^sentence 1 "):
        ModelTrees(model, [words])


@pytest.mark.parametrize("sentences", NO_LIST)
def test_what_is_no_list_of_sentences(parser, model, sentences):
    for use in (parser.parse_sents, GrammarLayer(model)):
        if sentences is not None or use == parser.parse_sents:
            with pytest.raises(InputError, match="expected a list of sentences"):
                use(sentences)
    with pytest.raises(InputError, match=r"expected a list|there are tags of"):
        parser.parse_sents([DOG], tags="DT NN" if sentences is None else sentences)


def test_trees_in_any_order_that_is_one():
    whole = np.empty(len(TREES), dtype=object)
    whole[:] = TREES
    one = train(TREES)
    for given in (iter(TREES), tuple(TREES), whole):
        assert torch.equal(train(given).grammar.root, one.grammar.root)
    assert evaluate(iter(TREES), iter(TREES)).figures()["f1"] == 100


@pytest.mark.parametrize("trees", [*NO_LIST, TREES[0], [None], ["(S (NN a))"], [["a", "b"]], np.array([1])])
def test_what_is_no_list_of_trees(model, trees, tmp_path):
    uses = [train, build_treebank, GrammarLayer(model).observe, lambda some: evaluate(some, some)]
    for use in (*uses, lambda some: write_trees(some, tmp_path / "x"), lambda some: train(TREES, dev=some)):
        if trees != [None] and trees is not None:  # no dev, and failed parses
            with pytest.raises(InputError, match=r"expected (a list of trees|an nltk\.Tree)"):
                use(trees)
    for use in uses[:2]:
        with pytest.raises(InputError):
            use(trees)


@pytest.mark.parametrize("path", [5, {"a": 1}, b"model", [1]])
def test_what_is_no_name(model, path):
    for use in (Model.load, model.save, read_trees, lambda name: write_trees(TREES, name)):
        with pytest.raises(InputError, match="is no file or folder: expected its name"):
            use(path)


@pytest.mark.parametrize("path", [None, 5, {"a": 1}, [None]])
def test_what_is_no_model_folder(path):
    with pytest.raises(InputError, match=r"expected (a folder|its name)"):
        Parser.load(path)


@pytest.mark.parametrize("given", [None, "model", 5, {"a": 1}, [None], iter([])])
def test_what_is_no_model(given):
    for use in (Parser, compress, GrammarLayer):
        with pytest.raises(InputError, match=r"takes a model|expected a model|made of a model"):
            use(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": ["em"]}, "estimator is \\['em'\\]"),
        ({"device": "meta"}, "device is 'meta', which cannot be used here"),
        ({"device": "warp"}, "device is 'warp', which cannot be used here"),
        ({"binarisation": "right"}, "binarisation is 'right'"),
        ({"seed": "one"}, "seed is 'one': expected a whole number"),
        ({"estimator": "em", "iterations": 10**12}, "estimator.iterations is 1000000000000: expected 1000000 at the"),
        ({"estimator": "split_merge", "cycles": 21}, "estimator.cycles is 21: expected 20 at the most"),
        ({"estimator": "kruskal_em", "split_iterations": 10**6}, "split_iterations is 1000000: expected 10000 at the"),
        ({"estimator": "gradient", "epochs": 10**6}, "estimator.epochs is 1000000: expected 10000 at the most"),
        ({"estimator": "em", "rare": 2**63}, "estimator.rare is 9223372036854775808: expected 1000000 at the most"),
    ],
)
def test_options_of_training_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        train(TREES, **options)


@pytest.mark.parametrize("options", [{"rank": "2"}, {"rank": 2.5}, {"rank": 10**19}, {"threshold": "x"}])
def test_options_of_compression_that_cannot_be(model, options):
    with pytest.raises(InputError, match=r"^decompose"):
        compress(model, **options)


def test_half_precision_is_refused_before_anything_is_changed(model):
    layer = GrammarLayer(model)
    for change in (layer.half, layer.bfloat16):
        with pytest.raises(InputError, match="expected float32 or float64"):
            change()
    assert {parameter.dtype for parameter in layer.parameters()} == {model.grammar.root.dtype}
    assert layer.double()([DOG]).partition.isfinite().all()


def test_potentials_of_several_types_and_an_empty_batch():
    terms, rules, roots = torch.zeros(1, 3, 2), torch.zeros(2, 4, 4).double(), torch.zeros(2).half()
    expected = lvpcfg.distributions.SentCFG(terms, rules.float(), roots.float()).partition
    torch.testing.assert_close(lvpcfg.distributions.SentCFG(terms, rules, roots).partition, expected)
    with pytest.raises(InputError, match="expected no dimension of size 0"):
        lvpcfg.distributions.SentCFG(terms[:0], rules, roots)


def test_what_a_parser_returns_can_be_written_and_read_again(parser, tmp_path):
    tree = parser.parse(["(", "a\x00b", "c\u2009d", "#", "-LRB-"])
    write_trees([tree], tmp_path / "x.mrg")
    assert read_trees(tmp_path / "x.mrg")[0].leaves() == ["-LRB-", "a\x00b", "c\u2009d", "#", "-LRB-"]
    assert isinstance(tree, Tree)
