"""job=train: a treebank -> a model folder."""

import time

from nltk.tree import Tree

from lvpcfg.errors import InputError
from lvpcfg.estimate.train import ESTIMATORS
from lvpcfg.grammar.model import Model
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.run import Run
from lvpcfg.trees.brackets import read_trees
from lvpcfg.trees.corpus import corpus
from lvpcfg.trees.treebank import build_treebank


def run(config: Config, run: Run) -> None:
    estimate(_training_trees(config, run), config, run)


def estimate(trees: list[Tree], config: Config, run: Run) -> Model:
    """Estimates a grammar, reports its size and saves it in the run folder."""
    begin = time.perf_counter()
    treebank = build_treebank(trees, config.scheme(), progress=True)
    model = ESTIMATORS[config.estimator.name](treebank, config.signature)
    run.result["train_seconds"] = time.perf_counter() - begin
    model.save(run.folder / "model")
    report(model, run)
    run.say(f"The model is in {run.folder / 'model'}.")
    return model


def report(model: Model, run: Run) -> None:
    """The size of a grammar, as a table and as figures."""
    grammar = model.grammar
    sizes = {
        "trees": int(model.provenance["trees"]),
        "words": int(model.provenance["words"]),
        "vocabulary": len(model.lexicon.words),
        "unknown_word_classes": len(model.lexicon.classes),
        "interminals": len(grammar.symbols.interminals),
        "preterminals": len(grammar.symbols.preterminals),
        "states": int(grammar.states.sum()),
        "binary_rules": len(grammar.binary_rules),
        "unary_rules": len(grammar.unary_rules),
    }
    run.result.update(sizes)
    rows = [[name.replace("_", " "), f"{size:,}"] for name, size in sizes.items()]
    run.table(f"Grammar ({model.provenance['estimator']})", ["", "number"], rows)


def _training_trees(config: Config, run: Run) -> list[Tree]:
    if config.data.train is None:
        run.say("data.train is not given: training on the embedded corpus.")
        return corpus("train")
    if config.data.on_error == "raise":
        return read_trees(config.data.train)
    errors: list[InputError] = []
    trees = read_trees(config.data.train, on_error=errors.append)
    run.result["malformed"] = len(errors)
    for error in errors[:5]:
        run.say(f"skipped: {error}")
    if len(errors) > 5:
        run.say(f"... and {len(errors) - 5} more")
    return trees
