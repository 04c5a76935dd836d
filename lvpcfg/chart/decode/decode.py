"""Charts -> trees.

    viterbi      the best derivation, states and all
    max-rule     argmax over trees of prod of q(rule, i, k, j), the posteriors of skeletal rules (Petrov & Klein 2007)
    max-rule-sum the same with sum instead of prod
    variational  prod of q / posterior of the parent
    recall       argmax of sum of mu(a, i, j) over trees of the grammar (Goodman 1996)
    free-recall  the same over all trees, one label a span

All but Viterbi and free recall are one recursion over symbols,

    best(a, i, j) = node(a, i, j) + max over a -> b c, k of  rule(a -> b c, i, k, j) + best(b, i, k) + best(c, k+1, j)

with `rule` from the anchored posteriors. With unary rules each span has a bottom symbol and a top symbol, and
the step between them, any number of unary rules or none, is scored as one rule. Recall counts the top symbol of every
span and the tag of every word: what stands between is free, so that it is not tempted into long chains.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lvpcfg.chart.derivations import Derivation, Node, Skeletal, Skeleton, only  # noqa: F401
from lvpcfg.chart.fast.algebra import MAX, SUM
from lvpcfg.chart.fast.blocks import AFTER, BEFORE, INNER, select
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import AnyRules, Chart, Spans
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.semirings import require_nonnegative
from lvpcfg.errors import InputError
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import DECODERS, FREE, PRODUCT, RECALL, RULE_SUM, VARIATIONAL, VITERBI  # noqa: F401  (to be found here)
from lvpcfg.trees.binarisation import INTERMEDIATE

CHUNK = 1 << 22  # numbers held at once
NEGLIGIBLE = 1e-6  # a posterior below zero by this much is no rounding


class SymbolChart:
    """The recursion over symbols for one batch of sentences of equal length, and its way back."""

    def __init__(self, symbols: "SymbolMap", chart: Chart, outside: Outside, decoder: str, signed: bool) -> None:
        self.symbols, self.decoder, self.outside, self.signed = symbols, decoder, outside, signed
        self.chart, self.form = _through_rules(chart)
        self.inner, self.batch, self.length = symbols.inner, chart.batch, chart.length
        self.negative = 0  # rules whose posterior came out below zero
        self.best = Spans.made(chart.word.new_empty, self.length, self.batch, self.inner)
        self.rule: list[Tensor] = []  # for each width from 2, [interminals, cells]
        self.split: list[Tensor] = []
        self.under: list[Tensor] = []  # for each width, [cells, interminals]: the symbol under unary rules
        self._words()
        for width in range(2, self.length + 1):
            self._fill(width)
        self._finish()

    def _words(self) -> None:
        chart, outside = self.chart, self.outside
        tag = self.symbols.tags(chart.word * outside.word)
        tag_top = self.symbols.tags(chart.word_top * outside.word_top)
        top = self.symbols.phrases(chart.top[0] * outside.top[0])
        base = tag.abs() if self.decoder == RECALL else self._score(tag, tag)
        self.word = base if chart.form.promotion is None else base + self._score(tag_top, tag_top)
        if self.decoder == RECALL:
            self.word = base + tag_top.abs()
        cell = torch.full_like(top, -math.inf)
        under = torch.zeros_like(cell, dtype=torch.int64)
        if chart.form.promotion is not None:
            step = self._step(chart.word, chart.form.promotion, outside.top[0], top, words=True)
            cell, under = (base.unsqueeze(2) + step).max(1)
            cell = cell + self._node(top)
        self.under.append(under + self.inner)
        self.best.own(1).copy_(cell)

    def _fill(self, width: int) -> None:
        chart, form, outside = self.chart, self.form, self.outside
        bottom = self.symbols.phrases(chart.bottom[width - 1] * outside.bottom[width - 1])
        beta = form.pad(SUM, outside.bottom[width - 1])
        values, splits, rules = [], [], []
        for term in form.terms(width):
            block = form.blocks[term]
            posterior = block.anchored(beta, *chart.operands(term, width), form.weights[term])  # [rules, cells, splits]
            parents, *children = self.symbols.rules.index_select(0, block.rules).unbind(1)
            if self.signed:
                self.negative += int((posterior < -NEGLIGIBLE).sum())
            score = self._score(posterior, select(bottom, parents.unsqueeze(1)))
            value, split = self._best_split(block.kind, width, score.add_(self._children(block.kind, width, *children)))
            values.append(value)
            splits.append(split)
            rules.append(block.rules)
        if values:
            cell, rule, split = self._best_rules(torch.cat(values), torch.cat(splits), torch.cat(rules))
        else:
            cell = chart.word.new_full((bottom.shape[0], self.inner), -math.inf)
            rule = split = torch.zeros_like(cell.T, dtype=torch.int64)
        self.rule.append(rule)
        self.split.append(split)
        top = self.symbols.phrases(chart.top[width - 1] * outside.top[width - 1])
        under = torch.arange(self.inner, device=cell.device).expand_as(cell)
        if form.closure is not None:
            step = self._step(chart.bottom[width - 1], form.closure, outside.top[width - 1], top)
            cell, under = (cell.unsqueeze(2) + step).max(1)
        self.under.append(under)
        cell = cell + self._node(top)
        self.best.own(width).copy_(cell)

    def _score(self, posterior: Tensor, parent: Tensor) -> Tensor:
        """What a rule is worth, given its posterior and its parent's."""
        if self.decoder == RECALL:
            return torch.zeros_like(posterior)
        if self.decoder == RULE_SUM:
            return torch.where(posterior > 0, posterior, -math.inf)
        log = _log(posterior)
        return log - torch.where(parent > 0, parent, 1).log() if self.decoder == VARIATIONAL else log

    def _node(self, top: Tensor) -> Tensor:
        if self.decoder != RECALL:
            return torch.zeros_like(top)
        return top.abs() * self.symbols.real.narrow(0, 0, self.inner)

    def _step(self, below: Tensor, closure: Tensor, above: Tensor, top: Tensor, words: bool = False) -> Tensor:
        """The worth of each way from a bottom symbol to a top symbol, [cells, below, above]."""
        parts = [
            self.symbols.joint(one.unsqueeze(2) * closure * two.unsqueeze(1), words)
            for one, two in zip(*(x.split(max(1, CHUNK // closure.numel())) for x in (below, above)), strict=True)
        ]
        posterior = torch.cat(parts)
        if self.decoder == RECALL:
            return torch.where(posterior != 0, 0.0, -math.inf).to(posterior.dtype)
        return self._score(posterior, top.unsqueeze(1))

    def _children(self, kind: str, width: int, left: Tensor, right: Tensor) -> Tensor:
        """The worth of the children of rules, [rules, cells, splits]."""
        first, last = (self.chart.window(self.word, width, side, 0) for side in (BEFORE, AFTER))
        if kind == INNER:
            one, two = self.best.children(width, self.form.narrowest)
            return select(one, left.unsqueeze(1), 2).add_(select(two, right.unsqueeze(1), 2)).squeeze(-1)
        one = self.best.rest(width, AFTER) if kind == AFTER else first
        two = self.best.rest(width, BEFORE) if kind == BEFORE else last
        left = left if kind == AFTER else left - self.inner
        right = right if kind == BEFORE else right - self.inner
        return select(one, left.unsqueeze(1)) + select(two, right.unsqueeze(1))

    def _best_split(self, kind: str, width: int, worth: Tensor) -> tuple[Tensor, Tensor]:
        """[rules, cells, splits] -> the worth of the best split, and the width of its left child, [rules, cells]."""
        if kind == INNER:
            value, split = worth.max(-1)
            return value, split.add_(self.form.narrowest)
        value = worth.squeeze(-1)
        return value, torch.full_like(value, width - 1 if kind == AFTER else 1, dtype=torch.int64)

    def _best_rules(self, values: Tensor, splits: Tensor, rules: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rules, cells] -> the best of each parent: its worth [cells, parents], the rule and the split."""
        parents = self.symbols.rules.index_select(0, rules).select(1, 0).unsqueeze(1).expand_as(values)
        best = values.new_full((self.inner, values.shape[1]), -math.inf).scatter_reduce(0, parents, values, "amax")
        rows = torch.arange(len(rules), dtype=torch.int32, device=rules.device).unsqueeze(1)
        rows = torch.where(values == best.gather(0, parents), rows, len(rules))
        none = torch.full_like(best, len(rules), dtype=torch.int32)
        row = none.scatter_reduce(0, parents, rows, "amin").clamp_max(len(rules) - 1).long()
        return best.T, rules.take(row), splits.gather(0, row)

    def _finish(self) -> None:
        """The best symbol for the whole sentence."""
        chart, outside = self.chart, self.outside
        whole = self.symbols.phrases(chart.top[-1] * outside.top[-1])
        best, _ = self.best.own(self.length)
        if self.length == 1:
            whole = torch.cat([whole, self.symbols.tags(chart.word_top * outside.word_top)], 1)
            best = torch.cat([best, self.word], 1)
        possible = torch.where(whole != 0, 0.0, -math.inf)
        score = possible if self.decoder == RECALL else self._score(whole, torch.ones_like(whole))
        self.worth, self.root = (best + score).max(1)  # [batch]

    def skeletons(self) -> list[Skeleton | None]:
        """The best tree of each sentence, or None where there is none."""
        rule, split, under = _fetched(self.rule, 1), _fetched(self.split, 1), _fetched(self.under, 0)
        rules, inner, batch = self.symbols.rules.cpu().numpy(), self.inner, self.batch
        found: list[Skeleton | None] = []
        for sentence, (worth, root) in enumerate(zip(self.worth.tolist(), self.root.tolist(), strict=True)):
            nodes: Skeleton = []
            waiting = [(0, self.length, root)] if worth > -math.inf else []
            while waiting:
                start, width, top = waiting.pop()
                cell = start * batch + sentence
                bottom = top if top >= inner else int(under[width - 1][cell, top])
                left = 0
                if width > 1:
                    left = int(split[width - 2][bottom, cell])
                    _, one, two = rules[rule[width - 2][bottom, cell]].tolist()
                    waiting += [(start + left, width - left, two), (start, left, one)]
                nodes.append(Node(start, width, top, bottom, left))
            found.append(nodes or None)
        return found


def _fetched(parts: Sequence[Tensor], dimension: int) -> list["np.ndarray"]:
    """What was found for each width, in one copy from the device."""
    if not parts:
        return []
    sizes = [part.shape[dimension] for part in parts]
    return [part.numpy() for part in torch.cat(list(parts), dimension).cpu().split(sizes, dimension)]


class SymbolMap:
    """Which symbol each state belongs to, for sums over states."""

    def __init__(self, grammar: Grammar, like: Tensor) -> None:
        self.rules = grammar.binary_rules
        self.inner = len(grammar.symbols.interminals)
        self.symbol_of_state: list[int] = grammar.symbol_of_state.tolist()
        member = torch.nn.functional.one_hot(grammar.symbol_of_state, len(grammar.symbols)).to(like.dtype)
        states = int(grammar.first_state[self.inner])
        self.plain = bool((grammar.states == 1).all())
        self._phrases = member[:states, : self.inner].contiguous()
        self._tags = member[states:, self.inner :].contiguous()
        names = grammar.symbols.names
        self.real = torch.tensor([not name.startswith(INTERMEDIATE) for name in names], device=like.device)

    def phrases(self, values: Tensor) -> Tensor:
        """[..., interminal states] -> [..., interminals]"""
        return values if self.plain else values @ self._phrases

    def tags(self, values: Tensor) -> Tensor:
        """[..., preterminal states] -> [..., preterminals]"""
        return values if self.plain else values @ self._tags

    def joint(self, values: Tensor, words: bool) -> Tensor:
        """[..., states below (of words, or of phrases), interminal states above] -> symbols"""
        if self.plain:
            return values
        below = self._tags if words else self._phrases
        return below.T @ values @ self._phrases


def _log(posterior: Tensor) -> Tensor:
    """-inf for what is not above zero, kept out of the logarithm itself: it is slow there."""
    tiny = torch.finfo(posterior.dtype).tiny
    log = posterior.clamp_min(tiny).log_()
    return torch.nn.functional.threshold(log, math.log(2 * tiny), -math.inf, inplace=True)


def _through_rules(chart: Chart) -> tuple[Chart, TensorForm]:
    """A chart whose operands are those of rules: for a CP form, of the rules it stands for."""
    if isinstance(chart.form, TensorForm):
        return chart, chart.form
    source = chart.form.source
    if source is None:
        raise InputError("this CP form has no list of rules to score: decode it with free-recall.")
    return chart.seen_through(source), source


def free_recall(symbols: SymbolMap, chart: Chart, outside: Outside) -> list[Skeleton | None]:
    """argmax over all binary trees of sum of mu(label, i, j), with the best label of each span.

    Symbols that binarisation made score 0; a span whose likeliest symbol is one of them gets no label.
    """
    n, batch, inner = chart.length, chart.batch, symbols.inner
    best = Spans.made(chart.word.new_empty, n, batch, 1)
    found_tops, found_bottoms, found_splits = [], [], []
    for width in range(1, n + 1):
        top = symbols.phrases(chart.top[width - 1] * outside.top[width - 1]).abs()
        bottom = symbols.phrases(chart.bottom[width - 1] * outside.bottom[width - 1]).abs()
        if width == 1:
            bottom = symbols.tags(chart.word * outside.word).abs()
            top = torch.cat([top, symbols.tags(chart.word_top * outside.word_top).abs()], 1)
        score = (top * symbols.real.narrow(0, 0, top.shape[1])).amax(1, keepdim=True)
        if width > 1:
            left, right = best.children(width, 1)
            value, narrower = (left + right).squeeze(2).max(1, keepdim=True)
            score = score + value
            found_splits.append(narrower.squeeze(1) + 1)
        best.own(width).copy_(score)
        found_tops.append(top.argmax(1))
        found_bottoms.append(bottom.argmax(1) + (inner if width == 1 else 0))
    tops, bottoms, splits = (_fetched(parts, 0) for parts in (found_tops, found_bottoms, found_splits))
    found: list[Skeleton | None] = []
    for sentence in range(batch):
        nodes: Skeleton = []
        waiting = [(0, n)]
        while waiting:
            start, width = waiting.pop()
            cell = start * batch + sentence
            split = int(splits[width - 2][cell]) if width > 1 else 0
            label, below = int(tops[width - 1][cell]), int(bottoms[width - 1][cell])
            if label >= inner or chart.form.closure is None:
                below = label
            nodes.append(Node(start, width, label, below, split))
            if split:
                waiting += [(start + split, width - split), (start, split)]
        found.append(nodes)
    return found


def best_derivations(form: AnyRules, leaf: Tensor) -> tuple[list[Skeleton | None], Tensor]:
    """Viterbi: the best derivation of each sentence, its nodes labelled with states, and its log-probability."""
    require_nonnegative((*form.tensors, leaf), "Viterbi")
    chart = Chart(form.with_tensors([MAX.value(tensor) for tensor in form.tensors]), MAX.value(leaf), MAX)
    outside = Outside(chart, torch.ones_like(chart.log_z))
    return derivations(chart, outside), chart.log_z


def derivations(chart: Chart, outside: Outside) -> list[Skeleton | None]:
    """Derivations of which the outside pass holds the indicators, with states as labels."""
    inner, batch, lead = chart.form.interminals, chart.batch, tuple(range(len(chart.algebra.lead)))
    tops: dict[tuple[int, int, int], int] = {}  # (sentence, start, width) -> state
    bottoms: dict[tuple[int, int, int], int] = {}
    for width in range(1, chart.length + 1):
        layers = [(tops, outside.top[width - 1], 0), (bottoms, outside.bottom[width - 1], 0)]
        if width == 1:
            layers += [(tops, outside.word_top, inner), (bottoms, outside.word, inner)]
        for spans, used, first in layers:
            used = used.sum(lead) if lead else used
            for cell, state in (used > 0.5).nonzero().tolist():
                spans[cell % batch, cell // batch, width] = first + state
    lanes = outside.spans.left.sum(lead) if lead else outside.spans.left
    found: list[Skeleton | None] = []
    lengths = [chart.length] * batch if chart.lengths is None else chart.lengths.tolist()
    for sentence, length in enumerate(lengths):
        nodes: Skeleton = []
        waiting = [(0, length)] if (sentence, 0, length) in tops else []
        while waiting:
            start, width = waiting.pop()
            key = (sentence, start, width)
            left = next((part for part in range(width - 1, 0, -1) if (sentence, start, part) in tops), 0)
            rank = int(lanes[start * batch + sentence, left - 1].argmax()) if left and chart.form.projects else None
            nodes.append(Node(start, width, tops[key], bottoms[key], left, rank))
            if left:
                waiting += [(start + left, width - left), (start, left)]
        found.append(nodes or None)
    return found
