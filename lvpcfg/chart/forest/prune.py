"""Coarse to fine (Petrov & Klein 2007): what the grammar without its states leaves of the charts of some sentences.

The coarse grammar has one state a symbol, and its binary rules are one sum of rank-one terms: an exact cover, in which
every rule is in one term (`CoarseGrammar`). Its charts are a few matrix products for each width. The posterior of a
term at a split is that of all its rules there; where it is above the threshold, its rules are looked at one by one,
and those above it are the edges of a `Forest`, in which fine grammars are run.

Every span has bottom nodes, made by binary rules or a word, and top nodes above any number of unary rules. The
step between the two is one rule of the forest, C^{a,b} [m_a, m_b]: a block of the closure, with the identity in it.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lvpcfg.chart.fast.algebra import SUM
from lvpcfg.chart.fast.build import cp_form, unary_closure
from lvpcfg.chart.fast.cp import CPByChildTypes, CPForm
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.fast.partition import Problem, Solution, solve_outside
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.tiles import pick, places
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rules import starts_of

CHUNK = 1 << 21  # numbers held at once
ALIKE = 0.1  # sentences whose lengths differ by no more than this share are in one chart,
CELLS = 1 << 14  # unless it has more cells: larger ones leave the cache


class FineRules:
    """The rules of a grammar as forests number them: binary rules, steps from bottom to top, root rules."""

    def __init__(self, grammar: Grammar) -> None:
        states, symbols = grammar.states, len(grammar.symbols)
        device = states.device
        self.first = grammar.first_state
        reach = torch.eye(symbols, device=device)
        reach[grammar.unary_rules[:, 0], grammar.unary_rules[:, 1]] = 1
        for _ in range(symbols.bit_length()):
            reach = (reach @ reach).clamp_max(1)
        self.steps = reach.nonzero()  # [steps, 2]: above, below
        above, below = self.steps.unbind(1)
        volume = states[above] * states[below]
        step = torch.repeat_interleave(volume)
        within = torch.arange(len(step), device=device) - starts_of(volume)[step]
        self.above = self.first[above[step]] + within // states[below[step]]  # of each number of the steps
        self.below = self.first[below[step]] + within % states[below[step]]
        ones = torch.ones_like(states)
        self.sizes = torch.cat(
            [
                states[grammar.binary_rules],
                torch.stack([states[above], states[below], torch.ones_like(above)], 1),
                torch.stack([ones, states, ones], 1),
            ]
        )
        self.widest_tag = int(states[len(grammar.symbols.interminals) :].max())
        self._compute(grammar)

    def with_parameters(self, grammar: Grammar) -> "FineRules":
        """The same rules with the parameters of `grammar`, differentiable by them."""
        rules = copy(self)
        rules._compute(grammar)
        return rules

    def _compute(self, grammar: Grammar) -> None:
        binary = grammar.binary.for_forests()
        self.grammar, self.cp = grammar, binary if isinstance(binary, RuleCP) else None
        closure = self._closure()  # [top states, bottom states]
        self.values = torch.cat([binary.values, closure[self.above, self.below], grammar.root])

    def leaf(self, words: Tensor, word: Tensor, symbol: Tensor) -> Tensor:
        """[words, tag states] -> [leaves, states]: the states of the symbol of each leaf, for its word."""
        inner = len(self.grammar.symbols.interminals)
        state = torch.arange(self.widest_tag, device=word.device)
        place = (self.first[symbol] - self.first[inner]).unsqueeze(1) + state
        inside = state < self.grammar.states[symbol].unsqueeze(1)
        return torch.where(inside, words[word.unsqueeze(1), torch.where(inside, place, 0)], 0)

    def _closure(self) -> Tensor:
        """Top states from bottom states, those of preterminals included."""
        grammar = self.grammar
        identity = torch.eye(len(grammar.root), dtype=grammar.root.dtype, device=grammar.root.device)
        closure, promotion = unary_closure(grammar)
        if closure is None or promotion is None:
            return identity
        inner = len(closure)
        return torch.cat([torch.cat([closure.T, promotion.T], 1), identity[inner:]])


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a forest but for those on top: symbols of spans, as parallel vectors."""

    sentence: Tensor
    start: Tensor
    width: Tensor
    symbol: Tensor
    top: Tensor  # whether it stands above unary rules


