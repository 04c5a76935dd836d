"""Viterbi parsing of a model with m = 1 and collapsed unaries: an independent, slow oracle for tests.

Run as a script, it parses the dev split of the embedded corpus with a treebank PCFG of its labels and
with one of the labels it had before their features were erased.
"""

import numpy as np
import torch
from nltk.tree import Tree

from lvpcfg import Binarisation, Model, corpus, debinarise, evaluate, train
from lvpcfg.evaluation.evalb import Scores
from lvpcfg.trees.normalise import normalise, normalise_all
from lvpcfg.trees.walk import rebuild, words


def viterbi(model: Model, sentence: list[str]) -> Tree | None:
    """The best tree by textbook CKY, or None where the grammar has none."""
    grammar, n = model.grammar, len(sentence)
    names, inner = grammar.symbols.names, len(grammar.symbols.interminals)
    with np.errstate(divide="ignore"):
        log_rule = np.log(grammar.binary.values.numpy())
        log_root = np.log(grammar.root.numpy())
        log_word = np.log(grammar.lexical.lookup(torch.tensor(model.lexicon.encode(sentence))).numpy())
    a, b, c = grammar.binary_rules.numpy().T
    parents, first = np.unique(a, return_index=True)  # rules are sorted by parent
    best = np.full((n + 1, n + 1, len(names)), -np.inf)

    def scores(i: int, j: int) -> np.ndarray:  # [splits, rules]
        return best[i, i + 1 : j][:, b] + best[i + 1 : j, j][:, c] + log_rule

    for i in range(n):
        best[i, i + 1, inner:] = log_word[i]
    for width in range(2, n + 1):
        for i in range(n - width + 1):
            best[i, i + width, parents] = np.maximum.reduceat(scores(i, i + width).max(0), first)
    root = int((best[0, n] + log_root).argmax())
    if best[0, n, root] + log_root[root] == -np.inf:
        return None

    def build(i: int, j: int, symbol: int) -> Tree:
        if j == i + 1:
            return Tree(names[symbol], [sentence[i]])
        split, rule = np.unravel_index(np.where(a == symbol, scores(i, j), -np.inf).argmax(), (j - i - 1, len(a)))
        k = i + 1 + int(split)
        return Tree(names[symbol], [build(i, k, b[rule]), build(k, j, c[rule])])

    tree = build(0, n, root)
    return debinarise(tree if tree.label() == "TOP" else Tree("TOP", [tree]))


def erased(tree: Tree) -> Tree:
    """The tree without the features in its labels."""
    return rebuild(tree, lambda node, children: Tree(node.label().partition("~")[0], children))


def dev_scores(features: bool, horizontal: int = 0, sentences: int = 250) -> Scores:
    """How well a treebank PCFG of the embedded corpus, its features erased or not, parses the dev split."""
    gold = normalise_all(corpus("dev"))[:sentences]
    model = train(corpus("train", features), binarisation=Binarisation(horizontal=horizontal, unaries="collapse"))
    parses = [viterbi(model, words(tree)) for tree in gold]
    return evaluate(gold, [normalise(erased(tree)) if tree else Tree("", []) for tree in parses])


if __name__ == "__main__":
    for features in (False, True):
        for horizontal in (0, 1):
            scores = dev_scores(features, horizontal)
            print(
                f"features {'known ' if features else 'erased'}  h = {horizontal}  F1 {scores.f1_all:.2f}"
                f"  complete match {scores.all.complete_match:.1f}"
            )
