"""Hidden Markov models as modules, dense or with low-rank matrices; Baum-Welch by gradients.

    p(j | i) = T_ij                     or  sum over r of p(r | i) p(j | r)
    p(x | i) = O_ix                     or  sum over q of p(q | i) p(x | q)

In low rank the rank index is one more hidden variable: every factor is a table of conditional probabilities, EM and
gradients train it as they train a dense one, and a step of forward-backward is linear in the number of states.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lvpcfg.errors import InputError
from lvpcfg.sequence.chain import Chain, make_a_matrix
from lvpcfg.sequence.distribution import HMMDistribution
from lvpcfg.structures import checked_lengths

SEQUENCES = 4096  # at once in EM


class HMM(nn.Module):
    """An HMM. Each parameter is a table of logits, whose rows are distributions.

    `transition` and `emission` are the factors of the two matrices: one, or two in low rank.
    """

    def __init__(
        self,
        states: int,
        symbols: int,
        rank: int | None = None,
        emission_rank: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """At random. `rank` is that of the transition, None if it is dense; `emission_rank` that of the emission."""
        super().__init__()
        expect_counts(states=states, symbols=symbols, rank=rank, emission_rank=emission_rank)

        def tables(rows: int, columns: int, rank: int | None) -> nn.ParameterList:
            shapes = [(rows, columns)] if rank is None else [(rows, rank), (rank, columns)]
            return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)

        self.initial = nn.Parameter(torch.randn(states, generator=generator))
        self.transition = tables(states, states, rank)
        self.emission = tables(states, symbols, emission_rank)

    @classmethod
    def from_probabilities(
        cls, initial: Float[Tensor, "states"], transition: list[Tensor], emission: list[Tensor]
    ) -> "HMM":
        """Of tables whose rows sum to 1: the factors of both matrices, one of each if they are dense."""
        tables = [initial, *transition, *emission]
        states = len(initial) if initial.dim() == 1 else 0
        if not make_a_matrix(transition, states, states) or not make_a_matrix(emission, states):
            raise InputError(
                f"the tables of an HMM have the shapes {[tuple(table.shape) for table in tables]}: expected [states], "
                "[states, states] or [states, rank] and [rank, states], and [states, symbols] or two factors of it."
            )
        rank, emission_rank = (None if len(some) == 1 else some[0].shape[1] for some in (transition, emission))
        hmm = cls(len(initial), emission[-1].shape[1], rank, emission_rank).to(initial)
        with torch.no_grad():
            for parameter, table in zip(hmm._tables(), tables, strict=True):
                parameter.copy_(table.log())
        return hmm

    def _tables(self) -> list[nn.Parameter]:
        return [self.initial, *self.transition, *self.emission]

    def probabilities(self) -> tuple[Chain, list[Tensor]]:
        """The chain, and the factors of the emission matrix."""
        return self._split([table.softmax(-1) for table in self._tables()])

    def _split(self, tables: list[Tensor]) -> tuple[Chain, list[Tensor]]:
        last = 1 + len(self.transition)
        return Chain(tables[0], tuple(tables[1:last])), tables[last:]

    def forward(
        self, observations: Int[Tensor, "batch length"], lengths: Int[Tensor, "batch"] | None = None
    ) -> HMMDistribution:
        """The state sequences behind sequences of symbols; its partition is log p(symbols)."""
        chain, emission = self.probabilities()
        return HMMDistribution(chain, words_of(emission, observations), lengths)

    def em(
        self,
        observations: Int[Tensor, "sequences length"],
        lengths: Sequence[int] | Int[Tensor, "sequences"] | None = None,
        iterations: int = 50,
    ) -> list[float]:
        """Baum-Welch: a parameter times its derivative is its expected count.

        Returns the log-likelihood before each iteration.
        """
        tables = [table.detach().softmax(-1) for table in self._tables()]
        lengths = checked_lengths(lengths, len(observations), observations.shape[-1], observations.device)
        likelihoods = []
        for _ in range(iterations):
            tables = [table.detach().requires_grad_() for table in tables]
            likelihood = 0.0
            for part in torch.arange(len(observations), device=observations.device).split(SEQUENCES):
                chain, emission = self._split(tables)
                words = words_of(emission, observations[part])
                log_z = HMMDistribution(chain, words, None if lengths is None else lengths[part]).partition
                torch.where(log_z > -torch.inf, log_z, 0).sum().backward()
                likelihood += float(log_z.detach().sum())
            likelihoods.append(likelihood)
            tables = [conditional(table.detach(), table.grad) for table in tables]
        with torch.no_grad():
            for parameter, table in zip(self._tables(), tables, strict=True):
                parameter.copy_(table.log())
        return likelihoods

    @torch.no_grad()
    def predict(self, observations: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length symbols"]:
        """p(next symbol | symbols so far), after each of them. After an impossible symbol, the states start again."""
        chain, emission = self.probabilities()
        state, states = chain.initial, []
        for word in words_of(emission, observations).unbind(1):
            found = state * word
            total = found.sum(-1, keepdim=True)
            state = torch.where(total > 0, found / torch.where(total > 0, total, 1), chain.initial)
            for factor in chain.factors:
                state = state @ factor
            states.append(state)
        following = torch.stack(states, 1)
        for factor in emission:
            following = following @ factor
        return following

    @torch.no_grad()
    def sample(
        self, sequences: int, length: int, generator: torch.Generator | None = None
    ) -> tuple[Int[Tensor, "sequences length"], Int[Tensor, "sequences length"]]:
        """Sequences drawn at random: states and symbols."""
        expect_counts(sequences=sequences, length=length)
        chain, emission = self.probabilities()

        def drawn(rows: Tensor, factors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
            for factor in factors:
                rows = factor[rows.multinomial(1, generator=generator).squeeze(1)]
            return rows

        rows, states, symbols = chain.initial.expand(sequences, -1), [], []
        for _ in range(length):
            states.append(rows.multinomial(1, generator=generator).squeeze(1))
            one = torch.nn.functional.one_hot(states[-1], len(chain.initial)).to(rows.dtype)
            symbols.append(drawn(one, emission).multinomial(1, generator=generator).squeeze(1))
            rows = drawn(one, chain.factors)
        return torch.stack(states, 1), torch.stack(symbols, 1)


def words_of(emission: list[Tensor], observations: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length states"]:
    """The columns of the emission matrix that belong to symbols."""
    expect_symbols(observations, emission[-1].shape[1])
    words = emission[-1].mT[observations]
    return words if len(emission) == 1 else words @ emission[0].mT


def expect_symbols(observations: Tensor, symbols: int) -> None:
    """[batch, length], and whole numbers from 0, even beyond the end of a sequence."""
    if observations.dim() != 2 or observations.is_floating_point() or not observations.numel():
        shape, dtype = tuple(observations.shape), str(observations.dtype).removeprefix("torch.")
        raise InputError(f"observations are {dtype} of the shape {shape}: expected whole numbers, [batch, length].")
    for found in (int(observations.min()), int(observations.max())):
        if not 0 <= found < symbols:
            raise InputError(
                f"observations hold {found}: expected 0 to {symbols - 1}, even beyond the end of a sequence."
            )


def expect_counts(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or number < 1):
            raise InputError(f"{name} is {number!r}: expected 1, 2, ...")


def conditional(table: Tensor, gradient: Tensor | None) -> Tensor:
    """Expected counts as distributions; rows that are not expected at all stay as they are."""
    assert gradient is not None
    counts = table * gradient
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / torch.where(total > 0, total, 1), table)
