"""Grammars over coarser states: what is left when states are told apart less."""

import pytest
import torch
from cases import make
from strategies import random_model

from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.projection import projected


@pytest.fixture(params=["rule tensors", "rule tensors, unary"])
def grammar(request):
    return make(request.param).grammar


def numbered(grammar):
    """[states]: the number of each within its symbol."""
    return torch.arange(len(grammar.root)) - grammar.first_state[grammar.symbol_of_state]


def test_to_its_own_states_is_the_grammar(grammar):
    same = projected(grammar, expected_states(grammar), numbered(grammar))
    for name in ("states", "root", "unary"):
        assert torch.allclose(getattr(same.grammar, name), getattr(grammar, name)), name
    assert torch.allclose(same.grammar.binary.values, grammar.binary.values)
    assert torch.allclose(same.words, torch.eye(len(same.words), dtype=same.words.dtype))


def test_rules_are_sums_over_children_and_means_over_parents(grammar):
    expected = expected_states(grammar)
    coarse = projected(grammar, expected, torch.zeros_like(grammar.symbol_of_state))
    assert bool((coarse.grammar.states == 1).all())
    for rule, (a, *_) in enumerate(grammar.binary_rules.tolist()):
        own = expected[grammar.first_state[a] : grammar.first_state[a + 1]]
        mean = (own / own.sum()) @ grammar.binary.tensor(rule).sum((1, 2))
        assert float(coarse.grammar.binary.values[rule]) == pytest.approx(float(mean), rel=1e-12)
    assert torch.allclose(coarse.expected.sum(), expected.sum())


def test_in_two_steps_is_that_in_one(grammar):
    expected, zeros = expected_states(grammar), torch.zeros_like(grammar.symbol_of_state)
    once = projected(grammar, expected, zeros)
    first = projected(grammar, expected, numbered(grammar) // 2)
    twice = projected(first.grammar, first.expected, torch.zeros_like(first.grammar.symbol_of_state))
    for name in ("root", "unary"):
        assert torch.allclose(getattr(once.grammar, name), getattr(twice.grammar, name)), name
    assert torch.allclose(once.grammar.binary.values, twice.grammar.binary.values)
    assert torch.allclose(once.words, first.words @ twice.words)


@pytest.mark.parametrize("states", [(2, 3, 1, 4), (1, 2, 3, 5)])
def test_its_words_are_means_too(states):
    grammar = random_model(1, states).grammar
    entries = torch.arange(len(grammar.lexical.row) - 1)
    for ancestor in (numbered(grammar) // 2, torch.zeros_like(grammar.symbol_of_state)):
        coarse = projected(grammar, expected_states(grammar), ancestor)
        expected = grammar.lexical.lookup(entries) @ coarse.words
        assert torch.allclose(coarse.grammar.lexical.lookup(entries), expected)
        assert coarse.grammar.lexical.widest <= expected.shape[1]
