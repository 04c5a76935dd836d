"""HMMs as modules, EM, and spectral HMMs: against enumeration, exact moments, and the HMM that was sampled from."""

import itertools
import math

import pytest
import torch
from pages import python_of
from torch import Tensor

import lvpcfg
from lvpcfg import InputError
from lvpcfg.sequence.hmm import HMM, words_of
from lvpcfg.sequence.spectral import SpectralHMM, spectral_hmm, spectral_hmm_of_moments, triples_of

F64 = torch.float64


def random_hmm(states=2, symbols=4, rank=None, emission_rank=None, sharp=1.5, seed=0) -> HMM:
    hmm = HMM(states, symbols, rank, emission_rank, torch.Generator().manual_seed(seed)).to(F64)
    with torch.no_grad():
        for table in hmm.parameters():
            table.mul_(sharp)
    return hmm


def all_sequences(length: int, symbols: int) -> Tensor:
    return torch.tensor([*itertools.product(range(symbols), repeat=length)])


def log_p(hmm: HMM, observations: Tensor, lengths: Tensor | None = None) -> Tensor:
    return hmm(observations, lengths).partition.detach()


OPERATORS = [torch.ones(shape, dtype=F64) for shape in (2, 2, (3, 2, 2), 3)]
RANKS = pytest.mark.parametrize("ranks", [(None, None), (2, None), (None, 2), (2, 3)], ids=str)


