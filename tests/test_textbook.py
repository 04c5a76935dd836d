"""The textbook chart: against enumeration, NLTK, torch-struct and the fast engine, in every form and semiring."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import nltk
import pytest
import torch
import torch_struct
from cases import FORMS as FAST_FORMS
from cases import WITH_GRAMMAR, make
from grammars import INNER, OUTER, STATES, random_grammar
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.parse.pchart import InsideChartParser
from nltk.parse.viterbi import ViterbiParser

from lvpcfg import Binarisation, InputError, corpus, normalise, train
from lvpcfg.chart import lanes
from lvpcfg.chart.decode.viterbi import best_derivations
from lvpcfg.chart.fast import marginals as fast
from lvpcfg.chart.fast.as_textbook import as_textbook
from lvpcfg.chart.fast.partition import log_partition as fast_log_partition
from lvpcfg.chart.kbest import KBest
from lvpcfg.chart.lanes import Map, Rules
from lvpcfg.chart.marks import MarkedChart
from lvpcfg.chart.semirings import CrossEntropy, Entropy, KLDivergence, KMax, Log, Max, Sampled, Signed, safe_log, zeros
from lvpcfg.chart.textbook import CFG, Weights, inside, log_partition, marginals, rule_posteriors, unary_closure
from lvpcfg.distributions import ModelTrees
from lvpcfg.trees.walk import is_preterminal

F64 = torch.float64
FORMS = ("entries", "rule cp", "whole cp", "dense")
LENGTHS = torch.tensor([3, 2])  # of two sentences
grammars = pytest.mark.parametrize(
    ("form", "unary"), [(form, unary) for form in FORMS for unary in (False, True)], ids=str
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_words(length=3, batch=2, signed=False, seed=5):
    """[batch, length, preterminal states]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, length, OUTER, generator=generator, dtype=F64) - (0.3 if signed else 0)


def all_derivations(full, words, lengths=LENGTHS):
    return [full.derivations(one[:length]) for one, length in zip(words, lengths.tolist(), strict=True)]


def posteriors(found, length):
    """[2, length, length, states]: of the top and the bottom states of spans."""
    total, sums = math.fsum(found.values()), defaultdict(float)
    for spans, weight in found.items():
        for span in spans:
            sums[0, span.start, span.start + span.width - 1, span.top] += weight / total
            sums[1, span.start, span.start + span.width - 1, span.bottom] += weight / total
    expected = torch.zeros(2, length, length, STATES, dtype=F64)
    for place, value in sums.items():
        expected[place] = value
    return expected


def in_logs(grammar, words):
    return grammar.change(safe_log), safe_log(words)


