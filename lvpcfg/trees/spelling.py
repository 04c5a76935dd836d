"""Words spelt out, and a network that says from their characters how well they go with each state.

    factor(x, s) = S softmax_s(O relu(max over places of (K * E[characters of x]) + b)),   S states

K is a convolution over the characters, between a mark that says whether the word is the first of its sentence and a
mark at its end. The factors of a word have the mean 1. With O = 0, where training begins, all of them are 1. K and O
are divided by the square root of how many numbers they add up, so that all parameters are of about the same size, and
the learning rate that suits the logarithms of a grammar suits them (Karras et al. 2018, section 4.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import conv1d

PADDING, OTHER, FIRST, BEGIN, END = range(5)  # OTHER: a character that is in no known word
MARKS = 5
KEPT = 16  # characters at either end of a word; of longer ones the middle is left out


def alphabet(words: Sequence[str]) -> dict[str, int]:
    """The number of each character of some words."""
    return {character: MARKS + place for place, character in enumerate(sorted({*"".join(words)}))}


@dataclass(frozen=True, eq=False)
class Spellings:
    """Distinct words, each with whether it is the first of its sentence."""

    words: Sequence[tuple[str, bool]]
    alphabet: dict[str, int]

    @cached_property
    def characters(self) -> Int[Tensor, "words length"]:
        """The characters of each word, between its marks."""
        rows = []
        for word, first in self.words:
            word = word if len(word) <= 2 * KEPT else word[:KEPT] + word[-KEPT:]
            spelt = [self.alphabet.get(character, OTHER) for character in word]
            rows.append(torch.tensor([FIRST if first else BEGIN, *spelt, END]))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Words of sentences, as a model looks them up."""

    entries: Int[Tensor, "..."]  # of the lexicon
    number: Int[Tensor, "..."]  # of the spelling
    spellings: Spellings

    def __getitem__(self, place: Tensor) -> "Tokens":
        return Tokens(self.entries[place], self.number[place], self.spellings)

    def padded(self, lengths: Sequence[int]) -> "Tokens":
        """[words of all sentences] -> [sentences, longest]."""
        if len({*lengths}) == 1:
            return replace(self, entries=self.entries.view(-1, lengths[0]), number=self.number.view(-1, lengths[0]))
        entries, number = (
            torch.nn.utils.rnn.pad_sequence(tensor.split([*lengths]), batch_first=True)
            for tensor in (self.entries, self.number)
        )
        return replace(self, entries=entries, number=number)

    def to(self, device: torch.device | str) -> "Tokens":
        return replace(self, entries=self.entries.to(device), number=self.number.to(device))


@dataclass(frozen=True)
class CharacterSizes:
    """The sizes of a network; the defaults are those of a new one."""

    embedding: int = 24
    filters: int = 128
    width: int = 5  # characters that the convolution looks at together, an odd number

    def shapes(self, characters: int, states: int) -> dict[str, tuple[int, ...]]:
        """Those of the tensors of a network over an alphabet of so many characters."""
        return {
            "embedding": (MARKS + characters, self.embedding),
            "kernel": (self.filters, self.embedding, self.width),
            "bias": (self.filters,),
            "output": (states, self.filters),
        }


@dataclass(frozen=True, eq=False)
class CharacterNetwork:
    """The network: tensors, for which a module may put its parameters."""

    embedding: Float[Tensor, "characters size"]  # E
    kernel: Float[Tensor, "filters size width"]  # K
    bias: Float[Tensor, "filters"]  # b
    output: Float[Tensor, "states filters"]  # O

    @staticmethod
    def new(characters: int, states: int, generator: torch.Generator) -> "CharacterNetwork":
        """One that knows nothing yet. `characters` are those of the alphabet."""
        shapes = CharacterSizes().shapes(characters, states)
        random = {name: torch.randn(shapes[name], generator=generator) for name in ("embedding", "kernel")}
        return CharacterNetwork(**random, bias=torch.zeros(shapes["bias"]), output=torch.zeros(shapes["output"]))

    @property
    def sizes(self) -> CharacterSizes:
        filters, embedding, width = self.kernel.shape
        return CharacterSizes(embedding, filters, width)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def with_tensors(self, tensors: dict[str, Tensor]) -> "CharacterNetwork":
        return CharacterNetwork(**tensors)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CharacterNetwork":
        return CharacterNetwork(**{name: tensor.to(device, dtype) for name, tensor in self.tensors.items()})

    def factors(self, tokens: Tokens) -> Float[Tensor, "... states"]:
        """What the numbers of the lexicon's table are multiplied by."""
        characters = tokens.spellings.characters.to(self.embedding.device)
        spelt = self.embedding[characters] * (characters != PADDING).unsqueeze(-1)  # [words, length, size]
        kernel = self.kernel / self.kernel[0].numel() ** 0.5
        windows = conv1d(spelt.transpose(1, 2), kernel, padding=kernel.shape[2] // 2)
        windows = windows.masked_fill((characters == PADDING).unsqueeze(1), -torch.inf)
        seen = torch.relu(windows.amax(2) + self.bias)  # [words, filters]
        scores = seen @ self.output.T / len(self.bias) ** 0.5
        return len(self.output) * torch.softmax(scores, 1)[tokens.number]
