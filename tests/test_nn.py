"""Grammars as modules: every representation and parametrisation, against the models they are made of."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from nltk.tree import Tree
from pages import python_of
from strategies import random_model
from test_representations import EVERY, MIXTURES, PLAIN, SENTENCES, make, rule_cp
from torch.utils._python_dispatch import TorchDispatchMode

from lvpcfg import InputError, Model, Parser, compress, corpus, train
from lvpcfg.decompose.child_types import cover_by_child_types
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.distributions import ModelTrees, skeletal
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.nn import LOG_WEIGHTS, LOGITS, PARAMETRISATIONS, VALUES, GrammarLayer

TREES = [
    Tree.fromstring(text)
    for text in (
        "(TOP (S (N dog) (A (V barks) (N cats))))",
        "(TOP (S (A (N dog) (V barks)) (A (V barks))))",
        "(TOP (S (A (V barks) (N dog))))",
        "(TOP (S (A (V barks))))",
        "(TOP (S (N dog) (A (N cats) (V barks))))",
    )
]
WORDS = [tree.leaves() for tree in TREES]


def parameters(layer):
    return dict(layer.named_parameters())


def normalised(model):
    """One whose states rewrite to 1 in all."""
    return GrammarLayer(model, LOGITS).to_model()


def both(names=EVERY):
    """Each representation with the parametrisations that serve it."""
    every = [(name, one) for name in names for one in PARAMETRISATIONS if one == VALUES or not name.endswith("signed")]
    every = [(name, one) for name, one in every if one != LOGITS or not name.startswith(MIXTURES)]
    return pytest.mark.parametrize(("name", "parametrisation"), every)


@both()
def test_it_is_the_model(name, parametrisation, tmp_path):
    model = make(name) if parametrisation != LOGITS else normalised(make(name))
    layer = GrammarLayer.from_model(model, parametrisation)
    again = layer.to_model()
    assert type(again.grammar.binary) is type(model.grammar.binary)
    for one, truth in zip(numbers(again), numbers(model), strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-12, atol=1e-15)
        assert not one.requires_grad
    again.save(tmp_path / "model")
    truth = ModelTrees(Model.load(tmp_path / "model"), SENTENCES)
    assert torch.allclose(layer(SENTENCES).partition, truth.partition, rtol=1e-12)
    assert torch.allclose(layer(SENTENCES).marginals.top, truth.marginals.top, atol=1e-12)
    parsed = Parser(again, device="cpu", dtype="float64", prune=0.0).parse_sents(SENTENCES)
    assert parsed == Parser(model, device="cpu", dtype="float64", prune=0.0).parse_sents(SENTENCES)


def numbers(model):
    grammar = model.grammar
    return [
        grammar.root,
        grammar.unary,
        grammar.lexical.value,
        grammar.lexical.backoff,
        *grammar.binary.saved().values(),
    ]


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in MIXTURES])
def test_logits_are_normalised(name):
    layer = GrammarLayer(make(name))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += torch.rand_like(parameter)
    grammar = layer.to_model().grammar
    assert torch.allclose(grammar.row_sums(), torch.ones_like(grammar.root))
    assert grammar.root.sum().item() == pytest.approx(1)


@both()
def test_the_weight_of_trees_is_that_of_a_chart_restricted_to_them(name, parametrisation):
    layer = GrammarLayer(make(name), parametrisation)
    distribution = layer(WORDS)
    skeletons = [skeletal(layer.model, tree) for tree in TREES]
    by_chart = distribution.log_weight(skeletons)
    assert by_chart.isfinite().all()
    assert torch.allclose(layer.log_weight(TREES), by_chart, rtol=1e-10)
    assert torch.allclose(layer.log_prob(TREES), distribution.log_prob(skeletons), rtol=1e-10)
    assert torch.allclose(
        layer.log_prob(layer.observe(TREES), WORDS[::1]), distribution.log_prob(skeletons), rtol=1e-10
    )
    for one, other in zip(gradients(layer, layer.log_weight(TREES)), gradients(layer, by_chart), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def gradients(layer, value):
    found = torch.autograd.grad(value.sum(), list(layer.parameters()), allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(parameter) if one is None else one
        for parameter, one in zip(layer.parameters(), found, strict=True)
    ]


@both()
def test_gradients_are_differences(name, parametrisation):
    layer = GrammarLayer(make(name), parametrisation)
    observed = layer.observe(TREES)
    for value in (
        lambda: layer(SENTENCES).partition.sum(),
        lambda: layer.log_weight(observed).sum(),
        lambda: layer.log_prob(observed).sum(),
    ):
        found = gradients(layer, value())
        assert all(one.isfinite().all() for one in found)
        for parameter, gradient in zip(layer.parameters(), found, strict=True):
            there = parameter.detach().isfinite() & (
                parameter.detach() != (0 if parametrisation == VALUES else -math.inf)
            )
            assert not gradient[parameter == -math.inf].any()
            if not parameter.numel() or not there.any():
                continue
            generator = torch.Generator().manual_seed(0)
            step = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * there
            before, ends = parameter.detach().clone(), []
            for size in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter.copy_(torch.where(there, before + size * step, before))
                    ends.append(value().item())
                    parameter.copy_(before)
            slope = (gradient[there] * step[there]).sum().item()
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-7)


@both(["tensors", "some rules", "whole", "tensors, signed"])
def test_word_scores(name, parametrisation):
    """Those of the lexicon give what the words give; gradients go to them."""
    layer = GrammarLayer(make(name), parametrisation)
    sentences, lengths = SENTENCES[:3], torch.tensor([len(words) for words in SENTENCES[:3]])
    leaf = layer(sentences).leaf.detach().transpose(0, 1)
    scores = (leaf if parametrisation == VALUES else leaf.log() - 300).requires_grad_()
    lowered = 0 if parametrisation == VALUES else 300 * lengths
    found = layer(word_scores=scores, lengths=lengths)
    assert torch.allclose(found.partition + lowered, layer(sentences).partition, rtol=1e-10)
    assert torch.autograd.gradcheck(
        lambda scores: layer(word_scores=scores, lengths=lengths).partition, [scores], fast_mode=True
    )
    (gradient,) = torch.autograd.grad(found.partition.sum(), scores)
    assert not gradient[0, lengths[0] :].any()
    if parametrisation != VALUES:  # posteriors of tags
        posterior = torch.stack([found.marginals.bottom[:, i, i, -leaf.shape[2] :] for i in range(leaf.shape[1])], 1)
        assert torch.allclose(gradient, posterior, atol=1e-10)

    tree_scores = layer(WORDS).leaf.detach().transpose(0, 1)
    tree_scores = (tree_scores if parametrisation == VALUES else tree_scores.log() + 50).requires_grad_()
    assert torch.allclose(layer.log_prob(TREES, word_scores=tree_scores), layer.log_prob(TREES), rtol=1e-10)
    assert torch.autograd.gradcheck(
        lambda scores: layer.log_prob(TREES, word_scores=scores), [tree_scores], fast_mode=True
    )


def test_word_scores_that_float32_cannot_hold_together():
    layer = GrammarLayer(make("tensors")).float()
    scores = torch.zeros(1, 2, 5)
    scores[..., 1:] -= 200  # N is e^200 likelier than V, and a sentence needs both
    exact = GrammarLayer(make("tensors"))(word_scores=scores.double()).partition
    assert layer(word_scores=scores).partition.item() == pytest.approx(exact.item(), rel=1e-5)
    with pytest.raises(InputError, match="expected 700 at the most"):
        layer(word_scores=scores * 100)


def test_logits_that_float32_cannot_hold_the_exponential_of():
    layer = GrammarLayer(normalised(make("tensors")), LOGITS).float()
    truth = layer(SENTENCES).partition.detach()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 100  # cancels in the quotient
    found = layer(SENTENCES).partition
    assert found.detach().tolist() == pytest.approx(truth.tolist(), rel=1e-3)
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in MIXTURES])
def test_zeros_stay_zeros(name):
    model = make(name)
    grammar = model.grammar
    tensors = {key: tensor.clone() for key, tensor in grammar.binary.tensors.items()}
    for tensor in tensors.values():
        tensor.view(-1)[:1] = 0
    unary = grammar.unary.clone()
    unary[:2] = 0
    model = replace(model, grammar=replace(grammar, binary=grammar.binary.with_tensors(tensors), unary=unary))
    for parametrisation in (LOGITS, LOG_WEIGHTS):
        layer = GrammarLayer(model, parametrisation)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            trees = layer(SENTENCES)
            loss = -layer.log_prob(TREES).sum() - trees.entropy.sum() + trees.marginals.top.square().sum()
            loss.backward()
            for parameter in layer.parameters():
                assert parameter.grad.isfinite().all()
                assert not parameter.grad[parameter == -math.inf].any()
            optimiser.step()
        after = layer.to_model()
        for one, truth in zip(numbers(after), numbers(model), strict=True):
            assert torch.equal(one == 0, truth == 0)
            assert one.isfinite().all()


@both(PLAIN)
def test_a_step_of_adam_raises_the_likelihood(name, parametrisation):
    layer = GrammarLayer(make(name), parametrisation)
    observed = layer.observe(TREES)
    for value in (lambda: layer.log_prob(observed).sum(), lambda: layer.log_weight(observed).sum()):
        optimiser = torch.optim.Adam(layer.parameters(), lr=1e-3)
        optimiser.zero_grad()
        before = value()
        (-before).backward()
        for parameter in layer.parameters():  # impossible trees stay so: they may be worth more than the others
            if parameter.grad is not None:
                parameter.grad[parameter == 0] = 0
        optimiser.step()
        assert value() > before


@pytest.mark.parametrize("name", EVERY)
def test_what_torch_does_with_modules(name):
    model = make(name)
    layer = GrammarLayer(model, VALUES)
    truth = layer(SENTENCES).partition.detach()

    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    assert state.keys() == parameters(layer).keys()
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter *= 1.1
    changed = copied(SENTENCES).partition.detach()
    assert not torch.allclose(changed, truth)
    assert torch.equal(layer(SENTENCES).partition, truth)
    other = torch.func.functional_call(layer, parameters(copied), (SENTENCES,)).partition
    assert torch.allclose(other, changed)
    other.sum().backward()
    assert copied.words.grad.any()
    copied.load_state_dict(state)
    assert torch.equal(copied(SENTENCES).partition, truth)

    narrow = copy.deepcopy(layer).float()
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.float32}
    assert torch.allclose(narrow(SENTENCES).partition, truth, rtol=1e-4)
    assert narrow.log_prob(TREES).tolist() == pytest.approx(layer.log_prob(TREES).tolist(), rel=1e-3, abs=1e-3)
    if not name.endswith("signed"):  # pruned forests follow too
        exact, near = (one.log_prob(one.observe(TREES, 1e-3)) for one in (layer, narrow))
        assert near.tolist() == pytest.approx(exact.tolist(), rel=1e-3, abs=1e-3)
    assert narrow.to_model().grammar.root.dtype == torch.float32
    assert torch.allclose(narrow.to(torch.float64)(SENTENCES).partition, truth, rtol=1e-4)


@pytest.mark.parametrize(("method", "options"), [("als", {"rank": 2, "threshold": 1e-2}), ("apr", {"rank": 12})])
def test_factors_of_compressions_go_straight_in(method, options):
    model = train(corpus("train")[:100], "em", states=2, iterations=2)
    small = compress(model, method=method, **options)
    parametrisation = VALUES if small.grammar.signed else LOG_WEIGHTS
    layer = GrammarLayer.from_model(small, parametrisation)
    sentences = [["A", "dog", "barks", "."], ["He", "saw", "it", "."]]
    truth = ModelTrees(small, sentences)
    assert torch.allclose(layer(sentences).partition, truth.partition, rtol=1e-9)
    layer(sentences).partition.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_conditional_likelihood_of_a_treebank():
    """The numerator by a forest is that by a chart that allows one tree, and training by it works."""
    trees = [tree for tree in corpus("train")[:400] if 3 <= len(tree.leaves()) <= 10][:12]
    for parametrisation in (LOGITS, LOG_WEIGHTS):
        layer = GrammarLayer(train(corpus("train")[:400], "em", states=2, iterations=2), parametrisation)
        observed = layer.observe(trees)
        distribution = layer(observed.words)
        assert torch.allclose(layer.log_prob(observed), distribution.log_prob(observed.trees), rtol=1e-6)
        assert (layer.log_prob(observed) <= 1e-6).all()
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
        values = []
        for _ in range(4):
            optimiser.zero_grad()
            loss = -layer.log_prob(observed).mean()
            loss.backward()
            optimiser.step()
            values.append(loss.item())
        assert values == sorted(values, reverse=True)


def test_trees_by_rules_that_are_not_listed():
    tree = [Tree.fromstring("(TOP (S (N dog) (N dog)))")]
    assert GrammarLayer(make("tensors")).log_weight(tree).item() == -math.inf
    assert GrammarLayer(make("tensors")).log_prob([*tree, TREES[0]])[1].isfinite()
    model = make("whole")  # and one CP form may give them weight
    filled = replace(
        model,
        grammar=replace(
            model.grammar,
            binary=model.grammar.binary.with_tensors({k: t + 0.01 for k, t in model.grammar.binary.tensors.items()}),
        ),
    )
    layer = GrammarLayer(filled, LOG_WEIGHTS)
    truth = GrammarLayer(replace(filled, grammar=filled.grammar.written_out()), LOG_WEIGHTS)
    assert torch.allclose(layer.log_weight([*tree, TREES[0]]), truth.log_weight([*tree, TREES[0]]), rtol=1e-10)


class Counted(TorchDispatchMode):
    """Counts operations, and names those that wait for numbers of a device."""

    def __init__(self):
        super().__init__()
        self.number, self.reads = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "unique_dim", "_unique2", "unique_consecutive", "is_nonzero"):
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", [name for name in PLAIN if name not in MIXTURES])
def test_a_step_has_no_loop_over_rules(name, parametrisation):
    """As many operations, whatever the number of rules; and no number of a parameter is read."""
    counts = []
    for rules in (FEW, MANY):
        layer = GrammarLayer(with_rules(name, rules), parametrisation)
        observed, scores = layer.observe(TREES[:1]), torch.rand(1, 3, 4).double()
        layer.log_weight(observed)
        assert layer._structure.form is not None  # found out once, as the forest is
        with Counted() as counted:
            grammar = layer.grammar()
            form = layer._trees(grammar, layer._words(grammar, None, scores, None)).form
            rules = layer._structure.forest_rules.with_parameters(grammar)
        assert form.root.requires_grad
        assert rules.values.requires_grad
        counts.append((counted.number, len(counted.reads)))
    assert counts[0] == counts[1]
    assert counts[0][1] <= 1, counted.reads  # the least of the word scores


FEW = [[0, 2, 1], [0, 1, 1], [1, 3, 2], [1, 2, 3]]
MANY = [*FEW, [0, 3, 1], [1, 0, 1], [0, 0, 0], [1, 2, 2], [1, 3, 3]]


def with_rules(name, rules):
    """Two states for each symbol, so that all rules have one shape."""
    model = random_model(1, (2, 2, 2, 2))
    values = torch.rand(8 * len(rules), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    binary = RuleTensors((2, 2, 2, 2), 2, torch.tensor(rules), values)
    grammar = replace(model.grammar, binary=binary, unary=model.grammar.unary * 0.05)
    if name in ("some rules", "all rules"):
        binary = rule_cp(binary, [0, 2] if name == "some rules" else [*range(len(rules))], False)
    elif name == "whole":
        binary = WholeCP.from_factors(cover_by_child_types(rule_tensor(grammar)), binary)
    return replace(model, grammar=replace(grammar, binary=binary))


def closed(model):
    return replace(model, grammar=replace(model.grammar, closed=True))


def test_chains_of_unary_rules():
    model = closed(make("tensors"))
    layer = GrammarLayer(model, LOG_WEIGHTS)
    assert torch.allclose(layer(SENTENCES).partition, ModelTrees(model, SENTENCES).partition, rtol=1e-12)
    weights = layer(WORDS).log_weight([skeletal(model, tree) for tree in TREES])
    assert torch.allclose(layer.log_weight(TREES), weights, rtol=1e-10)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda layer: layer(), "takes sentences, or word_scores"),
        (lambda layer: layer(SENTENCES, torch.zeros(4, 4, 5)), "takes sentences, or word_scores"),
        (lambda layer: layer(word_scores=torch.zeros(4, 4, 3)), r"expected \[batch, length, 5\]"),
        (lambda layer: layer.log_prob(TREES, SENTENCES), "trees have"),
        (lambda layer: layer.log_prob(TREES, word_scores=torch.zeros(5, 2, 5)), r"expected \[5, 3, states\]"),
        (lambda layer: layer.observe([]), "trees of a word or more"),
        (lambda layer: GrammarLayer(layer.model, "exp"), "expected logits, log-weights or values"),
        (lambda layer: GrammarLayer(closed(layer.model)), "closed chains in place of unary rules"),
        (lambda layer: GrammarLayer(make("tensors, signed")), "negative parameters: expected 'values'"),
    ],
)
def test_what_cannot_be_is_said(use, message):
    with pytest.raises(InputError, match=message):
        use(GrammarLayer(make("tensors")))


def test_the_module_of_the_page_learns():
    names = {}
    exec(python_of("docs/layer.md")[0], names)
    parser, trees = names["parser"], names["trees"][:8]
    trained = parser(trees).sum()
    parser.tagger.reset_parameters()
    assert trained > parser(trees).sum()


def test_zeros_of_a_cp_form_have_derivatives_where_they_may_change():
    """A term that is zero for a symbol of a rule adds nothing to it, but could."""
    model = train(corpus("dev")[:10], "em", states=2, iterations=2)
    model = compress(model, method="cover")
    trees, layer = corpus("dev")[:3], GrammarLayer(model, "values")
    layer.log_weight(trees).sum().backward()
    slopes = layer.binary_u.grad * (layer.binary_u == 0)
    place = tuple(int(index) for index in (slopes == slopes.max()).nonzero()[0])
    assert float(slopes[place]) > 1e-3
    values, size = [], 1e-6
    with torch.no_grad():
        for step in (size, -2 * size):
            layer.binary_u[place] += step
            values.append(float(layer.log_weight(trees).sum()))
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(float(slopes[place]), rel=1e-3)
