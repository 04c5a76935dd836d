"""Trees as matplotlib figures, for files and TensorBoard. `trees/svg.py` draws them for browsers."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from nltk.tree import Tree

from lvpcfg.errors import printable
from lvpcfg.evaluation.tree_layout import LABEL, layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRONG, LINE = "#c0392b", "0.65"
POINT = 1 / 72  # of an inch
FONT, MARGIN, BETWEEN = 9.0, 10.0, 30.0  # points: of letters, around a figure, between trees
LONGEST, LARGEST = 160.0, 2500.0  # inches, square inches: of what is larger everything is drawn smaller
FONTS = (  # those that are installed: the first has no Chinese, Japanese and Korean
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Microsoft YaHei",
    "Arial Unicode MS",
)


def draw_trees(trees: dict[str, Tree], gold: str | None = None) -> Figure:
    """Trees one above the other, with their titles; brackets that the tree titled `gold` does not have are red."""
    from matplotlib.collections import LineCollection
    from matplotlib.font_manager import FontProperties, fontManager
    from matplotlib.textpath import text_to_path

    from lvpcfg.evaluation.figure import Picture

    installed = set(fontManager.get_font_names())
    families = [name for name in FONTS if name in installed]
    fonts = {
        is_word: FontProperties(family=families, style="italic" if is_word else "normal") for is_word in (False, True)
    }

    def width_of(text: str, is_word: bool) -> float:
        font = fonts[is_word].copy()
        font.set_size(FONT)
        return float(text_to_path.get_text_width_height_descent(printable(text), font, ismath=False)[0])

    warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a box in a picture says it as well
    placed = {title: layout(tree, width_of) for title, tree in trees.items()}
    width = max(max(one.width for one in placed.values()), 200.0) + 2 * MARGIN
    height = sum(one.height + BETWEEN for one in placed.values()) + 2 * MARGIN
    inches = width * POINT, height * POINT
    scale = min(1.0, LONGEST / max(inches), math.sqrt(LARGEST / (inches[0] * inches[1])))
    figure = Picture(scale * inches[0], scale * inches[1], layout=None)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    known = None if gold is None else {label.bracket for label in placed[gold].labels}
    lines, floor = [], height - MARGIN
    for title, one in placed.items():
        floor -= BETWEEN
        axes.text(MARGIN, floor + LABEL, title, fontsize=scale * (FONT + 1), parse_math=False)
        floor -= one.height
        lines += [[(MARGIN + x, floor + y) for x, y in edge] for edge in one.edges]
        for label in one.labels:
            is_word = label.bracket is None
            right = is_word or known is None or label.bracket in known
            axes.text(
                MARGIN + label.x,
                floor + label.y,
                printable(label.text),
                ha="center",
                va="center_baseline",
                fontproperties=fonts[is_word],
                fontsize=scale * FONT,
                color="black" if right else WRONG,
                parse_math=False,  # $ is a dollar
            )
    axes.add_collection(LineCollection(lines, colors=LINE, linewidths=0.8 * scale))
    return figure
