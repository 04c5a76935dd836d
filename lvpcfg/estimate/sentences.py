"""`objective=sentence`, log p(words) without trees: the options of estimators that induce grammars."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError
from lvpcfg.estimate.estimator import Options, check_number

if TYPE_CHECKING:
    from nltk.tree import Tree

SENTENCE = "sentence"
DEV_LIKELIHOOD = "dev_log_likelihood_per_word"


@dataclass
class SentenceOptions(Options):
    objective: str = ""
    interminals: int = 30  # of the grammar that is induced
    preterminals: int = 60
    vocabulary: int = 10_000  # the most frequent words; all others are unknown
    occurrences: int = 5  # words that occur less often are unknown
    lowercase: bool = True  # words are known in lower case, and all numbers are one word
    longest: int = 40  # words; longer sentences are left out, and single words
    punctuation: bool = False  # whether words with tags of punctuation stay

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("interminals", "preterminals", "vocabulary", "occurrences"):
            check_number(self, name, least=1)
        check_number(self, "longest", least=2)

    @property
    def chosen_by(self) -> str:
        return DEV_LIKELIHOOD if self.objective == SENTENCE else super().chosen_by

    @property
    def needs_trees(self) -> bool:
        return self.objective != SENTENCE

    def prepared(self, trees: "Iterable[Any]") -> "list[Tree]":
        """Trees, or the words of sentences: normalised, without punctuation, long sentences, and single words."""
        if self.objective != SENTENCE:
            return super().prepared(trees)
        from lvpcfg.trees.normalise import normalise_all
        from lvpcfg.trees.sentences import flat, without_punctuation
        from lvpcfg.trees.walk import trees_of

        normal = normalise_all(map(flat, trees_of("what is to be learned from", trees)))
        kept = normal if self.punctuation else [t for tree in normal if (t := without_punctuation(tree)) is not None]
        kept = [tree for tree in kept if 2 <= len(tree.leaves()) <= self.longest]
        if normal and not kept:
            raise InputError(
                f"none of the {len(normal)} sentences has 2 to {self.longest} words: see estimator.longest."
            )
        return kept
