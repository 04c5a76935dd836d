"""Chains of unary rules in the max-times algebra: the best way from a state, or a symbol, down to another."""

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.chart.semirings import safe_log
from lvpcfg.grammar.grammar import Grammar


class Chains:
    """`step` is the log-probability of one unary rule between two states, or two symbols.

    In a `closed` grammar a rule is a chain from end to end: it is used once at the most, and what is between its ends
    is unknown.
    """

    def __init__(self, step: Float[Tensor, "n n"], closed: bool) -> None:
        self.step, self.closed = step, closed
        self.best = torch.where(torch.eye(len(step), dtype=torch.bool, device=step.device), 0.0, -torch.inf).to(step)
        for _ in range(1 if closed else len(step)):  # one more rule at the head of every chain, until none gets better
            longer = torch.stack([(row.unsqueeze(1) + self.best).amax(0) for row in step])
            if bool((longer <= self.best).all()):
                break
            self.best = torch.maximum(self.best, longer)

    @staticmethod
    def of_states(grammar: Grammar) -> "Chains":
        return Chains(safe_log(_square(grammar)), grammar.closed)

    @staticmethod
    def of_symbols(grammar: Grammar) -> "Chains":
        """A rule between symbols is worth its absolute values, summed over children and averaged over parents.

        The rules of a parent together are worth 1 at the most, so that no chain gains by going round in a circle.
        """
        member = torch.nn.functional.one_hot(grammar.symbol_of_state, len(grammar.symbols)).to(grammar.root.dtype)
        sums = member.T @ _square(grammar).abs() @ member / grammar.states.unsqueeze(1)
        return Chains(safe_log(sums / sums.sum(1, keepdim=True).clamp_min(1)), grammar.closed)

    def path(self, top: int, bottom: int) -> list[int]:
        """From top to bottom, both included; these two alone where no rules lead from one to the other."""
        path = [top]
        known = not self.closed and bool(self.best[top, bottom] > -torch.inf)
        while known and path[-1] != bottom and len(path) <= len(self.step):
            path.append(int((self.step[path[-1]] + self.best[:, bottom]).argmax()))
        return path if path[-1] == bottom else [top, bottom]

    def closure(self, interminals: int) -> tuple[Float[Tensor, "inner inner"], Float[Tensor, "word_states inner"]]:
        """From bottom to top states, and from states of words to top states, as in `Form`."""
        best = self.best[:interminals].exp()
        return best[:, :interminals].T, best[:, interminals:].T


def _square(grammar: Grammar) -> Tensor:
    matrix = grammar.unary_matrix().detach()
    return torch.cat([matrix, matrix.new_zeros(matrix.shape[1] - len(matrix), matrix.shape[1])])
