"""Forests under every representation of binary rules: sums with their sign, posteriors, best derivations, derivatives,
and what leaves the range of float32 or of float64.

The truth is the textbook, node by node and edge by edge, over tensors written out (`Slow`), or the chart.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from cases import make, of_grammar
from test_coarse_to_fine import coarse_to_fine_of, flat
from test_rule_cp import factored

from lvpcfg import Binarisation, Parser
from lvpcfg.chart.decode.coarse_to_fine import Fine
from lvpcfg.chart.fast.partition import LOGARITHMIC, WIDE
from lvpcfg.chart.fast.partition import log_partition as chart_log_partition
from lvpcfg.chart.forest.forest import Forest, Logarithmic, Plan, Scaled, log_likelihood, log_partition, posteriors
from lvpcfg.chart.forest.prune import FineRules
from lvpcfg.chart.forest.viterbi import best_derivations
from lvpcfg.decompose.coarse import with_coarse
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import ForestRules
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.options import DECODERS, FREE, PRODUCT, VITERBI
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.treebank import Symbols


def whole_cp(grammar, signed):
    """The rules as one CP form of rank 2, which is smaller than the tensors."""
    generator = torch.Generator().manual_seed(5)
    inner, states = int(grammar.first_state[len(grammar.symbols.interminals)]), len(grammar.root)
    u, v, w = (
        torch.rand(2, size, generator=generator, dtype=torch.float64) - 0.3 * signed for size in (inner, states, states)
    )
    return WholeCP(grammar.binary.state_counts, grammar.binary.interminals, grammar.binary.rules, u, v, w)


REPRESENTATIONS = ("rule tensors", "rules in CP form", "whole CP")


def represented(name, signed):
    grammar = make("rule tensors", signed=signed).grammar
    if name == "rules in CP form":
        grammar = factored(grammar, [0, 1, 4, 6], signed=signed)
    elif name == "whole CP":
        grammar = replace(grammar, binary=whole_cp(grammar, signed))
    return grammar


class Packed:
    """All trees of random sentences as a forest, under one grammar and under its rules written out."""

    def __init__(self, name, signed=False, length=5, sentences=3):
        self.grammar = represented(name, signed)
        self.tensors = replace(self.grammar, binary=self.grammar.binary.listed())
        case = make("rule tensors")
        words, lengths = flat(case.leaf(length, sentences))
        parser = coarse_to_fine_of([case.grammar], PRODUCT)
        self.forest, self.nodes = parser.pruning.coarse.forest(words @ parser.fold, lengths, 0.0)
        self.words = case.leaf(length, sentences) - 0.4 * signed
        words, leaves = flat(self.words)[0], self.forest.leaves
        at = length * self.nodes.sentence[leaves] + self.nodes.start[leaves]
        self.rules, self.rules_of_tensors = FineRules(self.grammar), FineRules(self.tensors)
        self.leaf = self.rules.leaf(words, at, self.nodes.symbol[leaves])
        self.plan = Plan(self.forest, self.rules.sizes, self.rules.cp)

    @property
    def arguments(self):
        return self.plan, self.rules.values, self.leaf


class Slow:
    """The recurrence, one edge after the other, with sums or with the largest product."""

    def __init__(self, forest, rules, leaf, best=False):
        starts = rules.sizes.prod(1).cumsum(0) - rules.sizes.prod(1)
        self.tensor = [
            rules.values[int(start) : int(start) + math.prod(size)].view(size)
            for start, size in zip(starts, rules.sizes.tolist(), strict=True)
        ]
        alpha = {int(node): row.clone().requires_grad_() for node, row in zip(forest.leaves, leaf, strict=True)}
        alpha[forest.nodes + 1] = torch.ones(1, dtype=torch.float64)
        self.edges, self.nodes = {}, {}
        by_node = {}
        for edge in range(len(forest.rule)):
            by_node.setdefault(int(forest.parent[edge]), []).append(edge)
        for node in sorted(by_node, key=lambda node: int(forest.level[by_node[node][0]])):
            terms = []
            for edge in by_node[node]:
                t = self.tensor[int(forest.rule[edge])]
                left, right = (alpha[int(column[edge])] for column in (forest.left, forest.right))
                products = t * left[: t.shape[1]].unsqueeze(1) * right[: t.shape[2]]
                term = (products.amax((1, 2)) if best else products.sum((1, 2))).requires_grad_()
                self.edges[edge] = torch.ones((), dtype=torch.float64, requires_grad=True)
                terms.append(term * self.edges[edge])
            alpha[node] = torch.stack(terms).amax(0) if best else torch.stack(terms).sum(0)
        self.alpha = alpha
        self.z = torch.stack([alpha[int(top)][0] for top in forest.tops])

    def edge_posteriors(self):
        """d log |Z| / d log(weight of the edge)"""
        scales = [self.edges[edge] for edge in range(len(self.edges))]
        return torch.stack(torch.autograd.grad(self.z.abs().log().sum(), scales))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", REPRESENTATIONS)
class TestEveryRepresentation:
    def test_is_the_one_meant(self, name, signed):
        packed = Packed(name, signed)
        assert (packed.rules.cp is None) == (name == "rule tensors")
        assert packed.grammar.signed == signed

    def test_log_z_with_its_sign(self, name, signed):
        packed = Packed(name, signed, sentences=8)
        log_z, sign = log_partition(*packed.arguments)
        truth, truth_sign = chart_log_partition(of_grammar(packed.tensors).form, packed.words)
        torch.testing.assert_close(log_z, truth)
        assert torch.equal(sign, truth_sign)
        assert set(sign.tolist()) == ({-1, 1} if signed else {1})

    def test_posteriors_of_edges_and_nodes(self, name, signed):
        packed = Packed(name, signed)
        truth = Slow(packed.forest, packed.rules_of_tensors, packed.leaf)
        found = posteriors(*packed.arguments)
        torch.testing.assert_close(found.log_z, truth.z.abs().log())
        torch.testing.assert_close(found.sign, truth.z.sign())
        torch.testing.assert_close(found.edges, truth.edge_posteriors(), rtol=1e-8, atol=1e-10)
        sums = torch.zeros_like(found.nodes).index_add(0, packed.forest.parent, found.edges)
        inner = torch.ones_like(sums, dtype=torch.bool).index_fill(0, packed.forest.leaves, False)[:-2]
        torch.testing.assert_close(found.nodes[:-2][inner], sums[:-2][inner])
        torch.testing.assert_close(found.nodes[packed.forest.tops], torch.ones(3, dtype=torch.float64))
        assert not found.ways

    def test_derivatives(self, name, signed):
        packed = Packed(name, signed, length=4, sentences=2)
        leaf, values = packed.leaf.clone().requires_grad_(), packed.rules.values.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda *inputs: log_likelihood(packed.plan, *inputs), (values, leaf))


@pytest.mark.parametrize("name", REPRESENTATIONS)
class TestNonNegative:
    def test_best_derivations(self, name):
        packed = Packed(name)
        truth = Slow(packed.forest, packed.rules_of_tensors, packed.leaf, best=True)
        for chosen in (best_derivations(*packed.arguments), best_derivations(*packed.arguments, logarithms=True)):
            edges = chosen[chosen >= 0]
            assert torch.equal(packed.forest.parent[edges], (chosen >= 0).nonzero().squeeze(1))
            kept = packed.forest.with_edges(edges)
            best = Slow(kept, packed.rules_of_tensors, packed.leaf, best=True)
            torch.testing.assert_close(best.z, truth.z)

    def test_log_sum_exp_is_the_same_sum(self, name):
        packed = Packed(name)
        gradient = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        scaled, logarithmic = (way(*packed.arguments) for way in (Scaled, Logarithmic))
        torch.testing.assert_close(logarithmic.log_z, scaled.log_z)
        torch.testing.assert_close(logarithmic.sign, scaled.sign)
        (one, _), (two, _) = scaled.posteriors(), logarithmic.posteriors()
        torch.testing.assert_close(two.edges, one.edges)
        torch.testing.assert_close(two.nodes, one.nodes)
        (one, _), (two, _) = scaled.gradients(gradient), logarithmic.gradients(gradient)
        torch.testing.assert_close(two.leaf * packed.leaf, one.leaf * packed.leaf)
        torch.testing.assert_close(two.rules[0] * packed.rules.values, one.rules[0] * packed.rules.values)
        for mine, other in zip(two.rules[1:], one.rules[1:], strict=True):
            torch.testing.assert_close(mine, other)

    def test_trees_are_found_by_viterbi(self, name):
        packed = Packed(name)
        words, lengths = flat(packed.words)
        parser = coarse_to_fine_of([packed.tensors], VITERBI)
        two = parser.parse([words], lengths, 0.0, probabilities=True)
        parser.rules = [packed.rules]
        one = parser.parse([words], lengths, 0.0, probabilities=True)
        assert None not in [found.skeleton for found in one]
        assert [found.skeleton for found in one] == [found.skeleton for found in two]


def comb(words):
    """One tree over so many words, twice: (((w w) w) w), whose nodes have two states each."""
    edges, nodes = [], 0
    leaves, tops = [], []
    for _ in range(2):
        leaf = list(range(nodes, nodes + words))
        leaves += leaf
        nodes += words
        left = leaf[0]
        for level, right in enumerate(leaf[1:], 1):
            edges.append((level, 0, nodes, left, right))
            left, nodes = nodes, nodes + 1
        edges.append((words, 1, nodes, left, -1))
        tops.append(nodes)
        nodes += 1
    columns = torch.tensor(edges)
    columns[columns < 0] = nodes + 1
    return Forest(nodes, *columns.unbind(1), leaves=torch.tensor(leaves), tops=torch.tensor(tops))


SIZES = torch.tensor([[2, 2, 2], [1, 2, 1]])


def two_symbols_in_one(words, tiny, dtype=torch.float32):
    """A -> A A .5 | x .5 and B -> B B .5 | x `tiny`, as the two states of one symbol, and B as the root."""
    binary = torch.zeros(2, 2, 2, dtype=torch.float64)
    binary[0, 0, 0] = binary[1, 1, 1] = 0.5
    rules = torch.cat([binary.flatten(), torch.tensor([0.0, 1.0], dtype=torch.float64)])
    leaf = torch.tensor([0.5, tiny], dtype=torch.float64).repeat(2 * words, 1)
    return rules, leaf.to(dtype)


class TestRange:
    """With B as the root, each word moves B away from A by log(.5 / tiny)."""

    @pytest.mark.parametrize(("words", "way"), [(8, None), (30, WIDE), (150, LOGARITHMIC)])
    def test_states_of_a_node_that_are_far_apart(self, words, way):
        forest = comb(words)
        plan = Plan(forest, SIZES)
        rules, leaf = two_symbols_in_one(words, 0.001)
        truth = words * math.log(0.001) + (words - 1) * math.log(0.5)
        found = posteriors(plan, rules, leaf)
        assert found.log_z.tolist() == pytest.approx([truth] * 2, rel=1e-6)
        assert found.sign.tolist() == [1, 1]
        torch.testing.assert_close(found.edges, torch.ones_like(found.edges))
        torch.testing.assert_close(found.nodes[:-2], torch.ones_like(found.nodes[:-2]))
        assert dict(found.ways) == ({way: 2} if way else {})
        assert log_partition(plan, rules, leaf)[0].tolist() == pytest.approx([truth] * 2, rel=1e-6)
        chosen = best_derivations(plan, rules, leaf)
        assert sorted(chosen[chosen >= 0].tolist()) == list(range(len(forest.rule)))

    @pytest.mark.parametrize("words", [8, 30, 150])
    def test_expected_counts(self, words):
        plan = Plan(comb(words), SIZES)
        rules, leaf = (tensor.requires_grad_() for tensor in two_symbols_in_one(words, 0.001))
        gradient = torch.tensor([1.0, 2.0], dtype=torch.float64)
        (log_likelihood(plan, rules, leaf) * gradient).sum().backward()
        counts = torch.zeros(10, dtype=torch.float64)
        counts[7], counts[9] = 3 * (words - 1), 3
        torch.testing.assert_close(rules * rules.grad, counts, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close((leaf * leaf.grad).sum(0), torch.tensor([0, 3.0 * words]), rtol=1e-5, atol=1e-8)

    def test_only_the_sentence_that_needs_it_is_computed_again(self):
        words = 30
        forest, (rules, leaf) = comb(words), two_symbols_in_one(words, 0.001)
        leaf[words:, 0] = 0  # B alone, and so in range
        found = posteriors(Plan(forest, SIZES), rules, leaf)
        truth = words * math.log(0.001) + (words - 1) * math.log(0.5)
        assert found.log_z.tolist() == pytest.approx([truth] * 2, rel=1e-6)
        assert dict(found.ways) == {WIDE: 1}

    def test_a_state_that_is_lost_though_log_z_is_not(self):
        """Both states are roots, but the one that underflowed weighs more: log Z alone would not show it."""
        words = 14
        forest, (rules, leaf) = comb(words), two_symbols_in_one(words, 0.0005)
        rules[8:] = torch.tensor([1e-40, 1.0])
        a = math.log(1e-40) + words * math.log(0.5)
        b = words * math.log(0.0005)
        truth = math.log(math.exp(a - b) + 1) + b + (words - 1) * math.log(0.5)
        found = posteriors(Plan(forest, SIZES), rules, leaf)
        assert found.log_z.tolist() == pytest.approx([truth] * 2, rel=1e-6)

    def test_signed_numbers_stop_at_float64(self):
        words = 30
        forest, (rules, leaf) = comb(words), two_symbols_in_one(words, -0.001)
        found = posteriors(Plan(forest, SIZES), rules, leaf)
        truth = words * math.log(0.001) + (words - 1) * math.log(0.5)
        assert found.log_z.tolist() == pytest.approx([truth] * 2, rel=1e-6)
        assert found.sign.tolist() == [1, 1]
        odd = two_symbols_in_one(31, -0.001)
        assert posteriors(Plan(comb(31), SIZES), *odd).sign.tolist() == [-1, -1]
        rules, leaf = two_symbols_in_one(150, -0.001)
        assert not bool(posteriors(Plan(comb(150), SIZES), rules, leaf).log_z.isfinite().any())

    def test_what_has_no_derivation_is_not_computed_again(self):
        words = 5
        forest, (rules, leaf) = comb(words), two_symbols_in_one(words, 0.001)
        leaf[2] = 0
        found = posteriors(Plan(forest, SIZES), rules, leaf)
        assert found.log_z[0] == -math.inf
        assert found.sign.tolist() == [0, 1]
        assert not bool(found.edges[:words].any())
        assert not found.ways


class TwiceTheTerms(RuleTensors):
    """A representation of a user's own: the tensors of some rules halved, and given back as a CP form of their entries.

    Forests know it by what it hands them, and by nothing else.
    """

    def for_forests(self):
        rules = torch.tensor([2, 3])  # A -> V N and A -> N V have 15 entries each
        volume = self.states[self.rules].prod(1)
        kept = torch.ones_like(volume, dtype=torch.bool).index_fill(0, rules, False)
        factors = []
        for rule in rules.tolist():
            tensor = torch.zeros(5, 5, 5, dtype=self.dtype)
            tensor[tuple(slice(size) for size in self.tensor(rule).shape)] = self.tensor(rule) / 2
            terms = tensor.nonzero().repeat(2, 1)
            one_hot = torch.nn.functional.one_hot(terms, 5).to(self.dtype)  # [terms, 3, 5]
            one_hot[:, 0] *= tensor[tuple(terms.T)].unsqueeze(1)
            factors.append(one_hot)
        u, v, w = torch.stack(factors).unbind(2)
        return ForestRules(self.values[torch.repeat_interleave(kept, volume)], OwnForms(rules, Factors(u, v, w)))


@dataclass
class OwnForms:
    cp_rules: torch.Tensor
    factors: Factors


def test_a_representation_of_ones_own():
    packed = Packed("rule tensors")
    rules = FineRules(replace(packed.grammar, binary=TwiceTheTerms(**vars_of(packed.grammar.binary))))
    assert isinstance(rules.cp, OwnForms)
    found = posteriors(Plan(packed.forest, rules.sizes, rules.cp), rules.values, packed.leaf)
    truth = posteriors(*packed.arguments)
    torch.testing.assert_close(found.log_z, truth.log_z)
    torch.testing.assert_close(found.edges, truth.edges)


def vars_of(binary):
    return {name: getattr(binary, name) for name in ("state_counts", "interminals", "rules", "values")}


def test_a_plan_of_no_edges():
    forest = Forest(1, *torch.zeros(5, 0, dtype=torch.int64), leaves=torch.zeros(0).long(), tops=torch.tensor([0]))
    found = posteriors(Plan(forest, SIZES), torch.ones(10), torch.ones(0, 2))
    assert found.log_z.tolist() == [-math.inf]


def test_fine_gives_the_posteriors_of_the_forest():
    packed = Packed("rule tensors")
    known = Fine(packed.forest, packed.rules, packed.leaf).posteriors()
    torch.testing.assert_close(known.edges, posteriors(*packed.arguments).edges)


def right_branching(tiny):
    """S -> X S and S -> X X over the words x, with the two states of `two_symbols_in_one` and B as the root."""
    states = (2, 2)
    rules = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    rules[:, 0, 0, 0] = rules[:, 1, 1, 1] = 0.5
    grammar = Grammar(
        symbols=Symbols(("S",), ("X",)),
        binary=RuleTensors(states, 1, torch.tensor([[0, 1, 0], [0, 1, 1]]), rules.flatten()),
        unary_rules=torch.zeros(0, 2, dtype=torch.int64),
        unary=torch.zeros(0, dtype=torch.float64),
        root=torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        lexical=LexicalTable(
            row=torch.tensor([0, 2, 2]),
            state=torch.tensor([0, 1]),
            value=torch.tensor([0.5, tiny], dtype=torch.float64),
            weight=torch.ones(2, dtype=torch.float64),
            source=torch.tensor([0, 0]),
            backoff=torch.zeros(1, 2, dtype=torch.float64),
            widest=2,
        ),
    )
    model = Model(grammar, Lexicon(("x",), ("<unknown>",), "english"), Binarisation(), {})
    return with_coarse(model)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("words", "float64", "log_sum_exp"), [(8, 0, 0), (30, 1, 0), (150, 0, 1)])
def test_the_parser_counts_what_is_computed_again(decoder, words, float64, log_sum_exp):
    parser = Parser(right_branching(0.001), decoder, "cpu")
    (parse,) = parser.analyse([["x"] * words])
    truth = words * math.log(0.001) + (words - 1) * math.log(0.5)
    assert not parse.flat
    assert parse.tree.height() > words / 2
    assert parse.sentence_log_prob == pytest.approx(truth, rel=1e-6)
    assert parser.counts.exhaustive == parser.counts.looser == 0
    if decoder != VITERBI:
        assert (parser.counts.float64, parser.counts.log_sum_exp) == (float64, log_sum_exp)
    if decoder != FREE:
        assert parse.log_prob == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("decoder", sorted(set(DECODERS) - {VITERBI}))
def test_a_negative_sum_is_parsed_in_its_forest(decoder):
    model = right_branching(0.3)
    flipped = replace(model, grammar=replace(model.grammar, root=-model.grammar.root))
    one, two = (Parser(each, decoder, "cpu", prune=1e-9) for each in (model, flipped))
    sentences = [["x"] * words for words in (3, 6)]
    parses = list(zip(one.analyse(sentences), two.analyse(sentences), strict=True))
    for expected, found in parses:
        assert found.tree == expected.tree
        assert found.sentence_log_prob == pytest.approx(expected.sentence_log_prob)
        assert found.posterior == pytest.approx(expected.posterior)
    assert two.counts.fallbacks == two.counts.exhaustive == two.counts.looser == 0
