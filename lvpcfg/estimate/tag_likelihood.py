"""The likelihood of tags under a chain as a module, for gradient descent (LVG-D of Zhao, Zhang & Tu 2018).

    conditional   log p(tags | words) = log w(tags, words) - log Z(words)
    joint         log p(tags, words)  = log w(tags, words)

The numerator goes through the states of the given tags, the denominator through all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from lvpcfg import processes
from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Step, TaggingTask
from lvpcfg.estimate.gaussian import GaussianOptions
from lvpcfg.estimate.gradient import CHARACTERS, CONDITIONAL, LOGITS, GradientOptions
from lvpcfg.estimate.gradient_descent import random_batches
from lvpcfg.estimate.start import made_of
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.fast import log_partition
from lvpcfg.sequence.given import Blocks, GivenTags
from lvpcfg.sequence.tagging import TagChain, TaggingModel
from lvpcfg.trees.spelling import CharacterNetwork, Tokens


class TagLayer(nn.Module):
    """A chain over the states of tags whose numbers are exp of parameters; with `logits`, divided by their sums."""

    def __init__(self, grammar: TagChain, parametrisation: str) -> None:
        super().__init__()
        self.start, self.parametrisation = grammar, parametrisation
        initial, transition, final = (nn.Parameter(tensor.log()) for tensor in grammar.chain.tensors)
        self.initial, self.transition, self.final = initial, transition, final
        self.words = nn.Parameter(grammar.lexical.value.log())
        self.unknown_words = nn.Parameter(grammar.lexical.backoff.log())
        network = grammar.lexical.network
        tensors = {} if network is None else network.tensors
        self.characters = nn.ParameterDict({name: tensor.clone() for name, tensor in tensors.items()})

    def grammar(self) -> TagChain:
        """With the parameters as they are; differentiable by them."""
        start = self.start
        initial, transition, final = self.initial.exp(), self.transition.exp(), self.final.exp()
        lexical, network = start.lexical, start.lexical.network
        if network is not None:
            network = network.with_tensors(dict(self.characters))
        value, backoff = self.words.exp(), self.unknown_words.exp()
        lexical = replace(lexical, value=value, backoff=backoff, network=network)
        if self.parametrisation == LOGITS:
            going_on = transition.sum(1) + final
            initial, transition, final = initial / initial.sum(), transition / going_on.unsqueeze(1), final / going_on
            lexical = lexical.scale(torch.ones_like(lexical.weight), 1 / lexical.column_sums())
        return replace(start, chain=Chain(initial, (transition,), final), lexical=lexical)


@dataclass(frozen=True, eq=False)
class TagBatch:
    """Sentences of one update."""

    sentences: int  # in all processes
    words: int
    place: Tensor  # [tokens here]: among those of all processes
    tokens: Tokens  # [tokens here]
    unknown: Tensor  # [tokens here]: entries of the words, if they were unknown
    once: Tensor  # [tokens here]: whether a word occurs once, and may be taken for an unknown one
    lengths: Tensor  # [sentences here]
    padded: Tensor  # [tokens here]: their places among [sentences here, longest]
    given: GivenTags | None


class TagLikelihood:
    """Tagged sentences, joint with their words or given them."""

    start, at_start = Step("start", "start", "always"), dict[str, float]()

    def __init__(self, options: GradientOptions | GaussianOptions, task: TaggingTask) -> None:
        self.options, self.task = options, task
        self.made_of = task.made_of(options)
        grammar = self._fresh() if options.init is None else self._taken_up(options.init)
        if options.lexicon == CHARACTERS and grammar.lexical.network is None:
            generator = torch.Generator().manual_seed(task.seed)
            states = len(grammar.chain.initial)
            network = CharacterNetwork.new(len(task.layout.lexicon.alphabet), states, generator)
            grammar = replace(grammar, lexical=replace(grammar.lexical, network=network))
        self.module = self._layer(grammar.to("cpu", torch.float32)).to(task.device)
        self.members = random_batches(*options.batch(task.corpus.lengths.tolist()), task.seed)

    @property
    def figure(self) -> str:
        return self.options.figure

    @property
    def updates(self) -> int:
        return len(self.members)

    def _layer(self, grammar: TagChain) -> TagLayer:
        return TagLayer(grammar, str(self.options.parametrisation))

    def _fresh(self) -> TagChain:
        """Relative frequencies; with several states for each tag, counts with noise."""
        options = self.options
        assert isinstance(options, GradientOptions)
        generator = torch.Generator().manual_seed(self.task.seed)
        states = self.task.refinement(rare=0).split(options.states, options.descent.noise, generator)
        return states.grammar()

    def _taken_up(self, init: str) -> TagChain:
        model = TaggingModel.load(init)
        self.made_of |= made_of(init)
        if model.grammar.tags != self.task.corpus.tags or model.lexicon != self.task.layout.lexicon:
            raise InputError(
                f"the model in {show(init, 200)} has other tags or words than the sentences: expected one that was "
                "trained on these sentences."
            )
        return model.grammar

    @cached_property
    def batches(self) -> list[TagBatch]:
        return [self._batch(members) for members in self.members]

    def _batch(self, members: Sequence[int]) -> TagBatch:
        corpus, lexicon = self.task.corpus, self.task.layout.lexicon
        lengths = corpus.lengths[torch.tensor(members)]
        mine = torch.tensor(processes.share(range(len(members))), dtype=torch.int64)
        here, first = lengths[mine], (lengths.cumsum(0) - lengths)[mine]
        place = torch.arange(int(here.sum())) + (first - (here.cumsum(0) - here)).repeat_interleave(here)
        begins = corpus.first[torch.tensor(members)]
        token = torch.arange(int(lengths.sum())) + (begins - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        token = token[place]
        words, is_first = [corpus.words[word] for word in corpus.word[token].tolist()], corpus.place[token] == 0
        unknown = [lexicon.unknown(word, first) for word, first in zip(words, is_first.tolist(), strict=True)]
        ends = [0, *here.cumsum(0).tolist()]
        tokens = lexicon.tokens(words[begin:end] for begin, end in pairwise(ends))
        device, longest = self.task.device, int(here.max()) if len(here) else 0
        return TagBatch(
            sentences=len(members),
            words=int(lengths.sum()),
            place=place,
            tokens=tokens.to(device),
            unknown=torch.tensor(unknown, dtype=torch.int64, device=device),
            once=(self.occurrences[corpus.word[token]] == 1).to(device),
            lengths=here,
            padded=(corpus.place[token] + longest * torch.arange(len(here)).repeat_interleave(here)).to(device),
            given=GivenTags(corpus.tag[token].to(device), here, len(corpus.tags)) if len(here) else None,
        )

    @cached_property
    def occurrences(self) -> Tensor:
        return torch.bincount(self.task.corpus.word)

    def log_likelihood(self, batch: TagBatch, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(batch.words, generator=generator)  # the same in all processes
        if batch.given is None:
            return torch.zeros(0)
        drawn = drawn[batch.place].to(batch.once.device)
        entries = torch.where(batch.once & (drawn < self.options.unknown), batch.unknown, batch.tokens.entries)
        grammar = self.module.grammar()
        words = grammar.lexical.values_of(replace(batch.tokens, entries=entries))  # [tokens, states]
        tags, m = len(grammar.tags), grammar.states
        given = batch.given
        tag = torch.empty_like(given.tag).index_copy_(0, given.token, given.tag)
        own = words.view(-1, tags, m)[torch.arange(len(tag), device=tag.device), tag]
        weight = given.log_weight(Blocks.of(grammar.chain, tags), own)
        if self.options.objective != CONDITIONAL:
            return weight
        shape = len(batch.lengths), int(batch.lengths.max()), len(grammar.chain.initial)
        padded = words.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, batch.padded, words).view(shape)
        return weight - log_partition(grammar.chain, padded, batch.lengths)

    def measure(self) -> dict[str, float]:
        return {}

    def figures(self) -> dict[str, float]:
        return {"states": len(self.module.initial)}

    def model(self, done: int) -> TaggingModel:
        with torch.no_grad():
            grammar = self.module.grammar()
        return self.task.model(self.options, done, grammar.to("cpu"))
