"""States by clusters: k-means against all partitions, counts against a loop over nodes."""

import itertools
from dataclasses import replace

import pytest
import torch

import lvpcfg
from lvpcfg import InputError, Parser, build_treebank, corpus
from lvpcfg.estimate import clusters, projections
from lvpcfg.estimate.cluster import ClusterOptions
from lvpcfg.estimate.clusters import clustered, counted, k_means
from lvpcfg.estimate.estimator import Task
from lvpcfg.grammar.expectations import spectral_radius
from lvpcfg.options import DECODERS
from lvpcfg.registry import ESTIMATORS

TRAIN = corpus("dev")[:60]


@pytest.fixture(autouse=True)
def small_symbols_have_states(monkeypatch):
    monkeypatch.setattr(projections, "FEW", 2)
    monkeypatch.setattr(projections, "MANY", 20)


@pytest.fixture
def task():
    return Task(build_treebank(TRAIN))


def tensors(options, task):
    return clustered(options, task, task.seed).tensors()


def spread(points, cluster):
    """The sum of squared distances to the centres."""
    return sum(
        float((points[cluster == c] - points[cluster == c].mean(0)).square().sum()) for c in set(cluster.tolist())
    )


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_means_finds_the_best_partition(k):
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    best = min(spread(points, torch.tensor(some)) for some in itertools.product(range(k), repeat=7))
    found = k_means(points, k, generator)
    assert len(set(found.tolist())) == k
    assert spread(points, found) == pytest.approx(best)


def test_k_means_of_equal_points_has_no_empty_clusters():
    points = torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.0], [0.0, 1.0]], dtype=torch.float64)
    found = k_means(points, 4, torch.Generator().manual_seed(0))
    assert sorted(set(found.tolist())) == [0, 1]
    assert found.tolist() in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])


def test_counts_of_nodes_with_states(task):
    bank, generator = task.treebank, torch.Generator().manual_seed(2)
    states = torch.randint(1, 4, (len(bank.symbols),), generator=generator)
    state = (torch.rand(len(bank.symbol), generator=generator) * states[bank.symbol]).long()
    found = counted(task, 0, state, states)
    binary = [torch.zeros(tuple(states[rule].tolist())).double() for rule in bank.binary_rules]
    unary = [torch.zeros(tuple(states[rule].tolist())).double() for rule in bank.unary_rules]
    root = [torch.zeros(m).double() for m in states.tolist()]
    words = [torch.zeros(m).double() for m in states[bank.lexical_rules[:, 0]].tolist()]
    for node, rule in enumerate(bank.rule.tolist()):
        below = [child for child in (int(bank.left[node]), int(bank.right[node])) if child >= 0]
        place = tuple(int(state[each]) for each in (node, *below))
        (words, unary, binary)[len(below)][rule][place] += 1
    for node in bank.roots[:-1].tolist():
        root[int(bank.symbol[node])][int(state[node])] += 1
    counts = found.counts
    torch.testing.assert_close(counts.binary.values, torch.cat([one.flatten() for one in binary]))
    torch.testing.assert_close(counts.unary, torch.cat([one.flatten() for one in unary]))
    torch.testing.assert_close(counts.root, torch.cat(root))
    latent = found.latent
    for (tag, word), expected in zip(bank.lexical_rules.tolist(), words, strict=True):
        pair = ((latent.pair_tag == tag) & (latent.pairs.entry[latent.pair_start[:-1]] == word)).nonzero().item()
        begin, end = latent.pair_start[pair : pair + 2].tolist()
        assert counts.lexical[begin:end].tolist() == expected.tolist()


def test_one_cluster_is_the_treebank_pcfg():
    found = lvpcfg.train(TRAIN, "cluster", states=1).grammar
    expected = lvpcfg.train(TRAIN, "count").grammar
    assert found.states.tolist() == expected.states.tolist()
    for name in ("unary", "root"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(found.binary.values, expected.binary.values)
    entries = torch.arange(len(lvpcfg.train(TRAIN, "count").lexicon))
    torch.testing.assert_close(found.lexical.lookup(entries), expected.lexical.lookup(entries))


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projections, "FEW", 2)
        patch.setattr(projections, "MANY", 20)
        return lvpcfg.train(TRAIN, "cluster", states=3)


def test_the_grammar_is_normalised_and_tight(model):
    grammar = model.grammar
    assert not grammar.signed
    assert int(grammar.states.max()) == 3
    torch.testing.assert_close(grammar.row_sums(), torch.ones_like(grammar.root))
    assert spectral_radius(grammar) < 1 - 1e-6


