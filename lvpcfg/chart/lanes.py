"""Rules as linear maps between states and lanes, in any semiring, for the textbook chart.

A lane is one thing that rules multiply: a choice of the children's states for tensors, a term for CP forms. A map is a
dense matrix or the entries of a sparse one. Where the entries stand is sorted out once; their values may change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lvpcfg.chart.semirings import Semiring, zeros

NUMBERS = 1 << 22  # held at once: more are made part by part, and made again in the backward pass


@dataclass(frozen=True, eq=False)
class Entries:
    """Where the entries of a sparse matrix stand. Rows of about the same length are summed together."""

    columns: Tensor  # [entries]
    groups: tuple[Tensor, ...]  # each [rows, most]: the entries of each row; one past the last entry is padding
    place: Tensor  # [rows]: where each row comes out, one past the last for a row without entries

    @staticmethod
    def of(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> "Entries":
        """Of a matrix of this shape; entries whose row or column is beyond it are padding."""
        inside = ((rows < shape[0]) & (columns < shape[1])).nonzero().squeeze(1)
        counts = torch.bincount(rows[inside], minlength=shape[0])
        order = torch.cat([inside[rows[inside].argsort(stable=True)], inside.new_tensor([len(rows)])])
        begin = counts.cumsum(0) - counts
        sizes = torch.where(counts > 0, 2 ** counts.clamp_min(1).double().log2().ceil(), 0).long()
        groups, members = [], []
        for size in sizes[counts > 0].unique().tolist():
            member = (sizes == size).nonzero().squeeze(1)
            within = torch.arange(size, device=rows.device)
            within = torch.where(within < counts[member].unsqueeze(1), begin[member].unsqueeze(1) + within, -1)
            groups.append(order[within])
            members.append(member)
        place = torch.full_like(counts, int((counts > 0).sum()))
        if members:
            found = torch.cat(members)
            place[found] = torch.arange(len(found), device=rows.device)
        return Entries(columns.clamp_max(shape[1] - 1), tuple(groups), place)

    def row(self, number: int) -> Tensor:
        """The entries of one row."""
        place = int(self.place[number])
        for group in self.groups:
            if place < len(group):
                return group[place][group[place] < len(self.columns)]
            place -= len(group)
        return self.columns[:0]


@dataclass(frozen=True, eq=False)
class Map:
    """A linear map: a dense matrix [(batch,) outputs, inputs], or values [(batch,) entries] of a sparse one.

    Without values, output number o is input number `entries.columns[o]`.
    """

    values: Tensor | None
    entries: Entries | None = None

    @staticmethod
    def sparse(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> "Map":
        return Map(values, Entries.of(rows, columns, shape))

    @staticmethod
    def gather(columns: Tensor) -> "Map":
        return Map(None, Entries(columns, (), columns))

    @property
    def lanes(self) -> Tensor | None:
        """[outputs]: the input that each output is, if that is all the map does."""
        return self.entries.columns if self.values is None and self.entries is not None else None

    def row(self, number: int) -> tuple[Tensor, Tensor]:
        """The inputs that one output is made of, and their values, of one matrix."""
        assert self.values is not None
        if self.entries is None:
            return torch.arange(self.values.shape[1], device=self.values.device), self.values[number]
        entries = self.entries.row(number)
        return self.entries.columns[entries], self.values[entries]

    def change(self, function: Callable[[Tensor], Tensor]) -> "Map":
        return self if self.values is None else replace(self, values=function(self.values))

    def __call__(self, semiring: Semiring, x: Tensor) -> Tensor:
        """[size, batch, cells, inputs] -> [size, batch, cells, outputs], `values` being the semiring's."""
        if self.lanes is not None:
            return x.index_select(-1, self.lanes)
        assert self.values is not None
        values = self.values if self.values.dim() == (4 if self.entries is None else 3) else self.values.unsqueeze(1)
        if self.entries is None and getattr(semiring, "products_fit", False):
            return semiring.matmul(x, values.mT)
        each = semiring.size() ** 2 * x.shape[1] * values.shape[2:].numel()
        return in_parts(lambda *part: self._apply(semiring, x.narrow(-2, *part), values), x.shape[-2], each)

    def _apply(self, semiring: Semiring, x: Tensor, values: Tensor) -> Tensor:
        if self.entries is None:
            return semiring.matmul(x, values.mT)
        nothing = zeros(semiring, x, *x.shape[1:-1], 1)
        terms = semiring.mul(x.index_select(-1, self.entries.columns), values.unsqueeze(-2))
        terms = torch.cat([terms, nothing], -1)
        sums = [semiring.sum(terms[..., group]) for group in self.entries.groups]
        return torch.cat([*sums, nothing], -1).index_select(-1, self.entries.place)


