"""Coarse to fine (Petrov & Klein 2007): what the grammar without its states leaves of the charts of some sentences.

The coarse grammar has one state for each symbol, and its binary rules are one sum of rank-one terms: an exact cover, in
which every rule is in one term (`CoarseGrammar`). Its charts are a few matrix products for each width. The posterior of
a term at a split is that of all its rules there; where it is above the threshold, it is shared out among the rules, and
those above the threshold become the edges of a `Forest`, in which fine grammars are run.

Every span has bottom nodes, for binary rules and words, and top nodes above any number of unary rules. The step from
one to the other is one rule of the forest, C^{a,b} [m_a, m_b]: a block of the closure, with the identity in it.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from lvpcfg.chart.fast.build import cp_form, unary_closure
from lvpcfg.chart.fast.cp import CPForm, SortedCPForm
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.fast.partition import Problem, solve_outside
from lvpcfg.chart.forest import arrays
from lvpcfg.chart.forest.arrays import repeated, take, true_indices
from lvpcfg.chart.forest.packed import Forest
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rules import starts_of

SIMILAR = 0.1  # sentences whose lengths differ by no more than this share are in one chart,
CELLS = 1 << 14  # unless, on the CPU, it has more cells: larger ones leave the cache
MOST = 1 << 22  # terms at splits of a sentence: where more are left, forests and the time they take have no bound


class FineRules:
    """The rules of a grammar as forests number them: binary rules, steps from bottom to top, root rules."""

    def __init__(self, grammar: Grammar) -> None:
        states, symbols, self.inner = grammar.states, len(grammar.symbols), len(grammar.symbols.interminals)
        self.widest_tag = max(grammar.binary.state_counts[self.inner :])
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
        self._compute(grammar)

    def with_parameters(self, grammar: Grammar) -> "FineRules":
        """The same rules with the parameters of `grammar`, differentiable by them."""
        rules = copy(self)
        rules._compute(grammar)
        return rules

    def _compute(self, grammar: Grammar) -> None:
        binary = grammar.binary.for_forests()
        self.grammar, self.cp, self.most = grammar, binary.cp, binary.most
        closure = self._closure()  # [top states, bottom states]
        self.values = torch.cat([binary.values, closure[self.above, self.below], grammar.root])

    def leaf(
        self, words: Float[Tensor, "words tag_states"], word: Int[Tensor, "leaves"], symbol: Int[Tensor, "leaves"]
    ) -> Float[Tensor, "leaves states"]:
        """Q of each leaf: the states of its symbol, for its word."""
        state = torch.arange(self.widest_tag, device=word.device)
        place = (self.first[symbol] - self.first[self.inner]).unsqueeze(1) + state
        inside = state < self.grammar.states[symbol].unsqueeze(1)
        return torch.where(inside, words[word.unsqueeze(1), torch.where(inside, place, 0)], 0)

    def _closure(self) -> Float[Tensor, "top bottom"]:
        """From bottom states to top states, those of preterminals included."""
        grammar = self.grammar
        identity = torch.eye(len(grammar.root), dtype=grammar.root.dtype, device=grammar.root.device)
        closure, promotion = unary_closure(grammar)
        if closure is None or promotion is None:
            return identity
        inner = len(closure)
        return torch.cat([torch.cat([closure.T, promotion.T], 1), identity[inner:]])


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a forest but for those on top of sentences: symbols of spans, as parallel vectors."""

    sentence: Int64[Tensor, "nodes"]
    start: Int64[Tensor, "nodes"]
    width: Int64[Tensor, "nodes"]
    symbol: Int64[Tensor, "nodes"]
    top: Bool[Tensor, "nodes"]  # whether it is above unary rules


@dataclass(frozen=True, eq=False)
class Edges:
    """What is left of one chart, its nodes numbered from 0; as parallel vectors."""

    rule: Int64[Tensor, "edges"]
    width: Int64[Tensor, "edges"]  # of the parent
    parent: Int64[Tensor, "edges"]
    left: Int64[Tensor, "edges"]
    right: Int64[Tensor, "edges"]  # -1 under steps
    roots: Int64[Tensor, "roots"]  # top nodes over all words of a sentence


@dataclass(frozen=True, eq=False)
class Splits:
    """Terms at splits, or rules at splits; as parallel vectors."""

    number: Int64[Tensor, "splits"]  # of the term, or of the rule
    posterior: Float[Tensor, "splits"]
    parent: Int64[Tensor, "splits"]  # cells
    left: Int64[Tensor, "splits"]
    right: Int64[Tensor, "splits"]

    @staticmethod
    def joined(parts: Sequence["Splits"]) -> "Splits":
        return Splits(*(torch.cat(columns) for columns in _columns(parts)))


