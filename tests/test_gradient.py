"""Training by gradient descent: the likelihoods it climbs, what it refuses, and going on from a checkpoint."""

from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch
from nltk.tree import Tree
from running import run

import lvpcfg
from lvpcfg.chart.forest.candidates import with_trees
from lvpcfg.errors import InputError
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.gradient import GradientOptions, gradient
from lvpcfg.nn import GrammarLayer
from lvpcfg.trees.brackets import write_trees
from lvpcfg.trees.treebank import build_treebank

TREES = [tree for tree in lvpcfg.corpus("train")[:60] if len(tree.leaves()) <= 14][:24]
FAST = {"epochs": 2, "batch_tokens": 100}


@pytest.fixture(scope="module")
def model():
    return lvpcfg.train(TREES, "split_merge", cycles=1, split_iterations=4, merge_iterations=2, smooth_iterations=1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "start"
    model.save(path)
    return str(path)


def compressed(model, method):
    options = {"als": {"rank": 1, "threshold": 1.0, "nonnegative": True}, "apr": {"rank": 30}, "cover": {}}
    return lvpcfg.compress(model, method=method, **options[method])


@pytest.fixture(scope="module", params=["tensors", "als", "apr"])
def any_folder(request, model, folder, tmp_path_factory):
    """A model in each representation."""
    if request.param == "tensors":
        return folder
    path = tmp_path_factory.mktemp("models") / request.param
    compressed(model, request.param).save(path)
    return str(path)


def training(**options):
    return gradient(GradientOptions(**FAST | options), Task(build_treebank(TREES)))


def written(folder):
    path = str(folder / "trees.mrg")
    write_trees(TREES, path)
    return path


def likelihood(model, objective):
    layer = GrammarLayer(model, "values")
    function = layer.log_prob if objective == "conditional" else layer.log_weight
    with torch.no_grad():
        return float(function(TREES).sum())


# Candidates


def test_candidates_are_an_upper_bound_and_all_trees_where_nothing_is_pruned(model):
    layer = GrammarLayer(model)
    with torch.no_grad():
        exact = layer.log_prob(TREES)
        nothing, little, much = (layer.log_prob(layer.observe(TREES, prune)) for prune in (1e-30, 1e-4, 0.2))
    assert torch.allclose(nothing, exact, atol=1e-6)
    assert bool((little >= exact - 1e-9).all())
    assert bool((much >= little - 1e-9).all())
    assert bool((much <= 1e-9).all())
    assert bool((much > little + 1e-3).any())


def test_the_observed_tree_stays_where_all_else_is_pruned(model):
    layer = GrammarLayer(model)
    with torch.no_grad():
        assert torch.allclose(
            layer.log_prob(layer.observe(TREES, 0.999999)), torch.zeros(len(TREES)).double(), atol=0.7
        )
        assert bool(layer.log_prob(layer.observe(TREES, 0.999999)).isfinite().all())


def test_a_forest_with_its_own_trees_is_itself(model):
    layer = GrammarLayer(model)
    observed = layer.observe(TREES[:5])
    forest, nodes = observed.forest.forest, observed.forest.nodes
    rules = len(layer._structure.forest_rules.sizes)
    joined, kept = with_trees(forest, nodes, forest, nodes, observed.forest.sentences, rules)
    assert joined.nodes == forest.nodes
    for name in ("level", "rule", "parent", "left", "right", "leaves"):
        assert len(getattr(joined, name)) == len(getattr(forest, name))
    assert sorted(kept.symbol.tolist()) == sorted(nodes.symbol.tolist())


def test_gradients_of_the_pruned_likelihood(model):
    layer = GrammarLayer(model, "log-weights")
    observed = layer.observe(TREES[:3], 1e-3)
    direction = {name: torch.randn_like(p) * p.isfinite() for name, p in layer.named_parameters()}
    layer.log_prob(observed).sum().backward()
    slope = sum(float((p.grad * direction[name]).sum()) for name, p in layer.named_parameters())
    values, size = [], 1e-5
    with torch.no_grad():
        for sign in (1, -2):
            for name, p in layer.named_parameters():
                p.add_(torch.nan_to_num(direction[name]), alpha=sign * size)
            values.append(float(layer.log_prob(observed).sum()))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * size), rel=1e-4)


