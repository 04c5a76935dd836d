"""Grammars that are induced from sentences: perplexity and unlabelled sentence-F1 on dev, and CPU seconds an epoch.

    python benchmarks/induction.py --train train.mrg --dev dev.mrg
    python benchmarks/induction.py --train train.mrg --dev dev.mrg --rows rank --seeds 0 1 2 --sentences 3000

Sentences have 2 to 40 words without punctuation. The best model by likelihood is chosen on every other sentence of dev,
and scored on the others; so are right-branching and left-branching trees, and random ones, every split as likely as
any other.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence

import torch
from nltk.tree import Tree

import lvpcfg
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.induction import Dev
from lvpcfg.estimate.sentences import DEV_LIKELIHOOD, SENTENCE
from lvpcfg.nn import VALUES, GrammarLayer
from lvpcfg.registry import ESTIMATORS
from lvpcfg.trees.sentences import PHRASE, TAG
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import words

LARGE = {"interminals": 250, "preterminals": 500, "rank": 500}
ROWS = {  # by name: the estimator and its options
    "em": ("em", {}),
    "logits": ("gradient", {"parametrisation": "logits", "learning_rate": 0.05}),
    "neural": ("gradient", {"parametrisation": "neural"}),
    "rank": ("gradient", {"parametrisation": "neural", **LARGE}),
}
EVERY = 4  # iterations of EM between two looks at dev


def branching(sentence: Sequence[str], choose: Callable[[int], int]) -> Tree:
    """A binary tree; `choose` says how many of so many words are on the left."""
    if len(sentence) == 1:
        return Tree(TAG, [sentence[0]])
    split = choose(len(sentence))
    return Tree(PHRASE, [branching(sentence[:split], choose), branching(sentence[split:], choose)])


def sentence_f1(gold: list[Tree], found: list[Tree]) -> float:
    return lvpcfg.evaluate(gold, found).figures()["unlabelled_sentence_f1"]


def trained(row: str, train: list[Tree], chosen_on: list[Tree], gold: list[Tree], seed: int, times: int) -> list[str]:
    """The best model on one half of dev, scored on the other: perplexity, F1, and seconds of one core an epoch."""
    name, given = ROWS[row]
    entry = ESTIMATORS[name]
    number = "iterations" if name == "em" else "epochs"
    options = entry.options(objective=SENTENCE, **given, **{number: times})
    estimator = entry.run(options, Task(build_treebank(train), seed=seed, dev=chosen_on))
    others = Task(build_treebank(gold), dev=gold)
    best, line, begin, seconds = -torch.inf, ["", ""], time.process_time(), 0.0
    for step in estimator.run():
        if step.evaluate == "never" or (name == "em" and estimator.done % EVERY):
            continue
        seconds += time.process_time() - begin
        model, likelihood = estimator.model(), estimator.figures()[DEV_LIKELIHOOD]
        log_likelihood = GrammarLayer(model, VALUES).log_likelihood
        perplexity = Dev(others, model.lexicon, 3000).figures(log_likelihood)["dev_perplexity"]
        parsed = lvpcfg.Parser(model, device="cpu").parse_sents([words(tree) for tree in gold])
        now = [f"{perplexity:.0f}", f"{sentence_f1(gold, parsed):.1f}"]
        print(f"  {row}, seed {seed}, {step}, {seconds:.0f} s, {perplexity:.1f}, {now[1]}", flush=True)
        if likelihood > best:
            best, line = likelihood, now
        begin = time.process_time()
    return [*line, f"{seconds / times:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="file of trees")
    parser.add_argument("--dev", required=True, help="file of trees")
    parser.add_argument("--rows", nargs="*", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=40, help="of EM")
    parser.add_argument("--sentences", type=int, help="of the treebank, drawn at random; all, if it is not given")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    prepared = ESTIMATORS["em"].options(objective=SENTENCE).prepared
    train, dev = (prepared(lvpcfg.read_trees(path)) for path in (settings.train, settings.dev))
    if settings.sentences and settings.sentences < len(train):
        train = random.Random(0).sample(train, settings.sentences)
    chosen_on, gold = dev[1::2], dev[::2]
    sentences = [words(tree) for tree in gold]
    print(f"{len(train)} training sentences, {len(chosen_on)} to choose by, {len(gold)} to score on", flush=True)
    lines = ["| | perplexity | sentence-F1 | CPU seconds an epoch |", "|---|---|---|---|"]
    right = sentence_f1(gold, [branching(sentence, lambda _: 1) for sentence in sentences])
    left = sentence_f1(gold, [branching(sentence, lambda size: size - 1) for sentence in sentences])
    generator = random.Random(0)
    drawn = [
        sentence_f1(gold, [branching(sentence, lambda size: generator.randint(1, size - 1)) for sentence in sentences])
        for _ in range(5)
    ]
    lines += [f"| right-branching | | {right:.1f} | |", f"| left-branching | | {left:.1f} | |"]
    lines += [f"| random trees | | {sum(drawn) / 5:.1f} | |"]
    for row in settings.rows:
        for seed in settings.seeds:
            times = settings.iterations if row == "em" else settings.epochs
            figures = trained(row, train, chosen_on, gold, seed, times)
            lines.append(f"| {row}, seed {seed} | {' | '.join(figures)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
