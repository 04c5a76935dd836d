"""Chains of latent states of tags: what they are worth, how they are learned, and taggers."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure
from omegaconf import open_dict
from running import options_of, run

import lvpcfg
from lvpcfg import InputError, Parser, Tagger, TaggingModel, corpus
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.estimator import TaggingTask
from lvpcfg.estimate.gradient import GradientOptions, gradient
from lvpcfg.jobs import arguments as command_line
from lvpcfg.jobs import board
from lvpcfg.jobs.config import typed
from lvpcfg.jobs.options import tagger_options
from lvpcfg.options import TAG_DECODERS
from lvpcfg.registry import ESTIMATORS, configuration_folder
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.decode import best_tags
from lvpcfg.sequence.fast import log_partition
from lvpcfg.sequence.given import Blocks, GivenTags
from lvpcfg.trees.signatures import affixes
from lvpcfg.trees.tagged import build_tagged
from lvpcfg.trees.walk import tagged_words

TINY = [
    [("the", "D"), ("dog", "N"), ("barks", "V")],
    [("dogs", "N"), ("bark", "V")],
    [("the", "D"), ("bark", "N")],
    [("Stop", "V")],
]
SENTENCES = [tagged_words(tree) for tree in corpus("train")[:60]]
DEV = [tagged_words(tree) for tree in corpus("dev")[:12]]


def task(sentences=TINY, **options):
    return TaggingTask(build_tagged(sentences), **options)


def estimator(options, sentences=TINY, **rest):
    return ESTIMATORS[options.name].run(options, task(sentences, **rest))


def done(training):
    for _ in training.run():
        pass
    return training


def random_chain(tags, m, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return Chain(random(tags * m), (random(tags * m, tags * m),), random(tags * m))


def paths(chain, words, tags, given=None):
    """Of one sentence: every sequence of states with its weight, those of given tags alone."""
    m = len(chain.initial) // tags
    for states in itertools.product(range(tags * m), repeat=len(words)):
        if given is None or [state // m for state in states] == list(given):
            weight = chain.initial[states[0]] * chain.final[states[-1]]
            for place, state in enumerate(states):
                weight = weight * words[place, state]
                if place:
                    weight = weight * chain.transition[states[place - 1], state]
            yield states, float(weight)


def write_conllu(path, sentences):
    rows = (
        "".join(f"{i}\t{word}\t_\t{tag}" + "\t_" * 6 + "\n" for i, (word, tag) in enumerate(sentence, 1))
        for sentence in sentences
    )
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def model():
    return lvpcfg.train(SENTENCES, "em", states=2, iterations=5)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "draw_states", lambda *_, **__: Figure((0.1, 0.1)))  # most of the time would go there
    return {
        "train": write_conllu(tmp_path / "train.conllu", SENTENCES),
        "dev": write_conllu(tmp_path / "dev.conllu", DEV),
    }


@pytest.fixture
def folder(tmp_path, model):
    model.save(tmp_path / "model")
    return tmp_path / "model"


# ---------------------------------------------------------------- chains through given tags


@pytest.mark.parametrize("m", [1, 2])
def test_the_weight_of_tags_is_the_sum_over_their_states(m):
    tags, sentences = 3, [[0, 2, 1], [1], [2, 2]]
    chain = random_chain(tags, m)
    words = [torch.rand(len(s), tags * m, dtype=torch.float64) for s in sentences]
    lengths, flat = torch.tensor([len(s) for s in sentences]), torch.tensor([*itertools.chain(*sentences)])
    leaf = torch.cat(words).view(-1, tags, m)[torch.arange(len(flat)), flat]
    found = GivenTags(flat, lengths, tags).log_weight(Blocks.of(chain, tags), leaf)
    expected = [sum(w for _, w in paths(chain, x, tags, s)) for s, x in zip(sentences, words, strict=True)]
    torch.testing.assert_close(found.exp(), torch.tensor(expected, dtype=torch.float64))


def test_all_tags_together_are_the_whole_chain():
    tags, length, chain = 3, 3, random_chain(3, 2)
    words = torch.rand(1, length, 6, dtype=torch.float64)
    every = torch.tensor(list(itertools.product(range(tags), repeat=length)))
    leaf = words[0].view(length, tags, 2)[torch.arange(length), every]  # [sequences, length, m]
    given = GivenTags(every.flatten(), torch.full((len(every),), length), tags)
    found = given.log_weight(Blocks.of(chain, tags), leaf.flatten(0, 1))
    torch.testing.assert_close(found.logsumexp(0, keepdim=True), log_partition(chain, words))


# ---------------------------------------------------------------- counting and EM


def test_one_state_a_tag_is_the_hidden_markov_model():
    counted, em = (done(estimator(options)) for options in (ESTIMATORS["count"].options(), EMOptions(states=1)))
    chain = counted.model().grammar.chain
    d, n, v = range(3)
    assert chain.initial.tolist() == [0.5, 0.25, 0.25]
    assert chain.transition[d].tolist() == [0, 1, 0]
    assert chain.transition[n].tolist() == [0, 0, 2 / 3]
    assert chain.final.tolist() == [0, 1 / 3, 1]
    assert chain.transition[v].tolist() == [0, 0, 0]
    for one, other in zip(chain.tensors, em.model().grammar.chain.tensors, strict=True):
        torch.testing.assert_close(one, other)
    words = {"D": {"the": 1.0}, "N": {"dog": 1 / 3, "dogs": 1 / 3, "bark": 1 / 3}}
    words["V"] = {"barks": 1 / 3, "bark": 1 / 3, "Stop": 1 / 3}
    expected = math.log(0.5 * 0.25 * 0.5 * 0.25)  # beginnings
    expected += 2 * math.log(2 / 3) + math.log(1 / 3)  # N -> V twice, and N ends once
    expected += sum(math.log(words[tag][word]) for sentence in TINY for word, tag in sentence)
    assert counted.figures()["log_likelihood_per_word"] == pytest.approx(expected / 8)


def test_expected_counts_are_those_of_enumeration():
    training = estimator(EMOptions(states=2, iterations=1, noise=1.0, smooth_rules=0.0, smooth_words=0.0, rare=0))
    states = training.phases[0].begin(training.refinement, torch.Generator().manual_seed(1))
    log_likelihood, found = states.expect()
    layout, parameters = states.layout, states.parameters()
    chain, expected, total, token = parameters.blocks.chain(), torch.zeros(6, 6).double(), 0.0, 0
    for sentence in TINY:
        tags = [layout.corpus.tags.index(tag) for _, tag in sentence]
        words = torch.zeros(len(sentence), 6).double()
        for place, tag in enumerate(tags):
            words[place, 2 * tag : 2 * tag + 2] = parameters.lexical[layout.pair[token]]
            token += 1
        weighted = list(paths(chain, words, 3, tags))
        z = sum(weight for _, weight in weighted)
        total += math.log(z)
        for path, weight in weighted:
            for one, other in itertools.pairwise(path):
                expected[one, other] += weight / z
    assert log_likelihood == pytest.approx(total)
    torch.testing.assert_close(found.counts.transition.reshape(6, 6), expected)
    known = found.counts.lexical[layout.known.squeeze(1)]
    assert float(known.sum()) == pytest.approx(8)
    assert all(bool((tensor >= 0).all()) for tensor in vars(found.counts).values())


def test_em_never_falls_and_learns_from_noise():
    training = estimator(EMOptions(states=3, iterations=8, smooth_rules=0.0, smooth_words=0.0), SENTENCES)
    found = [training.figures()["log_likelihood_per_word"] for _ in training.run()]
    assert found == sorted(found)
    one, other = (
        done(estimator(EMOptions(states=2, iterations=1), SENTENCES, seed=seed)).model().grammar for seed in (0, 1)
    )
    assert not torch.equal(one.chain.transition, other.chain.transition)


@pytest.mark.parametrize("states", [1, 3])
def test_what_is_learned_is_a_distribution(states):
    grammar = done(estimator(EMOptions(states=states, iterations=3), SENTENCES)).model().grammar
    ones = torch.ones(len(grammar.chain.initial), dtype=torch.float64)
    torch.testing.assert_close(grammar.chain.transition.sum(1) + grammar.chain.final, ones)
    torch.testing.assert_close(grammar.chain.initial.sum(), ones[0])
    torch.testing.assert_close(grammar.lexical.column_sums(), ones)


@pytest.mark.parametrize("options", [EMOptions(states=2, iterations=2), GradientOptions(states=2, epochs=2)])
def test_sentences_of_one_word_make_no_step(options):
    model = done(estimator(options, [[("Yes", "I")], [("dog", "N")]])).model()
    assert all(bool(tensor.isfinite().all()) for tensor in model.grammar.chain.tensors)
    assert Tagger(model).tag_sents([["Yes"], ["dog"]]) == [[("Yes", "I")], [("dog", "N")]]


@pytest.mark.parametrize("name", ["em", "gradient"])
def test_too_many_states_are_refused_before_any_work(name):
    with pytest.raises(InputError, match="with 3 tags there would be 18,000 states, expected 16,384 at the most"):
        lvpcfg.train(TINY, name, states=6000)


# ---------------------------------------------------------------- gradient descent


@pytest.mark.parametrize("objective", ["conditional", "joint"])
def test_the_likelihood_is_that_of_enumeration(objective):
    options = GradientOptions(states=2, noise=1, unknown=0.0, objective=objective)
    likelihood = gradient(options, task()).objective
    (batch,) = likelihood.batches
    found = likelihood.log_likelihood(batch, torch.Generator())
    grammar, lexicon = likelihood.module.grammar(), likelihood.task.layout.lexicon
    expected = []
    for number in likelihood.members[0]:
        words = grammar.lexical.lookup(torch.tensor(lexicon.encode([word for word, _ in TINY[number]])))
        tags = [grammar.tags.index(tag) for _, tag in TINY[number]]
        weight = sum(w for _, w in paths(grammar.chain, words, 3, tags))
        expected.append(
            weight / sum(w for _, w in paths(grammar.chain, words, 3)) if objective == "conditional" else weight
        )
    torch.testing.assert_close(found.exp(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"objective": "joint"}, {"lexicon": "characters"}, {"optimiser": "lbfgs", "learning_rate": 1.0}],
)
def test_descent_raises_the_likelihood(options):
    training = gradient(GradientOptions(states=2, epochs=3, unknown=0.0, **options), task(SENTENCES))
    before = training.figures()[training.shown[-1]]
    done(training)
    with torch.no_grad():
        batches, generator = training.objective.batches, torch.Generator()
        after = sum(float(training.objective.log_likelihood(batch, generator).sum()) for batch in batches)
    assert after / training.objective.task.words > before
    found = training.model()
    assert found.provenance["options"]["epochs"] == 3
    Tagger(found).tag_sents([["No", "."]])


def test_descent_goes_on_from_a_tagger(tmp_path, model):
    model.save(tmp_path / "model")
    options = GradientOptions(init=str(tmp_path / "model"), epochs=1)
    start = gradient(options, task(SENTENCES)).objective.module.grammar()
    torch.testing.assert_close(start.chain.transition.double(), model.grammar.chain.transition)
    with pytest.raises(InputError, match="has other tags or words than the sentences"):
        gradient(options, task(TINY))


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("decoder", TAG_DECODERS)
def test_decoders_find_what_enumeration_finds(decoder):
    tags, m, lengths = 3, 2, torch.tensor([4, 1, 3])
    chain = random_chain(tags, m, seed=3)
    words = torch.rand(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) ** 2
    found, impossible = best_tags(chain, words, lengths, tags, decoder)
    assert not impossible.any()
    for sentence, length in enumerate(lengths.tolist()):
        single, pairs = torch.zeros(length, tags), torch.zeros(length - 1, tags, tags)
        for states, weight in paths(chain, words[sentence, :length], tags):
            path = [state // m for state in states]
            for place, tag in enumerate(path):
                single[place, tag] += weight
            for place, (one, other) in enumerate(itertools.pairwise(path)):
                pairs[place, one, other] += weight
        if decoder == "recall":
            best = single.argmax(1).tolist()
        else:
            best = max(
                itertools.product(range(tags), repeat=length),
                key=lambda path: (
                    single[0, path[0]].log()
                    + sum(pairs[i, a, b].log() for i, (a, b) in enumerate(itertools.pairwise(path)))
                ),
            )
        assert found[sentence, :length].tolist() == list(best)


@pytest.mark.parametrize("decoder", TAG_DECODERS)
def test_a_sentence_without_a_sequence_is_tagged_word_by_word(decoder):
    model = lvpcfg.train([[("a", "A")], [("b", "B")]] * 3)  # nothing follows another word
    tagger = Tagger(model, decoder=decoder)
    assert tagger.tag_sents([["b", "a"], ["a"]]) == [[("b", "B"), ("a", "A")], [("a", "A")]]
    assert (tagger.counts.sentences, tagger.counts.fallbacks) == (2, 1)


def test_many_sentences_are_tagged_as_one_by_one(model):
    tagger = Tagger(model, dtype="float64")
    sentences = [[word for word, _ in sentence] for sentence in DEV]
    single = [tagger.tag(words) for words in sentences]
    assert Tagger(model, dtype="float64", batch_tokens=30).tag_sents(iter(sentences)) == single
    assert [[word for word, _ in found] for found in single] == sentences
    assert tagger.tag_sents([]) == []
    assert tagger.accuracy(DEV) > 0.5  # nltk's


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("A dog", "what is to be tagged is 'A dog': expected a list of sentences, each a list of words"),
        ([["A", ""]], r"sentence 1 is \['A', ''\]: expected a list of one or more words"),
        ([["A"], []], r"sentence 2 is \[\]: expected a list of one or more words"),
        ([["A", 3]], "expected a list of one or more words"),
    ],
)
def test_what_cannot_be_tagged(model, wrong, what):
    with pytest.raises(InputError, match=what):
        Tagger(model).tag_sents(wrong)
    with pytest.raises(InputError, match=what):
        Tagger(model).tags_of(wrong)


def test_what_a_tagger_is_not_made_of(model):
    for wrong, what in (
        ({"decoder": "viterbi"}, "decoder is 'viterbi': expected recall or max-rule"),
        ({"dtype": "int"}, "dtype is 'int'"),
        ({"batch_tokens": 0}, "batch_tokens is 0: expected a number of words"),
    ):
        with pytest.raises(InputError, match=what):
            Tagger(model, **wrong)
    with pytest.raises(InputError, match="a tagger takes a model of tagged sentences"):
        Tagger(lvpcfg.train(corpus("dev")[:3]))


# ---------------------------------------------------------------- from Python, and model folders


def test_training_from_python():
    for given in (SENTENCES, iter(SENTENCES), [[[*pair] for pair in sentence] for sentence in SENTENCES]):
        assert len(lvpcfg.train(given).lexicon.words) == len({word for sentence in SENTENCES for word, _ in sentence})
    with pytest.raises(
        InputError, match="estimator=spectral learns from trees: expected count, em, gaussian or gradient"
    ):
        lvpcfg.train(SENTENCES, "spectral")
    for options in ({"objective": "sentence"}, {"init": "x"}):
        with pytest.raises(InputError, match="is for grammars"):
            lvpcfg.train(SENTENCES, "em", **options)
    for options in ({"objective": "sentence"}, {"parametrisation": "values"}):
        with pytest.raises(InputError, match="is for grammars"):
            lvpcfg.train(SENTENCES, "gradient", **options)
    with pytest.raises(InputError, match=r"sentence 2 is \[\('a',\)\]: expected a list of \(word, tag\) pairs"):
        lvpcfg.train([[("a", "A")], [("a",)]])


class Lazy(Sequence):
    """As nltk's corpora give sentences."""

    def __init__(self, sentences):
        self.sentences = sentences

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, place):
        return self.sentences[place]


