"""The k best trees of a sentence: against all of its trees, listed."""

import itertools
import math

import pytest
import torch
from cases import Posteriors, listable, small
from enumeration import derivations
from strategies import random_model
from test_decoders import bracketings

from lvpcfg import InputError, Parser
from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine
from lvpcfg.chart.decode.decoded import Wanted
from lvpcfg.chart.decode.exhaustive import Exhaustive
from lvpcfg.chart.decode.written import Writer
from lvpcfg.chart.derivations import Node
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.decompose.coarse import covered
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.projection import projected
from lvpcfg.options import FREE, PRODUCT, RECALL, RULE_SUM, VARIATIONAL, VITERBI

NAMES = ("rule list, unary", "rule tensors, unary")
LISTED = (PRODUCT, RULE_SUM, VARIATIONAL, RECALL, VITERBI)


def k_best(case, leaf, decoder, k):
    """Of forests of which nothing is pruned."""
    grammar = case.grammar
    coarsest = projected(grammar, expected_states(grammar), torch.zeros_like(grammar.symbol_of_state))
    parser = CoarseToFine([grammar], covered(CoarseGrammar(coarsest.grammar)), decoder)
    words, lengths = leaf.transpose(0, 1).flatten(0, 1), torch.full((leaf.shape[1],), leaf.shape[0])
    return parser.parse([words], words @ coarsest.words, lengths, 0.0, Wanted(k)).trees


def worths_of_trees(case, words, decoder):
    """The objective of each tree: of a skeletal tree, or by Viterbi of its best derivation."""
    if decoder != VITERBI:
        truth = Posteriors(case, words)
        return {tree: truth.objective(decoder, tree) for tree in truth.trees}
    found = {}
    for weight, states in derivations(case.full, words):
        tree = tuple(Node(n.start, n.width, case.symbol[n.top], case.symbol[n.bottom], n.split) for n in states)
        found[tree] = max(found.get(tree, -math.inf), math.log(weight))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decoder", LISTED)
def test_are_those_of_all_trees(name, decoder):
    """Of trees that are written alike, the best one."""
    case = small(name)
    leaf, writer = case.leaf(listable(case), 2), Writer(case.grammar)

    def written(tree):
        return str(writer.tree(list(tree), [str(place) for place in range(len(leaf))]))

    truths = []
    for b in range(2):
        worth, best = worths_of_trees(case, leaf[:, b], decoder), {}
        for tree, value in worth.items():
            best[written(tree)] = max(best.get(written(tree), -math.inf), value)
        truths.append((worth, sorted(best.values(), reverse=True)))
    for k in (2, 7, 1000):
        for trees, (worth, best) in zip(k_best(case, leaf, decoder, k), truths, strict=True):
            assert len({written(tree) for tree in trees}) == len(trees)
            found = [worth[tuple(Node(n.start, n.width, n.top, n.bottom, n.split) for n in tree)] for tree in trees]
            assert found == pytest.approx(best[:k], rel=1e-6, abs=1e-6)


def labelled(truth, grammar, spans):
    """All trees over some spans, each with its worth: spans have their likeliest symbols, any other label or none."""
    inner, symbols = len(grammar.symbols.interminals), range(len(truth.real))
    none = truth.real.index(False)
    choices = []
    for start, width in spans:
        top, bottom = (
            max(symbols, key=lambda s, layer=layer: (layer[start, width, s], s == none))
            for layer in (truth.top, truth.bottom)
        )
        some = [(top, top if top >= inner else bottom, truth.label(start, width))]
        for symbol in symbols:
            worth = truth.top[start, width, symbol]
            if truth.real[symbol] and symbol != top and worth:
                some.append((symbol, bottom if width == 1 and symbol < inner else symbol, worth))
        if width > 1 and truth.real[top]:
            some.append((none, none, 0.0))
        choices.append(some)
    for chosen in itertools.product(*choices):
        nodes = [(*span, top, bottom) for span, (top, bottom, _) in zip(spans, chosen, strict=True)]
        yield nodes, sum(worth for *_, worth in chosen)


@pytest.mark.parametrize("k", [2, 10000])
@pytest.mark.parametrize("name", NAMES)
def test_of_free_recall_are_those_of_all_labelled_bracketings(name, k):
    case = small(name)
    leaf, writer = case.leaf(3, 2), Writer(case.grammar)

    def written(nodes):
        """By the labels of all spans."""
        labels = ((start, width, writer.labels(writer.chain(*ends))) for start, width, *ends in nodes)
        return frozenset(span for span in labels if span[2])

    chart = Chart(case.form, leaf)
    found = Exhaustive(case.grammar, case.form, FREE).trees(chart, Outside(chart, torch.ones_like(chart.log_z)), k)
    for b, trees in enumerate(found):
        truth, best = Posteriors(case, leaf[:, b]), {}
        for spans in bracketings(0, len(leaf)):
            for nodes, worth in labelled(truth, case.grammar, spans):
                best[written(nodes)] = max(best.get(written(nodes), -math.inf), worth)
        ours = [written([(n.start, n.width, n.top, n.bottom) for n in tree]) for tree in trees]
        assert len(set(ours)) == len(ours)
        expected = sorted(best.values(), reverse=True)[:k]
        assert [best[one] for one in ours] == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("prune", [0, 1e-9])
@pytest.mark.parametrize("decoder", [PRODUCT, FREE, VITERBI])
def test_of_a_parser_are_different_and_the_first_is_the_best(decoder, prune):
    parser = Parser(random_model(), decoder, "cpu", "float64", prune)
    sentences = [["dog", "barks", "dog"], ["dog"], ["barks", "dog", "dog", "barks"]]
    found = parser.k_best_sents(sentences, 4, spans=True)
    for sentence, tree, parses in zip(sentences, parser.parse_sents(sentences), found, strict=True):
        trees = [str(parse.tree) for parse in parses]
        assert trees[0] == str(tree)
        assert len(set(trees)) == len(trees) <= 4
        assert all(parse.tree.leaves() == sentence for parse in parses)
        assert sum(parse.posterior for parse in parses) <= 1 + 1e-9
        spans = [{(span.label, span.start, span.end): span.posterior for span in parse.spans} for parse in parses]
        for span, posterior in {name: value for some in spans for name, value in some.items()}.items():
            listed = sum(parse.posterior for parse, some in zip(parses, spans, strict=True) if span in some)
            assert listed - 1e-9 <= posterior <= 1
    assert len(trees) == 4


@pytest.mark.parametrize("k", [0, -1, 2.0, "two", None])
def test_how_many_is_a_number(k):
    with pytest.raises(InputError, match="expected a number of trees, 1, 2"):
        Parser(random_model()).k_best(["dog"], k)
