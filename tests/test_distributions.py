"""Every method of the distributions, for every form, against enumeration."""

import math
from collections import Counter

import pytest
import torch
import torch_struct
from cases import FORMS, Case, make
from enumeration import derivations
from nltk.tree import Tree
from strategies import random_model

from lvpcfg import Binarisation, InputError, corpus, normalise, train
from lvpcfg.chart.derivations import Node
from lvpcfg.distributions import Derivation, ModelTrees, SentCFG, Skeletal, TreeDistribution

LENGTH = 3


@pytest.fixture(params=FORMS)
def case(request: pytest.FixtureRequest) -> Case:
    return make(request.param)


class TestAgainstEnumeration:
    """Two sentences, the second one a word shorter."""

    @pytest.fixture
    def leaf(self, case):
        return case.leaf(LENGTH, 2)

    @pytest.fixture
    def trees(self, case, leaf):
        """For each sentence, derivation -> probability; and the sums of the weights."""
        found = [{nodes: weight for weight, nodes in derivations(case.full, leaf[: LENGTH - b, b])} for b in range(2)]
        sums = [math.fsum(one.values()) for one in found]
        return [
            {nodes: weight / total for nodes, weight in one.items()} for one, total in zip(found, sums, strict=True)
        ], sums

    @pytest.fixture
    def distribution(self, case, leaf):
        return TreeDistribution(case.form, leaf, torch.tensor([LENGTH, LENGTH - 1]), case.symbol)

    def test_partition(self, distribution, trees):
        assert distribution.partition.tolist() == pytest.approx([math.log(total) for total in trees[1]], rel=1e-12)

    def test_marginals(self, distribution, trees):
        for b, probabilities in enumerate(trees[0]):
            for layer in ("top", "bottom"):
                expected = torch.zeros_like(distribution.marginals.top[b])
                for nodes, probability in probabilities.items():
                    for node in nodes:
                        expected[node.start, node.start + node.width - 1, getattr(node, layer)] += probability
                assert torch.allclose(getattr(distribution.marginals, layer)[b], expected, atol=1e-12)

    def test_argmax(self, distribution, trees):
        for tree, probabilities in zip(distribution.argmax, trees[0], strict=True):
            assert probabilities[tree.nodes] == pytest.approx(max(probabilities.values()), rel=1e-12)

    def test_topk(self, distribution, trees):
        for ranked, probabilities in zip(distribution.topk(4), trees[0], strict=True):
            best = sorted(probabilities.values(), reverse=True)[:4]
            assert [probabilities[tree.nodes] for tree in ranked] == pytest.approx(best, rel=1e-12)
            assert len({tree.nodes for tree in ranked}) == len(best)

    def test_sample(self, distribution, trees):
        samples = 3000
        drawn = distribution.sample(samples, torch.Generator().manual_seed(0))
        for some, probabilities in zip(drawn, trees[0], strict=True):
            counts = Counter(tree.nodes for tree in some)
            assert counts.keys() <= probabilities.keys()
            # Pearson's statistic over the derivations that are expected at least 5 times, the others as one.
            often = {nodes for nodes, p in probabilities.items() if p * samples >= 5}
            observed = [
                *(counts[nodes] for nodes in often),
                sum(n for nodes, n in counts.items() if nodes not in often),
            ]
            rare = 1 - math.fsum(probabilities[nodes] for nodes in often)
            expected = [*(probabilities[nodes] * samples for nodes in often), rare * samples]
            statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 1e-6)
            freedom = max(1, len(often))
            assert statistic < freedom + 5 * math.sqrt(2 * freedom)

    def test_entropy(self, distribution, trees):
        expected = [-math.fsum(p * math.log(p) for p in one.values()) for one in trees[0]]
        assert distribution.entropy.tolist() == pytest.approx(expected, rel=1e-10)

    def test_log_prob_of_derivations(self, distribution, trees):
        for choice in (0, -1):
            nodes = [list(probabilities)[choice] for probabilities in trees[0]]
            expected = [math.log(probabilities[one]) for one, probabilities in zip(nodes, trees[0], strict=True)]
            assert distribution.log_prob([Derivation(one) for one in nodes]).tolist() == pytest.approx(
                expected, rel=1e-10
            )

    def test_log_prob_of_skeletal_trees(self, case, distribution, trees):
        sums = [Counter() for _ in trees[0]]
        for some, probabilities in zip(sums, trees[0], strict=True):
            for nodes, probability in probabilities.items():
                some[tuple(_skeletal(node, case.symbol) for node in nodes)] += probability
        for choice in (0, -1):
            nodes = [list(some)[choice] for some in sums]
            expected = [math.log(some[one]) for one, some in zip(nodes, sums, strict=True)]
            assert distribution.log_prob([Skeletal(one) for one in nodes]).tolist() == pytest.approx(
                expected, rel=1e-10
            )

    def test_kl(self, request, leaf, distribution, trees):
        other_case = make(request.node.callspec.params["case"], seed=2)
        other = TreeDistribution(other_case.form, leaf.flip(0), distribution.lengths)
        for b, probabilities in enumerate(trees[0]):
            weights = {nodes: weight for weight, nodes in derivations(other_case.full, leaf.flip(0)[: LENGTH - b, b])}
            total = math.fsum(weights.values())
            terms = [p * (math.log(p) - math.log(weights[nodes] / total)) for nodes, p in probabilities.items()]
            assert distribution.kl(other)[b].item() == pytest.approx(math.fsum(terms), rel=1e-10)

    def test_entropy_and_kl_are_differentiable(self, case, leaf):
        tensors = [tensor.clone().requires_grad_() for tensor in case.form.tensors]
        positive = [tensor > 0 for tensor in case.form.tensors]

        def value(name, *tensors):
            tensors = [tensor * some for tensor, some in zip(tensors, positive, strict=True)]  # zeros stay zeros
            one = TreeDistribution(case.form.with_tensors(tensors), leaf[:2, :1])
            return one.entropy if name == "entropy" else one.kl(TreeDistribution(case.form, leaf[1:, :1]))

        for name in ("entropy", "kl"):
            assert torch.autograd.gradcheck(lambda *tensors, name=name: value(name, *tensors), tensors, fast_mode=True)


