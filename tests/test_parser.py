"""lvpcfg.Parser: every sentence gets a tree."""

import math
from dataclasses import replace

import pytest
import torch
from cky import viterbi
from nltk.parse.api import ParserI
from nltk.tree import Tree
from strategies import random_model

from lvpcfg import Binarisation, InputError, Parser, corpus, evaluate, normalise, train
from lvpcfg import parser as parser_module
from lvpcfg.chart.decode.chains import Chains
from lvpcfg.chart.forest import prune
from lvpcfg.distributions import ModelTrees
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.options import DECODERS
from lvpcfg.trees.walk import words


@pytest.fixture(scope="module")
def model():
    return train(corpus("train"), binarisation=Binarisation(unaries="collapse"))


@pytest.fixture(scope="module")
def kept():
    return train(corpus("train"))


@pytest.fixture(scope="module")
def latent():
    return train(corpus("train"), estimator="em", states=2, iterations=2)


@pytest.fixture(scope="module")
def gold():
    return [normalise(tree) for tree in corpus("dev")[:80]]


def test_is_an_nltk_parser(model, tmp_path):
    model.save(tmp_path)
    parser = Parser.load(tmp_path, device="cpu")
    assert isinstance(parser, ParserI)
    sentence = ["The", "dog", "barks", "."]
    tree = parser.parse(sentence)
    assert isinstance(tree, Tree)
    assert tree.leaves() == sentence
    assert parser.parse_one(sentence) == tree
    assert parser.parse_all(sentence) == [tree]
    assert parser.parse_sents([sentence, ["No", "."], sentence])[::2] == [tree, tree]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("which", ["model", "kept"])
def test_decoders_on_the_embedded_corpus(request, which, decoder, gold):
    parser = Parser(request.getfixturevalue(which), decoder)
    trees = parser.parse_sents([words(tree) for tree in gold])
    assert [words(tree) for tree in trees] == [words(tree) for tree in gold]
    assert evaluate(gold, trees).f1_all > 74
    assert parser.counts.fallbacks == 0


def test_viterbi_finds_trees_as_probable_as_a_textbook_parser_does(model, gold):
    sentences = [words(tree) for tree in gold[:15]]
    distribution = ModelTrees(model, sentences)
    found, textbook = (
        distribution.log_prob([distribution.skeletal(tree) for tree in trees])
        for trees in (Parser(model, "viterbi").parse_sents(sentences), [viterbi(model, words) for words in sentences])
    )
    assert torch.allclose(found, textbook, atol=1e-9)


@pytest.mark.parametrize("which", ["model", "kept"])
def test_probabilities_on_request(request, which, gold):
    model = request.getfixturevalue(which)
    sentences = [words(tree) for tree in gold[:10]]
    for decoder in ("max-rule", "viterbi"):
        parses = Parser(model, decoder, dtype="float64").analyse(sentences)
        distribution = ModelTrees(model, sentences)
        expected = distribution.log_prob([distribution.skeletal(parse.tree) for parse in parses])
        for parse, log_posterior, log_z in zip(parses, expected.tolist(), distribution.partition.tolist(), strict=True):
            assert math.log(parse.posterior) == pytest.approx(log_posterior, abs=1e-8)
            assert parse.log_prob == pytest.approx(log_posterior + log_z, rel=1e-9)
            assert not parse.flat


def test_every_sentence_gets_a_tree(model):
    parser = Parser(model)
    sentences = [["dog"], ["Qwxzy"], ["x1", "-y", "ZZ", "%"], ["the"] * 60, [")", "("]]
    for sentence, tree in zip(sentences, parser.parse_sents(sentences), strict=True):
        assert tree.label() == "TOP"
        assert tree.leaves() == sentence


def test_a_sentence_without_a_path_gets_a_flat_tree(model):
    """The same model with S alone as a root, and nothing that S could be."""
    grammar = model.grammar
    sentence_symbol = grammar.symbols.names.index("S")
    values = torch.where(grammar.binary_rules[:, 0] == sentence_symbol, 0.0, grammar.binary.values)
    binary = replace(grammar.binary, values=values)
    root = torch.where(torch.arange(len(grammar.root)) == sentence_symbol, grammar.root, 0.0)
    parser = Parser(replace(model, grammar=replace(grammar, binary=binary, root=root)))
    sentence = ["The", "dog", "saw", "a", "cat", "."]
    (parse,) = parser.analyse([sentence])
    assert parse.tree == Tree.fromstring("(TOP (S (DT The) (NN dog) (VBD saw) (DT a) (NN cat) (. .)))")
    assert parse.flat
    assert parse.log_prob == -math.inf
    assert parse.posterior == 0
    assert parser.counts.fallbacks == 1