@pytest.mark.parametrize("given", [Lazy(TINY), dict(enumerate(TINY)).values(), [[], (), *TINY]])
def test_tagged_sentences_are_known_however_they_come(given):
    assert lvpcfg.train(given).grammar.tags == ("D", "N", "V")


def test_what_is_no_tagged_sentence():
    with pytest.raises(InputError, match=r"sentence 1 is \[\('a', None\)\]: expected a list of \(word, tag\) pairs"):
        lvpcfg.train([[("a", None)], *TINY])
    with pytest.raises(InputError, match="dev is for estimators that look at trees"):
        lvpcfg.train(TINY, dev=TINY)


def test_empty_sentences_are_left_out():
    assert len(build_tagged([*TINY, []])) == len(TINY)
    with pytest.raises(InputError, match="there is no sentence with words to learn from"):
        build_tagged([[]])


def test_a_folder_holds_all_of_a_model(folder, model):
    again = TaggingModel.load(folder)
    assert (again.lexicon, again.column, again.provenance) == (model.lexicon, model.column, model.provenance)
    assert (again.grammar.tags, again.grammar.states) == (model.grammar.tags, model.grammar.states)
    for one, other in zip(again.grammar.chain.tensors, model.grammar.chain.tensors, strict=True):
        assert torch.equal(one, other)
    words = [[word for word, _ in sentence] for sentence in DEV]
    assert Tagger.load(folder).tag_sents(words) == Tagger(model).tag_sents(words)


