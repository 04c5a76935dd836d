"""Unlabelled sentence-F1, by which induced grammars are compared (Kim et al. 2019).

Punctuation is removed by the gold tags, labels are forgotten, and brackets over one word or over the whole sentence are
left out. Brackets are sets, so that a chain of unary rules counts once. The F1 of a sentence is 100 where it has no
brackets in gold nor test, 0 where the two have none in common; the score is the mean over sentences of two words or
more.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lvpcfg.trees.normalise import TRACE_TAG
from lvpcfg.trees.sentences import PUNCTUATION

if TYPE_CHECKING:  # which knows of this module
    from lvpcfg.evaluation.evalb import Sentence


def unlabelled_sentence_f1(pairs: Iterable["tuple[Sentence, Sentence]"]) -> float:
    """The mean over pairs of gold and test; a test sentence with another number of words has no brackets."""
    found = [f1 for gold, test in pairs if (f1 := _f1(gold, test)) is not None]
    return sum(found) / len(found) if found else 0.0


def _f1(gold: "Sentence", test: "Sentence") -> float | None:
    gold, test = (side.without([tag == TRACE_TAG for tag in side.tags]) for side in (gold, test))
    removed = [tag in PUNCTUATION for tag in gold.tags]
    if removed.count(False) < 2:
        return None
    mine = spans(gold.without(removed))
    others = spans(test.without(removed)) if len(test.words) == len(removed) else set()
    if not mine and not others:
        return 100.0
    return 200.0 * len(mine & others) / (len(mine) + len(others))


def spans(sentence: "Sentence") -> set[tuple[int, int]]:
    """Those of its brackets over more than one word and less than all."""
    return {(start, end) for _, start, end in sentence.brackets if 1 < end - start < len(sentence.words)}
