"""What distributions over trees and over state sequences share: torch-struct's names, log Z, divergences.

A subclass says how log Z is found, and which textbook recurrence finds sums in other semirings.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.distributions import Distribution

from lvpcfg.chart.semirings import CrossEntropy, Entropy, KLDivergence, require_nonnegative, safe_log
from lvpcfg.errors import InputError, show

WIDEST, WIDEST_FLOAT32 = 700, 80  # how far log-potentials may be below the largest, for exp to hold both
Found = TypeVar("Found")


def remembered(method: Callable[[Any], Found]) -> Found:
    """A property that is computed once with gradients and once without them, if they are wanted now and then."""

    def get(self: "Structures") -> Found:
        key = method.__name__, self._differentiable
        if key not in self._known:
            self._known[key] = method(self)
        found: Found = self._known[key]
        return found

    get.__doc__ = method.__doc__
    return property(get)  # type: ignore[return-value]


class Structures(Distribution):
    """The structures of a batch of sentences. `form` holds the parameters, `leaf` the weights of words, [length, batch,
    states], and `constant` the log of a factor of every weight that both leave out."""

    arg_constraints = {}  # noqa: RUF012 -- a name of torch.distributions
    _what: ClassVar[str]  # they are
    _total: ClassVar[Callable[..., Tensor]]  # (parameters, words, lengths, semiring) -> one number a sentence

    def __init__(
        self,
        form: Any,
        leaf: Float[Tensor, "length batch word_states"],
        lengths: Sequence[int] | Tensor | None = None,
        constant: Float[Tensor, "batch"] | None = None,
    ) -> None:
        lengths = checked_lengths(lengths, leaf.shape[1], leaf.shape[0], leaf.device)
        super().__init__(leaf.shape[1:2], validate_args=False)
        self.form, self.leaf, self.lengths, self.constant = form, leaf, lengths, constant
        self._known: dict[tuple[str, bool], Any] = {}

    def _log_z(self) -> Tensor:
        """Without the constant."""
        raise NotImplementedError

    def _textbook(self) -> tuple[Any, Float[Tensor, "batch length states"]]:
        """The parameters and the words, in ordinary numbers, for textbook recurrences."""
        raise NotImplementedError

    @property
    def argmax(self) -> Any:
        raise NotImplementedError

    @remembered
    def partition(self) -> Tensor:
        """log Z of each sentence, [batch]; differentiable. (log |Z| where parameters are signed.)"""
        log_z = self._log_z()
        return log_z if self.constant is None else log_z + self.constant

    @property
    def mode(self) -> Any:
        """The same, as torch.distributions calls it."""
        return self.argmax

    @remembered
    def entropy(self) -> Tensor:  # type: ignore[override]
        """[batch]; differentiable. 0 for an impossible sentence."""
        require_nonnegative(self._numbers(), "entropy")
        return self._total(*self._in_logarithms(), self.lengths, Entropy)

    def kl(self, other: "Structures") -> Float[Tensor, "batch"]:
        """sum of p log (p / q), p being this distribution; differentiable.

        `other` has the same form over the same sentences, and gives weight to whatever this one does. 0 for an
        impossible sentence.
        """
        return self._total(*self._with(other, "kl"), self.lengths, KLDivergence)

    def cross_entropy(self, other: "Structures") -> Float[Tensor, "batch"]:
        """- sum of p log q: kl plus entropy. `other` is as in `kl`."""
        return self._total(*self._with(other, "cross_entropy"), self.lengths, CrossEntropy)

    def expand(self, *_: object, **__: object) -> "Structures":
        raise InputError(
            f"a distribution over {self._what} cannot be expanded: give it the sentences of the larger batch."
        )

    def _samples(self, samples: int | Sequence[int]) -> int:
        """The number of samples that are asked for."""
        one_dimension = isinstance(samples, Sequence) and len(samples) == 1
        number = expect_number("sample", samples[0] if one_dimension else samples)  # type: ignore[index]
        require_nonnegative(self._numbers(), "sample")
        return number

    @property
    def _differentiable(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._everything())

    def _everything(self) -> list[Tensor]:
        return [self.leaf, *self.form.tensors]

    def _numbers(self) -> list[Tensor]:
        """The weights of steps and words: none of them may be negative for what works on logarithms."""
        return self._everything()

    def _in_logarithms(self) -> tuple[Any, Tensor]:
        grammar, words = self._textbook()
        return grammar.change(safe_log), safe_log(words)

    def _with(self, other: "Structures", what: str) -> tuple[Any, Tensor]:
        """The logarithms of this distribution's numbers and of another's, in pairs."""
        if not isinstance(other, Structures) or other._what != self._what:
            raise InputError(f"{what} with {show(other)}: expected another distribution over {self._what}.")
        mine, others = self._numbers(), other._numbers()
        sizes = [
            torch.full(one.leaf.shape[1:2], len(one.leaf)) if one.lengths is None else one.lengths.cpu()
            for one in (self, other)
        ]
        if [x.shape for x in mine] != [x.shape for x in others] or not torch.equal(*sizes):
            raise InputError(f"{what} needs two distributions of the same form over the same sentences.")
        require_nonnegative([*mine, *others], what)
        if any(bool(((p > 0) & (q == 0)).any()) for p, q in zip(mine, others, strict=True)):
            raise InputError(f"{what} is infinite: the other distribution has zeros where this one has none.")
        (grammar, words), (other_grammar, other_words) = self._in_logarithms(), other._in_logarithms()
        tensors = iter(other_grammar.tensors)
        return grammar.change(lambda values: torch.stack([values, next(tensors)])), torch.stack([words, other_words])


def checked_lengths(
    lengths: Sequence[int] | Tensor | None, batch: int, longest: int, device: torch.device
) -> Tensor | None:
    """Lengths of sentences as a tensor [batch], if they are whole numbers from 1 to the longest."""
    if lengths is None:
        return None
    try:
        given = torch.as_tensor(lengths, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"lengths are {show(lengths)}: expected a whole number for each sentence.") from None
    if given.shape != (batch,) or given.is_floating_point() or given.dtype == torch.bool:
        raise InputError(f"lengths are {given.tolist()}: expected a whole number for each sentence.")
    if not bool(((given >= 1) & (given <= longest)).all()):
        raise InputError(f"lengths are {given.tolist()}: expected 1 to {longest} words.")
    return given


def expect_number(what: str, number: object) -> int:
    if type(number) is not int or number < 1:
        raise InputError(f"{what} of {show(number)}: expected 1, 2, ...")
    return number


def exponentials(
    words: Float[Tensor, "batch length states"], *others: Float[Tensor, "..."], lengths: Tensor | None = None
) -> tuple[list[Float[Tensor, "..."]], Float64[Tensor, "batch"]]:
    """exp of log-potentials, each word divided by its largest, and the log of these factors for each sentence.

    The others are 0 at the most. What float32 could not hold is in float64.
    """
    most = largest(words, -1)
    within = most.squeeze(-1).double()
    if lengths is not None:
        place = torch.arange(words.shape[1], device=words.device)
        within = within * (place < torch.as_tensor(lengths, device=words.device).unsqueeze(1))
    parts = [words - most, *others]
    least = min(float(part.detach().masked_fill(part == -torch.inf, 0).min()) for part in parts)
    if math.isnan(least):
        raise InputError("log-potentials are infinite or no numbers: expected numbers, or -inf for the impossible.")
    if least < -WIDEST:
        raise InputError(f"log-potentials differ by {-least:.0f}: expected {WIDEST} at the most, or -inf.")
    if least < -WIDEST_FLOAT32:
        parts = [part.to(torch.float64) for part in parts]
    return [part.exp() for part in parts], within.sum(1)


def largest(x: Tensor, dimension: int) -> Tensor:
    largest = x.detach().amax(dimension, keepdim=True)
    return torch.where(largest > -torch.inf, largest, 0)
