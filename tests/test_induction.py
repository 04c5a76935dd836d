"""Grammars induced from sentences: log p(words), networks, EM, and the jobs that use what was learned."""

import itertools
from dataclasses import replace

import pytest
import torch
from enumeration import Dense, derivations
from nltk.tree import Tree
from running import run

import lvpcfg
from lvpcfg.errors import InputError
from lvpcfg.estimate.em import EMOptions, em
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.gradient import GradientOptions, gradient
from lvpcfg.estimate.induction import random_model
from lvpcfg.estimate.sentences import SENTENCE
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.neural import NeuralGrammarLayer
from lvpcfg.nn import VALUES, GrammarLayer
from lvpcfg.trees.brackets import write_trees
from lvpcfg.trees.treebank import build_treebank

TREES = [tree for tree in lvpcfg.corpus("train")[:120] if len(tree.leaves()) <= 10]
SMALL = {"objective": SENTENCE, "interminals": 3, "preterminals": 4}
TINY = {"objective": SENTENCE, "interminals": 2, "preterminals": 2, "occurrences": 1}
SENTENCES = [["a", "b"], ["b", "a", "c"], ["a", "c", "c", "b"], ["c", "a", "b", "b"], ["b", "c"]]


def task_of(options, trees=TREES, **settings):
    dev = settings.pop("dev", None)
    dev = None if dev is None else options.prepared(dev)
    return Task(build_treebank(options.prepared(trees)), dev=dev, **settings)


def tiny_model(rank):
    options = EMOptions(**TINY)
    return random_model(options, rank, task_of(options, SENTENCES, seed=3), SENTENCES)


def layer_of(kind, rank):
    model = tiny_model(rank)
    torch.manual_seed(0)
    layer = NeuralGrammarLayer(model, 5) if kind == "neural" else GrammarLayer(model)
    return layer.double()


def enumerated(model, sentence):
    """log p(words), one derivation at a time."""
    grammar = model.grammar.to(dtype=torch.float64)
    states, inner = len(grammar.root), grammar.interminal_states
    rules, first = torch.zeros(1, inner, states, states).double(), grammar.first_state.tolist()
    written = grammar.binary.written_out()
    for number, symbols in enumerate(written.rules.tolist()):
        _, b, c = (slice(first[symbol], first[symbol + 1]) for symbol in symbols)
        rules[0, :, b, c] = written.tensor(number).detach()
    words = grammar.lexical.lookup(torch.tensor(model.lexicon.encode(sentence))).detach()
    return sum(weight for weight, _ in derivations(Dense(grammar.root.detach(), rules, None), words))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["logits", "neural"])
def test_log_p_of_words_is_the_sum_over_all_derivations(kind, rank, tmp_path):
    layer = layer_of(kind, rank)
    layer.to_model().save(tmp_path / "model")
    model = lvpcfg.Model.load(tmp_path / "model")
    sums = model.grammar.row_sums()
    assert torch.allclose(sums, torch.ones_like(sums))
    assert float(model.grammar.root.sum()) == pytest.approx(1)
    parser = lvpcfg.Parser(model, device="cpu", dtype="float64")
    for sentence, parse in zip(SENTENCES, parser.analyse(SENTENCES), strict=True):
        expected = enumerated(model, sentence)
        found = layer.log_likelihood(torch.tensor([model.lexicon.encode(sentence)]))
        assert float(found.detach().exp()) == pytest.approx(expected)
        assert parse.sentence_log_prob == pytest.approx(float(found.detach()))
        assert not parse.flat


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_of_networks(rank):
    layer = layer_of("neural", rank)
    entries, lengths = torch.tensor([[0, 1, 2, 1], [2, 1, 0, 0]]), torch.tensor([4, 2])
    layer.log_likelihood(entries, lengths).sum().backward()
    direction = [torch.randn_like(parameter) for parameter in layer.parameters()]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(layer.parameters(), direction, strict=True))
    values, size = [], 1e-5
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, change in zip(layer.parameters(), direction, strict=True):
                parameter.add_(change, alpha=sign * size)
            values.append(float(layer.log_likelihood(entries, lengths).sum()))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * size), rel=1e-5)