class TestAgainstEnumeration:
    @pytest.mark.parametrize("signed", [False, True])
    @grammars
    def test_sums_and_marginals(self, form, unary, signed):
        grammar, full = random_grammar(form, unary=unary, signed=signed)
        words = random_words(signed=signed)
        found = all_derivations(full, words)
        sums = [math.fsum(one.values()) for one in found]
        expected = torch.stack([posteriors(one, 3) for one in found], 1)
        total, _ = inside(Signed, grammar, words, LENGTHS)
        assert total[0].tolist() == [math.copysign(1, one) for one in sums]
        runs = [marginals(grammar, words, LENGTHS, Signed)]
        if not signed:
            runs.append(marginals(*in_logs(grammar, words), LENGTHS))
        for log_z, *layers in runs:
            assert log_z.tolist() == pytest.approx([math.log(abs(one)) for one in sums], rel=1e-12)
            assert torch.allclose(torch.stack(layers), expected, atol=1e-12)

    @pytest.mark.parametrize("width", [2, 3])
    @pytest.mark.parametrize("signed", [False, True])
    @pytest.mark.parametrize("form", ["entries", "rule cp"])
    def test_posteriors_of_rules(self, form, signed, width):
        grammar, full = random_grammar(form, unary=True, signed=signed)
        words = random_words(signed=signed)
        expected = torch.zeros(2, 4 - width, width - 1, 3, dtype=F64)
        for b, one in enumerate(all_derivations(full, words)):
            total = math.fsum(one.values())
            for spans, weight in one.items():
                for span in spans:
                    if span.width == width:
                        expected[b, span.start, span.last - 1, span.rule] += weight / total
        assert expected.any()
        found = rule_posteriors(grammar, words, width, 3, LENGTHS, Signed)
        assert torch.allclose(found, expected, atol=1e-12)
        if not signed:
            assert torch.allclose(rule_posteriors(*in_logs(grammar, words), width, 3, LENGTHS), expected, atol=1e-12)

    @grammars
    def test_the_best_derivations(self, form, unary):
        grammar, full = random_grammar(form, unary=unary)
        words = random_words()
        log_z, *layers = marginals(*in_logs(grammar, words), LENGTHS, Max)
        values, _ = inside(KMax(4), *in_logs(grammar, words), LENGTHS)
        for b, one in enumerate(all_derivations(full, words)):
            best = max(one, key=one.get)
            ranked = sorted(one.values(), reverse=True)[:4]
            assert log_z[b].item() == pytest.approx(math.log(one[best]), rel=1e-12)
            assert torch.equal(torch.stack([layer[b] for layer in layers]), posteriors({best: 1.0}, 3))
            assert values[:, b].exp().tolist() == pytest.approx(ranked + [0.0] * (4 - len(ranked)), rel=1e-12)

    @grammars
    def test_entropy_cross_entropy_and_divergence(self, form, unary):
        (grammar, full), (other, other_full) = (random_grammar(form, unary=unary, seed=seed) for seed in (0, 1))
        words = random_words()
        both = zip(all_derivations(full, words), all_derivations(other_full, words.flip(1) + 0.1), strict=True)
        expected = []
        for p, q in both:
            of_p, of_q = math.fsum(p.values()), math.fsum(q.values())
            expected.append(
                [
                    -math.fsum(w / of_p * math.log(w / of_p) for w in p.values()),
                    -math.fsum(w / of_p * math.log(q[spans] / of_q) for spans, w in p.items()),
                ]
            )
        logs = in_logs(grammar, words)
        pair_of_words = torch.stack([logs[1], safe_log(words.flip(1) + 0.1)])
        others = iter(other.tensors)
        pair = grammar.change(lambda one: torch.stack([safe_log(one), safe_log(next(others))]))
        entropy = log_partition(*logs, LENGTHS, Entropy)
        cross = log_partition(pair, pair_of_words, LENGTHS, CrossEntropy)
        divergence = log_partition(pair, pair_of_words, LENGTHS, KLDivergence)
        for b, (own, crossed) in enumerate(expected):
            assert entropy[b].item() == pytest.approx(own, rel=1e-10)
            assert cross[b].item() == pytest.approx(crossed, rel=1e-10)
            assert divergence[b].item() == pytest.approx(crossed - own, rel=1e-8)

    def test_samples(self):
        grammar, full = random_grammar("whole cp", unary=True)
        words = random_words(batch=1)
        samples, semiring = 1000, Sampled(torch.Generator().manual_seed(0))
        copies = words.expand(samples, -1, -1)
        _, top, bottom = marginals(*in_logs(grammar, copies), None, semiring)
        assert set(top.unique().tolist()) == {0.0, 1.0}
        assert torch.equal(top.sum((1, 2, 3)), torch.full((samples,), 5.0).to(F64))  # 3 words and 2 spans over them
        expected = posteriors(full.derivations(words[0]), 3)
        frequent = torch.stack([top, bottom]).mean(1)
        deviation = (expected * (1 - expected) / samples).sqrt()
        assert ((frequent - expected).abs() <= 5 * deviation + 1e-9).all()