@dataclass(frozen=True, eq=False)
class Rules:
    """Rules with the same number of children, two or more. Parents are the first of all states."""

    children: tuple[Map, ...]  # states -> lanes, one map for each child
    lift: Map  # lanes -> states of parents
    skeletal: Tensor | None = None  # [lanes]: the skeletal rule of each, for `rule_posteriors`
    every_pair: bool = False  # the lanes are all pairs of a left and a right state

    @staticmethod
    def from_entries(
        parent: Tensor, children: Sequence[Tensor], values: Tensor, parents: int, skeletal: Tensor | None = None
    ) -> "Rules":
        """A list of rules between states: parent, each of the children, and values are [entries].

        Rules with the same children share a lane; if `skeletal`, [entries], is given, within one skeletal rule.
        """
        columns = [*children] if skeletal is None else [*children, skeletal]
        sizes = [int(column.max()) + 1 if len(column) else 1 for column in columns]
        key = torch.zeros_like(parent)
        for column, size in zip(columns, sizes, strict=True):
            key = key * size + column
        key, lane = key.unique(return_inverse=True)
        lanes = []
        for size in reversed(sizes):
            lanes.append(key % size)
            key = key // size
        lanes.reverse()
        lift = Map.sparse(parent, lane, values, (parents, len(key)))
        return Rules(tuple(map(Map.gather, lanes[: len(children)])), lift, None if skeletal is None else lanes[-1])

    @staticmethod
    def from_tensor(tensor: Tensor, children: int = 2) -> "Rules":
        """One dense tensor [(batch,) parents, states, states, ...]; a lane for each choice of the children's states."""
        states = tensor.shape[-1]
        choices = torch.cartesian_prod(*[torch.arange(states, device=tensor.device)] * children)
        return Rules(tuple(map(Map.gather, choices.unbind(1))), Map(tensor.flatten(-children)), None, children == 2)

    @staticmethod
    def from_cp(u: Tensor, *children: Tensor) -> "Rules":
        """One CP form of all rules: u [(batch,) rank, parents] and for each child [(batch,) rank, states].

        Its terms stand in for the skeletal rules.
        """
        return Rules(tuple(map(Map, children)), Map(u.mT), torch.arange(u.shape[-2], device=u.device))

    @staticmethod
    def from_rule_cp(states: Sequence[Tensor], factors: Sequence[Tensor], size: int, parents: int) -> "Rules":
        """A CP form of each rule. `states` are those of the parent and of each child, each [rules, x], and `factors`
        theirs, each [(batch,) rules, rank, x]. States from `size` on, the number of all states, are padding.
        """
        rules, rank = factors[0].shape[-3:-1]
        lane = torch.arange(rules * rank, device=states[0].device).view(rules, rank, 1)

        def entries(which: int) -> tuple[Tensor, Tensor, Tensor]:
            state = states[which].unsqueeze(1)
            lanes, state = (each.flatten() for each in torch.broadcast_tensors(lane, state))
            return lanes, state, factors[which].flatten(-3)

        children = []
        for which in range(1, len(states)):
            lanes, state, values = entries(which)
            children.append(Map.sparse(lanes, state, values, (rules * rank, size)))
        lanes, state, values = entries(0)
        lift = Map.sparse(state, lanes, values, (parents, rules * rank))
        return Rules(tuple(children), lift, lane.flatten() // rank)

    def change(self, function: Callable[[Tensor], Tensor]) -> "Rules":
        """The same rules with other values."""
        children = tuple(child.change(function) for child in self.children)
        return replace(self, children=children, lift=self.lift.change(function))

    @property
    def tensors(self) -> list[Tensor]:
        """The values of the maps: of each child, then those of the parents."""
        return [each.values for each in (*self.children, self.lift) if each.values is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Rules":
        values = iter(tensors)
        return self.change(lambda _: next(values))


def in_parts(function: Callable[[int, int], Tensor], cells: int, each: int) -> Tensor:
    """function(first cell, number of cells) -> [..., cells, lanes]; `each` is how many numbers a cell takes."""
    size = max(1, NUMBERS // max(1, each))
    if cells <= size:
        return function(0, cells)
    parts = [(first, min(size, cells - first)) for first in range(0, cells, size)]
    return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], -2)