@pytest.mark.parametrize("decoder", DECODERS)
def test_all_decoders(model, decoder):
    sentences = [["door"], ["Xyzzy"], *(tree.leaves() for tree in TRAIN[:2])]
    found = Parser(model, decoder=decoder, device="cpu").parse_sents(sentences)
    assert [tree.leaves() for tree in found] == sentences


def test_clusters_depend_on_the_seed_alone(task):
    options = ClusterOptions(states=3, dropout=0.2, noise=0.5)
    one, two = (tensors(options, Task(task.treebank)) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = tensors(options, Task(task.treebank, seed=1))
    assert any(one[name].shape != other[name].shape or not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("change", [{"dropout": 0.5}, {"noise": 1.0}])
def test_dropout_and_noise_make_other_clusters(task, change):
    options = ClusterOptions(states=3)
    one, two = tensors(options, task), tensors(replace(options, **change), task)
    assert any(one[name].shape != two[name].shape or not torch.equal(one[name], two[name]) for name in one)


def test_em_goes_on_from_the_clusters(task):
    options = ClusterOptions(states=3, iterations=4, smooth_rules=0.0, smooth_words=0.0)
    training = ESTIMATORS["cluster"].run(options, task)
    assert training.start.title == "clusters"
    states = training.refinement.latent.states.tolist()
    found = [training.log_likelihood for _ in training.run()]
    assert found == sorted(found)
    assert found[-1] > found[0]
    assert training.model().grammar.states.tolist() == states


@pytest.mark.parametrize("iterations", [0, 2])
def test_probabilities_are_smoothed_over_all_states_of_a_symbol(task, iterations):
    def trained(rules, words):
        options = ClusterOptions(states=3, iterations=iterations, smooth_rules=rules, smooth_words=words)
        training = ESTIMATORS["cluster"].run(options, task)
        for _ in training.run():
            pass
        return training

    training = trained(0.2, 0.5)
    found, latent = training.model().grammar, training.refinement.latent
    raw = latent.grammar(training.refinement.counts)
    several = 0
    for name, rules in (("binary", raw.binary_rules), ("unary", raw.unary_rules)):
        for number, rule in enumerate(rules):
            one, other = (_rule(grammar, name, number, rule) for grammar in (raw, found))
            torch.testing.assert_close(other, 0.8 * one + 0.2 * one.mean(0, keepdim=True).expand_as(one))
            several += int(latent.states[rule[0]] > 1)
    assert several > 10
    entries = torch.arange(len(task.observed.lexicon))
    one, other = (
        grammar.lexical.lookup(entries).split(latent.states[latent.inner :].tolist(), 1) for grammar in (raw, found)
    )
    for before, after in zip(one, other, strict=True):
        torch.testing.assert_close(after, 0.5 * before + 0.5 * before.mean(1, keepdim=True).expand_as(before))
    torch.testing.assert_close(found.row_sums(), torch.ones_like(found.root))


def _rule(grammar, name, number, rule):
    """The probabilities of one rule, the states of its parent first."""
    sizes = grammar.states[rule]
    values = grammar.unary if name == "unary" else grammar.binary.values
    begin = int(grammar.states[getattr(grammar, f"{name}_rules")[:number]].prod(1).sum())
    return values[begin : begin + int(sizes.prod())].view(*sizes.tolist())


def test_a_product_of_clusters_parses():
    models = [lvpcfg.train(TRAIN, "cluster", seed=seed, states=3, dropout=0.1) for seed in (0, 1)]
    sentences = [tree.leaves() for tree in TRAIN[:3]]
    assert [tree.leaves() for tree in Parser(models, device="cpu").parse_sents(sentences)] == sentences


def test_a_trial_ends_with_the_distances_to_its_own_centres():
    points = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares, cluster = clusters._one_trial(points, 4, torch.Generator().manual_seed(0))
    assert squares == pytest.approx(spread(points, cluster), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1}, "estimator.dropout is 1: expected 0.9 at the most"),
        ({"noise": -1}, "estimator.noise is -1: expected 0 or more"),
        ({"smooth_rules": 1.5}, "estimator.smooth_rules is 1.5: expected a fraction, 0 to 1"),
        ({"smooth_words": -0.1}, "estimator.smooth_words is -0.1: expected 0 or more"),
        ({"iterations": 1.5}, "estimator.iterations is 1.5: expected a whole number"),
        ({"rare": -1}, "estimator.rare is -1: expected 0 or more"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        ClusterOptions(**options)
