"""Forward and backward scores of chains by scaled sums, with a backward pass written by hand.

    alpha_t = (alpha_{t-1} T) * words_t * 2^-e_t          e_t: of the largest state of the word
    beta_n  = final / Z,   beta_{t-1} = T (beta_t * words_t * 2^-e_t)

so that alpha * beta is the posterior of a state. Words stand one after the other by place, longest sentence first: at
each step those that go on are the first of the last step, there is no padding, and the expected transitions of all
words are one product of two matrices. What floats cannot hold is found and computed again as in `chart/fast/
partition.py`, whose argument holds here as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lvpcfg.chart.fast import partition
from lvpcfg.chart.fast.logarithms import LogChart
from lvpcfg.chart.fast.partition import NARROW, Derivatives, Problem, Scores
from lvpcfg.chart.fast.potentials import LOG2, log2_of_largest
from lvpcfg.chart.semirings import safe_log
from lvpcfg.chart.textbook import Weights
from lvpcfg.sequence import chain as textbook
from lvpcfg.sequence.chain import Chain


def log_partition(
    chain: Chain, words: Float[Tensor, "batch n states"], lengths: Int[Tensor, "batch"] | None = None
) -> Float64[Tensor, "batch"]:
    """log Z of each sentence (log |Z| where parameters are signed); differentiable once by the words and the chain.

    A parameter times its derivative is its expected count, and a word's weight times its derivative is the posterior
    of the state. `lengths` is given where some sentences are shorter than n.
    """
    return partition.differentiable(ChainProblem(chain, words.transpose(0, 1), lengths))[0]


@dataclass(frozen=True, eq=False)
class ChainProblem(Problem):
    """The sentences of a batch under a chain."""

    form: Chain  # type: ignore[assignment]

    def sentences_at_once(self) -> int:
        return max(1, self.leaf.shape[1])  # what a chain keeps is as large as the words

    def chart(self, level: str) -> Scores:
        if level == NARROW:
            return Forward(self.form, self.leaf, self.lengths)
        chart = Forward if level == partition.WIDE else LogChain
        return chart(self.form.to(torch.float64), self.leaf.to(torch.float64), self.lengths)

    def outside(self, chart: Scores, gradient: Float[Tensor, "batch"], parameters: bool = False) -> Derivatives:
        if isinstance(chart, Forward):
            return Backward(chart, gradient, parameters)
        return super().outside(chart, gradient, parameters)

    def overflowed(self, outside: Derivatives) -> Bool[Tensor, "batch"]:
        return ~outside.finite if isinstance(outside, Backward) else super().overflowed(outside)


class Places:
    """Where the words of a batch stand, one after the other: all first words, all second words, ..., those of the
    longest sentence first."""

    def __init__(self, n: int, batch: int, lengths: Int[Tensor, "batch"] | None, device: torch.device) -> None:
        sizes = np.full(batch, n) if lengths is None else lengths.cpu().numpy()
        order = np.argsort(-sizes, kind="stable")
        there = np.arange(sizes.max())[:, None] < sizes[order]  # [step, rank]
        self.active: list[int] = there.sum(1).tolist()  # how many sentences go on
        first = np.cumsum([0, *self.active])
        self.first: list[int] = first.tolist()
        step, rank = there.nonzero()
        last = np.empty_like(order)
        last[order] = first[sizes[order] - 1] + np.arange(batch)

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(device)

        self.sentence = tensor(order[rank])
        self.words = tensor(order[rank] * n + step)  # in [batch, n]
        self.last, self.order = tensor(last), tensor(order)
        self.before = tensor((first[step - 1] + rank)[step > 0])

    def rows(self, step: int) -> slice:
        return slice(self.first[step], self.first[step + 1])


class Forward:
    """Forward scores of the sentences of a batch; arguments are those of `Chart`."""

    @torch.no_grad()
    def __init__(
        self,
        chain: Chain,
        leaf: Float[Tensor, "n batch states"],
        lengths: Int[Tensor, "batch"] | None = None,
    ) -> None:
        self.chain, self.leaf, self.lengths = chain, leaf, lengths
        n, batch, states = leaf.shape
        self.places = places = Places(n, batch, lengths, leaf.device)
        self.word = leaf.transpose(0, 1).reshape(-1, states).index_select(0, places.words)  # [words, states]
        self.predicted, self.alpha = torch.empty_like(self.word), torch.empty_like(self.word)  # before, after the word
        self.scale = self.word.new_empty(len(self.word), 1)  # 2^-e
        least = math.log2(torch.finfo(leaf.dtype).tiny)
        exponents = []
        for step, active in enumerate(places.active):
            rows = places.rows(step)
            predicted, alpha = self.predicted[rows], self.alpha[rows]
            if step:
                x = self.alpha[places.first[step - 1] :][:active]
                for factor in chain.factors[:-1]:
                    x = x @ factor
                torch.matmul(x, chain.factors[-1], out=predicted)
            else:
                predicted.copy_(chain.initial)
            torch.mul(predicted, self.word[rows], out=alpha)
            exponent = log2_of_largest(alpha, -1).floor_().clamp_(least + 2, -least)
            self.scale[rows] = torch.exp2(-exponent).unsqueeze(1)
            alpha.mul_(self.scale[rows])
            exponents.append(exponent)
        end = self.alpha.index_select(0, places.last)
        end = end if chain.final is None else end * chain.final
        self.total = end.sum(-1, dtype=torch.float64)
        exponent = torch.cat(exponents).to(torch.float64)
        exponent = self.total.new_zeros(batch).index_add_(0, places.sentence, exponent)
        self.sign = self.total.sign()
        self.log_z = safe_log(self.total.abs()) + LOG2 * exponent

    def near_underflow(self) -> bool:
        """It is not asked: the backward pass, which shows it, costs no more than to look at all numbers."""
        return True

    @cached_property
    def backward(self) -> tuple[Float[Tensor, "words states"], Float[Tensor, "words states"]]:
        """Backward scores times 2^-e, and those times the word."""
        chain, places, word = self.chain, self.places, self.word
        scaled, after = torch.empty_like(word), torch.empty_like(word)
        end = (1 / self.total).to(word.dtype).index_select(0, places.order).unsqueeze(1)
        end = end.expand(-1, word.shape[1]) if chain.final is None else end * chain.final
        going_on = 0
        for step in reversed(range(len(places.active))):
            rows = places.rows(step)
            beta = scaled[rows]
            if going_on:
                x = after[places.rows(step + 1)]
                for factor in reversed(chain.factors[1:]):
                    x = x @ factor.mT
                torch.matmul(x, chain.factors[0].mT, out=beta[:going_on])
            beta[going_on:] = end[going_on : len(beta)]
            beta.mul_(self.scale[rows])
            torch.mul(beta, word[rows], out=after[rows])
            going_on = len(beta)
        return scaled, after

    def in_place(self, values: Float[Tensor, "words states"]) -> Float[Tensor, "n batch states"]:
        """Of every word where it stands in its sentence; 0 beyond the end."""
        n, batch, states = self.leaf.shape
        found = values.new_zeros(batch * n, states).index_copy_(0, self.places.words, values)
        return found.view(batch, n, states).transpose(0, 1)


class Backward:
    """The derivative of log Z, weighted by a number for each sentence; attributes are those of `Outside`."""

    @torch.no_grad()
    def __init__(self, forward: Forward, gradient: Float[Tensor, "batch"], parameters: bool = False) -> None:
        self.forward, self.gradient, places = forward, gradient.to(forward.word.dtype), forward.places
        self.scaled, self.after = forward.backward
        self.by_word = self.gradient.index_select(0, places.sentence).unsqueeze(1)
        wrong = (~self.scaled.sum(-1).isfinite()).to(torch.float64)  # the sum is not finite, if one of them is not
        self.finite = torch.zeros_like(forward.total).index_add_(0, places.sentence, wrong) == 0
        tensors = forward.chain.tensors
        self.tensors: list[Tensor | None] = self._parameters() if parameters else [None] * len(tensors)

    @cached_property
    def leaf(self) -> Float[Tensor, "n batch states"]:
        return self.forward.in_place((self.forward.predicted * self.scaled).mul_(self.by_word))

    def _parameters(self) -> list[Tensor | None]:
        forward, chain, places = self.forward, self.forward.chain, self.forward.places
        first = places.first[1]
        inputs = [forward.alpha.index_select(0, places.before)]
        for factor in chain.factors[:-1]:
            inputs.append(inputs[-1] @ factor)
        output = self.after[first:] * self.by_word[first:]
        found: list[Tensor | None] = []
        for factor, x in zip(reversed(chain.factors), reversed(inputs), strict=True):
            found.append(x.mT @ output)
            output = output @ factor.mT if len(found) < len(inputs) else output
        initial = (self.after[:first] * self.by_word[:first]).sum(0)
        tensors = [initial, *reversed(found)]
        if chain.final is not None:
            end = forward.alpha.index_select(0, places.last)
            tensors.append((end * (self.gradient / forward.total).to(end.dtype).unsqueeze(1)).sum(0))
        return tensors


class LogChain(LogChart):
    """Chains that even float64 cannot hold: the textbook chain, by log-sum-exp and with autograd."""

    def _total(self, tensors: Sequence[Tensor], leaf: Tensor, weights: Weights | None = None) -> Tensor:
        chain = self.form.with_tensors(tensors).change(safe_log)
        return textbook.log_partition(chain, safe_log(leaf.transpose(0, 1)), self.lengths)
