"""lvpcfg.Tagger: from a model and sentences to tags."""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from nltk.tag.api import TaggerI
from torch import Tensor
from tqdm import tqdm

from lvpcfg.device import usable_device
from lvpcfg.errors import InputError, expect, listed, show
from lvpcfg.files import PathLike
from lvpcfg.options import DTYPE_NAMES, RECALL, TAG_DECODERS
from lvpcfg.parses import Counts
from lvpcfg.sequence.decode import best_tags
from lvpcfg.sequence.tagging import TaggingModel
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.sentences import WORDS, of_similar_length

TOKENS = 1 << 12  # words of a batch
LARGEST = 1 << 26  # numbers of a table of all words that is written out


class Tagger(TaggerI):  # type: ignore[misc]
    """Tags the words of sentences with a model.

    `decoder` is "recall", the likeliest tag of each word, or "max-rule", the best sequence of tags (None: recall).
    `device` is "cuda" or "cpu" (None: CUDA if there is one), `dtype` "float32" or "float64". Sentences of similar
    length are tagged together, about `batch_tokens` words at a time.
    """

    def __init__(
        self,
        model: TaggingModel,
        decoder: str | None = None,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        batch_tokens: int = TOKENS,
    ) -> None:
        if not isinstance(model, TaggingModel):
            raise InputError(
                f"a tagger takes a model of tagged sentences: found {show(model)}. Tagger.load takes folders."
            )
        self.decoder = RECALL if decoder is None else decoder
        expect("decoder", self.decoder, TAG_DECODERS)
        expect("dtype", dtype, DTYPE_NAMES)
        if not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise InputError(f"batch_tokens is {show(batch_tokens)}: expected a number of words, such as {TOKENS}.")
        self.model, self.batch_tokens, self.device = model, batch_tokens, usable_device(device)
        self.counts = Counts()
        self._grammar = model.grammar.to(self.device, getattr(torch, dtype))
        self._table = _written_out(self._grammar.lexical)

    @staticmethod
    def load(
        path: PathLike,
        decoder: str | None = None,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        batch_tokens: int = TOKENS,
    ) -> "Tagger":
        """A tagger for the model in a folder."""
        return Tagger(TaggingModel.load(path), decoder, device, dtype, batch_tokens)

    @property
    def lexicon(self) -> Lexicon:
        return self.model.lexicon

    @property
    def tags(self) -> tuple[str, ...]:
        return self.model.grammar.tags

    def tag(self, tokens: Sequence[str]) -> list[tuple[str, str]]:
        """The words of a tokenised sentence, each with its tag."""
        return self.tag_sents([tokens])[0]

    def tag_sents(
        self,
        sentences: Iterable[Sequence[str]],
        progress: bool = False,
        update: Callable[[int], object] | None = None,
    ) -> list[list[tuple[str, str]]]:
        """The same for many sentences, in their order.

        `progress` shows a bar; `update` is called with the number of finished sentences.
        """
        given = _sentences_of(sentences)
        found = self.tags_of(given, progress, update)
        return [list(zip(words, tags, strict=True)) for words, tags in zip(given, found, strict=True)]

    def tags_of(
        self,
        sentences: Iterable[Sequence[str]],
        progress: bool = False,
        update: Callable[[int], object] | None = None,
    ) -> list[list[str]]:
        """The tags alone."""
        sentences = _sentences_of(sentences)
        found: list[list[str]] = [[] for _ in sentences]
        name = self.tags.__getitem__
        with tqdm(
            total=len(sentences), desc="tagging", unit=" sentences", disable=None if progress else True, leave=False
        ) as bar:
            for batch in of_similar_length([len(words) for words in sentences], self.batch_tokens):
                some = [sentences[number] for number in batch]
                for number, words, tags in zip(batch, some, self._tagged(some), strict=True):
                    found[number] = [*map(name, tags[: len(words)])]
                bar.update(len(batch))
                if update is not None:
                    update(len(batch))
        return found

    @torch.no_grad()  # not inference mode: what float64 cannot hold is computed by autograd
    def _tagged(self, sentences: Sequence[Sequence[str]]) -> list[list[int]]:
        """The numbers of the tags of each; those behind the end of a sentence mean nothing."""
        lengths = [len(words) for words in sentences]
        scores = self._scores(sentences, lengths)
        best, impossible = best_tags(self._grammar.chain, scores, torch.tensor(lengths), len(self.tags), self.decoder)
        self.counts.sentences += len(sentences)
        self.counts.fallbacks += int(impossible.sum())
        found: list[list[int]] = best.tolist()
        return found

    def _scores(self, sentences: Sequence[Sequence[str]], lengths: Sequence[int]) -> Float[Tensor, "batch n states"]:
        """What each word is worth to the states; beyond the end of a sentence, whatever."""
        if self._table is None:
            return self._grammar.lexical.values_of(self.lexicon.tokens(sentences).padded(lengths).to(self.device))
        longest = max(lengths)
        entries = torch.tensor([self.lexicon.encode(words) + [0] * (longest - len(words)) for words in sentences])
        return self._table.index_select(0, entries.to(self.device).flatten()).view(*entries.shape, -1)


def _sentences_of(given: Iterable[Sequence[str]]) -> list[list[str]]:
    """What a caller gave as sentences. Words may hold white space: they stand in no tree."""
    expected = "a list of sentences, each a list of words"
    sentences = [
        listed(f"sentence {number}", words, WORDS)
        for number, words in enumerate(listed("what is to be tagged", given, expected), 1)
    ]
    for number, words in enumerate(sentences, 1):
        if not words or not all(isinstance(word, str) and word for word in words):
            raise InputError(f"sentence {number} is {show(words)}: expected {WORDS}.")
    return sentences


def _written_out(table: LexicalTable) -> Tensor | None:
    """[entries, states]; None, where that is too large, or the spelling of words matters."""
    entries = len(table.weight)
    if table.network is not None or entries * table.backoff.shape[1] > LARGEST:
        return None
    return table.lookup(torch.arange(entries, device=table.weight.device))