class TestMoreChildren:
    """Up to four children for a rule, of several numbers in one grammar."""

    @settings(max_examples=15, deadline=None)
    @given(
        form=st.sampled_from(FORMS),
        arities=st.sampled_from([(3,), (4,), (2, 3), (2, 4), (2, 3, 4)]),
        unary=st.booleans(),
        length=st.integers(1, 4),
        seed=st.integers(0, 100),
    )
    def test_against_enumeration(self, form, arities, unary, length, seed):
        if form == "dense":
            length = min(length, 3 if 4 in arities else length)
        if unary and form != "entries":
            length = min(length, 3)
        grammar, full = random_grammar(form, arities, unary, seed=seed)
        words = random_words(length, 1, seed=seed)
        found = full.derivations(words[0])
        logs = in_logs(grammar, words)
        log_z, *layers = marginals(*logs)
        if not found:
            assert log_z.item() == -math.inf
            assert not torch.stack(layers).any()
            return
        assert log_z.item() == pytest.approx(math.log(math.fsum(found.values())), rel=1e-12)
        assert torch.allclose(torch.stack(layers).squeeze(1), posteriors(found, length), atol=1e-12)
        best = max(found, key=found.get)
        weight, *layers = marginals(*logs, None, Max)
        assert weight.item() == pytest.approx(math.log(found[best]), rel=1e-12)
        assert torch.equal(torch.stack(layers).squeeze(1), posteriors({best: 1.0}, length))

    @pytest.mark.parametrize("form", FORMS)
    def test_against_the_binarised_grammar(self, form):
        """Lane by lane: a lane of three children becomes a state over the first two, beside the third."""
        grammar, _ = random_grammar(form, (3,), seed=3)
        words = random_words(5, 1)
        (rules,) = grammar.rules
        first, second, third = (as_matrix(child, STATES) for child in rules.children)  # [lanes, states]
        number = len(first)
        identity, u = torch.eye(number, dtype=F64), as_matrix(rules.lift, number).T  # [lanes, parents]

        def spread(phrases, new, tags):  # the new states stand behind the interminals
            sizes = zip([phrases, new, tags], [INNER, number, OUTER], strict=True)
            return torch.cat([torch.zeros(number, size) if part is None else part for part, size in sizes], 1)

        begin = Rules.from_cp(
            spread(None, identity, None)[:, : INNER + number],
            *(spread(child[:, :INNER], None, child[:, INNER:]) for child in (first, second)),
        )
        end = Rules.from_cp(
            spread(u, None, None)[:, : INNER + number],
            spread(None, identity, None),
            spread(third[:, :INNER], None, third[:, INNER:]),
        )
        root = torch.cat([grammar.root[:INNER], torch.zeros(number), grammar.root[INNER:]])
        for semiring in (Log, Max):
            log_z, own, _ = marginals(*in_logs(grammar, words), None, semiring)
            same, theirs, _ = marginals(*in_logs(CFG(root, (begin, end)), words), None, semiring)
            assert log_z.item() == pytest.approx(same.item(), rel=1e-12)
            assert own.any()
            assert torch.allclose(own, torch.cat([theirs[..., :INNER], theirs[..., -OUTER:]], -1), atol=1e-12)


def as_matrix(one, inputs):
    """A map written out, [outputs, inputs]: what it makes of each unit vector, in ordinary numbers."""
    unit = torch.eye(inputs, dtype=F64).unsqueeze(0).unsqueeze(0)
    return one.change(torch_struct.StdSemiring.convert)(torch_struct.StdSemiring, unit)[0, 0].T


