"""EM and split-merge, against enumeration over states and against what they must keep."""

import gc
import itertools
import math
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lvpcfg import Binarisation, InputError, build_treebank, corpus, train
from lvpcfg.chart.forest.forest import Plan
from lvpcfg.estimate import states as state_operations
from lvpcfg.estimate.count import CountOptions
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.kruskal_em import KruskalEMOptions
from lvpcfg.estimate.latent import Counts, Smoothing, observed_counts
from lvpcfg.estimate.split_merge import SplitMergeOptions
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import starts_of
from lvpcfg.registry import ESTIMATORS
from lvpcfg.trees.brackets import trees_from_text
from lvpcfg.trees.lexicon import build_lexicon

TREES = """
(TOP (S (NP (DT a) (NN dog)) (VP (VB saw) (NP (DT the) (NN cat)))))
(TOP (S (NP (NN cat)) (VP (VB saw) (NP (NN dog)))))
(TOP (S (NP (DT the) (NN dog)) (VP (VB saw))))
(TOP (NP (NN dog)))
(TOP (X (DT a) (NN cat)))
"""
EM = EMOptions(states=2, iterations=6, rare=1)
KRUSKAL = KruskalEMOptions(rank=3, cycles=2, split_iterations=3, merge_iterations=2, smooth_iterations=1, rare=1)
SHARED = replace(KRUSKAL, shared=True, rank=12)
SPLIT_MERGE = SplitMergeOptions(cycles=2, split_iterations=3, merge_iterations=2, smooth_iterations=2, rare=1)


def estimator(treebank, options, **task):
    return ESTIMATORS[options.name].run(options, Task(treebank, **task))


def tiny(unaries="keep"):
    return build_treebank(trees_from_text(TREES), Binarisation(unaries=unaries))


def latent_of(treebank, states):
    """The layout with given numbers of states, by name, else 1; and random counts."""
    lexicon, unseen = build_lexicon(treebank)
    latent, _ = observed_counts(treebank, lexicon, unseen)
    generator = torch.Generator().manual_seed(5)

    def random(size):
        return torch.rand(int(size), generator=generator, dtype=torch.float64) + 0.1

    old = latent.binary
    counts = tuple(states.get(name, 1) for name in treebank.symbols.names)
    values = random(torch.tensor(counts)[old.rules].prod(1).sum())
    latent = latent.over(RuleTensors(counts, old.interminals, old.rules, values))
    unary = random(len(latent.unary_parent))
    return latent, Counts(random(sum(counts)), latent.binary, unary, random(len(latent.pair_of_value)))


def enumerate_states(latent, parameters):
    """log p(trees) and expected counts, by going through all states of all nodes of each tree."""
    bank, total = latent.treebank, 0.0
    counts = parameters.map(torch.zeros_like)
    vectors = ({"root": some.root, "rules": rules_of(some), "lexical": some.lexical} for some in (parameters, counts))
    weights, counted = vectors
    sizes = torch.cat(
        [latent.states[bank.binary_rules], torch.nn.functional.pad(latent.states[bank.unary_rules], (0, 1), value=1)]
    )
    rule_starts = starts_of(sizes.prod(1))
    pairs = {}  # (tag, entry) -> where the values of the pair begin
    for value, (entry, tag) in enumerate(
        zip(latent.pairs.entry.tolist(), latent.pair_tag[latent.pair_of_value].tolist(), strict=True)
    ):
        pairs.setdefault((tag, entry), value)
    sampled = dict(zip(latent.unseen.node.tolist(), latent.unseen.entry.tolist(), strict=True))
    for begin, end in itertools.pairwise(bank.roots.tolist()):
        nodes, found = range(begin, end), []
        for states in itertools.product(*(range(int(latent.states[bank.symbol[node]])) for node in nodes)):
            state = dict(zip(nodes, states, strict=True))
            places = [("root", int(latent.first[bank.symbol[begin]]) + state[begin])]
            for node in nodes:
                left, right, rule = int(bank.left[node]), int(bank.right[node]), int(bank.rule[node])
                if left < 0:
                    tag, word = bank.lexical_rules[rule].tolist()
                    places.append(("lexical", pairs[tag, word] + state[node]))
                    continue
                number = rule if right >= 0 else len(bank.binary_rules) + rule
                _, y, z = sizes[number].tolist()
                below = state[left] * z + (state[right] if right >= 0 else 0)
                places.append(("rules", int(rule_starts[number]) + state[node] * y * z + below))
            found.append((math.prod(float(weights[kind][place]) for kind, place in places), state, places))
        probability = math.fsum(weight for weight, _, _ in found)
        total += math.log(probability)
        for weight, state, places in found:
            for kind, place in places:
                counted[kind][place] += weight / probability
            for node, entry in sampled.items():
                if node in state:
                    counts.lexical[pairs[int(bank.symbol[node]), entry] + state[node]] += weight / probability
    binary, unary = counted["rules"].split([len(counts.binary.values), len(counts.unary)])
    return total, Counts(counts.root, counts.binary.with_tensors({"values": binary}), unary, counts.lexical)


