"""Charts of the fast engine: against NLTK, torch-struct and enumeration; derivatives and posteriors."""

import math
from dataclasses import replace

import nltk
import pytest
import torch
import torch_struct
from cases import FORMS, WITH_GRAMMAR, decoded, listable, make, of_grammar, plain_grammar, small
from enumeration import derivations
from enumeration import total as weight_of
from nltk.parse.pchart import InsideChartParser
from nltk.parse.viterbi import ViterbiParser

from lvpcfg.chart import lanes
from lvpcfg.chart.decode import exhaustive
from lvpcfg.chart.decode.viterbi import best_derivations
from lvpcfg.chart.derivations import Allowed, Node
from lvpcfg.chart.fast import build, cp
from lvpcfg.chart.fast.build import cp_form, dense_form, tensor_form
from lvpcfg.chart.fast.cp import RankSpace
from lvpcfg.chart.fast.logarithms import LogOutside
from lvpcfg.chart.fast.marginals import anchored, by_symbol, marginals
from lvpcfg.chart.fast.partition import (
    LOGARITHMIC,
    NARROW,
    Problem,
    Solution,
    log_partition,
    solve_outside,
    total_gradients,
)
from lvpcfg.options import PRODUCT, RECALL

F64 = torch.float64


class TestAgainstNLTK:
    BINARY = """
        S -> A B [0.6] | B A [0.4]
        A -> A B [0.3] | N V [0.4] | V A [0.3]
        B -> B N [0.5] | V N [0.1] | A A [0.4]
        N -> 'x' [0.5] | 'y' [0.3] | 'z' [0.2]
        V -> 'x' [0.2] | 'y' [0.8]
    """
    UNARY = """
        S -> A B [0.5] | B A [0.4] | A [0.1]
        A -> A B [0.3] | N V [0.2] | V A [0.2] | N [0.3]
        B -> B N [0.4] | V N [0.1] | A A [0.3] | V [0.2]
        N -> 'x' [0.5] | 'y' [0.3] | 'z' [0.2]
        V -> 'x' [0.2] | 'y' [0.8]
    """
    SENTENCES = ("yxyzy", "yxzyx", "xyzyx")

    @pytest.fixture(params=["BINARY", "UNARY"])
    def peer(self, request):
        return nltk.PCFG.fromstring(getattr(self, request.param))

    @pytest.fixture
    def grammar(self, peer):
        rules = peer.productions()
        outer = list(dict.fromkeys(str(rule.lhs()) for rule in rules if rule.is_lexical()))
        inner = list(dict.fromkeys(str(rule.lhs()) for rule in rules if not rule.is_lexical()))
        binary, unary = (
            [
                (str(rule.lhs()), *map(str, rule.rhs()), rule.prob())
                for rule in rules
                if len(rule.rhs()) == n and not rule.is_lexical()
            ]
            for n in (2, 1)
        )
        return plain_grammar(inner, outer, binary, unary)

    @pytest.fixture
    def leaf(self, peer, grammar):
        """[length, batch, preterminals]"""
        emits = {(str(r.lhs()), r.rhs()[0]): r.prob() for r in peer.productions() if r.is_lexical()}
        rows = [[[emits.get((tag, x), 0.0) for tag in grammar.symbols.preterminals] for x in s] for s in self.SENTENCES]
        return torch.tensor(rows, dtype=F64).transpose(0, 1)

    def test_log_z_is_the_sum_over_all_parses(self, peer, grammar, leaf):
        parser = InsideChartParser(peer)
        sums = [math.fsum(tree.prob() for tree in parser.parse(list(sentence))) for sentence in self.SENTENCES]
        log_z, sign = log_partition(tensor_form(grammar), leaf)
        assert log_z.tolist() == pytest.approx([math.log(one) for one in sums], rel=1e-12)
        assert sign.tolist() == [1.0] * len(sums)

    def test_the_best_derivation_is_nltks(self, peer, grammar, leaf):
        """Between any two symbols there is but one chain of unary rules, so the best tree has the best chains."""
        parser = ViterbiParser(peer)
        best = [next(parser.parse(list(sentence))) for sentence in self.SENTENCES]
        found, log_p = best_derivations(tensor_form(grammar), leaf)
        assert log_p.tolist() == pytest.approx([math.log(tree.prob()) for tree in best], rel=1e-12)
        number = {name: i for i, name in enumerate(grammar.symbols.names)}
        assert found == [nodes_of(tree, number) for tree in best]