class TestAgainstNLTK:
    GRAMMAR = """
        S -> A B [0.4] | B A [0.3] | A B A [0.2] | A [0.1]
        A -> A B [0.2] | N V [0.2] | V A [0.2] | N [0.3] | V N A N [0.1]
        B -> B N [0.4] | V N [0.1] | A N A [0.3] | V [0.2]
        N -> 'x' [0.5] | 'y' [0.3] | 'z' [0.2]
        V -> 'x' [0.2] | 'y' [0.8]
    """

    @pytest.mark.parametrize("sentence", ["yxyzy", "yxzyx", "xyx"])
    def test_rules_of_one_to_four_children(self, sentence):
        peer = nltk.PCFG.fromstring(self.GRAMMAR)
        names = ["S", "A", "B", "N", "V"]
        rules = {
            n: [
                ([names.index(str(one)) for one in (rule.lhs(), *rule.rhs())], rule.prob())
                for rule in peer.productions()
                if len(rule.rhs()) == n and rule.is_nonlexical()
            ]
            for n in (1, 2, 3, 4)
        }
        steps = torch.zeros(3, 5, dtype=F64)
        for (parent, child), probability in rules[1]:
            steps[parent, child] = probability
        made = []
        for n in (2, 3, 4):
            parent, *children = torch.tensor([symbols for symbols, _ in rules[n]]).unbind(1)
            made.append(Rules.from_entries(parent, children, torch.tensor([p for _, p in rules[n]], dtype=F64), 3))
        emits = {(str(rule.lhs()), rule.rhs()[0]): rule.prob() for rule in peer.productions() if rule.is_lexical()}
        words = torch.tensor([[[emits.get((tag, x), 0.0) for tag in "NV"] for x in sentence]], dtype=F64)
        grammar = CFG(torch.eye(5, dtype=F64)[0], tuple(made), Map(unary_closure(steps)))
        parses = [tree.prob() for tree in InsideChartParser(peer).parse(list(sentence))]
        assert parses
        assert log_partition(*in_logs(grammar, words)).exp().item() == pytest.approx(math.fsum(parses), rel=1e-12)
        # No two chains of unary rules have the same ends, so that the best chains are the sums over chains.
        best = next(iter(ViterbiParser(peer).parse(list(sentence))))
        assert log_partition(*in_logs(grammar, words), None, Max).exp().item() == pytest.approx(best.prob(), rel=1e-12)


class TestAgainstTorchStruct:
    """Rules of each sentence, [batch, NT, NT + T, NT + T]."""

    @pytest.fixture
    def potentials(self):
        generator = torch.Generator().manual_seed(0)
        shapes = ((3, 5, 4), (3, 2, 6, 6), (3, 2))
        return [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]

    @pytest.fixture
    def grammar(self, potentials):
        _, rules, roots = potentials
        return CFG(torch.nn.functional.pad(roots, (0, 4), value=-math.inf), (Rules.from_tensor(rules),))

    LENGTHS = torch.tensor([5, 3, 4])

    def test_all_it_has(self, potentials, grammar):
        words = potentials[0]
        peer = torch_struct.SentCFG(tuple(potentials), lengths=self.LENGTHS)
        log_z, top, _ = marginals(grammar, words, self.LENGTHS)
        _, best, _ = marginals(grammar, words, self.LENGTHS, Max)
        assert torch.allclose(log_z, peer.partition)
        assert torch.allclose(log_partition(grammar, words, self.LENGTHS, Entropy), peer.entropy)
        assert torch.allclose(log_partition(grammar, words, self.LENGTHS, Max), peer.max)
        for mine, theirs in ((top, peer.marginals), (best, peer.argmax)):
            assert torch.allclose(mine.diagonal(0, 1, 2)[:, 2:].mT, theirs[0], atol=1e-7)
            for width in range(2, 6):
                spans = mine.diagonal(width - 1, 1, 2)[:, :2].mT
                assert torch.allclose(spans, theirs[3][:, width - 2, : 6 - width], atol=1e-7)
        values, _ = inside(KMax(3), grammar, words, self.LENGTHS)
        expected = torch_struct.CKY(torch_struct.KMaxSemiring(3)).sum(potentials, self.LENGTHS, _raw=True)
        assert torch.allclose(values, expected)

    def test_its_own_semirings_serve_where_nothing_is_impossible(self, potentials, grammar):
        grammar = replace(grammar, root=grammar.root.clamp_min(-1e5))
        for mine, theirs in (
            (Log, torch_struct.LogSemiring),
            (Max, torch_struct.MaxSemiring),
            (Entropy, torch_struct.EntropySemiring),
        ):
            values = [log_partition(grammar, potentials[0], self.LENGTHS, one) for one in (mine, theirs)]
            assert torch.allclose(*values)

    def test_expected_counts_of_rules_are_derivatives(self, potentials, grammar):
        words, rules, _ = (one.requires_grad_() for one in potentials)
        grammar = replace(grammar, rules=(Rules.from_tensor(rules),))
        counts = torch.autograd.grad(log_partition(grammar, words, self.LENGTHS).sum(), rules)[0]
        assert torch.allclose(counts, torch_struct.SentCFG(tuple(potentials), lengths=self.LENGTHS).marginals[1])


