"""The story of job=demo: train, parse, score, look."""

import time
from collections import Counter
from typing import Any

from nltk.tree import Tree
from nltk.tree.prettyprinter import TreePrettyPrinter

from lvpcfg.distributions import ModelTrees
from lvpcfg.estimate.split_merge import SplitMergeOptions
from lvpcfg.evaluation.evalb import evaluate
from lvpcfg.evaluation.pictures import draw_chart, draw_trees
from lvpcfg.evaluation.tradeoff import ALS, EXACT
from lvpcfg.grammar.model import Model
from lvpcfg.jobs import parsing, training
from lvpcfg.jobs.candidates import Candidate, Setting, show_rows
from lvpcfg.jobs.demo import DemoOptions
from lvpcfg.jobs.evaluate import show_scores
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.train import DataOptions, TrainOptions
from lvpcfg.parser import Parser
from lvpcfg.trees.corpus import SIZES, corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import preorder, tagged_words, words

TRAINING: dict[str, Any] = {  # as job=train would be told
    "data": DataOptions(train=None, dev=None, tags="upos", on_error="raise"),
    "estimator": SplitMergeOptions(cycles=3, split_iterations=20, merge_iterations=10, smooth_iterations=5),
    **{"restarts": 1, "evaluate_every": 10, "checkpoint_every": 5, "patience": 0, "resume": False},
}
RANK, THRESHOLDS, SENTENCES = 4, (1e-4, 1e-2), 100  # of the rules that are compressed, and parsed with them


def run(options: DemoOptions, run: Run) -> None:
    splits = {split: normalise_all(corpus(split)) for split in SIZES}
    _show_statistics(splits, run)
    _show_what_labels_hide(splits["train"], run)
    settings = TrainOptions(**vars(options), **TRAINING)
    model = training.estimate(corpus("train"), corpus("dev"), settings, run)

    parser, gold = Parser(model, **options.parser()), splits["dev"]
    begin = time.perf_counter()
    trees = parser.parse_sents([words(tree) for tree in gold], progress=True)
    parsing.report(parser, len(gold) / (time.perf_counter() - begin), run)
    show_scores(evaluate(gold, trees), run, f"Scores on dev, decoder {parser.decoder}")
    _show_tradeoff(options, gold, run)
    _show_trees(gold, trees, model, run)


def _show_tradeoff(options: DemoOptions, gold: list[Tree], run: Run) -> None:
    """What rules in Kruskal form gain in size and time, and lose in F1."""
    candidate = Candidate(str(run.folder / "model"), options, options.seed)
    settings = [Setting(candidate.label, EXACT), *(Setting(candidate.label, ALS, RANK, t) for t in THRESHOLDS)]
    rows = [candidate.measure(setting, gold[:SENTENCES]) for setting in settings]
    show_rows(rows, run, f"Rules of rank {RANK} where their error is at most t, {SENTENCES} sentences, ms a sentence")
    smallest = rows[-1]
    run.result |= {
        "approximated": smallest.approximated,
        "compression": rows[0].numbers / smallest.numbers,
        "compressed_f1": smallest.f1,
        "compressed_ratio": smallest.ratio_inside_outside,
    }


def _show_trees(gold: list[Tree], trees: list[Tree], model: Model, run: Run) -> None:
    """A short sentence parsed right and one parsed wrong: in the terminal, and as pictures with the chart."""
    pairs = sorted(zip(gold, trees, strict=True), key=lambda pair: len(words(pair[0])))
    long_enough = [pair for pair in pairs if len(words(pair[0])) >= 6]
    right = next((pair for pair in long_enough if pair[0] == pair[1]), None)
    wrong = next((pair for pair in long_enough if pair[0] != pair[1]), None)
    if right:
        run.say("A sentence parsed right:\n" + _drawn(right[1]))
    if wrong:
        run.say("A sentence parsed wrong, as it should be:\n" + _drawn(wrong[0]) + "\nand as it was parsed:")
        run.say(_drawn(wrong[1]))
    shown = next((pair for pair in long_enough if pair[0] != pair[1] and len(words(pair[0])) >= 10), wrong or right)
    if shown:
        sentence = words(shown[0])
        run.picture("tree", draw_trees({"gold": shown[0], "parse": shown[1]}, gold="gold"))
        spans = ModelTrees(model, [sentence]).marginals.by_symbol(model.grammar)[0]
        run.picture("chart", draw_chart(spans, sentence, model.grammar.symbols.names))


def _drawn(tree: Tree) -> str:
    return TreePrettyPrinter(tree).text(unicodelines=True)


def _show_statistics(splits: dict[str, list[Tree]], run: Run) -> None:
    known = {word for tree in splits["train"] for word in words(tree)}
    rows = []
    for split, trees in splits.items():
        lengths = [len(words(tree)) for tree in trees]
        unknown = 100 * sum(word not in known for tree in trees for word in words(tree)) / sum(lengths)
        span = f"{min(lengths)} to {max(lengths)}"
        rows.append([split, f"{len(trees):,}", f"{sum(lengths):,}", span, f"{unknown:.1f} %"])
    run.table("The embedded corpus", ["", "trees", "words", "sentence length", "unknown words"], rows)


def _show_what_labels_hide(trees: list[Tree], run: Run) -> None:
    """Where "with" phrases stand, noun by noun: known to the words, not to the labels."""
    attached: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], Tree] = {}  # the shortest of each
    for tree in sorted(trees, key=lambda tree: len(words(tree))):
        for parent in preorder(tree):
            for phrase in parent:
                if isinstance(phrase, Tree) and phrase.label() == "PP" and words(phrase)[0] == "with":
                    noun, tag = tagged_words(phrase)[-1]
                    if len(words(phrase)) == 3 and tag == "NN":
                        attached[noun, parent.label()] += 1
                        example.setdefault((noun, parent.label()), tree)
    nouns = Counter(noun for noun, _ in attached.elements()).most_common(8)
    rows = [[f"with a {noun}", str(attached[noun, "VP"]), str(attached[noun, "NP"])] for noun, _ in nouns]
    run.table("What the labels hide", ["", "beside the verb", "beside the noun"], rows)
    for label in ("VP", "NP"):
        commonest = next(key for key, _ in attached.most_common() if key[1] == label)
        run.say(example[commonest].pformat(margin=90))