def test_where_mantissas_underflow_the_parser_goes_on_in_float64(model):
    """Words a hundred million times less probable than others beside them."""
    parser = Parser(random_underflow())
    trees = parser.parse_sents([["dog"] * 40])
    assert trees[0].leaves() == ["dog"] * 40
    assert parser.counts.fallbacks == 0
    assert parser.counts.float64 + parser.counts.log_sum_exp == 1


def random_underflow():
    """A -> A A | x, B -> B B | x with a rare x and root B: B vanishes beside A in float32."""
    model = random_model(states=(1, 1, 1, 1))
    grammar = model.grammar
    lexical = replace(
        grammar.lexical,
        value=torch.zeros_like(grammar.lexical.value),
        weight=torch.ones(4).double(),
        source=torch.zeros(4, dtype=torch.int64),
        backoff=torch.tensor([[1.0, 1e-3]]).double(),
    )
    return replace(
        model,
        grammar=replace(
            grammar,
            binary=replace(
                grammar.binary,
                rules=torch.tensor([[0, 0, 0], [0, 2, 0], [0, 2, 2], [1, 1, 1], [1, 3, 1], [1, 3, 3]]),
                values=torch.full((6,), 0.3, dtype=torch.float64),
            ),
            unary_rules=torch.zeros(0, 2, dtype=torch.int64),
            unary=torch.zeros(0, dtype=torch.float64),
            root=torch.tensor([0.0, 1, 0, 0], dtype=torch.float64),
            lexical=lexical,
        ),
    )


@pytest.mark.parametrize("decoder", [one for one in DECODERS if one != "free-recall"])
@pytest.mark.parametrize("states", [(2, 3, 1, 4), (2, 3, 2, 4), (3, 3, 2, 4)])
def test_latent_states_with_unary_rules(states, decoder):
    """As many states of phrases as of words, and fewer."""
    model = random_model(1, states)
    model = replace(model, grammar=replace(model.grammar, unary=model.grammar.unary * 0.1))
    for parse in Parser(model, decoder, dtype="float64").analyse([["barks", "dog"], ["dog"], ["dog"] * 4]):
        assert not parse.flat
        assert parse.log_prob > -math.inf


@pytest.mark.parametrize("text", ["(TOP (NN dog))", "(TOP (S (NP (NN dog))))"])
@pytest.mark.parametrize("unaries", ["collapse", "keep"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_grammar_without_binary_rules(text, unaries, decoder):
    tree = Tree.fromstring(text)
    parser = Parser(train([tree], binarisation=Binarisation(unaries=unaries)), decoder)
    assert parser.parse(["dog"]) == tree
    assert parser.analyse([["dog", "dog"]])[0].flat


@pytest.mark.parametrize("sentences", [["a dog"], [[]], [["a"], []], [[1]], [[None]]])
def test_what_is_no_sentence_is_refused(model, sentences):
    with pytest.raises(InputError, match="expected a list of one or more words"):
        Parser(model).parse_sents(sentences)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "best"}, "decoder is 'best': expected max-rule,"),
        ({"dtype": "half"}, "dtype is 'half': expected float32 or float64"),
        ({"device": "warp:9"}, "device is 'warp:9', which cannot be used here"),
    ],
)
def test_wrong_options_are_named(model, options, message):
    with pytest.raises(InputError, match=message):
        Parser(model, **options)


@pytest.mark.parametrize("which", ["model", "kept"])
def test_signed_parameters_parse_and_have_no_viterbi_tree(request, which):
    model = request.getfixturevalue(which)
    grammar = model.grammar
    sign = torch.where(
        torch.arange(len(grammar.symbols)) % 3 == 0, -1.0, 1.0
    ).double()  # of each symbol: changes no tree
    signed = replace(
        grammar,
        binary=grammar.binary.with_tensors({"values": grammar.binary.values * sign[grammar.binary_rules].prod(1)}),
        unary=grammar.unary * sign[grammar.unary_rules].prod(1),
        root=grammar.root * sign,
        lexical=grammar.lexical.scale(
            torch.ones_like(grammar.lexical.weight), sign[len(grammar.symbols.interminals) :]
        ),
    )
    sentences = [words(tree) for tree in corpus("dev")[:5]]
    parser = Parser(replace(model, grammar=signed))
    assert parser.parse_sents(sentences) == Parser(model).parse_sents(sentences)
    assert parser.counts.negative_rules == 0
    assert parser.counts.fallbacks == 0
    with pytest.raises(InputError, match="viterbi needs non-negative"):
        Parser(replace(model, grammar=signed), "viterbi")