@dataclass(frozen=True, eq=False)
class Edges:
    """What is left of one chart, its nodes numbered from 0; as parallel vectors."""

    rule: Tensor
    width: Tensor  # of the parent
    parent: Tensor
    left: Tensor
    right: Tensor  # -1 under steps
    whole: Tensor  # [some]: nodes over whole sentences


class Coarse:
    """The coarse pass; `grammar` has one state a symbol, and `cover` is the sum of its binary rules."""

    def __init__(self, grammar: Grammar, cover: Factors, stages: Stages) -> None:
        self.grammar, self.rules, self.stages = grammar, FineRules(grammar), stages
        self.inner = len(grammar.symbols.interminals)
        self.form = cp_form(grammar.root, cover.u, cover.v, cover.w, grammar, by_child_types=True)
        u, *halves = self.form.weights
        v, w = torch.cat(halves).T.tensor_split(2)
        self.factors = (u, v.contiguous(), w.contiguous())  # [terms, symbols]
        # Of the three symbols of its rules, a term has two in common.
        self.mode = torch.stack([(factor != 0).sum(1) for factor in self.factors]).argmax(0)
        rules = grammar.binary_rules
        of_rules = u[:, rules[:, 0]] * v[:, rules[:, 1]] * w[:, rules[:, 2]]  # [terms, rules]
        term, rule = of_rules.nonzero().unbind(1)
        place = term * len(grammar.symbols) + rules[rule, self.mode[term]]
        self.rule_in_term = torch.zeros(len(u) * len(grammar.symbols), dtype=torch.int64, device=u.device)
        self.rule_in_term[place] = rule  # [terms * symbols]
        below = self.rules.steps[:, 1]
        self.over_phrases, self.over_words = (
            which.nonzero().squeeze(1) for which in (below < self.inner, below >= self.inner)
        )

    def forest(self, leaf: Tensor, lengths: Tensor, threshold: float) -> tuple[Forest, Nodes]:
        """The edges whose posterior is above the threshold; `leaf` is [words of all sentences, tags]."""
        first, order = starts_of(lengths), lengths.argsort()
        none = lengths[:0]
        parts = [(Edges(none, none, none, none, none, none), Nodes(none, none, none, none, none.bool()))]
        begin = 0
        for size in _alike(lengths[order].tolist()):
            numbers = order[begin : begin + size]
            begin += size
            some = lengths[numbers]
            position = torch.arange(int(some[-1]), device=lengths.device).unsqueeze(1)
            words = leaf[(first[numbers] + position).clamp_max(len(leaf) - 1)] * (position < some).unsqueeze(2)
            same = int(some[0]) == len(position)
            ones = torch.ones(size, dtype=torch.float64, device=leaf.device)
            with self.stages.stage("coarse"):
                solutions = solve_outside(Problem(self.form, words, None if same else some), ones)
            for solution in solutions:
                # What needs log-sum-exp is left without edges, and so to whole charts.
                if solution.chart.algebra is SUM:
                    with self.stages.stage("gather"):
                        edges, nodes = self._survivors(solution, some[solution.sentences], threshold)
                    parts.append((edges, replace(nodes, sentence=numbers[solution.sentences[nodes.sentence]])))
        with self.stages.stage("gather"):
            return self._joined(parts, lengths)

    @torch.inference_mode()
    def _survivors(self, solution: Solution, lengths: Tensor, threshold: float) -> tuple[Edges, Nodes]:
        """What is left of one chart. Its cells are numbered by width, start and sentence, nodes by cell and symbol."""
        chart, outside = solution.chart, solution.outside
        assert outside is not None
        device, symbols, words = lengths.device, len(self.grammar.symbols), len(chart.word)
        first = starts_of(torch.tensor([len(cells) for cells in chart.top], device=device))
        width = torch.repeat_interleave(first.diff()) + 1  # of each cell
        top = _beside(chart.top.whole, chart.word_top)  # alpha, [cells, symbols]
        bottom = _beside(chart.bottom.whole, chart.word)
        above = _beside(outside.top.whole, outside.word_top)  # beta

        tops = len(width) * symbols  # where their numbers begin
        found = []
        for rule, parent, left, right in self._binary(chart, outside, top, first, threshold):
            a, b, c = self.grammar.binary_rules.index_select(0, rule).unbind(1)
            found.append((rule, parent * symbols + a, tops + left * symbols + b, tops + right * symbols + c))
        begin = len(self.grammar.binary)
        for some, cells in ((self.over_phrases, slice(words, None)), (self.over_words, slice(words))):
            up, down = self.rules.steps[some].unbind(1)
            posterior = above[cells].index_select(1, up).mul_(bottom[cells].index_select(1, down))
            place = places(posterior.mul_(self.rules.values[begin + some]) > threshold)
            cell, step = place // len(some) + (cells.start or 0), place % len(some)
            parent, child = tops + cell * symbols + pick(up, step), cell * symbols + pick(down, step)
            found.append((begin + pick(some, step), parent, child, torch.full_like(child, -1)))
        rule, parent, left, right = (torch.cat(column) for column in zip(*found, strict=True))

        sentence = torch.arange(chart.batch, device=device)
        whole = (first[lengths - 1] + sentence).unsqueeze(1) * symbols + torch.arange(symbols, device=device)
        whole = tops + whole[top.view(-1)[whole] * above.view(-1)[whole] > threshold]
        there = torch.zeros(2 * tops, dtype=torch.bool, device=device)
        for keys in (parent, left, right[right >= 0], whole):
            there.index_fill_(0, keys, True)
        key = places(there)
        number = torch.full((2 * tops,), -1, device=device).index_copy_(0, key, torch.arange(len(key), device=device))
        cell = key % tops // symbols
        start = cell - pick(first, pick(width, cell) - 1)
        nodes = Nodes(start % chart.batch, start // chart.batch, pick(width, cell), key % symbols, key >= tops)
        right = torch.where(right < 0, -1, pick(number, right.clamp_min(0)))
        parent, left, whole = (pick(number, keys) for keys in (parent, left, whole))
        return Edges(rule, pick(nodes.width, parent), parent, left, right, whole), nodes

    def _binary(
        self, chart: Chart, outside: Outside, top: Tensor, first: Tensor, threshold: float
    ) -> Iterator[tuple[Tensor, ...]]:
        """Binary rules, and the cells of the parent and of both children."""
        term, posterior, *cells = self._terms(chart, outside, first, threshold)
        for mode, table in enumerate((outside.bottom.whole, top, top)):
            factor = self.factors[mode].to(top.dtype)
            for some in places(pick(self.mode, term) == mode).split(CHUNK // max(1, factor.shape[1])):
                rows = pick(table, pick(cells[mode], some)).mul_(pick(factor, pick(term, some)))
                rows *= (pick(posterior, some) / rows.sum(1)).unsqueeze(1)
                place = places(rows > threshold)
                edge = pick(some, place // factor.shape[1])
                rule = pick(term, edge) * len(self.grammar.symbols) + place % factor.shape[1]
                yield pick(self.rule_in_term, rule), *(pick(column, edge) for column in cells)

    def _terms(self, chart: Chart, outside: Outside, first: Tensor, threshold: float) -> tuple[Tensor, ...]:
        """Terms at splits: term, posterior, and the cells of the parent and of both children."""
        form, batch, words = chart.form, chart.batch, len(chart.word)
        assert isinstance(form, CPForm)
        none = first[:0]
        found = [(none, chart.word.new_zeros(0), none, none, none)]

        def add(term: Tensor, posterior: Tensor, width: Tensor, row: Tensor, split: Tensor) -> None:
            parent, left, right = (pick(first, part - 1) + row for part in (width, split, width - split))
            found.append((term, posterior, parent, left, right + split * batch))

        if chart.length == 1:
            return found[0]
        general, after, before, _ = form.kinds
        if isinstance(form, CPByChildTypes):  # else there are no terms for two words
            pairs = chart.pairs * (outside.bottom[1] @ form.weights[3].T)
            place = places(pairs > threshold)
            row, two = place // pairs.shape[1], torch.full_like(place, 2)
            add(place % pairs.shape[1] + general + after + before, pick(pairs.view(-1), place), two, row, two - 1)

        share = outside.combined.whole
        joint = (chart.combined.whole * share).view(-1)
        place = places(joint > threshold)  # of all splits together
        cell, term = words + place // share.shape[1], place % share.shape[1]
        width = torch.searchsorted(first, cell, right=True)
        row, joint, share = cell - pick(first, width - 1), pick(joint, place), pick(share.view(-1), place)
        one = places(term >= general)
        word_is_last = pick(term, one) < general + after
        split = torch.where(word_is_last, pick(width, one) - 1, 1)
        add(pick(term, one), pick(joint, one), pick(width, one), pick(row, one), split)
        many = places(term < general)
        sizes = torch.bincount(pick(width, many), minlength=chart.length + 1).tolist()
        columns = (pick(column, many).split(sizes) for column in (row, term, share))
        for number, (row, term, beta) in enumerate(zip(*columns, strict=True)):
            if len(row):
                left, right = chart.operands(0, number)
                posterior = left.transpose(1, 2)[row, term].mul_(right.transpose(1, 2)[row, term])  # [some, splits]
                posterior *= beta.unsqueeze(1)
                place = places(posterior > threshold)
                some, split = place // (number - 1), place % (number - 1) + 1
                known = pick(term, some), pick(posterior.view(-1), place)
                add(*known, torch.full_like(split, number), pick(row, some), split)
        return tuple(torch.cat(column) for column in zip(*found, strict=True))

    def _joined(self, parts: Sequence[tuple[Edges, Nodes]], lengths: Tensor) -> tuple[Forest, Nodes]:
        """The forest of all charts."""
        device, sentences = lengths.device, len(lengths)
        binary, steps = len(self.grammar.binary_rules), len(self.rules.steps)
        edges = Edges(*(torch.cat(columns) for columns in _columns([edges for edges, _ in parts])))
        nodes = Nodes(*(torch.cat(columns) for columns in _columns([nodes for _, nodes in parts])))
        sizes = torch.tensor([len(some.symbol) for _, some in parts], device=device)
        begin = starts_of(sizes)[:-1]
        number, one = len(nodes.symbol), len(nodes.symbol) + sentences + 1
        shift = begin.repeat_interleave(torch.tensor([len(some.rule) for some, _ in parts], device=device))
        step = edges.right < 0
        whole = edges.whole + begin.repeat_interleave(
            torch.tensor([len(some.whole) for some, _ in parts], device=device)
        )
        level, rule, parent, left, right = map(
            torch.cat,
            (
                (2 * edges.width + step.long(), torch.full_like(whole, 2 * int(lengths.max()) + 2)),
                (edges.rule, binary + steps + nodes.symbol[whole]),
                (edges.parent + shift, number + nodes.sentence[whole]),
                (edges.left + shift, whole),
                (torch.where(step, one, edges.right + shift), torch.full_like(whole, one)),
            ),
        )
        leaves = (~nodes.top & (nodes.symbol >= self.inner)).nonzero().squeeze(1)
        tops = number + torch.arange(sentences, device=device)
        return Forest(number + sentences, level, rule, parent, left, right, leaves, tops), nodes


def _columns(parts: Sequence[Edges] | Sequence[Nodes]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(vars(part).values() for part in parts), strict=True)


def _beside(phrases: Tensor, words: Tensor) -> Tensor:
    """[cells, phrases] and [words, tags], words being the first of the cells -> [cells, symbols]."""
    return torch.cat([phrases, torch.nn.functional.pad(words, (0, 0, 0, len(phrases) - len(words)))], 1)


def _alike(lengths: Sequence[int]) -> list[int]:
    """Numbers of sentences, whose lengths are ascending, that are put in one chart."""
    sizes: list[int] = []
    shortest = 0
    for length in lengths:
        if not sizes or length > shortest * (1 + ALIKE) or (sizes[-1] + 1) * length**2 > CELLS:
            sizes.append(0)
            shortest = length
        sizes[-1] += 1
    return sizes
