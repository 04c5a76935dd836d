"""Derivations drawn at random, from the root down over one inside chart, for all samples at once.

    p(b, c, k | a, i, j) = T^{a -> b c} alpha(i,k)_b alpha(k+1,j)_c / alpha(i,j)_a

All nodes of a width, of all samples of all sentences, are expanded together, widest first.
"""

import torch
from torch import Tensor

from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.fast.blocks import Block, DenseBlock
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.pairs import Pairs

CHUNK = 1 << 22  # numbers held at once


class Sampler:
    """Draws `samples` derivations of each sentence of a chart."""

    def __init__(self, chart: Chart, samples: int, generator: torch.Generator | None = None) -> None:
        self.chart, self.generator, self.samples = chart, generator, samples
        device = chart.word.device
        self.sentence = torch.arange(chart.batch, device=device).repeat_interleave(samples)  # of each tree
        self.waiting: list[list[tuple[Tensor, ...]]] = [[] for _ in range(chart.length + 1)]  # by width
        self.found: list[Tensor] = []  # [nodes, (tree, start, width, top, bottom, split, rank)]
        self._begin()
        for width in range(chart.length, 0, -1):
            if self.waiting[width]:
                tree, start, top, factor = (torch.cat(column) for column in zip(*self.waiting[width], strict=True))
                for nodes in torch.arange(len(tree), device=device).split(self._nodes_at_once(width)):
                    self._expand(width, tree[nodes], start[nodes], top[nodes], factor[nodes])

    def _draw(self, weights: Tensor) -> Tensor:
        """[nodes, choices] -> [nodes]"""
        return torch.multinomial(weights, 1, generator=self.generator).squeeze(1)

    def _begin(self) -> None:
        """The top state of each sentence that has derivations."""
        chart = self.chart
        trees = (chart.log_z > -torch.inf).index_select(0, self.sentence).nonzero().squeeze(1)
        sentence = self.sentence[trees]
        if not len(trees):
            return
        top = self._draw((chart.final * chart.form.root).index_select(0, sentence))
        lengths = torch.full_like(trees, chart.length) if chart.lengths is None else chart.lengths[sentence]
        self._wait(lengths, trees, torch.zeros_like(trees), top, torch.full_like(trees, -1))

    def _wait(self, width: Tensor, *columns: Tensor) -> None:
        """Nodes to come: tree, start, top state, and in a CP form the column of V or W (behind V) above, else -1."""
        for number in width.unique().tolist():
            here = (width == number).nonzero().squeeze(1)
            self.waiting[number].append(tuple(column[here] for column in columns))

    def _nodes_at_once(self, width: int) -> int:
        form = self.chart.form
        sizes = [width * form.lanes]
        if isinstance(form, TensorForm):
            sizes += [
                len(block.rules) * max(width, block.shape[0]) * max(block.shape[1:]) ** 2 for block in form.blocks
            ]
        return max(1, CHUNK // max(sizes))

    def _expand(self, width: int, tree: Tensor, start: Tensor, top: Tensor, factor: Tensor) -> None:
        chart, form = self.chart, self.chart.form
        cell = start * chart.batch + self.sentence[tree]
        if isinstance(form, CPForm):
            top = self._top(form, width, cell, top, factor)
        bottom = self._bottom(width, cell, top)
        nothing = torch.zeros_like(tree)
        split, rank = nothing, nothing - 1
        if width > 1 and isinstance(form, CPForm):
            split, rank = self._split(form, width, cell, bottom)
            left, right = rank, rank + len(form.weights[0])
            self._wait(split, tree, start, nothing, left)
            self._wait(width - split, tree, start + split, nothing, right)
        elif width > 1 and isinstance(form, TensorForm):
            split, left, right = self._rule(form, width, cell, bottom)
            self._wait(split, tree, start, left, nothing - 1)
            self._wait(width - split, tree, start + split, right, nothing - 1)
        self.found.append(torch.stack([tree, start, nothing + width, top, bottom, split, rank], 1))

    def _top(self, form: CPForm, width: int, cell: Tensor, top: Tensor, factor: Tensor) -> Tensor:
        """The top state of nodes below a rank index."""
        below = (factor >= 0).nonzero().squeeze(1)
        if not len(below):
            return top
        values, factors = self.chart.top[width - 1], form.weights[1]
        if width == 1:
            values, factors = torch.cat([values, self.chart.word_top], 1), torch.cat(form.weights[1:])
        drawn = self._draw(values[cell[below]] * factors.T[factor[below]])
        return top.index_copy(0, below, drawn)

    def _bottom(self, width: int, cell: Tensor, top: Tensor) -> Tensor:
        """The state below unary rules."""
        chart, form = self.chart, self.chart.form
        step = form.promotion if width == 1 else form.closure
        phrases = (top < form.interminals).nonzero().squeeze(1)
        if step is None or not len(phrases):
            return top
        values = chart.word if width == 1 else chart.bottom[width - 1]
        drawn = self._draw(values[cell[phrases]] * step.T[top[phrases]])
        return top.index_copy(0, phrases, drawn + (form.interminals if width == 1 else 0))

    def _split(self, form: CPForm, width: int, cell: Tensor, bottom: Tensor) -> tuple[Tensor, Tensor]:
        """The width of the left child, and the rank index."""
        left, right = self.chart.operands(0, width)
        rank = self._draw(self.chart.combined[width - 2][cell] * form.weights[0].T[bottom])
        split = self._draw(left[cell, :, rank] * right[cell, :, rank])
        return split + 1, rank

    def _rule(self, form: TensorForm, width: int, cell: Tensor, bottom: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The width of the left child, and the states of both children."""
        terms = form.terms(width)
        scores = [self._scores(form, term, width, cell, bottom) for term in terms]
        choice = self._draw(torch.cat(scores, 1))
        found = torch.zeros(3, len(cell), dtype=torch.int64, device=cell.device)
        first = 0
        for term, score in zip(terms, scores, strict=True):
            here = ((choice >= first) & (choice < first + score.shape[1])).nonzero().squeeze(1)
            if len(here):
                found[:, here] = self._children(form, term, width, cell[here], bottom[here], choice[here] - first)
            first += score.shape[1]
        split, left, right = found
        return split, left, right

    def _scores(self, form: TensorForm, term: int, width: int, cell: Tensor, bottom: Tensor) -> Tensor:
        """What each rule of a term adds to the nodes with each of its parent states, [nodes, rules * x]."""
        block, weights = form.blocks[term], form.weights[term]
        first, second = self.chart.operands(term, width)
        first, second = first.index_select(-3, cell), second[cell]  # of [cells, splits, lanes], or of matrices
        if isinstance(block, DenseBlock):
            return block.apply(first, second, weights).gather(1, bottom.unsqueeze(1))
        rows = block.rows(first, second, weights)  # [rules, nodes, x]
        return (rows * (block.parent.unsqueeze(1) == bottom.view(1, -1, 1))).transpose(0, 1).flatten(1)

    def _children(self, form: TensorForm, term: int, width: int, cell: Tensor, bottom: Tensor, place: Tensor) -> Tensor:
        """The width of the left child and the states of both, [3, nodes]."""
        block = form.blocks[term]
        rule, x = (place // block.shape[0], place % block.shape[0]) if isinstance(block, Block) else (place, bottom)
        pairs = Pairs(self.chart, form, term, width, cell, rule, x)
        half = torch.bmm(pairs.left, pairs.weights)  # [nodes, splits, z]
        split = self._draw((half * pairs.right).sum(2))
        node = torch.arange(len(cell), device=cell.device)
        z = self._draw(half[node, split] * pairs.right[node, split])
        y = self._draw(pairs.left[node, split] * pairs.weights[node, :, z])
        return torch.stack(pairs.named(node, split, y, z))

    def skeletons(self) -> list[list[Skeleton]]:
        """For each sentence its samples, their nodes labelled with states; without nodes where there is none."""
        trees: list[Skeleton] = [[] for _ in self.sentence]
        if self.found:
            for tree, start, width, top, bottom, split, rank in torch.cat(self.found).tolist():
                trees[tree].append(Node(start, width, top, bottom, split, None if rank < 0 else rank))
        for tree in trees:
            tree.sort(key=lambda node: (node.start, -node.width))  # preorder
        return [trees[i : i + self.samples] for i in range(0, len(trees), self.samples)]
