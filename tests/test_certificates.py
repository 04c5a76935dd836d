"""Certificates: what is said of the exact grammar by a compressed one is never wrong."""

import json
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from cases import of_grammar
from enumeration import derivations, total
from hypothesis import given, settings
from hypothesis import strategies as st
from running import options_of, run
from strategies import random_model

from lvpcfg import InputError, Model, Parser, compress, corpus, train
from lvpcfg.decompose import envelope as fitting
from lvpcfg.decompose.envelope import cover, envelope_of
from lvpcfg.decompose.options import ALSOptions
from lvpcfg.grammar.coarse import projected_coarse
from lvpcfg.grammar.envelope import bracketed
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.parses import PRUNED, WHOLE
from lvpcfg.trees.brackets import format_tree
from lvpcfg.trees.walk import words

SENTENCES = [["dog"], ["dog", "barks"], ["barks", "dog", "dog"], ["x", "barks", "dog", "barks"], ["dog"] * 6]


def near(model: Model, power: float, seed: int, looseness: float = math.inf) -> Model:
    """The model with some rules in CP form, of any sign, that are as far from it as that, and their envelope."""
    generator = torch.Generator().manual_seed(seed)
    binary = model.grammar.binary
    rules = torch.arange(1, len(binary))
    widest = max(binary.state_counts)
    u, v, w = (torch.zeros(len(rules), 40, widest, dtype=torch.float64) for _ in range(3))
    for row, rule in enumerate(rules.tolist()):
        tensor = binary.tensor(rule)
        x, y, z = tensor.shape
        for term, (i, j) in enumerate((i, j) for i in range(x) for j in range(y)):  # one for each fibre
            sign = 1 - 2 * int(torch.randint(2, (1,), generator=generator))
            u[row, term, i], v[row, term, j], w[row, term, :z] = sign, sign, tensor[i, j]
        noise = 2 * torch.rand(3, widest, generator=generator, dtype=torch.float64) - 1
        u[row, -1, :x], v[row, -1, :y], w[row, -1, :z] = 10**power * noise[0, :x], noise[1, :y], noise[2, :z]
    values = binary.tensor(0).flatten()
    small = RuleCP(binary.state_counts, binary.interminals, binary.rules, values, rules, u, v, w)
    grammar = replace(model.grammar, binary=small)
    with patch.multiple(fitting, LOOSENESS=looseness, STEPS=3):
        return replace(model, grammar=grammar, envelope=envelope_of(model.grammar, grammar))


def holds(exact: Model, small: Model, sentences, prune: float, decoder: str = "max-rule", slack: float = 1e-11) -> list:
    """The widths of log Z, when nothing is wrong: log Z of the exact grammar, and log p of the trees that are found."""
    truth = Parser(exact, decoder, dtype="float64", device="cpu", prune=prune)
    parser = Parser(small, decoder, dtype="float64", device="cpu", prune=prune)
    widths = []
    for parse, known in zip(parser.analyse(sentences, certify=True), truth.analyse(sentences), strict=True):
        found = parse.certificate
        assert found.over == (PRUNED if prune and not parse.flat else WHOLE)
        assert found.log_z.low <= known.sentence_log_prob + slack
        assert known.sentence_log_prob <= found.log_z.high + slack
        if parse.flat:
            assert found.log_prob == (-math.inf, -math.inf)
            assert found.posterior == (0, 0)
        elif parse.tree == known.tree:
            for value, interval in ((known.log_prob, found.log_prob), (known.posterior, found.posterior)):
                assert interval.low - slack <= value <= interval.high + slack
        widths.append(found.log_z.width)
    return widths


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.floats(-14, 0), st.tuples(*[st.integers(1, 4)] * 4), st.booleans())
def test_intervals_hold_the_exact_numbers(seed, power, states, pruned):
    exact = random_model(seed, states)
    exact = replace(exact, coarse=projected_coarse(exact.grammar))
    small = near(exact, power, seed)
    assert len(bracketed(small.grammar, small.envelope).centre.binary.cp_rules) == 3
    widths = holds(exact, small, SENTENCES, 1e-4 if pruned else 0.0)
    assert widths[0] < 1e-9  # of a word, no binary rule


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.floats(-12, 0), st.integers(1, 3))
def test_intervals_hold_the_sums_over_all_derivations(seed, power, length):
    exact = random_model(seed, (2, 1, 1, 2))
    (parse,) = Parser(near(exact, power, seed), device="cpu").analyse(
        [["dog", "x", "barks", "y"][:length]], certify=True
    )
    leaf = exact.grammar.lexical.values_of(exact.lexicon.tokens([["dog", "x", "barks", "y"][:length]]))
    z = total(derivations(of_grammar(exact.grammar).full, leaf))
    low, high = parse.certificate.log_z
    assert low <= math.log(z) <= high if z else low == -math.inf


