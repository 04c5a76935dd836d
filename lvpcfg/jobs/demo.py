"""job=demo: the story so far on the embedded corpus."""

from collections import Counter

from nltk.tree import Tree

from lvpcfg.estimate.baseline import right_branching
from lvpcfg.evaluate.evalb import evaluate
from lvpcfg.jobs import train
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.evaluate import show_scores
from lvpcfg.jobs.run import Run
from lvpcfg.trees.corpus import SIZES, corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import preorder, tagged_words, words


def run(config: Config, run: Run) -> None:
    splits = {split: normalise_all(corpus(split)) for split in SIZES}
    _show_statistics(splits, run)
    _show_what_labels_hide(splits["train"], run)
    treebank = train.estimate(corpus("train"), config, run)

    parse = right_branching(treebank, config.signature)
    scores = evaluate(splits["dev"], [parse(words(tree)) for tree in splits["dev"]])
    run.result.update(scores.figures())
    show_scores(scores, run, "Baseline on dev: likeliest tags, right-branching brackets")


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
