"""Gaussian mixtures against integrals by numbers, against mixtures that grow, and the gradients of the paper."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from nltk.tree import Tree
from strategies import gaussians, random_model
from torch import Tensor

import lvpcfg
from lvpcfg import InputError, Model
from lvpcfg.distributions import ModelTrees
from lvpcfg.estimate.gaussian_start import Shape, mixtures, tied, with_mixtures
from lvpcfg.grammar.gaussian import CHAINS, GaussianRules
from lvpcfg.grammar.rules import transformed
from lvpcfg.nn import GrammarLayer

SENTENCES = [["barks"], ["dog", "barks"], ["barks", "dog", "dog"]]
TREES = lvpcfg.corpus("train")[:20]


def make(components: int, dimension: int, spreads: int, states: tuple[int, ...] = (2, 3, 1, 4)) -> Model:
    model = random_model(1, states)
    rules = gaussians(model.grammar, components, dimension=dimension, spreads=spreads)
    return replace(model, grammar=with_mixtures(model.grammar, rules, model.grammar.lexical))


def log_z(model: Model, sentences: list[list[str]] = SENTENCES) -> Tensor:
    return ModelTrees(model, sentences).partition


# A rule, written out as (weight, Gaussian of the parent, Gaussians of the children); a Gaussian is (mu, sigma).


def gaussian(mu: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
    return mu, log_sigma.exp().expand_as(mu)


class Written:
    """The components of all rules, as the paper has them."""

    def __init__(self, model: Model) -> None:
        grammar, rules = model.grammar, model.grammar.binary
        assert isinstance(rules, GaussianRules)
        first, k = grammar.first_state.tolist(), rules.components
        lanes = [gaussian(*both) for both in zip(rules.mu, rules.log_sigma, strict=True)]
        own = [gaussian(*both) for both in zip(rules.child_mu, rules.child_log_sigma, strict=True)]
        self.binary, self.unary, self.root = [], [], []
        number, unaries, m = len(rules.weight), len(rules.unary_weight), grammar.states.tolist()
        weights = [tensor.tolist() for tensor in (rules.weight, rules.unary_weight, rules.root_weight)]
        if k:
            lane = rules.lane.tolist()
            for at in range(number):
                a, b, c = rules.rules[at // k].tolist()
                component = weights[0][at], lanes[first[a] + lane[at]], own[at], own[number + at]
                self.binary.append(((a, b, c), *component))
            for at in range(unaries):
                a, b = grammar.unary_rules[at // k].tolist()
                component = weights[1][at], lanes[first[a] + lane[number + at]], own[2 * number + at]
                self.unary.append(((a, b), *component))
            for at in range(len(weights[2])):
                self.root.append((at // k, weights[2][at], own[2 * number + unaries + at]))
        else:
            left = iter(weights[0])
            for a, b, c in rules.rules.tolist():
                for i, j, n in torch.cartesian_prod(*(torch.arange(m[s]) for s in (a, b, c))).view(-1, 3).tolist():
                    component = next(left), lanes[first[a] + i], lanes[first[b] + j], lanes[first[c] + n]
                    self.binary.append(((a, b, c), *component))
            left = iter(weights[1])
            for a, b in grammar.unary_rules.tolist():
                for i, j in torch.cartesian_prod(*(torch.arange(m[s]) for s in (a, b))).view(-1, 2).tolist():
                    self.unary.append(((a, b), next(left), lanes[first[a] + i], lanes[first[b] + j]))
            self.root = [(s, w, g) for s, w, g in zip(rules.symbol_of_state.tolist(), weights[2], lanes, strict=True)]
        inner, self.lanes, self.first = len(grammar.symbols.interminals), lanes, first
        self.symbols, self.inner = len(m), inner
        self.words = {  # tag -> [(coefficient, Gaussian)]
            word: [
                [(float(table[first[t] - first[inner] + i]), lanes[first[t] + i]) for i in range(m[t])]
                for t in range(inner, self.symbols)
            ]
            for word in ("dog", "barks")
            for table in [grammar.lexical.lookup(torch.tensor(model.lexicon.encode([word])))[0]]
        }

    def total(self, words: list[str], zero: Callable, one: Callable, integral: Callable, add: Callable) -> float:
        """The sum over all trees, with functions of vectors in any form: `one(weight, Gaussian)`, sums, integrals of
        a Gaussian times a function."""
        n, cell = len(words), {}
        for width in range(1, n + 1):
            for start in range(n - width + 1):
                at = [zero() for _ in range(self.symbols)]
                if width == 1:
                    for tag, pairs in enumerate(self.words[words[start]], self.inner):
                        for weight, lane in pairs:
                            at[tag] = add(at[tag], one(weight, lane))
                for split in range(1, width):
                    left, right = cell[start, split], cell[start + split, width - split]
                    for (a, b, c), weight, parent, one_child, other in self.binary:
                        at[a] = add(
                            at[a], one(1.0, parent), weight, integral(one_child, left[b]), integral(other, right[c])
                        )
                for a in reversed(range(self.inner)):  # S -> A, A -> V: all below comes first
                    for (above, below), weight, parent, child in self.unary:
                        if above == a:
                            at[a] = add(at[a], one(1.0, parent), weight, integral(child, at[below]))
                cell[start, width] = at
        return sum(float(weight * sum_of(integral(g, cell[0, n][a]))) for a, weight, g in self.root)


def sum_of(found) -> float:
    return sum(found) if isinstance(found, list) else found


@pytest.mark.parametrize(("dimension", "spreads"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("components", [0, 2])
def test_log_z_is_the_integral_over_all_vectors(components, dimension, spreads):
    """By the trapezoid rule, which is exact to rounding for Gaussians that the grid holds."""
    model = make(components, dimension, spreads)
    axis = torch.linspace(-12, 12, 97 if dimension == 2 else 193, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * dimension).view(-1, dimension)
    volume = float(axis[1] - axis[0]) ** dimension
    known: dict[int, Tensor] = {}

    def density(g):
        if id(g) not in known:
            mu, sigma = g
            known[id(g)] = (-0.5 * ((grid - mu) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum(1).exp()
        return known[id(g)]

    def add(into, function, *factors):
        return into + math.prod(factors) * function

    def integral(g, function):
        return float((density(g) * function).sum()) * volume

    written = Written(model)
    found = [
        written.total(words, lambda: torch.zeros(len(grid)).double(), lambda w, g: w * density(g), integral, add)
        for words in SENTENCES
    ]
    assert found == pytest.approx(log_z(model).exp().tolist(), rel=1e-9)


@pytest.mark.parametrize("components", [0, 2])
def test_mixtures_that_grow_come_to_the_same(components):
    """Every product of components is kept as a component of its own."""
    model = make(components, 3, 3, (2, 1, 1, 2))
    largest = 0

    def product(g, other):
        (m, s), (n, t) = g, other
        variance = s**2 + t**2
        return math.prod((torch.exp(-0.5 * (m - n) ** 2 / variance) / (2 * math.pi * variance).sqrt()).tolist())

    def add(into, function, *factors):
        """With lists as factors, one component for each choice of their members."""
        nonlocal largest
        many = [1.0]
        for factor in factors:
            many = [x * y for x in many for y in (factor if isinstance(factor, list) else [factor])]
        into = into + [(weight * factor, g) for factor in many for weight, g in function]
        largest = max(largest, len(into))
        return into

    def integral(g, function):
        return [weight * product(g, other) for weight, other in function]

    written = Written(model)
    found = [written.total(words, list, lambda w, g: [(w, g)], integral, add) for words in SENTENCES]
    assert found == pytest.approx(log_z(model).exp().tolist(), rel=1e-9)
    assert largest > 100


def test_gradients_are_those_of_the_paper():
    """Of S -> N V in a sentence of which the other tree is S -> V N; by sums over a grid of all three vectors."""
    model = random_model(1, (4, 1, 2, 2))
    rules, none = torch.tensor([[0, 2, 3], [0, 3, 2]]), torch.zeros(0, 2).long()
    values = torch.zeros(2 * 16, dtype=torch.float64)
    binary = replace(model.grammar.binary, rules=rules, values=values)
    grammar = replace(model.grammar, binary=binary, unary_rules=none, unary=values[:0])
    mixed = replace(gaussians(grammar, 2, dimension=1, spreads=1), lane=torch.arange(4))  # each component has its own
    model = replace(model, grammar=with_mixtures(grammar, mixed, grammar.lexical))
    words, layer, written = ["barks", "dog"], GrammarLayer(model, "values"), Written(model)
    (-layer.log_prob([Tree.fromstring("(TOP (S (N barks) (V dog)))")]).sum()).backward()

    r = torch.linspace(-8, 8, 81, dtype=torch.float64)
    volume = float(r[1] - r[0]) ** 3

    def density(g):
        mu, sigma = g
        return (-0.5 * ((r - mu) / sigma) ** 2).exp() / (sigma * math.sqrt(2 * math.pi))

    def of_three(x, y, z):
        return torch.einsum("x,y,z->xyz", x, y, z)

    below = [sum(w * density(g) for w, g in written.words[word][tag]) for tag, word in enumerate(words)]
    outside = of_three(sum(w * density(g) for a, w, g in written.root if a == 0), *below)
    of_tree = [component for component in written.binary if component[0] == (0, 2, 3)]
    of_rule = sum(rho * of_three(*map(density, three)) for _, rho, *three in of_tree)
    tree, z = float((of_rule * outside).sum()) * volume, float(log_z(model, [words]).exp())
    psi = outside * (1 / z - 1 / tree)  # (E[f | words] - E[f | tree]) / W
    numbers = [(layer.binary_mu, layer.binary_log_sigma), *[(layer.binary_child_mu, layer.binary_child_log_sigma)] * 2]
    for k, (_, rho, *three) in enumerate(of_tree):
        weighed = psi * of_three(*map(density, three)) * volume
        assert float(layer.binary_weight.grad[k]) == pytest.approx(float(weighed.sum()), rel=1e-9)
        for mode, ((mu, sigma), (by_mu, by_log_sigma), at) in enumerate(
            zip(three, numbers, (k, k, 4 + k), strict=True)
        ):
            one = rho * weighed.sum([other for other in range(3) if other != mode])
            away = (r - mu) / sigma
            assert float(by_mu.grad[at]) == pytest.approx(float((one * away / sigma).sum()), rel=1e-9)
            by_variance = float((one * (away**2 - 1) / sigma**2 / 2).sum())
            assert float(by_log_sigma.grad[at]) == pytest.approx(by_variance * 2 * float(sigma) ** 2, rel=1e-9)


@pytest.mark.parametrize("components", [0, 2])
def test_a_change_of_basis_changes_no_sum(components):
    """x -> A x + b of each symbol; |det A| once for each node, with the rule above which it stands."""
    model = make(components, 2, 2)
    grammar, rules = model.grammar, model.grammar.binary
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(4, 2, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    a[0, 0] *= -1
    moved = {}
    for side, symbol in (("", rules.symbol_of_state), ("child_", rules.symbol_of_child)):
        mu, log_sigma = f"{side}mu", f"{side}log_sigma"
        moved[mu] = a[symbol] * getattr(rules, mu) + b[symbol]
        moved[log_sigma] = getattr(rules, log_sigma) + a[symbol].abs().log()
    volume = a.prod(1).abs()
    for name, parents in (("weight", rules.rules[:, 0]), ("unary_weight", grammar.unary_rules[:, 0])):
        size = torch.full_like(parents, components)
        if not components:
            size = grammar.states[rules.rules if name == "weight" else grammar.unary_rules].prod(1)
        moved[name] = getattr(rules, name) * volume[parents].repeat_interleave(size)
    lexical = grammar.lexical.scale(torch.ones(4).double(), volume[2:].repeat_interleave(grammar.states[2:]))
    changed = with_mixtures(grammar, rules.with_tensors(rules.tensors | moved), lexical)
    assert not torch.allclose(changed.root, grammar.root)
    torch.testing.assert_close(log_z(replace(model, grammar=changed)), log_z(model), rtol=1e-10, atol=0)


@pytest.fixture(scope="module")
def pcfg():
    model = lvpcfg.train(TREES, "count")
    return replace(model, grammar=model.grammar.to(dtype=torch.float64))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shape", [Shape(1, True), Shape(3, False)])
def test_the_start_is_the_treebank_pcfg(pcfg, shape, own):
    start = mixtures(pcfg.grammar, shape, components=2, words=3, own=own)
    assert (max(start.binary.state_counts) > 10) == own
    trees = [tree for tree in TREES if len(tree.leaves()) < 12]
    found, truth = (
        (ModelTrees(model, [tree.leaves() for tree in trees]).partition, GrammarLayer(model, "values").log_prob(trees))
        for model in (replace(pcfg, grammar=start), pcfg)
    )
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def split():
    """Two states for each symbol."""
    model = lvpcfg.train(TREES, "em", states=2, iterations=3)
    return replace(model, grammar=model.grammar.to(dtype=torch.float64))


def placed(model: Model, apart: float) -> Model:
    grammar = model.grammar
    place = torch.arange(len(grammar.root)) - grammar.first_state[grammar.symbol_of_state]
    return replace(model, grammar=tied(grammar, Shape(1, True), apart * place.double().unsqueeze(1)))


def test_tied_rules_start_as_the_states_they_are_made_of(split):
    """Where these are far apart."""
    sentences = [tree.leaves() for tree in TREES[:4]]
    torch.testing.assert_close(log_z(placed(split, 20.0), sentences), log_z(split, sentences), rtol=1e-9, atol=0)


def test_tied_rules_at_one_place_see_the_mean_of_the_states_below(split):
    words = TREES[0].leaves()
    binary, of_root = split.grammar.binary, split.grammar.root
    mean = torch.zeros(len(binary.states), 2, 2, dtype=torch.float64)
    for symbol, m in enumerate(binary.state_counts):
        mean[symbol, :m, :m] = 1 / m
    one = torch.eye(2, dtype=torch.float64).expand_as(mean)
    unary = transformed(binary.states, binary.states, split.grammar.unary_rules, split.grammar.unary, (None, mean))
    grammar = replace(split.grammar, binary=binary.transformed(binary.state_counts, one, mean), unary=unary)
    root = torch.zeros_like(of_root)
    for symbol, begin in enumerate(grammar.first_state[:-1].tolist()):
        end = begin + binary.state_counts[symbol]
        root[begin:end] = of_root[begin:end].mean()
    truth = replace(split, grammar=replace(grammar, root=root))
    torch.testing.assert_close(log_z(placed(split, 0.0), [words]), log_z(truth, [words]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("components", [0, 2])
def test_chains_of_unary_rules_stay_bounded(components):
    model = random_model(1)
    unary = torch.tensor([[0, 1], [1, 0]])
    grammar = replace(model.grammar, unary_rules=unary, unary=torch.ones(12, dtype=torch.float64))
    rules = gaussians(grammar, components)
    for factor in (1e-3, 1.0, 1e3, 1e6):
        more = rules.with_tensors(rules.tensors | {"unary_weight": rules.unary_weight * factor})
        whole = with_mixtures(grammar, more, grammar.lexical)
        matrix = whole.unary_matrix()[:, : whole.interminal_states]
        radius = float(torch.linalg.eigvals(matrix).abs().max())
        assert radius <= CHAINS * (1 + 1e-9)
        assert radius > 0.9 * CHAINS or factor < 100
        assert bool(log_z(replace(model, grammar=whole), SENTENCES[1:]).isfinite().all())


@pytest.mark.parametrize("components", [0, 2])
def test_a_layer_holds_the_gaussians(components):
    model = make(components, 2, 1)
    with pytest.raises(InputError, match="the rules of the model are mixtures"):
        GrammarLayer(model)
    layer = GrammarLayer(model, "log-weights")
    assert {name for name, _ in layer.named_parameters()} == {
        *(f"binary_{name}" for name in model.grammar.binary.parameters),
        "words",
        "unknown_words",
    }
    truth = log_z(model)
    torch.testing.assert_close(layer(SENTENCES).partition, truth)
    layer(SENTENCES).partition.sum().backward()
    for name, parameter in layer.named_parameters():
        if parameter.numel():
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
    with torch.no_grad():
        layer.binary_mu += torch.linspace(-1, 1, layer.binary_mu.numel()).double().view_as(layer.binary_mu)
    changed = log_z(layer.to_model())
    assert float((changed - truth).abs().min()) > 1e-4
    torch.testing.assert_close(layer(SENTENCES).partition, changed)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("lane", lambda lane: lane + 3, "should name a state of its parent for each component"),
        ("unary_rules", lambda rules: rules + 3, "should hold rules from interminals to symbols"),
    ],
)
def test_folders_that_do_not_fit_are_refused(name, change, complaint, tmp_path):
    model = make(2, 2, 2)
    rules = replace(model.grammar.binary, **{name: change(getattr(model.grammar.binary, name))})
    with pytest.raises(InputError, match=complaint):
        replace(model, grammar=replace(model.grammar, binary=rules)).save(tmp_path)
