"""Charts without pruning -> trees: every rule of a grammar, at every split.

The posterior of a skeletal rule at a split is `anchored`, of a step from bottom to top

    sum over states of I(bottom b) C[a, b] O(top a) / Z

`decode.py` says what they are worth, and builds the trees. There are far too many edges to list, so the best split of
each rule and the best rule of each parent are found for all spans of a width at once.

Nodes are numbered by layer (bottom, top), cell and symbol, cells by width, start and sentence, as in the charts.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.chart.decode.decode import NEGLIGIBLE, BestTrees, Decoder, as_lists
from lvpcfg.chart.decode.spans import Cell, Steps
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, Block, DenseBlock, select
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart, FastForm, Spans
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.errors import InputError
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import FREE

CHUNK = 1 << 22  # numbers held at once


class Exhaustive:
    """Decodes the charts of one grammar."""

    def __init__(self, grammar: Grammar, form: FastForm, decoder: str) -> None:
        self.decoder = Decoder(decoder, grammar, FineRules(grammar), grammar.signed)
        self.form = form.scored_rules
        if self.form is None and decoder != FREE:
            raise InputError(f"this CP form has no list of rules, which {decoder} scores: decode it with {FREE}.")
        self.rules, self.symbols = grammar.binary_rules, len(grammar.symbols)
        self.inner = len(grammar.symbols.interminals)
        self.plain = bool((grammar.states == 1).all())
        member = torch.nn.functional.one_hot(grammar.symbol_of_state, self.symbols)
        states = form.interminals
        self.of_phrases = member[:states, : self.inner]  # [states, symbols]
        self.of_tags = member[states:, self.inner :]

    @torch.inference_mode()
    def trees(self, chart: Chart, outside: Outside, k: int = 1) -> list[list[Skeleton]]:
        """The best tree of each sentence; by free recall the k best. None where there is none."""
        possible = chart.log_z > -torch.inf
        if self.decoder.name == FREE:
            nodes, posterior, lengths = self._nodes(chart, outside)
            return self.decoder.free_recall(nodes, posterior, lengths, possible, k)
        if chart.form.projects and self.form is not None:
            chart = chart.seen_through(self.form.to(chart.word.dtype))  # its cells as children of rules
        found = self.decoder.or_recall(lambda decoder: as_lists(SymbolChart(self, chart, outside, decoder).skeletons()))
        return [some if has_tree else [] for some, has_tree in zip(found, possible.tolist(), strict=True)]

    def _nodes(self, chart: Chart, outside: Outside) -> tuple[Nodes, Tensor, Tensor]:
        """All symbols of all spans, their posteriors, and the lengths of sentences."""
        first = chart.first_cells
        layers = [
            self.by_symbol(chart.bottom.cells * outside.bottom.cells, chart.word * outside.word),
            self.by_symbol(chart.top.cells * outside.top.cells, chart.word_top * outside.word_top),
        ]
        node = torch.arange(2 * layers[0].numel(), device=chart.word.device)
        cell, top = node % layers[0].numel() // self.symbols, node >= layers[0].numel()
        width = torch.searchsorted(first, cell, right=True)
        row = cell - first[width - 1]
        nodes = Nodes(row % chart.batch, row // chart.batch, width, node % self.symbols, top)
        lengths = torch.full((chart.batch,), chart.length, device=node.device)
        lengths = lengths if chart.lengths is None else chart.lengths
        return nodes, torch.cat(layers).flatten(), lengths

    @torch.inference_mode()
    def steps(self, chart: Chart, outside: Outside, cells: Sequence[Cell]) -> Steps:
        """The posteriors of the steps over some spans."""
        found: Steps = {cell: [] for cell in cells}
        phrases = [cell for cell in cells if cell[2] > 1]
        words = [cell for cell in cells if cell[2] == 1]
        of_words = self._rows(chart, words)
        tags = self.tags(chart.word_top[of_words] * outside.word_top[of_words])
        _add(found, words, torch.diag_embed(tags), self.inner, self.inner)
        rows = self._rows(chart, phrases)
        above, below = outside.top.cells[rows], chart.bottom.cells[rows]
        if chart.form.closure is None or chart.form.promotion is None:
            _add(found, phrases, torch.diag_embed(self.phrases(below * above)), 0, 0)
            return found
        for some, over, under, closure, first in (
            (phrases, above, below, chart.form.closure, 0),
            (words, outside.top.cells[of_words], chart.word[of_words], chart.form.promotion, self.inner),
        ):
            size = max(1, CHUNK // closure.numel())
            for begin in range(0, len(some), size):
                part = slice(begin, begin + size)
                joint = self.joint(under[part], closure, over[part], first > 0)
                _add(found, some[part], joint.transpose(1, 2), 0, first)
        return found

    def _rows(self, chart: Chart, cells: Sequence[Cell]) -> Int64[Tensor, "cells"]:
        sentence, start, width = torch.tensor(cells, device=chart.word.device).long().view(-1, 3).unbind(1)
        return take(chart.first_cells, width - 1) + start * chart.batch + sentence

    def joint(
        self,
        below: Float[Tensor, "cells states"],
        closure: Float[Tensor, "states inner"],
        above: Float[Tensor, "cells inner"],
        words: bool,
    ) -> Float[Tensor, "cells symbols_below symbols_above"]:
        """The posteriors of all steps over spans, of which the bottoms are words or phrases."""
        joint = self.phrases(below.unsqueeze(2) * closure * above.unsqueeze(1))
        member = self.tags if words else self.phrases
        return joint if self.plain else member(joint.transpose(1, 2)).transpose(1, 2)

    def by_symbol(
        self, phrases: Float[Tensor, "cells inner"], words: Float[Tensor, "words word_states"]
    ) -> Float[Tensor, "cells symbols"]:
        """Sums over the states of each symbol; words are the first cells."""
        tags = torch.nn.functional.pad(self.tags(words), (0, 0, 0, len(phrases) - len(words)))
        return torch.cat([self.phrases(phrases), tags], 1)

    def phrases(self, values: Float[Tensor, "*cells inner"]) -> Float[Tensor, "*cells interminals"]:
        """Sums over the states of each interminal."""
        return values if self.plain else values @ self.of_phrases.to(values.dtype)

    def tags(self, values: Float[Tensor, "*cells word_states"]) -> Float[Tensor, "*cells preterminals"]:
        """Sums over the states of each preterminal."""
        return values if self.plain else values @ self.of_tags.to(values.dtype)


class SymbolChart:
    """The recursion over symbols for one batch of sentences."""

    def __init__(self, grammar: Exhaustive, chart: Chart, outside: Outside, decoder: str) -> None:
        assert isinstance(chart.form, TensorForm)
        self.grammar, self.chart, self.outside, self.form = grammar, chart, outside, chart.form
        self.worth, self.real = grammar.decoder.worth(decoder), grammar.decoder.real
        self.first = chart.first_cells
        self.tops = len(chart.top.cells) * grammar.symbols  # where the nodes of the top layer begin
        self.best = BestTrees(2 * self.tops + chart.batch, chart.word)
        # The worth of the best trees below the tops of spans.
        self.spans = Spans.allocate(chart.word.new_empty, chart.length, chart.batch, grammar.inner)
        self._words()
        for width in range(2, chart.length + 1):
            self._fill(width)
        self._roots()

    def _nodes(self, cell: Tensor, symbol: Tensor, top: bool) -> Tensor:
        return cell * self.grammar.symbols + symbol + (self.tops if top else 0)

    def _words(self) -> None:
        chart, outside, grammar = self.chart, self.outside, self.grammar
        cell = torch.arange(len(chart.word), device=chart.word.device).unsqueeze(1)
        tag = grammar.inner + torch.arange(grammar.symbols - grammar.inner, device=cell.device)
        bottom = self.worth.tag(grammar.tags(chart.word * outside.word))
        self._put(self._nodes(cell, tag, False), self.best.nothing, self.best.nothing, bottom)
        posterior = grammar.tags(chart.word_top * outside.word_top)
        self.word = bottom + self.worth.step(posterior, posterior, self.real[grammar.inner :])
        self._put(self._nodes(cell, tag, True), self._nodes(cell, tag, False), self.best.nothing, self.word)
        phrases = chart.word.new_full((len(chart.word), grammar.inner), -torch.inf)
        if self.form.promotion is not None:
            top = grammar.phrases(chart.top[0] * outside.top[0])
            phrases = self._steps(chart.word, self.form.promotion, outside.top[0], top, bottom, cell, grammar.inner)
        self.spans.of_width(1).copy_(phrases)

    def _fill(self, width: int) -> None:
        chart, form, outside, grammar = self.chart, self.form, self.outside, self.grammar
        cells = torch.arange(len(chart.bottom[width - 1]), device=chart.word.device)
        cell = (self.first[width - 1] + cells).unsqueeze(1)
        phrase = torch.arange(grammar.inner, device=cell.device)
        posterior = grammar.phrases(chart.bottom[width - 1] * outside.bottom[width - 1])
        bottom, left, right = self._best_rules(width, posterior)
        self._put(self._nodes(cell, phrase, False), left, right, bottom)
        top = grammar.phrases(chart.top[width - 1] * outside.top[width - 1])
        if form.closure is not None:
            above = outside.top[width - 1]
            worth = self._steps(chart.bottom[width - 1], form.closure, above, top, bottom, cell, 0)
        else:
            worth = bottom + self.worth.step(top, top, self.real[: grammar.inner])
            below = self._nodes(cell, phrase, False)
            self._put(self._nodes(cell, phrase, True), below, self.best.nothing, worth)
        self.spans.of_width(width).copy_(worth)

    def _put(self, nodes: Tensor, left: Tensor | int, right: Tensor | int, worth: Tensor) -> None:
        left, right = (
            torch.full_like(nodes, each) if isinstance(each, int) else each.expand_as(nodes) for each in (left, right)
        )
        self.best.put(nodes.flatten(), left.flatten(), right.flatten(), worth.flatten())

    def _best_rules(
        self, width: int, parents: Float[Tensor, "cells interminals"]
    ) -> tuple[
        Float[Tensor, "cells interminals"], Int64[Tensor, "cells interminals"], Int64[Tensor, "cells interminals"]
    ]:
        """The worth of the best rule of each bottom symbol, and the nodes of its children.

        `parents` are the posteriors of the bottom symbols.
        """
        chart, form, outside, grammar = self.chart, self.form, self.outside, self.grammar
        beta = form.pad(outside.bottom[width - 1])
        values, splits, rules = [], [], []
        for term in form.terms(width):
            block = form.blocks[term]
            posterior = block.anchored(beta, *chart.operands(term, width), form.weights[term])  # [rules, cells, splits]
            if grammar.decoder.signed:
                grammar.decoder.negative += int((posterior < -NEGLIGIBLE).sum())
            parent, *children = grammar.rules.index_select(0, block.rules).unbind(1)
            worth = self.worth.rule(posterior, select(parents, parent.unsqueeze(1)))
            value, split = self._best_split(block, width, worth.add_(self._children(block, width, *children)))
            values.append(value)
            splits.append(split)
            rules.append(block.rules)
        cells = len(parents)
        if not values:
            worth = parents.new_full((cells, grammar.inner), -torch.inf)
            none = torch.full_like(worth, self.best.nothing, dtype=torch.int64)
            return worth, none, none
        value, split, rule = torch.cat(values), torch.cat(splits), torch.cat(rules)
        parent = grammar.rules.index_select(0, rule).select(1, 0).unsqueeze(1).expand_as(value)
        best = value.new_full((grammar.inner, cells), -torch.inf).scatter_reduce(0, parent, value, "amax")
        rows = torch.arange(len(rule), dtype=torch.int32, device=rule.device).unsqueeze(1)
        rows = torch.where(value == best.gather(0, parent), rows, len(rule))
        none = torch.full_like(best, len(rule), dtype=torch.int32)
        row = none.scatter_reduce(0, parent, rows, "amin").clamp_max(len(rule) - 1).long()  # the first of equals
        rule, split = rule.take(row), split.gather(0, row)
        _, b, c = grammar.rules[rule].unbind(-1)
        within = torch.arange(cells, device=rule.device)
        left = self._nodes(self.first[split - 1] + within, b, True)
        right = self._nodes(self.first[width - split - 1] + within + split * chart.batch, c, True)
        return best.T, left.T, right.T

    def _children(self, block: Block | DenseBlock, width: int, left: Tensor, right: Tensor) -> Tensor:
        """The worth of the children of rules, [rules, cells, splits]."""
        inner, child_types = self.grammar.inner, block.child_types
        if child_types == PHRASES:
            lefts, rights = self.spans.children(width, self.form.narrowest)
            return select(lefts, left.unsqueeze(1), 2).add_(select(rights, right.unsqueeze(1), 2)).squeeze(-1)
        first, last = (self.chart.window(self.word, width, side, 0) for side in (WORD_FIRST, WORD_LAST))
        lefts = self.spans.rest(width, WORD_LAST) if child_types == WORD_LAST else first
        rights = self.spans.rest(width, WORD_FIRST) if child_types == WORD_FIRST else last
        left = left if child_types == WORD_LAST else left - inner
        right = right if child_types == WORD_FIRST else right - inner
        return select(lefts, left.unsqueeze(1)) + select(rights, right.unsqueeze(1))

    def _best_split(self, block: Block | DenseBlock, width: int, worth: Tensor) -> tuple[Tensor, Tensor]:
        """[rules, cells, splits] -> the worth of the best split, and the width of its left child, [rules, cells]."""
        if block.child_types == PHRASES:
            value, split = worth.max(-1)
            return value, split.add_(self.form.narrowest)
        value = worth.squeeze(-1)
        return value, torch.full_like(value, width - 1 if block.child_types == WORD_LAST else 1, dtype=torch.int64)

    def _steps(
        self, below: Tensor, closure: Tensor, above: Tensor, top: Tensor, bottom: Tensor, cell: Tensor, symbol: int
    ) -> Tensor:
        """Finds the best step to each top symbol from the bottom symbols, of which `symbol` is the first.

        `below` and `above` are inside and outside scores of states, `top` the posteriors of the symbols above, `bottom`
        the worth of the best trees below. Returns the worth of the best trees with the step, [cells, interminals].
        """
        grammar, parts = self.grammar, []
        for inside, outside in zip(*(x.split(max(1, CHUNK // closure.numel())) for x in (below, above)), strict=True):
            parts.append(grammar.joint(inside, closure, outside, symbol > 0))
        worth = self.worth.step(torch.cat(parts), top.unsqueeze(1), self.real[: grammar.inner])
        worth, source = (bottom.unsqueeze(2) + worth).max(1)
        phrase = torch.arange(grammar.inner, device=cell.device)
        self._put(self._nodes(cell, phrase, True), self._nodes(cell, source + symbol, False), self.best.nothing, worth)
        return worth

    def _roots(self) -> None:
        """The best symbol of each sentence."""
        chart, outside, grammar, cells = self.chart, self.outside, self.grammar, self.chart.sentence_cells
        symbol = torch.arange(grammar.symbols, device=chart.word.device)
        node = self._nodes(cells.unsqueeze(1), symbol, True)  # [batch, symbols]
        phrases, of_phrases = (layer.cells.index_select(0, cells) for layer in (chart.top, outside.top))
        words, of_words = (layer.narrow(0, 0, chart.batch) for layer in (chart.word_top, outside.word_top))
        tags = torch.where(chart.is_word, grammar.tags(words * of_words), 0)
        posterior = torch.cat([grammar.phrases(phrases * of_phrases), tags], 1)
        worth = self.worth.rule(posterior, torch.ones_like(posterior)) + self.best.worth[node]
        self.root_worth, best = worth.max(1)
        self.roots = torch.where(
            self.root_worth > -torch.inf, node.gather(1, best.unsqueeze(1)).squeeze(1), self.best.nothing
        )

    def skeletons(self) -> list[Skeleton | None]:
        """The best trees."""
        lengths = torch.full_like(self.roots, self.chart.length) if self.chart.lengths is None else self.chart.lengths

        def describe(node: Tensor) -> tuple[Tensor, ...]:
            cell = node % self.tops // self.grammar.symbols
            width = torch.searchsorted(self.first, cell, right=True)
            return (cell - self.first[width - 1]) // self.chart.batch, width, node % self.grammar.symbols

        return self.best.skeletons(self.roots, lengths, describe)


def _add(
    steps: Steps, cells: Sequence[Cell], posterior: Float[Tensor, "cells above below"], first: int, first_below: int
) -> None:
    """Steps that are possible; the numbers of symbols begin with those that are given."""
    for place, above, below in (posterior != 0).nonzero().tolist():
        value = float(posterior[place, above, below])
        steps[cells[place]].append((first + above, first_below + below, value))
