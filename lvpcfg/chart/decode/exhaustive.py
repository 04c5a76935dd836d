"""Whole charts -> trees: all edges that a grammar has for some sentences, with their posteriors, as a forest.

The posterior of a skeletal rule at a split is `anchored`, of a step from bottom to top

    sum over states of I(bottom b) C[a, b] O(top a) / Z

Edges are numbered as in pruned forests, so that the same decoder takes both.
"""

import math

import torch
from torch import Tensor

from lvpcfg.chart.decode.decode import Decoder, Posteriors, skeletons
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.fast.blocks import PHRASES, WORD_LAST
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart, FastForm
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.errors import InputError
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rules import starts_of
from lvpcfg.options import PRODUCT, VARIATIONAL

UNLIKELY = 1e-12  # a posterior that hardly any best tree needs
CHUNK = 1 << 22  # numbers held at once


class ChartEdges:
    """The edges of charts of one grammar."""

    def __init__(self, grammar: Grammar, form: FastForm) -> None:
        self.grammar, self.rules = grammar, FineRules(grammar)
        rules = form if isinstance(form, TensorForm) else form.source
        if rules is None:
            raise InputError("this CP form has no list of rules to score.")
        self.form = rules
        symbols, device = len(grammar.symbols), grammar.root.device
        self.inner = len(grammar.symbols.interminals)
        member = torch.nn.functional.one_hot(grammar.symbol_of_state, symbols).to(grammar.root.dtype)
        self.phrases = member[: form.interminals, : self.inner].contiguous()  # [states, symbols]
        self.tags = member[form.interminals :, self.inner :].contiguous()
        self.step_number = torch.full((symbols, symbols), -1, device=device)  # [above, below]
        above, below = self.rules.steps.unbind(1)
        self.step_number[above, below] = torch.arange(len(above), device=device)

    def of(self, chart: Chart, outside: Outside, least: float) -> tuple[Forest, Nodes, Posteriors]:
        """The edges whose posterior, whatever its sign, is above `least`."""
        with torch.inference_mode():
            return self._of(chart, outside, least)

    def _of(self, chart: Chart, outside: Outside, least: float) -> tuple[Forest, Nodes, Posteriors]:
        device, symbols, through = chart.word.device, len(self.grammar.symbols), chart
        if not isinstance(chart.form, TensorForm):  # a CP form: its cells are children of the rules it stands for
            through = chart.seen_through(self.form.to(chart.word.dtype))
        # Cells are numbered by width, start and sentence; nodes by layer, cell and symbol.
        first = starts_of(torch.tensor([len(cells) for cells in chart.top], device=device))
        cells = int(first[-1])
        tops = cells * symbols
        found = [self._steps(chart, outside, tops, least)]
        for width in range(2, chart.length + 1):
            found += self._binary(through, outside, width, first, tops, least)
        rule, parent, left, right, posterior = (torch.cat(column) for column in zip(*found, strict=True))
        by_node = torch.cat(
            [
                self._by_symbol(chart.bottom.cells * outside.bottom.cells, chart.word * outside.word),
                self._by_symbol(chart.top.cells * outside.top.cells, chart.word_top * outside.word_top),
            ]
        ).flatten()
        sentence = chart.sentence_cells.unsqueeze(1) * symbols + torch.arange(symbols, device=device) + tops
        roots = sentence.flatten()[by_node[sentence.flatten()].abs() > least]  # top nodes of sentences
        return self._forest(chart, first, by_node, (rule, parent, left, right, posterior), roots, tops)

    def _forest(
        self,
        chart: Chart,
        first: Tensor,
        by_node: Tensor,
        edges: tuple[Tensor, ...],
        roots: Tensor,
        tops: int,
    ) -> tuple[Forest, Nodes, Posteriors]:
        rule, parent, left, right, posterior = edges
        symbols, batch, device = len(self.grammar.symbols), chart.batch, rule.device
        occurs = torch.zeros(2 * tops, dtype=torch.bool, device=device)
        for keys in (parent, left, right[right >= 0], roots):
            occurs.index_fill_(0, keys, True)
        key = occurs.nonzero().squeeze(1)
        number = torch.full((2 * tops,), -1, device=device).index_copy_(0, key, torch.arange(len(key), device=device))
        cell = key % tops // symbols
        width = torch.searchsorted(first, cell, right=True)
        row = cell - first[width - 1]
        nodes = Nodes(row % batch, row // batch, width, key % symbols, key >= tops)
        one = len(key) + batch + 1
        step, of_root = right < 0, number[roots]
        binary = len(self.grammar.binary) + len(self.rules.steps)
        forest = Forest(
            nodes=len(key) + batch,
            level=torch.cat(
                [2 * nodes.width[number[parent]] + step.long(), torch.full_like(of_root, 2 * chart.length + 2)]
            ),
            rule=torch.cat([rule, binary + nodes.symbol[of_root]]),
            parent=torch.cat([number[parent], len(key) + nodes.sentence[of_root]]),
            left=torch.cat([number[left], of_root]),
            right=torch.cat([torch.where(step, one, number[right.clamp_min(0)]), torch.full_like(of_root, one)]),
            leaves=(~nodes.top & (nodes.symbol >= self.inner)).nonzero().squeeze(1),
            tops=len(key) + torch.arange(batch, device=device),
        )
        total = torch.cat([by_node[key], by_node.new_ones(batch), by_node.new_zeros(2)])
        return forest, nodes, Posteriors(chart.log_z, total, torch.cat([posterior, by_node[roots]]))

    def _by_symbol(self, phrases: Tensor, words: Tensor) -> Tensor:
        """[cells, states of phrases] and [words, states of tags], words being the first cells -> [cells, symbols]."""
        tags = words @ self.tags.to(words.dtype)
        tags = torch.nn.functional.pad(tags, (0, 0, 0, len(phrases) - len(tags)))
        return torch.cat([phrases @ self.phrases.to(words.dtype), tags], 1)

    def _binary(
        self, chart: Chart, outside: Outside, width: int, first: Tensor, tops: int, least: float
    ) -> list[tuple[Tensor, ...]]:
        """The rules that make spans of a width: rule, nodes of the parent and of both children, posterior."""
        form, symbols, batch = chart.form, len(self.grammar.symbols), chart.batch
        found: list[tuple[Tensor, ...]] = []
        assert isinstance(form, TensorForm)
        beta = form.pad(outside.bottom[width - 1])
        for term in form.terms(width):
            block = form.blocks[term]
            posterior = block.anchored(beta, *chart.operands(term, width), form.weights[term])  # [rules, cells, splits]
            at = (posterior.abs() > least).flatten().nonzero().squeeze(1)
            _, cells, splits = posterior.shape
            rule, row, split = block.rules[at // (cells * splits)], at // splits % cells, at % splits
            split = split + {PHRASES: form.narrowest, WORD_LAST: width - 1}.get(block.child_types, 1)
            a, b, c = self.grammar.binary_rules[rule].unbind(1)
            parent, left, right = first[width - 1] + row, first[split - 1] + row, first[width - split - 1] + row
            right = right + split * batch
            found.append(
                (
                    rule,
                    parent * symbols + a,
                    tops + left * symbols + b,
                    tops + right * symbols + c,
                    posterior.flatten()[at],
                )
            )
        return found

    def _steps(self, chart: Chart, outside: Outside, tops: int, least: float) -> tuple[Tensor, ...]:
        """The steps from bottom to top in all cells, the children of which have no right one."""
        words = len(chart.word)
        found = [self._identity(chart.word * outside.word_top, self.tags, 0, self.inner, least)]
        if chart.form.closure is None:
            found.append(self._identity(chart.bottom.wider * outside.top.wider, self.phrases, words, 0, least))
        else:
            assert chart.form.promotion is not None
            over_words = (chart.word, chart.form.promotion, outside.top[0], self.tags, 0, self.inner)
            over_phrases = (chart.bottom.wider, chart.form.closure, outside.top.wider, self.phrases, words, 0)
            found += [self._between(*one, least) for one in (over_words, over_phrases)]
        cell, above, below, posterior = (torch.cat(column) for column in zip(*found, strict=True))
        symbols, step = len(self.grammar.symbols), self.step_number[above, below]
        real = (step >= 0).nonzero().squeeze(1)  # an inverse has rounding errors where no rules lead
        cell, above, below, posterior, step = (column[real] for column in (cell, above, below, posterior, step))
        rule = len(self.grammar.binary) + step
        return rule, tops + cell * symbols + above, cell * symbols + below, torch.full_like(cell, -1), posterior

    def _identity(self, posterior: Tensor, member: Tensor, cell: int, symbol: int, least: float) -> tuple[Tensor, ...]:
        """Steps of no unary rule, where there is no other: cell, symbol above, symbol below, posterior."""
        posterior = posterior @ member.to(posterior.dtype)
        row, same = (posterior.abs() > least).nonzero().unbind(1)
        return row + cell, same + symbol, same + symbol, posterior[row, same]

    def _between(
        self, below: Tensor, closure: Tensor, above: Tensor, member: Tensor, cell: int, symbol: int, least: float
    ) -> tuple[Tensor, ...]:
        """Steps of any number of unary rules, `closure` [states below, states above]."""
        of_below, of_above = member.to(below.dtype), self.phrases.to(below.dtype)
        found = []
        size = max(1, CHUNK // max(1, closure.numel()))
        for begin in range(0, len(below), size):
            some = slice(begin, begin + size)
            joint = below[some].unsqueeze(2) * closure * above[some].unsqueeze(1)
            joint = of_below.T @ joint @ of_above  # [cells, symbols below, symbols above]
            row, under, over = (joint.abs() > least).nonzero().unbind(1)
            found.append((row + begin + cell, over, under + symbol, joint[row, under, over]))
        if not found:
            none = torch.zeros(0, dtype=torch.int64, device=below.device)
            return none, none, none, below.new_zeros(0)
        return tuple(torch.cat(column) for column in zip(*found, strict=True))


class Exhaustive:
    """Decodes whole charts of one grammar."""

    def __init__(self, grammar: Grammar, form: FastForm, decoder: str) -> None:
        self.edges = ChartEdges(grammar, form)
        self.decoder = Decoder(decoder, grammar, self.edges.rules)

    def trees(self, chart: Chart, outside: Outside) -> list[Skeleton | None]:
        """The best tree of each sentence, None where there is none.

        A product of posteriors is no larger than the smallest of them. Once a tree is worth more than `UNLIKELY`, no
        edge below that can be in a better one; else all edges are looked at.
        """
        if self.decoder.name in (PRODUCT, VARIATIONAL) and not self.decoder.signed:
            forest, nodes, posteriors = self.edges.of(chart, outside, UNLIKELY)
            chosen, worth = self.decoder.best(forest, nodes, [posteriors])
            if bool(((worth > math.log(UNLIKELY)) | (chart.log_z == -math.inf)).all()):
                return skeletons(forest, nodes, chosen)
        forest, nodes, posteriors = self.edges.of(chart, outside, 0.0)
        lengths = torch.full((chart.batch,), chart.length, device=chart.word.device)
        lengths = lengths if chart.lengths is None else chart.lengths
        return self.decoder.trees(forest, nodes, [posteriors], lengths)[0]
