"""Tagged sentences under a chain whose states belong to tags, m to each: the weight of the words with these tags.

    alpha_1 = initial[a_1] * words_1
    alpha_t = (alpha_{t-1} T[a_{t-1}, a_t]) * words_t        m numbers for each word, whatever the number of tags
    weight  = sum over states of alpha_n * final[a_n]

It is the forward recursion of `fast.py` on blocks of the chain. Scores are divided by their sum at each word, a
constant to the derivative, which is then a sum of products: expected counts are never below zero.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.fast import Places


@dataclass(frozen=True, eq=False)
class Blocks:
    """A chain, tag by tag."""

    initial: Float[Tensor, "tags m"]
    transition: Float[Tensor, "tags m tags m"]
    final: Float[Tensor, "tags m"]

    @staticmethod
    def of(chain: Chain, tags: int) -> "Blocks":
        assert chain.final is not None
        shape = (tags, len(chain.initial) // tags)
        return Blocks(chain.initial.view(shape), chain.transition.view(*shape, *shape), chain.final.view(shape))

    def chain(self) -> Chain:
        states = self.initial.numel()
        return Chain(self.initial.flatten(), (self.transition.reshape(states, states),), self.final.flatten())


class GivenTags:
    """The tags of some sentences, as the recursion goes through them."""

    def __init__(self, tag: Int[Tensor, "tokens"], lengths: Int[Tensor, "batch"], tags: int) -> None:
        """`tag` has those of all sentences, one sentence after the other; `tags` is how many there are."""
        longest = int(lengths.max())
        self.places = places = Places(longest, len(lengths), lengths, tag.device)
        first = (lengths.cumsum(0) - lengths).to(tag.device)
        self.token = first[places.sentence] + places.words % longest  # in the order of `places`
        self.tag = tag[self.token]
        pair = self.tag[places.before] * tags + self.tag[places.active[0] :]
        self.pairs = [pair[:0], *pair.split(places.active[1:])]  # of tags before each word and of it

    def log_weight(self, blocks: Blocks, words: Float[Tensor, "tokens m"]) -> Float64[Tensor, "batch"]:
        """Of each sentence; `words` is what each token is worth to the states of its tag. Differentiable."""
        places, words = self.places, words.index_select(0, self.token)
        tags, m = blocks.initial.shape
        between = blocks.transition.transpose(1, 2).reshape(tags * tags, m, m)
        alpha = blocks.initial.index_select(0, self.tag[: places.active[0]])
        alphas, sums = list[Tensor](), list[Tensor]()
        for word, pair in zip(words.split(places.active), self.pairs, strict=True):
            if alphas:
                alpha = torch.bmm(alpha[: len(word)].unsqueeze(1), between.index_select(0, pair)).squeeze(1)
            alpha = alpha * word
            sums.append(alpha.detach().sum(1, keepdim=True))  # a constant: the weight does not depend on it
            alpha = alpha / sums[-1]
            alphas.append(alpha)
        logs = torch.cat(sums).squeeze(1).double().log()
        total = logs.new_zeros(len(places.last)).index_add(0, places.sentence, logs)
        final = blocks.final.index_select(0, self.tag[places.last])
        return total + (torch.cat(alphas).index_select(0, places.last) * final).sum(1).double().log()
