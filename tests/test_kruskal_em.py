"""EM over states and terms: against enumeration of both, and what splitting and merging terms must keep."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from running import run
from test_training import TREES, estimator, latent_of, tiny

import lvpcfg
from lvpcfg import Binarisation, InputError, build_treebank, corpus
from lvpcfg.estimate import terms as term_operations
from lvpcfg.estimate.kruskal_em import KruskalEMOptions
from lvpcfg.estimate.latent import Counts
from lvpcfg.estimate.states import Refinement
from lvpcfg.estimate.terms import merge_terms, split_terms, term_losses
from lvpcfg.grammar.expectations import spectral_radius
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.nn import GrammarLayer
from lvpcfg.trees.brackets import trees_from_text, write_trees

SHORT = {"split_iterations": 4, "merge_iterations": 2, "smooth_iterations": 1, "rare": 1}
OWN = KruskalEMOptions(cycles=2, rank=3, **SHORT)
SHARED = KruskalEMOptions(cycles=2, rank=5, shared=True, **SHORT)
STATES = {"S": 2, "NP": 2, "NN": 2, "X": 2}


def in_cp(kind, rank, states=STATES, unaries="collapse"):
    """The tiny treebank with random counts of rules in CP form."""
    latent, counts = latent_of(tiny(unaries), states)
    generator = torch.Generator().manual_seed(3)
    old, sizes = counts.binary, latent.states
    if kind == "own":
        shapes = [(len(old), rank, int(sizes.max()))] * 3
    else:
        shapes = [(rank, size) for size in (old.interminal_states, int(sizes.sum()), int(sizes.sum()))]
    u, v, w = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in shapes)
    if kind == "own":
        u, v, w = (
            factor * (torch.arange(factor.shape[2]) < sizes[symbols].unsqueeze(1)).unsqueeze(1)
            for factor, symbols in zip((u, v, w), old.rules.unbind(1), strict=True)
        )
        every, none = torch.arange(len(old)), u.new_zeros(0)
        binary = RuleCP(old.state_counts, old.interminals, old.rules, none, every, u, v, w)
    else:
        binary = WholeCP(old.state_counts, old.interminals, old.rules, u, v, w)
    latent = latent.over(binary)
    counts = replace(counts, binary=binary)
    return Refinement(latent, counts, torch.zeros(0, len(counts.root), dtype=torch.int64))


def enumerate_terms(latent, parameters):
    """log p(trees) and expected counts of u, v and w, by going through the states of all nodes and their terms."""
    bank, total = latent.treebank, 0.0
    binary, first = parameters.binary, latent.first.tolist()
    expected = {name: torch.zeros_like(tensor) for name, tensor in binary.tensors.items()}
    leaf = dict(zip(bank.is_lexical.nonzero().squeeze(1).tolist(), latent._leaf(parameters).tolist(), strict=True))
    own = isinstance(binary, RuleCP)

    def place(name, rule, term, symbol, state):
        return (rule, term, state) if own else (term, first[symbol] + state)

    for begin, end in itertools.pairwise(bank.roots.tolist()):
        nodes, found = range(begin, end), []
        binaries = [node for node in nodes if bank.right[node] >= 0]
        symbol = bank.symbol.tolist()
        for states in itertools.product(*(range(int(latent.states[symbol[node]])) for node in nodes)):
            state = dict(zip(nodes, states, strict=True))
            for chosen in itertools.product(range(binary.factors.rank), repeat=len(binaries)):
                weight, places = float(parameters.root[first[symbol[begin]] + state[begin]]), []
                for node, term in zip(binaries, chosen, strict=True):
                    rule, left, right = int(bank.rule[node]), int(bank.left[node]), int(bank.right[node])
                    places += [
                        (name, place(name, rule, term, symbol[of], state[of]))
                        for name, of in (("u", node), ("v", left), ("w", right))
                    ]
                for node in nodes:
                    weight *= leaf[node][state[node]] if node in leaf else 1.0
                weight *= math.prod(float(binary.tensors[name][at]) for name, at in places)
                found.append((weight, places))
        probability = math.fsum(weight for weight, _ in found)
        total += math.log(probability)
        for weight, places in found:
            for name, at in places:
                expected[name][at] += weight / probability
    return total, expected


@pytest.mark.parametrize(("kind", "rank"), [("own", 2), ("shared", 3)])
def test_expected_counts_are_those_of_enumeration(kind, rank):
    refinement = in_cp(kind, rank)
    latent, parameters = refinement.latent, refinement.latent.parameters(refinement.counts)
    total, counts = latent.expect(refinement.counts)
    expected_total, expected = enumerate_terms(latent, parameters)
    assert total == pytest.approx(expected_total, rel=1e-6)
    for name in ("u", "v", "w"):
        torch.testing.assert_close(counts.binary.tensors[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "rank"), [("own", 2), ("shared", 3)])
def test_the_m_step_is_normalised(kind, rank):
    refinement = in_cp(kind, rank, unaries="keep")
    parameters = refinement.latent.parameters(refinement.counts)
    for name in ("v", "w"):
        torch.testing.assert_close(
            parameters.binary.tensors[name].sum(-1),
            torch.ones(()).double().expand(rank)
            if kind == "shared"
            else torch.ones(len(parameters.binary), rank).double(),
        )
    for smoothing in (None, refinement.smoothing(0.3, 0.2)):
        grammar = refinement.latent.grammar(refinement.counts, smoothing)
        torch.testing.assert_close(grammar.row_sums(), torch.ones_like(grammar.root))


@pytest.mark.parametrize("options", [OWN, SHARED, replace(OWN, cycles=0, states=2, noise=0.3)])
def test_what_is_not_smoothed_is_a_tight_grammar(options):
    trainer = estimator(build_treebank(corpus("dev")[:20]), replace(options, smooth_iterations=0))
    for _ in trainer.run():
        pass
    grammar = trainer.grammar()
    torch.testing.assert_close(grammar.row_sums(), torch.ones_like(grammar.root))
    assert spectral_radius(grammar) < 1 - 1e-6


def test_a_shared_term_builds_rules_that_no_tree_has():
    trainer = estimator(build_treebank(corpus("dev")[:40]), SHARED)
    for _ in trainer.run():
        pass
    grammar = trainer.model().grammar
    assert isinstance(grammar.binary, WholeCP)
    assert grammar.binary.factors.rank <= SHARED.rank
    every, listed = grammar.binary.written_out(), grammar.binary.listed()
    assert float(every.values.sum() - listed.values.sum()) > 1e-3
    own = estimator(build_treebank(corpus("dev")[:40]), OWN)
    for _ in own.run():
        pass
    assert len(own.model().grammar.binary.written_out()) == len(own.task.treebank.binary_rules)


# ---------------------------------------------------------------- splitting and merging


@pytest.mark.parametrize(("kind", "rank"), [("own", 2), ("shared", 3)])
def test_a_split_keeps_the_likelihood_and_merging_takes_it_back(kind, rank):
    refinement = in_cp(kind, rank)
    before, _ = refinement.latent.expect(refinement.counts)
    split = split_terms(refinement, 2, 0.0, torch.Generator())
    assert split.counts.binary.factors.rank == 2 * rank
    assert split.latent.expect(split.counts)[0] == pytest.approx(before, rel=1e-6)
    losses, alive = term_losses(split.latent, split.counts)
    assert bool(alive.all())
    assert float(losses.abs().max()) < 1e-4
    merged = merge_terms(split, 1.0, 100)
    for name, tensor in refinement.counts.binary.tensors.items():
        torch.testing.assert_close(merged.counts.binary.tensors[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "terms"), [("own", 3), ("shared", 3)])
def test_merging_leaves_no_more_terms_than_the_rank(kind, terms):
    split = split_terms(in_cp(kind, 2), 2, 0.5, torch.Generator().manual_seed(0))
    merged = merge_terms(split, 0.0, terms)
    used = merged.counts.binary.u.sum(-1) > 0
    assert bool((used.sum(-1) == terms).all())
    sums = split.counts.binary.u.sum(-2)
    torch.testing.assert_close(merged.counts.binary.u.sum(-2), sums)  # no count is lost


def test_terms_that_are_nothing_are_left_out_by_a_merge():
    split = split_terms(in_cp("own", 2), 2, 0.5, torch.Generator().manual_seed(0))
    dead = {name: tensor.clone() for name, tensor in split.counts.binary.tensors.items()}
    for name in "uvw":
        dead[name][:, :2] = 0
    counts = replace(split.counts, binary=split.counts.binary.with_tensors(dead))
    merged = merge_terms(replace(split, counts=counts, latent=split.latent.over(counts.binary)), 0.0, 4)
    assert merged.counts.binary.factors.rank == 2
    torch.testing.assert_close(merged.counts.binary.u.sum(-2), counts.binary.u.sum(-2))


def test_the_loss_of_a_merge_is_what_the_likelihood_loses(monkeypatch):
    """The formula is exact where one node carries the rule, and the two terms have the same left children."""
    refinement = in_cp("own", 2, states={"X": 2, "DT": 2, "NN": 2})
    latent, counts = refinement.latent, refinement.counts
    names = latent.treebank.symbols.names
    rule = latent.treebank.binary_rules.tolist().index([names.index(name) for name in ("X", "DT", "NN")])
    v = counts.binary.v.clone()
    v[rule, 1] = v[rule, 0]
    # Counts that make parameters have the frequencies of terms that these expect.
    counts = replace(counts, binary=counts.binary.with_tensors(counts.binary.tensors | {"v": v}))
    parameters = latent.parameters(counts)
    before, expected = latent.expect(counts)
    frequency = expected.binary.row_sums()[: latent.binary.interminal_states]
    scaled = parameters.binary.scaled(frequency)
    used = scaled.u.sum(-1, keepdim=True)
    scale = {"u": scaled.u, "v": parameters.binary.v * used, "w": parameters.binary.w * used}
    counts = Counts(
        parameters.root, parameters.binary.with_tensors(parameters.binary.tensors | scale), counts.unary, counts.lexical
    )
    assert latent.expect(counts)[0] == pytest.approx(before, rel=1e-9)

    losses, alive = term_losses(latent, counts)
    chosen = torch.full_like(losses, 1.0)
    chosen[rule] = 0.0
    monkeypatch.setattr(term_operations, "term_losses", lambda *_: (chosen, alive))
    merged = merge_terms(Refinement(latent, counts, refinement.hierarchy), 1 / len(losses), 100)
    after, _ = merged.latent.expect(merged.counts)
    assert abs(before - after) > 1e-4
    assert float(losses[rule, 0]) == pytest.approx(before - after, rel=1e-3)


@pytest.mark.parametrize("options", [OWN, SHARED])
def test_all_states_may_be_merged_again(options, tmp_path):
    """Also those of the symbols that had the most."""
    trainer = estimator(build_treebank(corpus("dev")[:20]), replace(options, merged=1.0, cycles=2))
    for _ in trainer.run():
        pass
    model = trainer.model()
    assert set(model.grammar.states.tolist()) == {1}
    model.save(tmp_path / "model")
    loaded = lvpcfg.Model.load(tmp_path / "model")
    torch.testing.assert_close(loaded.grammar.row_sums(), torch.ones_like(loaded.grammar.root))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_an_economical_form_has_the_same_rules(rank):
    binary = in_cp("own", rank, {"S": 4, "NP": 4, "NN": 3, "VP": 4, "X": 2}).counts.binary
    binary = replace(binary, u=binary.u * (torch.rand(binary.u.shape[:2]) > 0.3).unsqueeze(2))
    small = binary.economical()
    torch.testing.assert_close(small.written_out().values, binary.written_out().values)
    assert small.size <= min(binary.size, binary.written_out().size)


# ---------------------------------------------------------------- beginning with a model


TRAIN = [tree for tree in corpus("dev") if len(tree.leaves()) <= 12][:30]
COLLAPSE = Binarisation(unaries="collapse")


@pytest.fixture(scope="module")
def model():
    options = {"cycles": 2, "split_iterations": 4, "merge_iterations": 2, "smooth_iterations": 1}
    return lvpcfg.train(TRAIN, "split_merge", binarisation=COLLAPSE, **options)


METHODS = {"als": {"rank": 1, "threshold": 1.0, "nonnegative": True}, "apr": {"rank": 30}, "cover": {}}


@pytest.mark.parametrize("method", METHODS)
def test_it_takes_up_a_compressed_model(model, method, tmp_path):
    small = lvpcfg.compress(model, method=method, **METHODS[method])
    small.save(tmp_path / "small")
    options = KruskalEMOptions(init=str(tmp_path / "small"), split_iterations=3, smooth_iterations=0)
    trainer = estimator(build_treebank(TRAIN, COLLAPSE), options)
    start = trainer.refinement.latent.expect(trainer.refinement.counts)[0]  # after one M-step
    with torch.no_grad():
        weight = float(GrammarLayer(small, "values").log_weight(TRAIN).sum())
    assert start > weight
    found = []
    for _ in trainer.run():
        found.append(trainer.log_likelihood)
    assert found == sorted(found)
    assert type(trainer.model().grammar.binary) is type(small.grammar.binary)
    assert trainer.model().grammar.hierarchy.tolist() == model.grammar.hierarchy.tolist()
    found = lvpcfg.Parser(trainer.model(), device="cpu").parse_sents([tree.leaves() for tree in TRAIN[:5]])
    assert [tree.leaves() for tree in found] == [tree.leaves() for tree in TRAIN[:5]]


def test_the_first_e_step_is_under_the_model_itself(model, tmp_path):
    """One more step of EM under the counts of a model, which a forest of its own trees gives too."""
    small = lvpcfg.compress(model, method="als", **METHODS["als"])
    small.save(tmp_path / "small")
    options = KruskalEMOptions(init=str(tmp_path / "small"))
    counts = estimator(build_treebank(TRAIN, COLLAPSE), options).refinement.counts
    layer = GrammarLayer(small, "values")
    layer.log_weight(TRAIN).sum().backward()
    for name in ("u", "v", "w", "values"):
        parameter = getattr(layer, f"binary_{name}")
        torch.testing.assert_close(
            getattr(counts.binary, name), (parameter * parameter.grad).detach(), rtol=1e-4, atol=1e-4
        )


def test_it_takes_up_its_own_model_for_another_cycle(tmp_path):
    """Here all rules are so small that they are tensors."""
    first = lvpcfg.train(TRAIN, "kruskal_em", cycles=0, states=1, split_iterations=2)
    assert not len(first.grammar.binary.cp_rules)
    first.save(tmp_path / "first")
    again = lvpcfg.train(TRAIN, "kruskal_em", init=str(tmp_path / "first"), cycles=1, split_iterations=2)
    assert int(again.grammar.states.max()) == 2


def test_a_model_without_some_tree_is_named(model, tmp_path):
    small = lvpcfg.compress(model, method="cover")
    grammar = small.grammar
    without = grammar.binary.with_tensors(grammar.binary.tensors | {"u": torch.zeros_like(grammar.binary.u)})
    replace(small, grammar=replace(grammar, binary=without)).save(tmp_path / "model")
    with pytest.raises(InputError, match="makes some of the 30 trees impossible"):
        estimator(build_treebank(TRAIN, COLLAPSE), KruskalEMOptions(init=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "the rules of the model in .* are tensors: expected a model in CP form"),
        ({"method": "svd"}, "has negative parameters: expected a non-negative one"),
        ({"method": "cover", "trees": TREES}, "has other symbols, rules or binarisation than the trees"),
        ({"method": "cover", "unaries": "keep"}, "has other symbols, rules or binarisation than the trees"),
    ],
)
def test_models_that_it_cannot_take_up(model, tmp_path, change, message):
    small = lvpcfg.compress(model, method=change["method"]) if "method" in change else model
    small.save(tmp_path / "model")
    trees = trees_from_text(change["trees"]) if "trees" in change else TRAIN
    bank = build_treebank(trees, Binarisation(unaries=change.get("unaries", "collapse")))
    with pytest.raises(InputError, match=message):
        estimator(bank, KruskalEMOptions(init=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "estimator.rank is 0: expected 1 or more"),
        ({"rank": 10**9}, "estimator.rank is 1000000000: expected 100000 at the most"),
        ({"init": 5}, "estimator.init is 5: expected a model folder"),
        ({"shared": "yes"}, "estimator.shared is 'yes': expected true or false"),
        ({"cycles": 1.5}, "estimator.cycles is 1.5: expected a whole number"),
        ({"merged": 2}, "estimator.merged is 2: expected a fraction"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        KruskalEMOptions(**options)


def test_the_job_trains_and_its_model_parses(tmp_path):
    write_trees(TRAIN, tmp_path / "train.mrg")
    path, options = str(tmp_path / "train.mrg"), replace(SHARED, cycles=1)
    result, printed = run("train", tmp_path / "run", train=path, dev=path, estimator=options)
    assert "cycle 1" in printed
    assert result["f1"] > 50
    assert isinstance(lvpcfg.Model.load(tmp_path / "run" / "model").grammar.binary, WholeCP)
    found, _ = run("evaluate", tmp_path / "scores", model=str(tmp_path / "run" / "model"), gold=path)
    assert found["f1"] == pytest.approx(result["f1"])
