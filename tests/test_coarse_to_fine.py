"""Forests: the same sums, gradients and trees as charts where nothing is pruned, and still a tree where much is."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from cases import WITH_GRAMMAR, Posteriors, decoded, listable, make, small
from nltk.tree import Tree
from strategies import random_model

from lvpcfg import Binarisation, InputError, Parser, compress, corpus, train
from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine, Fine
from lvpcfg.chart.decode.decode import best_trees
from lvpcfg.chart.decode.viterbi import best_derivations
from lvpcfg.chart.derivations import Skeletal, Skeleton
from lvpcfg.chart.fast.partition import log_partition
from lvpcfg.chart.forest import layout, plan
from lvpcfg.chart.forest.forest import Forest, Plan, log_likelihood
from lvpcfg.chart.forest.observed import ObservedTrees, RuleNumbers
from lvpcfg.chart.forest.pruning import pruned
from lvpcfg.decompose.coarse import covered, with_coarse
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.projection import projected
from lvpcfg.options import DECODERS, FREE, PRODUCT, RECALL, RULE_SUM, VARIATIONAL, VITERBI
from lvpcfg.parser import THRESHOLD
from lvpcfg.trees.lexicon import LexicalTable


def flat(leaf):
    """[length, batch, states] -> [words of all sentences, states], and the lengths."""
    return leaf.transpose(0, 1).flatten(0, 1), torch.full((leaf.shape[1],), leaf.shape[0])


class Projecting(CoarseToFine):
    """Its coarse grammar is the projection of the first one, and so are the coarse words."""

    def __init__(self, grammars, decoder):
        first = grammars[0].written_out()
        coarsest = projected(first, expected_states(first), torch.zeros_like(first.symbol_of_state))
        super().__init__(grammars, covered(CoarseGrammar(coarsest.grammar)), decoder)
        self.fold = coarsest.words

    def parse(self, words, lengths, threshold, probabilities):
        decoded = super().parse(words, words[0] @ self.fold, lengths, threshold)
        log_prob = torch.full_like(decoded.log_z, -math.inf)
        skeletons = [trees[0] if trees else None for trees in decoded.trees]
        trees = [Skeletal(tuple(skeleton or ())) for skeleton in skeletons]
        observed = ObservedTrees.of(trees, self.rules[0], RuleNumbers(self.rules[0]))
        if probabilities and observed is not None:
            padded = torch.nn.utils.rnn.pad_sequence(words[0].split(lengths.tolist()))
            log_prob[observed.sentences] = observed.log_weights(self.rules[0], padded)
        return [Found(*one) for one in zip(skeletons, decoded.log_z.tolist(), log_prob.tolist(), strict=True)]


class Found(NamedTuple):
    skeleton: Skeleton | None
    log_z: float
    log_prob: float


def coarse_to_fine_of(grammars, decoder):
    return Projecting(grammars, decoder)


def found(case, leaf, decoder, threshold=0.0):
    words, lengths = flat(leaf)
    return coarse_to_fine_of([case.grammar], decoder).parse([words], lengths, threshold, probabilities=True)


@pytest.mark.parametrize("name", WITH_GRAMMAR)
@pytest.mark.parametrize("decoder", [PRODUCT, RULE_SUM, VARIATIONAL, RECALL])
def test_finds_the_best_of_all_trees(name, decoder):
    case = small(name)
    leaf = case.leaf(listable(case), 2)
    log_z, _ = log_partition(case.form, leaf)
    for b, one in enumerate(found(case, leaf, decoder)):
        truth = Posteriors(case, leaf[:, b])
        best = max(truth.objective(decoder, nodes) for nodes in truth.trees)
        tree = tuple(one.skeleton)
        assert truth.objective(decoder, tree) == pytest.approx(best, rel=1e-9)
        assert one.log_z == pytest.approx(float(log_z[b]), rel=1e-12)
        assert one.log_prob - one.log_z == pytest.approx(math.log(truth.trees[tree]), rel=1e-9)


@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_viterbi_finds_the_best_derivation(name):
    case = make(name)
    leaf = case.leaf(6, 3)
    # The chart sums over unary chains between two states here, as the forest does.
    derivations, _ = best_derivations(case.form, leaf)
    for states, one in zip(derivations, found(case, leaf, VITERBI), strict=True):
        expected = [(n.start, n.width, case.symbol[n.top], case.symbol[n.bottom], n.split) for n in states]
        assert [(n.start, n.width, n.top, n.bottom, n.split) for n in one.skeleton] == expected


@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_free_recall_is_that_of_charts(name):
    case = make(name)
    leaf = case.leaf(6, 3)
    expected = decoded(case, leaf, FREE)
    names = case.grammar.symbols.names
    for one, other in zip(found(case, leaf, FREE), expected, strict=True):
        # Spans whose symbol was made by binarisation are worth nothing, and may be others.
        labelled = [
            {(n.start, n.width, n.top) for n in nodes if not names[n.top].startswith("@")}
            for nodes in (one.skeleton, other)
        ]
        assert labelled[0] == labelled[1]


def test_sentences_of_different_lengths_are_parsed_together():
    case = make("rule tensors, unary")
    parts = [case.leaf(length, 1, seed=length) for length in (5, 1, 3, 5)]
    words = torch.cat([part.squeeze(1) for part in parts])
    together = coarse_to_fine_of([case.grammar], PRODUCT).parse(
        [words], torch.tensor([5, 1, 3, 5]), 0.0, probabilities=True
    )
    for part, one in zip(parts, together, strict=True):
        (alone,) = found(case, part, PRODUCT)
        assert one.skeleton == alone.skeleton
        assert (one.log_z, one.log_prob) == pytest.approx((alone.log_z, alone.log_prob), rel=1e-12)


def test_pruning_leaves_less_and_still_a_tree():
    case = make("rule tensors, unary")
    leaf = case.leaf(7, 2) ** 8  # some words are far likelier than others
    exact = [one.log_z for one in found(case, leaf, PRODUCT)]
    for threshold in (1e-4, 1e-2):
        pruned = found(case, leaf, PRODUCT, threshold)
        assert all(one.skeleton for one in pruned)
        assert all(one.log_z < z for one, z in zip(pruned, exact, strict=True))
        exact = [one.log_z for one in pruned]


@pytest.mark.parametrize("threshold", [1e-4, 1e-2, 0.2])
def test_what_is_left_is_what_is_above_the_threshold(threshold):
    """Edge by edge: against the posteriors of the coarse grammar in the forest of all edges."""
    case = make("rule tensors, unary")
    words, lengths = (
        torch.cat([case.leaf(n, 2, seed=n).flatten(0, 1) for n in (6, 5, 1)]),
        torch.tensor([6, 6, 5, 5, 1, 1]),
    )
    words = words**4  # some are far likelier than others
    coarse = coarse_to_fine_of([case.grammar], PRODUCT)
    leaf = words @ coarse.fold

    def edges(threshold):
        forest, nodes = coarse.pruning.coarse.forest(leaf, lengths, threshold)
        known = (
            [(*(int(column[node]) for column in vars(nodes).values()),) for node in range(len(nodes.symbol))]
            + [("top", sentence) for sentence in range(len(lengths))]
            + ["nothing", "one"]
        )
        columns = (forest.rule.tolist(), forest.parent.tolist(), forest.left.tolist(), forest.right.tolist())
        return forest, nodes, [(rule, *(known[node] for node in ends)) for rule, *ends in zip(*columns, strict=True)]

    forest, nodes, every = edges(0.0)
    first = torch.tensor([0, 6, 12, 17, 22, 23])
    rules = coarse.pruning.coarse.rules
    at = first[nodes.sentence[forest.leaves]] + nodes.start[forest.leaves]
    posterior = Fine(forest, rules, rules.leaf(leaf, at, nodes.symbol[forest.leaves])).posteriors().edges.tolist()
    *_, left = edges(threshold)
    assert sorted(map(str, left)) == sorted(
        str(edge) for edge, p in zip(every, posterior, strict=True) if p > threshold
    )
    assert 0 < len(left) < len(every)


def test_a_grammar_with_few_states_in_between_loses_nothing_at_low_thresholds():
    options = {"cycles": 2, "split_iterations": 4, "merge_iterations": 2, "smooth_iterations": 1}
    model = train(corpus("train")[:80], estimator="split_merge", **options)
    sentences = [tree.leaves() for tree in corpus("dev")][:8]
    some, exhaustive = (Parser(model, PRODUCT, "cpu", "float64", prune) for prune in (1e-12, 0))
    for one, two in zip(some.analyse(sentences), exhaustive.analyse(sentences), strict=True):
        assert (one.tree, one.log_prob) == (two.tree, pytest.approx(two.log_prob, rel=1e-9))
    assert len(some._forests.coarse_to_fine.pruning.middle) == 1


def test_a_forest_with_fewer_edges_has_fewer_nodes():
    case = make("rule tensors, unary")
    words, lengths = flat(case.leaf(6, 3))
    parser = coarse_to_fine_of([case.grammar], PRODUCT)
    packed, nodes = parser.pruning.coarse.forest(words @ parser.fold, lengths, 0.0)
    keep = nodes.symbol[packed.left] < 2  # no edge over a leaf
    smaller, kept = pruned(packed, nodes, keep)
    assert not len(smaller.leaves)
    assert smaller.nodes == len(kept.symbol) + 3 < packed.nodes
    for name in ("left", "parent"):
        ends = getattr(packed, name)[keep]
        inner = ends < len(nodes.symbol)
        for of_all, of_some in zip(vars(nodes).values(), vars(kept).values(), strict=True):
            assert torch.equal(of_all[ends[inner]], of_some[getattr(smaller, name)[inner]])
    assert torch.equal(packed.right[keep] == packed.nodes + 1, smaller.right == smaller.nodes + 1)


@pytest.mark.parametrize("prune", [THRESHOLD, 0])
def test_batches_that_do_not_fit_into_the_memory_are_parsed_in_halves(monkeypatch, prune):
    model = with_coarse(random_model())
    sentences = [["dog", "barks"], ["barks", "dog"], ["dog", "dog"], ["new", "dog"], ["dog"]]
    expected = Parser(model, device="cpu", prune=prune).parse_sents(sentences)
    parser = Parser(model, device="cpu", prune=prune)
    name = "_parse_pruned" if prune else "_parse_whole"
    parse = getattr(parser, name)

    def small(some, request):
        if len(some) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return parse(some, request)

    monkeypatch.setattr(parser, name, small)
    assert parser.parse_sents(sentences) == expected
    assert (parser.counts.split > 0, parser.counts.sentences) == (True, len(sentences))

    def broken(some, request):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(parser, name, broken)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        parser.parse_sents(sentences)


def test_batches_have_so_many_words_at_the_most():
    parser = Parser(with_coarse(random_model()), device="cpu", batch_tokens=7)
    lengths = [3, 9, 1, 3, 2, 2]
    batches = list(parser._batches(lengths))
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[number] for number in batch) <= 7 for batch in batches)
    assert len(batches) < len(lengths)
    with pytest.raises(InputError, match="batch_tokens is 0: expected a number of words, such as 16384"):
        Parser(random_model(), batch_tokens=0)


def test_grammars_without_phrases_parse_single_words():
    trees = [Tree.fromstring("(TOP (NN dog))")] * 3
    models = [train(trees, estimator="em", states=2, iterations=2, seed=seed) for seed in (0, 1)]
    for given in (models[0], models):
        parser = Parser(given, device="cpu")
        assert str(parser.parse(["dog"])) == "(TOP (NN dog))"
        assert parser.parse(["dog", "dog"]).leaves() == ["dog", "dog"]
        assert parser.counts.fallbacks == 1


class TestProduct:
    def test_of_a_grammar_with_itself_is_that_grammar(self):
        case = make("rule tensors, unary")
        words, lengths = flat(case.leaf(6, 3))
        for decoder in (PRODUCT, RULE_SUM, VARIATIONAL, RECALL, FREE):
            one, two = (
                coarse_to_fine_of([case.grammar] * times, decoder).parse([words] * times, lengths, 0.0, False)
                for times in (1, 2)
            )
            assert [found.skeleton for found in one] == [found.skeleton for found in two]

    def test_adds_up_what_a_tree_is_worth(self):
        cases = [small("rule tensors, unary", seed) for seed in (1, 2)]
        cases[1] = replace(cases[1], grammar=replace(cases[1].grammar, root=cases[1].grammar.root ** 3))
        cases[1].full.root **= 3
        leaves = [case.leaf(3, 2, seed) for case, seed in zip(cases, (3, 4), strict=True)]
        for decoder in (PRODUCT, RULE_SUM, VARIATIONAL, RECALL):
            parser = coarse_to_fine_of([case.grammar for case in cases], decoder)
            parses = parser.parse([flat(leaf)[0] for leaf in leaves], torch.tensor([3, 3]), 0.0, False)
            for b, one in enumerate(parses):
                truths = [Posteriors(case, leaf[:, b]) for case, leaf in zip(cases, leaves, strict=True)]
                worth = {nodes: sum(truth.objective(decoder, nodes) for truth in truths) for nodes in truths[0].trees}
                assert worth[tuple(one.skeleton)] == pytest.approx(max(worth.values()), rel=1e-9)

    def test_takes_grammars_of_the_same_rules(self):
        one, two = random_model(), random_model(1)
        assert Parser([one, two], device="cpu").parse(["dog", "barks"]).leaves() == ["dog", "barks"]
        other = replace(
            two,
            grammar=replace(two.grammar, binary=replace(two.grammar.binary, rules=two.grammar.binary_rules.flip(0))),
        )
        with pytest.raises(InputError, match=r"model 2 of 2 has other symbols, rules or binarisation than the first"):
            Parser([one, other])
        with pytest.raises(InputError, match="viterbi takes one model"):
            Parser([one, two], decoder="viterbi")


@pytest.mark.parametrize("unary", [True, False])
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_parser_agrees_with_exhaustive_charts(decoder, unary):
    model = random_model()
    if not unary:
        grammar = model.grammar
        model = replace(model, grammar=replace(grammar, unary_rules=grammar.unary_rules[:0], unary=grammar.unary[:0]))
    model = with_coarse(model)
    sentences = [["dog"], ["dog", "barks"], ["dog", "barks", "new"], ["barks", "dog", "new", "dog"], ["dog"] * 4]
    sentences = sentences if unary else sentences[2:]  # what the grammar has trees for
    some, exhaustive = (Parser(model, decoder, "cpu", "float64", prune) for prune in (1e-12, 0))
    for one, two in zip(some.analyse(sentences), exhaustive.analyse(sentences), strict=True):
        assert one.tree == two.tree
        if decoder != FREE:  # whose trees are not those of a forest
            assert one.log_prob == pytest.approx(two.log_prob, rel=1e-9)
        assert one.sentence_log_prob == pytest.approx(two.sentence_log_prob, rel=1e-9)
    assert some.counts.fallbacks == exhaustive.counts.fallbacks == some.counts.exhaustive == 0


@pytest.fixture(scope="module", params=["collapse", "keep"])
def latent(request):
    return train(corpus("train")[:200], "em", Binarisation(unaries=request.param), states=2, iterations=3)


@pytest.mark.parametrize("decoder", sorted(set(DECODERS) - {VITERBI}))  # which has ties here
def test_pruning_leaves_the_objective_as_it_is(latent, decoder):
    """With and without unary rules: without them, the step from bottom to top of a span is worth nothing."""
    sentences = [tree.leaves() for tree in corpus("dev") if 5 <= len(tree.leaves()) <= 14][:60]
    some, exhaustive = (Parser(latent, decoder, "cpu", "float64", prune) for prune in (1e-30, 0))
    for one, two in zip(some.analyse(sentences), exhaustive.analyse(sentences), strict=True):
        assert one.tree == two.tree
        assert one.sentence_log_prob == pytest.approx(two.sentence_log_prob, rel=1e-9)
        if decoder != FREE:  # whose trees need not be trees of the grammar
            assert one.log_prob == pytest.approx(two.log_prob, rel=1e-9)
    assert some.counts.fallbacks == exhaustive.counts.fallbacks == some.counts.exhaustive == 0


def test_grammars_whose_rules_are_all_between_phrases():
    """Their cover has terms of one kind alone."""
    short, long = "(TOP (S (NP (NN a)) (VP (VB b))))", "(TOP (S (NP (NN c)) (VP (VP (VB b)) (NP (NN a)))))"
    trees = [Tree.fromstring(short), Tree.fromstring(long)]
    parser = Parser(train(trees * 5, "em", states=2, iterations=2), device="cpu")
    assert parser._forests.coarse_to_fine.pruning.coarse.form.term_counts[1:] == (0, 0, 0)
    assert parser.parse_sents([tree.leaves() for tree in trees]) == trees
    assert parser.counts.exhaustive == 0


@pytest.fixture(scope="module")
def model():
    options = {"cycles": 2, "split_iterations": 4, "merge_iterations": 2, "smooth_iterations": 1}
    return train(corpus("train")[:80], estimator="split_merge", **options)


@pytest.fixture(scope="module")
def sentences():
    return [tree.leaves() for tree in corpus("dev")][:12]


class TestCoarseGrammar:
    def test_is_the_treebank_pcfg(self, model):
        counted, coarse = train(corpus("train")[:80]).grammar, model.coarse.grammar
        assert torch.equal(coarse.binary_rules, model.grammar.binary_rules)
        assert torch.equal(coarse.binary.values, counted.binary.values)
        for name in ("states", "binary_rules", "unary_rules", "root", "unary"):
            assert torch.equal(getattr(coarse, name), getattr(counted, name)), name
        entries = torch.arange(len(model.lexicon))
        assert torch.equal(coarse.lexical.lookup(entries), counted.lexical.lookup(entries))

    def test_is_inherited(self, model):
        assert compress(model, method="als", rank=2).coarse is model.coarse

    def test_a_model_without_one_fills_whole_charts(self, model, sentences):
        pruned, filled = Parser(model, device="cpu"), Parser(replace(model, coarse=None), device="cpu")
        for parser in (pruned, filled):
            parser.parse_sents(sentences[:3])
        assert "coarse" in pruned.times
        assert "coarse" not in filled.times

    def test_signed_models_are_pruned_as_others_are(self, sentences):
        """Cells y become G y, with an invertible G for each symbol: other parameters of the same trees."""
        model = train(corpus("train")[:80], "em", states=3, iterations=4)
        signed = replace(model, grammar=in_another_basis(model.grammar))
        parsers = [Parser(one, device="cpu", dtype="float64") for one in (model, signed)]
        one, two = (parser.analyse(sentences) for parser in parsers)
        assert [parse.tree for parse in one] == [parse.tree for parse in two]
        expected = [(parse.log_prob, parse.sentence_log_prob) for parse in one]
        for parse, numbers in zip(two, expected, strict=True):
            assert (parse.log_prob, parse.sentence_log_prob) == pytest.approx(numbers, rel=1e-9)
        assert all("coarse" in parser.times and not parser.counts.exhaustive for parser in parsers)


def in_another_basis(grammar):
    """Every symbol has three states."""
    generator = torch.Generator().manual_seed(2)
    g = torch.randn(len(grammar.states), 3, 3, generator=generator, dtype=torch.float64)
    back = torch.linalg.inv(g)
    a, b, c = grammar.binary_rules.unbind(1)
    binary = torch.einsum("rxi,rijk,rjy,rkz->rxyz", g[a], grammar.binary.values.view(-1, 3, 3, 3), back[b], back[c])
    a, b = grammar.unary_rules.unbind(1)
    unary = torch.einsum("rxi,rij,rjy->rxy", g[a], grammar.unary.view(-1, 3, 3), back[b])
    root = torch.einsum("si,six->sx", grammar.root.view(-1, 3), back)
    entries = len(grammar.lexical.row) - 1
    table = grammar.lexical.lookup(torch.arange(entries)).view(entries, -1, 3)
    table = torch.einsum("sxi,esi->esx", g[len(grammar.symbols.interminals) :], table).flatten(1)
    lexical = LexicalTable(
        row=torch.zeros(entries + 1, dtype=torch.int64),
        state=torch.zeros(0, dtype=torch.int64),
        value=table.new_zeros(0),
        weight=table.new_ones(entries),
        source=torch.arange(entries),
        backoff=table,
        widest=0,
    )
    binary = grammar.binary.with_tensors({"values": binary.flatten()})
    return replace(grammar, root=root.flatten(), binary=binary, unary=unary.flatten(), lexical=lexical)


def test_what_pruning_loses_is_parsed_again():
    model = with_coarse(random_model())
    parser = Parser(model, device="cpu", prune=0.9)  # of a sentence with several trees nothing is left
    sentence = ["barks", "dog", "new", "dog"]
    assert parser.parse(sentence).leaves() == sentence
    assert parser.counts.looser > 0
    assert parser.counts.fallbacks == 0


def test_a_node_without_edges_has_no_say_in_the_scale_of_its_parents():
    """A pruned child whose exponent is large beside those that exist: once, all else underflowed."""
    # Node 2 <- (0, 3) or (0, 1); node 3 has no edge. The leaves are tiny.
    columns = torch.tensor([[1, 1, 2], [0, 0, 1], [2, 2, 4], [0, 0, 2], [3, 1, 6]])
    packed = Forest(5, *columns, leaves=torch.tensor([0, 1]), tops=torch.tensor([4]))
    plan = Plan(packed, torch.ones(2, 3, dtype=torch.int64))
    tiny = torch.tensor([[1e-30], [1e-30]])
    scores = plan.inside(plan.weights(torch.ones(2), tiny.dtype), tiny)
    assert float(scores.log_z) == pytest.approx(math.log(1e-30) * 2, rel=1e-6)


class TestGradients:
    @pytest.fixture
    def packed(self):
        case = make("rule tensors, unary")
        parser = coarse_to_fine_of([case.grammar], PRODUCT)
        words, lengths = flat(case.leaf(4, 2))
        packed, kept = parser.pruning.coarse.forest(words @ parser.fold, lengths, 0.0)
        rules = parser.rules[0]
        word = 4 * kept.sentence[packed.leaves] + kept.start[packed.leaves]
        return packed, rules, rules.leaf(words, word, kept.symbol[packed.leaves])

    def test_are_numerical_derivatives(self, packed):
        packed, rules, leaf = packed
        plan = Plan(packed, rules.sizes)
        inputs = (rules.values.clone().requires_grad_(), leaf.clone().requires_grad_())
        assert torch.autograd.gradcheck(lambda *inputs: log_likelihood(plan, *inputs), inputs)

    def test_do_not_depend_on_how_edges_are_cut_up(self, packed, monkeypatch):
        packed, rules, leaf = packed
        expected = Fine(packed, rules, leaf).posteriors()
        for module, name, size in ((plan, "CHUNK", 64), (layout, "BATCH", 0)):
            monkeypatch.setattr(module, name, size)
            again = Fine(packed, rules, leaf).posteriors()
            assert torch.allclose(again.edges, expected.edges, rtol=1e-12)
            assert torch.allclose(again.log_z, expected.log_z, rtol=1e-12)

    def test_posteriors_of_edges_into_a_node_add_up_to_its_own(self, packed):
        packed, rules, leaf = packed
        known = Fine(packed, rules, leaf).posteriors()
        sums = torch.zeros_like(known.nodes).index_add(0, packed.parent, known.edges)
        inner = torch.ones_like(sums, dtype=torch.bool)
        inner[packed.leaves] = False
        inner[-2:] = False
        assert torch.allclose(sums[inner], known.nodes[inner], rtol=1e-10)
        assert torch.allclose(known.nodes[packed.tops], torch.ones(2, dtype=torch.float64))


def test_best_edges_leave_out_what_is_impossible():
    columns = torch.tensor([[1, 0, 2, 0, 1], [1, 0, 2, 1, 0]]).unbind(1)
    packed = Forest(3, *columns, leaves=torch.tensor([0, 1]), tops=torch.tensor([2]))
    edges = torch.tensor([-math.inf, -3.0])
    best = best_trees(packed, edges, torch.zeros(2))
    assert (best.left[2], best.right[2], best.worth[2]) == (1, 0, -3)
    assert best_trees(packed, edges - math.inf, torch.zeros(2)).worth[2] == -math.inf
