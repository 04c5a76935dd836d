"""A parser without a chart: each word's likeliest tag, brackets that all branch to the right.

The bracket that begins at a word gets the symbol most often seen in training over that word's tag
as its left child. It is the floor under every parser.
"""

from collections.abc import Callable, Sequence

import torch
from nltk.tree import Tree

from lvpcfg.estimate.count import tag_table
from lvpcfg.trees.binarise import debinarise
from lvpcfg.trees.lexicon import build_lexicon
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.treebank import Treebank


def right_branching(treebank: Treebank, signature: str = "english") -> Callable[[Sequence[str]], Tree]:
    """Learns tags and labels from a treebank; returns a function from words to a tree."""
    lexicon, unseen = build_lexicon(treebank, signature)
    tags, _ = tag_table(treebank, lexicon, unseen)
    names, inner = treebank.symbols.names, len(treebank.symbols.interminals)

    parent, left = treebank.symbol[treebank.is_binary], treebank.symbol[treebank.left[treebank.is_binary]]
    over = torch.bincount(parent * len(names) + left, minlength=inner * len(names)).view(inner, len(names))
    label = over.argmax(0).tolist()  # [symbols]: the commonest parent of each as a left child
    roots = treebank.symbol[treebank.roots[:-1]]
    root_name = names[int(roots[roots < inner].mode().values)] if bool((roots < inner).any()) else TOP

    def parse(sentence: Sequence[str]) -> Tree:
        entries = torch.tensor(lexicon.encode(sentence))
        tagged = (tags.lookup(entries).argmax(1) + inner).tolist()
        leaves = [Tree(names[tag], [word]) for tag, word in zip(tagged, sentence, strict=True)]
        tree = leaves[-1]
        for position in range(len(leaves) - 2, -1, -1):
            name = names[label[tagged[position]]] if position > 0 else root_name
            tree = Tree(name, [leaves[position], tree])
        return debinarise(Tree(TOP, [tree]))

    return parse