# Likelihoods


@pytest.mark.parametrize("objective", ["conditional", "joint"])
def test_the_first_figure_is_the_likelihood_of_the_start(folder, model, objective):
    started = training(init=folder, objective=objective, prune=0.0, unknown=0.0)
    words = sum(len(lvpcfg.normalise(tree).leaves()) for tree in TREES)
    name = "log_likelihood_per_word" if objective == "joint" else "conditional_log_likelihood_per_word"
    assert started.figures()[name] == pytest.approx(likelihood(model, objective) / words, rel=1e-4)


@pytest.mark.parametrize("objective", ["conditional", "joint"])
def test_the_likelihood_rises_in_every_representation(any_folder, objective):
    options = {"init": any_folder, "unknown": 0.0, "weight_decay": 0.0, "objective": objective}
    trained = training(**options)
    before = likelihood(trained.module.to_model(), objective)
    for _ in trained.run():
        pass
    model = trained.model()
    assert type(model.grammar.binary) is type(lvpcfg.Model.load(any_folder).grammar.binary)
    assert likelihood(model, objective) > before + 1
    if objective == "joint":  # it stays a probability grammar
        sums = model.grammar.row_sums()
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    assert lvpcfg.Parser(model, device="cpu").parse(["The", "dog", "barks", "."]).leaves() == [
        "The",
        "dog",
        "barks",
        ".",
    ]


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "lbfgs"])
def test_optimisers(folder, optimiser):
    trained = training(init=folder, optimiser=optimiser, unknown=0.0, warm_up=3, learning_rate=0.1, epochs=3)
    for _ in trained.run():
        pass
    assert likelihood(trained.model(), "conditional") > likelihood(lvpcfg.Model.load(folder), "conditional") + 1


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_line_search_of_lbfgs_never_goes_up(folder, decay):
    trained = training(init=folder, optimiser="lbfgs", unknown=0.0, epochs=4, weight_decay=decay, clip=1e-3)
    losses = []
    for _ in trained.run():
        away = sum(float(change.square().sum()) for _, change in trained._changes())
        with torch.no_grad():
            some = [
                trained.objective.log_likelihood(batch, torch.Generator()).sum() for batch in trained.objective.batches
            ]
        losses.append(-float(sum(some)) / len(TREES) + decay / 2 * away)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


def test_the_learning_rate_rises_and_falls_to_zero(folder):
    trained = training(init=folder, warm_up=2, learning_rate=0.1, epochs=1, batch_tokens=60)
    rates = []
    for _ in trained.run():
        rates.append(trained.optimiser.param_groups[0]["lr"])
    steps = len(rates)
    assert steps > 3
    assert rates[0] == pytest.approx(0.05)
    assert rates[1:] == pytest.approx([0.1 * (steps - done) / steps for done in range(1, steps)])


def test_gradients_are_clipped(folder):
    for clip, most in ((1e-3, 1.001e-3), (0.0, float("inf"))):
        trained = training(init=folder, clip=clip)
        trained._update(trained.steps[0])
        norm = torch.stack([parameter.grad.norm() for parameter in trained.module.parameters()]).norm()
        assert 0 < float(norm) <= most
    assert float(norm) > 1e-2


def test_a_fresh_grammar_learns_its_states():
    for objective in ("conditional", "joint"):
        trained = training(states=2, objective=objective, unknown=0.0, epochs=4)
        before = likelihood(trained.model(), objective)
        for _ in trained.run():
            pass
        assert likelihood(trained.model(), objective) > before + 5


