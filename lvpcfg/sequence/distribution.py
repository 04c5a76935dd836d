"""The distribution over the state sequences of a batch of sentences, with torch-struct's names.

    log p(states | sentence) = log(initial * words * T * words * T ... * final) - log Z

Sequences of states are whole numbers, -1 beyond the end of a sentence and all along one that is impossible. Log Z,
marginals and log_prob of a chain in low rank cost what its factors cost; all else multiplies its transition out.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import register_kl

from lvpcfg.chart.semirings import KMax, Log, Max, Semiring, Signed, ones, require_nonnegative, safe_log
from lvpcfg.errors import InputError
from lvpcfg.sequence import chain as textbook
from lvpcfg.sequence.chain import Chain, forward, make_a_matrix, total
from lvpcfg.sequence.fast import log_partition
from lvpcfg.sequence.marginals import marginals
from lvpcfg.structures import Structures, checked_lengths, expect_number, exponentials, largest, remembered

States = Int[Tensor, "batch length"]


class HMMDistribution(Structures):
    """The state sequences of a batch of sentences under one chain.

    `words` is the weight of each word under each state, an ordinary number like those of the chain. `lengths` are
    needed if some sentences are shorter. The partition and log_prob have first derivatives, all other numbers
    derivatives of any order.
    """

    _what = "sequences"
    _total = staticmethod(textbook.log_partition)

    def __init__(
        self,
        chain: Chain,
        words: Float[Tensor, "batch length states"],
        lengths: Sequence[int] | Tensor | None = None,
        constant: Float[Tensor, "batch"] | None = None,
    ) -> None:
        _expect_fitting(chain, words)
        super().__init__(chain, words.transpose(0, 1), lengths, constant)

    @classmethod
    def from_log_potentials(
        cls,
        words: Float[Tensor, "batch length states"],
        transition: Float[Tensor, "states states"],
        initial: Float[Tensor, "states"] | None = None,
        final: Float[Tensor, "states"] | None = None,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> "HMMDistribution":
        """A linear-chain CRF: scores of words, and of steps [from, to]; -inf for what is impossible."""
        initial = words.new_zeros(words.shape[-1:]) if initial is None else initial
        _expect_fitting(Chain(initial, (transition,), final), words)
        lengths = checked_lengths(lengths, words.shape[0], words.shape[1], words.device)
        given = [initial, transition] if final is None else [initial, transition, final]
        most = [largest(x.flatten(), 0) for x in given]
        (leaf, *numbers), constant = exponentials(
            words, *(x - one for x, one in zip(given, most, strict=True)), lengths=lengths
        )
        sizes = torch.as_tensor(words.shape[1] if lengths is None else lengths, device=words.device)
        constant = constant + sum(most[:1] + most[2:]) + (sizes - 1) * most[1]
        return cls(Chain(numbers[0], (numbers[1],), *numbers[2:]), leaf, lengths, constant)

    @remembered
    def marginals(self) -> Float[Tensor, "batch length states"]:
        """Posteriors of the states of words, 0 beyond the end; differentiable."""
        words = self.leaf.transpose(0, 1)
        if not self._differentiable:
            return marginals(self.form, words, self.lengths)[1]
        if any(bool((tensor < 0).any()) for tensor in self._everything()):
            return textbook.marginals(self.form, words, self.lengths, Signed)[1]
        return textbook.marginals(self.form.change(safe_log), safe_log(words), self.lengths)[1]

    @property
    def max_marginal(self) -> States:
        """The most probable state of each word, which minimises the expected number of errors (Goodman 1996)."""
        found = self.marginals.detach()
        return self._where_there(found.argmax(-1), found.sum(-1) > 0)

    @remembered
    def argmax(self) -> States:
        """The best sequence of each sentence (Viterbi)."""
        require_nonnegative(self._numbers(), "argmax")
        return self._from_the_end(Max, 1, lambda scores: scores)[0]

    def topk(self, k: int) -> Int[Tensor, "k batch length"]:
        """The k best sequences of each sentence, best first; -1 all along where there are fewer."""
        expect_number("topk", k)
        require_nonnegative(self._numbers(), "topk")
        with torch.no_grad():
            chain, words = self._in_logarithms()
        length, batch, states = self.leaf.shape
        there_are = min(k, states**length)  # what is asked for beyond these costs nothing
        semiring, found = KMax(there_are), []
        with torch.enable_grad():
            weights = ones(semiring, words, *words.shape).requires_grad_()
            scores = total(semiring, chain, forward(semiring, chain, words, weights), self.lengths)
            for score in scores.unbind(0):  # the derivative of each marks its sequence
                best = torch.where(score > -torch.inf, score, 0).sum()
                (marks,) = torch.autograd.grad(best, [weights], retain_graph=True)
                found.append(self._where_there(marks.sum(0).argmax(-1), score.unsqueeze(1) > -torch.inf))
        none = torch.full((k - there_are, batch, length), -1, device=words.device)
        return torch.cat([torch.stack(found), none])

    def sample(
        self, samples: int | Sequence[int] = 1, generator: torch.Generator | None = None
    ) -> Int[Tensor, "samples batch length"]:
        """Sequences drawn at random, independently: from the last word back, each state given the one after it."""
        number = self._samples(samples)

        def perturbed(scores: Tensor) -> Tensor:  # by Gumbel numbers: the largest is a random one
            uniform = torch.rand(scores.shape, dtype=scores.dtype, device=scores.device, generator=generator)
            return scores - (-uniform.log()).log()

        return self._from_the_end(Log, number, perturbed)

    @torch.no_grad()
    def _from_the_end(self, semiring: Semiring, number: int, scored: Callable[[Tensor], Tensor]) -> Tensor:
        """Sequences from the last word back: of each word the largest of `scored(what comes before, and the step to
        the state after it)`."""
        chain, words = self._in_logarithms()
        alpha = forward(semiring, chain, words)
        possible = total(semiring, chain, alpha, self.lengths)[0].unsqueeze(1) > -torch.inf
        before, backwards = alpha[0].transpose(0, 1), chain.transition.mT.contiguous()
        length, batch, states = before.shape
        last = torch.full((batch,), length - 1, device=words.device) if self.lengths is None else self.lengths - 1
        end = before.new_zeros(states) if chain.final is None else chain.final
        after, found = torch.zeros(number, batch, dtype=torch.int64, device=words.device), []
        for place in reversed(range(length)):
            step = torch.where((last == place).unsqueeze(1), end, backwards[after])
            after = scored(before[place] + step).argmax(-1)
            found.append(after)
        return self._where_there(torch.stack(found[::-1], -1), possible)

    def log_prob(self, states: Int[Tensor, "*samples batch length"]) -> Float[Tensor, "*samples batch"]:
        """log p(states | sentence) of a sequence for each sentence, or of some; differentiable. What stands beyond the
        end is ignored, and -1 before it has no probability."""
        length, batch, count = self.leaf.shape
        whole = not states.is_floating_point() and bool(((states >= -1) & (states < count)).all())
        if states.shape[-2:] != (batch, length) or not whole:
            raise InputError(
                f"states of the shape {tuple(states.shape)}: expected [..., {batch}, {length}], whole numbers below "
                f"{count}."
            )
        there, state = self._there(), states.clamp_min(0)
        word = self.leaf.transpose(0, 1).expand(*states.shape, count).gather(-1, state.unsqueeze(-1)).squeeze(-1)
        terms = safe_log(torch.where(there, torch.where(states >= 0, word, 0), 1).double())
        steps = self.form.weight(state[..., :-1], state[..., 1:])
        steps = safe_log(torch.where(there[:, 1:], steps, 1).double())
        weight = terms.sum(-1) + steps.sum(-1) + safe_log(self.form.initial[state[..., 0]].double())
        if self.form.final is not None:
            last = state.gather(-1, (there.sum(-1, keepdim=True) - 1).expand(*states.shape[:-1], 1)).squeeze(-1)
            weight = weight + safe_log(self.form.final[last].double())
        return torch.where(weight > -torch.inf, weight - self._log_z(), -torch.inf)

    def _log_z(self) -> Tensor:
        return log_partition(self.form, self.leaf.transpose(0, 1), self.lengths)

    def _numbers(self) -> list[Tensor]:
        return [self.leaf, *self.form.multiplied_out.tensors]

    def _textbook(self) -> tuple[Chain, Tensor]:
        return self.form.to(torch.float64).multiplied_out, self.leaf.transpose(0, 1).double()

    def _there(self) -> Tensor:
        """Which words are before the end, [batch, length]."""
        place = torch.arange(len(self.leaf), device=self.leaf.device)
        if self.lengths is None:
            return torch.ones_like(place, dtype=torch.bool).expand(self.leaf.shape[1], -1)
        return place < self.lengths.unsqueeze(1)

    def _where_there(self, states: Tensor, possible: Tensor) -> Tensor:
        return torch.where(self._there() & possible, states, -1)


def _expect_fitting(chain: Chain, words: Tensor) -> None:
    tensors, states = (*chain.tensors, words), words.shape[-1:]
    vectors = [chain.initial] if chain.final is None else [chain.initial, chain.final]
    fit = words.dim() == 3 and 0 not in words.shape and all(vector.shape == states for vector in vectors)
    if not fit or not make_a_matrix(chain.factors, *states, *states):
        raise InputError(
            "the initial states, the factors of the transition, the final weights if there are any, and the words of a "
            f"chain have the shapes {[tuple(x.shape) for x in tensors]}: expected [states], [states, states] or "
            "[states, rank] and [rank, states], [states], and [batch, length, states], none of them 0."
        )
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not words.is_floating_point():
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InputError(f"a chain and its words are {names}: expected one floating type.")


register_kl(HMMDistribution, HMMDistribution)(HMMDistribution.kl)
