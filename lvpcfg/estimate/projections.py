"""The nodes of a treebank as small vectors, from their features, for `spectral` and `cluster`."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.features import INSIDE, OUTSIDE, Nodes, Values, values_of
from lvpcfg.estimate.moments import FeatureMatrix, Projected, Singular, projected, singular
from lvpcfg.estimate.spectral import ProjectionOptions

log = logging.getLogger(__name__)

FEW, MANY = 50, 500  # occurrences of symbols that have one state, and of those that have all
SHOWN = 3  # features of a state


@dataclass(frozen=True, eq=False)
class Projections:
    features: tuple[dict[str, Values], dict[str, Values]]  # inside, outside
    matrices: tuple[FeatureMatrix, FeatureMatrix]
    singular: Singular
    most: Int64[Tensor, "symbols"]  # states that each symbol may have
    nodes: Projected

    @staticmethod
    def of(options: ProjectionOptions, task: Task, seed: int, dropout: float = 0) -> "Projections":
        """`dropout` is the share of features, chosen at random, that are left out."""
        bank, generator = task.treebank, torch.Generator().manual_seed(seed)
        sizes = torch.bincount(bank.symbol, minlength=len(bank.symbols))
        most = 1 + ((options.states - 1) * ((sizes - FEW) / (MANY - FEW)).clamp(0, 1)).long()
        nodes = Nodes(bank, task.observed.lexicon)
        features = values_of(options.inside, INSIDE, nodes), values_of(options.outside, OUTSIDE, nodes)
        inside, outside = (
            FeatureMatrix.of(bank.symbol, sizes, [values.number for values in some.values()]).without(
                dropout, generator
            )
            for some in features
        )
        found = singular(inside, outside, options.states - 1, generator)
        vectors = projected(inside, outside, found, most, options.least, options.share)
        return Projections(features, (inside, outside), found, most, vectors)

    @property
    def deficient(self) -> Int64[Tensor, "some"]:
        """Symbols that have fewer states than their number of nodes allows: too few of their singular values count."""
        return (self.nodes.states < self.most).nonzero().flatten()

    def report(self, names: tuple[str, ...]) -> None:
        """Says which symbols are deficient."""
        if not len(self.deficient):
            return
        found = [
            f"{names[symbol]} {int(self.nodes.states[symbol])} of {int(self.most[symbol])} "
            f"({', '.join(f'{value:.2g}' for value in self._values(symbol)[: int(self.nodes.states[symbol])])})"
            for symbol in self.deficient.tolist()
        ]
        log.info("Too few singular values count for all states of %d symbols: %s.", len(found), "; ".join(found))

    def figures(self) -> dict[str, float]:
        """`correlation` is the sum of the singular values that are used, in the mean over nodes."""
        values = self.singular.values
        used = torch.arange(values.shape[1]) < self.nodes.states.unsqueeze(1) - 1
        correlation = ((values * used).sum(1) * self.nodes.sizes).sum() / self.nodes.sizes.sum()
        states, deficient = int(self.nodes.states.sum()), len(self.deficient)
        return {"states": states, "rank_deficient": deficient, "correlation": float(correlation)}

    def description(self, names: tuple[str, ...], states: Int64[Tensor, "symbols"]) -> dict[str, Any]:
        """Of each symbol that may have states the singular values, and for each of its `states` but the first the
        features that weigh most: plain JSON."""
        shown = (self.most > 1).nonzero().flatten().tolist()
        vectors = (self.singular.left, self.singular.right)
        return {
            names[symbol]: {"singular_values": self._values(symbol)}
            | {
                side: _strongest(matrix, features, weights, matrix.columns_of()[symbol], int(states[symbol]))
                for side, matrix, features, weights in zip(
                    ("inside", "outside"), self.matrices, self.features, vectors, strict=True
                )
            }
            for symbol in shown
        }

    def _values(self, symbol: int) -> list[float]:
        return [float(f"{value:.4g}") for value in self.singular.values[symbol].tolist() if value > 0]


def _strongest(
    matrix: FeatureMatrix,
    features: dict[str, Values],
    weights: Float64[Tensor, "columns k"],
    columns: slice,
    states: int,
) -> list[list[str]]:
    """Of each state of one symbol, with the sign of the weight."""
    kinds, found = [*features.items()], []
    for weight in weights[columns].T[: states - 1]:
        strongest = weight.abs().argsort(descending=True)[:SHOWN]
        lines = []
        for column, sign in zip((columns.start + strongest).tolist(), weight[strongest].tolist(), strict=True):
            node, kind = divmod(int(matrix.example[column]), len(kinds))
            name, values = kinds[kind]
            text = values.text(node) if int(values.number[node]) >= 0 else "none"
            lines.append(f"{'-' if sign < 0 else '+'} {name}: {text}")
        found.append(lines)
    return found
