"""Labelled recall over all binary trees (Goodman 1996), whether the grammar has them or not.

    argmax over trees of sum of |mu(label, i, j)|, with the best label of each span, or none

Symbols that binarisation added score 0, and a span whose likeliest symbol is one of them gets no label. The k best
trees may have other labels: none, which adds nothing, or any that the span can have, for its |mu|.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lvpcfg.chart.decode.kbest import Edge, Labels, Ranked, Search, Trees
from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.chart.forest.arrays import true_indices
from lvpcfg.chart.forest.prune import Nodes


class FreeRecall:
    """The best label and the best split of every span, [sentences, starts, widths]; `posterior` is that of nodes."""

    def __init__(
        self,
        nodes: Nodes,
        posterior: Float[Tensor, "at_least_nodes"],
        lengths: Int64[Tensor, "sentences"],
        real: Bool[Tensor, "symbols"],
        interminals: int,
    ) -> None:
        self.nodes, self.lengths, self.real, self.interminals = nodes, lengths, real, interminals
        batch, n = len(lengths), int(lengths.max())
        self.cell = (nodes.sentence * n + nodes.start) * n + nodes.width - 1
        self.posterior = posterior = posterior[: len(self.cell)].abs()
        self.shape = (batch, n, n)
        self.unlabelled = int(real.long().argmin())  # a symbol that binarisation added, if there is one
        self.counts = nodes.top & real[nodes.symbol]
        worth = torch.where(self.counts, posterior, 0)
        self.label = posterior.new_zeros(batch * n * n).scatter_reduce(0, self.cell, worth, "amax").view(self.shape)
        self.best = best = self.label.clone()  # of the tree below a span
        splits = torch.zeros_like(best, dtype=torch.int64)
        for width in range(2, n + 1):
            start = torch.arange(n - width + 1, device=best.device).unsqueeze(1)
            part = torch.arange(1, width, device=best.device)
            value, split = (best[:, start, part - 1] + best[:, start + part, width - part - 1]).max(2)
            best[:, : n - width + 1, width - 1] += value
            splits[:, : n - width + 1, width - 1] = split + 1
        self.tops, self.bottoms, self.splits = (
            grid.tolist() for grid in (self._likeliest(nodes.top), self._likeliest(~nodes.top), splits)
        )

    def _likeliest(self, layer: Bool[Tensor, "nodes"]) -> Int64[Tensor, "sentences starts widths"]:
        """Symbols."""
        at, symbol, posterior = self.cell[layer], self.nodes.symbol[layer], self.posterior[layer]
        largest = posterior.new_zeros(self.label.numel()).scatter_reduce(0, at, posterior, "amax")
        won = (posterior == largest[at]) & (posterior > 0)
        labels = torch.full((self.label.numel(),), self.unlabelled, device=at.device)
        return labels.index_copy_(0, at[won], symbol[won]).view(self.shape)

    def trees(self) -> list[Skeleton]:
        found: list[Skeleton] = []
        for sentence, length in enumerate(self.lengths.tolist()):
            tree: Skeleton = []
            waiting = [(0, length)]
            while waiting:
                at, width = waiting.pop()
                tree.append(self.node(sentence, at, width))
                left = tree[-1].split
                if left:
                    waiting += [(at + left, width - left), (at, left)]
            found.append(tree)
        return found

    def node(self, sentence: int, start: int, width: int) -> Node:
        """A span with its best label and its best split."""
        label, below, left = (grid[sentence][start][width - 1] for grid in (self.tops, self.bottoms, self.splits))
        return Node(start, width, label, label if label >= self.interminals else below, left)

    def k_best(self, possible: Sequence[bool], k: int, labels: Labels) -> list[list[Skeleton]]:
        """The k best of each sentence that has a tree at all."""
        others: dict[int, list[tuple[int, float]]] = {}  # all labels that count, with their worth
        some = true_indices(self.counts & (self.posterior > 0))
        columns = (self.cell[some].tolist(), self.nodes.symbol[some].tolist(), self.posterior[some].tolist())
        for cell, symbol, worth in zip(*columns, strict=True):
            others.setdefault(cell, []).append((symbol, worth))
        label, best = self.label.cpu().numpy(), self.best.cpu().numpy()
        trees = self.trees()
        found: list[list[Skeleton]] = []
        for sentence, length in enumerate(self.lengths.tolist()):
            if not possible[sentence]:
                found.append([])
                continue

            def options(start: int, width: int, sentence: int = sentence) -> list[tuple[Node, float]]:
                cell = (sentence * self.shape[1] + start) * self.shape[2] + width - 1
                first = self.node(sentence, start, width)
                known = [(first, float(label[sentence, start, width - 1]))]
                for symbol, worth in others.get(cell, []):
                    if symbol != first.top:
                        bottom = first.bottom if width == 1 and symbol < self.interminals else symbol
                        known.append((Node(start, width, symbol, bottom, 0), worth))
                if width > 1 and self.real[first.top] and not self.real[self.unlabelled]:
                    known.append((Node(start, width, self.unlabelled, self.unlabelled, 0), 0.0))
                return known

            search = Search(Bracketings(best[sentence], options), labels)
            found.append(search.best((0, length, True), k, trees[sentence]))
        return found


class Bracketings(Trees):
    """All trees over the words of one sentence. Nodes are (start, width, whether above the label)."""

    def __init__(
        self, best: Float[np.ndarray, "starts widths"], options: Callable[[int, int], list[tuple[Node, float]]]
    ) -> None:
        self.best, self.options = best, options

    def edges(self, node: tuple[int, int, bool]) -> Sequence[Edge]:
        start, width, above = node
        part = np.arange(1, width)
        worth = self.best[start, part - 1] + self.best[start + part, width - part - 1]
        if above:
            below = float(worth.max()) if width > 1 else 0.0
            known = self.options(start, width)
            return Ranked(
                np.array([of_label + below for _, of_label in known]),
                lambda number, worth: Edge(worth, ((start, width, False),), known[number][0]),
            )
        if width == 1:
            return [Edge(0.0, ())]
        return Ranked(
            worth,
            lambda number, worth: Edge(
                worth, ((start, number + 1, True), (start + number + 1, width - number - 1, True))
            ),
        )
