"""Grammars of the Berkeley parser, as text."""

import json
import math
from dataclasses import dataclass, replace
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from enumeration import Dense, derivations, total
from nltk.tree import Tree
from rich.console import Console

from lvpcfg import InputError, Model, Parser, compress, evaluate, normalise, read_berkeley, read_trees
from lvpcfg.distributions import ModelTrees
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.jobs import import_
from lvpcfg.jobs.run import Run
from lvpcfg.options import DECODERS
from lvpcfg.parser import THRESHOLD
from lvpcfg.trees.binarise import Binarisation
from lvpcfg.trees.signatures import berkeley
from lvpcfg.trees.walk import words

# S -> VP -> V is the entry S_1 V_0, and not S_1 VP_0 times VP_0 V_0 once more.
FILES = {
    "numstates": "ROOT\t1\nS\t2\n@S\t2\nNP\t2\nVP\t1\nN\t2\nV\t1\n.\t1\n",
    "binary": """\
S_0 @S_0 ._0 0.7
S_0 @S_1 ._0 0.1
S_1 NP_1 VP_0 2.5E-1
@S_0 NP_0 VP_0 0.9
@S_0 NP_1 VP_0 0.1
@S_1 NP_1 VP_0 1.0
VP_0 V_0 NP_0 0.3
VP_0 V_0 NP_1 0.1
NP_0 NP_0 N_1 0.2
""",
    "unary": """\
ROOT_0 ROOT_0 1.0
ROOT_0 S_0 0.6
ROOT_0 S_1 0.3
ROOT_0 NP_1 0.1
ROOT_0 N_1 0.1
ROOT_0 VP_0 0.15
ROOT_0 V_0 0.06
S_0 S_0 1.0
S_1 S_1 1.0
S_1 VP_0 0.5
S_1 V_0 0.2
NP_0 N_0 0.5
NP_0 N_1 0.3
NP_1 N_1 1
VP_0 V_0 0.4
""",
    "lexicon": """\
N dogs [0.5, 1.0E-2]
N fish [0.1, 0.3]
V fish [0.25]
V bark [0.5]
. . [0.99]
N UNK-LC [0.0, 0.125]
N UNK-LC-s [0.25, 0.0]
V UNK-LC [0.0625]
""",
}


@pytest.fixture
def prefix(tmp_path):
    """The files of the grammar above; a test may change them."""
    for name, text in FILES.items():
        (tmp_path / f"tiny.{name}").write_text(text)
    return tmp_path / "tiny"


@pytest.fixture
def model(prefix):
    return read_berkeley(prefix)


@dataclass
class OneChain(Dense):
    """Its unary entries are whole chains."""

    def steps(self):
        return torch.eye(*self.unary.shape, dtype=torch.float64) + self.unary


def by_hand(symbols):
    """The grammar above as full arrays over states, and q of words."""
    states = [f"{name}_{i}".replace("TOP", "ROOT") for name, m in symbols for i in range(m)]
    number = {state: i for i, state in enumerate(states)}
    inner = number["._0"]
    root, rules = torch.zeros(len(states)), torch.zeros(1, inner, len(states), len(states), dtype=torch.float64)
    root[number["ROOT_0"]] = 1
    for line in FILES["binary"].splitlines():
        *rule, value = line.split()
        rules[0][tuple(number[state] for state in rule)] = float(value)
    unary = torch.zeros(inner, len(states), dtype=torch.float64)
    for line in FILES["unary"].splitlines():
        top, bottom, value = line.split()
        if top != bottom:
            unary[number[top], number[bottom]] = float(value)

    def words(*names):
        table = torch.zeros(len(names), len(states) - inner, dtype=torch.float64)
        for line in FILES["lexicon"].splitlines():
            tag, word, values = line.split(maxsplit=2)
            for state, value in enumerate(json.loads(values)):
                for place in (place for place, name in enumerate(names) if name == word):
                    table[place, number[f"{tag}_{state}"] - inner] = value
        return table

    return OneChain(root, rules, unary), words


SENTENCES = [  # as the lexicon has them
    (["dogs", "fish", "."], ["dogs", "fish", "."]),
    (["fish", "fish", "fish", "."], ["fish", "fish", "fish", "."]),
    (["fish"], ["fish"]),
    (["dogs", "bark"], ["dogs", "bark"]),
    (["cats", "purr", "."], ["UNK-LC-s", "UNK-LC", "."]),
]


