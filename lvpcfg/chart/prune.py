"""Coarse to fine (Petrov & Klein 2007): what the grammar without its states leaves of the charts of some sentences.

The coarse grammar has one state a symbol: p(a -> b c) is the mean of the fine rule over the states of a, weighted
by how often they are expected. Its posteriors are computed in charts over all spans; symbols of spans below a
threshold are dropped, and the rules that join the others make a `Forest`, in which fine grammars are run.

Every span has bottom nodes, made by binary rules or a word, and top nodes above any number of unary rules. The
step between the two is one rule of the forest, C^{a,b} [m_a, m_b]: a block of the closure, with the identity in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.chart.build import exact, unary_closure
from lvpcfg.chart.forest import Forest
from lvpcfg.chart.partition import Problem, Solution, solve_outside
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar, starts_of


class FineRules:
    """The rules of a grammar as forests number them: binary rules, steps from bottom to top, root rules."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.factored = grammar, grammar.factored
        states, symbols = grammar.states, len(grammar.symbols)
        device = states.device
        self.first = grammar.first_state
        reach = torch.eye(symbols, device=device)
        reach[grammar.unary_rules[:, 0], grammar.unary_rules[:, 1]] = 1
        for _ in range(symbols.bit_length()):
            reach = (reach @ reach).clamp_max(1)
        self.steps = reach.nonzero()  # [steps, 2]: above, below
        closure = self._closure()  # [top states, bottom states]
        above, below = self.steps.unbind(1)
        volume = states[above] * states[below]
        step = torch.repeat_interleave(volume)
        within = torch.arange(len(step), device=device) - starts_of(volume)[step]
        row = self.first[above[step]] + within // states[below[step]]
        column = self.first[below[step]] + within % states[below[step]]
        self.values = torch.cat([grammar.binary, closure[row, column], grammar.root])
        ones = torch.ones_like(states)
        self.sizes = torch.cat(
            [
                states[grammar.binary_rules],
                torch.stack([states[above], states[below], torch.ones_like(above)], 1),
                torch.stack([ones, states, ones], 1),
            ]
        )

    def leaf(self, words: Tensor, word: Tensor, symbol: Tensor) -> Tensor:
        """[words, tag states] -> [leaves, states]: the states of the symbol of each leaf, for its word."""
        inner = len(self.grammar.symbols.interminals)
        state = torch.arange(int(self.grammar.states[inner:].max()), device=word.device)
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


def coarse_grammar(grammar: Grammar) -> Grammar:
    """One state a symbol; its lexical table stays that of the fine grammar, see `Coarse.fold`."""
    weight = state_weights(grammar)
    one = torch.ones_like(grammar.states)
    of_symbol = weight.split(grammar.states.tolist())
    binary, unary = grammar.root.new_zeros(len(grammar.binary_rules)), grammar.root.new_zeros(len(grammar.unary_rules))
    for means, rules, tensor in (
        (binary, grammar.binary_rules, grammar.binary_tensor),
        (unary, grammar.unary_rules, grammar.unary_tensor),
    ):
        for rule, parent in enumerate(rules[:, 0].tolist()):
            means[rule] = tensor(rule).flatten(1).sum(1) @ of_symbol[parent]
        means.clamp_min_(0)  # approximations may be below
    root = grammar.root.new_zeros(len(one)).index_add(0, grammar.symbol_of_state, grammar.root)
    return replace(grammar, states=one, binary=binary, unary=unary, root=root)


def state_weights(grammar: Grammar) -> Tensor:
    """[states]: how often each is expected, given its symbol."""
    expected = expected_states(grammar)
    total = expected.new_zeros(len(grammar.symbols)).index_add(0, grammar.symbol_of_state, expected)
    uniform = 1 / grammar.states.to(expected.dtype)
    symbol = grammar.symbol_of_state
    return torch.where(total[symbol] > 0, expected / total[symbol].clamp_min(1e-300), uniform[symbol])


