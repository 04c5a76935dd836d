"""What the words of sentences are worth to the states of tags: as the lexicon says, and under a given tag.

Where a tag is given, its states alone are left. If the word is impossible under all of them, its class of unknown words
stands for it; if that is impossible too, all states of the tag are worth 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar
from lvpcfg.trees.binarise import labels_of
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.treebank import Symbols


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence and the numbers of their tags, -1 where any will do; no tags are none at all."""

    words: Sequence[str]
    tags: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.words)


def tag_numbers(symbols: Symbols) -> dict[str, int]:
    """The tags of a treebank: of collapsed chains the last label."""
    labels = dict.fromkeys(labels_of(name)[-1] for name in symbols.preterminals)
    return {label: number for number, label in enumerate(labels)}


class WordScores:
    """Of one grammar."""

    def __init__(self, lexicon: Lexicon, grammar: Grammar) -> None:
        self.lexicon, self.table, self.device = lexicon, grammar.lexical, grammar.root.device
        symbols, number = grammar.symbols, tag_numbers(grammar.symbols)
        tags = torch.tensor([number[labels_of(name)[-1]] for name in symbols.preterminals], device=self.device)
        tag_of_state = tags.repeat_interleave(grammar.states[len(symbols.interminals) :])
        every = torch.arange(len(number), device=self.device).unsqueeze(1)
        any_tag = torch.ones_like(tag_of_state, dtype=torch.bool).unsqueeze(0)
        self.allowed = torch.cat([tag_of_state == every, any_tag])  # [tags + 1, states]; that of no tag is the last

    def of(self, sentences: Sequence[Sentence]) -> Float[Tensor, "words states"]:
        """Of all sentences, end to end."""
        tokens = self.lexicon.tokens(sentence.words for sentence in sentences).to(self.device)
        values = self.table.values_of(tokens)
        if not any(sentence.tags for sentence in sentences):
            return values
        numbers = [tag for sentence in sentences for tag in sentence.tags or [-1] * len(sentence)]
        tags = torch.tensor(numbers, device=self.device)
        allowed = self.allowed[tags]
        values = torch.where(allowed, values, 0)
        impossible = (values == 0).all(1, keepdim=True) & (tags >= 0).unsqueeze(1)
        if not bool(impossible.any()):
            return values
        unknown = [
            self.lexicon.unknown(word, place == 0)
            for sentence in sentences
            for place, word in enumerate(sentence.words)
        ]
        of_class = self.table.values_of(replace(tokens, entries=torch.tensor(unknown, device=self.device)))
        of_class = torch.where(allowed, of_class, 0)
        of_class = torch.where((of_class == 0).all(1, keepdim=True), allowed.to(values.dtype), of_class)
        return torch.where(impossible, of_class, values)
