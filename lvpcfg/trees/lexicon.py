"""Words -> lexical entries, and the smoothed p(tag | word) behind q(a -> x | h, a).

As in Petrov & Klein 2007 a word is smoothed towards unknown words, but towards those that look like it:

    p(s | word)  = (c(s, word) + k p(s | class of word)) / (c(word) + k),   k = 1e-4 above 10 occurrences, else 0.5
    p(s | class) = (c(s, class) + 0.5 u(s)) / (c(class) + 0.5),             u(s) = p(s | unknown word)
    q(s -> x)    = p(s | x) p(x) / p(s),   p(s) = sum over x of p(s | x) p(x)

over the states s of all preterminals, so that sum_x q(s -> x) = 1 over known words, classes of unknown words
and one last entry for all else. What unknown words are like is seen from the words that occur once. A signature names
classes from fine to coarse; a word belongs to the finest that has enough of a sample.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.trees.signatures import get_signature
from lvpcfg.trees.spelling import CharacterNetwork, Spellings, Tokens, alphabet
from lvpcfg.trees.treebank import Treebank

RARE, RARE_WEIGHT, COMMON_WEIGHT, UNKNOWN_WEIGHT = 10, 0.5, 1e-4, 0.5
CAPITALS = 2  # words of a sentence all in capitals, at the least: one may be a name
NUMBER = re.compile(r"\d+(?:[.,]\d*)*")
SAMPLE = 10  # words that a class is seen from, at the least


def _other_cases(sentence: Sequence[str]) -> Sequence[Callable[[str], str]]:
    """How unknown words of a sentence may be written elsewhere, if its letters are all capitals or none is."""
    text = "".join(sentence)
    if text.isupper() and sum(word.isupper() and len(word) > 1 for word in sentence) >= CAPITALS:
        return (str.lower, str.capitalize)
    return (str.capitalize, str.upper) if text.islower() else ()


@dataclass(frozen=True)
class Lexicon:
    """Maps words to entries: known words, then classes of unknown words, then everything else."""

    words: tuple[str, ...]
    classes: tuple[str, ...]
    signature: str
    folded: bool = False  # words are known in lower case, and all numbers are 0
    _words: dict[str, int] = field(init=False, repr=False, compare=False)
    _classes: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        get_signature(self.signature)  # an unknown name stops here, not at the first unknown word
        object.__setattr__(self, "_words", {word: i for i, word in enumerate(self.words)})
        object.__setattr__(self, "_classes", {name: len(self.words) + i for i, name in enumerate(self.classes)})

    def __len__(self) -> int:
        return len(self.words) + len(self.classes) + 1

    def encode(self, sentence: Sequence[str]) -> list[int]:
        """The entry of each word of a sentence.

        Where all letters of a sentence are capitals, or none is, an unknown word is looked up in other cases too.
        """
        others = _other_cases(sentence)
        return [self._entry(word, position == 0, others) for position, word in enumerate(sentence)]

    def _entry(self, word: str, first: bool, others: Sequence[Callable[[str], str]]) -> int:
        forms = [self.form(word), *(other(word) for other in others)]
        known = next((self._words[form] for form in forms if form in self._words), None)
        return self.unknown(word.lower() if others else word, first) if known is None else known

    def form(self, word: str) -> str:
        """A word as it stands among the known words, if it is known."""
        return NUMBER.sub("0", word.lower()) if self.folded else word

    def tokens(self, sentences: Iterable[Sequence[str]]) -> Tokens:
        """The words of all sentences, one after the other: their entries, and how they are spelt."""
        entries: list[int] = []
        number: list[int] = []
        distinct: dict[tuple[str, bool], int] = {}
        for sentence in sentences:
            entries += self.encode(sentence)
            number += [distinct.setdefault((word, place == 0), len(distinct)) for place, word in enumerate(sentence)]
        return Tokens(torch.tensor(entries), torch.tensor(number), Spellings([*distinct], self.alphabet))

    @cached_property
    def alphabet(self) -> dict[str, int]:
        """The characters of the known words."""
        return alphabet(self.words)

    def unknown(self, word: str, first: bool) -> int:
        """The entry of `word` if it is unknown."""
        return next(
            (self._classes[name] for name in self.classes_of(word, first) if name in self._classes), len(self) - 1
        )

    def classes_of(self, word: str, first: bool) -> Sequence[str]:
        """The classes that the signature has for `word`, finest first."""
        lower = word.lower()
        classes = get_signature(self.signature)(word, first, lower != word and lower in self._words)
        return (classes,) if isinstance(classes, str) else classes

    @cached_property
    def source(self) -> Tensor:
        """[entries]: the class that each word is smoothed towards; for classes one past the last, all unknown words."""
        words, last = len(self.words), len(self.classes)
        looks_like = [self.unknown(word, first=False) - words for word in self.words]
        return torch.tensor(looks_like + [last] * (last + 1))


@dataclass(frozen=True, eq=False)
class LexicalTable:
    """Non-negative or signed numbers for every (entry, state): sparse rows, plus a multiple of one of a few full rows.

    table[entry, state] = values of the entry's row + weight[entry] * backoff[source[entry], state]

    With a network, they are multiplied by what it says of the word's spelling.
    """

    row: Tensor  # [entries + 1]: where each entry's values begin
    state: Tensor  # [values]: 0 .. states of all preterminals
    value: Tensor  # [values]
    weight: Tensor  # [entries]
    source: Tensor  # [entries]
    backoff: Tensor  # [sources, states]
    widest: int  # values in the longest row: known beforehand, so that a lookup waits for no device
    network: CharacterNetwork | None = None

    def values_of(self, tokens: Tokens) -> Tensor:
        """[...] words -> [..., states]."""
        values = self.lookup(tokens.entries)
        return values if self.network is None else values * self.network.factors(tokens)

    def lookup(self, entries: Tensor) -> Tensor:
        """[...] entries -> [..., states], whatever the spelling."""
        begin = self.row[entries].unsqueeze(-1)
        end = self.row[entries + 1].unsqueeze(-1)
        place = begin + torch.arange(self.widest, device=begin.device)  # [..., widest]
        inside = place < end
        place = torch.where(inside, place, 0)
        values = torch.where(inside, self.value[place], 0)
        dense = self.weight[entries].unsqueeze(-1) * self.backoff[self.source[entries]]
        return dense.scatter_add(-1, self.state[place], values)

    def scale(self, entry_factor: Tensor, state_factor: Tensor) -> "LexicalTable":
        """Multiplies rows and columns."""
        entry = torch.repeat_interleave(self.row[1:] - self.row[:-1], output_size=len(self.value))
        value = self.value * entry_factor[entry] * state_factor[self.state]
        weight, backoff = self.weight * entry_factor, self.backoff * state_factor
        return replace(self, value=value, weight=weight, backoff=backoff)

    def fold(self, factor: Tensor, into: Tensor, states: int) -> "LexicalTable":
        """Adds up columns: each, times its factor, goes into the column `into` of a table with so many states.

        The network stays behind: its factors belong to the columns as they were.
        """
        factor = factor.to(self.value.dtype)
        entry = torch.repeat_interleave(self.row[1:] - self.row[:-1], output_size=len(self.value))
        pairs, pair = torch.unique(entry * states + into[self.state], return_inverse=True)
        row = torch.searchsorted(pairs, states * torch.arange(len(self.row), device=pairs.device))
        value = self.value.new_zeros(len(pairs)).index_add(0, pair, self.value * factor[self.state])
        backoff = self.backoff.new_zeros(len(self.backoff), states).index_add(1, into, self.backoff * factor)
        widest = int((row[1:] - row[:-1]).max())
        return LexicalTable(row, pairs % states, value, self.weight, self.source, backoff, widest)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LexicalTable":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return replace(
            self,
            row=moved(self.row),
            state=moved(self.state),
            value=moved(self.value),
            weight=moved(self.weight),
            source=moved(self.source),
            backoff=moved(self.backoff),
            network=None if self.network is None else self.network.to(device, dtype),
        )

    def column_sums(self) -> Tensor:
        """[states]: the sum over all entries, whatever the spelling."""
        weight = self.weight.new_zeros(len(self.backoff)).index_add(0, self.source, self.weight)
        return (weight @ self.backoff).index_add(0, self.state, self.value)


@dataclass(frozen=True, eq=False)
class UnseenSample:
    """Nodes of a treebank, or tokens of a corpus, that stand for unknown words: the words that occur once."""

    node: Tensor  # [samples]
    entry: Tensor  # [samples]: the class of each


def build_lexicon(treebank: Treebank, signature: str = "english") -> tuple[Lexicon, UnseenSample]:
    """The lexicon of a treebank, and its sample of unseen words."""
    leaves = treebank.is_lexical.nonzero().squeeze(1)
    word = treebank.lexical_rules[treebank.rule[leaves], 1]
    lexicon, unseen = lexicon_of(treebank.words, word, treebank.start[leaves] == 0, signature)
    return lexicon, replace(unseen, node=leaves[unseen.node])


def lexicon_of(words: Sequence[str], word: Tensor, first: Tensor, signature: str) -> tuple[Lexicon, UnseenSample]:
    """The lexicon of some tokens, given the number of the `word` of each and whether it is the `first` of its sentence;
    and the sample of those that stand for unknown words."""
    token = (torch.bincount(word, minlength=len(words))[word] == 1).nonzero().squeeze(1)
    known = Lexicon(tuple(words), (), signature)
    sample = [
        (words[number], is_first) for number, is_first in zip(word[token].tolist(), first[token].tolist(), strict=True)
    ]
    classes = frequent_classes([known.classes_of(word, first) for word, first in sample])
    lexicon = Lexicon(tuple(words), tuple(sorted(classes)), signature)
    entry = [lexicon.unknown(word, first) for word, first in sample]
    return lexicon, UnseenSample(token, torch.tensor(entry, dtype=torch.int64))


def frequent_classes(sample: list[Sequence[str]]) -> set[str]:
    """The classes to have, given those of each word of the sample, finest first.

    From the finest on, those with enough words; words that are in none of them try the next coarser. The coarsest are
    there however few they have.
    """
    found: set[str] = set()
    waiting = [list(reversed(classes)) for classes in sample if classes]  # the next one stands last
    while waiting:
        counts = Counter(classes[-1] for classes in waiting)
        found |= {classes[-1] for classes in waiting if counts[classes[-1]] >= SAMPLE or len(classes) == 1}
        waiting = [classes[:-1] for classes in waiting if classes[-1] not in found]
    return found


@dataclass(frozen=True, eq=False)
class LexicalPairs:
    """Which states go with which entry: the layout of (expected) counts c(state, entry), entry by entry."""

    lexicon: Lexicon
    entry: Tensor  # [values]: ascending
    state: Tensor  # [values]: ascending within an entry
    states: int  # of all preterminals

    def tags(self, count: Tensor) -> tuple[LexicalTable, Tensor]:
        """The smoothed p(state | entry) and p(entry), from counts of words and of classes.

        The counts of the classes are those of the unseen sample, and u(s) is their relative frequency.
        """
        total = count.new_zeros(len(self.lexicon)).index_add(0, self.entry, count)  # c(x)
        is_class = torch.arange(len(self.lexicon), device=count.device) >= len(self.lexicon.words)
        sampled = is_class[self.entry].to(count.dtype) if bool((total[is_class] > 0).any()) else 1
        unseen = count.new_zeros(self.states).index_add(0, self.state, count * sampled)

        unseen = unseen / unseen.sum()

        added = torch.full_like(total, RARE_WEIGHT)  # k
        added[total.round() > RARE] = COMMON_WEIGHT  # expected counts of one word add up to a whole number
        added[is_class] = UNKNOWN_WEIGHT
        table = LexicalTable(
            row=self.row,
            state=self.state,
            value=count / (total + added)[self.entry],
            weight=added / (total + added),
            source=self.lexicon.source.to(count.device),
            backoff=self._backoff(count, total, unseen),
            widest=self.widest,
        )
        prior = total.clone()
        prior[-1] = UNKNOWN_WEIGHT
        return table, prior / prior.sum()

    def _backoff(self, count: Tensor, total: Tensor, unseen: Tensor) -> Tensor:
        """[classes + 1, states]: p(s | class), and u(s)."""
        words, classes = len(self.lexicon.words), len(self.lexicon.classes)
        sampled = self.entry >= words
        place = (self.entry[sampled] - words) * self.states + self.state[sampled]
        counts = count.new_zeros((classes + 1) * self.states).index_add(0, place, count[sampled])
        table = counts.view(classes + 1, self.states) + UNKNOWN_WEIGHT * unseen
        return table / (total[words:] + UNKNOWN_WEIGHT).unsqueeze(1)

    @cached_property
    def row(self) -> Tensor:
        """[entries + 1]: where the values of each entry begin."""
        return torch.searchsorted(self.entry, torch.arange(len(self.lexicon) + 1, device=self.entry.device))

    @cached_property
    def widest(self) -> int:
        return int((self.row[1:] - self.row[:-1]).max())


def emissions(tags: LexicalTable, prior: Tensor) -> LexicalTable:
    """q(s -> x) = p(s | x) p(x) / p(s); a state that nothing emits stays at zero."""
    joint = tags.scale(prior, torch.ones_like(tags.backoff[0]))
    marginal = joint.column_sums()
    return joint.scale(torch.ones_like(prior), torch.where(marginal > 0, 1 / marginal, 0.0))