def test_intervals_close_as_the_residual_does():
    exact = random_model(3)
    widths = [max(holds(exact, near(exact, power, 3), SENTENCES, 0.0)) for power in (-1, -3, -5, -7, -15)]
    assert widths == sorted(widths, reverse=True)
    assert 1e-9 < widths[-2] < 1e-3
    assert widths[-1] < 1e-9


def test_rules_with_wide_envelopes_are_kept():
    exact = random_model(3)
    loose, tight = near(exact, -1, 3), near(exact, -1, 3, looseness=0.0)
    assert not len(loose.envelope.exact)
    assert tight.envelope.exact.tolist() == [1, 2, 3]
    assert max(holds(exact, tight, SENTENCES, 0.0)) < 1e-9 < max(holds(exact, loose, SENTENCES, 0.0))
    half = near(exact, -1, 3, looseness=0.1)
    assert 0 < len(half.envelope.exact) < 3
    holds(exact, half, SENTENCES, 0.0)


def test_an_exact_model_has_intervals_without_width():
    exact = random_model(1)
    assert max(holds(exact, exact, SENTENCES, 0.0)) < 1e-8
    pruned = replace(exact, coarse=projected_coarse(exact.grammar))
    assert max(holds(pruned, pruned, SENTENCES, 1e-3)) < 1e-8


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(-40, 3), st.sampled_from([torch.float32, torch.float64]))
def test_a_cover_is_nowhere_below_the_residual(seed, power, dtype):
    generator = torch.Generator().manual_seed(seed)
    residual = torch.rand(3, 2, 4, 3, generator=generator, dtype=torch.float64) ** 20 * 10.0**power
    residual[0, 1], residual[1] = 0, 0
    found = cover(residual, torch.rand(3, 2, generator=generator, dtype=torch.float64), dtype)
    assert found.u.dtype == dtype
    u, v, w = (factor.double() for factor in (found.u, found.v, found.w))
    tensor = u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]
    assert bool((tensor >= residual).all())
    assert not bool(tensor[1].any())
    assert not bool(tensor[0, 1].any())


def test_long_sentences_are_within_their_intervals():
    """Values of single states are far below what floats hold of the largest."""
    exact = random_model(2)
    exact = replace(exact, coarse=projected_coarse(exact.grammar))
    for prune in (0.0, 1e-4):
        holds(exact, near(exact, -4, 1), [["x", "y", "z"] * 12], prune, slack=1e-6)


def test_an_upper_score_does_not_underflow():
    """A -> A A .5 | x .5 and B -> B B 1e-9 | x 1e-9 with root B: of 30 words, B's share of a span is below 1e-300."""
    exact = random_model(0, (2, 1, 1, 1))
    binary, lexical = exact.grammar.binary, exact.grammar.lexical
    values = torch.zeros_like(binary.values)
    rules = torch.tensor([[0, 0, 0], [0, 2, 2], [0, 0, 2], [0, 2, 0]])
    values = torch.cat([_diagonal(0.5, 1e-9), torch.tensor([0.5, 1e-9]), _diagonal(0.5, 1e-9)[:4] * 0, torch.zeros(4)])
    binary = replace(binary, rules=rules, values=values.double())
    none = torch.zeros(0, 2, dtype=torch.int64)
    root = torch.tensor([1e-300, 1, 0, 0, 0], dtype=torch.float64)
    grammar = replace(exact.grammar, binary=binary, unary_rules=none, unary=none.double().flatten(), root=root)
    model = replace(exact, grammar=grammar)
    model = replace(model, coarse=projected_coarse(grammar))
    assert lexical is model.grammar.lexical
    for prune in (0.0, 1e-9):
        holds(model, model, [["dog"] * 30], prune, slack=1e-6)


def _diagonal(first: float, second: float) -> torch.Tensor:
    tensor = torch.zeros(2, 2, 2)
    tensor[0, 0, 0], tensor[1, 1, 1] = first, second
    return tensor.flatten()


def test_impossible_and_too_long_sentences():
    exact = random_model(0)
    exact = replace(
        exact, grammar=replace(exact.grammar, lexical=replace(exact.grammar.lexical, weight=torch.zeros(4).double()))
    )
    small = near(exact, -3, 0)
    (impossible,) = Parser(small, device="cpu").analyse([["unseen", "dog"]], certify=True)
    assert impossible.flat
    assert impossible.certificate.log_z == impossible.certificate.log_prob == (-math.inf, -math.inf)
    assert impossible.certificate.posterior == (0, 0)
    (long,) = Parser(small, device="cpu", max_length=2).analyse([["dog"] * 3], certify=True)
    assert long.certificate.log_z == (-math.inf, math.inf)
    assert long.certificate.log_prob == (-math.inf, -math.inf)


