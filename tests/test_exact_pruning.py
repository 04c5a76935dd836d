"""Exact pruning never changes the best derivation, however bad the one is that it begins with."""

from dataclasses import replace

import pytest
import torch
from strategies import random_model
from test_tightness import grown

from lvpcfg import InputError, Parser, compress, corpus, train
from lvpcfg.chart.decode.chains import Chains
from lvpcfg.chart.decode.exact import BestRules, ExactPruning
from lvpcfg.chart.forest.forest import Plan
from lvpcfg.chart.forest.viterbi import best_scores
from lvpcfg.trees.walk import words

F64 = torch.float64


@pytest.fixture(scope="module")
def model():
    return train(corpus("dev")[:80], "em", states=3, iterations=3)


@pytest.mark.parametrize("start", [5e-5, 0.3])
def test_trees_are_those_of_whole_charts(model, start):
    """From a good start, and from one of which most is pruned."""
    sentences = [words(tree) for tree in corpus("dev")[60:120] if 2 <= len(words(tree)) <= 9][:6]
    assert len(sentences) == 6
    exact = Parser(model, "viterbi", device="cpu", dtype="float64", prune="exact")
    exact.prune = start
    whole = Parser(model, "viterbi", device="cpu", dtype="float64", prune=0)
    for one, other in zip(exact.analyse(sentences), whole.analyse(sentences), strict=True):
        assert one.tree == other.tree or one.log_prob == pytest.approx(other.log_prob, abs=1e-6)
    assert exact.counts.exhaustive < len(sentences)


def best_of_all(grammar, leaf):
    """log p of the best derivation, by the definition, over states."""
    n, inner = len(leaf), grammar.interminal_states
    first = grammar.first_state.tolist()
    rules = torch.full((inner, len(grammar.root), len(grammar.root)), -torch.inf, dtype=F64)
    for number, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        a, b, c = (slice(first[symbol], first[symbol + 1]) for symbol in (a, b, c))
        rules[a, b, c] = grammar.binary.tensor(number).log()
    chains, cells = Chains.of_states(grammar).best, {}
    for width in range(1, n + 1):
        for i in range(n - width + 1):
            cell = torch.full((len(grammar.root),), -torch.inf, dtype=F64)
            if width == 1:
                cell[inner:] = leaf[i].log()
            for k in range(1, width):
                pairs = rules + cells[i, k].view(1, -1, 1) + cells[i + k, width - k].view(1, 1, -1)
                cell[:inner] = torch.maximum(cell[:inner], pairs.flatten(1).amax(1))
            cells[i, width] = (chains + cell).amax(1)
    return float((grammar.root.log() + cells[0, n]).max())


@pytest.mark.parametrize("kind", ["tensors", "some rules"])
def test_nothing_is_dropped_that_could_be_better(kind):
    for seed in range(4):
        grammar = grown(2.0, kind, seed).grammar
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([5, 2, 6])
        leaf = torch.rand(13, 5, generator=generator, dtype=F64)
        truth = torch.tensor([best_of_all(grammar, some) for some in leaf.split(lengths.tolist())], dtype=F64)
        rules = BestRules(grammar)
        exact, edges = ExactPruning(rules), []
        for less in (0.0, 2.0, 50.0):
            forest, nodes = exact.forest(leaf, lengths, truth - less)
            begin = torch.tensor([0, 5, 7])
            at = forest.leaves
            fine = rules.leaf(leaf, begin[nodes.sentence[at]] + nodes.start[at], nodes.symbol[at])
            plan = Plan(forest, rules.sizes, rules.cp)
            found = best_scores(plan, rules.values, fine)[forest.tops, 0].double()
            assert torch.allclose(found, truth, atol=1e-9)
            edges.append(len(forest.rule))
        assert edges[0] < edges[1] < edges[2]  # a better start drops more
        # A start that is better than the best leaves nothing behind: the bound of the whole is not infinite.
        forest, _ = exact.forest(leaf, lengths, truth + 1000)
        assert len(forest.rule) == 0


def test_what_it_is_for(model):
    with pytest.raises(InputError, match="prune=exact is for decoder=viterbi"):
        Parser(model, "max-rule", prune="exact")
    with pytest.raises(InputError, match="prune is 'exactly': expected a posterior"):
        Parser(model, "viterbi", prune="exactly")
    with pytest.raises(InputError, match="one is a CP form of all of them"):
        Parser(compress(model, "cover"), "viterbi", device="cpu", prune="exact")
    parser = Parser(model, "viterbi", device="cpu", prune="exact")
    with pytest.raises(InputError, match="the best tree alone"):
        parser.k_best(["the", "dog"], 2)
    with pytest.raises(InputError, match="the best tree alone"):
        parser.analyse([["the", "dog"]], spans=True)


def test_models_without_a_coarse_grammar():
    model = random_model(2, (2, 3, 1, 4))
    parser = Parser(replace(model, coarse=None), "viterbi", device="cpu", dtype="float64", prune="exact")
    whole = Parser(model, "viterbi", device="cpu", dtype="float64")
    sentences = [["barks", "dog"], ["dog", "barks", "dog"]]
    assert parser.parse_sents(sentences) == whole.parse_sents(sentences)