def test_taggers_and_parsers_are_not_taken_for_each_other(tmp_path, folder):
    with pytest.raises(InputError, match="it is a tagger, for job=tag: expected a grammar"):
        Parser.load(folder)
    lvpcfg.train(corpus("dev")[:3]).save(tmp_path / "grammar")
    with pytest.raises(InputError, match="it is a grammar, for job=parse: expected a tagger"):
        Tagger.load(tmp_path / "grammar")
    with pytest.raises(InputError, match="is not a model folder"):
        Tagger.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": 3}, "format 3 of a newer lvpcfg"),
        ({"states": 3}, "the tensor 'initial' has"),
        ({"states": 0}, "expected one or more of both"),
        ({"tags": ["A", "A"]}, "'tags' should be a list of different strings"),
        ({"column": "lemma"}, "'column' is 'lemma': expected upos or xpos"),
        ({"signature": "klingon"}, "there is no word signature 'klingon'"),
    ],
)
def test_folders_that_are_refused(folder, changes, what):
    from lvpcfg.grammar.folder import digest_of

    about = json.loads((folder / "model.json").read_text(encoding="utf-8")) | changes
    (folder / "model.json").write_text(json.dumps(about | {"sha256": digest_of(about)}), encoding="utf-8")
    with pytest.raises(InputError, match=what):
        Tagger.load(folder)