def _skeletal(node: Node, symbol: list[int]) -> Node:
    return Node(node.start, node.width, symbol[node.top], symbol[node.bottom], node.split)


@pytest.mark.parametrize("lengths", [None, [5, 3, 1]])
def test_sent_cfg_agrees_with_torch_struct(lengths):
    terms, rules, roots = torch.randn(3, 5, 4) * 3, torch.randn(2, 6, 6) * 3, torch.randn(2)
    ours = SentCFG(terms, rules, roots, None if lengths is None else torch.tensor(lengths))
    for b, length in enumerate(lengths or [5] * 3):
        if length == 1:
            continue  # torch-struct's roots derive no single word; neither do ours
        peer = torch_struct.SentCFG((terms[b : b + 1, :length], rules.unsqueeze(0), roots.unsqueeze(0)))
        assert ours.partition[b].item() == pytest.approx(peer.partition.item(), rel=1e-5)
        words, _, _, _ = peer.marginals
        diagonal = ours.marginals.bottom[b].diagonal(0, 0, 1)[2:, :length]
        assert torch.allclose(diagonal, words[0].T, atol=1e-5)
    if lengths is not None:
        assert ours.partition[2] == -math.inf


class TestRulesOfEachSentence:
    """SentCFG with parameters that differ from sentence to sentence, as compound PCFGs have them."""

    LENGTHS = torch.tensor([5, 3, 4])

    @pytest.fixture
    def potentials(self):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).double() for shape in ((3, 5, 4), (3, 2, 6, 6), (3, 2))]

    @pytest.mark.parametrize("shared", [False, True])
    def test_against_torch_struct(self, potentials, shared):
        terms, rules, roots = potentials
        if shared:
            rules, roots = rules[0], roots[0]
        ours = SentCFG(terms, rules, roots, self.LENGTHS)
        peer = torch_struct.SentCFG((terms, rules.expand(3, 2, 6, 6), roots.expand(3, 2)), lengths=self.LENGTHS)
        assert torch.allclose(ours.partition, peer.partition)
        assert torch.allclose(ours.entropy, peer.entropy)
        assert torch.allclose(ours.marginals.log_z, peer.partition)
        best = torch.zeros_like(ours.marginals.top)
        for b, tree in enumerate(ours.argmax):
            for node in tree.nodes:
                best[b, node.start, node.start + node.width - 1, node.top] = 1
        assert torch.allclose(ours.log_prob(ours.argmax), peer.max - peer.partition)
        for mine, theirs in ((ours.marginals.top, peer.marginals), (best, peer.argmax)):
            assert torch.allclose(mine.diagonal(0, 1, 2)[:, 2:].mT, theirs[0], atol=1e-7)
            for width in range(2, 6):
                spans = mine.diagonal(width - 1, 1, 2)[:, :2].mT
                assert torch.allclose(spans, theirs[3][:, width - 2, : 6 - width], atol=1e-7)

    @pytest.mark.parametrize("which", ["both", "rules", "roots"])
    def test_against_each_sentence_alone(self, potentials, which):
        terms, rules, roots = potentials
        rules = rules[0] if which == "roots" else rules
        roots = roots[0] if which == "rules" else roots
        together, other = SentCFG(terms, rules, roots, self.LENGTHS), SentCFG(terms, -rules, roots, self.LENGTHS)
        ranked = together.topk(3)
        for b, length in enumerate(self.LENGTHS.tolist()):
            words, of_rules = terms[b : b + 1, :length], rules if rules.dim() == 3 else rules[b]
            of_roots = roots if roots.dim() == 1 else roots[b]
            alone, other_alone = SentCFG(words, of_rules, of_roots), SentCFG(words, -of_rules, of_roots)
            assert together.kl(other)[b].item() == pytest.approx(alone.kl(other_alone).item(), rel=1e-10)
            assert together.partition[b].item() == pytest.approx(alone.partition.item(), rel=1e-12)
            assert together.entropy[b].item() == pytest.approx(alone.entropy.item(), rel=1e-10)
            assert ranked[b] == alone.topk(3)[0]
            for name in ("top", "bottom"):
                mine, truth = getattr(together.marginals, name)[b], getattr(alone.marginals, name)[0]
                assert torch.allclose(mine[:length, :length], truth, atol=1e-12)
            for tree in ranked[b]:
                trees = [one[0] for one in ranked]
                trees[b] = tree
                truth = alone.log_prob([tree]).item()
                assert together.log_prob(trees)[b].item() == pytest.approx(truth, rel=1e-10)
                trees[b] = Skeletal(tree.nodes)
                assert together.log_prob(trees)[b].item() == pytest.approx(truth, rel=1e-10)

    def test_samples(self, potentials):
        terms, rules, roots = (one[:2] for one in potentials)
        trees = SentCFG(terms[:, :3], rules, roots)
        drawn = trees.sample((400,), torch.Generator().manual_seed(0))
        for b, some in enumerate(drawn):
            for tree, count in Counter(some).most_common(3):
                one = [some[0] for some in drawn]
                one[b] = tree
                assert count / 400 == pytest.approx(trees.log_prob(one)[b].exp().item(), abs=0.1)

    def test_derivatives(self, potentials):
        terms, rules, roots = (one[:2].clone().requires_grad_() for one in potentials)

        def numbers(*potentials):
            trees = SentCFG(*potentials, torch.tensor([3, 2]))
            marginals = trees.marginals
            return trees.partition, trees.entropy, marginals.top, marginals.bottom

        assert torch.autograd.gradcheck(numbers, [terms[:, :3], rules, roots], fast_mode=True)

    def test_what_is_impossible_has_derivatives(self, potentials):
        terms, rules, roots = potentials
        terms[0, 1] = -math.inf  # a sentence without trees
        rules[1, :, 0] = -math.inf
        for one in potentials:
            one.requires_grad_()
        trees = SentCFG(terms, rules, roots)
        assert trees.partition[0] == -math.inf
        assert trees.entropy[0] == 0
        (trees.partition[1:].sum() + trees.entropy.sum() + trees.marginals.top.square().sum()).backward()
        for one in potentials:
            assert one.grad.isfinite().all()
            assert not one.grad[one == -math.inf].any()
            assert not one.grad[0].any()
            assert one.grad[1:].any()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_marginals_can_be_part_of_a_loss(name, signed):
    case, lengths = make(name, signed), torch.tensor([LENGTH, LENGTH - 1])
    leaf = case.leaf(LENGTH, 2).requires_grad_()
    tensors = [tensor.clone().requires_grad_() for tensor in case.form.tensors]
    there = [tensor != 0 for tensor in tensors]

    def posteriors(leaf, *tensors):
        tensors = [tensor * some for tensor, some in zip(tensors, there, strict=True)]  # zeros stay zeros
        found = TreeDistribution(case.form.with_tensors(tensors), leaf, lengths).marginals
        return found.top, found.bottom

    plain = TreeDistribution(case.form, leaf.detach(), lengths).marginals  # by the fast engine
    found = TreeDistribution(case.form, leaf, lengths).marginals
    assert found.top.requires_grad
    assert not plain.top.requires_grad
    for field in ("log_z", "sign", "top", "bottom"):
        assert torch.allclose(getattr(found, field), getattr(plain, field), atol=1e-10), field
    assert torch.autograd.gradcheck(posteriors, [leaf, *tensors], fast_mode=True)


