"""`lvpcfg.train`: from trees, or tagged sentences, to a model in one call."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, overload

from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg.device import usable_device
from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Estimator, TaggingTask, Task
from lvpcfg.grammar.model import Model
from lvpcfg.registry import ESTIMATORS
from lvpcfg.sequence.tagging import TaggingModel
from lvpcfg.trees import signatures
from lvpcfg.trees.binarisation import RIGHT, Binarisation
from lvpcfg.trees.conllu import TaggedSentence
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.tagged import are_tagged, build_tagged
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import trees_of


@overload
def train(trees: Iterable[TaggedSentence], *arguments: Any, **options: Any) -> TaggingModel: ...


@overload
def train(trees: Iterable[Tree | Sequence[str]], *arguments: Any, **options: Any) -> Model: ...


def train(
    trees: Iterable[Any],
    estimator: str = "count",
    binarisation: Binarisation = RIGHT,
    signature: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: bool = False,
    dev: Iterable[Tree | Sequence[str]] | None = None,
    **options: Any,
) -> Model | TaggingModel:
    """Normalises and binarises `trees` and estimates a grammar from them.

    - `trees`: `nltk` trees. Tagged sentences, lists of (word, tag) pairs, give a model for a `Tagger`. With
      `objective="sentence"` they may be sentences, lists of words.
    - `estimator`: "count", "em", "split_merge", "kruskal_em", "spectral", "cluster", "gradient", "gaussian", or one
      of your own.
    - `binarisation`: how trees become binary.
    - `signature`: the name of the classes of unknown words (None: "english" for trees, "affixes" for tags).
    - `seed`: of all that is random.
    - `device`: where training runs.
    - `progress`: whether to show a bar.
    - `dev`: more trees, for estimators that choose by them.
    - `options`: those of the estimator, such as `states=16` for "em" or `cycles=4` for "split_merge".
    """
    entry = ESTIMATORS[estimator]
    if not isinstance(binarisation, Binarisation):
        raise InputError(f"binarisation is {show(binarisation)}: expected lvpcfg.Binarisation(...).")
    if not isinstance(seed, int):
        raise InputError(f"seed is {show(seed)}: expected a whole number.")
    known = {field.name for field in fields(entry.options)} - {"name"}
    for name in options:
        if name not in known:
            has = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise InputError(f"the estimator {estimator} has no option {show(name)}: {has}.")
    settings = entry.options(**options)

    name = str(usable_device(device))
    trees = trees_of("what is to be learned from", trees)
    task: Task | TaggingTask
    if are_tagged(trees):
        settings.check_tags()
        if dev is not None:
            raise InputError("dev is for estimators that look at trees: expected none for tagged sentences.")
        task = TaggingTask(build_tagged(trees), signature or signatures.OF_TAGS, seed, name)
    else:
        treebank = build_treebank(settings.prepared(trees), binarisation, progress)
        gold = None if dev is None else normalise_all(settings.prepared(dev))
        f1 = None if gold is None else partial(_f1, gold, name)
        task = Task(treebank, signature or signatures.OF_TREES, seed, name, gold, f1)
    training: Estimator = entry.run(settings, task)
    for _ in tqdm(
        training.run(), total=len(training.steps), desc="training", unit="iteration", disable=None if progress else True
    ):
        pass
    return training.model()


def _f1(gold: list[Tree], device: str, model: Model) -> float:
    from lvpcfg.evaluation.evalb import evaluate
    from lvpcfg.parser import Parser

    found = Parser(model, device=device).parse_sents([tree.leaves() for tree in gold])
    return evaluate(gold, found).figures()["f1"]
