"""Tagged sentences as arrays: what estimators of taggers run over."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int64
from nltk.tree import Tree
from torch import Tensor

from lvpcfg.errors import InputError, listed, show
from lvpcfg.trees.conllu import TaggedSentence

EXPECTED = "a list of tagged sentences, each a list of (word, tag) pairs, such as read_conllu makes of a file"


@dataclass(frozen=True, eq=False)
class TaggedCorpus:
    """The tokens of all sentences, one sentence after the other."""

    tags: tuple[str, ...]  # in alphabetical order
    words: tuple[str, ...]  # the vocabulary, in the order of first occurrence
    tag: Int64[Tensor, "tokens"]
    word: Int64[Tensor, "tokens"]
    lengths: Int64[Tensor, "sentences"]

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def first(self) -> Int64[Tensor, "sentences"]:
        """Where each sentence begins."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def place(self) -> Int64[Tensor, "tokens"]:
        """Of each token in its sentence."""
        return torch.arange(len(self.tag)) - self.first.repeat_interleave(self.lengths)


def build_tagged(sentences: Iterable[TaggedSentence]) -> TaggedCorpus:
    """Sentences without words are left out."""
    numbers: dict[str, int] = {}
    vocabulary: dict[str, int] = {}
    tag, word, lengths = list[int](), list[int](), list[int]()
    for sentence in tagged_sentences(sentences):
        if sentence:
            lengths.append(len(sentence))
            word += [vocabulary.setdefault(form, len(vocabulary)) for form, _ in sentence]
            tag += [numbers.setdefault(name, len(numbers)) for _, name in sentence]
    if not lengths:
        raise InputError("there is no sentence with words to learn from: a tagger needs at least one.")
    tags = tuple(sorted(numbers))
    place = torch.tensor([tags.index(name) for name in numbers])
    return TaggedCorpus(tags, tuple(vocabulary), place[tag], torch.tensor(word), torch.tensor(lengths))


def tagged_sentences(given: Iterable[Any]) -> list[TaggedSentence]:
    """What a caller gave as tagged sentences."""
    sentences = listed("what is to be learned from", given, EXPECTED)
    for number, sentence in enumerate(sentences, 1):
        if not isinstance(sentence, list | tuple) or isinstance(sentence, Tree) or not all(map(_is_pair, sentence)):
            raise InputError(f"sentence {number} is {show(sentence)}: expected a list of (word, tag) pairs.")
    return [[(word, tag) for word, tag in sentence] for sentence in sentences]


def _is_pair(token: object) -> bool:
    return (
        isinstance(token, tuple | list)
        and len(token) == 2
        and all(isinstance(part, str) and part.strip() for part in token)
    )


def are_tagged(given: list[Any]) -> bool:
    """Whether the first of what a caller gave, but for what is empty, is meant as a tagged sentence: a list of lists or
    of tuples, which neither a tree is nor a list of words."""
    first = next((sentence for sentence in given if not isinstance(sentence, list | tuple) or sentence), None)
    if not isinstance(first, list | tuple) or isinstance(first, Tree):
        return False
    return isinstance(first[0], list | tuple) and not isinstance(first[0], Tree)
