"""How well words that a model has not seen are tagged."""

from collections.abc import Sequence

from nltk.tree import Tree

from lvpcfg.evaluation.evalb import COLLINS, Parameters, percent
from lvpcfg.trees.lexicon import Lexicon


def unknown_words(
    gold: Sequence[Tree], test: Sequence[Tree], lexicon: Lexicon, parameters: Parameters = COLLINS
) -> dict[str, float]:
    """How many words of the gold trees are not in a lexicon, and how many percent of them have the right tag.

    As in EVALB, punctuation does not count. `test` are trees over the same words.
    """
    known, words, right = {*lexicon.words}, 0, 0
    for one, other in zip(gold, test, strict=True):
        for (word, tag), (_, found) in zip(one.pos(), other.pos(), strict=True):
            if lexicon.form(word) not in known and tag not in parameters.delete:
                words, right = words + 1, right + (tag == found or (tag, found) in parameters.equal_labels)
    return {"unknown_words": words, "unknown_tagging_accuracy": percent(right, words)}
