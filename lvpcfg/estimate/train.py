"""From trees to a model in one call."""

from collections.abc import Iterable
from typing import Any

from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg.errors import InputError, expect, show
from lvpcfg.estimate.training import ESTIMATORS, Trainer
from lvpcfg.grammar.model import Model
from lvpcfg.trees.binarise import RIGHT, Binarisation
from lvpcfg.trees.treebank import build_treebank


def train(
    trees: Iterable[Tree],
    estimator: str = "count",
    binarisation: Binarisation = RIGHT,
    signature: str = "english",
    seed: int = 0,
    device: str = "cpu",
    progress: bool = False,
    **options: Any,
) -> Model:
    """Normalises and binarises `trees` and estimates a grammar from them.

    `options` are those of the estimator: `states=16` for "em", `cycles=4` for "split_merge" and so on.
    """
    expect("estimator", estimator, tuple(ESTIMATORS))
    kind = ESTIMATORS[estimator]
    known = set(kind.__dataclass_fields__) - {"name"}
    for name in options:
        if name not in known:
            raise InputError(
                f"the estimator {estimator} has no option {show(name)}: it has {', '.join(sorted(known))}."
            )
    trainer = Trainer(build_treebank(trees, binarisation, progress), kind(**options), signature, seed, device)
    for _ in tqdm(
        trainer.run(), total=len(trainer.steps), desc="training", unit="iteration", disable=None if progress else True
    ):
        pass
    return trainer.model()
