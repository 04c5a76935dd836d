"""Bayesian estimation: the posterior of a tree against integrals of its definition."""

from dataclasses import replace

import pytest
import torch
from cases import plain_grammar

from lvpcfg import InputError, Model
from lvpcfg.distributions import ModelTrees
from lvpcfg.estimate.bayes import TREATMENTS, Gibbs
from lvpcfg.estimate.induction import full_rows
from lvpcfg.grammar.tightness import mass_of
from lvpcfg.trees.binarisation import Binarisation
from lvpcfg.trees.lexicon import Lexicon

FLAT = {"ignore": 7 / 11, "tight": 0.6492, "renormalised": 0.6199}


def three_rules(p=0.2, q=0.2):
    """S -> S S S (p) | S S (q) | x, binarised; the string is x x x."""
    rules = [("S", "S", "@S", p), ("@S", "S", "S", 1.0), ("S", "S", "S", q)]
    grammar = plain_grammar(["S", "@S"], ["X"], rules, [("S", "X", 1 - p - q)])
    grammar = replace(grammar, lexical=full_rows(torch.tensor([[1.0], [0.0]], dtype=torch.float64)))
    return Model(grammar, Lexicon(("x",), (), "english"), Binarisation())


def flat(p, q):
    """The posterior of S -> S S S beside the two trees of S -> S S."""
    return p / (p + 2 * q * q)


def of(model):
    p, _, q = model.grammar.binary.values.tolist()
    return p, q


def test_the_three_treatments_by_integrals():
    """p(tree) is p s^3 or 2 q^2 s^3, over Z where it is renormalised: 1, or the root of p z^2 + (p + q) z = s."""
    points = (torch.arange(600, dtype=torch.float64) + 0.5) / 600
    p, q = (x.flatten() for x in torch.meshgrid(points, points, indexing="ij"))
    p, q = p[p + q < 1], q[p + q < 1]
    z = ((((p + q) ** 2 + 4 * p * (1 - p - q)).sqrt() - p - q) / (2 * p)).clamp_max(1)
    for number in torch.randint(len(p), (15,), generator=torch.Generator().manual_seed(0)).tolist():
        assert mass_of(three_rules(float(p[number]), float(q[number])).grammar) == pytest.approx(float(z[number]))
    tight = 3 * p + 2 * q <= 1
    assert bool((z[tight] > 1 - 1e-9).all())
    both = (p + 2 * q * q) * (1 - p - q) ** 3
    weights = {"ignore": both, "tight": both * tight, "renormalised": both / z}
    for treatment, weight in weights.items():
        share = float((flat(p, q) * weight).sum() / weight.sum())
        assert share == pytest.approx(FLAT[treatment], abs=3e-4), treatment


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_the_sampler_finds_the_posterior_of_the_flat_tree(treatment):
    sampler = Gibbs(three_rules(), [["x", "x", "x"]], treatment, seed=1)
    draws = [*sampler.run(200 if treatment == "ignore" else 70)]
    shares = torch.tensor([flat(*of(draw.model)) for draw in draws[5:]])
    assert float(shares.mean()) == pytest.approx(FLAT[treatment], abs=0.07 if treatment == "ignore" else 0.11)
    assert all(draw.accepted for draw in draws) == (treatment != "renormalised")
    assert any(draw.thrown_away for draw in draws) == (treatment == "tight")
    if treatment == "tight":
        assert all(3 * p + 2 * q <= 1 + 1e-5 for p, q in (of(draw.model) for draw in draws))
    for draw in draws[:5]:
        assert torch.allclose(draw.model.grammar.row_sums(), torch.ones(3, dtype=torch.float64))


def test_counts_are_those_of_the_trees():
    """The unary rule above each word, chains with loops, and the states of latent symbols among them."""
    model = three_rules(0.3, 0.1)
    sampler = Gibbs(model, [["x"] * 3, ["x"]])
    trees = [drawn for (drawn,) in ModelTrees(model, sampler.sentences).sample(1, torch.Generator().manual_seed(0))]
    root, binary, unary, words = sampler._counts(model, trees).split(sampler.sizes)
    assert root.tolist() == [2, 0, 0]
    assert unary.tolist() == [4]
    assert words.tolist() == [4, 0]
    assert binary.tolist() in ([1, 1, 0], [0, 0, 2])
    looped = plain_grammar(["S"], ["X"], [("S", "S", "S", 0.2)], [("S", "S", 0.5), ("S", "X", 0.3)])
    sampler = Gibbs(replace(model, grammar=replace(looped, lexical=model.grammar.lexical)), [["x"]] * 2000)
    draw_counts = sampler._counts(
        sampler.start, [drawn for (drawn,) in ModelTrees(sampler.start, sampler.sentences).sample(1, sampler.generator)]
    )
    loops, ends = draw_counts.split(sampler.sizes)[2].tolist()
    assert ends == 2000
    assert loops == pytest.approx(2000, abs=300)  # as many loops as 0.5 / (1 - 0.5), on average


def test_what_it_is_given():
    with pytest.raises(InputError, match="treatment is 'none': expected ignore, tight or renormalised"):
        Gibbs(three_rules(), [["x"]], "none")
    with pytest.raises(InputError, match="prior is 0"):
        Gibbs(three_rules(), [["x"]], prior=0)
    signed = replace(three_rules(), grammar=replace(three_rules().grammar, unary=-three_rules().grammar.unary))
    with pytest.raises(InputError, match="probabilities whose rules are tensors"):
        Gibbs(signed, [["x"]])
