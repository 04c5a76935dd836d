"""Whole charts: sentences -> trees, by one grammar without pruning."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.chart.decode.chains import Chains
from lvpcfg.chart.decode.decode import Decoder, as_lists
from lvpcfg.chart.decode.decoded import BEST, Decoded, Wanted
from lvpcfg.chart.decode.exhaustive import Exhaustive
from lvpcfg.chart.decode.spans import Cell, Steps, cells_of, cells_of_charts
from lvpcfg.chart.decode.viterbi import best_derivations
from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.fast.build import form
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.fast.logarithms import LogChart
from lvpcfg.chart.fast.marginals import by_symbol
from lvpcfg.chart.fast.partition import Problem, Solution, log_partition, solve_outside
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import VITERBI

CELLS = 1 << 27  # numbers held by a batch at the most, roughly


class WholeCharts:
    """Parses sentences of one length. `stages` is told how long it takes."""

    def __init__(self, grammar: Grammar, decoder: str, stages: Stages) -> None:
        self.grammar, self.name, self.stages = grammar, decoder, stages
        self.ways: Counter[str] = Counter()  # how many sentences needed more than the given type of numbers

    @cached_property
    def form(self) -> FastForm:
        return form(self.grammar, fixed=True)

    @cached_property
    def _exhaustive(self) -> Exhaustive:
        return Exhaustive(self.grammar, self.form, self.name)

    @property
    def decoder(self) -> Decoder:
        return self._exhaustive.decoder

    def batch(self, length: int) -> int:
        """How many sentences are parsed at once: as many as keep charts and rule scores within bounds."""
        return min(64, CELLS // max(1, self.numbers(length)))

    def numbers(self, length: int) -> int:
        """Of the chart of a sentence, and of what it is computed with, roughly."""
        binary = self.grammar.binary
        lanes = self.form.lanes + max(binary.state_counts)
        between_phrases = int((binary.child_types == 0).sum())  # rules that have a score at every split
        return length * length * (16 * lanes + 2 * between_phrases) + 2 * length * self.form.matrix_size

    def parse(
        self,
        leaf: Float[Tensor, "length batch tag_states"],
        wanted: Wanted = BEST,
        log_z: bool = True,
        others: Sequence[list[Skeleton]] | None = None,
    ) -> Decoded:
        """The best tree of each sentence; by free recall as many as are wanted. Viterbi has log Z on request.

        Where spans are wanted, they are those of the `others` of each sentence too.
        """
        batch = leaf.shape[1]
        found = torch.full((batch,), -torch.inf, dtype=torch.float64)
        trees: list[list[Skeleton]] = [[]] * batch
        steps: Steps = {}
        if self.name == VITERBI:
            with self.stages.stage("fine"):
                trees = as_lists(self._viterbi(leaf))
            if log_z and not wanted.spans:
                found = log_partition(self.form, leaf)[0].cpu()
        if self.name != VITERBI or wanted.spans:
            ones = torch.ones(batch, dtype=torch.float64, device=leaf.device)
            with self.stages.stage("fine"):
                solutions = solve_outside(Problem(self.form, leaf), ones)
            for solution in solutions:
                numbers = solution.sentences.tolist()
                found[numbers] = solution.chart.log_z.cpu()
                if self.name != VITERBI:
                    with self.stages.stage("decode"):
                        decoded = self._decode(solution, leaf, wanted.trees)
                    for number, some in zip(numbers, decoded, strict=True):
                        trees[number] = some
                if wanted.spans:
                    more = others or [[]] * batch
                    cells = cells_of([[*trees[number], *more[number]] for number in numbers])
                    if wanted.everywhere:
                        cells = cells_of_charts(len(numbers), len(leaf))
                    some_steps = self._steps(solution, cells)
                    steps |= {(numbers[place], *span): known for (place, *span), known in some_steps.items()}
        return Decoded(trees, found, steps)

    def _decode(self, solution: Solution, leaf: Tensor, k: int) -> list[list[Skeleton]]:
        self.ways[solution.level] += len(solution.sentences)
        if solution.sums is None:  # the best derivation never underflows
            some = bool((solution.chart.log_z > -torch.inf).any())
            return (
                as_lists(self._viterbi(leaf.index_select(1, solution.sentences)))
                if some
                else [[] for _ in range(len(solution.sentences))]
            )
        return self._exhaustive.trees(*solution.sums, k)

    def _steps(self, solution: Solution, cells: list[Cell]) -> Steps:
        if solution.sums is not None:
            return self._exhaustive.steps(*solution.sums, cells)
        # By log-sum-exp there are posteriors of symbols alone: a label is as likely as its likelier layer, at least.
        assert isinstance(solution.chart, LogChart)
        layers = torch.stack([by_symbol(layer, self.grammar) for layer in solution.chart.posteriors()]).amax(0)
        return {
            (sentence, start, width): [
                (symbol, symbol, posterior)
                for symbol, posterior in enumerate(layers[sentence, start, start + width - 1].tolist())
            ]
            for sentence, start, width in cells
        }

    def _viterbi(self, leaf: Tensor) -> list[Skeleton | None]:
        """Best derivations, with the chains of unary rules written into their symbols."""
        found, _ = best_derivations(self._viterbi_form, leaf)
        symbol = self._symbol_of_state
        return [
            None
            if nodes is None
            else [
                Node(
                    node.start,
                    node.width,
                    symbol[node.top],
                    symbol[node.bottom],
                    node.split,
                    chain=tuple(symbol[state] for state in self._chains.path(node.top, node.bottom))
                    if node.top != node.bottom
                    else (),
                )
                for node in nodes
            ]
            for nodes in found
        ]

    @cached_property
    def _symbol_of_state(self) -> list[int]:
        return self.grammar.symbol_of_state.tolist()

    @cached_property
    def _chains(self) -> Chains:
        return Chains.of_states(self.grammar)

    @cached_property
    def _viterbi_form(self) -> FastForm:
        """The rules with the best unary chain between two states instead of their sum."""
        if self.form.closure is None:
            return self.form
        closure, promotion = self._chains.closure(self.form.interminals)
        return replace(self.form, closure=closure, promotion=promotion)