@pytest.mark.parametrize("unaries", ["keep", "collapse"])
def test_treebanks_without_unary_rules_or_short_sentences(unaries):
    tree = Tree.fromstring("(S " + "(NP (DT the) (NN dog)) " * 11 + ")")
    bank = build_treebank([tree] * 2, lvpcfg.Binarisation(unaries=unaries))
    trained = gradient(GradientOptions(states=2, **FAST), Task(bank))
    for _ in trained.run():
        pass
    assert "pruning_gap" not in trained.figures()
    assert trained.figures()["conditional_log_likelihood_per_word"] <= 0


def test_whole_charts_give_the_exact_likelihood(folder):
    trained = training(init=folder, prune=0.0, unknown=0.0, epochs=1, batch_tokens=10**6, weight_decay=0.0)
    assert next(trained.run()).title == "epoch 1"
    expected = likelihood(lvpcfg.Model.load(folder), "conditional")
    assert trained.total == pytest.approx(expected, rel=1e-4)
    assert "pruning_gap" not in trained.figures()


def test_the_gap_of_pruning_is_reported(folder):
    trained = training(init=folder, prune=0.05, epochs=1)
    for _ in trained.run():
        pass
    assert trained.figures()["pruning_gap"] > 0


def test_decay_leads_back_to_the_start(folder):
    def distance(optimiser, decay):
        trained = training(init=folder, optimiser=optimiser, weight_decay=decay)
        for _ in trained.run():
            pass
        return sum(float(change.abs().sum()) for _, change in trained._changes())

    for optimiser, large in (("adam", 1.0), ("adamw", 15.0)):
        assert distance(optimiser, large) < 0.5 * distance(optimiser, 0.0)


def test_unary_weights_keep_chains_summable():
    """X -> Y and Y -> X are rules: their weights may grow, the sum over all chains stays finite."""
    trees = [Tree.fromstring(text) for text in LOOP]
    model = lvpcfg.train(trees, "gradient", states=1, learning_rate=2.0, weight_decay=0.0, epochs=30, unknown=0.0)
    layer = GrammarLayer(model, "log-weights")
    with torch.no_grad():
        layer.unary.add_(20)
        radius = torch.linalg.eigvals(layer.grammar().unary_matrix()[:, : model.grammar.interminal_states]).abs().max()
        assert float(radius) < 1
        assert bool(layer.log_prob(trees).isfinite().all())


LOOP = ["(S (X (Y (X (A a)))) (B b))", "(S (Y (X (A a))) (B b))", "(S (X (A a)) (Y (B b)))"]


# Words


def test_words_that_occur_once_are_taken_for_unknown_ones(folder):
    """Which says less about their tree."""
    found = []
    for unknown in (0.0, 0.5, 1.0):
        trained = training(init=folder, unknown=unknown, batch_tokens=10**6)
        next(trained.run())
        found.append(trained.total)
    assert found[0] > found[1] > found[2]


def test_words_whose_tags_no_unknown_word_has_stay_known(folder):
    """In a single tree, its full stop occurs once."""
    trained = gradient(GradientOptions(init=folder, unknown=1.0, **FAST), Task(build_treebank(TREES[:1])))
    for _ in trained.run():
        pass
    assert -100 < trained.total < 0


# Checkpoints


@pytest.mark.parametrize("optimiser", ["adam", "lbfgs"])
def test_going_on_is_the_same_as_never_having_stopped(folder, tmp_path, optimiser):
    whole = training(init=folder, optimiser=optimiser, epochs=4)
    steps = whole.run()
    for _ in range(2):
        next(steps)
    whole.checkpoint({"said": 1}).save(tmp_path / "c.safetensors")
    for _ in steps:
        pass
    again = training(init=folder, optimiser=optimiser, epochs=4)
    assert again.load(tmp_path / "c.safetensors") == {"said": 1}
    assert again.done == 2
    for _ in again.run():
        pass
    assert again.figures() == whole.figures()
    for one, two in zip(whole.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, two)


# Bad input


