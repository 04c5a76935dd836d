"""The story of job=demo: learn latent states, look at them, parse with them, make a grammar of many states fast."""

import time
from collections import Counter
from typing import Any

from nltk.tree import Tree
from nltk.tree.prettyprinter import TreePrettyPrinter

from lvpcfg.device import usable_device
from lvpcfg.distributions import ModelTrees
from lvpcfg.estimate.split_merge import SplitMergeOptions
from lvpcfg.estimate.train import train
from lvpcfg.evaluation.evalb import evaluate
from lvpcfg.evaluation.inspect import look_inside
from lvpcfg.evaluation.pictures import draw_charts
from lvpcfg.evaluation.tradeoff import ALS, EXACT, Row
from lvpcfg.evaluation.tree_pictures import draw_trees
from lvpcfg.files import write_text
from lvpcfg.grammar.model import Model
from lvpcfg.jobs import parsing, training
from lvpcfg.jobs.candidates import Candidate, Setting, show_rows
from lvpcfg.jobs.demo import DemoOptions
from lvpcfg.jobs.evaluate import show_scores
from lvpcfg.jobs.inspect import table_of
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.train import DataOptions, TrainOptions
from lvpcfg.parser import Parser
from lvpcfg.trees.corpus import SIZES, corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.svg import tree_svg
from lvpcfg.trees.walk import preorder, tagged_words, words

TRAINING: dict[str, Any] = {  # as job=train would be told
    "data": DataOptions(train=None, dev=None, tags="upos", on_error="raise"),
    "estimator": SplitMergeOptions(cycles=3, split_iterations=20, merge_iterations=10, smooth_iterations=5),
    **{"restarts": 1, "evaluate_every": 10, "checkpoint_every": 5, "patience": 0, "resume": False},
}
MANY: dict[str, int] = {"states": 32, "iterations": 30}  # of the grammar that is compressed, by EM
RANK, THRESHOLDS = 8, (1e-3, 1e-2)  # of its rules
SHOWN = "NN"  # a tag whose states are shown
LENGTHS = range(8, 13)  # words of the sentences that are drawn


def run(options: DemoOptions, run: Run) -> None:
    splits = {split: normalise_all(corpus(split)) for split in SIZES}
    gold = splits["dev"]
    _show_statistics(splits, run)
    _show_what_labels_hide(splits["train"], run)
    settings = TrainOptions(**vars(options), **TRAINING)
    model = training.estimate(corpus("train"), corpus("dev"), settings, run)
    _show_states(model, run)

    parser = Parser(model, **options.parser())
    begin = time.perf_counter()
    trees = parser.parse_sents([words(tree) for tree in gold], progress=True)
    parsing.report(parser, len(gold) / (time.perf_counter() - begin), run)
    show_scores(evaluate(gold, trees), run, f"Scores on dev, decoder {parser.decoder}")
    _show_compression(options, gold, run)
    _show_tree(options, gold, trees, run)


def _show_states(model: Model, run: Run) -> None:
    """What the states of one tag stand for."""
    symbols = look_inside(model)
    names = {state.number: state.name for symbol in symbols for state in symbol.states}
    run.say(f"What the states of {SHOWN} stand for; job=inspect model={run.folder / 'model'} shows all:")
    for symbol in symbols:
        if symbol.name == SHOWN:
            run.console.print(table_of(symbol, names))