class TestModule:
    @RANKS
    def test_probabilities_sum_to_one(self, ranks):
        hmm = random_hmm(3, 4, *ranks)
        assert log_p(hmm, all_sequences(4, 4)).exp().sum().item() == pytest.approx(1)

    @RANKS
    def test_prediction(self, ranks):
        hmm = random_hmm(3, 4, *ranks)
        history = all_sequences(3, 4)
        found = hmm.predict(history)
        for length in (1, 2, 3):
            so_far = log_p(hmm, history[:, :length])
            for symbol in range(4):
                following = torch.cat([history[:, :length], torch.full((len(history), 1), symbol)], 1)
                expected = (log_p(hmm, following) - so_far).exp()
                torch.testing.assert_close(found[:, length - 1, symbol], expected)

    def test_an_impossible_symbol_says_nothing(self):
        emission = torch.tensor([[0.9, 0.1, 0.0], [0.3, 0.7, 0.0]], dtype=F64)
        hmm = HMM.from_probabilities(emission[0, :2], [torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=F64)], [emission])
        found = hmm.predict(torch.tensor([[2, 0]]))[0]
        torch.testing.assert_close(found[0], emission[0, :2] @ hmm.probabilities()[0].transition.detach() @ emission)
        assert found[1].sum().item() == pytest.approx(1)

    @RANKS
    def test_samples(self, ranks):
        hmm = random_hmm(3, 4, *ranks)
        states, symbols = hmm.sample(20_000, 2, torch.Generator().manual_seed(0))
        assert states.shape == symbols.shape == (20_000, 2)
        assert int(states.max()) == 2
        found = torch.bincount(symbols[:, 0] * 4 + symbols[:, 1], minlength=16) / 20_000
        torch.testing.assert_close(found.double(), log_p(hmm, all_sequences(2, 4)).exp(), atol=0.02, rtol=0)

    @RANKS
    def test_em(self, ranks):
        """It never falls, ends where a gradient is 0, and finds more than chance."""
        _, observations = random_hmm(3, 4).sample(300, 6, torch.Generator().manual_seed(0))
        lengths = torch.randint(1, 7, (300,), generator=torch.Generator().manual_seed(0))
        hmm = random_hmm(3, 4, *ranks, sharp=1, seed=1)
        found = hmm.em(observations, lengths, iterations=40)
        assert found[0] == pytest.approx(
            log_p(random_hmm(3, 4, *ranks, sharp=1, seed=1), observations, lengths).sum().item()
        )
        assert all(after > before - 1e-8 for before, after in itertools.pairwise(found))
        assert log_p(hmm, observations, lengths).sum() >= found[-1] > found[0] + 50
        assert log_p(hmm, all_sequences(3, 4)).exp().sum().item() == pytest.approx(1)

    def test_one_iteration_is_that_of_rabiner(self):
        hmm, observations = random_hmm(2, 3), torch.tensor([[0, 2, 1]])
        chain, (emission,) = hmm.probabilities()
        counts = [torch.zeros(2, dtype=F64), torch.zeros(2, 2, dtype=F64), torch.zeros(2, 3, dtype=F64)]
        for states in itertools.product(range(2), repeat=3):
            weight = chain.initial[states[0]] * math.prod(chain.transition[i, j] for i, j in itertools.pairwise(states))
            weight = (weight * math.prod(emission[i, x] for i, x in zip(states, [0, 2, 1], strict=True))).detach()
            counts[0][states[0]] += weight
            for i, j in itertools.pairwise(states):
                counts[1][i, j] += weight
            for i, x in zip(states, [0, 2, 1], strict=True):
                counts[2][i, x] += weight
        hmm.em(observations, iterations=1)
        chain, (emission,) = hmm.probabilities()
        for table, count in zip((chain.initial, chain.transition, emission), counts, strict=True):
            torch.testing.assert_close(table, count / count.sum(-1, keepdim=True))

    def test_gradients(self):
        hmm = random_hmm(3, 4, 2, 2)
        _, observations = random_hmm(3, 4, seed=1).sample(50, 6, torch.Generator().manual_seed(0))
        optimiser = torch.optim.Adam(hmm.parameters(), 0.1)
        losses = []
        for _ in range(15):
            loss = -hmm(observations).partition.mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.1

    def test_from_probabilities(self):
        hmm = random_hmm(3, 4, 2, 2)
        chain, emission = hmm.probabilities()
        again = HMM.from_probabilities(chain.initial, [*chain.factors], emission)
        torch.testing.assert_close(log_p(again, all_sequences(3, 4)), log_p(hmm, all_sequences(3, 4)))
        dense = HMM.from_probabilities(chain.initial, [chain.transition], [emission[0] @ emission[1]])
        torch.testing.assert_close(log_p(dense, all_sequences(3, 4)), log_p(hmm, all_sequences(3, 4)))

    def test_wrong_input_is_a_sentence(self):
        with pytest.raises(InputError, match="rank is 0: expected 1, 2"):
            HMM(3, 4, 0)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda h: h(torch.tensor([[0, -1]])), "observations hold -1: expected 0 to 3"),
            (lambda h: h(torch.tensor([[0, 4]])), "observations hold 4: expected 0 to 3"),
            (lambda h: h.predict(torch.zeros(2, 0, dtype=torch.int64)), r"int64 of the shape \(2, 0\)"),
            (lambda h: h.em(torch.zeros(0, 3, dtype=torch.int64)), r"int64 of the shape \(0, 3\)"),
            (lambda h: h.sample(2, 0), "length is 0: expected 1, 2"),
            (lambda h: h.sample(-1, 2), "sequences is -1: expected 1, 2"),
        ],
    )
    def test_wrong_observations_are_a_sentence(self, call, message):
        with pytest.raises(InputError, match=message):
            call(random_hmm())

    def test_tables_that_do_not_fit_are_a_sentence(self):
        table = torch.full((2, 2), 0.5)
        for transition, emission in (([table[:1]], [table]), ([table], [table[:1]]), ([], [table]), ([table] * 3, [])):
            with pytest.raises(InputError, match=r"shapes \[\(2,\)"):
                HMM.from_probabilities(table[0], transition, emission)

    def test_an_impossible_sequence_has_no_probability(self):
        emission = torch.tensor([[0.9, 0.1, 0.0], [0.3, 0.7, 0.0]], dtype=F64)
        hmm = HMM.from_probabilities(emission[0, :2], [torch.full((2, 2), 0.5, dtype=F64)], [emission])
        assert hmm.em(torch.tensor([[0, 1], [2, 2]]), [2, 1], iterations=2) == [-math.inf, -math.inf]
        assert all(bool(table.isfinite().all()) for table in hmm.transition)