class TestDerivations:
    """Read from the marks of derivatives, and found from the root down."""

    LENGTHS = torch.tensor([5, 3, 1])

    @pytest.mark.parametrize("numbers", [lanes.NUMBERS, 8])  # with 8, charts are made in parts
    @pytest.mark.parametrize("name", [name for name in FAST_FORMS if "sorted" not in name])  # terms stand there twice
    def test_of_k_max_and_of_the_search_are_the_same(self, name, numbers, monkeypatch):
        monkeypatch.setattr(lanes, "NUMBERS", numbers)
        case, k = make(name), 3
        leaf = case.leaf(5, 3)
        grammar, words = as_textbook(case.form, by_rule=False).change(safe_log), safe_log(leaf.transpose(0, 1))
        terms = case.form.lanes if name.startswith("cp") else 0
        chart = MarkedChart(KMax(k), grammar, words, self.LENGTHS, terms)
        marked = [chart.derivations(number) for number in range(k)]
        found = KBest(grammar, words, self.LENGTHS, k).derivations
        for b in range(3):
            assert found[b] == [some[b] for some in marked if some[b] is not None]
        best, log_p = best_derivations(case.form, leaf, self.LENGTHS)
        assert best == marked[0]
        assert torch.allclose(log_p, chart.values[0])

    def test_samples_differ_from_reading_to_reading(self, monkeypatch):
        monkeypatch.setattr(lanes, "NUMBERS", 8)
        case = make("dense")
        grammar, words = as_textbook(case.form).change(safe_log), safe_log(case.leaf(5, 1).transpose(0, 1))
        chart = MarkedChart(Sampled(torch.Generator().manual_seed(0)), grammar, words)
        drawn = {tuple(chart.derivations()[0]) for _ in range(10)}
        assert len(drawn) > 5

    @pytest.mark.parametrize("name", FAST_FORMS)
    def test_of_impossible_sentences_there_are_none(self, name):
        case = make(name)
        leaf = case.leaf(4, 2)
        leaf[1, 0] = 0
        found, log_p = best_derivations(case.form, leaf)
        assert found[0] is None
        assert log_p[0] == -math.inf
        assert found[1] is not None
        grammar, words = as_textbook(case.form).change(safe_log), safe_log(leaf.transpose(0, 1))
        assert [len(some) for some in KBest(grammar, words, None, 2).derivations] == [0, 2]

    def test_viterbi_needs_what_has_logarithms(self):
        case = make("dense", signed=True)
        with pytest.raises(InputError, match="non-negative"):
            best_derivations(case.form, case.leaf(3, 1))


