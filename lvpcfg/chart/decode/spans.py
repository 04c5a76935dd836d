"""How sure a grammar is of the steps between the layers of spans, from which posteriors of labels are added up.

Every span of a tree has one step from its top symbol to its bottom symbol. So

    p(label, i, j) = sum of p(step, i, j) over the steps that are written with this label

is the probability of all trees that, as they are written, have this label over this span.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lvpcfg.chart.decode.written import Writer
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.prune import Nodes

Cell = tuple[int, int, int]  # sentence, start, width
Steps = dict[Cell, list[tuple[int, int, float]]]  # top symbol, bottom symbol, posterior


def cells_of(trees: Sequence[Sequence[Skeleton]]) -> list[Cell]:
    """The spans of some trees of each sentence."""
    found = {
        (sentence, node.start, node.width) for sentence, some in enumerate(trees) for tree in some for node in tree
    }
    return sorted(found)


def cells_of_nodes(nodes: Nodes) -> list[Cell]:
    """The spans of a forest."""
    rows = torch.stack([nodes.sentence, nodes.start, nodes.width], 1).unique(dim=0)
    return [(sentence, start, width) for sentence, start, width in rows.tolist()]


def cells_of_charts(sentences: int, length: int) -> list[Cell]:
    """The spans of sentences of one length."""
    spans = [(start, width) for width in range(1, length + 1) for start in range(length - width + 1)]
    return [(sentence, *span) for sentence in range(sentences) for span in spans]


def steps_of_forest(
    forest: Forest,
    nodes: Nodes,
    posteriors: Float[Tensor, "edges"],
    is_step: Bool[Tensor, "edges"],
    cells: Sequence[Cell],
) -> Steps:
    """The steps of a forest over some spans."""
    found: Steps = {cell: [] for cell in cells}
    if not cells:
        return found
    longest = nodes.width.amax() + 1
    wanted = torch.tensor(cells, device=nodes.start.device)
    edges = true_indices(is_step)
    parent = take(forest.parent, edges)
    columns = [take(column, parent) for column in (nodes.sentence, nodes.start, nodes.width)]
    key, wanted_key = (
        (sentence * longest + start) * longest + width for sentence, start, width in (columns, wanted.unbind(1))
    )
    some = true_indices(torch.isin(key, wanted_key))
    edges, parent = take(edges, some), take(parent, some)
    ends = take(nodes.symbol, parent), take(nodes.symbol, take(forest.left, edges))
    rows = torch.stack([*(take(column, some) for column in columns), *ends], 1).tolist()
    for (*cell, top, bottom), posterior in zip(rows, take(posteriors, edges).tolist(), strict=True):
        found[tuple(cell)].append((top, bottom, posterior))
    return found


def label_posterior(writer: Writer, steps: Sequence[tuple[int, int, float]], label: str) -> float:
    """Of a label over a span with these steps; from 0 to 1, which negative parameters could leave."""
    total = sum(
        posterior for top, bottom, posterior in steps if label in writer.phrase_labels(writer.chain(top, bottom))
    )
    return min(1.0, max(0.0, total))


def phrases_of(writer: Writer, steps: Steps, sentences: int) -> list[list[tuple[str, int, int, float]]]:
    """All phrases over all spans of each sentence: label, start, end, posterior; short ones first."""
    found: list[list[tuple[str, int, int, float]]] = [[] for _ in range(sentences)]
    for (sentence, start, width), some in sorted(steps.items(), key=lambda cell: (cell[0][2], cell[0])):
        labels = {label for top, bottom, _ in some for label in writer.phrase_labels(writer.chain(top, bottom))}
        for label in sorted(labels):
            found[sentence].append((label, start, start + width, label_posterior(writer, some, label)))
    return found
