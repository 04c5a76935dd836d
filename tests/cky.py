"""Viterbi parsing of a model with m = 1 and collapsed unaries: an independent, slow oracle for tests."""

import numpy as np
import torch
from nltk.tree import Tree

from lvpcfg.grammar.model import Model
from lvpcfg.trees.binarise import debinarise


def viterbi(model: Model, sentence: list[str]) -> Tree | None:
    """The best tree by textbook CKY, or None where the grammar has none."""
    grammar, n = model.grammar, len(sentence)
    names, inner = grammar.symbols.names, len(grammar.symbols.interminals)
    with np.errstate(divide="ignore"):
        log_rule = np.log(grammar.binary.numpy())
        log_root = np.log(grammar.root.numpy())
        log_word = np.log(grammar.lexical.lookup(torch.tensor(model.lexicon.encode(sentence))).numpy())
    a, b, c = grammar.binary_rules.numpy().T
    best = np.full((n + 1, n + 1, len(names)), -np.inf)
    back: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for i in range(n):
        best[i, i + 1, inner:] = log_word[i]
    for width in range(2, n + 1):
        for i in range(n - width + 1):
            j = i + width
            splits = np.arange(i + 1, j)
            scores = best[i, splits][:, b] + best[splits, j][:, c] + log_rule  # [splits, rules]
            split = scores.argmax(0)
            score = scores[split, np.arange(len(a))]
            for rule in np.argsort(score):  # the best rule of each parent is written last
                if score[rule] > -np.inf:
                    best[i, j, a[rule]] = score[rule]
                    back[i, j, a[rule]] = (int(splits[split[rule]]), int(b[rule]), int(c[rule]))
    root = int((best[0, n] + log_root).argmax())
    if best[0, n, root] + log_root[root] == -np.inf:
        return None

    def build(i: int, j: int, symbol: int) -> Tree:
        if j == i + 1:
            return Tree(names[symbol], [sentence[i]])
        k, left, right = back[i, j, symbol]
        return Tree(names[symbol], [build(i, k, left), build(k, j, right)])

    tree = build(0, n, root)
    return debinarise(tree if tree.label() == "TOP" else Tree("TOP", [tree]))