class Coarse:
    """The coarse pass; `grammar` has one state for each symbol, and `cover` is the sum of its binary rules."""

    def __init__(self, grammar: Grammar, cover: Factors, stages: Stages) -> None:
        self.grammar, self.rules, self.stages = grammar, FineRules(grammar), stages
        self.inner = len(grammar.symbols.interminals)
        self.form = cp_form(grammar.root, cover.u, cover.v, cover.w, grammar, sort_terms=True)
        u, *halves = self.form.weights
        v, w = torch.cat(halves).T.tensor_split(2)  # [terms, symbols], as u
        # Of the three symbols of its rules, those of a term have two in common. The third is its parent (0), its left
        # child (1) or its right child (2).
        self.varies = torch.stack([(factor != 0).sum(1) for factor in (u, v, w)]).argmax(0)  # [terms]
        rules = grammar.binary_rules
        of_rules = u[:, rules[:, 0]] * v[:, rules[:, 1]] * w[:, rules[:, 2]]  # [terms, rules]
        # The rules of all terms, term after term: their numbers, the symbol that varies, and its factor.
        term, self.rule_of_term = of_rules.nonzero().unbind(1)
        self.rules_of_term = torch.bincount(term, minlength=len(u))
        self.first_of_term = starts_of(self.rules_of_term)
        self.symbol_of_term = rules[self.rule_of_term, self.varies[term]]
        v_or_w = torch.stack([v, w])[(self.varies[term] - 1).clamp_min(0), term, self.symbol_of_term]
        of_parent = u[term, rules[self.rule_of_term, 0]]
        self.share_of_term = torch.where(self.varies[term] == 0, of_parent, v_or_w)
        below = self.rules.steps[:, 1]
        self.over_phrases, self.over_words = (
            which.nonzero().squeeze(1) for which in (below < self.inner, below >= self.inner)
        )

    def forest(
        self, leaf: Float[Tensor, "words tags"], lengths: Int64[Tensor, "sentences"], threshold: float
    ) -> tuple[Forest, Nodes]:
        """The edges whose posterior is above the threshold; `leaf` has the words of all sentences, end to end.

        None are left of sentences that need log-sum-exp, and of those that have too many.
        """
        first, order = starts_of(lengths), lengths.argsort()
        none = lengths[:0]
        parts = [(Edges(none, none, none, none, none, none), Nodes(none, none, none, none, none.bool()))]
        ascending = take(lengths, order).tolist()
        begin = 0
        for size in _similar(ascending, CELLS if arrays.on_host(leaf) else None):
            numbers, shortest, longest = order[begin : begin + size], ascending[begin], ascending[begin + size - 1]
            begin += size
            some = take(lengths, numbers)
            position = torch.arange(longest, device=lengths.device).unsqueeze(1)
            words = leaf[(first[numbers] + position).clamp_max(len(leaf) - 1)] * (position < some).unsqueeze(2)
            ones = torch.ones(size, dtype=torch.float64, device=leaf.device)
            with self.stages.stage("coarse"):
                solutions = solve_outside(Problem(self.form, words, None if shortest == longest else some), ones)
            for solution in solutions:
                if solution.sums is not None:
                    with self.stages.stage("gather"):
                        left = self._survivors(*solution.sums, take(some, solution.sentences), threshold)
                    if left is not None:
                        edges, nodes = left
                        sentence = take(numbers, take(solution.sentences, nodes.sentence))
                        parts.append((edges, replace(nodes, sentence=sentence)))
        with self.stages.stage("gather"):
            return joined(self.rules, len(self.grammar.binary_rules), parts, lengths, ascending[-1])

    @torch.inference_mode()
    def _survivors(
        self, chart: Chart, outside: Outside, lengths: Tensor, threshold: float
    ) -> tuple[Edges, Nodes] | None:
        """What is left of one chart, unless it is too much. Its cells are numbered by width, start and sentence, nodes
        by cell and symbol."""
        device, symbols, words = lengths.device, len(self.grammar.symbols), len(chart.word)
        cells = len(chart.top.cells)
        first = chart.first_cells
        width = torch.repeat_interleave(first.diff(), output_size=cells) + 1  # of each cell
        top = _all_symbols(chart.top.cells, chart.word_top)  # alpha, [cells, symbols]
        bottom = _all_symbols(chart.bottom.cells, chart.word)
        above = _all_symbols(outside.top.cells, outside.word_top)  # beta

        tops = cells * symbols  # where the numbers of top nodes begin
        terms = self._terms(chart, outside, first, threshold)
        if terms is None:
            return None
        binary = self._rules(terms, (outside.bottom.cells, top, top), threshold)
        a, b, c = take(self.grammar.binary_rules, binary.number).unbind(1)
        rights = tops + binary.right * symbols + c
        found = [(binary.number, binary.parent * symbols + a, tops + binary.left * symbols + b, rights)]
        begin = len(self.grammar.binary)
        for some, at in ((self.over_phrases, slice(words, None)), (self.over_words, slice(words))):
            up, down = self.rules.steps[some].unbind(1)
            posterior = above[at].index_select(1, up).mul_(bottom[at].index_select(1, down))
            place = true_indices(posterior.mul_(self.rules.values[begin + some]) > threshold)
            cell, step = place // len(some) + (at.start or 0), place % len(some)
            parent, child = tops + cell * symbols + take(up, step), cell * symbols + take(down, step)
            found.append((begin + take(some, step), parent, child, torch.full_like(child, -1)))
        rule, parent, left, right = (torch.cat(column) for column in zip(*found, strict=True))

        sentence = torch.arange(chart.batch, device=device)
        roots = (take(first, lengths - 1) + sentence).unsqueeze(1) * symbols + torch.arange(symbols, device=device)
        roots = roots.flatten()
        roots = tops + take(roots, true_indices(take(top.view(-1), roots) * take(above.view(-1), roots) > threshold))
        is_node = torch.zeros(2 * tops, dtype=torch.bool, device=device)
        for keys in (parent, left, rights, roots):
            is_node.index_fill_(0, keys, True)
        key = true_indices(is_node)
        number = torch.full((2 * tops,), -1, device=device).index_copy_(0, key, torch.arange(len(key), device=device))
        cell = key % tops // symbols
        start = cell - take(first, take(width, cell) - 1)
        nodes = Nodes(start % chart.batch, start // chart.batch, take(width, cell), key % symbols, key >= tops)
        right = torch.where(right < 0, -1, take(number, right.clamp_min(0)))
        parent, left, roots = (take(number, keys) for keys in (parent, left, roots))
        return Edges(rule, take(nodes.width, parent), parent, left, right, roots), nodes

    def _rules(self, terms: Splits, scores: Sequence[Float[Tensor, "cells _"]], threshold: float) -> Splits:
        """The rules of terms at splits.

        The rules of one term differ in one symbol, and divide its posterior in proportion to the score of that symbol.
        `scores` [cells, symbols] are outside scores of parents, inside scores of left and of right children.
        """
        found = []
        varies = take(self.varies, terms.number)
        for which, (score_of, cells) in enumerate(zip(scores, (terms.parent, terms.left, terms.right), strict=True)):
            some = true_indices(varies == which)
            term = take(terms.number, some)
            which_term, entry = repeated(take(self.rules_of_term, term), take(self.first_of_term, term))
            cell = take(take(cells, some) * score_of.shape[1], which_term).add_(take(self.symbol_of_term, entry))
            score = take(score_of.view(-1), cell).mul_(take(self.share_of_term, entry))
            total = torch.zeros_like(term, dtype=score.dtype).index_add_(0, which_term, score)
            posterior = score.mul_(take(take(terms.posterior, some) / total, which_term))
            kept = true_indices(posterior > threshold)
            split = take(some, take(which_term, kept))
            columns = (take(column, split) for column in (terms.parent, terms.left, terms.right))
            found.append(Splits(take(self.rule_of_term, take(entry, kept)), take(posterior, kept), *columns))
        return Splits.joined(found)

    def _terms(self, chart: Chart, outside: Outside, first: Tensor, threshold: float) -> Splits | None:
        """Terms at splits whose posterior is above the threshold, unless they are too many."""
        form, batch, words = chart.form, chart.batch, len(chart.word)
        assert isinstance(form, CPForm)
        none = first[:0]
        found = [Splits(none, chart.word.new_zeros(0), none, none, none)]

        def add(term: Tensor, posterior: Tensor, width: Tensor, row: Tensor, split: Tensor) -> None:
            """`row` is the number of a span among those of its width."""
            parent, left, right = (take(first, part - 1) + row for part in (width, split, width - split))
            found.append(Splits(term, posterior, parent, left, right + split * batch))

        if chart.length == 1:
            return found[0]
        general, after, before, _ = form.term_counts
        if isinstance(form, SortedCPForm):  # else there are no terms for two words
            pairs = chart.pairs * (outside.bottom[1] @ form.weights[3].T)
            place = true_indices(pairs > threshold)
            row, two = place // pairs.shape[1], torch.full_like(place, 2)
            add(place % pairs.shape[1] + general + after + before, take(pairs.view(-1), place), two, row, two - 1)

        share = outside.combined.cells
        joint = (chart.combined.cells * share).view(-1)
        place = true_indices(joint > threshold)  # of all splits together
        cell, term = words + place // share.shape[1], place % share.shape[1]
        width = torch.searchsorted(first, cell, right=True)
        row, joint, share = cell - take(first, width - 1), take(joint, place), take(share.view(-1), place)
        # Terms with a word on one side have one split.
        one_split = true_indices(term >= general)
        word_is_last = take(term, one_split) < general + after
        split = torch.where(word_is_last, take(width, one_split) - 1, 1)
        add(take(term, one_split), take(joint, one_split), take(width, one_split), take(row, one_split), split)
        # The others have all splits.
        all_splits = true_indices(term < general)
        row, term, width, share = (take(column, all_splits) for column in (row, term, width, share))
        room = MOST * batch
        for item, split, posterior in _over_splits(chart, row, term, width, share, threshold):
            room -= len(item)
            if room < 0:
                return None
            add(take(term, item), posterior, take(width, item), take(row, item), split)
        return Splits.joined(found)


def joined(
    rules: FineRules, binary: int, parts: Sequence[tuple[Edges, Nodes]], lengths: Tensor, longest: int
) -> tuple[Forest, Nodes]:
    """The forest of all charts, of rules of which so many are binary."""
    device, sentences = lengths.device, len(lengths)
    steps = len(rules.steps)
    edges = Edges(*(torch.cat(columns) for columns in _columns([edges for edges, _ in parts])))
    nodes = Nodes(*(torch.cat(columns) for columns in _columns([nodes for _, nodes in parts])))
    begin = starts_of(torch.tensor([len(some.symbol) for _, some in parts], device=device))
    number, unit = len(nodes.symbol), len(nodes.symbol) + sentences + 1
    shift, shift_of_roots = (
        take(begin, torch.repeat_interleave(torch.tensor(sizes, device=device), output_size=sum(sizes)))
        for sizes in ([len(some.rule) for some, _ in parts], [len(some.roots) for some, _ in parts])
    )
    step, roots = edges.right < 0, edges.roots + shift_of_roots
    level, rule, parent, left, right = map(
        torch.cat,
        (
            (2 * edges.width + step.long(), torch.full_like(roots, 2 * longest + 2)),
            (edges.rule, binary + steps + take(nodes.symbol, roots)),
            (edges.parent + shift, number + take(nodes.sentence, roots)),
            (edges.left + shift, roots),
            (torch.where(step, unit, edges.right + shift), torch.full_like(roots, unit)),
        ),
    )
    leaves = true_indices(~nodes.top & (nodes.symbol >= rules.inner))
    tops = number + torch.arange(sentences, device=device)
    return Forest(number + sentences, level, rule, parent, left, right, leaves, tops), nodes


def _over_splits(
    chart: Chart, row: Tensor, term: Tensor, width: Tensor, share: Tensor, threshold: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """From terms of spans to those of their splits that are above the threshold: which item of the list it is, how many
    words are on the left, and the posterior there.

    On the CPU width by width, which takes little more than half the time; else all at once, since CUDA would have to
    wait for each.
    """
    if arrays.on_host(row):
        sizes = torch.bincount(width, minlength=chart.length + 1).tolist()
        begin = 0
        for number, size in enumerate(sizes):  # items are sorted by width
            if size:
                left, right = chart.operands(0, number)
                some, lane = row.narrow(0, begin, size), term.narrow(0, begin, size)
                posterior = left.transpose(1, 2)[some, lane].mul_(right.transpose(1, 2)[some, lane])  # [some, splits]
                posterior *= share.narrow(0, begin, size).unsqueeze(1)
                place = true_indices(posterior > threshold)
                yield begin + place // (number - 1), place % (number - 1) + 1, take(posterior.view(-1), place)
            begin += size
        return
    item, split = repeated(width - 1, torch.ones_like(width))
    left, right = chart.spans.left, chart.spans.right  # [starts * batch, widths, lanes], and by ends, widths descending
    row, term, width = (take(column, item) for column in (row, term, width))
    end = row + (width - 1) * chart.batch
    posterior = left[row, split - 1, term] * right[end, chart.length - width + split, term] * take(share, item)
    place = true_indices(posterior > threshold)
    yield take(item, place), take(split, place), take(posterior, place)


def _columns(parts: Sequence[Edges] | Sequence[Nodes] | Sequence[Splits]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(vars(part).values() for part in parts), strict=True)


def _all_symbols(
    phrases: Float[Tensor, "cells interminals"], words: Float[Tensor, "words tags"]
) -> Float[Tensor, "cells symbols"]:
    """Words are the first of the cells."""
    return torch.cat([phrases, torch.nn.functional.pad(words, (0, 0, 0, len(phrases) - len(words)))], 1)


def _similar(lengths: Sequence[int], cells: int | None) -> list[int]:
    """The numbers of sentences in each chart; their lengths are ascending."""
    sizes: list[int] = []
    shortest = 0
    for length in lengths:
        too_large = cells is not None and bool(sizes) and (sizes[-1] + 1) * length**2 > cells
        if not sizes or length > shortest * (1 + SIMILAR) or too_large:
            sizes.append(0)
            shortest = length
        sizes[-1] += 1
    return sizes