def rules_of(counts):
    """Of binary and of unary rules, end to end."""
    return torch.cat([counts.binary.values, counts.unary])


def assert_close(one, other, tolerance=1e-5):
    for x, y in ((one.root, other.root), (rules_of(one), rules_of(other)), (one.lexical, other.lexical)):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- the two steps of EM


@pytest.mark.parametrize("unaries", ["keep", "collapse"])
@pytest.mark.parametrize("states", [{}, {"NP": 2, "NN": 3, "DT": 2}, {"S": 2, "VP": 3, "VB": 2, "NP+NN": 2, "X": 2}])
def test_expected_counts_are_those_of_enumeration(unaries, states):
    latent, counts = latent_of(tiny(unaries), states)
    parameters = latent.parameters(counts)
    found, expected = latent.expect(counts), enumerate_states(latent, parameters)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_close(found[1], expected[1])


def test_an_e_step_lets_go_of_its_weights(monkeypatch):
    """With many states they are most of the memory, and a cycle of references would keep those of every step."""
    made, weights = [], Plan.weights

    def watched(*arguments):
        found = weights(*arguments)
        made.extend(weakref.ref(some.values) for some in found)
        return found

    monkeypatch.setattr(Plan, "weights", watched)
    latent, counts = latent_of(tiny(), {"NP": 2, "NN": 3})
    gc.collect()
    gc.disable()
    try:
        latent.expect(counts)
        assert made
        assert not any(reference() is not None for reference in made)
    finally:
        gc.enable()