def test_they_are_distributions_of_torch():
    case, other = make("rule tensors, unary"), make("rule tensors, unary", seed=2)
    p, q = (TreeDistribution(one.form, one.leaf(LENGTH, 2)) for one in (case, other))
    assert isinstance(p, torch.distributions.Distribution)
    assert (p.batch_shape, p.event_shape) == (torch.Size([2]), torch.Size())
    kl = torch.distributions.kl_divergence(p, q)
    assert torch.allclose(kl, p.kl(q))
    assert torch.allclose(p.cross_entropy(q), kl + p.entropy)
    assert p.mode == p.argmax
    assert [len(some) for some in p.sample((5,))] == [5, 5]
    assert repr(p)
    with pytest.raises(InputError, match="sample of"):
        p.sample((2, 3))
    with pytest.raises(InputError, match="cannot be expanded"):
        p.expand((4,))


def test_what_was_computed_without_gradients_is_not_taken_for_more():
    case = make("dense")
    leaf = case.leaf(LENGTH, 2).requires_grad_()
    trees = TreeDistribution(case.form, leaf)
    for use in (lambda: trees.partition, lambda: trees.entropy, lambda: trees.marginals.top):
        with torch.no_grad():
            value = use()
        assert not value.requires_grad
        assert torch.allclose(use(), value)
        leaf.grad = None
        use().square().sum().backward()  # each has a graph of its own
        assert leaf.grad.any()