def test_the_best_unlabelled_tree_has_the_likeliest_spans():
    """Of the five trees over four words, by the sum of the posteriors of their spans."""
    model, sentence = tiny_model(0), SENTENCES[2]
    layer = GrammarLayer(model, VALUES).double()
    top = layer([sentence]).marginals.top[0].detach().sum(-1)
    trees = {((0, 1), (0, 2)): 0, ((0, 1), (2, 3)): 0, ((1, 2), (0, 2)): 0, ((1, 2), (1, 3)): 0, ((2, 3), (1, 3)): 0}
    best = max(trees, key=lambda spans: sum(float(top[span]) for span in spans))
    found = lvpcfg.Parser(model, device="cpu").parse(sentence)
    # Numbers in place of words, so that the leaves of a subtree are its span.
    for place, position in enumerate(found.treepositions("leaves")):
        found[position] = place
    spans = {(t.leaves()[0], t.leaves()[-1]) for t in found.subtrees() if 1 < len(t.leaves()) < 4}
    assert spans == set(best)


# EM


def test_em_never_falls_and_stays_normalised():
    options = EMOptions(**SMALL | {"occurrences": 1}, iterations=6)
    training = em(options, task_of(options))
    start = training.layer.to_model()
    kept = training.kept.clone()
    found = []
    for _ in training.run():
        found.append(training.figures()["log_likelihood_per_word"])
    assert all(two > one for one, two in itertools.pairwise(found))
    assert found[-1] > found[0] + 0.02
    model = training.model()
    sums = model.grammar.row_sums()
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    unseen = kept.any(1)
    assert bool(unseen.any())
    assert torch.equal(model.grammar.lexical.backoff[unseen], start.grammar.lexical.backoff[unseen])


def test_an_iteration_of_em_counts_every_derivation():
    """Expected counts of rules and words, from derivations one by one."""
    options = EMOptions(**TINY, iterations=1)
    training = em(options, task_of(options, SENTENCES[:1]))
    before = training.layer.to_model().grammar.to(dtype=torch.float64)
    (words,) = [training.batches[0].entries[0]]
    # Two words: a -> t u alone, so that the posterior of (a, t, u) is root p q q over their sum.
    q = before.lexical.lookup(words)
    posterior = before.root[:2].view(2, 1, 1) * before.binary.tensor(3) * q[0].view(1, 2, 1) * q[1].view(1, 1, 2)
    posterior = posterior / posterior.sum()
    next(training.run())
    after = training.model().grammar
    assert after.root[:2].double().numpy() == pytest.approx(posterior.sum((1, 2)).numpy(), rel=1e-4)
    rules = posterior / posterior.sum((1, 2), keepdim=True)
    assert after.binary.tensor(3).double().flatten().numpy() == pytest.approx(rules.flatten().numpy(), rel=1e-4)


# Training


@pytest.mark.parametrize(
    "options",
    [
        EMOptions(**SMALL, iterations=4),
        GradientOptions(**SMALL, epochs=2, batch_tokens=150, dimension=8),
        GradientOptions(**SMALL, epochs=2, batch_tokens=150, rank=4, parametrisation="logits", learning_rate=0.05),
    ],
    ids=["em", "neural", "logits"],
)
def test_going_on_is_the_same_as_never_having_stopped(options, tmp_path):
    make = em if options.name == "em" else gradient
    task = task_of(options, dev=TREES[:9])
    whole = make(options, task)
    steps = whole.run()
    for _ in range(2):
        next(steps)
    whole.checkpoint({"said": 1}).save(tmp_path / "c.safetensors")
    for _ in steps:
        pass
    again = make(options, task)
    assert again.load(tmp_path / "c.safetensors") == {"said": 1}
    for _ in again.run():
        pass
    assert again.figures() == whole.figures()
    assert again.figures()["dev_perplexity"] > 1
    one, two = whole.model().grammar, again.model().grammar
    assert torch.equal(one.lexical.backoff, two.lexical.backoff)
    for name, tensor in one.binary.tensors.items():
        assert torch.equal(tensor, two.binary.tensors[name])


def test_gradient_descent_makes_sentences_likelier():
    options = GradientOptions(**SMALL, rank=6, epochs=6, batch_tokens=100, dimension=16, learning_rate=0.02)
    training = gradient(options, task_of(options, dev=TREES))
    found = [training.figures()["dev_log_likelihood_per_word"] for s in training.run() if s.evaluate == "always"]
    assert found[-1] > found[0] + 0.1