def test_what_could_not_be_loaded_is_not_saved(tmp_path, model):
    chain = model.grammar.chain
    wrong = replace(model, grammar=replace(model.grammar, chain=replace(chain, initial=-chain.initial)))
    with pytest.raises(InputError, match="cannot be saved: it has numbers below zero"):
        wrong.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_both_ends_of_a_word_are_its_class():
    assert affixes("membaca", False, False) == (
        "<unknown>-lower~me~aca",
        "<unknown>-lower~me~ca",
        "<unknown>-lower~baca",
        "<unknown>-lower~aca",
        "<unknown>-lower~ca",
        "<unknown>-lower",
    )
    assert affixes("Opposition", False, True)[-1] == "<unknown>-CAPITAL-KNOWN"
    assert affixes("Opposition", True, False)[-1] == "<unknown>-INITIAL"
    assert affixes("USA", False, True)[-1] == "<unknown>-CAPS-KNOWN"
    assert affixes("--", False, False)[-1] == "<unknown>-SIGNS-DASH"
    assert affixes("1989-90", False, False) == ("<unknown>~0-0", "<unknown>-DIGIT-DASH")


# ---------------------------------------------------------------- jobs


def test_a_training_with_dev(tmp_path, files):
    result, printed = run(
        "train", tmp_path / "out", **files, estimator=EMOptions(states=2, iterations=4), evaluate_every=2
    )
    for title in ("Tagger (em)", "hidden Markov model:", "iteration 2:", "iteration 4:", "dev tokens", "unknown words"):
        assert title in printed
    for name in ("token_accuracy", "sentence_accuracy", "unknown_accuracy", "unseen_tags", "states", "last_states"):
        assert name in result
    again, _ = run("evaluate", tmp_path / "again", model=str(tmp_path / "out/model"), gold=files["dev"])
    for name in ("token_accuracy", "sentence_accuracy", "unknown_accuracy"):
        assert again[name] == result[name]
    assert again["sentences_per_second"] > 0
    assert (tmp_path / "out/tensorboard").is_dir()
    assert TaggingModel.load(tmp_path / "out/model").column == "upos"