@pytest.mark.parametrize("sign", [1, -1])
def test_chains_of_unary_rules_are_written_out_with_rules_of_the_grammar(sign):
    """TOP over A over B over C; the rule between A and B may be negative, and make up for a negative rule above."""
    trees = [Tree.fromstring(text) for text in ("(TOP (X (N x) (N x)))", "(TOP (A (B (C (N n) (N n)))))")]
    model = train(trees)
    grammar = model.grammar
    (place,) = (
        rule
        for rule, (a, b) in enumerate(grammar.unary_rules.tolist())
        if (grammar.symbols.names[a], grammar.symbols.names[b]) == ("A", "B")
    )
    top = grammar.symbols.names.index("A")
    signs = torch.ones_like(grammar.unary).index_fill(0, torch.tensor([place]), sign)
    root = grammar.root.clone()
    root[top] *= sign
    signed = replace(model, grammar=replace(grammar, unary=grammar.unary * signs, root=root))
    for decoder in ("max-rule", "recall"):
        assert Parser(signed, decoder).parse(["n", "n"]) == trees[1]


def test_chains_prefer_rules_of_large_absolute_value():
    """Two ways from A to C, and a circle of rules that would be worth more than 1."""
    grammar = train([Tree.fromstring(f"(TOP (A ({name} (C (N n) (N n)))))") for name in "BDBA"]).grammar
    names = grammar.symbols.names
    value = {("A", "B"): -0.5, ("A", "D"): 0.1, ("A", "A"): -3.0, ("B", "C"): -1.0, ("D", "C"): 1.0, ("A", "C"): -0.01}
    unary = [value[names[a], names[b]] for a, b in grammar.unary_rules.tolist()]
    chains = Chains.of_symbols(replace(grammar, unary=torch.tensor(unary).double()))
    path = chains.path(names.index("A"), names.index("C"))
    assert [names[symbol] for symbol in path] == ["A", "B", "C"]
    nowhere = chains.path(names.index("C"), names.index("A"))
    assert [names[symbol] for symbol in nowhere] == ["C", "A"]


def test_log_probabilities_of_trees_by_rules_that_a_cp_form_does_not_list():
    """Viterbi finds them, since the form gives them weight."""
    model = random_model(1, (2, 3, 1, 4))
    binary = model.grammar.binary
    generator = torch.Generator().manual_seed(0)
    sizes = (binary.interminal_states, sum(binary.state_counts), sum(binary.state_counts))
    factors = (0.3 * torch.rand(2, size, generator=generator, dtype=binary.dtype) for size in sizes)
    one_rule = WholeCP(binary.state_counts, binary.interminals, binary.rules[:1], *factors)
    model = replace(model, grammar=replace(model.grammar, binary=one_rule), coarse=None)
    sentences = [["dog", "barks"], ["barks", "dog", "dog"], ["dog"]]
    trees = ModelTrees(model, sentences)
    parses = Parser(model, "viterbi", "cpu", "float64").analyse(sentences)
    expected = trees.log_prob([trees.skeletal(parse.tree) for parse in parses])
    assert [math.log(parse.posterior) for parse in parses] == pytest.approx(expected.tolist(), rel=1e-9)


@pytest.mark.parametrize("model", ["folder", None, ["a", "b"], 3])
def test_what_is_no_model_is_named(model):
    with pytest.raises(InputError, match="takes a model"):
        Parser(model)


def test_the_work_of_a_sentence_is_bounded(latent, monkeypatch):
    """In words; in what pruning leaves of a chart; and in whole charts, where it leaves nothing."""
    sentences = [["The", "dog", "barks", "."], ["A", "cat", "."], ["dog"] * 5]
    done = []
    parser = Parser(latent, max_length=3, prune=1e-6)
    first, second, third = parser.k_best_sents(sentences, 2, update=done.append, spans=True)
    assert [parses[0].flat for parses in (first, second, third)] == [True, False, True]
    assert third[0].tree.leaves() == sentences[2]
    assert third[0].spans[0].posterior == 0
    assert (parser.counts.sentences, parser.counts.too_long, parser.counts.fallbacks) == (3, 2, 2)
    assert sum(done) == 3

    monkeypatch.setattr(prune, "MOST", 0)
    parser = Parser(latent)
    trees = parser.parse_sents(sentences[:2])
    assert trees == Parser(latent, prune=0).parse_sents(sentences[:2])
    assert (parser.counts.looser, parser.counts.exhaustive, parser.counts.bounded) == (
        1,
        1,
        0,
    )  # three words have no choice

    monkeypatch.setattr(parser_module, "NUMBERS", 0)
    parser = Parser(latent)
    assert [parse.flat for parse in parser.analyse(sentences[:2])] == [True, False]
    assert (parser.counts.bounded, parser.counts.fallbacks, parser.counts.exhaustive) == (1, 1, 0)


def test_five_thousand_words_take_no_time(latent):
    (tree,) = Parser(latent).parse_sents([["dog"] * 5000])
    assert len(tree.leaves()) == 5000