def test_networks_begin_with_symbols_that_are_almost_the_same():
    options = EMOptions(**SMALL | {"interminals": 30, "preterminals": 60})
    task = task_of(options)
    grammar = NeuralGrammarLayer(random_model(options, 0, task, [tree.leaves() for tree in TREES])).to_model().grammar
    for table in (grammar.binary.tensor(3), grammar.lexical.backoff.T):
        spread = (table.log() - table.log().mean(0)).std()  # between symbols, for the same rule or word
        assert 0 < spread < 0.2


def test_short_sentences_come_first():
    options = GradientOptions(**SMALL, epochs=4, batch_tokens=20, dimension=4, short_first=0.5)
    training = gradient(options, task_of(options))
    learned, log_likelihood = [], training.objective.log_likelihood

    def watched(batch, generator):
        learned.append(batch.words / batch.sentences)
        return log_likelihood(batch, generator)

    training.objective.log_likelihood = watched
    for _ in training.run():
        pass
    lengths = [batch.words / batch.sentences for batch in training.objective.batches]
    quarter = len(learned) // 8
    assert max(learned[:quarter]) < sum(lengths) / len(lengths)
    half = learned[len(learned) // 2 :]
    assert sorted(half) == pytest.approx(sorted(lengths * 2))


def test_a_model_can_be_trained_on_with_sentences(tmp_path):
    """A treebank grammar, with its own words and symbols."""
    model = lvpcfg.train(TREES, "em", states=2, iterations=2)
    model.save(tmp_path / "m")
    options = {"objective": SENTENCE, "init": str(tmp_path / "m"), "punctuation": True, "learning_rate": 0.02}
    found = lvpcfg.train(TREES, "gradient", **options, epochs=2)
    assert found.grammar.symbols == model.grammar.symbols
    sentences = [tree.leaves() for tree in TREES]
    with torch.no_grad():
        before, after = (float(GrammarLayer(each, VALUES)(sentences[:20]).partition.sum()) for each in (model, found))
    assert after > before + 1


# What is learned from


def test_what_sentences_are_learned_from():
    options = GradientOptions(**SMALL | {"longest": 3})
    trees = [
        "(S (NP (D a) (N b)) (. .))",
        "(S (X (`` x) ('' y)) (NP (D a) (N b)) (V c) (, z))",
        "(S (N a) (N b) (N c) (N d))",
        "(S (N a) (. .))",
    ]
    kept = options.prepared(map(Tree.fromstring, trees))
    assert [tree.leaves() for tree in kept] == [["a", "b"], ["a", "b", "c"]]
    assert [str(tree) for tree in kept] == ["(TOP (S (NP (D a) (N b))))", "(TOP (S (NP (D a) (N b)) (V c)))"]
    whole = replace(options, punctuation=True).prepared(map(Tree.fromstring, trees))
    assert [tree.leaves() for tree in whole] == [["a", "b", "."], ["a", "."]]
    assert [tree.leaves() for tree in options.prepared([["one", "two"], ["one"]])] == [["one", "two"]]


def test_known_words_are_the_most_frequent_ones():
    sentences = [["a", "a", "b", "b", "c"], ["a", "b", "a", "c", "d"]] + [[f"x{i}ing", "A"] for i in range(12)]
    options = EMOptions(**SMALL | {"vocabulary": 2, "lowercase": False, "occurrences": 2})
    assert random_model(options, 0, task_of(options, sentences), sentences).lexicon.words == ("A", "a")
    options = replace(options, vocabulary=100)
    lexicon = random_model(options, 0, task_of(options, sentences), sentences).lexicon
    assert lexicon.words == ("A", "a", "b", "c")
    assert len(lexicon.classes) == 1  # of x0ing, x1ing, ...; one d is too little for a class
    assert lexicon.encode(["x5ing", "d"]) == [4, 5]


def test_words_in_lower_case(tmp_path):
    """Known words are found however they are written; the classes of others are those of words as they are written."""
    sentences = [["The", "the", "1,000.5", "20"], ["THE", "Mr.", "3-D"]] + [
        ["the", f"Cx{i}ing"] for i in "abcdefghijkl"
    ]
    options = EMOptions(**SMALL | {"occurrences": 2})
    model = random_model(options, 0, task_of(options, sentences), sentences)
    model.save(tmp_path)
    lexicon = lvpcfg.Model.load(tmp_path).lexicon
    assert lexicon == model.lexicon
    assert lexicon.words == ("the", "0")
    assert len(lexicon.classes) == 1
    assert "CAPITAL" in lexicon.classes[0]
    assert lexicon.encode(["THE", "17.5", "Cxying", "Mr.", "The"]) == [0, 1, 2, 3, 0]


# Bad input


def test_what_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"'values': the sentence objective needs parameters that are normalised, 'log"
    ):
        GradientOptions(objective=SENTENCE, parametrisation="values")
    with pytest.raises(InputError, match=r"'neural': networks stand for a fresh grammar"):
        GradientOptions(parametrisation="neural")
    with pytest.raises(InputError, match=r"'neural': networks stand for a fresh grammar"):
        GradientOptions(objective=SENTENCE, parametrisation="neural", init="DIR")
    with pytest.raises(InputError, match=r"estimator\.objective is 'sentences'"):
        EMOptions(objective="sentences")
    with pytest.raises(InputError, match=r"estimator\.longest is 1: expected 2 or more"):
        EMOptions(objective=SENTENCE, longest=1)
    with pytest.raises(InputError, match=r"estimator\.epochs is 2\.5: expected a whole number"):
        GradientOptions(epochs=2.5)
    with pytest.raises(
        InputError, match=r"short_first is 0\.4: only estimator.objective=sentence begins with short sentences"
    ):
        GradientOptions(short_first=0.4)
    with pytest.raises(InputError, match=r"none of the 2 sentences has 2 to 40 words"):
        lvpcfg.train([["a"], ["b"]], "em", objective=SENTENCE)
    with pytest.raises(InputError, match="a sentence is 'a b': expected a list of one or more words"):
        lvpcfg.train(["a b"], "em", objective=SENTENCE)
    with pytest.raises(InputError, match=r"is text, and this estimator learns from trees"):
        run("train", tmp_path, train="sentences.txt")
    with pytest.raises(InputError, match="networks stand for grammars of one phrase symbol"):
        NeuralGrammarLayer(lvpcfg.train(TREES))


