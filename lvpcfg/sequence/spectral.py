"""Spectral HMMs: from the moments of triples of symbols, without EM (Hsu, Kakade & Zhang 2009).

    [P_1]_i = p(x1 = i),   [P_21]_ij = p(x2 = i, x1 = j),   [P_3x1]_ij = p(x3 = i, x2 = x, x1 = j)
    U = top m left singular vectors of P_21; with m = n no SVD is needed, U = I
    b_1 = U^T P_1,   b_inf = (P_21^T U)^+ P_1,   B_x = (U^T P_3x1) (U^T P_21)^+
    p(x_1 .. x_n) = b_inf^T B_{x_n} ... B_{x_1} b_1

The estimates are right up to a change of basis of the states, so that operators and estimated probabilities may be
negative. Triples are those that sequences begin with, or for a stationary chain those of every place (`sliding`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lvpcfg.chart.fast.potentials import LOG2, log2_of_largest
from lvpcfg.chart.semirings import safe_log
from lvpcfg.errors import InputError
from lvpcfg.sequence.hmm import expect_symbols
from lvpcfg.structures import checked_lengths

TRIPLES = 1 << 16  # at once
SHOWN = 12  # singular values


@dataclass(frozen=True, eq=False)
class SpectralHMM:
    """The observable operators of an HMM."""

    b_1: Float64[Tensor, "states"]
    b_inf: Float64[Tensor, "states"]
    operators: Float64[Tensor, "symbols states states"]  # B_x
    singular_values: Float64[Tensor, "_"]  # of P_21

    def log_probability(
        self, observations: Int[Tensor, "batch length"]
    ) -> tuple[Float64[Tensor, "batch"], Float64[Tensor, "batch"]]:
        """log |p(x_1 .. x_n)|, and the sign of the estimate."""
        expect_symbols(observations, len(self.operators))
        state, exponent = self.b_1.expand(len(observations), -1), self.b_1.new_zeros(len(observations))
        for symbol in observations.unbind(1):
            state = self._apply(symbol, state)
            scale = log2_of_largest(state, -1).floor_()
            state, exponent = state * torch.exp2(-scale).unsqueeze(1), exponent + scale
        probability = state @ self.b_inf
        return safe_log(probability.abs()) + LOG2 * exponent, probability.sign()

    def filter(self, observations: Int[Tensor, "batch length"]) -> Float64[Tensor, "batch length states"]:
        """b_{t+1} = B_x b_t / b_inf^T B_x b_t, after each symbol. Where the estimate of a symbol's probability is not
        above zero it says nothing about the states, and they begin again with b_1."""
        expect_symbols(observations, len(self.operators))
        state, states = self.b_1.expand(len(observations), -1), []
        for symbol in observations.unbind(1):
            following = self._apply(symbol, state)
            probability = (following @ self.b_inf).unsqueeze(1)
            state = torch.where(probability > 0, following / torch.where(probability > 0, probability, 1), self.b_1)
            states.append(state)
        return torch.stack(states, 1)

    def predict(self, observations: Int[Tensor, "batch length"]) -> Float64[Tensor, "batch length symbols"]:
        """p(next symbol | symbols so far), after each of them; negative estimates are taken as zero."""
        by_symbol = torch.einsum("xij,i->xj", self.operators, self.b_inf)
        found = (self.filter(observations) @ by_symbol.mT).clamp_min(0)
        total = found.sum(-1, keepdim=True)
        uniform = torch.full_like(found, 1 / found.shape[-1])
        return torch.where(total > 0, found / torch.where(total > 0, total, 1), uniform)

    def _apply(self, symbol: Int[Tensor, "batch"], state: Tensor) -> Tensor:
        return (self.operators[symbol] @ state.unsqueeze(-1)).squeeze(-1)


def triples_of(
    observations: Int[Tensor, "sequences length"],
    lengths: Sequence[int] | Int[Tensor, "sequences"] | None = None,
    sliding: bool = False,
) -> Int[Tensor, "triples 3"]:
    """The first three symbols of each sequence of three or more, or every three in a row."""
    if observations.shape[1] < 3:
        raise InputError(f"sequences of {observations.shape[1]} symbols: expected some of 3 or more.")
    lengths = checked_lengths(lengths, len(observations), observations.shape[1], observations.device)
    windows = observations.unfold(1, 3, 1)
    ends = torch.arange(3, observations.shape[1] + 1, device=observations.device)
    there = ends.expand(len(observations), -1)
    there = there <= (observations.shape[1] if lengths is None else lengths.unsqueeze(1))
    return windows[there] if sliding else windows[:, 0][there[:, 0]]


def spectral_hmm(triples: Int[Tensor, "triples 3"], states: int, symbols: int) -> SpectralHMM:
    """The operators of an HMM of `states` hidden states, from triples of symbols numbered from 0."""
    if not 1 <= states <= symbols:
        raise InputError(f"{states} states and {symbols} symbols: expected 1 to {symbols} states.")
    if not len(triples) or int(triples.min()) < 0 or int(triples.max()) >= symbols:
        raise InputError(f"{len(triples)} triples: expected one or more, of symbols from 0 to {symbols - 1}.")
    one = torch.ones(len(triples), dtype=torch.float64, device=triples.device) / len(triples)
    first, second = triples[:, 0], triples[:, 1]
    p_1 = one.new_zeros(symbols).index_add_(0, first, one)
    p_21 = one.new_zeros(symbols * symbols).index_add_(0, second * symbols + first, one).view(symbols, symbols)

    def p_3x1(u: Tensor, inverse: Tensor) -> Tensor:
        """U^T P_3x1 times a matrix, for all x, without the moments themselves: n^3 numbers."""
        operators = one.new_zeros(symbols, states * states)
        for part in triples.split(TRIPLES):
            x_1, x_2, x_3 = part.unbind(1)
            outer = u[x_3].unsqueeze(2) * inverse[x_1].unsqueeze(1)
            operators.index_add_(0, x_2, outer.flatten(1) / len(triples))
        return operators.view(symbols, states, states)

    return _operators(p_1, p_21, p_3x1, states)


def spectral_hmm_of_moments(
    p_1: Float[Tensor, "symbols"],
    p_21: Float[Tensor, "symbols symbols"],
    p_3x1: Float[Tensor, "symbols symbols symbols"],
    states: int,
) -> SpectralHMM:
    """The same from moments; `p_3x1` by x2, x3, x1."""
    p_1, p_21, p_3x1 = (moment.to(torch.float64) for moment in (p_1, p_21, p_3x1))
    return _operators(p_1, p_21, lambda u, inverse: u.mT @ p_3x1 @ inverse, states)


def _operators(p_1: Tensor, p_21: Tensor, p_3x1: Callable[[Tensor, Tensor], Tensor], states: int) -> SpectralHMM:
    symbols = len(p_1)
    if states == symbols:
        u, values = torch.eye(symbols, dtype=torch.float64, device=p_21.device), torch.linalg.svdvals(p_21)
    else:
        u, values, _ = torch.linalg.svd(p_21)
        u = u[:, :states]
    rank = int((values > values[0] * symbols * torch.finfo(torch.float64).eps).sum())
    if rank < states:
        shown = ", ".join(f"{value:.2g}" for value in values[:SHOWN].tolist()) + (", ..." if symbols > SHOWN else "")
        raise InputError(
            f"{states} states: P_21, the table of pairs of neighbouring symbols, has rank {rank} (its singular values "
            f"are {shown}); expected at most {rank}, or more data."
        )
    seen = u.mT @ p_21  # [states, symbols]
    inverse = torch.linalg.inv(p_21) if states == symbols else torch.linalg.pinv(seen)  # [symbols, states]
    return SpectralHMM(u.mT @ p_1, inverse.mT @ p_1, p_3x1(u, inverse), values)