@pytest.fixture(scope="module")
def latent():
    return train(corpus("train")[:200], estimator="em", states=4, iterations=4)


@pytest.fixture(scope="module")
def small(latent):
    return compress(latent, rank=2, threshold=1e-2, certify=True)


def test_a_compressed_model_of_the_embedded_corpus(latent, small):
    sentences = [words(tree) for tree in corpus("dev")[:30]]
    widths = holds(latent, small, sentences, 5e-5, slack=1e-9)
    assert 0 < sorted(widths)[len(widths) // 2] < 0.1
    assert len(small.envelope.u) > 0


def test_a_certificate_is_kept_in_the_folder(small, tmp_path):
    small.save(tmp_path)
    loaded = Model.load(tmp_path)
    for name, tensor in small.envelope.tensors.items():
        assert torch.equal(getattr(loaded.envelope, name), tensor)
    sentence = words(corpus("dev")[0])
    before, after = (Parser(model, device="cpu").analyse([sentence], certify=True)[0] for model in (small, loaded))
    assert before.certificate == after.certificate
    plain = Parser(loaded, device="cpu").analyse([sentence])[0]
    assert plain.certificate is None
    assert plain.tree == after.tree


def test_folders_with_a_wrong_envelope_are_refused(small, tmp_path):
    wrong = replace(small, envelope=replace(small.envelope, u=-1 - small.envelope.u))
    with pytest.raises(InputError, match="its envelope has numbers below zero"):
        wrong.save(tmp_path)
    wrong = replace(small, envelope=replace(small.envelope, exact=torch.tensor([10**6])))
    with pytest.raises(InputError, match=r"envelope\.exact"):
        wrong.save(tmp_path)
    terms = {name: getattr(small.envelope, name)[1:] for name in "uvw"}
    with pytest.raises(InputError, match=r"the tensor 'envelope\.u' has .* numbers, expected"):
        replace(small, envelope=replace(small.envelope, **terms)).save(tmp_path)


def test_folders_of_the_format_before_are_read(latent, tmp_path):
    latent.save(tmp_path)
    text = (tmp_path / "model.json").read_text()
    assert json.loads(text)["envelope"] is None
    assert Model.load(tmp_path).envelope is None


def test_models_without_a_certificate_get_one_sentence(latent, small):
    sentence = [["No", "."]]
    with pytest.raises(InputError, match="the model has no certificate: expected one that was compressed"):
        Parser(replace(small, envelope=None), device="cpu").analyse(sentence, certify=True)
    scaled = replace(small.grammar, root=2 * small.grammar.root)
    with pytest.raises(InputError, match="the model is not the one that its certificate was made for"):
        Parser(replace(small, grammar=scaled), device="cpu").analyse(sentence, certify=True)
    with pytest.raises(InputError, match="certify needs decompose=als"):
        compress(latent, method="svd", certify=True)
    with pytest.raises(InputError, match="certify needs one grammar"):
        Parser([latent, latent], device="cpu").analyse(sentence, certify=True)
    root = latent.grammar.root.clone()
    root[0] = -1.0
    signed = replace(latent, grammar=replace(latent.grammar, root=root))
    for wrong in (
        lambda: compress(signed, certify=True),
        lambda: Parser(signed, device="cpu").analyse(sentence, certify=True),
    ):
        with pytest.raises(InputError, match="the exact model has numbers below zero"):
            wrong()


def trees_of_both(exact, small, sentences, dtype="float32", prune=5e-5):
    """By the exact parser, and by the certified one, with what it counts."""
    certified = Parser(small, "max-rule", device="cpu", dtype=dtype, prune=prune, exact=exact)
    parser = Parser(exact, "max-rule", device="cpu", dtype=dtype, prune=prune)
    return parser.parse_sents(sentences), certified.parse_sents(sentences), certified.counts


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(-9, 0), st.tuples(*[st.integers(1, 4)] * 4))
def test_certified_trees_are_those_of_the_exact_model(seed, power, states):
    exact = random_model(seed, states)
    exact = replace(exact, coarse=projected_coarse(exact.grammar))
    expected, found, counts = trees_of_both(exact, near(exact, power, seed), SENTENCES, "float64", 1e-6)
    assert found == expected
    assert counts.certified + counts.uncertified >= counts.sentences


def test_certified_trees_of_the_embedded_corpus(latent, small):
    sentences = [words(tree) for tree in corpus("dev")[:40]]
    expected, found, counts = trees_of_both(latent, small, sentences)
    assert found == expected
    assert counts.certified > 0