@pytest.mark.parametrize(
    "options", [EMOptions(states=2, iterations=6), GradientOptions(states=2, epochs=3, batch_tokens=400)]
)
def test_a_training_that_was_stopped_ends_with_the_same_model(tmp_path, files, options, monkeypatch):
    from lvpcfg.jobs.training import Training

    run("train", tmp_path / "whole", **files, estimator=options, evaluate_every=2)
    real, count = Training._make_checkpoint, itertools.count()

    def stopping(self):
        if next(count) == 5:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_make_checkpoint", stopping)
        with pytest.raises(KeyboardInterrupt):
            run("train", tmp_path / "parts", **files, estimator=options, evaluate_every=2)
    _, printed = run("train", tmp_path / "parts", **files, estimator=options, evaluate_every=2, resume=True)
    assert "goes on after iteration" in printed
    for name in ("model.json", "model.safetensors"):
        assert (tmp_path / "parts/model" / name).read_bytes() == (tmp_path / "whole/model" / name).read_bytes()


def test_restarts_and_patience(tmp_path, files):
    estimator = EMOptions(states=2, iterations=6)
    result, printed = run("train", tmp_path, **files, estimator=estimator, evaluate_every=1, restarts=2, patience=1)
    assert "The best of 2 restarts is the one with seed" in printed
    assert result["last_iterations"] <= 6
    assert (tmp_path / "model_1").is_dir()


