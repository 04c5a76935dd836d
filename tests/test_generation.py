"""Trees drawn from models: that everything in them is as frequent as it should be, and what else is promised."""

import logging
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from nltk.tree import Tree
from test_representations import MIXTURES, PLAIN, make

from lvpcfg import InputError, build_treebank, corpus, generate, train
from lvpcfg.distributions import ModelTrees
from lvpcfg.generation import TREES
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.trees.treebank import Symbols

N = 6000


def normalised(model, closed=False):
    """Every row sums to 1; known words have all of it."""
    grammar = model.grammar
    inner = grammar.interminal_states
    lexical = grammar.lexical
    known = torch.arange(len(lexical.weight)) < len(model.lexicon.words)
    lexical = replace(lexical, weight=lexical.weight * known)
    lexical = lexical.scale(torch.ones_like(lexical.weight), 1 / lexical.column_sums())
    binary, unary = grammar.binary, grammar.unary
    if closed:
        worth = torch.ones(len(grammar.root), dtype=torch.float64)  # what is below chains of unary rules
        for symbol in (1, 0):  # A, then S, whose chains end in A
            some = (grammar.symbol_of_state == symbol).nonzero().squeeze(1)
            worth[some] = (1 - grammar.unary_matrix() @ worth)[some]
        binary = binary.scaled(worth[:inner] / binary.row_sums()[:inner])
    else:
        total = grammar.row_sums()[:inner]
        binary, unary = binary.scaled(1 / total), unary / total[grammar.unary_states()[0]]
    return replace(model, grammar=replace(grammar, binary=binary, unary=unary, lexical=lexical, closed=closed))


@pytest.fixture(scope="module")
def latent():
    """A grammar of the embedded corpus, with states, unary rules and unknown words."""
    return train(corpus("train")[:400], "em", states=3, iterations=8)


def weights(model, trees):
    distribution = ModelTrees(model, [tree.leaves() for tree in trees])
    return distribution.log_weight([distribution.skeletal(tree) for tree in trees])


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("name", [name for name in PLAIN if name not in MIXTURES])
def test_each_tree_is_as_frequent_as_it_is_probable(name, closed):
    model = normalised(make(name), closed)
    trees = generate(model, N, seed=3)
    counts = Counter(tree.pformat(margin=10**6) for tree in trees)
    some = [Tree.fromstring(text) for text, _ in counts.most_common(40)]
    probability = weights(model, some).exp()
    assert float(probability.sum()) > 0.3
    for (text, count), p in zip(counts.most_common(40), probability.tolist(), strict=True):
        assert abs(count - N * p) < 4 * math.sqrt(N * p * (1 - p)), text


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_no_distribution_to_draw_from(name):
    with pytest.raises(InputError, match="generate needs a model where it is 1"):
        generate(normalised(make(name), False), N)


def test_rules_and_words_are_as_frequent_as_they_are_expected(latent):
    grammar = latent.grammar
    trees = generate(latent, N, seed=1, longest=1000)
    bank = build_treebank(trees)
    found = {  # how often in each tree
        name: torch.zeros(N, len(rules), dtype=torch.float64).index_put_(
            (tree_of(bank)[nodes], bank.rule[nodes]), torch.ones(1, dtype=torch.float64), accumulate=True
        )
        for name, rules, nodes in (
            ("binary", bank.binary_rules, bank.is_binary),
            ("unary", bank.unary_rules, bank.is_unary),
            ("word", bank.lexical_rules, bank.is_lexical),
        )
    }
    expected = expected_states(grammar)
    first = grammar.first_state.tolist()
    truth = {}
    for rule, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        truth["binary", a, b, c] = expected[first[a] : first[a + 1]] @ grammar.binary.tensor(rule).sum((1, 2))
    for rule, (a, b) in enumerate(grammar.unary_rules.tolist()):
        truth["unary", a, b] = expected[first[a] : first[a + 1]] @ grammar.unary_tensor(rule).sum(1)
    known = torch.arange(len(latent.lexicon.words))
    table = grammar.lexical.lookup(known)
    table = table / table.sum(0) * expected[grammar.interminal_states :]  # expected number of each word from each state
    tags = grammar.symbol_of_state[grammar.interminal_states :]
    number = {name: symbol for symbol, name in enumerate(latent.grammar.symbols.names)}
    frequent = 0
    for name, rules in (("binary", bank.binary_rules), ("unary", bank.unary_rules), ("word", bank.lexical_rules)):
        for rule, count in zip(rules.tolist(), found[name].T, strict=True):
            a = number[bank.symbols.names[rule[0]]]
            if name == "word":
                p = table[latent.lexicon.words.index(bank.words[rule[1]])][tags == a].sum()
            else:
                p = truth[(name, *(number[bank.symbols.names[symbol]] for symbol in rule))]
            if count.sum() >= 100:
                frequent += 1
                assert abs(float(count.mean() - p)) < 4 * float(count.std()) / math.sqrt(N), (name, rule)
    assert frequent > 100