def moments(hmm: HMM) -> tuple[Tensor, Tensor, Tensor]:
    """The exact ones, of the beginnings of sequences."""
    _, emission = hmm.probabilities()
    symbols = emission[-1].shape[1]
    p = log_p(hmm, all_sequences(3, symbols)).exp().view(symbols, symbols, symbols)  # by x1, x2, x3
    return p.sum((1, 2)), p.sum(2).mT, p.permute(1, 2, 0)


class TestSpectral:
    @pytest.mark.parametrize(("states", "symbols"), [(2, 5), (3, 4), (3, 3)])
    def test_exact_moments_give_exact_probabilities(self, states, symbols):
        hmm = random_hmm(states, symbols)
        found = spectral_hmm_of_moments(*moments(hmm), states)
        history = all_sequences(5, symbols)[::7]
        log_probability, sign = found.log_probability(history)
        torch.testing.assert_close(log_probability, log_p(hmm, history), rtol=1e-5, atol=1e-5)
        assert bool((sign == 1).all())
        torch.testing.assert_close(found.predict(history), hmm.predict(history), rtol=1e-4, atol=1e-5)
        assert (found.b_1 @ found.b_inf).item() == pytest.approx(1)  # nothing is certain to begin
        total = found.operators.sum(0).mT @ found.b_inf  # any symbol is certain to follow
        torch.testing.assert_close(total, found.b_inf)
        assert len(found.singular_values) == symbols

    def test_as_many_states_as_symbols_need_no_basis(self):
        p_1, p_21, p_3x1 = moments(random_hmm(3, 3))
        found = spectral_hmm_of_moments(p_1, p_21, p_3x1, 3)
        torch.testing.assert_close(found.b_1, p_1)
        torch.testing.assert_close(found.operators, p_3x1 @ torch.linalg.inv(p_21))
        torch.testing.assert_close(found.b_inf, torch.ones(3, dtype=F64))

    def test_triples_are_counted(self):
        _, observations = random_hmm(2, 4).sample(500, 3, torch.Generator().manual_seed(0))
        p = torch.zeros(4, 4, 4, dtype=F64)
        for x_1, x_2, x_3 in observations.tolist():
            p[x_1, x_2, x_3] += 1 / 500
        expected = spectral_hmm_of_moments(p.sum((1, 2)), p.sum(2).mT, p.permute(1, 2, 0), 2)
        found = spectral_hmm(triples_of(observations), 2, 4)
        history = all_sequences(4, 4)
        for mine, theirs in zip(found.log_probability(history), expected.log_probability(history), strict=True):
            torch.testing.assert_close(mine, theirs)

    def test_triples(self):
        observations = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 0, 0]])
        assert triples_of(observations).tolist() == [[1, 2, 3], [5, 6, 7], [8, 9, 0]]
        lengths = torch.tensor([4, 3, 2])
        assert triples_of(observations, [4, 3, 2]).tolist() == [[1, 2, 3], [5, 6, 7]]
        assert triples_of(observations, lengths, sliding=True).tolist() == [[1, 2, 3], [2, 3, 4], [5, 6, 7]]

    @pytest.mark.parametrize("sliding", [False, True])
    def test_recovery(self, sliding):
        """More data, less error: both ways to count find the HMM that the data come from."""
        chain, emission = random_hmm(3, 6, sharp=2, seed=4).probabilities()
        stationary = torch.linalg.matrix_power(chain.transition.detach(), 200)[0]
        hmm = HMM.from_probabilities(stationary, [chain.transition], emission)
        _, held_out = hmm.sample(200, 10, torch.Generator().manual_seed(1))
        expected, errors = hmm.predict(held_out), []
        for sequences in (1000, 100_000):
            _, observations = hmm.sample(sequences, 4, torch.Generator().manual_seed(2))
            found = spectral_hmm(triples_of(observations, sliding=sliding), 3, 6)
            errors.append((found.predict(held_out) - expected).abs().sum(-1).mean().item())
        assert errors[1] < min(0.06, errors[0] / 3)

    def test_long_sequences(self):
        hmm = random_hmm(2, 5)
        _, observations = hmm.sample(2, 5000, torch.Generator().manual_seed(0))
        found, _ = spectral_hmm_of_moments(*moments(hmm), 2).log_probability(observations)
        torch.testing.assert_close(found, log_p(hmm, observations), rtol=1e-6, atol=1e-3)

    def test_filtering_begins_again_where_an_estimate_is_not_positive(self):
        one = torch.ones(1, dtype=F64)
        found = SpectralHMM(one, one, torch.tensor([[[1.2]], [[-0.2]]], dtype=F64), one)
        assert found.filter(torch.tensor([[0, 1, 0]])).flatten().tolist() == [1, 1, 1]
        assert found.predict(torch.tensor([[1]])).flatten().tolist() == [1, 0]
        assert found.log_probability(torch.tensor([[1], [0]]))[1].tolist() == [-1, 1]

    def test_a_rank_too_small_is_a_sentence(self):
        with pytest.raises(InputError, match=r"3 states: P_21, .* has rank 2 \(its singular values are"):
            spectral_hmm_of_moments(*moments(random_hmm(2, 4)), 3)
        with pytest.raises(InputError, match="rank 1"):
            spectral_hmm(torch.zeros(5, 3, dtype=torch.int64), 2, 2)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda t: spectral_hmm(t, 5, 4), "expected 1 to 4 states"),
            (lambda t: SpectralHMM(*OPERATORS).predict(t - 1), "observations hold -1: expected 0 to 2"),
            (lambda t: SpectralHMM(*OPERATORS).log_probability(t), "observations hold 3: expected 0 to 2"),
            (lambda t: spectral_hmm(t + 3, 2, 4), "symbols from 0 to 3"),
            (lambda t: spectral_hmm(t[:0], 2, 4), "0 triples"),
            (lambda t: triples_of(t[:, :2]), "sequences of 2 symbols"),
        ],
    )
    def test_wrong_input_is_a_sentence(self, call, message):
        with pytest.raises(InputError, match=message):
            call(torch.tensor([[0, 1, 2], [2, 1, 3]]))


