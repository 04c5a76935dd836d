"""Derivations from derivatives: in a max or a sampling semiring they are 1 where a derivation is, and 0 elsewhere."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.semirings import Semiring, ones
from lvpcfg.chart.textbook import CFG, Weights, inside


class MarkedChart:
    """A textbook chart with weights of one at the states of spans, and at the `terms` of a CP form if it has any.

    `values`, [size, batch], are what the semiring computes: in `Max` the best weight for each sentence, in `KMax` the k
    best ones. In `Sampled` every call of `derivations` draws new ones.
    """

    def __init__(
        self,
        semiring: Semiring,
        grammar: CFG,
        words: Float[Tensor, "batch n word_states"],
        lengths: Int[Tensor, "batch"] | None = None,
        terms: int = 0,
    ) -> None:
        (batch, self.length), states = words.shape[:2], grammar.root.shape[-1]
        with torch.enable_grad():

            def weights(*shape: int) -> Tensor:
                return ones(semiring, words, batch, *shape).requires_grad_()

            self.top = weights(self.length, self.length, states)
            self.bottom = self.top if grammar.closure is None else weights(self.length, self.length, states)
            self.terms = {
                width: weights(self.length - width + 1, width - 1, terms)
                for width in range(2, self.length + 1)
                if terms
            }
            below = None if grammar.closure is None else self.bottom
            detached = grammar.change(torch.Tensor.detach)
            self._values, _ = inside(semiring, detached, words.detach(), lengths, Weights(self.top, below, self.terms))
        self.values = self._values.detach()
        self._lengths = [self.length] * batch if lengths is None else lengths.tolist()

    def derivations(self, number: int = 0, last: bool = False) -> list[Skeleton | None]:
        """For each sentence the derivation whose weight is `values[number]`; None where there is none.

        The `last` call frees the chart.
        """
        layers = [self.top] if self.bottom is self.top else [self.top, self.bottom]
        with torch.enable_grad():
            value = self._values[number]
            total = torch.where(value > -torch.inf, value, 0).sum()
        found = torch.autograd.grad(total, [*layers, *self.terms.values()], retain_graph=not last, allow_unused=True)
        marks = [[] if gradient is None else gradient.sum(0).nonzero().tolist() for gradient in found]
        tops, bottoms = ({(b, i, j): state for b, i, j, state in layer} for layer in (marks[0], marks[len(layers) - 1]))
        terms = {
            (b, i, i + width - 1): term
            for width, some in zip(self.terms, marks[len(layers) :], strict=True)
            for b, i, _, term in some
        }
        return [self._derivation(b, length, tops, bottoms, terms) for b, length in enumerate(self._lengths)]

    @staticmethod
    def _derivation(
        sentence: int,
        length: int,
        tops: dict[tuple[int, int, int], int],
        bottoms: dict[tuple[int, int, int], int],
        terms: dict[tuple[int, int, int], int],
    ) -> Skeleton | None:
        """In preorder; the marks are by sentence, first word and last word."""
        nodes: Skeleton = []
        waiting = [(0, length)] if (sentence, 0, length - 1) in tops else []
        while waiting:
            start, width = waiting.pop()
            span = sentence, start, start + width - 1
            split = next((left for left in range(width - 1, 0, -1) if (sentence, start, start + left - 1) in tops), 0)
            nodes.append(Node(start, width, tops[span], bottoms[span], split, terms.get(span)))
            if split:
                waiting += [(start + split, width - split), (start, split)]
        return nodes or None
