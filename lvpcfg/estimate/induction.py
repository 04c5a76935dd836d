"""Grammars that are induced from sentences: a lexicon, a random start, and batches to learn from.

An induced PCFG is a grammar of one phrase symbol and one tag. Its nonterminals are their states: any of them may
rewrite to any two, so that rules are one tensor over states, or one CP form. Sentences have two words or more.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg import processes
from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.sentences import DEV_LIKELIHOOD, SentenceOptions
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import BinaryRules
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.nn import GrammarLayer, normalised
from lvpcfg.trees.lexicon import SAMPLE, LexicalTable, Lexicon, frequent_classes
from lvpcfg.trees.sentences import PHRASE, TAG
from lvpcfg.trees.treebank import Symbols
from lvpcfg.trees.walk import words

RULES = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])  # of phrase, tag
UNSEEN = 0.5  # occurrences of an entry that no sentence has, at the start
Sentences = list[list[str]]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentences of similar lengths, as entries of a lexicon."""

    entries: Int[Tensor, "batch length"]
    lengths: Int[Tensor, "batch"] | None  # None: all are as long as the longest

    @property
    def sentences(self) -> int:
        return len(self.entries)

    @property
    def words(self) -> int:
        return self.entries.numel() if self.lengths is None else int(self.lengths.sum())

    def log_likelihood(self, layer: GrammarLayer) -> Float[Tensor, "some"]:
        """Of the sentences that are computed in this process."""
        rows = torch.tensor(processes.share(range(self.sentences)), dtype=torch.int64, device=self.entries.device)
        if not len(rows):
            return torch.zeros(0)
        return layer.log_likelihood(self.entries[rows], None if self.lengths is None else self.lengths[rows])


def training_sentences(task: Task) -> Sentences:
    return [words(tree) for tree in task.treebank.to_trees()]


def batches_of(sentences: Sentences, lexicon: Lexicon, tokens: int, device: torch.device) -> list[Batch]:
    """Of about so many words each, the shortest sentences first."""
    batches: list[list[list[str]]] = [[]]
    for sentence in sorted(sentences, key=len):
        if batches[-1] and (len(batches[-1]) + 1) * len(sentence) > tokens:
            batches.append([])
        batches[-1].append(sentence)
    return [_batch(batch, lexicon, device) for batch in batches if batch]


def _batch(sentences: Sentences, lexicon: Lexicon, device: torch.device) -> Batch:
    longest = max(map(len, sentences))
    entries = [[*lexicon.encode(sentence), *[0] * (longest - len(sentence))] for sentence in sentences]
    lengths = torch.tensor([len(sentence) for sentence in sentences], device=device)
    return Batch(torch.tensor(entries, device=device), None if bool((lengths == longest).all()) else lengths)


def induced_lexicon(sentences: Sentences, options: SentenceOptions, signature: str) -> Lexicon:
    """The most frequent words, and classes of all others: those that enough of them are in."""
    none = Lexicon((), (), signature, options.lowercase)
    counts = Counter(none.form(word) for sentence in sentences for word in sentence)
    frequent = counts.most_common(options.vocabulary)
    known = replace(none, words=tuple(word for word, count in frequent if count >= options.occurrences))
    others = set(counts) - set(known.words)
    unknown = [
        known.classes_of(word, place == 0)
        for sentence in sentences
        for place, word in enumerate(sentence)
        if known.form(word) in others
    ]
    classes = frequent_classes(unknown)
    found = Counter(next((name for name in names if name in classes), None) for names in unknown)
    return replace(known, classes=tuple(sorted(name for name in classes if found[name] >= SAMPLE)))


def random_model(options: SentenceOptions, rank: int, task: Task, sentences: Sentences) -> Model:
    """A grammar that knows how frequent words are, times exp of normal noise. With rank 0, its rules are one tensor."""
    lexicon = induced_lexicon(sentences, options, task.signature)
    generator = torch.Generator().manual_seed(task.seed)
    inner, tags = options.interminals, options.preterminals

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).exp()

    binary: BinaryRules
    if rank:  # no list of rules: it would be that of all states
        u, v, w = noise(rank, inner), noise(rank, inner + tags), noise(rank, inner + tags)
        binary = WholeCP((inner, tags), 1, RULES[:0], u, v, w)
    else:
        binary = RuleTensors((inner, tags), 1, RULES, noise(inner * (inner + tags) ** 2))
    counts = torch.zeros(len(lexicon))
    for sentence in sentences:
        counts += torch.bincount(torch.tensor(lexicon.encode(sentence)), minlength=len(lexicon))
    grammar = Grammar(
        symbols=Symbols((PHRASE,), (TAG,)),
        binary=binary,
        unary_rules=torch.zeros(0, 2, dtype=torch.int64),
        unary=torch.zeros(0),
        root=torch.nn.functional.pad(noise(inner), (0, tags)),
        lexical=full_rows(counts.clamp_min(UNSEEN).unsqueeze(1) * noise(len(lexicon), tags)),
    )
    return Model(normalised(grammar), lexicon, task.treebank.binarisation)


def full_rows(table: Float[Tensor, "entries states"]) -> LexicalTable:
    """A lexical table of a number for each entry and state."""
    entries, none = len(table), torch.zeros(0, dtype=torch.int64, device=table.device)
    every = torch.arange(entries, device=table.device)
    row = torch.zeros(entries + 1, dtype=torch.int64, device=table.device)
    return LexicalTable(row, none, table.new_zeros(0), table.new_ones(entries), every, table, widest=0)


class Dev:
    """Sentences that are not learned from."""

    def __init__(self, task: Task, lexicon: Lexicon, tokens: int) -> None:
        self.sentences = [words(tree) for tree in task.dev or ()]
        self.lexicon, self.batches = lexicon, batches_of(self.sentences, lexicon, tokens, torch.device(task.device))

    @torch.no_grad()
    def figures(self, log_likelihood: Callable[..., Tensor]) -> dict[str, float]:
        """log p of a word, and its perplexity. Words that are not known count as their class."""
        if not self.sentences:
            return {}
        found = torch.cat([log_likelihood(batch.entries, batch.lengths) for batch in self.batches])
        if not bool(found.isfinite().all()):
            number = int((~found.isfinite()).nonzero()[0])
            sentence = sorted(self.sentences, key=len)[number]
            raise InputError(
                f"the grammar has no tree for the dev sentence {show(' '.join(sentence), 200)}: log p(words), by "
                "which the best model is chosen, is -inf for it."
            )
        mean = float(found.sum()) / sum(map(len, self.sentences))
        return {DEV_LIKELIHOOD: mean, "dev_perplexity": perplexity(mean)}


def perplexity(log_likelihood_per_word: float) -> float:
    return float(torch.tensor(-log_likelihood_per_word, dtype=torch.float64).exp())


def seen(batches: Sequence[Batch], entries: int) -> Tensor:
    """[entries]: whether some sentence has it."""
    found = torch.zeros(entries, dtype=torch.bool, device=batches[0].entries.device)
    for batch in batches:
        place = torch.arange(batch.entries.shape[1], device=found.device)
        lengths = batch.lengths if batch.lengths is not None else place.new_full((batch.sentences,), len(place))
        found[batch.entries[place < lengths.unsqueeze(1)]] = True
    return found