def nodes_of(tree: nltk.Tree, number: dict[str, int]) -> list[Node]:
    nodes, waiting = [], [(0, tree)]
    while waiting:
        start, node = waiting.pop()
        bottom = node
        while len(bottom) == 1 and not isinstance(bottom[0], str):
            bottom = bottom[0]
        split = len(bottom[0].leaves()) if len(bottom) == 2 else 0
        nodes.append(Node(start, len(node.leaves()), number[node.label()], number[bottom.label()], split))
        if split:
            waiting += [(start + split, bottom[1]), (start, bottom[0])]
    return nodes


def test_expected_counts_of_rules_are_torch_structs():
    terms, rules, roots = (torch.randn(*shape, dtype=F64) for shape in ((2, 5, 3), (2, 5, 5), (2,)))
    peer = torch_struct.SentCFG((terms, rules.expand(2, -1, -1, -1), roots.expand(2, -1)))
    weights = rules.exp().requires_grad_()
    root = torch.nn.functional.pad(roots.exp(), (0, 3)).requires_grad_()
    log_z, _ = log_partition(dense_form(root, weights), terms.exp().transpose(0, 1))
    assert torch.allclose(log_z, peer.partition, rtol=1e-12)
    log_z.sum().backward()
    assert torch.allclose(weights * weights.grad, peer.marginals[1].sum(0), atol=1e-12)
    assert torch.allclose((root * root.grad)[:2], peer.marginals[2].sum(0), atol=1e-12)