@dataclass(frozen=True, eq=False)
class Kept:
    """What is left of some charts: symbols of spans, as parallel vectors. They are the first nodes of a `Forest`."""

    sentence: Tensor
    start: Tensor
    width: Tensor
    symbol: Tensor
    top: Tensor  # whether it stands above unary rules
    inside: Tensor  # log alpha
    outside: Tensor  # log beta / Z

    @staticmethod
    def joined(parts: Sequence["Kept"]) -> "Kept":
        return Kept(*(torch.cat(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


class Coarse:
    """The coarse pass of a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = coarse_grammar(grammar)
        self.inner = len(grammar.symbols.interminals)
        self.form = exact(self.grammar)
        tags = grammar.symbol_of_state[int(grammar.first_state[self.inner]) :] - self.inner
        weight = state_weights(grammar)[-len(tags) :]
        # [tag states, tags]: what a word is worth to a tag, whatever its state
        self.fold = torch.nn.functional.one_hot(tags, len(grammar.symbols) - self.inner).to(weight) * weight.unsqueeze(
            1
        )
        self.rules = FineRules(self.grammar)
        self.log_rule = self.rules.values.double().log()

    def kept(self, leaf: Tensor, threshold: float, numbers: Tensor) -> Kept:
        """What is left of sentences of equal length; `leaf` [length, batch, tag states] is that of the fine grammar."""
        ones = torch.ones(leaf.shape[1], dtype=torch.float64, device=leaf.device)
        solutions = solve_outside(Problem(self.form, leaf @ self.fold), ones)
        return Kept.joined([self._survivors(solution, threshold, numbers) for solution in solutions])

    def _survivors(self, solution: Solution, threshold: float, numbers: Tensor) -> Kept:
        chart, outside = solution.chart, solution.outside
        assert outside is not None
        algebra, batch, parts = chart.algebra, chart.batch, []
        layers = (
            (chart.bottom, outside.bottom, chart.word, outside.word),
            (chart.top, outside.top, chart.word_top, outside.word_top),
        )
        size = torch.tensor([len(cells) for cells in chart.bottom], device=chart.word.device)
        width = torch.repeat_interleave(size, output_size=int(size.sum()))
        cell = torch.arange(len(width), device=width.device) - starts_of(size)[width]
        exponent = torch.cat(chart.exponent)
        for top, (values, gradients, word, word_gradient) in enumerate(layers):
            for first, alpha, beta in (
                (0, torch.cat(values), torch.cat(gradients)),
                (self.inner, word, word_gradient),
            ):
                posterior = algebra.posterior(alpha, beta)
                place, symbol = (posterior > threshold).nonzero().unbind(1)
                at = cell[place]
                inside = algebra.log(alpha[place, symbol], exponent[place].squeeze(1))
                parts.append(
                    Kept(
                        sentence=numbers[solution.sentences[at % batch]],
                        start=at // batch,
                        width=width[place] + 1,
                        symbol=symbol + first,
                        top=torch.full_like(place, top, dtype=torch.bool),
                        inside=inside,
                        outside=posterior[place, symbol].to(inside.dtype).log() - inside,
                    )
                )
        return Kept.joined(parts)

    @cached_property
    def _by_children(self) -> tuple[Tensor, Tensor]:
        """Binary rules sorted by their children, and where those of each pair begin."""
        symbols = len(self.grammar.symbols)
        _, b, c = self.grammar.binary_rules.unbind(1)
        order = (b * symbols + c).argsort(stable=True)
        return order, starts_of(torch.bincount(b * symbols + c, minlength=symbols * symbols))

    @cached_property
    def _by_below(self) -> tuple[Tensor, Tensor]:
        """Steps sorted by the symbol below, and where those of each begin."""
        below = self.rules.steps[:, 1]
        return below.argsort(stable=True), starts_of(torch.bincount(below, minlength=len(self.grammar.symbols)))

    def forest(self, kept: Kept, lengths: Tensor, threshold: float) -> Forest:
        """The ways to join what is left whose own posterior is above the threshold. `lengths` [sentences]."""
        least = math.log(threshold) if threshold > 0 else -math.inf
        device, symbols = lengths.device, len(self.grammar.symbols)
        nodes, sentences = len(kept.symbol), len(lengths)
        binary, steps = len(self.grammar.binary_rules), len(self.rules.steps)
        one = nodes + sentences + 1
        cell = starts_of(lengths * lengths)
        at = cell[kept.sentence] + kept.start * lengths[kept.sentence] + kept.width - 1
        number = torch.arange(nodes, device=device)
        tables = []  # the node of each symbol of each span: at the bottom, at the top
        for layer in (~kept.top, kept.top):
            table = torch.full((int(cell[-1]) * symbols,), -1, dtype=torch.int64, device=device)
            tables.append(table.index_copy_(0, (at * symbols + kept.symbol)[layer], number[layer]))
        below, above = tables
        parts = []

        boundary = starts_of(lengths + 1)[kept.sentence] + kept.start
        tops = number[kept.top]
        by_start = tops[boundary[tops].argsort(stable=True)]
        first = torch.searchsorted(boundary[by_start], boundary[tops] + kept.width[tops])
        last = torch.searchsorted(boundary[by_start], boundary[tops] + kept.width[tops], right=True)
        # A sentence's last boundary is never a start, so that no pair reaches into the next sentence.
        left, place = _expanded(first, last)
        left, right = tops[left], by_start[place]
        pair = kept.symbol[left] * symbols + kept.symbol[right]
        order, begin = self._by_children
        edge, place = _expanded(begin[pair], begin[pair + 1])
        left, right, rule = left[edge], right[edge], order[place]
        parent = below[(at[left] + kept.width[right]) * symbols + self.grammar.binary_rules[rule, 0]]
        width = kept.width[left] + kept.width[right]
        score = kept.outside[parent] + self.log_rule[rule] + kept.inside[left] + kept.inside[right]
        parts.append(_chosen((parent >= 0) & (score > least), 2 * width, rule, parent, left, right))

        bottoms = number[~kept.top]
        order, begin = self._by_below
        edge, place = _expanded(begin[kept.symbol[bottoms]], begin[kept.symbol[bottoms] + 1])
        left, step = bottoms[edge], order[place]
        parent = above[at[left] * symbols + self.rules.steps[step, 0]]
        ones = torch.full_like(left, one)
        score = kept.outside[parent] + self.log_rule[binary + step] + kept.inside[left]
        parts.append(
            _chosen((parent >= 0) & (score > least), 2 * kept.width[left] + 1, binary + step, parent, left, ones)
        )

        whole = number[kept.top & (kept.width == lengths[kept.sentence])]
        level = torch.full_like(whole, 2 * int(lengths.max()) + 2)
        ones = torch.full_like(whole, one)
        parent = nodes + kept.sentence[whole]
        parts.append((level, binary + steps + kept.symbol[whole], parent, whole, ones))
        level, rule, parent, left, right = (torch.cat(column) for column in zip(*parts, strict=True))
        leaves = number[~kept.top & (kept.symbol >= self.inner)]
        tops = nodes + torch.arange(sentences, device=device)
        return Forest(nodes + sentences, level, rule, parent, left, right, leaves, tops)


def _expanded(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """For every range first .. last - 1 its number, and each of its elements."""
    sizes = last - first
    number = torch.repeat_interleave(sizes)
    return number, torch.arange(len(number), device=first.device) - (starts_of(sizes)[:-1] - first)[number]


def _chosen(keep: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    return tuple(column[keep] for column in columns)
