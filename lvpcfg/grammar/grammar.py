"""A latent-variable PCFG with its own number of states for each symbol; a PCFG is m = 1.

    pi^a             [m_a]             root
    T^{a -> b c}     [m_a, m_b, m_c]   binary
    R^{a -> b}       [m_a, m_b]        unary
    Q^{a -> x}       [m_a]             lexical

For every (a, h): sum of t over rules and states, plus r, plus sum of q over x, is 1; sum of pi is 1.
Since the blocks differ in shape they are kept end to end in one vector for each kind of rule:
one tensor to save, to move and to give to an optimiser.

A grammar may be compressed (Cohen & Collins 2012; Cohen, Satta & Collins 2013): some T in Kruskal form of their own,
or all of them together as one sum of rank-one terms over all states.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.grammar.kruskal import Factors, RuleFactors
from lvpcfg.trees.lexicon import LexicalTable
from lvpcfg.trees.treebank import Symbols

CHUNK = 1 << 22  # numbers looked at at once


@dataclass(frozen=True, eq=False)
class Grammar:
    symbols: Symbols
    states: Tensor  # [symbols]: m_a
    binary_rules: Tensor  # [rules, 3]: a, b, c
    unary_rules: Tensor  # [rules, 2]: a, b
    root: Tensor  # [sum of m_a]: all pi^a, end to end
    binary: Tensor  # [sum of m_a m_b m_c]: all T that are not `factored`, end to end, each in row-major order
    unary: Tensor  # [sum of m_a m_b]: all R
    lexical: LexicalTable  # Q over the states of the preterminals
    # [levels, states]: the states that each came from by splits, number within the symbol, coarsest first.
    hierarchy: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    closed: bool = False  # R holds whole chains of unary rules, one or none for a span, instead of single rules
    factored: RuleFactors | None = None
    # All T at once, u over the states of interminals; `binary` is then what it was made of, for decoders.
    kruskal: Factors | None = None

    @cached_property
    def first_state(self) -> Tensor:
        """[symbols + 1]: where the states of each symbol begin among the states of all."""
        return starts_of(self.states)

    @cached_property
    def symbol_of_state(self) -> Tensor:
        """[states of all symbols]"""
        return torch.repeat_interleave(self.states, output_size=len(self.root))

    @cached_property
    def binary_starts(self) -> Tensor:
        """[rules + 1]: where each T begins in `binary`."""
        sizes = self.states[self.binary_rules].prod(1)
        return starts_of(sizes if self.factored is None else sizes.index_fill(0, self.factored.rules, 0))

    @cached_property
    def binary_kinds(self) -> Tensor:
        """[rules]: 2 * (the left child is a preterminal) + (the right child is one)."""
        _, left, right = (self.binary_rules >= len(self.symbols.interminals)).long().unbind(1)
        return 2 * left + right

    @cached_property
    def unary_starts(self) -> Tensor:
        """[rules + 1]: where each R begins in `unary`."""
        return starts_of(self.states[self.unary_rules].prod(1))

    def binary_tensor(self, rule: int) -> Tensor:
        """T of one rule, [m_a, m_b, m_c], a view."""
        begin, end = self.binary_starts[rule : rule + 2].tolist()
        return self.binary[begin:end].view(*self.states[self.binary_rules[rule]].tolist())

    def unary_tensor(self, rule: int) -> Tensor:
        """R of one rule, [m_a, m_b], a view."""
        begin, end = self.unary_starts[rule : rule + 2].tolist()
        return self.unary[begin:end].view(*self.states[self.unary_rules[rule]].tolist())

    def padded(self, rules: Tensor, starts: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rules of nearly the same shape together: their numbers, and tensors with zeros behind, [some, x, y ...].

        `starts` is where the tensor of each begins in `values`.
        """
        values = torch.cat([values, values.new_zeros(1)])
        sizes = self.states[rules]
        rounded = (2 ** sizes.double().log2().ceil()).long().clamp_max(int(self.states.max()))
        shapes, shape_of = rounded.unique(dim=0, return_inverse=True)
        for number, shape in enumerate(shapes.tolist()):
            for some in (shape_of == number).nonzero().squeeze(1).split(max(1, CHUNK // math.prod(shape))):
                place = within_padding(starts[some], sizes[some], shape, len(values) - 1)
                yield some, values.index_select(0, place.flatten()).view(place.shape)

    def expanded(self) -> "Grammar":
        """The same grammar with every T written out."""
        if self.factored is None:
            return self
        sizes = self.states[self.binary_rules]
        volume = sizes.prod(1)
        kept = torch.ones_like(volume, dtype=torch.bool).index_fill(0, self.factored.rules, False)
        is_kept = torch.repeat_interleave(kept, volume)
        binary = self.binary.new_empty(len(is_kept))
        binary[is_kept] = self.binary
        binary[~is_kept] = torch.cat(
            [
                Factors(*(factor[:, :m] for factor, m in zip(factors, shape, strict=True))).tensor().flatten()
                for *factors, shape in zip(
                    *vars(self.factored.factors).values(), sizes[self.factored.rules].tolist(), strict=True
                )
            ]
        )
        return replace(self, binary=binary, factored=None)

    def row_sums(self) -> Tensor:
        """[states of all symbols]: what each (a, h) rewrites to in all; 1 in a normalised grammar."""
        if self.factored is not None:
            return self.expanded().row_sums()
        sums = torch.zeros_like(self.root)
        for rules, starts, values in (
            (self.binary_rules, self.binary_starts, self.binary),
            (self.unary_rules, self.unary_starts, self.unary),
        ):
            sums = sums.index_add(0, self.parent_states(rules[:, 0], starts, len(values)), values)
        lexical = self.lexical.column_sums()  # preterminals are numbered last
        return sums + torch.nn.functional.pad(lexical, (len(sums) - len(lexical), 0))

    def parent_states(self, parents: Tensor, starts: Tensor, size: int) -> Tensor:
        """[size]: for each number of the end-to-end blocks, the (a, h) it is a probability of."""
        sizes = starts[1:] - starts[:-1]
        rule = torch.repeat_interleave(sizes, output_size=size)
        within = torch.arange(size, device=rule.device) - starts[rule]
        per_state = sizes // self.states[parents]
        return self.first_state[parents[rule]] + within // per_state[rule]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Grammar":
        """The same grammar on another device or in another floating-point type."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return replace(
            self,
            states=moved(self.states),
            binary_rules=moved(self.binary_rules),
            unary_rules=moved(self.unary_rules),
            root=moved(self.root),
            binary=moved(self.binary),
            unary=moved(self.unary),
            hierarchy=moved(self.hierarchy),
            factored=None if self.factored is None else self.factored.map(moved),
            kruskal=None if self.kruskal is None else self.kruskal.map(moved),
            lexical=replace(
                self.lexical,
                row=moved(self.lexical.row),
                state=moved(self.lexical.state),
                value=moved(self.lexical.value),
                weight=moved(self.lexical.weight),
                source=moved(self.lexical.source),
                backoff=moved(self.lexical.backoff),
            ),
        )


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


def starts_of(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