class TestDerivatives:
    @pytest.mark.parametrize("signed", [False, True])
    @pytest.mark.parametrize("name", FORMS)
    def test_of_log_z(self, name, signed):
        case = make(name, signed)
        inputs = [tensor.clone().requires_grad_() for tensor in (case.leaf(4, 2), *case.form.tensors)]
        lengths = torch.tensor([4, 3])

        def log_z(leaf, *tensors):
            return log_partition(case.form.with_tensors(tensors), leaf, lengths)[0]

        assert torch.autograd.gradcheck(log_z, inputs, fast_mode=True)

    @pytest.mark.parametrize("name", FORMS)
    def test_are_the_same_in_log_space(self, name):
        """Times the values, as what is zero has no derivative there."""
        case = make(name)
        problem = Problem(case.form, case.leaf(5, 2), torch.tensor([5, 4]))
        found = {}
        for level in (NARROW, LOGARITHMIC):
            solution = Solution(torch.arange(2), level, problem.chart(level))
            (solution,) = solve_outside(problem, torch.tensor([1.0, 2.0], dtype=F64), True, [solution])
            assert solution.level == level
            found[level] = total_gradients(problem, [solution])
        for tensor, one, two in zip((problem.leaf, *case.form.tensors), *found.values(), strict=True):
            assert one.abs().sum() > 0
            assert torch.allclose(tensor * one, tensor * two, atol=1e-12)

    @pytest.mark.parametrize("by", ["leaf", "weights"])
    def test_cannot_be_taken_twice(self, by):
        case = make("rule tensors, unary")
        leaf, *tensors = (x.clone().requires_grad_() for x in (case.leaf(3, 1), *case.form.tensors))
        log_z, _ = log_partition(case.form.with_tensors(tensors), leaf)
        some = leaf if by == "leaf" else tensors[-1]
        (gradient,) = torch.autograd.grad(log_z.sum(), some, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            gradient.sum().backward()

    def test_by_the_words_alone(self):
        """Where no parameter asks for a gradient, that by the words is the same."""
        case = make("rule tensors")
        found = []
        for ask in (False, True):
            leaf = case.leaf(4, 1).requires_grad_()
            tensors = [tensor.clone().requires_grad_(ask) for tensor in case.form.tensors]
            log_partition(case.form.with_tensors(tensors), leaf)[0].sum().backward()
            found.append(leaf.grad)
            assert all((tensor.grad is not None) == ask for tensor in tensors)
        assert torch.equal(*found)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", ["cp", "cp, unary"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_log_z_alone_may_stay_in_rank_space(name, signed, dtype):
    case = make(name, signed)
    form, lengths = case.form.to(dtype), torch.tensor([5, 1, 3])
    leaf = case.leaf(5, 3, dtype=dtype)
    assert isinstance(form.for_log_z, RankSpace)
    log_z, sign = log_partition(form, leaf, lengths)
    expected, expected_sign = log_partition(form, leaf.requires_grad_(), lengths)
    assert expected.requires_grad
    assert torch.allclose(log_z, expected, rtol=1e-12 if dtype == F64 else 1e-5)
    assert torch.equal(sign, expected_sign)


def test_an_impossible_sentence_is_impossible_in_rank_space_too():
    """By log-sum-exp as well, which is what has the last word."""
    case = make("cp")
    u, v, w = torch.rand(2, 3, dtype=F64), torch.rand(2, 5, dtype=F64), torch.rand(2, 5, dtype=F64)
    v[0, 3:] = w[0, 3:] = v[1, :3] = w[1, :3] = 0  # two phrases, or two words: never three words
    form = cp_form(torch.rand(5, dtype=F64), u, v, w)
    assert isinstance(form.for_log_z, RankSpace)
    log_z, sign = log_partition(form, case.leaf(4, 2), torch.tensor([4, 3]))
    assert log_z.isfinite().tolist() == [True, False]
    assert sign.tolist() == [1, 0]


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("cp")])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="sparse products on the CPU are those of MKL")
def test_factors_that_are_nearly_all_zeros(name, dtype, monkeypatch):
    """The same posteriors and gradients by sparse products."""
    case = make(name)
    tensors = [tensor.to(dtype) for tensor in case.form.tensors]
    lengths, leaf = torch.tensor([5, 1, 3]), case.leaf(5, 3, dtype=dtype)

    def found():
        form = case.form.with_tensors([tensor.clone().requires_grad_() for tensor in tensors])
        posteriors = marginals(form.with_tensors([*tensors]), leaf, lengths)
        log_z, _ = log_partition(form, leaf, lengths)
        return [posteriors.top, posteriors.bottom, log_z, *torch.autograd.grad(log_z.sum(), form.tensors)]

    expected, made = found(), []
    monkeypatch.setattr(cp, "LARGE", 0)
    monkeypatch.setattr(cp, "FEW", 1)
    factor = cp._factor
    monkeypatch.setattr(cp, "_factor", lambda weight: made.append(factor(weight)) or made[-1])
    for one, other in zip(found(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)
    assert {matrix.layout for pair in made for matrix in pair} == {torch.sparse_csr}


def test_more_terms_than_states_do_not_stay_in_rank_space():
    u, v, w = torch.rand(7, 3), torch.rand(7, 5), torch.rand(7, 5)
    form = cp_form(torch.rand(5), u, v, w)
    assert form.for_log_z is form


class TestExpectedCounts:
    """parameter * d log Z / d parameter, through the blocks that `exact` makes of a grammar."""

    @pytest.fixture(params=WITH_GRAMMAR)
    def case(self, request):
        return small(request.param)

    @pytest.fixture
    def leaf(self, case):
        return case.leaf(listable(case), 2)

    @pytest.fixture
    def counts(self, case, leaf):
        grammar = case.grammar
        wanted = [x.clone().requires_grad_() for x in (grammar.root, grammar.binary.values, grammar.unary)]
        root, binary, unary = wanted
        log_z, _ = log_partition(
            tensor_form(replace(grammar, root=root, binary=replace(grammar.binary, values=binary), unary=unary)), leaf
        )
        log_z.sum().backward()
        return [x.detach() * (0 if x.grad is None else x.grad) for x in wanted]

    def test_of_binary_rules_and_roots_are_known_sums(self, leaf, counts):
        root, binary, _ = counts
        assert binary.sum().item() == pytest.approx(2 * (len(leaf) - 1), rel=1e-12)
        assert root.sum().item() == pytest.approx(2, rel=1e-12)

    def test_of_binary_rules_and_roots_against_enumeration(self, case, leaf, counts):
        root, binary, _ = counts
        expected_root, expected = torch.zeros_like(case.full.root), torch.zeros_like(case.full.rules[0])
        for b in range(2):
            found = derivations(case.full, leaf[:, b])
            z = weight_of(found)
            for weight, nodes in found:
                expected_root[nodes[0].top] += weight / z
                at = {(node.start, node.width): node for node in nodes}
                for node in nodes:
                    if node.split:
                        left = at[node.start, node.split].top
                        right = at[node.start + node.split, node.width - node.split].top
                        expected[node.bottom, left, right] += weight / z
        assert torch.allclose(root, expected_root, atol=1e-12)
        assert torch.allclose(
            of_grammar(replace(case.grammar, binary=replace(case.grammar.binary, values=binary))).full.rules[0],
            expected,
            atol=1e-12,
        )

    @pytest.mark.parametrize("case", ["rule list, unary", "rule tensors, unary"], indirect=True)
    def test_of_unary_rules_against_differences(self, case, leaf, counts):
        """Of the sums of all derivations; a chain of rules may use one more than once."""
        for i in (0, len(case.grammar.unary) - 1):
            log_z = []
            for step in (1e-4, -1e-4):
                unary = case.grammar.unary.clone()
                unary[i] *= math.exp(step)
                full = of_grammar(replace(case.grammar, unary=unary)).full
                log_z.append(sum(math.log(weight_of(derivations(full, leaf[:, b]))) for b in range(2)))
            assert counts[2][i].item() == pytest.approx((log_z[0] - log_z[1]) / 2e-4, rel=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_spans_may_be_restricted(name):
    """Random masks on both layers and sentences of several lengths, against the derivations that keep to them."""
    case = make(name)
    n, states = listable(case), len(case.symbol)
    lengths, leaf = [n, n - 1, 1, n], case.leaf(n, 4)
    masks = torch.rand(2, n, 4, n, states, generator=torch.Generator().manual_seed(7)) < 0.8
    allowed = Allowed(masks[0], masks[1])
    posteriors = marginals(case.form, leaf, torch.tensor(lengths), allowed)
    some = 0
    for b, length in enumerate(lengths):
        every = derivations(case.full, leaf[:length, b])
        kept = [
            (weight, nodes)
            for weight, nodes in every
            if all(
                masks[0, node.start, b, node.width - 1, node.bottom]
                and masks[1, node.start, b, node.width - 1, node.top]
                for node in nodes
            )
        ]
        some += 0 < len(kept) < len(every)
        z = weight_of(kept)
        expected = math.log(z) if kept else -math.inf
        assert posteriors.log_z[b].item() == pytest.approx(expected, rel=1e-12)
        for layer in ("top", "bottom"):
            table = torch.zeros(n, n, states, dtype=F64)
            for weight, nodes in kept:
                for node in nodes:
                    table[node.start, node.start + node.width - 1, getattr(node, layer)] += weight / z
            assert torch.allclose(getattr(posteriors, layer)[b], table, atol=1e-12)
    assert some >= 2  # sentences that the masks make a difference to

    inputs = [tensor.clone().requires_grad_() for tensor in (leaf, *case.form.tensors)]

    def log_z(leaf, *tensors):
        found, _ = log_partition(case.form.with_tensors(tensors), leaf, torch.tensor(lengths), allowed)
        return found[posteriors.log_z > -math.inf]

    assert torch.autograd.gradcheck(log_z, inputs, fast_mode=True)


def test_posteriors_by_symbol_add_up():
    case = make("rule tensors")
    posteriors = marginals(case.form, case.leaf(4, 1))
    sums = by_symbol(posteriors.top, case.grammar)
    for symbol in range(4):
        states = [state for state, of in enumerate(case.symbol) if of == symbol]
        assert torch.allclose(sums[..., symbol], posteriors.top[..., states].sum(-1), atol=1e-12)
    assert sums[0, 0, 3].sum().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", ["rule list", "rule list, unary", "rule tensors, unary"])
def test_posteriors_of_rules_against_enumeration(name):
    case = make(name)
    leaf = case.leaf(3, 2)
    rules = case.grammar.binary_rules.tolist()
    for width in (2, 3):
        expected = torch.zeros(2, 4 - width, width - 1, len(rules), dtype=F64)
        for b in range(2):
            found = derivations(case.full, leaf[:, b])
            z = weight_of(found)
            for weight, nodes in found:
                for place, node in enumerate(nodes):
                    if node.width == width:
                        left = nodes[place + 1]
                        right = next(other for other in nodes[place + 2 :] if other.start == node.start + node.split)
                        rule = [case.symbol[state] for state in (node.bottom, left.top, right.top)]
                        expected[b, node.start, node.split - 1, rules.index(rule)] += weight / z
        assert torch.allclose(anchored(case.form, leaf, width, len(rules)), expected, atol=1e-12)


def test_many_rules_are_split_into_blocks(monkeypatch):
    """However few numbers may be held at once."""
    case = make("rule list, unary")
    leaf = case.leaf(5, 2)
    expected = [marginals(case.form, leaf).top, *(decoded(case, leaf, decoder) for decoder in (PRODUCT, RECALL))]
    problem = Problem(case.form, leaf)
    in_logs = LogOutside(problem.chart(LOGARITHMIC), torch.ones(2, dtype=F64)).leaf
    for module, name in ((build, "LANES"), (lanes, "NUMBERS"), (exhaustive, "CHUNK")):
        monkeypatch.setattr(module, name, 1)
    split = replace(case, form=tensor_form(case.grammar))
    assert len(split.form.blocks) == len(case.grammar.binary_rules) > len(case.form.blocks)
    assert torch.allclose(marginals(split.form, leaf).top, expected[0], atol=1e-12)
    assert [decoded(split, leaf, decoder) for decoder in (PRODUCT, RECALL)] == expected[1:]
    again = LogOutside(replace(problem, form=split.form).chart(LOGARITHMIC), torch.ones(2, dtype=F64)).leaf
    assert torch.allclose(again, in_logs, atol=1e-12)


def test_the_closure_of_unary_rules_has_no_rounding_errors():
    """An inverse has: below zero, so that a grammar would pass for a signed one, and where no rules lead."""
    steps = torch.tensor(
        [
            [0.0206556074714555, 0.0002622391875956751, 0, 0.8790821533409489],
            [0, 0, 0.2853194920248903, 0.6146805079751098],
            [0, 0, 0.9, 0],
            [0, 0.9, 0, 0],
        ],
        dtype=F64,
    )
    assert (torch.linalg.inv(torch.eye(4, dtype=F64) - steps) < 0).any()
    names = ["A", "B", "C", "D"]
    unary = [(a, b, float(steps[i, j])) for i, a in enumerate(names) for j, b in enumerate(names) if steps[i, j]]
    grammar = plain_grammar(names, ["X"], [("A", "X", "X", 0.1)], [*unary, ("C", "X", 0.1), ("D", "X", 0.1)])
    closure = tensor_form(grammar).closure.T
    torch.testing.assert_close(closure, torch.linalg.inv(torch.eye(4, dtype=F64) - steps), rtol=1e-12, atol=1e-12)
    assert (closure >= 0).all()
    assert not closure[1:, 0].any()
    assert not closure[2, [1, 3]].any()
