"""Rules as linear maps between states and lanes, in any semiring, for the textbook chart.

A lane is one thing that rules multiply: a choice of the children's states for tensors, a term for CP forms. A map is a
dense matrix or the entries of a sparse one. The positions of the entries are sorted once; their values may change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lvpcfg.chart.semirings import Semiring, zeros

NUMBERS = 1 << 22  # held at once: more are computed part by part, and again in the backward pass


@dataclass(frozen=True, eq=False)
class Entries:
    """The positions of the entries of a sparse matrix. Rows of about one length are summed together, in a group."""

    columns: Int64[Tensor, "entries"]
    groups: tuple[Int64[Tensor, "_ _"], ...]  # each [rows, longest]: entries of its rows; number `entries` is padding
    place: Int64[Tensor, "rows"]  # the number of each row among those of all groups; the last for one without entries

    @staticmethod
    def of(rows: Int64[Tensor, "entries"], columns: Int64[Tensor, "entries"], shape: tuple[int, int]) -> "Entries":
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

    def row(self, number: int) -> Int64[Tensor, "some"]:
        """The entries of one row."""
        place = int(self.place[number])
        for group in self.groups:
            if place < len(group):
                return group[place][group[place] < len(self.columns)]
            place -= len(group)
        return self.columns[:0]


@dataclass(frozen=True, eq=False)
class Map:
    """A linear map: values of a dense matrix, [(batch,) outputs, inputs], or of a sparse one, [(batch,) entries].

    Without values, output number o is input number `entries.columns[o]`.
    """

    values: Float[Tensor, "..."] | None
    entries: Entries | None = None

    @staticmethod
    def sparse(
        rows: Int64[Tensor, "entries"],
        columns: Int64[Tensor, "entries"],
        values: Float[Tensor, "*batch entries"],
        shape: tuple[int, int],
    ) -> "Map":
        return Map(values, Entries.of(rows, columns, shape))

    @staticmethod
    def gather(columns: Int64[Tensor, "outputs"]) -> "Map":
        return Map(None, Entries(columns, (), columns))

    @property
    def lanes(self) -> Int64[Tensor, "outputs"] | None:
        """The input that each output is, if that is all the map does."""
        return self.entries.columns if self.values is None and self.entries is not None else None

    def row(self, number: int) -> tuple[Int64[Tensor, "inputs"], Float[Tensor, "inputs"]]:
        """The inputs that one output depends on, and their values; of a map that has no batch."""
        assert self.values is not None
        if self.entries is None:
            return torch.arange(self.values.shape[1], device=self.values.device), self.values[number]
        entries = self.entries.row(number)
        return self.entries.columns[entries], self.values[entries]

    def change(self, function: Callable[[Tensor], Tensor]) -> "Map":
        return self if self.values is None else replace(self, values=function(self.values))

    def __call__(
        self, semiring: Semiring, x: Float[Tensor, "size batch cells inputs"]
    ) -> Float[Tensor, "size batch cells outputs"]:
        """Applied to cells; `values` are those of the semiring, with its leading dimension."""
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
    skeletal: Int64[Tensor, "lanes"] | None = None  # the skeletal rule of each lane, for `rule_posteriors`
    every_pair: bool = False  # the lanes are all pairs of a left and a right state

    @staticmethod
    def from_entries(
        parent: Int64[Tensor, "entries"],
        children: Sequence[Int64[Tensor, "entries"]],
        values: Float[Tensor, "*batch entries"],
        parents: int,
        skeletal: Int64[Tensor, "entries"] | None = None,
    ) -> "Rules":
        """A list of rules between states: the parent and the children of each entry, and its value.

        Rules with the same children share a lane; if `skeletal` is given, only those of one skeletal rule do.
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
    def from_tensor(tensor: Float[Tensor, "... states states"], children: int = 2) -> "Rules":
        """One dense tensor [(batch,) parents, states, states, ...]; a lane for each choice of the children's states."""
        states = tensor.shape[-1]
        choices = torch.cartesian_prod(*[torch.arange(states, device=tensor.device)] * children)
        return Rules(tuple(map(Map.gather, choices.unbind(1))), Map(tensor.flatten(-children)), None, children == 2)

    @staticmethod
    def from_cp(u: Float[Tensor, "*batch rank parents"], *children: Float[Tensor, "*batch rank states"]) -> "Rules":
        """One CP form of all rules, with a factor for each child. Its terms take the place of the skeletal rules."""
        return Rules(tuple(map(Map, children)), Map(u.mT), torch.arange(u.shape[-2], device=u.device))

    @staticmethod
    def from_rule_cp(
        states: Sequence[Int64[Tensor, "rules _"]],
        factors: Sequence[Float[Tensor, "*batch rules rank _"]],
        size: int,
        parents: int,
    ) -> "Rules":
        """A CP form of each rule: `states` and `factors` are those of its parent and then of each child.

        There are `size` states in all, and numbers from there on are padding.
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
    """function(first cell, number of cells) -> [..., cells, lanes], for all cells; a cell takes `each` numbers."""
    size = max(1, NUMBERS // max(1, each))
    if cells <= size:
        return function(0, cells)
    parts = [(first, min(size, cells - first)) for first in range(0, cells, size)]
    return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], -2)
