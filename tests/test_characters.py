"""Words scored by how they are spelt: the network, models that have one, and training it together with a grammar."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from pages import python_of
from running import run
from safetensors.torch import load_file

import lvpcfg
from lvpcfg.errors import InputError
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.gradient import GradientOptions, gradient
from lvpcfg.estimate.gradient_descent import GradientDescent
from lvpcfg.evaluation.inspect import likeliest_words
from lvpcfg.evaluation.unknown import unknown_words
from lvpcfg.grammar.folder import digest_of
from lvpcfg.nn import GrammarLayer
from lvpcfg.trees.brackets import write_trees
from lvpcfg.trees.spelling import KEPT, CharacterNetwork
from lvpcfg.trees.treebank import build_treebank

TREES = [tree for tree in lvpcfg.corpus("train")[:60] if len(tree.leaves()) <= 14][:24]
FAST = {"epochs": 2, "batch_tokens": 100, "lexicon": "characters"}
SENTENCE = ["The", "dog", "zorbified", "Zorks", "."]


@pytest.fixture(scope="module")
def start():
    return lvpcfg.train(TREES, "split_merge", cycles=1, split_iterations=4, merge_iterations=2, smooth_iterations=1)


@pytest.fixture(scope="module")
def folder(start, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "start"
    start.save(path)
    return str(path)


def training(folder, **options):
    return gradient(GradientOptions(**FAST | {"init": folder} | options), Task(build_treebank(TREES)))


@pytest.fixture(scope="module")
def model(folder):
    trained = training(folder)
    for _ in trained.run():
        pass
    return trained.model()


def with_network(model, seed=0):
    """The model with a network that knows something at random, in double precision."""
    states = len(model.grammar.root) - model.grammar.interminal_states
    generator = torch.Generator().manual_seed(seed)
    network = CharacterNetwork.new(len(model.lexicon.alphabet), states, generator)
    network = replace(network, output=torch.randn(network.output.shape, generator=generator))
    lexical = replace(model.grammar.lexical, network=network)
    return replace(model, grammar=replace(model.grammar, lexical=lexical).to(dtype=torch.float64))


def values(model, sentence):
    """What its words are worth to each state."""
    return model.grammar.lexical.values_of(model.lexicon.tokens([sentence]))


# The network


def test_the_network_is_its_formula(start):
    """Word by word, window by window."""
    model = with_network(start)
    network, alphabet = model.grammar.lexical.network, model.lexicon.alphabet
    long = "y" * KEPT + "never seen" + "s" * KEPT
    tokens = model.lexicon.tokens([["The", "dog", "dog", "é", long]])
    found = network.factors(tokens)
    for place, (word, first) in enumerate([("The", True), ("dog", False), ("dog", False), ("é", False)]):
        spelt = [2 if first else 3, *(alphabet.get(character, 1) for character in word), 4]
        size, width = network.kernel.shape[1:]
        columns = torch.cat([torch.zeros(2, size), network.embedding[spelt], torch.zeros(2, size)])
        windows = torch.stack([(network.kernel * columns[at : at + width].T).sum((1, 2)) for at in range(len(spelt))])
        seen = (windows.amax(0) / (size * width) ** 0.5 + network.bias).clamp_min(0)
        expected = torch.softmax(network.output @ seen / len(seen) ** 0.5, 0) * len(network.output)
        assert torch.allclose(found[place], expected)
    assert torch.allclose(found.mean(1), torch.ones(5).double())
    short = long.replace("never seen", "")
    assert torch.allclose(found[4], network.factors(model.lexicon.tokens([["The", short]]))[1])


def test_a_new_network_changes_nothing(start, folder):
    layer = training(folder).objective.module.double()
    new = layer.to_model()
    assert new.grammar.lexical.network is not None
    assert torch.allclose(values(new, SENTENCE), values(start, SENTENCE), rtol=1e-5)
    assert torch.allclose(layer.log_prob(TREES[:3]), GrammarLayer(start).log_prob(TREES[:3]), atol=1e-3)


def test_unknown_words_are_told_apart_by_their_spelling(start, model):
    words = ["The", "zorbified", "glomified", "The", "the"]
    before, after = values(start, words), values(model, words)
    assert torch.equal(before[1], before[2])  # one class
    assert not torch.allclose(after[1], after[2], rtol=1e-3)
    assert not torch.allclose(after[0], after[3], rtol=1e-3)  # the first word of the sentence, and another one


@pytest.mark.parametrize("parametrisation", ["logits", "log-weights", "values"])
def test_gradients_reach_grammar_and_network(start, parametrisation):
    layer = GrammarLayer(with_network(start), parametrisation)
    observed = layer.observe(TREES[:3], 1e-3)
    generator = torch.Generator().manual_seed(1)
    direction = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.detach().abs().nan_to_num(0, 0, 0)
        for name, p in layer.named_parameters()
    }
    layer.log_prob(observed).sum().backward()
    assert all(bool((p.grad != 0).any()) for name, p in layer.named_parameters() if "characters" in name)
    slope = sum(float((p.grad * direction[name]).sum()) for name, p in layer.named_parameters())
    found, size = [], 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            for name, p in layer.named_parameters():
                p.add_(direction[name], alpha=sign * size)
            found.append(float(layer.log_prob(observed).sum()))
    assert slope == pytest.approx((found[0] - found[1]) / (2 * size), rel=1e-4)


# Models


def test_a_folder_gives_the_same_parses(model, tmp_path):
    model.save(tmp_path)
    loaded = lvpcfg.Model.load(tmp_path)
    sentences = [SENTENCE, TREES[0].leaves()]
    for prune in (0, 5e-5):
        one, two = (lvpcfg.Parser(each, device="cpu", prune=prune).analyse(sentences) for each in (model, loaded))
        assert [parse.tree for parse in one] == [parse.tree for parse in two]
        assert [parse.log_prob for parse in one] == [parse.log_prob for parse in two]
    assert loaded.save(tmp_path) is None  # over itself
    assert torch.equal(values(lvpcfg.Model.load(tmp_path), SENTENCE), values(model, SENTENCE))


def test_parser_layer_and_distribution_agree(model):
    trees = TREES[:2]
    best = lvpcfg.Parser(model, device="cpu", prune=0, dtype="float64").analyse([tree.leaves() for tree in trees])
    sums = torch.tensor([parse.sentence_log_prob for parse in best], dtype=torch.float64)
    layer = GrammarLayer(model, "values")
    with torch.no_grad():
        assert torch.allclose(layer([tree.leaves() for tree in trees]).partition.double(), sums, rtol=1e-5)
        assert torch.allclose(layer.log_weight(trees) - layer.log_prob(trees), sums, rtol=1e-5)
        copied = copy.deepcopy(layer)
        copied.characters["output"].zero_()
        weights = [torch.func.functional_call(copied, dict(layer.named_parameters()), ([SENTENCE],)), layer([SENTENCE])]
        assert torch.equal(*(trees.partition for trees in weights))
        assert not torch.allclose(copied([SENTENCE]).partition, layer([SENTENCE]).partition)


def test_models_with_networks_are_compressed_multiplied_and_looked_into(model, start):
    small = lvpcfg.compress(model, method="als", rank=1, threshold=1.0)
    assert torch.equal(values(small, SENTENCE), values(model, SENTENCE))
    alone = lvpcfg.Parser(model, device="cpu").parse(SENTENCE)
    twice = lvpcfg.Parser([model, model], device="cpu").parse(SENTENCE)
    assert twice == alone
    assert lvpcfg.Parser([model, start], device="cpu").parse(SENTENCE).leaves() == SENTENCE
    shares = torch.ones(len(model.grammar.root) - model.grammar.interminal_states).double()
    inside, before = (likeliest_words(each, shares) for each in (model, start))
    assert len(inside) == len(shares)
    assert inside != before


def signed(about):
    return json.dumps(about | {"sha256": digest_of(about)})


def test_folders_that_are_no_models_are_refused(model, tmp_path):
    model.save(tmp_path)
    text = (tmp_path / "model.json").read_text()
    about = json.loads(text)
    assert about["version"] == 9
    for characters, complaint in (
        ({"embedding": 24, "filters": 128}, "expected whole numbers for embedding, filters, width"),
        ({"embedding": 24, "filters": "all", "width": 5}, "expected whole numbers for embedding, filters, width"),
        ({"embedding": 24, "filters": 128, "width": 4}, "the 'width' of its 'characters' is 4: expected an odd"),
        ({"embedding": 24, "filters": 10**6, "width": 5}, "'characters.kernel' has 15360 numbers, expected 120000000"),
        (7, "should have dict under 'characters', found 7"),
    ):
        (tmp_path / "model.json").write_text(signed(about | {"characters": characters}))
        with pytest.raises(InputError, match=complaint):
            lvpcfg.Model.load(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(about | {"version": 10}))
    with pytest.raises(InputError, match="format 10 of a newer lvpcfg, and this one reads up to 9"):
        lvpcfg.Model.load(tmp_path)
    broken = replace(
        model,
        grammar=replace(model.grammar, lexical=replace(model.grammar.lexical, network=of_another_alphabet(model))),
    )
    with pytest.raises(InputError, match=r"cannot be saved: the tensor 'characters\.embedding' has"):
        broken.save(tmp_path / "other")


def of_another_alphabet(model):
    network = model.grammar.lexical.network
    return replace(network, embedding=network.embedding[:-1])


def test_truncated_tensors_are_refused(model, tmp_path):
    model.save(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(InputError, match="missing, truncated, or not the one"):
        lvpcfg.Model.load(tmp_path)


def test_folders_of_format_5_have_no_network(start, tmp_path):
    start.save(tmp_path)
    about = json.loads((tmp_path / "model.json").read_text())
    del about["characters"], about["sha256"], about["folded"]
    (tmp_path / "model.json").write_text(json.dumps(about | {"version": 5}))
    loaded = lvpcfg.Model.load(tmp_path)
    assert loaded.grammar.lexical.network is None
    assert torch.equal(values(loaded, SENTENCE), values(start, SENTENCE))


# Training


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(InputError, match=r"estimator\.lexicon is 'letters': expected"):
        GradientOptions(lexicon="letters")
    with pytest.raises(InputError, match="which scores words but is no distribution over them: expected"):
        GradientOptions(lexicon="characters", objective="joint")


def test_a_fresh_grammar_may_have_one():
    model = lvpcfg.train(TREES[:8], "gradient", states=1, lexicon="characters", epochs=1)
    assert bool((model.grammar.lexical.network.output != 0).any())


def test_a_network_is_trained_on(model, folder, tmp_path):
    """Whatever the lexicon is said to be: a model that has a network keeps it."""
    model.save(tmp_path)
    again = training(str(tmp_path), lexicon="words", epochs=1)
    network = again.objective.module.to_model().grammar.lexical.network
    assert torch.equal(network.output, model.grammar.lexical.network.output)
    for _ in again.run():
        pass
    assert not torch.equal(again.model().grammar.lexical.network.output, network.output)


def test_the_job_goes_on_where_it_stopped(folder, tmp_path, monkeypatch):
    """End to end: train, stop, go on, evaluate, inspect."""
    write_trees(TREES, tmp_path / "trees.mrg")
    options = GradientOptions(init=folder, **FAST | {"epochs": 1})
    settings = {"train": str(tmp_path / "trees.mrg"), "estimator": options, "checkpoint_every": 1}
    run("train", tmp_path / "whole", **settings)

    update, done = GradientDescent._update, []

    def up_to_two(self, step):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(step)
        update(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(GradientDescent, "_update", up_to_two)
        with pytest.raises(KeyboardInterrupt):
            run("train", tmp_path / "parts", **settings)
    run("train", tmp_path / "parts", **settings, resume=True)
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert bool((one["characters.output"] != 0).any())

    write_trees([replaced(tree) for tree in TREES[:4]], tmp_path / "gold.mrg")
    result, printed = run(
        "evaluate", tmp_path / "scores", gold=str(tmp_path / "gold.mrg"), model=str(tmp_path / "whole/model")
    )
    assert result["unknown_words"] == 4
    assert 0 <= result["unknown_tagging_accuracy"] <= 100
    assert "Words that the model has not seen: 4, of which" in printed


def replaced(tree):
    """The tree with a first word that nobody knows."""
    tree = tree.copy(deep=True)
    tree[tree.leaf_treeposition(0)] = "Xyzzy"
    return tree


def test_unknown_words_are_counted_without_punctuation(start):
    gold = [lvpcfg.normalise(replaced(tree)) for tree in TREES[:2]]
    wrong = [tree.copy(deep=True) for tree in gold]
    place = wrong[0].leaf_treeposition(0)[:-1]
    wrong[0][place].set_label("XYZ")
    assert unknown_words(gold, gold, start.lexicon) == {"unknown_words": 2, "unknown_tagging_accuracy": 100}
    assert unknown_words(gold, wrong, start.lexicon) == {"unknown_words": 2, "unknown_tagging_accuracy": 50}
    strange = [lvpcfg.normalise(TREES[0].copy(deep=True))]
    strange[0][strange[0].leaf_treeposition(len(strange[0].leaves()) - 1)] = "..."
    assert unknown_words(strange, strange, start.lexicon)["unknown_words"] == 0


# A network of one's own


def test_the_worked_example():
    """The blocks of docs/word_scores.md: grammar and network are trained together, and unknown words are told apart."""
    module, training, use = python_of("docs/word_scores.md")
    names = {}
    torch.manual_seed(0)
    exec(module, names)
    start, update = training.split("for epoch")
    exec(start, names)
    parser, batches, model = (names[name] for name in ("parser", "batches", "model"))
    before = float(parser(batches[0]).sum().detach())
    exec("for epoch" + update, names)
    assert float(parser(batches[0]).sum().detach()) > before + 10
    assert all(bool((parameter.grad != 0).any()) for parameter in parser.reader.parameters())
    exec(use, names)
    zorbified, zorby = (
        torch.zeros(len(model.grammar.symbols)).index_add(
            0, model.grammar.symbol_of_state, names[name].float().detach()
        )
        for name in ("zorbified", "zorby")
    )
    assert float(zorbified.sum()) == pytest.approx(1, abs=1e-4)
    likeliest = {model.grammar.symbols.names[int(some.argmax())] for some in (zorbified, zorby)}
    assert len(likeliest) == 2
