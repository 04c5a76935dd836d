"""Charts and figures as pictures of matplotlib, to be saved or sent to TensorBoard; `tree_pictures.py` has trees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.evaluation.tradeoff import APR, COVER, EXACT, SVD, Row
from lvpcfg.trees.binarisation import INTERMEDIATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRONG = "#c0392b"
STYLES = ("-", "--", ":", "-.")
OVER_THRESHOLDS = {  # figures of a row and what they are called
    "seconds": "seconds a sentence, with pruning",
    "inside_outside": "seconds a sentence, inside-outside alone",
    "f1": "F1",
}
OVER_RANKS = {"inside_outside": "seconds a sentence, inside-outside", "kl": "KL divergence, nats a tree", "f1": "F1"}
OF_ONE_FORM: dict[str, dict[str, Any]] = {
    APR: {"marker": "."},
    COVER: {"marker": "s", "linestyle": ""},
    SVD: {"marker": "^", "linestyle": ""},
}
EXACTLY = 1e-9  # divergences below it are rounding
ROUNDING = 1e-16  # smaller errors are drawn here, since the axis is logarithmic


def _figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from lvpcfg.evaluation.figure import Picture  # matplotlib takes half a second: not before something is drawn

    return Picture(width, height)


def draw_states(states: dict[str, Sequence[tuple[str, int]]]) -> Figure:
    """The number of states of each symbol, most first, in a column for phrases, tags and so on."""
    longest = max(len(some) for some in states.values())
    most = max(number for some in states.values() for _, number in some)
    figure = _figure(4.5 * len(states), max(2.5, 0.19 * longest + 0.8))
    for column, (title, some) in enumerate(states.items(), 1):
        axes = figure.add_subplot(1, len(states), column)
        ordered = sorted(some, key=lambda pair: -pair[1])
        bars = axes.barh(range(len(ordered)), [number for _, number in ordered], color="#4878a8")
        axes.bar_label(bars, fontsize=7, padding=2)
        axes.set_yticks(range(len(ordered)), [name for name, _ in ordered], fontsize=7)
        axes.set_ylim(longest - 0.4, -0.6)  # most on top, bars of one height in all columns
        axes.set_xlim(0, 1.1 * most)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("states")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_singular_values(values: Mapping[str, Sequence[float]], states: Mapping[str, int]) -> Figure:
    """A row for each symbol, a cell for each of its singular values; those behind the red line give no state."""
    widest = max(len(some) for some in values.values())
    shown = np.full((len(values), widest), np.nan)
    for row, some in enumerate(values.values()):
        shown[row, : len(some)] = some
    figure = _figure(max(5.0, 0.32 * widest + 2.5), max(2.5, 0.2 * len(values) + 1.2))
    axes = figure.add_subplot()
    image = axes.imshow(shown, cmap="viridis", vmin=0, aspect="auto")
    ends = np.array([states[name] - 1.5 for name in values])  # the first state has no singular value
    edges = np.arange(len(ends) + 1) - 0.5
    axes.plot(ends.repeat(2), np.stack([edges[:-1], edges[1:]], 1).flatten(), color=WRONG, linewidth=1.5)
    axes.set_xlim(-0.6, widest - 0.5)
    axes.set_yticks(range(len(values)), [*values], fontsize=7)
    places = range(0, widest, max(1, widest // 10))
    axes.set_xticks(places, [str(place + 1) for place in places])
    axes.set_xlabel("direction")
    figure.colorbar(image, ax=axes, label="singular value")
    return figure


def draw_gaussians(symbols: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """A panel for each symbol: means [states, d] and spreads [states, d] of its Gaussians, as ellipses of one sigma in
    the two dimensions in which the means differ most; with one dimension, as densities."""
    from matplotlib.patches import Ellipse

    columns = min(4, len(symbols))
    rows = math.ceil(len(symbols) / columns)
    figure = _figure(3.2 * columns, 3.2 * rows)
    for place, (name, (mu, sigma)) in enumerate(symbols.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(name, fontsize=10)
        shown = sorted(mu.var(0, correction=0).argsort(descending=True)[:2].tolist())
        for state, (mean, spread) in enumerate(zip(mu[:, shown].tolist(), sigma[:, shown].tolist(), strict=True)):
            color = f"C{state % 10}"
            if len(shown) == 1:
                x = np.linspace(mean[0] - 3 * spread[0], mean[0] + 3 * spread[0], 61)
                density = np.exp(-0.5 * ((x - mean[0]) / spread[0]) ** 2) / (spread[0] * math.sqrt(2 * math.pi))
                axes.plot(x, density, color=color)
                axes.annotate(str(state), (mean[0], density.max()), fontsize=7, ha="center")
            else:
                width, height = 2 * spread[0], 2 * spread[1]
                axes.add_patch(Ellipse((mean[0], mean[1]), width, height, fill=False, color=color))
                axes.annotate(str(state), (mean[0], mean[1]), fontsize=7, ha="center", va="center")
        axes.autoscale_view()
        if len(shown) > 1:
            axes.set_aspect("equal", adjustable="datalim")
        axes.set_xlabel(f"dimension {shown[0] + 1}", fontsize=8)
        axes.set_ylabel(f"dimension {shown[1] + 1}" if len(shown) > 1 else "density", fontsize=8)
        axes.tick_params(labelsize=7)
    return figure


def draw_components(rows: Sequence[tuple[int, float, float]]) -> Figure:
    """F1 and seconds of an epoch over the number of components that are kept; all of them, 0, is a line across."""
    figure = _figure(6.4, 5)
    for place, (title, column) in enumerate((("F1", 1), ("CPU seconds an epoch", 2)), 1):
        axes = figure.add_subplot(2, 1, place)
        some = sorted((row[0], row[column]) for row in rows if row[0])
        axes.plot([kept for kept, _ in some], [value for _, value in some], marker="o", label="the largest are kept")
        for exact in (row[column] for row in rows if not row[0]):
            axes.axhline(exact, color=WRONG, linestyle="--", label="all: exact")
        axes.set_ylabel(title)
        axes.legend(fontsize=8)
    axes.set_xlabel("components of a node")
    return figure


def draw_seconds(seconds: dict[str, float]) -> Figure:
    """A bar for each stage, in their order, with its share of all."""
    figure = _figure(6.4, 0.35 * len(seconds) + 1)
    axes = figure.add_subplot()
    bars = axes.barh(list(seconds), list(seconds.values()), color="#4878a8")
    total = sum(seconds.values())
    axes.bar_label(bars, [f"{100 * spent / total:.0f} %" for spent in seconds.values()], fontsize=8, padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_errors(errors: dict[str, Sequence[float]], threshold: float) -> Figure:
    """The share of rules with an error up to gamma, a line for each type of children; and the threshold."""
    figure = _figure(6.4, 4)
    axes = figure.add_subplot()
    for name, some in errors.items():
        axes.step(sorted(max(error, ROUNDING) for error in some), np.arange(1, len(some) + 1) / len(some), label=name)
    if threshold > 0:
        axes.axvline(threshold, color="0.6", linestyle=":", label="threshold")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("error of a rule, gamma = ||T - T^||")
    axes.set_ylabel("share of the rules with up to gamma")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_tradeoff(rows: Sequence[Row]) -> Figure:
    """Time and F1: over the threshold for grammars with latent states (Cohen & Collins 2012), over the rank for those
    without (Cohen, Satta & Collins 2013). A colour is a model, a line style a rank.

    A time is its ratio to the exact grammar's, measured in the same minutes, times the exact grammar's.
    """
    exact = {row.label: row for row in rows if row.method == EXACT}
    rows = [
        replace(
            row,
            seconds=row.ratio * exact[row.label].seconds,
            inside_outside=row.ratio_inside_outside * exact[row.label].inside_outside,
        )
        for row in rows
        if row.label in exact
    ]
    latent = [row for row in rows if row.states > 1]
    without = [row for row in rows if row.states == 1]
    lines = [(some, draw) for some, draw in ((latent, _over_thresholds), (without, _over_ranks)) if some]
    figure = _figure(12, 3.8 * len(lines))
    for number, (some, draw) in enumerate(lines):
        draw([figure.add_subplot(len(lines), 3, 3 * number + column) for column in (1, 2, 3)], some)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
    return figure


def _over_thresholds(panels: Sequence[Axes], rows: list[Row]) -> None:
    thresholds = sorted({row.threshold for row in rows if row.threshold > 0})
    place = {threshold: math.log10(threshold) for threshold in thresholds}
    place[0] = min(place.values(), default=0) - 1.5  # exact, at the left edge
    ranks = sorted({row.rank for row in rows if row.rank})
    for colour, label in enumerate(dict.fromkeys(row.label for row in rows)):
        exact = [row for row in rows if row.label == label and row.method == EXACT]
        for style, rank in enumerate(ranks):
            own = [row for row in rows if row.label == label and row.rank == rank]
            points = sorted(((place[row.threshold], row) for row in exact + own), key=lambda point: point[0])
            line = {"color": f"C{colour % 10}", "linestyle": STYLES[style % len(STYLES)], "marker": "."}
            _draw_points(panels, OVER_THRESHOLDS, points, f"{label}, r = {rank}", line)
    for axes in panels:
        axes.set_xticks(list(place.values()), ["0" if not t else f"{t:.0e}".replace("e-0", "e-") for t in place])
        axes.set_xlabel("threshold t")
    _finish(panels, OVER_THRESHOLDS)


def _over_ranks(panels: Sequence[Axes], rows: list[Row]) -> None:
    for colour, label in enumerate(dict.fromkeys(row.label for row in rows)):
        own = [row for row in rows if row.label == label]
        for method, line in OF_ONE_FORM.items():
            points = sorted(((row.rank, row) for row in own if row.method == method), key=lambda point: point[0])
            if points:
                line = line | {"color": f"C{colour % 10}"}
                _draw_points(panels, OVER_RANKS, points, f"{label}, {method}", line)
        for row in own:
            if row.method == EXACT:
                for axes, name in zip(panels, OVER_RANKS, strict=True):
                    if name != "kl":
                        axes.axhline(getattr(row, name), color="0.5", linestyle=":", label=f"{label}, rule list")
    panels[1].set_yscale("log")
    for axes in panels:
        axes.set_xlabel("rank r")
    _finish(panels, OVER_RANKS)


def _draw_points(
    panels: Sequence[Axes], names: dict[str, str], points: Sequence[tuple[float, Row]], label: str, line: dict[str, Any]
) -> None:
    for axes, name in zip(panels, names, strict=True):
        values = [(x, getattr(row, name)) for x, row in points]
        shown = [(x, y) for x, y in values if math.isfinite(y) and (name != "kl" or y > EXACTLY)]
        axes.plot([x for x, _ in shown], [y for _, y in shown], label=label, **line)


def _finish(panels: Sequence[Axes], names: dict[str, str]) -> None:
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        if name == "f1":  # differences of hundredths are none to look at
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, (low + high) / 2 - 0.5), max(high, (low + high) / 2 + 0.5))
        elif name != "kl":
            axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8)


def draw_charts(charts: Mapping[str, Tensor], sentence: Sequence[str], symbols: Sequence[str]) -> Figure:
    """Span posteriors [i, j, symbols] as triangles over the words: how sure the likeliest label of each span is. Of two
    charts also by how much they differ: the second less the first, for the label that differs most.

    Symbols that binarisation made are left out.
    """
    from matplotlib.collections import PolyCollection

    n = len(sentence)
    real = [i for i, name in enumerate(symbols) if not name.startswith(INTERMEDIATE)]
    shown = {}
    for title, posteriors in charts.items():
        if posteriors.shape != (n, n, len(symbols)):
            expected = (n, n, len(symbols))
            raise InputError(f"the posteriors have the shape {tuple(posteriors.shape)}: expected {expected}.")
        shown[title] = posteriors[:, :, real].float().cpu().numpy()
    panels = [(title, some, some.argmax(2), "Blues", 0.0, 1.0) for title, some in shown.items()]
    if len(shown) == 2:
        before, after = shown.values()
        change = after - before
        largest = float(abs(change).max())
        title = f"difference, {largest:.2g} at the most"
        panels.append((title, change, abs(change).argmax(2), "RdBu_r", -(largest or 1.0), largest or 1.0))
    spans = [(i, j) for j in range(n) for i in range(j + 1)]
    middles = [((i + j + 1) / 2, (j - i) / 2) for i, j in spans]
    diamonds = [[(x - 0.5, y), (x, y + 0.5), (x + 0.5, y), (x, y - 0.5)] for x, y in middles]
    width = max(3.6, 0.36 * n + 0.8)
    figure = _figure(width * len(panels), 0.5 * width + 1.6)
    for column, (title, values, label, colours, low, high) in enumerate(panels, 1):
        axes = figure.add_subplot(
            1, len(panels), column, aspect="equal", xlim=(-0.1, n + 0.1), ylim=(-0.6, n / 2 + 0.1)
        )
        axes.set_title(title, loc="left", fontsize=10)
        worth = np.array([values[i, j, label[i, j]] for i, j in spans])
        cells = PolyCollection(diamonds, array=worth, cmap=colours, clim=(low, high), edgecolors="0.85", linewidths=0.3)
        axes.add_collection(cells)
        for (i, j), (x, y), value in zip(spans, middles, worth, strict=True):
            if abs(value) > 0.3 * high:
                name, colour = symbols[real[label[i, j]]], "white" if abs(value) > 0.6 * high else "black"
                axes.text(x, y, name, ha="center", va="center", fontsize=min(7, 22 / len(name)), color=colour)
        axes.set_xticks([i + 0.5 for i in range(n)], list(sentence), rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(cells, ax=axes, orientation="horizontal", shrink=0.6, aspect=30)
        ticks = [low, (low + high) / 2, high]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.ax.tick_params(labelsize=7)
    return figure
