"""Trees and charts as pictures: nothing crosses or covers a label, and nothing is lost on the way."""

from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from nltk.tree import Tree

from lvpcfg import InputError, Parse
from lvpcfg.evaluation.pictures import draw_charts
from lvpcfg.evaluation.tree_layout import LABEL, layout
from lvpcfg.evaluation.tree_pictures import WRONG, draw_trees
from lvpcfg.trees.svg import DEEPEST, tree_svg

LABELS = some.text(alphabet="NPVS$.", min_size=1, max_size=30)
TREES = some.recursive(
    some.builds(Tree, LABELS, some.tuples(LABELS)),
    lambda below: some.builds(Tree, LABELS, some.lists(some.one_of(below, LABELS), min_size=1, max_size=5)),
    max_leaves=25,
)
ODD = Tree("TOP", [Tree('<&">', [Tree("PRP$", ["$x^2$"]), Tree("NN", ["<&\"'>"]), Tree("NN", ["кошка"])])])


def deep(levels):
    tree = Tree("NN", ["dog"])
    for _ in range(levels - 1):
        tree = Tree("NP", [tree])
    return tree


def placed(tree):
    return layout(tree, lambda text, is_word: (7.0 if is_word else 6.0) * len(text))


def crosses(a, b, label):
    """Whether the line from a to b has a point inside the box of a label: an interval of it is left by all sides."""
    begin, end = 0.0, 1.0
    for axis, middle, half in ((0, label.x, label.width / 2), (1, label.y, LABEL / 2)):
        start, step = a[axis], b[axis] - a[axis]
        low, high = middle - half + 1e-6 - start, middle + half - 1e-6 - start
        if step == 0:
            if not low < 0 < high:
                return False
        else:
            near, far = sorted((low / step, high / step))
            begin, end = max(begin, near), min(end, far)
    return begin < end


@given(TREES)
def test_no_label_covers_another_and_no_edge_crosses_one(tree):
    found = placed(tree)
    for one, two in combinations(found.labels, 2):
        apart = abs(one.x - two.x) >= (one.width + two.width) / 2 - 1e-6
        assert apart or abs(one.y - two.y) >= LABEL
    for edge in found.edges:
        for a, b in pairwise(edge):
            assert not any(crosses(a, b, label) for label in found.labels)
    for label in found.labels:
        assert -1e-6 <= label.x - label.width / 2 <= label.x + label.width / 2 <= found.width + 1e-6
        assert 0 <= label.y - LABEL / 2 <= label.y + LABEL / 2 <= found.height


@given(TREES)
def test_words_stand_on_one_line_in_their_order_and_parents_over_their_children(tree):
    found = placed(tree)
    words = sorted((label for label in found.labels if label.bracket is None), key=lambda label: label.x)
    assert [label.text for label in words] == tree.leaves()
    assert {label.y for label in words} == {LABEL / 2}
    assert len(found.edges) == len(found.labels) - 1
    starts = {}
    for (x, y), *_, (below, _) in found.edges:
        starts.setdefault((x, y), []).append(below)
    for (x, _), children in starts.items():
        assert x == pytest.approx((min(children) + max(children)) / 2)
    brackets = [label.bracket for label in found.labels if label.bracket]
    for start, end, text in brackets:
        assert text in {node.label() for node in tree.subtrees(lambda node, n=end - start: len(node.leaves()) == n)}


def test_a_figure_has_all_labels_and_wrong_brackets_are_red():
    predicted = ODD.copy(deep=True)
    predicted[0][0].set_label("NNP")
    figure = draw_trees({"gold": ODD, "predicted": predicted, "no maths: $a$": ODD}, gold="gold")
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("$x^2$") == texts.count("кошка") == 3
    assert [text.get_text() for text in axes.texts if text.get_color() == WRONG] == ["NNP"]
    assert not any(text.get_parse_math() for text in axes.texts)
    assert len(axes.collections[0].get_segments()) == 3 * 7
    figure.canvas.draw()


def test_drawn_labels_are_as_wide_as_they_were_measured():
    figure = draw_trees({"": ODD})
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts[1:]]
    for one, two in combinations(boxes, 2):
        assert not one.overlaps(two)


def test_a_picture_has_a_largest_size():
    width, height = draw_trees({"deep": deep(3000)}).get_size_inches()
    assert height <= 160
    assert width > 0


def texts_of(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("tree", [ODD, deep(DEEPEST), Tree("NN", ["中文"]), Tree("NN", ["\x1b\x00"])])
def test_svg_is_well_formed_and_has_all_words_and_labels(tree):
    expected = [*tree.leaves(), *(node.label() for node in tree.subtrees())]
    expected = ["\\x1b\\x00" if text == "\x1b\x00" else text for text in expected]
    assert sorted(texts_of(tree_svg(tree))) == sorted(expected)


def test_a_parse_is_a_picture_in_notebooks():
    assert texts_of(Parse(ODD, -1.0, 1.0, -1.0, False)._repr_svg_()) == texts_of(tree_svg(ODD))


def test_a_tree_that_is_too_deep_for_svg_is_text():
    tree = deep(5000)
    assert Parse(tree, -1.0, 1.0, -1.0, False)._repr_svg_() is None
    with pytest.raises(InputError, match=r"the tree has 5,000 levels: expected at most 150, to draw it as SVG\."):
        tree_svg(tree)


def test_charts_stand_side_by_side_with_their_difference():
    symbols, words = ["S", "@S", "NP"], ["a", "$b$", "c"]
    exact = torch.zeros(3, 3, 3)
    exact[0, 2, 0], exact[1, 2, 2], exact[0, 1, 1] = 1, 0.75, 1  # the last one is of binarisation
    compressed = exact.clone()
    compressed[1, 2, 2] = 0.5
    figure = draw_charts({"exact": exact, "compressed": compressed}, words, symbols)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.texts}
    assert list(panels) == ["exact", "compressed", "difference, 0.25 at the most"]
    assert [[text.get_text() for text in axes.texts] for axes in panels.values()] == [["S", "NP"], ["S", "NP"], ["NP"]]
    worth = panels["difference, 0.25 at the most"].collections[0].get_array()
    assert sorted(worth) == [-0.25, 0, 0, 0, 0, 0]
    figure.canvas.draw()
    assert len([axes for axes in draw_charts({"exact": exact}, words, symbols).figure.axes if axes.texts]) == 1
    with pytest.raises(InputError, match=r"the posteriors have the shape \(3, 3, 3\): expected \(2, 2, 3\)"):
        draw_charts({"exact": exact}, words[:2], symbols)
