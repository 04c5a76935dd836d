"""Bayesian estimation: the posterior of a tree against integrals of its definition."""

from dataclasses import replace

import pytest
import torch
from cases import plain_grammar

from lvpcfg import InputError, Model
from lvpcfg.distributions import ModelTrees
from lvpcfg.estimate.bayes import TREATMENTS, Gibbs
from lvpcfg.estimate.induction import full_rows
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.tightness import mass_of
from lvpcfg.trees.binarisation import Binarisation
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.treebank import Symbols

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
def test_what_each_treatment_does(treatment):
    """That the draws have the right mean takes more of them (benchmarks/bayes.py); each step is tested below."""
    draws = [*Gibbs(three_rules(), [["x", "x", "x"]], treatment, seed=1).run(25)]
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


def two_states():
    """S and X of two states each, some numbers zero: S -> S S, S -> X, X -> a, X -> b."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1

    binary, unary, words = random(2, 4), random(2, 2), random(3, 2)
    binary[0, 3] = binary[1, 0] = words[0, 1] = words[2, 0] = words[2, 1] = 0
    sums = binary.sum(1, keepdim=True) + unary.sum(1, keepdim=True)
    grammar = Grammar(
        symbols=Symbols(("S",), ("X",)),
        binary=RuleTensors((2, 2), 1, torch.tensor([[0, 0, 0]]), (binary / sums).flatten()),
        unary_rules=torch.tensor([[0, 1]]),
        unary=(unary / sums).flatten(),
        root=torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64),
        lexical=full_rows(words / words.sum(0)),
    )
    return Model(grammar, Lexicon(("a", "b"), (), "english"), Binarisation())


def test_trees_are_drawn_given_the_grammar():
    number = 5000
    for p, q in ((0.3, 0.45), (0.05, 0.3)):
        drawn = ModelTrees(three_rules(p, q), [["x"] * 3]).sample(number, torch.Generator().manual_seed(3))[0]
        share = sum(any(node.bottom == 1 for node in tree.nodes) for tree in drawn) / number
        expected = flat(p, q)
        assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / number) ** 0.5)


def test_counts_of_states_are_those_of_the_nodes():
    model, words = two_states(), ["a", "b", "b", "a"]
    sampler = Gibbs(model, [words] * 50)
    trees = [drawn for (drawn,) in ModelTrees(model, sampler.sentences).sample(1, sampler.generator)]
    root, binary = torch.zeros(4), torch.zeros(2, 2, 2)
    unary, lexical = torch.zeros(2, 2), torch.zeros(3, 2)
    for tree in trees:
        root[tree.nodes[0].top] += 1
        top = {(node.start, node.width): node.top for node in tree.nodes}
        for node in tree.nodes:
            if node.split:
                middle = node.start + node.split
                binary[node.bottom, top[node.start, node.split], top[middle, node.width - node.split]] += 1
            else:
                unary[node.top, node.bottom - 2] += 1
                lexical["ab".index(words[node.start]), node.bottom - 2] += 1
    counts = sampler._counts(model, trees)
    assert counts.tolist() == torch.cat([part.flatten() for part in (root, binary, unary, lexical)]).tolist()
    assert not bool(counts[sampler.values == 0].any())


def test_grammars_are_drawn_given_the_trees():
    """Each row is Dirichlet: its means are (prior + counts) / (sum of these over the row), and zeros stay."""
    sampler = Gibbs(two_states(), [["a"]], prior=0.5, seed=1)
    counts = torch.where(sampler.values > 0, torch.arange(len(sampler.values)) % 4, 0).double()
    draws = torch.stack([sampler._posterior(counts)[0] for _ in range(2000)])
    given = torch.where(sampler.values > 0, counts + 0.5, 0)
    root, binary, unary, words = given.split(sampler.sizes)
    phrases = torch.cat([binary.view(2, 4), unary.view(2, 2)], 1).sum(1, keepdim=True)
    means = [root / root.sum(), binary.view(2, 4) / phrases, unary.view(2, 2) / phrases]
    means += [words.view(3, 2) / words.view(3, 2).sum(0)]
    expected = torch.cat([part.flatten() for part in means])
    assert torch.allclose(draws.mean(0), expected, atol=0.02)
    # what the next tree is likely to be: by integrals over Dirichlet(2, 1, 4) and (1, 3, 4)
    sampler = Gibbs(three_rules(), [["x"] * 3], seed=2)
    for p, q, share in ((1, 0, 0.8137), (0, 2, 0.3259)):
        counts = torch.tensor([1, 0, 0, p, p, q, 3, 3, 0]).double()
        draws = torch.stack([sampler._posterior(counts)[0] for _ in range(2000)])
        assert float(flat(draws[:, 3], draws[:, 5]).mean()) == pytest.approx(share, abs=0.025)


def test_a_sentence_without_trees_does_not_count():
    """ "x x" has none under S -> S S S | x, so that the grammars drawn are the same without it."""

    def drawn(sentences):
        return [of(draw.model) for draw in Gibbs(three_rules(0.4, 0.0), sentences, "renormalised").run(12)]

    assert drawn([["x"] * 3, ["x"] * 2]) == drawn([["x"] * 3])


def test_what_it_is_given():
    with pytest.raises(InputError, match="treatment is 'none': expected ignore, tight or renormalised"):
        Gibbs(three_rules(), [["x"]], "none")
    with pytest.raises(InputError, match="prior is 0"):
        Gibbs(three_rules(), [["x"]], prior=0)
    signed = replace(three_rules(), grammar=replace(three_rules().grammar, unary=-three_rules().grammar.unary))
    with pytest.raises(InputError, match="probabilities whose rules are tensors"):
        Gibbs(signed, [["x"]])
