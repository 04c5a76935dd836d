"""Chains and the distributions over their state sequences: against enumeration and torch-struct, in every form."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch_struct
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import moved, tensors_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lvpcfg import InputError
from lvpcfg.chart.fast.partition import LOGARITHMIC, NARROW, WIDE, solve
from lvpcfg.chart.semirings import Sampled, Signed, safe_log
from lvpcfg.sequence import chain as textbook
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.distribution import HMMDistribution
from lvpcfg.sequence.fast import Backward, ChainProblem, Forward, log_partition
from lvpcfg.sequence.marginals import marginals, step_marginals

F64 = torch.float64
STATES, LENGTH = 3, 4
LENGTHS = torch.tensor([2, 4, 1])


def random_chain(form: str, final: bool = True, states: int = STATES, seed: int = 0) -> Chain:
    """Numbers at random, some of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        numbers = torch.rand(shape, generator=generator, dtype=F64)
        return numbers - 0.4 if form == "signed" else numbers * (numbers > 0.15)

    end = some(states) if final else None
    if form == "dense":
        return Chain(some(states), (some(states, states),), end)
    return Chain.low_rank(some(states), some(2, states), some(2, states), end)


def random_words(batch: int = len(LENGTHS), length: int = LENGTH, states: int = STATES, seed: int = 1) -> Tensor:
    return torch.rand(batch, length, states, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sequences(chain: Chain, words: Tensor) -> dict[tuple[int, ...], float]:
    """The weight of every sequence of states, as the definition reads."""
    transition, weights = chain.transition, {}
    for states in itertools.product(range(len(chain.initial)), repeat=len(words)):
        weight = float(chain.initial[states[0]])
        for place, state in enumerate(states):
            weight *= float(words[place, state])
            if place:
                weight *= float(transition[states[place - 1], state])
        weights[states] = weight * (1.0 if chain.final is None else float(chain.final[states[-1]]))
    return weights


@dataclass
class Case:
    chain: Chain
    words: Tensor
    distribution: HMMDistribution
    weights: list[dict[tuple[int, ...], float]]  # of each sentence

    @property
    def totals(self) -> list[float]:
        return [math.fsum(weights.values()) for weights in self.weights]

    def expected(self, value) -> list[float]:
        """Of value(states, probability), for each sentence."""
        return [
            math.fsum(weight / total * value(states, weight / total) for states, weight in weights.items() if weight)
            for weights, total in zip(self.weights, self.totals, strict=True)
        ]


def make(form: str, final: bool = True, seed: int = 0) -> Case:
    chain, words = random_chain(form, final, seed=seed), random_words()
    weights = [sequences(chain, one[:n]) for one, n in zip(words, LENGTHS.tolist(), strict=True)]
    return Case(chain, words, HMMDistribution(chain, words, LENGTHS), weights)


@pytest.fixture(params=[(form, final) for form in ("dense", "low rank") for final in (False, True)], ids=str)
def case(request) -> Case:
    return make(*request.param)


class TestAgainstEnumeration:
    def test_partition(self, case):
        assert case.distribution.partition.tolist() == pytest.approx([math.log(x) for x in case.totals], rel=1e-12)

    def test_marginals(self, case):
        expected = torch.zeros(*case.words.shape, dtype=F64)
        for sentence, (weights, total) in enumerate(zip(case.weights, case.totals, strict=True)):
            for states, weight in weights.items():
                for place, state in enumerate(states):
                    expected[sentence, place, state] += weight / total
        torch.testing.assert_close(case.distribution.marginals, expected)
        best = torch.where(expected.sum(-1) > 0, expected.argmax(-1), -1)
        assert torch.equal(case.distribution.max_marginal, best)
        differentiable = HMMDistribution(case.chain, case.words.clone().requires_grad_(), LENGTHS)
        torch.testing.assert_close(differentiable.marginals.detach(), expected)
        assert differentiable.marginals.requires_grad

    @pytest.mark.parametrize("way", ["sums", "logarithms"])
    def test_steps(self, case, way, monkeypatch):
        label, labels = torch.tensor([0, 1, 0]), 2
        expected = torch.zeros(len(LENGTHS), LENGTH - 1, labels, labels, dtype=F64)
        for sentence, (weights, total) in enumerate(zip(case.weights, case.totals, strict=True)):
            for states, weight in weights.items():
                for place in range(1, len(states)):
                    pair = label[states[place - 1]], label[states[place]]
                    expected[sentence, place - 1][pair] += weight / total
        if way == "logarithms":
            monkeypatch.setattr(ChainProblem, "chart", lambda problem, _, chart=ChainProblem.chart: chart(problem, way))
        log_z, states, steps = step_marginals(case.chain, case.words, label, labels, LENGTHS)
        torch.testing.assert_close(steps, expected)
        torch.testing.assert_close(states, case.distribution.marginals)
        torch.testing.assert_close(log_z, case.distribution.partition)

    def test_argmax_and_topk(self, case):
        best = case.distribution.argmax
        for k in (1, 5):
            found = case.distribution.topk(k)
            assert found.shape == (k, len(LENGTHS), LENGTH)
            for sentence, (weights, n) in enumerate(zip(case.weights, LENGTHS.tolist(), strict=True)):
                expected = sorted((weight for weight in weights.values() if weight), reverse=True)[:k]
                some = [tuple(states) for states in found[: len(expected), sentence, :n].tolist()]
                assert [weights[states] for states in some] == pytest.approx(expected)
                assert len({*some}) == len(some)
                assert bool((found[:, sentence, n:] == -1).all())
                assert bool((found[len(expected) :, sentence] == -1).all())
                assert weights[tuple(best[sentence, :n].tolist())] == pytest.approx(expected[0])
        assert torch.equal(case.distribution.mode, best)

    def test_samples(self, case):
        number = 2000
        drawn = case.distribution.sample((number,), torch.Generator().manual_seed(0))
        for sentence, (weights, total) in enumerate(zip(case.weights, case.totals, strict=True)):
            n = int(LENGTHS[sentence])
            found = Counter(tuple(states) for states in drawn[:, sentence, :n].tolist())
            assert bool((drawn[:, sentence, n:] == -1).all())
            assert all(weights[states] > 0 for states in found)
            distance = sum(abs(found[states] / number - weight / total) for states, weight in weights.items())
            assert distance < 2.5 * math.sqrt(len(weights) / number)

    def test_samples_by_marks(self, case):
        log_z, marks = textbook.marginals(case.chain.change(safe_log), safe_log(case.words), LENGTHS, Sampled())
        for sentence, weights in enumerate(case.weights):
            n = int(LENGTHS[sentence])
            assert weights[tuple(marks[sentence, :n].argmax(-1).tolist())] > 0
        torch.testing.assert_close(log_z, case.distribution.partition)

    def test_entropy_and_divergences(self, case):
        entropy = case.expected(lambda _, p: -math.log(p))
        assert case.distribution.entropy.tolist() == pytest.approx(entropy)
        other = HMMDistribution(case.chain, case.words + torch.rand(case.words.shape, dtype=F64), LENGTHS)
        others = [sequences(case.chain, other.leaf[: int(n), b]) for b, n in enumerate(LENGTHS)]
        cross = [
            -math.fsum(
                weight / total * math.log(q[states] / math.fsum(q.values()))
                for states, weight in weights.items()
                if weight
            )
            for weights, total, q in zip(case.weights, case.totals, others, strict=True)
        ]
        assert case.distribution.cross_entropy(other).tolist() == pytest.approx(cross)
        kl = torch.distributions.kl_divergence(case.distribution, other)
        assert kl.tolist() == pytest.approx([x - y for x, y in zip(cross, entropy, strict=True)], abs=1e-12)

    def test_log_prob(self, case):
        best = case.distribution.topk(2)
        expected = [
            [weights[tuple(states[:n])] / total for states, n, weights, total in zip(*rows, strict=True)]
            for rows in ((some, LENGTHS.tolist(), case.weights, case.totals) for some in best.tolist())
        ]
        torch.testing.assert_close(case.distribution.log_prob(best).exp(), torch.tensor(expected, dtype=F64))
        assert bool((case.distribution.log_prob(torch.full((3, LENGTH), -1)) == -torch.inf).all())

    def test_derivatives(self, case):
        inputs = [tensor.clone().requires_grad_() for tensor in (case.words, *case.chain.tensors)]

        def log_z(words: Tensor, *tensors: Tensor) -> Tensor:
            return log_partition(case.chain.with_tensors(tensors), words, LENGTHS)

        def by_logarithms(words: Tensor, *tensors: Tensor) -> Tensor:
            return textbook.log_partition(case.chain.with_tensors(tensors).change(safe_log), safe_log(words), LENGTHS)

        weight = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
        found, expected = (
            torch.autograd.grad((function(*inputs) * weight).sum(), inputs) for function in (log_z, by_logarithms)
        )
        for mine, theirs, tensor in zip(found, expected, inputs, strict=True):
            torch.testing.assert_close(mine * tensor, theirs * tensor)  # by zeros logarithms have none
        positive = [(tensor.detach() + 0.1).requires_grad_() for tensor in inputs]
        assert torch.autograd.gradcheck(log_z, positive)
        assert torch.autograd.gradcheck(
            lambda words, *tensors: HMMDistribution(case.chain.with_tensors(tensors), words, LENGTHS).log_prob(
                torch.tensor([[0, 1, -1, -1], [2, 2, 0, 1], [1, -1, -1, -1]])
            ),
            positive,
            fast_mode=True,
        )


@pytest.mark.parametrize("final", [False, True])
def test_negative_numbers(final):
    case = make("signed", final, seed=3)
    assert min(case.totals) < 0
    assert case.distribution.partition.tolist() == pytest.approx([math.log(abs(x)) for x in case.totals])
    found = textbook.log_partition(case.chain, case.words, LENGTHS, Signed)
    torch.testing.assert_close(found, case.distribution.partition)
    signs = Forward(case.chain, case.words.transpose(0, 1), LENGTHS).sign
    assert signs.tolist() == [math.copysign(1, x) for x in case.totals]
    words = case.words.clone().requires_grad_()
    torch.testing.assert_close(
        HMMDistribution(case.chain, words, LENGTHS).marginals.detach(), case.distribution.marginals
    )
    for what in ("argmax", "entropy"):
        with pytest.raises(InputError, match="negative"):
            getattr(case.distribution, what)
    assert torch.autograd.gradcheck(lambda x: log_partition(case.chain, x, LENGTHS), [words])


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 5), st.booleans())
@settings(max_examples=25)
def test_both_engines_agree(seed, states, batch, low_rank):
    chain = random_chain("low rank" if low_rank else "dense", bool(seed % 2), states, seed)
    words = random_words(batch, 5, states, seed) * (random_words(batch, 5, states, seed + 1) > 0.2)
    lengths = torch.randint(1, 6, (batch,), generator=torch.Generator().manual_seed(seed))
    expected = textbook.marginals(chain.change(safe_log), safe_log(words), lengths)
    for mine, theirs in zip(marginals(chain, words, lengths), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    narrow = marginals(chain.to(torch.float32), words.float(), lengths)
    torch.testing.assert_close(narrow[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(narrow[1].double(), expected[1], rtol=1e-4, atol=1e-4)


class TestAgainstTorchStruct:
    @pytest.fixture
    def logs(self):
        torch.manual_seed(0)
        return torch.randn(4, 4), torch.randn(3, 6, 4), torch.randn(4)  # [from, to], words, initial

    @pytest.mark.parametrize("lengths", [None, [6, 3, 2]])
    def test_crf(self, logs, lengths):
        transition, words, initial = logs
        lengths = None if lengths is None else torch.tensor(lengths)
        ours = HMMDistribution.from_log_potentials(words, transition, initial, lengths=lengths)
        edges = transition.T.expand(3, 5, 4, 4) + words[:, 1:].unsqueeze(-1)  # [batch, step, to, from]
        edges[:, 0] += (words[:, 0] + initial).unsqueeze(-2)
        self.compare(ours, torch_struct.LinearChainCRF(edges, lengths), lengths)

    @pytest.mark.parametrize("lengths", [None, [6, 3, 2]])
    def test_hmm(self, logs, lengths):
        transition, _, initial = (x.log_softmax(-1) for x in logs)
        emission = torch.randn(4, 7).log_softmax(-1)
        observations = torch.randint(7, (3, 6))
        lengths = None if lengths is None else torch.tensor(lengths)
        chain = Chain(initial.exp(), (transition.exp(),))
        ours = HMMDistribution(chain, emission.exp().T[observations], lengths)
        self.compare(ours, torch_struct.HMM(transition.T, emission.T, initial, observations, lengths), lengths)

    @staticmethod
    def compare(ours, peer, lengths):
        torch.testing.assert_close(ours.partition, peer.partition.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.entropy, peer.entropy.double(), rtol=1e-4, atol=1e-4)
        steps = peer.marginals.sum(-1)  # [batch, step, to]
        torch.testing.assert_close(ours.marginals[:, 1:], steps, rtol=1e-4, atol=1e-5)
        states, _ = peer.struct.from_parts(peer.argmax)
        best = torch.where(ours.argmax >= 0, states, -1)
        assert torch.equal(ours.argmax, best)
        torch.testing.assert_close(
            ours.log_prob(ours.argmax), (peer.max - peer.partition).double(), rtol=1e-4, atol=1e-4
        )


class TestNumbers:
    """A chain that loses the states that matter: they are 2^-40 times less likely at every word but the last."""

    @staticmethod
    def losing(length: int, dtype: torch.dtype) -> tuple[Chain, Tensor]:
        words = torch.tensor([1.0, 2.0**-40], dtype=dtype).repeat(1, length, 1)
        words[0, -1, 0] = 0
        return Chain(torch.full((2,), 0.5, dtype=dtype), (torch.eye(2, dtype=dtype),)), words

    @pytest.mark.parametrize(
        ("length", "dtype", "level"),
        [
            (3, torch.float32, NARROW),
            (12, torch.float32, WIDE),
            (60, torch.float32, LOGARITHMIC),
            (60, F64, LOGARITHMIC),
        ],
    )
    def test_takes_the_next_way(self, length, dtype, level):
        chain, words = self.losing(length, dtype)
        others = torch.rand(2, length, 2).to(dtype)
        batch = torch.cat([others[:1], words, others[1:]])
        levels = {int(i): s.level for s in solve(ChainProblem(chain, batch.transpose(0, 1))) for i in s.sentences}
        assert levels == {0: NARROW, 1: level, 2: NARROW}
        tensors = [tensor.clone().requires_grad_() for tensor in (batch, *chain.tensors)]
        log_z = log_partition(chain.with_tensors(tensors[1:]), tensors[0])
        assert log_z[1].item() == pytest.approx((-40 * length - 1) * math.log(2), rel=1e-6)
        log_z[1].backward()
        counts = [tensor.detach() * tensor.grad for tensor in tensors]
        assert counts[0][1].tolist() == [pytest.approx([0, 1], abs=1e-5)] * length
        assert counts[2].flatten().tolist() == pytest.approx([0, 0, 0, length - 1], abs=1e-4)
        torch.testing.assert_close(marginals(chain, batch)[1][1], counts[0][1])

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_long_sentences(self, dtype):
        chain = random_chain("dense", states=6).to(dtype)
        words = random_words(2, 5000, 6).to(dtype) * 1e-3
        lengths = torch.tensor([5000, 1])
        log_z, states = marginals(chain, words, lengths)
        expected = textbook.log_partition(chain.to(F64).change(safe_log), safe_log(words.double()), lengths)
        torch.testing.assert_close(log_z, expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(states.sum(-1)[0], torch.ones(5000, dtype=dtype), rtol=1e-3, atol=1e-3)

    def test_impossible_sentences(self):
        words = random_words()
        words[1, 2] = 0
        inputs = [tensor.requires_grad_() for tensor in (words, *random_chain("dense").tensors)]
        chain = Chain(inputs[1], (inputs[2],), inputs[3])
        distribution = HMMDistribution(chain, words, LENGTHS)
        assert distribution.partition[1] == -math.inf
        assert distribution.partition[[0, 2]].isfinite().all()
        distribution.partition[[0, 2]].sum().backward()
        assert all(tensor.grad.isfinite().all() for tensor in inputs)
        with torch.no_grad():
            for states in (
                distribution.argmax,
                distribution.max_marginal,
                *distribution.topk(2),
                *distribution.sample(2),
            ):
                assert bool((states[1] == -1).all())
            assert distribution.entropy[1] == 0
            assert bool((distribution.marginals[1] == 0).all())
            assert distribution.log_prob(torch.zeros(3, LENGTH, dtype=torch.int64))[1] == -math.inf


def test_many_more_than_there_are_cost_nothing():
    found = HMMDistribution(random_chain("dense", states=2), random_words(1, 2, 2)).topk(10**6)
    assert found.shape == (10**6, 1, 2)
    assert {tuple(states) for states in found[:4, 0].tolist()} >= {(1, 1)}
    assert bool((found[4:] == -1).all())


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("form", ["dense", "low rank"])
def test_all_is_where_the_words_are(form, fake):
    with FakeTensorMode() if fake else torch.no_grad() as mode:
        move = (lambda x: mode.from_tensor(x).to("meta")) if fake else (lambda x: x.to("meta"))
        chain, words = moved(random_chain(form), move), move(random_words())
        scores = Forward(chain, words.transpose(0, 1))
        backward = Backward(scores, torch.ones_like(scores.log_z), parameters=True)
        held = [*tensors_in(scores), *tensors_in(backward), backward.leaf]
        assert len(held) > 10
        assert {tensor.device.type for tensor in held} == {"meta"}
        assert [tensor.shape for tensor in backward.tensors] == [tensor.shape for tensor in chain.tensors]


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu():
    chain, words = random_chain("low rank"), random_words()
    there = marginals(moved(chain, torch.Tensor.cuda), words.cuda(), LENGTHS.cuda())
    for mine, theirs in zip(marginals(chain, words, LENGTHS), there, strict=True):
        torch.testing.assert_close(mine, theirs.cpu())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c, w: HMMDistribution(c, w[..., :2]), r"\(3, 4, 2\)\]: expected \[states\]"),
        (lambda c, w: HMMDistribution(c, w, [1, 2]), "expected a whole number for each sentence"),
        (lambda c, w: HMMDistribution(c, w, [1, 2, 5]), "expected 1 to 4 words"),
        (lambda c, w: HMMDistribution(replace(c, factors=()), w), "have the shapes"),
        (lambda c, w: HMMDistribution(replace(c, factors=c.factors * 3), w), "have the shapes"),
        (lambda c, w: HMMDistribution(c, w[:0]), r"\(0, 4, 3\)\]: .* none of them 0"),
        (lambda c, w: HMMDistribution(c, w.float()), "are float32 and float64: expected one floating type"),
        (lambda c, w: HMMDistribution.from_log_potentials(w[:, :0], c.transition), "have the shapes"),
        (lambda c, w: HMMDistribution(c, w).topk(0), "topk of 0"),
        (lambda c, w: HMMDistribution(c, w).sample(0), "sample of 0"),
        (lambda c, w: HMMDistribution(c, w).log_prob(torch.full((3, 4), 3)), "numbers below 3"),
        (lambda c, w: HMMDistribution(c, w).kl(3), "another distribution over sequences"),
        (lambda c, w: HMMDistribution(c, w).expand(), "distribution over sequences cannot be expanded"),
    ],
)
def test_wrong_input_is_a_sentence(make, message):
    with pytest.raises(InputError, match=message):
        make(random_chain("dense"), random_words())