def _show_compression(options: DemoOptions, gold: list[Tree], run: Run) -> None:
    """What rules in Kruskal form gain in size and time, and lose in F1, where states are many."""
    m, folder = MANY["states"], run.folder / "many_states"
    run.say(
        f"Split-merge keeps few states, so that its rules are small, and fast as they are. EM with {m} states of\n"
        f"every symbol makes rules of up to {m} x {m} x {m} numbers. There compression pays: each rule becomes a\n"
        f"sum of {RANK} products of vectors, where its error is at most t."
    )
    binarisation, device = options.binarisation.scheme(), str(usable_device(options.device))
    known = {"binarisation": binarisation, "signature": options.signature, "seed": options.seed, "device": device}
    train(corpus("train"), estimator="em", progress=True, **known, **MANY).save(folder)
    candidate = Candidate(str(folder), options, options.seed)
    settings = [Setting(candidate.label, EXACT), *(Setting(candidate.label, ALS, RANK, t) for t in THRESHOLDS)]
    rows = [candidate.measure(setting, gold) for setting in settings]
    show_rows(rows, run, f"{m} states of every symbol, exact and with rules of rank {RANK}, ms a sentence")
    exact, fastest = rows[0], min(rows[1:], key=lambda row: row.ratio)
    run.say(_how_much_faster(exact, fastest))
    run.result |= {
        "many_states_f1": exact.f1,
        "approximated": fastest.approximated,
        "compression": exact.numbers / fastest.numbers,
        "compressed_f1": fastest.f1,
        "compressed_ratio": fastest.ratio,
        "compressed_ratio_inside_outside": fastest.ratio_inside_outside,
    }
    _show_charts(candidate, fastest, gold, run)


def _how_much_faster(exact: Row, small: Row) -> str:
    return (
        f"With t = {small.threshold:g} the rules are {exact.numbers / small.numbers:.0f} times smaller. Inside-outside "
        f"is {1 / small.ratio_inside_outside:.1f} times as fast,\nparsing as a whole, but for decoding, "
        f"{1 / small.ratio:.1f} times; F1 is {small.f1:.2f}, and {exact.f1:.2f} with the exact rules.\n"
        "Both parsed the same sentences in turns."
    )


def _show_charts(candidate: Candidate, row: Row, gold: list[Tree], run: Run) -> None:
    """The charts of the sentence of whose tree the grammar is least sure, exact beside compressed."""
    sentences = [words(tree) for tree in gold if len(words(tree)) in LENGTHS]
    parses = candidate.exact.analyse(sentences)
    sentence = min(zip(sentences, parses, strict=True), key=lambda pair: pair[1].posterior)[0]
    small = candidate.approximate(Setting(row.label, row.method, row.rank, row.threshold)).model
    charts = {
        title: ModelTrees(model, [sentence]).marginals.by_symbol(model.grammar)[0]
        for title, model in (("exact", candidate.model), (f"r = {row.rank}, t = {row.threshold:g}", small))
    }
    run.picture("chart", draw_charts(charts, sentence, candidate.model.grammar.symbols.names))


def _show_tree(options: DemoOptions, gold: list[Tree], trees: list[Tree], run: Run) -> None:
    """A sentence that latent states get right and the treebank PCFG does not: in the terminal and as pictures."""
    pairs = [pair for pair in zip(gold, trees, strict=True) if len(words(pair[0])) in LENGTHS and pair[0] == pair[1]]
    pcfg = train(corpus("train"), binarisation=options.binarisation.scheme(), signature=options.signature)
    found = Parser(pcfg, **options.parser()).parse_sents([words(tree) for tree, _ in pairs])
    both = [(tree, other) for (tree, _), other in zip(pairs, found, strict=True) if tree != other]
    if not both:
        return
    tree, other = min(both, key=lambda pair: ("with" not in words(pair[0]), len(words(pair[0]))))
    run.say(
        "A sentence that the treebank PCFG parses wrong, and the grammar with latent states right:\n" + _drawn(tree)
    )
    run.picture("tree", draw_trees({"latent states, right": tree, "treebank PCFG": other}, gold="latent states, right"))
    path = run.folder / "tree.svg"
    write_text(path, tree_svg(tree))
    run.say(f"tree: {path}")


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
    for tree in trees:
        for parent in preorder(tree):
            for phrase in parent:
                if isinstance(phrase, Tree) and phrase.label() == "PP" and words(phrase)[0] == "with":
                    noun, tag = tagged_words(phrase)[-1]
                    if len(words(phrase)) == 3 and tag == "NN":
                        attached[noun, parent.label()] += 1
    counts = Counter(noun for noun, _ in attached.elements())
    nouns = sorted(counts, key=lambda noun: (-counts[noun], noun))[:8]
    rows = [[f"with a {noun}", str(attached[noun, "VP"]), str(attached[noun, "NP"])] for noun in nouns]
    run.table("What the labels hide: all of these are PP", ["", "beside the verb", "beside the noun"], rows)