def test_pruned_and_full_charts_agree(model):
    sentences = [sentence for sentence, _ in SENTENCES]
    full, pruned = (Parser(model, dtype="float64", prune=prune).analyse(sentences) for prune in (0, 1e-12))
    for one, other in zip(full, pruned, strict=True):
        assert one.tree == other.tree
        assert one.log_prob == pytest.approx(other.log_prob)
        assert one.sentence_log_prob == pytest.approx(other.sentence_log_prob)


@pytest.mark.parametrize(("sentence", "entries"), SENTENCES)
def test_probabilities_against_enumeration(model, sentence, entries):
    grammar = model.grammar
    full, words = by_hand(list(zip(grammar.symbols.names, grammar.states.tolist(), strict=True)))
    found = derivations(full, words(*entries))
    trees = ModelTrees(model, [sentence])
    assert math.exp(trees.partition[0]) == pytest.approx(total(found))
    assert math.exp(trees.log_prob(trees.argmax)[0] + trees.partition[0]) == pytest.approx(max(found)[0])


@pytest.mark.parametrize("prune", [0, THRESHOLD])
@pytest.mark.parametrize("decoder", DECODERS)
def test_trees_are_debinarised_under_top(model, decoder, prune):
    parser = Parser(model, decoder, prune=prune)
    trees = parser.parse_sents([["dogs", "fish", "."], ["cats", "purr", "."], ["purr"]])
    assert str(trees[0]) == "(TOP (S (NP (N dogs)) (VP (V fish)) (. .)))"
    assert str(trees[1]) == "(TOP (S (NP (N cats)) (VP (V purr)) (. .)))"
    assert [trees[2].label(), *trees[2].leaves()] == ["TOP", "purr"]
    assert parser.counts.fallbacks == 0


def test_treebank_trees_have_the_probability_of_their_chains(model):
    trees = ModelTrees(model, [["fish"]])
    tree = trees.skeletal(Tree.fromstring("(TOP (S (VP (V fish))))"))
    assert math.exp(trees.log_prob([tree])[0]) == pytest.approx(0.06 * 0.25 / (0.06 * 0.25 + 0.1 * 0.3))
    trees = ModelTrees(model, [["dogs", "bark", "."]])
    tree = trees.skeletal(Tree.fromstring("( (S (NP (N dogs)) (VP (V bark)) (. .)))"))
    assert math.exp(trees.log_prob([tree])[0]) == pytest.approx(1)


def test_what_is_read(model):
    grammar = model.grammar
    assert grammar.closed
    assert grammar.symbols.interminals == ("@S", "NP", "TOP", "S", "VP")
    assert grammar.symbols.preterminals == (".", "N", "V")
    assert grammar.states.tolist() == [2, 2, 1, 2, 1, 1, 2, 1]
    assert model.binarisation == Binarisation("left", unaries="keep")
    rule = grammar.binary_rules.tolist().index([3, 0, 5])  # S -> @S .
    assert grammar.binary.tensor(rule).tolist() == [[[0.7], [0.1]], [[0], [0]]]
    assert model.lexicon.words == ("dogs", "fish", "bark", ".")
    assert model.lexicon.classes == ("UNK-LC", "UNK-LC-s")
    table = grammar.lexical.lookup(torch.arange(len(model.lexicon)))
    assert table[model.lexicon.encode(["Frogs"])[0]].tolist() == [0, 0.125, 0.0625, 0.03125]  # the mean of all classes
    assert table[0].tolist() == [0, 0.5, 0.01, 0]


def test_a_saved_model_parses_alike(model, tmp_path):
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model")
    assert loaded.grammar.closed
    sentence = ["fish", "fish", "fish", "."]
    assert torch.equal(ModelTrees(loaded, [sentence]).partition, ModelTrees(model, [sentence]).partition)


def test_expected_states_count_one_chain_a_span(model):
    """By the first few levels of the trees: tops under a rule, then one chain at the most."""
    grammar = model.grammar
    full, _ = by_hand(list(zip(grammar.symbols.names, grammar.states.tolist(), strict=True)))
    inner, states = full.unary.shape
    tops, expected = full.root.double(), torch.zeros(states, dtype=torch.float64)
    for _ in range(100):
        nodes = tops + tops[:inner] @ full.unary
        expected += nodes
        tops = torch.einsum("a,abc->b", nodes[:inner], full.rules[0]) + torch.einsum(
            "a,abc->c", nodes[:inner], full.rules[0]
        )
    assert torch.allclose(expected_states(grammar), expected)


