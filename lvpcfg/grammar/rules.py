"""Binary rules in any representation.

T^{a -> b c} [m_a, m_b, m_c] of all rules can be kept as tensors (`rule_tensors.py`), some of them in CP form
(`rule_cp.py`), or all of them as one CP form over all states (`whole_cp.py`). Callers ask `BinaryRules` for what they
need and never which of these it is. A new representation is one more subclass: it says what its tensors are, writes
its rules out and reads itself from a model folder; it may do all else faster than through the rules written out.
`docs/add_a_representation.md` shows one.

Charts and forests compute with two forms of rules each:

    charts     tensors of rules, or one CP form over all states      `for_charts`
    forests    tensors of rules, some of them in CP form             `for_forests`
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from lvpcfg.grammar.factors import Factors

if TYPE_CHECKING:
    from lvpcfg.grammar.rule_tensors import RuleTensors
    from lvpcfg.grammar.whole_cp import WholeCP

CHUNK = 1 << 22  # numbers handled at once


@runtime_checkable
class Reader(Protocol):
    """What a representation is loaded from: checked pieces of a model folder."""

    def floats(self, name: str, size: int) -> Float[Tensor, "size"]: ...

    def indices(self, name: str) -> Int64[Tensor, "_"]: ...

    def size(self, name: str) -> int: ...

    def refuse(self, reason: str) -> NoReturn: ...


@runtime_checkable
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
    most: int = 0  # states of a node that are kept, those with the largest inside scores; 0: all


@dataclass(frozen=True, eq=False)
class BinaryRules(ABC):
    """The rules a -> b c of a grammar with their probabilities, or any other weights."""

    state_counts: tuple[int, ...]  # m_a of each symbol
    interminals: int  # symbols 0 .. interminals - 1; those behind are preterminals
    rules: Int64[Tensor, "rules 3"]  # the skeletal rules, a, b, c

    name: ClassVar[str]  # in model folders
    parameters: ClassVar[tuple[str, ...]]  # the fields that hold its numbers
    of_terms: ClassVar[tuple[str, ...]] = ()  # those of them whose rows are the left or the right child of one term
    of_reals: ClassVar[tuple[str, ...]] = ()  # those of them that are no weights, but any real numbers
    # Cached properties that do not depend on these numbers.
    structure: ClassVar[tuple[str, ...]] = ("states", "first_state", "child_types")
    of_zeros: ClassVar[tuple[str, ...]] = ()  # those that depend on which numbers are zero

    # Its numbers

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All its numbers by name: what is saved, moved and optimised."""
        return {name: getattr(self, name) for name in self.parameters}

    def with_tensors(self: "Self", tensors: Mapping[str, Tensor], zeros_stay: bool = False) -> "Self":
        """The same rules with other numbers; results are differentiable by them.

        What was computed of the rules alone (`structure`) is kept; and, if what is zero stays zero, `of_zeros`.
        """
        kept = self.structure + (self.of_zeros if zeros_stay else ())
        new = replace(self, **dict[str, Any](tensors))
        new.__dict__.update({name: value for name, value in vars(self).items() if name in kept})
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
    only_listed: ClassVar[bool] = True  # rules that are not in `rules` have no weight
    prunable: ClassVar[bool] = True  # pruned charts take less time than full ones

    def to(self: "Self", device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Self":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        tensors = {"rules": self.rules} | self.saved()
        if all(moved(tensor) is tensor for tensor in tensors.values()):
            return self
        if moved(self.rules) is self.rules:  # another type alone
            return self.with_tensors({name: moved(tensor) for name, tensor in self.tensors.items()}, zeros_stay=True)
        return replace(self, **dict[str, Any]({name: moved(tensor) for name, tensor in tensors.items()}))

    # Its tensors written out

    @abstractmethod
    def written_out(self) -> "RuleTensors":
        """Every rule with a weight as a tensor: one CP form of all rules has more of them than stand in `rules`."""

    def tensor(self, rule: int) -> Float[Tensor, "x y z"]:
        """T of one row of `rules`, [m_a, m_b, m_c]."""
        return self.listed().tensor(rule)

    def listed(self) -> "RuleTensors":
        """The rules of `rules` as tensors, in their order, and no others."""
        return self.written_out()

    def padded(self) -> Iterator[tuple[Int64[Tensor, "group 3"], Float[Tensor, "group x y z"]]]:
        """Groups of rules of nearly the same shape: the rules, and their T, padded by zeros to one shape."""
        written = self.written_out()
        for group, tensors in padded(self.states, written.rules, written.starts, written.values):
            yield written.rules[group], tensors

    # What other parts compute with

    def for_charts(self) -> "RuleTensors | WholeCP":
        return self.written_out()

    def for_forests(self) -> ForestRules:
        """The rules of `rules` alone, in their order."""
        return ForestRules(self.listed().values)

    def economical(self) -> "BinaryRules":
        """The same rules in no more numbers than need be."""
        return self

    @property
    def beside(self) -> dict[str, Tensor]:
        """The vectors of a grammar, root or unary, that are made of these numbers too: by their names in `Grammar`."""
        return {}

    # What is known of them

    def rewrites(self, worth: Float64[Tensor, "states"] | None = None) -> Float64[Tensor, "interminal_states states"]:
        """How often each state is a child in one rewrite of a parent state by a binary rule: B in M = B + R.

        With a worth z of states, the derivative of T(z, z) by z: a child counts as much as its sibling is worth.
        """
        first, inner, states = self.first_state, self.interminal_states, sum(self.state_counts)
        total = torch.zeros(inner * states, dtype=torch.float64, device=self.rules.device)
        worth = total.new_ones(states) if worth is None else worth
        for rules, tensors in self.padded():
            parent, left, right = (
                _state_numbers(first, symbol, size)
                for symbol, size in zip(rules.unbind(1), tensors.shape[1:], strict=True)
            )
            left, right, t = left.clamp_max(states - 1), right.clamp_max(states - 1), tensors.double()
            sums = (t @ worth[right].view(len(t), 1, -1, 1)).squeeze(3), torch.einsum("rxyz,ry->rxz", t, worth[left])
            for child, of_child in zip((left, right), sums, strict=True):
                entry = parent.clamp_max(inner - 1).unsqueeze(2) * states + child.unsqueeze(1)
                total = total.index_add(0, entry.flatten(), of_child.flatten())  # padding adds zeros
        return total.view(inner, states)

    @property
    def few_terms(self) -> Factors | None:
        """U, V, W of one CP form of all rules, if that has fewer terms than there are states of interminals."""
        return None

    def row_sums(self) -> Float[Tensor, "states"]:
        """The sum of each (a, h) over its rules and their children's states."""
        sums = torch.zeros(sum(self.state_counts) + 1, dtype=self.dtype, device=self.rules.device)
        for rules, tensors in self.padded():
            parent = _state_numbers(self.first_state, rules[:, 0], tensors.shape[1])
            inside = parent < self.first_state[rules[:, 0] + 1].unsqueeze(1)
            parent = torch.where(inside, parent, len(sums) - 1)
            sums = sums.index_add(0, parent.flatten(), tensors.sum((2, 3)).flatten())
        return sums[:-1]

    def transformed(
        self,
        state_counts: tuple[int, ...],
        parent: Float[Tensor, "symbols m new_m"],
        child: Float[Tensor, "symbols m new_m"],
    ) -> "BinaryRules":
        """T'[i, j, k] = sum over x, y, z of P_a[x, i] T[x, y, z] C_b[y, j] C_c[z, k]: other states, or another basis.

        `state_counts` are the numbers of states afterwards; `parent` and `child` hold P and C of each symbol, padded
        by zeros.
        """
        return self.written_out().transformed(state_counts, parent, child)

    def scaled(
        self, parent: Float[Tensor, "interminal_states"], child: Float[Tensor, "states"] | None = None
    ) -> "BinaryRules":
        """Every T with its parent states multiplied by `parent`, and the states of both its children by `child`."""
        return self.written_out().scaled(parent, child)

    def conditional(self: "Self") -> "Self":
        """With rows that sum to 1 for the children of terms: expected counts become p(b, h | term)."""
        sums = {name: getattr(self, name).sum(-1, keepdim=True) for name in self.of_terms}
        children = {name: getattr(self, name) / torch.where(total > 0, total, 1) for name, total in sums.items()}
        return self.with_tensors(self.tensors | children, zeros_stay=True)

    # Loading

    @classmethod
    @abstractmethod
    def read(
        cls: "type[Self]",
        state_counts: tuple[int, ...],
        interminals: int,
        rules: Int64[Tensor, "rules 3"],
        reader: Reader,
    ) -> "Self":
        """From a model folder; the reader refuses what does not fit."""

    def sizes(self) -> dict[str, int]:
        """Numbers that `read` needs besides the tensors; they go into the model folder."""
        return {}

    # Numbering

    @cached_property
    def states(self) -> Int64[Tensor, "symbols"]:
        """m_a of each symbol."""
        return torch.tensor(self.state_counts, dtype=torch.int64, device=self.rules.device)

    @cached_property
    def first_state(self) -> Int64[Tensor, "symbols_plus_1"]:
        """The number of the first state of each symbol, among the states of all symbols; then how many these are."""
        return starts_of(self.states)

    @property
    def interminal_states(self) -> int:
        return sum(self.state_counts[: self.interminals])

    @cached_property
    def child_types(self) -> Int64[Tensor, "rules"]:
        """2 * (the left child is a preterminal) + (the right child is a preterminal)."""
        _, left, right = (self.rules >= self.interminals).long().unbind(1)
        return 2 * left + right

    def states_of(
        self, unary_rules: Int64[Tensor, "rules 2"], numbers: int
    ) -> tuple[Int64[Tensor, "{numbers}"], Int64[Tensor, "{numbers}"]]:
        """The parent state and the child state of each number of all R, end to end; there are `numbers` of them."""
        a, b = unary_rules.unbind(1)
        volume = self.states[a] * self.states[b]
        rule = torch.repeat_interleave(volume, output_size=numbers)
        within = torch.arange(numbers, device=rule.device) - starts_of(volume)[rule]
        child = self.states[b[rule]]
        return self.first_state[a[rule]] + within // child, self.first_state[b[rule]] + within % child

    def __len__(self) -> int:
        return len(self.rules)


Self = TypeVar("Self", bound=BinaryRules)
REPRESENTATIONS: dict[str, type[BinaryRules]] = {}  # by their names in model folders


def representation(cls: type[Self]) -> type[Self]:
    """Decorates a representation, so that model folders can hold it."""
    REPRESENTATIONS[cls.name] = cls
    return cls


def _state_numbers(
    first: Int64[Tensor, "symbols_plus_1"], symbols: Int64[Tensor, "group"], size: int
) -> Int64[Tensor, "group {size}"]:
    """The numbers of `size` states of each symbol among all states; it may have fewer, then the last mean nothing."""
    return first[symbols].unsqueeze(1) + torch.arange(size, device=first.device)


def padded(
    states: Int64[Tensor, "symbols"],
    rules: Int64[Tensor, "rules order"],
    starts: Int64[Tensor, "rules_plus_1"],
    values: Float[Tensor, "numbers"],
) -> Iterator[tuple[Int64[Tensor, "group"], Float[Tensor, "group *shape"]]]:
    """Groups of rules of nearly the same shape: which they are, and their tensors, padded by zeros to one shape.

    `starts` is where the tensor of each rule begins in `values`.
    """
    values = torch.cat([values, values.new_zeros(1)])
    sizes = states[rules]
    for group, shape in similar(sizes):
        position = within_padding(starts[group], sizes[group], shape, len(values) - 1)
        yield group, values.index_select(0, position.flatten()).view(position.shape)


def similar(sizes: Int64[Tensor, "tensors order"]) -> Iterator[tuple[Int64[Tensor, "group"], list[int]]]:
    """Groups of tensors of nearly the same sizes: which they are, and the shape that all of them fit into."""
    if not len(sizes):
        return
    rounded = (2 ** sizes.double().log2().ceil()).long().clamp_max(int(sizes.max()))
    shapes, shape_of = rounded.unique(dim=0, return_inverse=True)
    for number, shape in enumerate(shapes.tolist()):
        for group in (shape_of == number).nonzero().squeeze(1).split(max(1, CHUNK // math.prod(shape))):
            yield group, shape


def within_padding(
    starts: Int[Tensor, "tensors"], sizes: Int[Tensor, "tensors order"], shape: Sequence[int], nowhere: int
) -> Int[Tensor, "tensors *shape"]:
    """For each entry of tensors that are padded to one shape, its position where they stand end to end, unpadded.

    `starts` is where each begins there, `sizes` are those without padding; the position of padding is `nowhere`.
    """
    ones = [1] * len(shape)
    position = torch.zeros_like(starts).view(-1, *ones)
    inside = position == 0
    for mode, (size, padded) in enumerate(zip(sizes.unbind(1), shape, strict=True)):
        number, size = (
            torch.arange(padded, dtype=starts.dtype, device=starts.device).view(-1, *ones[mode + 1 :]),
            size.view(-1, *ones),
        )
        position, inside = position * size + number, inside & (number < size)
    return torch.where(inside, position + starts.view(-1, *ones), nowhere)


def transformed(
    states: Int64[Tensor, "symbols"],
    new_states: Int64[Tensor, "symbols"],
    blocks: Int64[Tensor, "blocks order"],
    values: Float[Tensor, "numbers"],
    bases: Sequence[Float[Tensor, "symbols m new_m"] | None],
) -> Float[Tensor, "new_numbers"]:
    """Tensors that stand end to end, over other states or in another basis: each mode times a matrix of its symbol.

    `blocks` are the symbols of each tensor's modes, `bases` the matrices of each mode, None where it stays as it is;
    see `BinaryRules.transformed`.
    """
    sizes = new_states[blocks]

    def groups() -> Iterator[tuple[Tensor, Tensor]]:
        for group, tensors in padded(states, blocks, starts_of(states[blocks].prod(1)), values):
            widest = sizes[group].amax(0).tolist()
            size = max(1, CHUNK // math.prod(widest))
            for some, tensor in zip(group.split(size), tensors.split(size), strict=True):
                for basis, symbols, most in zip(bases, blocks[some].unbind(1), widest, strict=True):
                    if basis is None:
                        tensor = tensor.movedim(1, -1)
                    else:
                        tensor = torch.einsum("rx...,rxk->r...k", tensor, basis[symbols, : tensor.shape[1], :most])
                yield some, tensor

    return end_to_end(groups(), sizes, values)


def end_to_end(
    groups: Iterable[tuple[Int64[Tensor, "group"], Float[Tensor, "group *shape"]]],
    sizes: Int64[Tensor, "tensors order"],
    like: Float[Tensor, "..."],
) -> Float[Tensor, "numbers"]:
    """The inverse of `padded`: tensors of these sizes, given in padded groups, end to end without padding.

    `like` has the type and the device of the result.
    """
    starts = starts_of(sizes.prod(1))
    flat = like.new_zeros(int(starts[-1]) + 1)
    for group, tensors in groups:
        position = within_padding(starts[group], sizes[group], tensors.shape[1:], len(flat) - 1)
        flat = flat.index_copy_(0, position.flatten(), tensors.flatten())
    return flat[:-1]


def starts_of(sizes: Int64[Tensor, "tensors"]) -> Int64[Tensor, "tensors+1"]:
    """Where tensors of these sizes begin that stand end to end, and where the last ends."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
