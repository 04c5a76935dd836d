"""Trees as sentences: what grammar induction learns from, and is scored on."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nltk.tree import Tree

from lvpcfg.errors import InputError, listed, show
from lvpcfg.trees.brackets import SPACE
from lvpcfg.trees.walk import is_preterminal, rebuild

PUNCTUATION = frozenset({",", ":", ".", "``", "''", "-LRB-", "-RRB-"})  # tags of the Penn Treebank
WORDS = "a list of one or more words"
PHRASE, TAG = "X", "T"  # the labels of trees that say nothing but what belongs together


def without_punctuation(tree: Tree) -> Tree | None:
    """A normalised tree without the words whose tags are punctuation, nor what that leaves empty; None: all is."""

    def make(node: Tree, children: list[Any]) -> Tree | None:
        if is_preterminal(node):
            return None if node.label() in PUNCTUATION else node
        kept = [child for child in children if child is not None]
        return Tree(node.label(), kept) if kept else None

    found: Tree | None = rebuild(tree, make)
    return found


def sentences_of(given: Iterable[Iterable[str]]) -> list[list[str]]:
    """The words of each sentence, if they are such as trees can hold."""
    sentences = listed("what is to be parsed", given, "a list of sentences, each a list of words")
    return [words_of(f"sentence {number}", words) for number, words in enumerate(sentences, 1)]


def words_of(name: str, given: Iterable[str]) -> list[str]:
    words = listed(name, given, WORDS)
    if not words or not all(isinstance(word, str) for word in words):
        raise InputError(f"{name} is {show(given)}: expected {WORDS}.")
    if "" in words or SPACE.search("".join(words)):
        wrong = next(word for word in words if not word or SPACE.search(word))
        raise InputError(
            f"{name} has the word {show(wrong)}, which no tree can hold: expected words without white space."
        )
    return words


def of_similar_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """The numbers of all sentences, longest first, in batches of up to so many words, or of one sentence."""
    batch, words = list[int](), 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and words + lengths[number] > most:
            yield batch
            batch, words = [], 0
        batch.append(number)
        words += lengths[number]
    if batch:
        yield batch


def flat(sentence: Tree | Iterable[str]) -> Tree:
    """A tree as it is; the words of a sentence as a tree without phrases."""
    if isinstance(sentence, Tree):
        return sentence
    return Tree("", [Tree(TAG, [word]) for word in words_of("a sentence", sentence)])
