"""The textbook chain: forward scores word by word, in any semiring; backward scores by autograd.

    alpha_1 = initial * words_1
    alpha_t = (alpha_{t-1} T) * words_t          project and lift: T = F_1, or F_1 F_2 where it has low rank
    total   = sum over states of alpha_n * final

(Rabiner 1989; in low rank Cohen, Satta & Collins 2013, section 7.) A chain is the simplest grammar: every rule has a
word as its left child, and the cells that end with the sentence are all there is. Posteriors are derivatives of the
total by weights of one. In a max semiring they mark the best sequence of states, in a sampling semiring a random one.

Numbers are given as the semiring's `convert` takes them: logarithms, or ordinary numbers for `Signed`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.lanes import Map
from lvpcfg.chart.semirings import Log, Semiring, ones


@dataclass(frozen=True, eq=False)
class Chain:
    """A Markov chain over hidden states. Its transition is a product of matrices, [from, to]: [states, states] alone,
    or [states, rank] and [rank, states]; what it costs to go one word further is the size of its factors."""

    initial: Float[Tensor, "*size states"]  # of the values of a semiring, `size` is the first dimension
    factors: tuple[Float[Tensor, "*size _ _"], ...]
    final: Float[Tensor, "*size states"] | None = None  # of ending after a state; None: one

    @staticmethod
    def low_rank(
        initial: Float[Tensor, "states"],
        u: Float[Tensor, "rank states"],
        v: Float[Tensor, "rank states"],
        final: Float[Tensor, "states"] | None = None,
    ) -> "Chain":
        """T_ij = sum over r of u_ri v_rj."""
        return Chain(initial, (u.mT, v), final)

    @property
    def transition(self) -> Float[Tensor, "states states"]:
        """T."""
        product = self.factors[0]
        for factor in self.factors[1:]:
            product = product @ factor
        return product

    @property
    def multiplied_out(self) -> "Chain":
        """The same chain with T itself, for what is about steps between states one by one."""
        return Chain(self.initial, (self.transition,), self.final)

    def weight(self, before: Int[Tensor, "*steps"], after: Int[Tensor, "*steps"]) -> Float[Tensor, "*steps"]:
        """T at some steps."""
        if len(self.factors) == 1:
            return self.factors[0][before, after]
        u, v = self.factors
        return (u[before] * v.mT[after]).sum(-1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.initial, *self.factors, *(() if self.final is None else (self.final,)))

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Chain":
        last = 1 + len(self.factors)
        return Chain(tensors[0], tuple(tensors[1:last]), None if self.final is None else tensors[last])

    def change(self, function: Callable[[Tensor], Tensor]) -> "Chain":
        """The same chain with other values: `chain.change(safe_log)` for one of probabilities."""
        return self.with_tensors([function(tensor) for tensor in self.tensors])

    def to(self, dtype: torch.dtype) -> "Chain":
        return self.change(lambda tensor: tensor.to(dtype))

    @property
    def for_log_z(self) -> "Chain":
        """What is enough for log Z alone."""
        return self


def make_a_matrix(factors: Sequence[Tensor], rows: int, columns: int | None = None) -> bool:
    """Whether factors do: one, or two in low rank."""
    sizes = [rows, *(size for factor in factors for size in factor.shape)]
    if len(factors) not in (1, 2) or any(factor.dim() != 2 for factor in factors) or 0 in sizes:
        return False
    return sizes[:-1:2] == sizes[1::2] and columns in (None, sizes[-1])


def forward(
    semiring: Semiring,
    chain: Chain,
    words: Float[Tensor, "*pair batch n states"],
    weights: Float[Tensor, "size batch n states"] | None = None,
) -> Float[Tensor, "size batch n states"]:
    """alpha of every word; what stands beyond the end of a sentence is to be ignored.

    `words` holds the weight of each word under each state; `weights`, values of the semiring, multiply it.
    """
    chain, words = chain.change(semiring.convert), semiring.convert(words)
    if weights is not None:
        words = semiring.mul(words, weights)
    maps = [Map(factor.mT) for factor in chain.factors]
    alphas = [semiring.mul(chain.initial.unsqueeze(1), words[:, :, 0])]
    for word in words.unbind(2)[1:]:
        state = alphas[-1].unsqueeze(1)
        for linear in maps:
            state = linear(semiring, state)
        alphas.append(semiring.mul(state.squeeze(1), word))
    return torch.stack(alphas, 2)


def total(
    semiring: Semiring,
    chain: Chain,
    alpha: Float[Tensor, "size batch n states"],
    lengths: Int[Tensor, "batch"] | None = None,
) -> Float[Tensor, "size batch"]:
    """Of each sentence. `lengths` is given where some are shorter than n."""
    last = (
        alpha[:, :, -1] if lengths is None else alpha[:, torch.arange(len(lengths), device=alpha.device), lengths - 1]
    )
    return semiring.sum(last if chain.final is None else semiring.mul(last, semiring.convert(chain.final).unsqueeze(1)))


def log_partition(
    chain: Chain,
    words: Float[Tensor, "*pair batch n states"],
    lengths: Int[Tensor, "batch"] | None = None,
    semiring: Semiring = Log,
) -> Float[Tensor, "batch"]:
    """log Z of each sentence, or what else the semiring computes: entropy, the weight of the best sequence."""
    return semiring.unconvert(total(semiring, chain, forward(semiring, chain, words), lengths))


def marginals(
    chain: Chain,
    words: Float[Tensor, "*pair batch n states"],
    lengths: Int[Tensor, "batch"] | None = None,
    semiring: Semiring = Log,
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch n states"]]:
    """log Z, and the posteriors of the states of words; differentiable, and 0 for an impossible sentence.

    In the semiring `Max` they are 1 on the best sequence and 0 elsewhere, and so on a random one in `Sampled`.
    """
    again = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (words, *chain.tensors))
    with torch.enable_grad():
        weights = ones(semiring, words, *words.shape[-3:]).requires_grad_()
        log_z = semiring.unconvert(total(semiring, chain, forward(semiring, chain, words, weights), lengths))
        possible = torch.where(log_z > -torch.inf, log_z, 0).sum()
        (found,) = torch.autograd.grad(possible, [weights], create_graph=again)
    return (log_z if again else log_z.detach()), found[0]
