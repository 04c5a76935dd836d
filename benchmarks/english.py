"""Makes the English model that comes with lvpcfg, and scores it.

    python benchmarks/english.py --train craft/train.mrg gum-ccby/train.mrg --dev craft/dev.mrg gum-ccby/dev.mrg \
        --output lvpcfg/models/english

One grammar of split-merge for each seed, trimmed; together they are the product that `model=english` stands for.
docs/english.md says which trees these are.
"""

import argparse
from pathlib import Path

import torch

import lvpcfg

CYCLES = 5


def make(train: list[str], output: Path, grammars: int) -> None:
    trees = [tree for path in train for tree in lvpcfg.read_trees(path)]
    for seed in range(grammars):
        model = lvpcfg.train(trees, "split_merge", cycles=CYCLES, seed=seed, progress=True)
        lvpcfg.compress(model, "trim").save(output / str(seed), compressed=True)


def score(output: Path, path: str) -> None:
    """EVALB's figures of one file of gold trees, for the product and for each grammar alone."""
    gold = [lvpcfg.normalise(tree) for tree in lvpcfg.read_trees(path)]
    alone = sorted(folder for folder in output.iterdir() if folder.is_dir())
    for model in (output, *alone):
        found = lvpcfg.Parser.load(model).parse_sents([tree.leaves() for tree in gold], progress=True)
        figures = lvpcfg.evaluate(gold, found).figures()
        print(f"{path}, {model}: F1 {figures['f1']:.2f}, with no sentence dropped {figures['f1_all']:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="*", default=[], help="treebanks; none: the model is there and only scored")
    parser.add_argument("--dev", nargs="*", default=[], help="treebanks to score it on, each by itself")
    parser.add_argument("--grammars", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same numbers everywhere
    if options.train:
        make(options.train, options.output, options.grammars)
    for path in options.dev:
        score(options.output, path)


if __name__ == "__main__":
    main()