def test_with_an_exact_model_all_but_trees_is_by_that(latent, small):
    sentences = [words(tree) for tree in corpus("dev")[:5]]
    certified, parser = Parser(small, device="cpu", exact=latent), Parser(latent, device="cpu")
    assert certified.analyse(sentences, spans=True) == parser.analyse(sentences, spans=True)
    assert certified.k_best(sentences[0], 3) == parser.k_best(sentences[0], 3)
    assert certified.counts.certified == certified.counts.uncertified == 0


def test_a_compressed_model_without_a_residual_certifies_all():
    exact = random_model(5)
    exact = replace(exact, coarse=projected_coarse(exact.grammar))
    expected, found, counts = trees_of_both(exact, near(exact, -30, 5), SENTENCES[:4], "float64")
    assert found == expected
    assert (counts.certified, counts.uncertified) == (4, 0)


def test_a_wide_envelope_certifies_nothing_that_is_not_so():
    exact = random_model(5)
    exact = replace(exact, coarse=projected_coarse(exact.grammar))
    expected, found, counts = trees_of_both(exact, near(exact, 1, 5), SENTENCES[:4], "float64")
    assert found == expected
    assert counts.uncertified > 0


def test_exact_models_that_do_not_fit_get_one_sentence(latent, small):
    with pytest.raises(InputError, match="exact is not the model that the other one was compressed from"):
        Parser(small, device="cpu", exact=small)
    with pytest.raises(InputError, match="exact is for decoder=max-rule: found viterbi"):
        Parser(small, "viterbi", device="cpu", exact=latent)
    with pytest.raises(InputError, match="the model has no certificate"):
        Parser(latent, device="cpu", exact=latent)
    with pytest.raises(InputError, match="expected a posterior above 0 for prune"):
        Parser(small, device="cpu", prune=0, exact=latent)


@pytest.fixture(scope="module")
def folders(latent, tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    latent.save(folder / "exact")
    options = ALSOptions(rank=2, threshold=1e-2)
    result, printed = run("compress", folder, model=str(folder / "exact"), decompose=options, certify=True)
    return folder, result, printed


def test_the_job_compresses_with_a_certificate(folders, small):
    folder, result, printed = folders
    loaded = Model.load(folder / "model")
    assert loaded.envelope.compressed == small.envelope.compressed
    assert result["certificate_kept"] == len(small.envelope.exact)
    assert 0 < result["certificate_median"] < 0.1
    assert 0.5 < result["certificate_narrow"] <= 1
    assert "Certificate:" in printed


def test_the_job_writes_certificates(folders, small, tmp_path):
    folder, *_ = folders
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("No .\nThe dog barks .\n")
    run("parse", tmp_path / "run", model=str(folder / "model"), input=str(source), output=str(output), certify=True)
    found = [json.loads(line)["certificate"] for line in output.read_text().splitlines()]
    parses = Parser(small, device="cpu").analyse([["No", "."], ["The", "dog", "barks", "."]], certify=True)
    for one, parse in zip(found, parses, strict=True):
        assert one["log_z"] == pytest.approx([*parse.certificate.log_z])
        assert one["over"] == PRUNED


def test_the_job_decodes_by_the_exact_model(folders, latent, tmp_path):
    folder, *_ = folders
    sentences = [words(tree) for tree in corpus("dev")[:10]]
    source, output = tmp_path / "in.txt", tmp_path / "out.mrg"
    source.write_text("".join(" ".join(sentence) + "\n" for sentence in sentences))
    options = {"input": str(source), "output": str(output), "certify": "exact", "exact": str(folder / "exact")}
    result, _ = run("parse", tmp_path / "run", model=str(folder / "model"), **options)
    expected = Parser(latent, device="cpu").parse_sents(sentences)
    assert output.read_text().splitlines() == [format_tree(tree) for tree in expected]
    assert result["certified"] + result["uncertified"] == 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"certify": "maybe"}, "certify is 'maybe': expected false, true or exact."),
        ({"certify": "exact"}, "certify=exact and exact=FOLDER, the model before it was compressed, go together."),
        ({"exact": "b"}, "certify=exact and exact=FOLDER, the model before it was compressed, go together."),
        ({"certify": True, "k_best": 2}, "certify is for the best tree"),
        ({"certify": "exact", "exact": "b", "spans": True}, "certify=exact for trees alone"),
        ({"certify": True, "output_format": "conll"}, "certify=true need output_format=jsonl"),
        ({"certify": "exact", "exact": "b", "output_format": "jsonl"}, "certify=exact gives trees alone"),
    ],
)
def test_wrong_options_get_one_sentence(options, expected):
    with pytest.raises(InputError, match=expected):
        options_of("parse", model="a", **options)