def tree_of(bank):
    return torch.repeat_interleave(bank.roots[1:] - bank.roots[:-1])


def test_trees_look_as_the_parser_writes_them_and_have_a_probability(latent):
    trees = generate(latent, 100, seed=2, longest=12)
    assert all(type(tree) is Tree and tree.label() == "TOP" for tree in trees)
    assert not any("@" in tree.pformat() for tree in trees)
    assert any(len(node) > 2 for tree in trees for node in tree.subtrees())
    assert {word for tree in trees for word in tree.leaves()} <= {*latent.lexicon.words}
    assert [Tree.fromstring(str(tree)) for tree in trees] == trees
    assert bool(weights(latent, trees).isfinite().all())


def test_the_seed_says_which_and_the_first_ones_are_the_same_for_any_number(latent):
    trees = generate(latent, 30, seed=5)
    assert generate(latent, 20, seed=5) == trees[:20]
    assert generate(latent, 20, seed=6) != trees[:20]
    assert generate(latent, 0) == []


def test_more_than_are_drawn_at_once():
    trees = generate(normalised(make("tensors")), TREES + 3, seed=1)
    assert len(trees) == TREES + 3
    assert trees[:3] != trees[TREES:]


def test_long_trees_are_left_out_and_counted(latent, caplog):
    every = generate(latent, TREES, seed=4, longest=2000)
    with caplog.at_level(logging.WARNING):
        short = generate(latent, 1000, seed=4, longest=8)
    (record,) = caplog.records
    assert record.getMessage().endswith("had more than 8 words: they are left out, and others drawn in their place.")
    left_out, drawn = record.args[:2]
    share = sum(len(tree.leaves()) > 8 for tree in every) / len(every)
    assert abs(left_out / drawn - share) < 0.05
    lengths = Counter(len(tree.leaves()) for tree in short)
    assert max(lengths) == 8
    p = sum(len(tree.leaves()) == 6 for tree in every) / sum(len(tree.leaves()) <= 8 for tree in every)
    assert abs(lengths[6] - 1000 * p) < 5 * math.sqrt(1000 * p)


def small(rules, values, unary=(), root=(1.0, 0.0, 0.0)):
    """S, @S, N with one state each; N is a dog."""
    model = train([Tree.fromstring("(TOP (S (N dog) (N dog)))")])
    grammar = replace(
        model.grammar,
        symbols=Symbols(("S", "@S"), ("N",)),
        binary=RuleTensors(
            (1, 1, 1), 2, torch.tensor(rules, dtype=torch.int64).view(-1, 3), torch.tensor(values, dtype=torch.float64)
        ),
        unary_rules=torch.tensor([rule[:2] for rule in unary], dtype=torch.int64).view(-1, 2),
        unary=torch.tensor([rule[2] for rule in unary], dtype=torch.float64),
        root=torch.tensor(root, dtype=torch.float64),
        hierarchy=torch.zeros(0, 3, dtype=torch.int64),
    )
    return replace(model, grammar=grammar)


def test_the_one_tree_of_a_grammar_and_its_order():
    model = small([[0, 2, 1], [1, 2, 2]], [1.0, 1.0])
    assert [str(tree) for tree in generate(model, 2)] == ["(TOP (S (N dog) (N dog) (N dog)))"] * 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: small([[0, 0, 0]], [1.0]), "of 4096 trees drawn from the model, 0 have no more than 200 words: "),
        (lambda: small([], [], [(0, 0, 1.0)]), "of 4096 trees drawn from the model, 0 have no more than 200 words: "),
        (lambda: small([[0, 2, 2]], [0.8]), "the probabilities of S add up to 0.8: "),
        (lambda: small([[0, 2, 2]], [1.0], root=(0.5, 0.0, 0.0)), "the probabilities of the root add up to 0.5: "),
        (lambda: small([[0, 2, 1]], [1.0]), "@S came up in a tree, and the model has no rules or known words for it."),
        (lambda: small([[0, 2, 2], [0, 2, 1]], [2.0, -1.0]), "generate needs non-negative parameters"),
        (lambda: make("all rules, signed"), "generate needs non-negative parameters"),
    ],
)
def test_models_that_no_tree_can_be_drawn_from(model, message):
    with pytest.raises(InputError) as error:
        generate(model(), 1)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("name", "value"), [("n", -1), ("n", 2.0), ("seed", "a"), ("longest", 0)])
def test_wrong_arguments_get_one_sentence(name, value):
    with pytest.raises(InputError, match=f"{name} is {value!r}: expected a whole number from . on."):
        generate(small([[0, 2, 2]], [1.0]), **{"n": 1, name: value})