def test_bad_sentences_are_refused_or_counted(tmp_path, files):
    lines = (tmp_path / "dev.conllu").read_text(encoding="utf-8")
    lines += "1\tword\t_\tNEW" + "\t_" * 6 + "\n\n1\tword\t_\n\n1\tword\t_\t_" + "\t_" * 6 + "\n"
    (tmp_path / "dev.conllu").write_text(lines, encoding="utf-8")
    with pytest.raises(InputError, match="expected 10 columns separated by tabs, found 3"):
        run("train", tmp_path / "a", **files)
    result, printed = run("train", tmp_path / "b", **files, on_error="skip")
    seen = {tag for sentence in SENTENCES for _, tag in sentence}
    unseen = [tag for sentence in DEV for _, tag in sentence if tag not in seen] + ["NEW"]
    assert (result["malformed"], result["unseen_tags"]) == (2, len(unseen))
    names = ", ".join(sorted({*unseen}))
    assert f"Words of dev with tags that data.train does not have ({names}): {len(unseen)}." in printed
    assert "has no upos tag: its column 4 is '_'" in printed


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["estimator=split_merge"],
            "estimator=split_merge learns from trees: expected count, em, gaussian or gradient",
        ),
        (["data.dev=x.mrg"], "'x.mrg' holds trees, and 'x.conllu' holds tagged sentences"),
        (["data.tags=lemma"], "data.tags is 'lemma': expected upos or xpos"),
        (["decoder=viterbi"], "decoder is 'viterbi': expected recall or max-rule"),
        (["estimator=gradient", "estimator.objective=sentence"], "estimator.objective=sentence is for grammars"),
    ],
)
def test_options_that_make_no_sense_for_tags(arguments, what):
    with initialize_config_dir(str(configuration_folder()), version_base="1.3"):
        arguments = ["job=train", "data.train=x.conllu", *arguments]
        composed = compose("config", overrides=arguments, return_hydra_config=True)
    choices = composed.hydra.runtime.choices
    with open_dict(composed):
        del composed["hydra"]
    with pytest.raises(InputError, match=what):
        typed(composed, choices)


CONLLU = (
    "# sent_id = 1\n# text = Don't stop .\n1-2\tDon't"
    + "\t_" * 8
    + "\n1\tDo\tdo\t_\tVB\tx=y\t_\t_\t_\t_\n2\tn't"
    + "\t_" * 8
    + "\n3\tstop"
    + "\t_" * 8
    + "\n4\t."
    + "\t_" * 8
    + "\n\n# a comment\n\n1\tbroken\n\n1\t(\t_\tX"
    + "\t_" * 6
    + "\n\n"
)


def test_conllu_keeps_all_but_the_tags(tmp_path, folder):
    (tmp_path / "in.conllu").write_text(CONLLU, encoding="utf-8")
    tagged = tmp_path / "out.conllu"
    result, printed = run(
        "tag", tmp_path / "out", model=str(folder), input=str(tmp_path / "in.conllu"), output=str(tagged)
    )
    before, after = CONLLU.split("\n"), tagged.read_text(encoding="utf-8").split("\n")
    assert len(before) == len(after)
    tags = []
    for old, new in zip(before, after, strict=True):
        if old.count("\t") == 9 and not old.startswith("1-2"):
            old, new = old.split("\t"), new.split("\t")
            tags.append((new[1], new.pop(3)))
            old.pop(3)
        assert old == new
    tagger = Tagger.load(folder)
    assert tags == [*tagger.tag(["Do", "n't", "stop", "."]), *tagger.tag(["("])]
    assert (result["sentences"], result["unreadable"], result["records"]) == (2, 1, 4)
    assert "Records that hold no sentence, left as they were: 1." in printed


def test_several_processes_write_the_same(tmp_path, folder, files):
    found = []
    for processes in (1, 2):
        output = tmp_path / f"{processes}.conllu"
        job = {"model": str(folder), "input": files["dev"], "output": str(output)}
        run("tag", tmp_path / str(processes), **job, processes=processes)
        found.append(output.read_bytes())
    assert found[0] == found[1] != b""