@pytest.mark.parametrize("name", FAST_FORMS)
def test_against_the_fast_engine(name):
    """log Z, its derivatives and posteriors, for the forms that the fast engine has, with ten words."""
    case = make(name)
    leaf = case.leaf(10, 2).requires_grad_()
    root, full = case.full.root.clone().requires_grad_(), case.full
    closure = None if full.unary is None else Map(unary_closure(full.unary))
    grammar = CFG(root, (Rules.from_tensor(full.rules.sum(0)),), closure)
    lengths = torch.tensor([10, 7])
    log_z, top, bottom = marginals(*in_logs(grammar, leaf.transpose(0, 1)), lengths)
    theirs = fast.marginals(case.form, leaf.detach(), lengths)
    assert torch.allclose(log_z, theirs.log_z)
    assert torch.allclose(top, theirs.top, atol=1e-12)
    assert torch.allclose(bottom, theirs.bottom, atol=1e-12)
    gradients = torch.autograd.grad(log_z.sum(), [leaf, root])
    form = case.form.with_tensors([root, *case.form.tensors[1:]])
    expected = torch.autograd.grad(fast_log_partition(form, leaf, lengths)[0].sum(), [leaf, root])
    for one, other in zip(gradients, expected, strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", FAST_FORMS)
def test_the_forms_of_the_fast_engine_as_they_are(name, signed):
    """Sums, and posteriors of spans and of rules, are those of the fast engine."""
    case = make(name, signed)
    leaf, lengths = case.leaf(6, 2) - 0.3 * signed, torch.tensor([6, 4])
    grammar, words, semiring = as_textbook(case.form), leaf.transpose(0, 1), Signed
    if not signed:
        grammar, words, semiring = grammar.change(safe_log), safe_log(words), Log
    log_z, top, bottom = marginals(grammar, words, lengths, semiring)
    theirs = fast.marginals(case.form, leaf, lengths)
    assert torch.allclose(log_z, theirs.log_z)
    assert torch.allclose(top, theirs.top, atol=1e-9)
    assert torch.allclose(bottom, theirs.bottom, atol=1e-9)
    if name in WITH_GRAMMAR:
        rules = len(case.grammar.binary)
        for width in (2, 4, 6):
            expected = fast.anchored(case.form, leaf, width, rules)
            found = rule_posteriors(grammar, words, width, rules, None, semiring)
            assert torch.allclose(found, expected, atol=1e-9)


class TestDerivatives:
    @pytest.mark.parametrize("signed", [False, True])
    @grammars
    def test_first_and_second(self, form, unary, signed):
        grammar, _ = random_grammar(form, unary=unary, signed=signed)
        words = random_words(signed=signed)
        tensors = [one.clone().requires_grad_() for one in (words, *grammar.tensors)]

        def value(words, *tensors):
            values = iter(tensors)
            other = grammar.change(lambda old: next(values) * (old != 0))  # zeros of the closure stay zeros
            return log_partition(other, words, LENGTHS, Signed) if signed else log_partition(*in_logs(other, words))

        assert torch.autograd.gradcheck(value, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(value, tensors, fast_mode=True)

    @pytest.mark.parametrize("form", FORMS)
    def test_by_entries_that_are_zero(self, form):
        """In signed numbers a zero may become what is not."""
        grammar, _ = random_grammar(form, signed=True)
        words = random_words(signed=True)
        words[0, 1, 0] = 0
        tensors = [one.clone(memory_format=torch.contiguous_format) for one in (words, *grammar.tensors)]
        for one in tensors[1:]:
            one.view(-1)[1::5] = 0

        def value(words, *tensors):
            values = iter(tensors)
            return log_partition(grammar.change(lambda _: next(values)), words, None, Signed)

        tensors = [one.requires_grad_() for one in tensors]
        assert value(*tensors).isfinite().all()
        assert torch.autograd.gradcheck(value, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(value, tensors, fast_mode=True)

    def test_of_marginals_and_entropy(self):
        grammar, _ = random_grammar("rule cp", unary=True)
        words = safe_log(random_words()).requires_grad_()
        logs = grammar.change(safe_log)

        def entropy(words):
            return log_partition(logs, words, LENGTHS, Entropy)

        def spread(words):
            _, top, bottom = marginals(logs, words, LENGTHS)
            return (top * bottom).sum((1, 2, 3))

        for value in (entropy, spread):
            assert torch.autograd.gradcheck(value, [words])

    def test_marginals_carry_no_graph_that_nobody_asked_for(self):
        grammar, _ = random_grammar("dense")
        for one in marginals(*in_logs(grammar, random_words())):
            assert not one.requires_grad

    @pytest.mark.parametrize("form", FORMS)
    def test_large_charts_are_made_in_parts(self, form, monkeypatch):
        """The same numbers, first and second derivatives, and the same chart in `Max` and `Sampled`."""
        grammar, _ = random_grammar(form, (2, 3), unary=True)
        words = safe_log(random_words(5)).requires_grad_()
        logs = grammar.change(safe_log)

        def values():
            log_z, top, _ = marginals(logs, words)
            first = torch.autograd.grad(log_z.sum(), words, create_graph=True)[0]
            second = torch.autograd.grad((first**2).sum() + (top**2).sum(), words)[0]
            _, drawn, _ = marginals(logs, words, None, Sampled(torch.Generator().manual_seed(1)))
            assert torch.equal(drawn.sum((1, 2, 3)).round(), drawn.bool().sum((1, 2, 3)))
            return log_z, top, first, second, marginals(logs, words, None, Max)[1]

        whole = values()
        monkeypatch.setattr(lanes, "NUMBERS", 1)
        for one, other in zip(whole, values(), strict=True):
            assert torch.allclose(one, other, atol=1e-12)


class TestImpossible:
    @pytest.mark.parametrize(
        "semiring",
        [Log, Max, KMax(2), Sampled(), Entropy, Signed],
        ids=["log", "max", "kmax", "sampled", "entropy", "signed"],
    )
    @grammars
    def test_a_sentence_without_derivations(self, form, unary, semiring):
        """-inf, zeros, and derivatives that are numbers; the other sentence is what it is alone."""
        grammar, _ = random_grammar(form, unary=unary)
        words = random_words()
        words[1, 1] = 0
        tensors = [one.clone().requires_grad_() for one in (words, *grammar.tensors)]
        values = iter(tensors[1:])
        grammar, words = grammar.change(lambda _: next(values)), tensors[0]
        if semiring is not Signed:
            grammar, words = in_logs(grammar, words)
        total, _ = inside(semiring, grammar, words)
        nothing = zeros(semiring, total, 1).squeeze(1)
        same = total[:, 1] == nothing
        assert same[0] if semiring is Signed else same.all()  # a zero may have any exponent
        assert total[:, 0].isfinite().all()
        if semiring is Entropy:
            gradients = torch.autograd.grad(log_partition(grammar, words, None, Entropy).sum(), tensors)
        else:
            log_z, top, bottom = marginals(grammar, words, None, semiring)
            assert log_z[1] == -math.inf
            assert top[0].any()
            assert bottom[0].any()
            assert not top[1].any()
            assert not bottom[1].any()
            gradients = torch.autograd.grad(torch.where(log_z > -math.inf, log_z, 0).sum(), tensors, retain_graph=True)
        for gradient in gradients:
            assert gradient.isfinite().all()


def test_spans_may_be_restricted():
    """Weights of zero and one leave the derivations of some spans."""
    grammar, full = random_grammar("dense", unary=True)
    words = random_words(3, 1)
    allowed = torch.rand(2, 1, 3, 3, STATES, generator=torch.Generator().manual_seed(0)) < 0.9
    kept = [
        weight
        for spans, weight in full.derivations(words[0]).items()
        if all(
            allowed[0, 0, s.start, s.start + s.width - 1, s.top]
            and allowed[1, 0, s.start, s.start + s.width - 1, s.bottom]
            for s in spans
        )
    ]
    assert kept
    weights = Weights(*(torch.where(one, 0.0, -math.inf).to(F64).unsqueeze(0) for one in allowed))
    total, _ = inside(Log, *in_logs(grammar, words), None, weights)
    assert total.exp().item() == pytest.approx(math.fsum(kept), rel=1e-12)


def test_float32_and_long_sentences():
    """In log space nothing is lost to underflow: A -> A A | x and B -> B B | x grow apart by 1000 decades."""
    tensor = torch.zeros(2, 3, 3)
    tensor[0, 0, 0] = tensor[1, 1, 1] = 0.5
    steps = torch.tensor([[0, 0, 0.5], [0, 0, 1e-25]])
    words = torch.ones(1, 40, 1)
    grammar = CFG(torch.tensor([0.0, 1.0, 0.0]), (Rules.from_tensor(tensor),), Map(unary_closure(steps)))
    trees = math.comb(78, 39) // 40
    expected = math.log(trees) + 39 * math.log(0.5) + 40 * math.log(1e-25)
    assert log_partition(*in_logs(grammar, words)).item() == pytest.approx(expected, rel=1e-6)
    assert log_partition(grammar, words, None, Signed).item() == pytest.approx(expected, rel=1e-6)


def unbinarised(trees, model):
    """The treebank grammar with all children of a node in one rule, and the numbers its symbols have in the model."""
    symbols = model.grammar.symbols
    inner = [name for name in symbols.interminals if not name.startswith("@")]
    number = {("", name): i for i, name in enumerate(inner)}
    number |= {("word", name): len(inner) + i for i, name in enumerate(symbols.preterminals)}

    def of(node):
        return number["word" if is_preterminal(node) else "", node.label()]

    counts = Counter(
        (of(node), *map(of, node)) for tree in trees for node in tree[0].subtrees() if not is_preterminal(node)
    )
    totals = Counter()
    for (parent, *_), count in counts.items():
        totals[parent] += count
    rules, unary = {}, torch.zeros(len(inner), len(number), dtype=F64)
    for (parent, *children), count in counts.items():
        if len(children) == 1:
            unary[parent, children[0]] = count / totals[parent]
        else:
            rules.setdefault(len(children), []).append((parent, *children, count / totals[parent]))
    made = []
    for some in rules.values():
        parent, *children, values = zip(*some, strict=True)
        columns = [torch.tensor(child) for child in children]
        made.append(Rules.from_entries(torch.tensor(parent), columns, torch.tensor(values, dtype=F64), len(inner)))
    real = [i for i, name in enumerate(symbols.names) if not name.startswith("@")]
    return CFG(model.grammar.root[real].double(), tuple(made), Map(unary_closure(unary))), real


def test_a_treebank_without_binarisation():
    trees = [normalise(tree) for tree in corpus("train")[:400]]
    trees = [tree for tree in trees if len(tree) == 1 and max(len(node) for node in tree.subtrees()) <= 4][:150]
    model = train(trees, binarisation=Binarisation(horizontal=math.inf))
    grammar, real = unbinarised(trees, model)
    assert {len(rules.children) for rules in grammar.rules} == {2, 3, 4}
    sentences = [words for words in (tree.leaves() for tree in trees) if len(words) <= 9][:3]
    exact = model.grammar.to(dtype=F64)
    for sentence in sentences:
        binarised = ModelTrees(replace(model, grammar=exact), [sentence])
        words = binarised.leaf.transpose(0, 1)
        logs = grammar.change(safe_log), safe_log(words)
        log_z, top, bottom = marginals(*logs)
        assert log_z.item() == pytest.approx(binarised.partition.item(), rel=1e-9)
        assert torch.allclose(top, binarised.marginals.top[..., real], atol=1e-9)
        assert torch.allclose(bottom, binarised.marginals.bottom[..., real], atol=1e-9)
        weight, *_ = marginals(*logs, None, Max)
        best = binarised.log_prob(binarised.argmax) + binarised.partition
        assert weight.item() == pytest.approx(best.item(), rel=1e-9)