def test_a_dev_sentence_that_cannot_be_scored(tmp_path):
    trees = [Tree.fromstring("(S (A a) (B b))")] * 2
    lvpcfg.train(trees).save(tmp_path / "m")
    options = GradientOptions(objective=SENTENCE, init=str(tmp_path / "m"))
    task = task_of(options, trees, dev=[["a", "b"], ["b", "a", "a"]])
    with pytest.raises(InputError, match="the grammar has no tree for the dev sentence 'b a a'"):
        gradient(options, task)


# Jobs


def test_the_job_and_what_follows(tmp_path):
    train, dev, text = (str(tmp_path / name) for name in ("train.mrg", "dev.mrg", "text.txt"))
    write_trees(TREES, train)
    write_trees(TREES[:12], dev)
    options = GradientOptions(**SMALL, rank=5, dimension=8, epochs=2, learning_rate=0.01)
    figures, printed = run("train", tmp_path / "one", train=train, dev=dev, estimator=options)
    assert "dev perplexity" in printed
    assert figures["dev_perplexity"] <= figures["last_dev_perplexity"]
    assert figures["unlabelled_sentence_f1"] > 0
    model = str(tmp_path / "one" / "model")
    scored, printed = run("evaluate", tmp_path / "two", model=model, gold=dev, punctuation=False)
    assert "unlabelled sentence-F1" in printed
    assert scored["unlabelled_sentence_f1"] == pytest.approx(figures["unlabelled_sentence_f1"])
    assert run("inspect", tmp_path / "three", model=model)[0]["states"] == 7
    sentences = [tree.leaves() for tree in TREES]
    (tmp_path / "text.txt").write_text("".join(" ".join(sentence) + "\n" for sentence in sentences))
    run("parse", tmp_path / "four", model=model, input=text, output=str(tmp_path / "out.mrg"))
    assert [tree.leaves() for tree in lvpcfg.read_trees(tmp_path / "out.mrg")] == sentences
    options = EMOptions(**SMALL, iterations=1)
    figures, _ = run("train", tmp_path / "five", train=text, estimator=options)
    assert figures["words"] == sum(len(sentence) for sentence in sentences if len(sentence) > 1)


def test_options_that_need_each_other_are_checked_together():
    options = ["job=train", "estimator=gradient", "data.train=a.txt", "estimator.parametrisation=neural"]
    assert problem_with([*options, "estimator.objective=sentence"]) is None
    assert "is text" in problem_with(options[:3])
    assert "networks stand for" in problem_with([*options[:2], options[3]])