def test_skeletal_trees_and_derivations_may_be_mixed():
    case = make("cp")
    trees = TreeDistribution(case.form, case.leaf(LENGTH, 2), symbol=case.symbol)
    derived = trees.argmax
    skeletal = [Skeletal(tuple(_skeletal(node, case.symbol) for node in tree.nodes)) for tree in derived]
    mixed = trees.log_prob([derived[0], skeletal[1]])
    assert mixed[0] == trees.log_prob(derived)[0]
    assert mixed[1] == trees.log_prob(skeletal)[1]


def test_sent_cfg_takes_potentials_of_any_size():
    terms, rules, roots = torch.randn(1, 4, 3) - 500, torch.randn(2, 5, 5) + 300, torch.randn(2) - 2000
    peer = torch_struct.SentCFG((terms, rules.unsqueeze(0), roots.unsqueeze(0)))
    assert SentCFG(terms, rules, roots).partition.item() == pytest.approx(peer.partition.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5, 4), (2, 6, 6), (2, 2, 1)), r"expected \[batch, length, T\], \[\(batch,\) NT, NT \+ T, NT \+ T\]"),
        (((2, 5, 4), (3, 2, 6, 6), (2,)), r"rules have the shape \(3, 2, 6, 6\): expected \(2, 2, 6, 6\)"),
        (((2, 5, 4), (2, 6, 6), (3, 2)), r"roots have the shape \(3, 2\): expected \(2, 2\)"),
        (((2, 5, 4), (2, 5, 6), (2,)), r"rules have the shape \(2, 5, 6\): expected \(2, 6, 6\)"),
    ],
)
def test_potentials_of_a_wrong_shape_are_refused(shapes, message):
    with pytest.raises(InputError, match=message):
        SentCFG(*(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("name", FORMS)
def test_signed_parameters_have_a_partition_and_nothing_that_needs_probabilities(name):
    case = make(name, signed=True)
    leaf = case.leaf(3, 1)
    distribution = TreeDistribution(case.form, leaf)
    total = math.fsum(weight for weight, _ in derivations(case.full, leaf[:, 0]))
    assert distribution.partition.item() == pytest.approx(math.log(abs(total)), rel=1e-10)
    assert distribution.marginals.sign.item() == math.copysign(1, total)
    for use in (
        lambda: distribution.argmax,
        lambda: distribution.topk(2),
        lambda: distribution.sample(),
        lambda: distribution.entropy,
        lambda: distribution.kl(distribution),
    ):
        with pytest.raises(InputError, match="non-negative"):
            use()


def test_kl_of_unequal_supports_is_refused():
    case = make("dense")
    zeros = case.form.with_tensors([case.form.root, *(torch.zeros_like(tensor) for tensor in case.form.tensors[1:])])
    leaf = case.leaf(3, 1)
    with pytest.raises(InputError, match="zeros where this one has none"):
        TreeDistribution(case.form, leaf).kl(TreeDistribution(zeros, leaf))


def test_trees_of_a_treebank_under_its_model():
    """log_prob of each training tree is its probability under the PCFG given its words, rule by rule."""
    trees = [tree for tree in corpus("train")[:500] if len(tree.leaves()) <= 12][:8]
    assert len(trees) == 8
    for scheme in (Binarisation(), Binarisation(unaries="collapse")):
        model = train(corpus("train")[:500], binarisation=scheme)
        distribution = ModelTrees(model, [normalise(tree).leaves() for tree in trees])
        log_prob = distribution.log_prob([distribution.skeletal(tree) for tree in trees])
        assert (log_prob < 1e-9).all()
        best = distribution.log_prob(distribution.argmax)
        assert (best >= log_prob - 1e-9).all()


def test_a_symbol_the_model_does_not_have_is_named():
    model = train(corpus("train")[:100])
    distribution = ModelTrees(model, [["A", "dog"]])
    with pytest.raises(InputError, match="no symbol 'QQ'"):
        distribution.skeletal(Tree.fromstring("(TOP (QQ (DT A) (NN dog)))"))


def test_potentials_far_apart_are_not_lost():
    generator = torch.Generator().manual_seed(0)
    terms, rules, roots = (torch.randn(shape, generator=generator) * 60 for shape in ((2, 6, 3), (2, 5, 5), (2,)))
    wide = SentCFG(terms.double(), rules.double(), roots.double())
    narrow = SentCFG(terms, rules, roots)
    assert narrow.partition.tolist() == pytest.approx(wide.partition.tolist(), rel=1e-6)
    assert narrow.entropy.tolist() == pytest.approx(wide.entropy.tolist(), abs=1e-4)
    with pytest.raises(InputError, match="expected 700 at the most"):
        SentCFG(terms * 40, rules * 40, roots)


def test_a_sentence_without_trees():
    terms, rules, roots = torch.randn(2, 3, 2), torch.randn(2, 4, 4).requires_grad_(), torch.randn(2)
    terms[1, 1] = -math.inf
    trees = SentCFG(terms, rules, roots)
    assert trees.partition[1] == -math.inf
    assert trees.entropy[1] == trees.kl(trees)[1] == 0
    assert trees.argmax[1].nodes == ()
    assert trees.topk(2)[1] == []
    assert trees.sample(2)[1] == [Derivation(()), Derivation(())]
    assert trees.log_prob(trees.argmax)[1] == -math.inf
    (trees.entropy + trees.kl(trees)).sum().backward()
    assert rules.grad.isfinite().all()


@pytest.mark.parametrize(
    ("lengths", "message"), [([3], "for each sentence"), ([3.0, 2.0], "for each sentence"), ([3, 0], "expected 1 to 3")]
)
def test_wrong_lengths_are_named(lengths, message):
    case = make("dense")
    with pytest.raises(InputError, match=message):
        TreeDistribution(case.form, case.leaf(3, 2), lengths)


@pytest.mark.parametrize("lengths", [[1, 2, 3], [True, True], "ab", [0, 1], [1, 9], [1.5, 2.0]])
def test_wrong_lengths_of_potentials_are_named(lengths):
    with pytest.raises(InputError, match="lengths are"):
        SentCFG(torch.rand(2, 3, 4), torch.rand(2, 6, 6), torch.rand(2), lengths)


@pytest.mark.parametrize(
    ("potentials", "message"),
    [
        ((torch.zeros(0, 3, 4), torch.zeros(2, 6, 6), torch.zeros(2)), "no dimension of size 0"),
        ((torch.zeros(2, 0, 4), torch.zeros(2, 6, 6), torch.zeros(2)), "no dimension of size 0"),
        (([[1.0]], torch.zeros(2, 6, 6), torch.zeros(2)), "terms are"),
        ((torch.zeros(2, 3, 4).long(), torch.zeros(2, 6, 6), torch.zeros(2)), "floating-point"),
        ((torch.zeros(2, 3, 4), torch.zeros(2, 6, 6, device="meta"), torch.zeros(2)), "expected one device"),
        ((torch.full((2, 3, 4), math.nan), torch.zeros(2, 6, 6), torch.zeros(2)), "no numbers"),
        ((torch.full((2, 3, 4), math.inf), torch.zeros(2, 6, 6), torch.zeros(2)), "no numbers"),
    ],
)
def test_potentials_that_cannot_be_used_are_named(potentials, message):
    with pytest.raises(InputError, match=message):
        SentCFG(*potentials)


def test_potentials_of_two_types_are_computed_with_in_the_wider():
    terms, rules, roots = torch.rand(2, 3, 4), torch.rand(2, 6, 6), torch.rand(2)
    mixed = SentCFG(terms.double(), rules, roots)
    torch.testing.assert_close(mixed.partition, SentCFG(terms, rules, roots).partition, rtol=1e-6, atol=1e-6)


def test_trees_that_do_not_fit_their_sentence_are_named():
    """Also in a batch in which another sentence is long enough."""
    model = random_model(5, (1, 1, 1, 1))
    trees = ModelTrees(model, [["dog", "barks"], ["dog", "barks", "dog"]])
    (short,), (long,) = trees.topk(1)
    assert trees.log_prob([short, long]).isfinite().all()
    with pytest.raises(InputError, match="tree 1 has 3 words: expected the 2 of its sentence"):
        trees.log_prob([long, long])
    with pytest.raises(InputError, match="expected a derivation or a skeletal tree"):
        trees.log_prob([Tree("S", ["dog"]), long])
    with pytest.raises(InputError, match="expected another distribution"):
        trees.kl(3)
    for sentences in (["dog barks"], "dog", [[1, 2]]):
        with pytest.raises(InputError, match=r"expected a list of (one or more words|sentences)"):
            ModelTrees(model, sentences)


def test_divergences_are_of_the_same_sentences():
    terms, rules, roots = torch.rand(2, 3, 4), torch.rand(2, 6, 6), torch.rand(2)
    with pytest.raises(InputError, match="the same sentences"):
        SentCFG(terms, rules, roots, torch.tensor([1, 3])).kl(SentCFG(terms, rules, roots))
