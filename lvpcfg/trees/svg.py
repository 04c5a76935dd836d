"""Trees as SVG, for notebooks and pages."""

import unicodedata

from nltk.tree import Tree

from lvpcfg.errors import InputError, printable
from lvpcfg.trees.walk import rebuild

DEEPEST = 150  # levels: svgling recurses
STYLE = (
    "background-color: white; font-family: 'DejaVu Sans', Verdana, sans-serif; font-weight: normal; font-style: normal;"
)
NARROW, WIDE = 1.75, 1.0  # letters per em, of this font and of Chinese, Japanese and Korean


def depth(tree: Tree) -> int:
    """How many labels stand above each other at the most."""
    return rebuild(tree, lambda _, below: 1 + max((child for child in below if isinstance(child, int)), default=0))


def tree_svg(tree: Tree) -> str:
    """A picture of the tree, its words on one line."""
    import svgling

    if depth(tree) > DEEPEST:
        raise InputError(f"the tree has {depth(tree):,} levels: expected at most {DEEPEST}, to draw it as SVG.")
    shown = rebuild(tree, lambda node, below: Tree(printable(str(node.label())), [_shown(child) for child in below]))
    wide = any(unicodedata.east_asian_width(letter) in "WF" for word in shown.leaves() for letter in word)
    drawn = svgling.draw_tree(
        shown,
        leaf_nodes_align=True,
        descend_direct=False,  # down the column of the word, past what stands beside it
        font_style=STYLE,
        font_size=14,
        average_glyph_width=WIDE if wide else NARROW,
    )
    svg: str = drawn.get_svg().tostring()
    return svg


def _shown(child: Tree | str) -> Tree | str:
    return child if isinstance(child, Tree) else printable(str(child))