def test_the_model_is_loaded_once(tmp_path, folder, files, monkeypatch):
    loads, load = [], TaggingModel.load
    monkeypatch.setattr(TaggingModel, "load", lambda path: loads.append(path) or load(path))
    run("tag", tmp_path / "out", model=str(folder), input=files["dev"], output=str(tmp_path / "out.conllu"))
    assert len(loads) == 1


def test_words_with_line_ends_are_repaired(tmp_path, folder):
    tokens = ["a\nb", "c\td", "\re", "New York"]
    (tmp_path / "in.jsonl").write_text(json.dumps({"tokens": tokens}) + "\n", encoding="utf-8")
    job = {"model": str(folder), "input": str(tmp_path / "in.jsonl")}
    result, _ = run("tag", tmp_path / "1", **job, output=str(tmp_path / "out.conllu"))
    (found,) = lvpcfg.read_conllu(tmp_path / "out.conllu")
    assert [word for word, _ in found] == ["a_b", "c_d", "_e", "New York"]
    assert result["repaired"] == 1
    run("tag", tmp_path / "2", **job, output=str(tmp_path / "out.txt"))
    assert (tmp_path / "out.txt").read_bytes().count(b"\n") == 1


def test_line_ends_stay_what_they_were(tmp_path, folder):
    (tmp_path / "in.conllu").write_bytes(CONLLU.replace("\n", "\r\n").encode())
    job = {"model": str(folder), "input": str(tmp_path / "in.conllu"), "output": str(tmp_path / "out.conllu")}
    run("tag", tmp_path / "out", **job)
    found = (tmp_path / "out.conllu").read_bytes()
    assert found.count(b"\n") == found.count(b"\r\n") == CONLLU.count("\n")


def test_other_formats(tmp_path, folder):
    (tmp_path / "in.txt").write_text("No stop .\n\n(a b)\n", encoding="utf-8")
    tagger = Tagger.load(folder)
    first, second = tagger.tag(["No", "stop", "."]), tagger.tag(["(a", "b)"])
    job = {"model": str(folder), "input": str(tmp_path / "in.txt")}
    run("tag", tmp_path / "1", **job, output=str(tmp_path / "out.txt"))
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert lines == [" ".join(map("/".join, first)), "", " ".join(map("/".join, second)), ""]
    run("tag", tmp_path / "2", **job, output=str(tmp_path / "out.jsonl"))
    objects = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert objects[0] == {"id": None, "tokens": ["No", "stop", "."], "tags": [tag for _, tag in first]}
    run("tag", tmp_path / "3", **job, output=str(tmp_path / "out.conllu"), batch_tokens=2, decoder="max-rule")
    found = lvpcfg.read_conllu(tmp_path / "out.conllu")
    assert [[word for word, _ in sentence] for sentence in found] == [["No", "stop", "."], ["(a", "b)"]]


def test_trees_and_tags_do_not_mix():
    arguments = ["job=train", "data.train=x.mrg", "data.dev=dev.CONLLU"]
    assert "'dev.CONLLU' holds tagged sentences, and 'x.mrg' holds trees" in command_line.problem_with(arguments)


@pytest.mark.parametrize("job", ["train", "evaluate", "tag"])
def test_every_job_makes_the_same_tagger(job):
    assert tagger_options(options_of(job, batch_tokens=7))["batch_tokens"] == 7


def test_other_jobs_refuse_taggers(tmp_path, folder, files):
    for job, options, what in (
        ("parse", {"input": files["dev"], "output": str(tmp_path / "x.mrg")}, "it is a tagger, for job=tag"),
        ("tag", {"input": files["dev"], "output": str(tmp_path / "x.conllu"), "model": None}, "needs one model folder"),
        ("evaluate", {"gold": files["dev"], "test": files["dev"]}, "test is for trees"),
        ("evaluate", {"gold": files["dev"], "parameters": "none.prm"}, "parameters is for trees"),
        ("evaluate", {"gold": files["dev"], "punctuation": False}, "punctuation is for trees"),
        ("evaluate", {"gold": files["dev"], "model": None}, "job=evaluate needs one model folder"),
    ):
        with pytest.raises(InputError, match=what):
            run(job, tmp_path / job, **{"model": str(folder)} | options)