def test_the_m_step_and_smoothing_are_normalised():
    latent, counts = latent_of(tiny(), {"S": 2, "NP": 4, "NN": 4, "VB": 3})
    branch = torch.cat([torch.arange(int(m)) // 2 for m in latent.states])  # two by two
    for smoothing in (None, Smoothing(branch, 0.3, 0.2), Smoothing(branch, 1.0, 1.0)):
        grammar = latent.grammar(counts, smoothing, torch.zeros(0, len(counts.root), dtype=torch.int64))
        torch.testing.assert_close(grammar.row_sums(), torch.ones_like(grammar.root))
        assert float(grammar.root.sum()) == pytest.approx(1)
    names = latent.treebank.symbols.names
    rule = latent.treebank.binary_rules.tolist().index([names.index(name) for name in ("NP", "DT", "NN")])
    tensor = grammar.binary.tensor(rule)  # at weight 1 the states of a branch are the same
    torch.testing.assert_close(tensor[0], tensor[1])
    torch.testing.assert_close(tensor[2], tensor[3])
    assert not torch.allclose(tensor[0], tensor[2])


@pytest.mark.parametrize("options", [EM, SPLIT_MERGE, KRUSKAL, SHARED])
def test_the_likelihood_never_falls_without_smoothing(options):
    trainer = estimator(build_treebank(corpus("dev")[:40]), options)
    before = -math.inf
    for step in trainer.run():
        if step.number > 1 and step.phase.name != "smooth":
            assert trainer.log_likelihood >= before - 1e-6 * abs(before)
        before = trainer.log_likelihood
        sums = trainer.grammar().row_sums()
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_likelihood_that_falls_is_an_error():
    trainer = estimator(tiny(), EM)
    run = trainer.run()
    next(run)
    trainer.log_likelihood = 0.0
    with pytest.raises(InputError, match=r"the log-likelihood fell at cycle 1, em, iteration 2, from 0\.000 to -"):
        next(run)


# ---------------------------------------------------------------- splitting and merging


def test_a_split_keeps_the_likelihood_and_the_counts():
    latent, counts = latent_of(tiny(), {"NP": 2, "NN": 3})
    before, _ = latent.expect(counts)
    for noise in (0.0, 0.1):
        new, split = state_operations.split(latent, counts, 2, noise, torch.Generator().manual_seed(0))
        assert new.states.tolist() == (2 * latent.states).tolist()
        after, _ = new.expect(split)
        words = int(latent.treebank.lengths.sum())
        assert abs(after - before) <= 1e-4 + 4 * noise * words
        for function in (lambda c: c.root, rules_of, lambda c: c.lexical):
            ratio = function(split).sum() / function(counts).sum()
            assert 1 - 1e-9 <= float(ratio) <= math.exp(noise) + 1e-9


def test_merging_what_was_split_without_noise_loses_nothing():
    latent, counts = latent_of(tiny(), {"NP": 2, "NN": 3})
    new, split = state_operations.split(latent, counts, 2, 0.0, torch.Generator())
    losses, exists = state_operations.merge_losses(new, split)
    assert int(exists.sum()) == int(latent.states.sum())
    assert float(losses[exists].abs().max()) < 1e-4
    old, merged, place = state_operations.merge(new, split, 1.0)
    assert old.states.tolist() == latent.states.tolist()
    assert place.tolist() == [state // 2 for state in range(len(split.root))]
    assert_close(merged, counts, 1e-9)


def test_the_loss_of_a_merge_is_what_the_likelihood_loses(monkeypatch):
    """The formula is exact where one node carries the pair, as X does here."""
    latent, counts = latent_of(tiny(), {"X": 2, "DT": 2, "NN": 2})
    parameters = latent.parameters(counts)
    before, expected = latent.expect(counts)

    # Counts that make these parameters and have the frequencies of states that these expect.
    frequency = expected.binary.row_sums().index_add(0, latent.unary_parent, expected.unary)
    binary = parameters.binary.scaled(frequency[: latent.binary.interminal_states])
    unary = parameters.unary * frequency[latent.unary_parent]
    counts = Counts(parameters.root, binary, unary, counts.lexical)

    losses, exists = state_operations.merge_losses(latent, counts)
    x = latent.treebank.symbols.names.index("X")
    chosen = torch.ones_like(losses)
    chosen[x, 0] = 0
    monkeypatch.setattr(state_operations, "merge_losses", lambda *_: (chosen, exists))
    new, merged, _ = state_operations.merge(latent, counts, 1 / int(exists.sum()))
    assert int(new.states[x]) == 1
    assert int(new.states.sum()) == int(latent.states.sum()) - 1
    after, _ = new.expect(merged)
    assert abs(before - after) > 1e-3  # away from a maximum it may also gain
    assert float(losses[x, 0]) == pytest.approx(before - after, rel=1e-4)


def test_the_hierarchy_tells_where_states_came_from():
    trainer = estimator(build_treebank(corpus("dev")[:40]), SPLIT_MERGE)
    states = []  # after each cycle
    for step in trainer.run():
        if step.evaluate == "always":
            states.append(trainer.refinement.latent.states.tolist())
    hierarchy, first = trainer.refinement.hierarchy, trainer.refinement.latent.first.tolist()
    assert hierarchy.shape == (2, first[-1])
    for symbol, (coarse, fine) in enumerate(zip(*states, strict=True)):
        oldest, older = hierarchy[:, first[symbol] : first[symbol + 1]].tolist()
        assert oldest == [0] * fine
        assert sorted(set(older)) == list(range(coarse))  # every state of the first cycle has descendants,
        assert older == sorted(older)
        assert max(older.count(state) for state in older) <= 2  # one or two
    assert min(states[1]) == 1 < max(states[1])
    assert trainer.model().grammar.hierarchy.tolist() == hierarchy.tolist()


def test_half_of_the_pairs_are_merged():
    trainer = estimator(tiny(), SPLIT_MERGE)
    symbols = len(trainer.refinement.latent.states)
    sizes = [
        (step.phase.name, int(trainer.refinement.latent.states.sum()))
        for step in trainer.run()
        if step.phase.cycle == 1
    ]
    assert sizes[0] == ("split", 2 * symbols)
    assert sizes[-1] == ("smooth", 2 * symbols - symbols // 2)


# ---------------------------------------------------------------- trainings


def test_the_steps_of_estimators():
    assert estimator(tiny(), CountOptions()).steps == []
    assert [
        (step.phase.name, step.number, step.evaluate) for step in estimator(tiny(), EMOptions(iterations=2)).steps
    ] == [
        ("em", 1, "sometimes"),
        ("em", 2, "always"),
    ]
    without = SplitMergeOptions(cycles=2, split_iterations=1, merge_iterations=1, smooth_iterations=0)
    steps = estimator(tiny(), without).steps
    assert [str(step) for step in steps if step.evaluate == "always"] == [
        "cycle 1, merge, iteration 1",
        "cycle 2, merge, iteration 1",
    ]
    assert {step.evaluate for step in steps} == {"always", "never"}


def state_of(trainer):
    tensors = trainer.refinement.tensors()
    return {name: tensor.tolist() for name, tensor in tensors.items()}, trainer.log_likelihood, trainer.done


@pytest.mark.parametrize("options", [EM, SPLIT_MERGE, KRUSKAL, SHARED])
def test_a_training_taken_up_anywhere_ends_the_same(tmp_path, options):
    treebank = build_treebank(corpus("dev")[:20])
    whole = estimator(treebank, options, seed=3)
    checkpoints, states = [whole.checkpoint({"done": 0})], [state_of(whole)]
    for _ in whole.run():
        checkpoints.append(whole.checkpoint({"done": whole.done}))
        states.append(state_of(whole))
    for done, checkpoint in enumerate(checkpoints):
        checkpoint.save(tmp_path / "checkpoint")
        again = estimator(treebank, options, seed=3)
        assert again.load(tmp_path / "checkpoint") == {"done": done}
        assert state_of(again) == states[done]
        further = states[done + 1 : done + 4]  # the rest follows from them
        assert [state_of(again) for _, _ in zip(again.run(), further, strict=False)] == further


def test_seeds_matter_and_nothing_else_does():
    found = []
    for seed in (0, 0, 1, -1, 10**30):
        trainer = estimator(tiny(), EM, seed=seed)
        for _ in trainer.run():
            pass
        found.append(state_of(trainer))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"options": EMOptions(states=3, iterations=6, rare=1)},
            "made with estimator.states 2, and this training has 3",
        ),
        ({"options": SPLIT_MERGE}, "made with estimator.name 'em', and this training has 'split_merge'"),
        ({"seed": 1}, "made with seed 0, and this training has 1"),
        ({"treebank": build_treebank(trees_from_text(TREES)[1:])}, "made with trees 5, and this training has 4"),
        (
            {"treebank": build_treebank(trees_from_text(TREES)[::-1], Binarisation(unaries="keep"))},
            "made with treebank",
        ),
        ({"signature": "suffix"}, "made with signature 'english'"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, change, message):
    estimator(tiny(), EM).checkpoint({}).save(tmp_path / "checkpoint")
    settings = {"treebank": tiny(), "options": EM, "seed": 0} | change
    with pytest.raises(InputError, match=message):
        estimator(**settings).load(tmp_path / "checkpoint")


def test_a_broken_checkpoint_is_refused(tmp_path):
    path = tmp_path / "checkpoint"
    estimator(tiny(), EM).checkpoint({}).save(path)
    whole = path.read_bytes()
    flipped, generator = [bytearray(whole) for _ in range(200)], random.Random(0)
    for data, bit in zip(flipped, generator.sample(range(8 * len(whole)), 200), strict=True):
        data[bit // 8] ^= 1 << bit % 8
    nested = (10**6).to_bytes(8, "little") + b"[" * 10**6
    for broken in (b"", whole[:5], whole[:100], whole[:-1], b"x" * 200, b"\xff" * 200, nested, *flipped):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="is no checkpoint of a training"):
            estimator(tiny(), EM).load(path)


class Work(TorchDispatchMode):
    """Counts operations, and the numbers of new tensors that they return."""

    def __init__(self):
        super().__init__()
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.operations += 1
        is_new = isinstance(found, torch.Tensor) and not function.is_view and not function._schema.is_mutable
        self.numbers += found.numel() if is_new else 0
        return found


def test_the_work_is_linear_in_the_depth_of_a_tree():
    work = []
    for depth in (200, 400):
        tree = "(TOP " + "(S (NN a) " * depth + "(S (NN a) (VB b))" + ")" * depth + ")"
        with Work() as counted:
            model = train(trees_from_text(tree), estimator="em", states=2, iterations=1)
        assert model.grammar.root.isfinite().all()
        work.append(counted)
    assert work[1].operations < 2.05 * work[0].operations
    assert work[1].numbers < 2.05 * work[0].numbers


@pytest.mark.parametrize("unaries", ["keep", "collapse"])
@pytest.mark.parametrize("options", [CountOptions(), EM, SPLIT_MERGE, KRUSKAL, SHARED])
@pytest.mark.parametrize("text", ["(TOP (NN dog))", "(TOP (S (NP (NN dog))))", "(TOP (A a) (B b))"])
def test_the_smallest_treebanks(text, options, unaries):
    trainer = estimator(build_treebank(trees_from_text(text), Binarisation(unaries=unaries)), options)
    for _ in trainer.run():
        pass
    sums = trainer.model().grammar.row_sums()
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_train_from_python():
    trees = corpus("dev")[:20]
    model = train(trees, estimator="em", states=2, iterations=2, seed=4)
    trainer = estimator(build_treebank(trees), EMOptions(states=2, iterations=2), seed=4)
    for _ in trainer.run():
        pass
    assert torch.equal(model.grammar.binary.values, trainer.model().grammar.binary.values)
    assert model.provenance["options"]["states"] == 2
    assert model.provenance["iterations"] == 2
    assert set(model.grammar.states.tolist()) == {2}
    smallest = {"split_iterations": 1, "merge_iterations": 1, "smooth_iterations": 1}
    assert len(train(trees, estimator="split_merge", cycles=1, **smallest).grammar.hierarchy) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimator": "magic"},
            "estimator is 'magic': expected cluster, count, em, gaussian, gradient, kruskal_em, spectral or",
        ),
        ({"estimator": "count", "states": 2}, "the estimator count has no option 'states'"),
        ({"estimator": "em", "cycles": 2}, r"has no option 'cycles': it has .*iterations, .*noise, .*rare, .*states"),
        ({"estimator": "em", "states": "2"}, "estimator.states is '2': expected a whole number"),
        ({"estimator": "em", "states": 2.5}, "estimator.states is 2.5: expected a whole number"),
        ({"estimator": "em", "states": 0}, "estimator.states is 0: expected 1 or more"),
        ({"estimator": "em", "noise": "no"}, "estimator.noise is 'no': expected a number"),
        ({"estimator": "split_merge", "merged": 1.5}, "estimator.merged is 1.5: expected a fraction, 0 to 1"),
        ({"estimator": "split_merge", "merged": math.nan}, "estimator.merged is nan: expected 0 or more"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        train(corpus("dev")[:2], **options)


def test_numbers_that_overflow_are_an_error():
    with pytest.raises(InputError, match=r"estimator.noise is 10000.0: expected 100 at the most"):
        train(corpus("dev")[:5], estimator="em", states=2, noise=1e4)


@pytest.mark.parametrize("times", [1, 7, 50])
def test_rounding_is_no_fall_where_the_log_likelihood_is_zero(times):
    trees = trees_from_text("(TOP (S (NP (DT a) (NN b)) (VP (VBD c))))") * times
    for seed in range(3):
        train(trees, estimator="em", states=4, iterations=20, seed=seed)
        train(trees, estimator="split_merge", cycles=2, split_iterations=15, merge_iterations=5, seed=seed)