def test_rules_alone(prefix):
    (prefix.parent / "tiny.lexicon").unlink()
    with pytest.raises(InputError, match=r"no file '.*tiny.lexicon', so this grammar can parse no words"):
        read_berkeley(prefix)
    model = read_berkeley(prefix, lexicon=False)
    assert len(model.grammar.binary_rules) == 5
    assert len(model.lexicon) == 1
    assert Parser(model).parse(["dogs", "bark"]).leaves() == ["dogs", "bark"]
    model.save(prefix.parent / "model")
    assert torch.equal(Model.load(prefix.parent / "model").grammar.binary.values, model.grammar.binary.values)


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("numstates", "NP two", "expected a symbol and its number of states, found 'NP two'"),
        ("numstates", "NP 0", "found 'NP 0'"),
        ("numstates", "NP\t2", "the symbol 'NP' stands there twice"),
        ("binary", "S_0 NP_0 0.1", "expected 3 states and a probability, found 'S_0 NP_0 0.1'"),
        ("binary", "S_0 NP_0 VP_0 one", "expected 3 states and a probability, found 'S_0 NP_0 VP_0 one'"),
        ("binary", "S_0 NP_0 VP_0 nan", "expected 3 states and a probability"),
        ("binary", "S_0 NP_0 VP_7 0.1", "'S_0 NP_0 VP_7 0.1' has 'VP_7', no state"),
        ("unary", "S_0 S_0 0.5", "expected 1 from a state to itself, found 'S_0 S_0 0.5'"),
        ("lexicon", "N cat [0.5]", "expected 'N', a word and 2 probabilities in brackets, found 'N cat [0.5]'"),
        ("lexicon", "N cat [0.5, -1]", "found 'N cat [0.5, -1]'"),
        ("lexicon", "N", "found 'N'"),
        ("lexicon", "NP cat [0.5, 1]", "'NP cat [0.5, 1]' begins with no tag"),
        ("lexicon", "N dogs [0.5, 1]", "'dogs' stands there twice as N"),
    ],
)
def test_malformed_lines(prefix, file, line, expected):
    with open(f"{prefix}.{file}", "a") as stream:
        stream.write(f"{line}\n")
    number = len(FILES[file].splitlines()) + 1
    with pytest.raises(InputError) as caught:
        read_berkeley(prefix)
    assert str(caught.value).startswith(f"{prefix}.{file}, line {number}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("file", ["numstates", "binary", "unary"])
def test_missing_files(prefix, file):
    (prefix.parent / f"tiny.{file}").unlink()
    with pytest.raises(InputError, match=rf"cannot read '.*tiny\.{file}': no such file"):
        read_berkeley(prefix)


def test_a_grammar_has_a_root(prefix):
    (prefix.parent / "tiny.numstates").write_text(FILES["numstates"].replace("ROOT", "TOP"))
    with pytest.raises(InputError, match="expected a symbol ROOT"):
        read_berkeley(prefix)


def test_tags_do_not_begin_with_the_mark_of_binarisation(prefix):
    """A symbol that no rule rewrites is a tag."""
    with open(f"{prefix}.numstates", "a") as stream:
        stream.write("@X 1\n")
    with pytest.raises(InputError, match="its preterminal '@X' begins with @"):
        read_berkeley(prefix)


def test_an_entry_that_stands_twice_is_the_last_and_said(prefix, caplog):
    with open(f"{prefix}.unary", "a") as stream:
        stream.write("VP_0 V_0 0.25\n")
    grammar = read_berkeley(prefix).grammar
    assert grammar.unary_tensor(grammar.unary_rules.tolist().index([4, 7])).item() == 0.25
    assert "line 16: VP_0 V_0 0.25 stands there for the second time; the first, 0.4, is left out" in caplog.text


@pytest.mark.parametrize(
    ("word", "first", "lower_known", "expected"),
    [
        ("frobnicate", False, False, "UNK-LC"),
        ("frobnicated", False, False, "UNK-LC-ed"),
        ("frobbing", False, False, "UNK-LC-ing"),
        ("Frobbing", True, True, "UNK-INITC-KNOWNLC-ing"),
        ("Frobbing", True, False, "UNK-INITC-ing"),
        ("Frobbing", False, True, "UNK-CAPS-ing"),
        ("McFrob", True, True, "UNK-CAPS"),  # two capitals
        ("IBM", True, False, "UNK-CAPS"),
        ("frobs", False, False, "UNK-LC-s"),
        ("frobess", False, False, "UNK-LC"),  # no plural; and nothing else either
        ("virus", False, False, "UNK-LC"),
        ("80s", False, False, "UNK-LC-NUM-s"),
        ("as", False, False, "UNK-LC"),
        ("city", False, False, "UNK-LC"),  # too short
        ("frobbity", False, False, "UNK-LC-ity"),
        ("frobby", False, False, "UNK-LC-y"),
        ("1,234.5", False, False, "UNK-NUM"),
        ("10-20", False, False, "UNK-NUM-DASH"),
        ("all-frobbing", False, False, "UNK-LC-DASH"),
        ("pre-frobs", False, False, "UNK-LC-DASH-s"),
        ("A320-frobbed", False, False, "UNK-CAPS-NUM-DASH"),
        ("30MB", False, False, "UNK-CAPS-NUM"),  # no letter at its head, but capitals
        ("mRNA", False, False, "UNK-LC"),
        ("--", False, False, "UNK-DASH"),
        ("%", False, False, "UNK"),
    ],
)
def test_signature(word, first, lower_known, expected):
    assert berkeley(word, first, lower_known) == expected


@pytest.fixture
def import_job(tmp_path):
    """Runs job=import; returns its figures and what it printed."""
    printed = StringIO()

    def run(prefix):
        result = Run(tmp_path / "run", Console(file=printed, width=120))
        import_.run(SimpleNamespace(berkeley=prefix), result)
        return result.result, printed.getvalue()

    return run


def test_import_job(prefix, import_job, tmp_path):
    result, printed = import_job(str(prefix))
    assert result["states"] == 12
    assert "unary rules" in printed
    assert Parser.load(tmp_path / "run" / "model").parse(["dogs", "bark"]).leaves() == ["dogs", "bark"]
    with pytest.raises(InputError, match="needs a grammar: berkeley="):
        import_job(None)


@pytest.mark.treebank
@pytest.mark.parametrize("name", ["wsj_0", "wsj_1"])
def test_real_lexicons_are_distributions(data, name):
    model = read_berkeley(data / "grammars" / name)
    sums = model.grammar.lexical.column_sums()
    assert bool(((sums > 0.96) & (sums < 1.001)).all())
    assert len(model.grammar.binary_rules) == 3839
    unknown = [model.lexicon.unknown(word, first) for word in ("Frobbing", "frobs", "1,7") for first in (True, False)]
    assert max(unknown) < len(model.lexicon) - 1  # all have classes


@pytest.mark.treebank
def test_a_real_grammar_parses(data):
    gold = [normalise(tree) for tree in read_trees(data / "wsj-sample" / "dev.mrg")]
    gold = [tree for tree in gold if len(words(tree)) <= 15]
    parser = Parser(read_berkeley(data / "grammars" / "wsj_1"))
    assert evaluate(gold, parser.parse_sents([words(tree) for tree in gold])).f1_all > 80
    assert parser.counts.fallbacks == 0


@pytest.mark.treebank
def test_real_rules_without_words(data):
    grammar = read_berkeley(data / "grammars" / "wsj_3", lexicon=False).grammar
    assert int((grammar.binary.values > 0).sum()) == 49027
    inner = int(grammar.first_state[len(grammar.symbols.interminals)])
    # A tree goes on below every state: by a binary rule, or by a chain down to one or to a tag.
    assert bool((grammar.row_sums()[:inner] > 0.99).all())


@pytest.mark.treebank
def test_distributions_of_a_real_grammar_in_part_in_cp_form(data):
    """Of which some rules keep their tensors: the sums are those of all rules written out, and of the parser."""
    small = compress(read_berkeley(data / "grammars" / "wsj_1"), method="als", rank=1, threshold=1e-4)
    assert 0 < len(small.grammar.binary.cp_rules) < len(small.grammar.binary)
    full = replace(small, grammar=small.grammar.written_out())
    sentences = [["Stocks", "fell", "."], ["The", "bank", "raised", "rates", "again", "."]]
    log_z = ModelTrees(small, sentences).partition
    torch.testing.assert_close(log_z, ModelTrees(full, sentences).partition, rtol=1e-9, atol=1e-9)
    parsed = Parser(small, dtype="float64", prune=0).analyse(sentences)
    assert [parse.sentence_log_prob for parse in parsed] == pytest.approx(log_z.tolist(), rel=1e-9)
