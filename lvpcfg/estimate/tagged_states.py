"""Tagged sentences whose tags have latent states: expected counts, and the chain of these counts.

    E-step   c(x) = p(x) * d log p(tags, words) / d p(x)       for steps, words, beginnings and ends, by autograd
    M-step   p(b, k | a, h) = c(a h, b k) / c(a, h),   and so for the end of a sentence and for words

As `latent.py` does for trees, training keeps counts, and words that occur at most `rare` times share one profile over
the states of their tag. With one state for each tag, counts and parameters are relative frequencies.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg import processes
from lvpcfg.estimate.latent import inverse
from lvpcfg.estimate.states import disturbed
from lvpcfg.sequence.given import Blocks, GivenTags
from lvpcfg.sequence.tagging import TagChain
from lvpcfg.trees.lexicon import LexicalPairs, LexicalTable, emissions, lexicon_of
from lvpcfg.trees.tagged import TaggedCorpus

TOKENS = 8000  # that are computed at once


@dataclass(frozen=True, eq=False)
class TagCounts:
    """Expected counts, or the parameters that they make; float64."""

    initial: Float64[Tensor, "tags m"]
    transition: Float64[Tensor, "tags m tags m"]
    final: Float64[Tensor, "tags m"]
    lexical: Float64[Tensor, "pairs m"]  # of words and of classes of unknown words, with tags

    def map(self, function: Callable[[Tensor], Tensor]) -> "TagCounts":
        return TagCounts(*(function(tensor) for tensor in vars(self).values()))

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.initial, self.transition, self.final)


class TagLayout:
    """Which entries of the lexicon go with which tags, and in which batches sentences are computed."""

    def __init__(self, corpus: TaggedCorpus, signature: str, device: torch.device) -> None:
        self.corpus, self.tags, self.device = corpus, len(corpus.tags), device
        self.lexicon, self.unseen = lexicon_of(corpus.words, corpus.word, corpus.place == 0, signature)
        tag = torch.cat([corpus.tag, corpus.tag[self.unseen.node]])
        entry = torch.cat([corpus.word, self.unseen.entry])
        key, pair = torch.unique(entry * self.tags + tag, return_inverse=True)
        self.entry, self.tag = key // self.tags, key % self.tags  # of each pair
        self.pair, self.unseen_pair = pair[: len(corpus.tag)], pair[len(corpus.tag) :]
        self.known = (self.entry < len(corpus.words)).unsqueeze(1)
        self.occurrences = torch.bincount(corpus.word, minlength=len(self.lexicon))[self.entry]
        self.batches = [TagBatch.of(self, sentences) for sentences in processes.share(self._sentences())]

    def _sentences(self) -> list[Tensor]:
        """Of each batch: of similar lengths, and as many words."""
        order = self.corpus.lengths.argsort(descending=True, stable=True)
        lengths = self.corpus.lengths[order]
        batch = (lengths.cumsum(0) - lengths) // TOKENS
        return list(order.split(torch.bincount(batch).tolist()))

    def counts(self) -> TagCounts:
        """Of the tags as they stand, one state for each."""
        corpus, tags = self.corpus, self.tags

        def count(numbers: Tensor, size: int) -> Tensor:
            return torch.bincount(numbers, minlength=size).double()

        later = (corpus.place > 0).nonzero().squeeze(1)
        pairs = count(corpus.tag[later - 1] * tags + corpus.tag[later], tags * tags)
        lexical = count(self.pair, len(self.tag)) + count(self.unseen_pair, len(self.tag))
        return TagCounts(
            initial=count(corpus.tag[corpus.first], tags).unsqueeze(1),
            transition=pairs.view(tags, 1, tags, 1),
            final=count(corpus.tag[corpus.first + corpus.lengths - 1], tags).unsqueeze(1),
            lexical=lexical.unsqueeze(1),
        )


@dataclass(frozen=True, eq=False)
class TagBatch:
    """Sentences that are computed at once; where their tokens, and those that stand for unknown words, are counted."""

    given: GivenTags
    pair: Int64[Tensor, "tokens"]
    unseen: Int64[Tensor, "samples"]  # tokens of this batch
    unseen_pair: Int64[Tensor, "samples"]

    @staticmethod
    def of(layout: TagLayout, sentences: Int64[Tensor, "sentences"]) -> "TagBatch":
        corpus = layout.corpus
        lengths = corpus.lengths[sentences]
        moved = (corpus.first[sentences] - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        token = torch.arange(len(moved)) + moved
        place = torch.full_like(corpus.tag, -1)
        place[token] = torch.arange(len(token))
        unseen = place[layout.unseen.node]
        here = unseen >= 0
        given = GivenTags(corpus.tag[token].to(layout.device), lengths, layout.tags)
        numbers = (layout.pair[token], unseen[here], layout.unseen_pair[here])
        return TagBatch(given, *(number.to(layout.device) for number in numbers))


@dataclass(frozen=True)
class TagSmoothing:
    """p'_h = (1 - w) p_h + w * the mean over the states of the tag."""

    transitions: float  # w of what comes next
    words: float  # w of words