def test_words_of_low_rank_emissions():
    one, two = torch.rand(3, 2), torch.rand(2, 5)
    observations = torch.tensor([[4, 0]])
    torch.testing.assert_close(words_of([one, two], observations)[0], (one @ two).T[[4, 0]])


def test_the_page_runs():
    """The blocks of docs/sequences.md: what is learned there comes near to what was sampled from."""
    names: dict = {}
    torch.manual_seed(0)
    sequences, tree = python_of("docs/sequences.md")
    exec(sequences, names)
    expected = names["truth"].predict(names["observations"])
    for model in (names["hmm"], names["spectral"]):
        assert (model.predict(names["observations"]) - expected).abs().sum(-1).mean() < 0.2
    assert all(after > before for before, after in itertools.pairwise(names["log_likelihoods"]))
    assert all(table.grad is not None for table in names["hmm"].parameters())
    assert names["words"].grad[1, 3:].abs().max() == 0  # beyond the end of a sentence of three words
    assert names["words"].grad[0].abs().min() > 0
    exec(tree, names)
    assert names["smaller"].states[1] == 2
    assert names["u"].shape == (3, 2)


def test_they_are_where_they_are_looked_for():
    assert lvpcfg.sequence.HMM is HMM
    assert lvpcfg.distributions.HMMDistribution is lvpcfg.sequence.HMMDistribution
