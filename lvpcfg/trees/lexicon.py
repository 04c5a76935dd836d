"""Words -> lexical entries, and the smoothed p(tag | word) behind q(a -> x | h, a).

Petrov & Klein 2007: with u(s) = p(s | unseen word) over the states s of all preterminals,

    p(s | word)  = (c(s, word) + k u(s)) / (c(word) + k),   k = 1e-4 above 10 occurrences, else 0.1
    p(s | class) = (c(s, class) + 0.5 u(s)) / (c(class) + 0.5)     for the signature of an unknown word
    q(s -> x)    = p(s | x) p(x) / p(s),   p(s) = sum over x of p(s | x) p(x)

so that sum_x q(s -> x) = 1 over known words, signature classes and one last entry for signatures
never met. The statistics of unseen words come from the words first met in the second half of the
treebank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.trees.signatures import get_signature
from lvpcfg.trees.treebank import Treebank

RARE, RARE_WEIGHT, COMMON_WEIGHT, UNKNOWN_WEIGHT = 10, 0.1, 1e-4, 0.5


@dataclass(frozen=True)
class Lexicon:
    """Maps words to entries: known words, then signature classes, then everything else."""

    words: tuple[str, ...]
    classes: tuple[str, ...]
    signature: str
    _words: dict[str, int] = field(init=False, repr=False, compare=False)
    _classes: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        get_signature(self.signature)  # an unknown name stops here, not at the first unknown word
        object.__setattr__(self, "_words", {word: i for i, word in enumerate(self.words)})
        object.__setattr__(self, "_classes", {name: len(self.words) + i for i, name in enumerate(self.classes)})

    def __len__(self) -> int:
        return len(self.words) + len(self.classes) + 1

    def encode(self, sentence: Sequence[str]) -> list[int]:
        """The entry of each word of a sentence."""
        return [
            self._words[word] if word in self._words else self.unknown(word, position == 0)
            for position, word in enumerate(sentence)
        ]

    def unknown(self, word: str, first: bool) -> int:
        """The entry of `word` if it is unknown."""
        return self._classes.get(self.class_of(word, first), len(self) - 1)

    def class_of(self, word: str, first: bool) -> str:
        lower = word.lower()
        return get_signature(self.signature)(word, first, lower != word and lower in self._words)


@dataclass(frozen=True, eq=False)
class LexicalTable:
    """Non-negative or signed numbers for every (entry, state): sparse rows plus a rank-one part.

    table[entry, state] = values of the entry's row + weight[entry] * backoff[state]
    """

    row: Tensor  # [entries + 1]: where each entry's values begin
    state: Tensor  # [values]: 0 .. states of all preterminals
    value: Tensor  # [values]
    weight: Tensor  # [entries]
    backoff: Tensor  # [states]
    widest: int  # values in the longest row: known beforehand, so that a lookup waits for no device

    def lookup(self, entries: Tensor) -> Tensor:
        """[...] entries -> [..., states]."""
        begin = self.row[entries].unsqueeze(-1)
        end = self.row[entries + 1].unsqueeze(-1)
        place = begin + torch.arange(self.widest, device=begin.device)  # [..., widest]
        inside = place < end
        place = torch.where(inside, place, 0)
        values = torch.where(inside, self.value[place], 0)
        dense = self.weight[entries].unsqueeze(-1) * self.backoff
        return dense.scatter_add(-1, self.state[place], values)

    def scale(self, entry_factor: Tensor, state_factor: Tensor) -> "LexicalTable":
        """Multiplies rows and columns."""
        entry = torch.repeat_interleave(self.row[1:] - self.row[:-1], output_size=len(self.value))
        value = self.value * entry_factor[entry] * state_factor[self.state]
        weight, backoff = self.weight * entry_factor, self.backoff * state_factor
        return replace(self, value=value, weight=weight, backoff=backoff)

    def column_sums(self) -> Tensor:
        """[states]: the sum over all entries."""
        sums = torch.zeros_like(self.backoff).index_add(0, self.state, self.value)
        return sums + self.weight.sum() * self.backoff


@dataclass(frozen=True, eq=False)
class UnseenSample:
    """Nodes of a treebank that stand for unknown words: first tokens of words first met late."""

    node: Tensor  # [samples]
    entry: Tensor  # [samples]: the signature class of each


def build_lexicon(treebank: Treebank, signature: str = "english") -> tuple[Lexicon, UnseenSample]:
    """The lexicon of a treebank, and its sample of unseen words."""
    leaves = treebank.is_lexical.nonzero().squeeze(1)  # in the order of the text
    word = treebank.lexical_rules[treebank.rule[leaves], 1]
    # Words are numbered in the order of first occurrence, so the running maximum grows at each.
    is_first = torch.ones_like(word, dtype=torch.bool)
    is_first[1:] = word[1:] > word.cummax(0).values[:-1]
    node = leaves[is_first & (leaves >= treebank.roots[len(treebank) // 2])]

    known = Lexicon(treebank.words, (), signature)
    sampled = [treebank.words[i] for i in treebank.lexical_rules[treebank.rule[node], 1].tolist()]
    firsts = (treebank.start[node] == 0).tolist()
    classes = {known.class_of(word, first) for word, first in zip(sampled, firsts, strict=True)}
    lexicon = Lexicon(treebank.words, tuple(sorted(classes)), signature)
    entry = [lexicon.unknown(word, first) for word, first in zip(sampled, firsts, strict=True)]
    return lexicon, UnseenSample(node, torch.tensor(entry, dtype=torch.int64))


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

        added = torch.full_like(total, RARE_WEIGHT)  # k
        added[total.round() > RARE] = COMMON_WEIGHT  # expected counts of one word add up to a whole number
        added[is_class] = UNKNOWN_WEIGHT
        table = LexicalTable(
            row=self.row,
            state=self.state,
            value=count / (total + added)[self.entry],
            weight=added / (total + added),
            backoff=unseen / unseen.sum(),
            widest=self.widest,
        )
        prior = total.clone()
        prior[-1] = UNKNOWN_WEIGHT
        return table, prior / prior.sum()

    @cached_property
    def row(self) -> Tensor:
        """[entries + 1]: where the values of each entry begin."""
        return torch.searchsorted(self.entry, torch.arange(len(self.lexicon) + 1, device=self.entry.device))

    @cached_property
    def widest(self) -> int:
        return int((self.row[1:] - self.row[:-1]).max())


def emissions(tags: LexicalTable, prior: Tensor) -> LexicalTable:
    """q(s -> x) = p(s | x) p(x) / p(s); a state that nothing emits stays at zero."""
    joint = tags.scale(prior, torch.ones_like(tags.backoff))
    marginal = joint.column_sums()
    return joint.scale(torch.ones_like(prior), torch.where(marginal > 0, 1 / marginal, 0.0))
