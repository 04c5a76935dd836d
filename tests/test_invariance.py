"""The check of charts: it passes what is right, and shows what is wrong, where likelihood alone would not."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from running import run
from strategies import random_model
from test_representations import PLAIN, make

from lvpcfg import InputError, check_invariance
from lvpcfg.chart.fast.blocks import Block
from lvpcfg.distributions import ModelTrees
from lvpcfg.evaluation.invariance import OfFunction

SENTENCES = [["dog", "barks"], ["barks", "dog", "dog"], ["dog", "barks", "cats", "dog", "cats", "dog"]]


def inside_outside(root, rules, words, fault=None):
    """log Z, posteriors, expected counts of rules (Cohen & Collins 2012, figure 2). `fault` breaks one step."""
    n, (inner, states, _) = len(words), rules.shape
    pad, square = words.new_zeros(states - inner), slice(0, inner)
    alpha, beta = (torch.zeros(n, n, states, dtype=words.dtype) for _ in range(2))
    counts = torch.zeros_like(rules)

    def fixed(cell):
        if fault == "clamped":
            cell = cell.clamp_min(0)
        if fault == "normalised per state":
            cell = cell / cell.abs().max().clamp_min(1e-300)
        if fault == "leaking pad":
            cell = cell + 1e-3
        return cell

    for i in range(n):
        alpha[i, i, inner:] = words[i]
    for width in range(2, n + 1):
        for i in range(n - width + 1):
            j = i + width - 1
            splits = range(i + (fault == "lost split" and width > 2), j)
            parts = [torch.einsum("xyz,y,z->x", rules, alpha[i, k], alpha[k + 1, j]) for k in splits]
            parts += parts[:1] * (fault == "doubled split" and width > 2)
            cell = torch.stack(parts).amax(0) if fault == "maximum" else torch.stack(parts).sum(0)
            alpha[i, j] = torch.cat([fixed(cell), pad])
    z = root @ alpha[0, n - 1]
    beta[0, n - 1] = torch.ones_like(root) / len(root) if fault == "wrong root" else root
    for width in range(n, 1, -1):
        for i in range(n - width + 1):
            j = i + width - 1
            above = beta[i, j, :inner]
            for k in range(i, j):
                left, right = alpha[i, k], alpha[k + 1, j]
                to_left = torch.einsum("x,xyz,z->y", above, rules, right**2 if fault == "squared" else right)
                to_right = torch.einsum("x,xyz,y->z", above, rules, left)
                if fault == "transposed":  # the axes of parent and left child, between phrases
                    to_left = torch.cat([torch.einsum("y,xyz,z->x", above, rules[:, square], right), to_left[inner:]])
                if fault == "swapped":  # what belongs to S and to V, which have two states each
                    to_left = to_left[torch.tensor([6, 7, 2, 3, 4, 5, 0, 1])]
                beta[i, k] += to_left
                if fault != "lost sum":
                    beta[k + 1, j] += to_right
                counts += torch.einsum("x,xyz,y,z->xyz", above, rules, left, right) / z
    return z.abs().log(), alpha * beta / z, counts


FAULTS = {  # and the score that shows it first
    "clamped": "log Z",
    "normalised per state": "log Z",
    "leaking pad": "log Z",
    "maximum": "log Z",
    "wrong root": "posterior",
    "squared": "posterior",
    "transposed": "posterior",
    "swapped": "posterior",
    "lost sum": "sum of the tags' posteriors",
    "lost split": "log Z with all weights 1",
    "doubled split": "log Z with all weights 1",
}


def test_a_function_that_is_right_passes():
    found = check_invariance(inside_outside)
    assert found.passed
    assert found.largest < 1e-9
    assert found.compared > 500
    assert "are what they should be" in found.line()
    assert check_invariance(lambda *given: inside_outside(*given)[:2]).passed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_and_is_named(fault):
    found = check_invariance(partial(inside_outside, fault=fault))
    assert not found.passed
    scores = [difference.score for difference in found.differences]
    assert FAULTS[fault] in scores
    if FAULTS[fault] == "posterior":
        assert "log Z" not in scores
    for difference in found.differences:
        assert not abs(difference.expected - difference.found) < 1e-7
    assert found.line().startswith(f"Scores differ. First, {found.differences[0]}.")


def test_lost_and_doubled_terms_are_invariant_by_themselves():
    """Why there are two checks more."""
    for fault in ("lost sum", "lost split", "doubled split"):
        scores = {one.score for one in check_invariance(partial(inside_outside, fault=fault)).differences}
        assert scores <= {"sum of the tags' posteriors", "log Z with all weights 1"}


def test_the_first_span_and_rule_are_named():
    found = check_invariance(partial(inside_outside, fault="squared"))
    named = {difference.score: str(difference) for difference in found.differences}
    assert named["posterior"].startswith("sentence 1, posterior of symbol 2 over words 1 to 1: expected 0.")
    assert "posterior of a rule" in named


def em(fault, rounds=8):
    """The log-likelihood of random sentences in EM with faulty expectations, as the faulty charts see it themselves."""
    subject = OfFunction(inside_outside, 0, False)
    generator = torch.Generator().manual_seed(3)
    tags = torch.eye(3, dtype=torch.float64)
    sentences = [tags[torch.randint(3, (n,), generator=generator)] for n in (2, 3, 3, 4, 4, 5)]
    root, rules = subject.root / subject.root.sum(), subject.rules / subject.rules.sum((1, 2), keepdim=True)
    likelihoods = []
    for _ in range(rounds):
        found = [inside_outside(root, rules, words, fault) for words in sentences]
        likelihoods.append(float(sum(log_z for log_z, *_ in found)))
        counts = sum(of_rules for *_, of_rules in found).clamp_min(1e-12)
        roots = sum(spans[0, len(spans) - 1] for _, spans, _ in found).clamp_min(1e-12)
        root, rules = roots / roots.sum(), counts / counts.sum((1, 2), keepdim=True)
    return likelihoods


def test_likelihood_that_rises_misses_some_of_them():
    missed = []
    for fault in FAULTS:
        likelihoods = em(fault)
        if all(after >= before - 1e-9 for before, after in pairwise(likelihoods)):
            missed.append(fault)
    assert {"clamped", "squared", "transposed"} <= {*missed}, missed


def test_functions_of_logarithms_get_a_positive_diagonal():
    def logarithms(root, rules, words, fault=None):
        return inside_outside(root.exp(), rules.exp(), words.exp(), fault)

    found = check_invariance(logarithms, logarithms=True)
    assert found.passed
    assert "diagonal" in found.missed
    for fault in ("squared", "wrong root", "leaking pad", "normalised per state"):
        assert not check_invariance(partial(logarithms, fault=fault), logarithms=True).passed
    # What it says that it misses: nothing is below zero.
    assert check_invariance(partial(logarithms, fault="clamped"), logarithms=True).passed


@pytest.mark.parametrize("name", PLAIN)
def test_models_in_every_representation_pass(name):
    found = check_invariance(make(name), SENTENCES)
    assert found.passed, found.line()
    assert check_invariance(ModelTrees(make(name), SENTENCES[:1]), trials=1).passed


@pytest.mark.parametrize("fault", ["squared", "swapped"])
def test_a_fault_in_our_own_outside_pass_shows(fault, monkeypatch):
    backward = Block.backward

    def broken(self, one, two, weights, gradient, into, add):
        if fault == "squared":
            two = two * two
        else:
            into = (into[1], into[0]) if into[0].shape == into[1].shape else into
        backward(self, one, two, weights, gradient, into, add)

    monkeypatch.setattr(Block, "backward", broken)
    found = check_invariance(random_model(1, (2, 2, 2, 2)), [*SENTENCES, ["barks"] * 4])
    assert not found.passed
    assert found.differences[0].score.startswith(("posterior", "sum of the tags"))


def test_what_it_is_given():
    model = make("tensors")
    for given, message in (
        ((model,), "needs sentences"),
        ((ModelTrees(model, SENTENCES), SENTENCES), "has its sentences already"),
        (("model", SENTENCES), "expected a model"),
        ((inside_outside, SENTENCES), "words of its own"),
        ((lambda *_: (0.0, torch.zeros(1)),), r"the function gave \[\(\), \(1,\)\] for 2 words"),
    ):
        with pytest.raises(InputError, match=message):
            check_invariance(*given)
    with pytest.raises(InputError, match="trials is 0"):
        check_invariance(model, SENTENCES, trials=0)
    with pytest.raises(InputError, match="logarithms are for functions"):
        check_invariance(model, SENTENCES, logarithms=True)


def test_job(tmp_path):
    model = make("tensors")
    model.save(tmp_path / "model")
    (tmp_path / "sentences.txt").write_text("dog barks\n\nbarks dog dog\n")
    options = {"model": str(tmp_path / "model"), "sentences": str(tmp_path / "sentences.txt")}
    result, said = run("check", tmp_path / "run", **options)
    assert result["passed"] == 1
    assert result["compared"] > 100
    assert "are what they should be" in said
    (tmp_path / "sentences.txt").write_text("\n")
    with pytest.raises(InputError, match="no sentences to check"):
        run("check", tmp_path / "run", **options)
