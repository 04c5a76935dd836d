"""Every derivation of a sentence, one by one: the truth that charts are tested against.

Independent of the charts: it takes full arrays over states and recurses as the definition reads.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lvpcfg.chart.derivations import Node


@dataclass
class Dense:
    """A grammar written out in full over states; a CP form by its factors instead of `rules`."""

    root: Tensor  # [states]
    rules: Tensor  # [lanes, interminals, states, states]: one lane, or one for each rank
    unary: Tensor | None  # [interminals, states], one step

    @property
    def interminals(self) -> int:
        return self.rules.shape[1]

    def steps(self) -> Tensor | None:
        """[interminals, states]: any number of unary steps from a top to a bottom state, by their series."""
        if self.unary is None:
            return None
        inner, states = self.unary.shape
        power = torch.eye(inner, states, dtype=self.unary.dtype)
        total = power.clone()
        for _ in range(200):
            power = power[:, :inner] @ self.unary  # one more rule at the end of every chain
            total = total + power
        return total


def derivations(grammar: Dense, words: Tensor) -> list[tuple[float, tuple[Node, ...]]]:
    """All derivations of a sentence with their weights. `words` is [length, preterminal states]."""
    inner, steps = grammar.interminals, grammar.steps()
    states = len(grammar.root)

    def bottoms(i: int, j: int, state: int) -> list[tuple[float, int, int | None, tuple[Node, ...]]]:
        """(weight, split, lane, nodes below) of all ways to make a span with this bottom state."""
        if j == i + 1:
            weight = float(words[i, state - inner]) if state >= inner else 0.0
            return [(weight, 0, None, ())] if weight else []
        found = []
        if state < inner:
            for k in range(i + 1, j):
                for (b, left), (c, right) in itertools.product(all_tops(i, k), all_tops(k, j)):
                    for lane in range(len(grammar.rules)):
                        weight = float(grammar.rules[lane, state, b, c])
                        if weight:
                            for (w1, n1), (w2, n2) in itertools.product(left, right):
                                found.append((weight * w1 * w2, k - i, lane, n1 + n2))
        return found

    cache: dict[tuple[int, int], list[tuple[int, list[tuple[float, tuple[Node, ...]]]]]] = {}

    def all_tops(i: int, j: int) -> list[tuple[int, list[tuple[float, tuple[Node, ...]]]]]:
        if (i, j) not in cache:
            made = {bottom: bottoms(i, j, bottom) for bottom in range(states)}
            cache[i, j] = []
            for top in range(states):
                ways = []
                for bottom, found in made.items():
                    step = 1.0 if top == bottom else 0.0
                    if steps is not None and top < inner:
                        step = float(steps[top, bottom])
                    for weight, split, lane, below in found:
                        if step and weight:
                            rank = lane if len(grammar.rules) > 1 else None
                            ways.append((step * weight, (Node(i, j - i, top, bottom, split, rank), *below)))
                if ways:
                    cache[i, j].append((top, ways))
        return cache[i, j]

    return [
        (float(grammar.root[top]) * weight, nodes)
        for top, ways in all_tops(0, len(words))
        for weight, nodes in ways
        if grammar.root[top] != 0
    ]


def total(found: list[tuple[float, tuple[Node, ...]]]) -> float:
    return math.fsum(weight for weight, _ in found)