@dataclass(frozen=True, eq=False)
class TaggedStates:
    """Tagged sentences with m states for each tag: their expected counts. To EM it is what a `Refinement` is."""

    layout: TagLayout
    counts: TagCounts
    rare: int

    @staticmethod
    def of(layout: TagLayout, rare: int) -> "TaggedStates":
        """The tags as they stand, one state for each."""
        return TaggedStates(layout, layout.counts(), rare)

    @property
    def states(self) -> int:
        """Of each tag."""
        return self.counts.initial.shape[1]

    def split(self, parts: int, noise: float, generator: torch.Generator, remember: bool = False) -> "TaggedStates":
        """Every state in so many, whose counts differ by up to the factor exp(noise); no hierarchy remembers them."""
        if parts == 1:
            return self
        counts = self.counts.map(lambda values: values.repeat_interleave(parts, -1) / parts)
        transition = counts.transition.repeat_interleave(parts, 1) / parts
        counts = replace(counts, transition=transition).map(torch.clone)
        return replace(self, counts=counts.map(lambda values: disturbed(values, noise, generator)))

    def smoothing(self, rules: float, words: float) -> TagSmoothing:
        return TagSmoothing(rules, words)

    def parameters(self, smoothing: TagSmoothing | None = None) -> TagCounts:
        """The M-step. Lexical parameters are those of words alone, relative frequencies where nothing is smoothed."""
        counts = self.counts
        factor = inverse(counts.transition.sum((2, 3)) + counts.final)
        transition, final = counts.transition * factor[:, :, None, None], counts.final * factor
        if smoothing is not None:
            transition = _smoothed(transition, smoothing.transitions, 1)
            final = _smoothed(final, smoothing.transitions, 1)
        initial = counts.initial / counts.initial.sum()
        return TagCounts(initial, transition, final, self._words(smoothing))

    def _words(self, smoothing: TagSmoothing | None) -> Float64[Tensor, "pairs m"]:
        if smoothing is None:
            words = self.tied * self.layout.known
            return words * inverse(self._by_tag(words))[self.layout.tag]
        table, entry, known = self.lexical_table(smoothing), self.layout.entry, self.layout.known
        backoff = table.backoff.view(-1, self.layout.tags, self.states)[table.source[entry], self.layout.tag]
        return (table.value.view_as(backoff) + table.weight[entry].unsqueeze(1) * backoff) * known

    def _by_tag(self, words: Float64[Tensor, "pairs m"]) -> Float64[Tensor, "tags m"]:
        return words.new_zeros(self.layout.tags, self.states).index_add(0, self.layout.tag, words)

    @property
    def tied(self) -> Float64[Tensor, "pairs m"]:
        """Counts of words, with those of rare words in the profile of their tag."""
        lexical, layout = self.counts.lexical, self.layout
        is_rare = layout.known & (layout.occurrences <= self.rare).unsqueeze(1)
        profile = self._by_tag(lexical * is_rare)
        profile = profile * inverse(profile.sum(1, keepdim=True))
        return torch.where(is_rare, lexical.sum(1, keepdim=True) * profile[layout.tag], lexical)

    def lexical_table(self, smoothing: TagSmoothing | None = None) -> LexicalTable:
        """The smoothed p(word | tag, state) of words, classes and all else."""
        layout, m = self.layout, self.states
        state = layout.tag.unsqueeze(1) * m + torch.arange(m)
        pairs = LexicalPairs(layout.lexicon, layout.entry.repeat_interleave(m), state.flatten(), layout.tags * m)
        table = emissions(*pairs.tags(self.tied.flatten()))
        if smoothing is None:
            return table
        value, backoff = (
            _smoothed(values.unflatten(-1, (-1, m)), smoothing.words, -1).flatten(-2)
            for values in (table.value, table.backoff)
        )
        return replace(table, value=value, backoff=backoff)

    def expect(self, smoothing: TagSmoothing | None = None) -> tuple[float, "TaggedStates"]:
        """The E-step: log p(tags, words), and the same states with their expected counts."""
        inputs = self.parameters(smoothing).map(lambda tensor: tensor.to(self.layout.device).requires_grad_())
        *chain, words = vars(inputs).values()
        found = [torch.zeros_like(tensor) for tensor in vars(inputs).values()]
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.layout.batches:
            leaf = words.detach().index_select(0, batch.pair).requires_grad_()
            log_weight = batch.given.log_weight(inputs.blocks, leaf).sum()
            *gradients, of_leaf = torch.autograd.grad(  # sentences of one word make no step
                log_weight, [*chain, leaf], allow_unused=True, materialize_grads=True
            )
            posterior = leaf.detach() * of_leaf
            for into, gradient, tensor in zip(found[:-1], gradients, chain, strict=True):
                into.addcmul_(gradient, tensor.detach())
            found[-1].index_add_(0, batch.pair, posterior)
            found[-1].index_add_(0, batch.unseen_pair, posterior.index_select(0, batch.unseen))
            total += log_weight.detach().cpu()
        total, *sums = map(processes.sum_over_processes, (total, *found))
        return float(total), replace(self, counts=TagCounts(*(tensor.cpu() for tensor in sums)))

    def figures(self) -> dict[str, float]:
        return {"states": self.layout.tags * self.states}

    def tensors(self) -> dict[str, Tensor]:
        """All there is to it, for checkpoints."""
        return dict(vars(self.counts))

    def with_tensors(self, found: dict[str, Tensor]) -> "TaggedStates":
        """Backwards through `tensors`."""
        return replace(self, counts=TagCounts(**found))

    def grammar(self, smoothing: TagSmoothing | None = None) -> TagChain:
        """What the counts make, with the smoothed lexicon."""
        chain = self.parameters(smoothing).blocks.chain()
        return TagChain(self.layout.corpus.tags, self.states, chain, self.lexical_table(smoothing))


def _smoothed(values: Tensor, weight: float, states: int) -> Tensor:
    """Towards the mean over a dimension of states."""
    return (1 - weight) * values + weight * values.mean(states, keepdim=True)
