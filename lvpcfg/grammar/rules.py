"""Binary rules in any representation.

T^{a -> b c} [m_a, m_b, m_c] of all rules can be kept as tensors (`rule_tensors.py`), some of them in CP form
(`rule_cp.py`), or all of them as one CP form over all states (`whole_cp.py`). Callers ask `BinaryRules` for what they
need and never which of these it is. A new representation is one more subclass: it says what its tensors are, writes
its rules out, and may do what stands below faster than through the rules written out.

Charts and forests compute with two forms of rules each:

    charts     tensors of rules, or one CP form over all states      `for_charts`
    forests    tensors of rules, some of them in CP form             `for_forests`

What they get is `ForestRules` in any case: whoever computes with it need not know where it comes from.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from lvpcfg.grammar.factors import Factors

if TYPE_CHECKING:
    from lvpcfg.grammar.rule_tensors import RuleTensors
    from lvpcfg.grammar.whole_cp import WholeCP

CHUNK = 1 << 22  # numbers handled at once


class Reader(Protocol):
    """What a representation is loaded from: checked pieces of a model folder."""

    def floats(self, name: str, size: int) -> Tensor: ...

    def indices(self, name: str) -> Tensor: ...

    def size(self, name: str) -> int: ...

    def refuse(self, reason: str) -> NoReturn: ...


class RulesInCP(Protocol):
    """Rules of which each has a CP form of its own, all of one rank."""

    @property
    def cp_rules(self) -> Tensor:
        """[some]: their numbers among all rules."""

    @property
    def factors(self) -> Factors:
        """U, V, W [some, rank, states], with zeros for the states that a symbol does not have."""


@dataclass(frozen=True, eq=False)
class ForestRules:
    """Binary rules as forests compute with them."""

    values: Tensor  # T of the rules that are tensors, end to end
    cp: RulesInCP | None = None  # the others


@dataclass(frozen=True, eq=False)
class BinaryRules(ABC):
    """The rules a -> b c of a grammar with their probabilities, or any other weights."""

    state_counts: tuple[int, ...]  # m_a of each symbol
    interminals: int  # symbols 0 .. interminals - 1; those behind are preterminals
    rules: Tensor  # [rules, 3]: the skeletal rules, a, b, c

    name: ClassVar[str]  # in model folders
    parameters: ClassVar[tuple[str, ...]]  # the fields that hold its numbers
    structure: ClassVar[tuple[str, ...]] = ("states", "first_state", "child_types")  # cached, and free of numbers

    # Its numbers

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All its numbers by name: what is saved, moved and optimised."""
        return {name: getattr(self, name) for name in self.parameters}

    def with_tensors(self: "Self", tensors: Mapping[str, Tensor]) -> "Self":
        """The same rules with other numbers; differentiable by them in all that follows.

        What was found out about the rules, whatever their numbers, is kept.
        """
        new = replace(self, **dict[str, Any](tensors))
        new.__dict__.update({name: found for name, found in vars(self).items() if name in self.structure})
        return new

    def saved(self) -> dict[str, Tensor]:
        """What goes into a model folder: its numbers, and which rules they belong to."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rules"}
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def signed(self) -> bool:
        """Whether some rule has a weight below zero, or might have one."""
        return any(bool((tensor < 0).any()) for tensor in self.tensors.values())

    @property
    def size(self) -> int:
        """How many numbers are computed with."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    compressed: ClassVar[bool] = True  # an approximation of other rules, or meant to be small
    prunable: ClassVar[bool] = True  # what pruning leaves of charts takes less time than whole charts

    def to(self: "Self", device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Self":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        tensors = {"rules": self.rules} | self.saved()
        return replace(self, **dict[str, Any]({name: moved(tensor) for name, tensor in tensors.items()}))

    # Its tensors written out

    @abstractmethod
    def written_out(self) -> "RuleTensors":
        """Every rule as a tensor; there may be more of them than in `rules`."""

    @abstractmethod
    def tensor(self, rule: int) -> Tensor:
        """T of one rule, [m_a, m_b, m_c]."""

    def listed(self) -> "RuleTensors":
        """The rules of `rules` as tensors, in their order, and no others."""
        return self.written_out()

    def padded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rules of nearly the same shape together: their rows [some, 3], and T with zeros behind, [some, x, y, z]."""
        written = self.written_out()
        for some, tensors in padded(self.states, written.rules, written.starts, written.values):
            yield written.rules[some], tensors

    # What other parts compute with

    def for_charts(self) -> "RuleTensors | WholeCP":
        return self.written_out()

    def for_forests(self) -> ForestRules:
        """The rules of `rules` alone, in their order."""
        return ForestRules(self.listed().values)

    # What is known of them

    def rewrites(self) -> Tensor:
        """[interminal states, states], float64: how often each state is a child in one rewrite, B in M = B + R."""
        first, inner, states = self.first_state, self.interminal_states, sum(self.state_counts)
        total = torch.zeros(inner * states, dtype=torch.float64, device=self.rules.device)
        for rules, tensors in self.padded():
            parent, *children = (
                _numbered(first, symbol, size) for symbol, size in zip(rules.unbind(1), tensors.shape[1:], strict=True)
            )
            for child, sums in zip(children, (tensors.double().sum(3), tensors.double().sum(2)), strict=True):
                place = parent.clamp_max(inner - 1).unsqueeze(2) * states + child.clamp_max(states - 1).unsqueeze(1)
                total = total.index_add(0, place.flatten(), sums.flatten())
        return total.view(inner, states)

    def row_sums(self) -> Tensor:
        """[states]: the sum of each (a, h) over its rules and their children's states."""
        sums = torch.zeros(sum(self.state_counts) + 1, dtype=self.dtype, device=self.rules.device)
        for rules, tensors in self.padded():
            place = _numbered(self.first_state, rules[:, 0], tensors.shape[1])
            inside = place < self.first_state[rules[:, 0] + 1].unsqueeze(1)
            sums = sums.index_add(0, torch.where(inside, place, len(sums) - 1).flatten(), tensors.sum((2, 3)).flatten())
        return sums[:-1]

    @abstractmethod
    def transformed(self, state_counts: tuple[int, ...], parent: Tensor, child: Tensor) -> "BinaryRules":
        """T'[i, j, k] = sum over x, y, z of P_a[x, i] T[x, y, z] C_b[y, j] C_c[z, k]: other states, or another basis.

        `state_counts` is how many there are then; `parent` and `child`, [symbols, m, m'], hold P and C of each
        symbol, with zeros behind.
        """

    @abstractmethod
    def scaled(self, factor: Tensor) -> "BinaryRules":
        """Every T with its parent states multiplied by `factor` [interminal states]."""

    # Loading

    @classmethod
    @abstractmethod
    def read(
        cls: "type[Self]", state_counts: tuple[int, ...], interminals: int, rules: Tensor, reader: Reader
    ) -> "Self":
        """From a model folder; the reader refuses what does not fit."""

    def sizes(self) -> dict[str, int]:
        """What `read` needs to know beside the tensors, for the model folder."""
        return {}

    # Numbering

    @cached_property
    def states(self) -> Tensor:
        """[symbols]: m_a"""
        return torch.tensor(self.state_counts, dtype=torch.int64, device=self.rules.device)

    @cached_property
    def first_state(self) -> Tensor:
        """[symbols + 1]: where the states of each symbol begin among the states of all."""
        return starts_of(self.states)

    @property
    def interminal_states(self) -> int:
        return sum(self.state_counts[: self.interminals])

    @cached_property
    def child_types(self) -> Tensor:
        """[rules]: 2 * (the left child is a preterminal) + (the right child is one)."""
        _, left, right = (self.rules >= self.interminals).long().unbind(1)
        return 2 * left + right

    def __len__(self) -> int:
        return len(self.rules)


Self = TypeVar("Self", bound=BinaryRules)
REPRESENTATIONS: dict[str, type[BinaryRules]] = {}  # what a model folder may hold


def representation(cls: type[Self]) -> type[Self]:
    """Decorates a representation, so that model folders can hold it."""
    REPRESENTATIONS[cls.name] = cls
    return cls


def _numbered(first: Tensor, symbols: Tensor, size: int) -> Tensor:
    """[some, size]: the states of symbols among all states, and beyond the last that a symbol has."""
    return first[symbols].unsqueeze(1) + torch.arange(size, device=first.device)


def padded(states: Tensor, rules: Tensor, starts: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rules of nearly the same shape together: their numbers, and tensors with zeros behind, [some, x, y ...].

    `starts` is where the tensor of each begins in `values`.
    """
    values = torch.cat([values, values.new_zeros(1)])
    sizes = states[rules]
    for some, shape in similar(sizes):
        place = within_padding(starts[some], sizes[some], shape, len(values) - 1)
        yield some, values.index_select(0, place.flatten()).view(place.shape)


def similar(sizes: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
    """Tensors of sizes [tensors, dimensions] that are little less than one shape: their numbers, and the shape."""
    if not len(sizes):
        return
    rounded = (2 ** sizes.double().log2().ceil()).long().clamp_max(int(sizes.max()))
    shapes, shape_of = rounded.unique(dim=0, return_inverse=True)
    for number, shape in enumerate(shapes.tolist()):
        for some in (shape_of == number).nonzero().squeeze(1).split(max(1, CHUNK // math.prod(shape))):
            yield some, shape


def within_padding(starts: Tensor, sizes: Tensor, shape: Sequence[int], nowhere: int) -> Tensor:
    """[tensors, *shape]: where the numbers of tensors that are padded to one shape stand where they are end to end.

    `starts` is [tensors], `sizes` [tensors, dimensions] what they are without padding, which is nowhere.
    """
    ones = [1] * len(shape)
    place = torch.zeros_like(starts).view(-1, *ones)
    inside = place == 0
    for mode, (size, padded) in enumerate(zip(sizes.unbind(1), shape, strict=True)):
        number, size = (
            torch.arange(padded, dtype=starts.dtype, device=starts.device).view(-1, *ones[mode + 1 :]),
            size.view(-1, *ones),
        )
        place, inside = place * size + number, inside & (number < size)
    return torch.where(inside, place + starts.view(-1, *ones), nowhere)


def end_to_end(pieces: Iterable[tuple[Tensor, Tensor]], sizes: Tensor, like: Tensor) -> Tensor:
    """Backwards through `padded`: tensors of `sizes` [tensors, dimensions] end to end.

    `pieces` are their numbers and the tensors, padded in batches; `like` has the type and the device.
    """
    starts = starts_of(sizes.prod(1))
    flat = like.new_zeros(int(starts[-1]) + 1)
    for some, tensors in pieces:
        place = within_padding(starts[some], sizes[some], tensors.shape[1:], len(flat) - 1)
        flat = flat.index_copy_(0, place.flatten(), tensors.flatten())
    return flat[:-1]


def starts_of(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
