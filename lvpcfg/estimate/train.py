"""From trees to a model in one call."""

from collections.abc import Callable, Iterable

from nltk.tree import Tree

from lvpcfg.errors import expect
from lvpcfg.estimate.count import count
from lvpcfg.grammar.model import Model
from lvpcfg.trees.binarise import RIGHT, Binarisation
from lvpcfg.trees.treebank import Treebank, build_treebank

ESTIMATORS: dict[str, Callable[[Treebank, str], Model]] = {"count": count}


def train(
    trees: Iterable[Tree],
    estimator: str = "count",
    binarisation: Binarisation = RIGHT,
    signature: str = "english",
) -> Model:
    """Normalises and binarises `trees` and estimates a grammar from them."""
    expect("estimator", estimator, tuple(ESTIMATORS))
    return ESTIMATORS[estimator](build_treebank(trees, binarisation), signature)