def test_what_is_refused(folder, model, tmp_path):
    with pytest.raises(InputError, match=r"estimator\.parametrisation is 'values': the joint objective needs"):
        GradientOptions(objective="joint", parametrisation="values")
    with pytest.raises(InputError, match=r"estimator\.objective is 'trees'"):
        GradientOptions(objective="trees")
    with pytest.raises(InputError, match=r"estimator\.learning_rate is 0: expected"):
        GradientOptions(learning_rate=0)
    lvpcfg.compress(model, method="als", rank=1, threshold=1.0).save(tmp_path / "signed")
    for objective in ("conditional", "joint"):
        with pytest.raises(InputError, match=r"signed' has negative parameters: expected one without, or"):
            training(init=str(tmp_path / "signed"), objective=objective)
    with pytest.raises(InputError, match="is not a model folder"):
        training(init=str(tmp_path))
    otherwise = build_treebank(TREES, lvpcfg.Binarisation(vertical=2))
    with pytest.raises(InputError, match="give the same binarisation"):
        gradient(GradientOptions(init=folder), Task(otherwise))
    others = build_treebank([*TREES, Tree.fromstring("(S (X (A a)) (B b))")])
    with pytest.raises(InputError, match="has no symbol 'A'"):
        gradient(GradientOptions(init=folder), Task(others))


def test_a_loss_that_is_no_number_stops_with_the_last_checkpoint_kept(folder, tmp_path):
    options = GradientOptions(init=folder, learning_rate=1e30, **FAST)
    with pytest.raises(InputError, match=r"estimator\.learning_rate=1e\+30 is too large"):
        run("train", tmp_path, train=written(tmp_path), dev=written(tmp_path), estimator=options)
    assert (tmp_path / "checkpoint.safetensors").exists()
    assert lvpcfg.Model.load(tmp_path / "model")


def test_the_job_stops_when_dev_no_longer_gains(folder, tmp_path):
    options = GradientOptions(init=folder, learning_rate=1e-12, epochs=4, batch_tokens=10**6)
    settings = {"train": written(tmp_path), "dev": written(tmp_path), "estimator": options, "patience": 2}
    result, printed = run("train", tmp_path, **settings)
    assert result["f1"] > 50
    assert result["iterations"] == 0  # the start stays the best
    assert result["last_conditional_log_likelihood_per_word"] < 0
    assert "epoch 2" in printed
    assert "epoch 3" not in printed
    resumed, printed = run("train", tmp_path, **settings, resume=True)
    assert resumed == result | {"train_seconds": resumed["train_seconds"]}
    assert "is finished already" in printed


def test_trees_that_the_grammar_does_not_make_are_left_out_and_counted(folder):
    bank = build_treebank([*TREES, Tree.fromstring("(S (S (. .)) (S (. .)))")])
    trained = gradient(GradientOptions(init=folder, **FAST), Task(bank))
    for _ in trained.run():
        pass
    assert trained.figures()["left_out"] == 1
    assert trained.figures()["pruning_gap"] >= 0


def test_trees_without_weight_are_left_out_though_their_rules_exist(model):
    """Compressed models may hold zeros where a tree needs a number."""
    lexical = model.grammar.lexical
    zero = replace(lexical, value=lexical.value * 0, weight=lexical.weight * 0)
    nothing = replace(model, grammar=replace(model.grammar, lexical=zero))
    some = replace(lexical, value=lexical.value.clone(), weight=lexical.weight.clone())
    entry = model.lexicon.encode([TREES[0].leaves()[-2]])[0]
    some.value[some.row[entry] : some.row[entry + 1]] = 0
    some.weight[entry] = 0
    word = TREES[0].leaves()[-2]
    expected = sum(word in tree.leaves() for tree in TREES)
    with TemporaryDirectory() as folder:
        replace(model, grammar=replace(model.grammar, lexical=some)).save(folder)
        trained = training(init=folder)
        for _ in trained.run():
            pass
        assert trained.figures()["left_out"] == expected
    with TemporaryDirectory() as folder:
        nothing.save(folder)
        with pytest.raises(InputError, match=f"makes none of the {len(TREES)} trees"):
            next(training(init=folder).run())
