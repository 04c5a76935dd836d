"""Taggers of Gaussian mixtures (GM-LVeG on chains, Zhao, Zhang & Tu 2018), tied.

A sentence is read by rules t -> w t', the tag of a word, the word, and the rest of the sentence, which begins with the
tag t'. With vectors x of t and y of t'

    W(x, y) = sum over Gaussians i of t and j of t' of q_w[i] A[i, j] N_i(x) N_j(y)

As in grammars (`grammar/gaussian.py`) the rest of a sentence is a sum of the Gaussians of its first tag. So the tagger
is a chain whose states are Gaussians and whose transition is A G, with G the overlaps of the Gaussians of a tag. The
beginning is pi G, and the end, a rule without y, has a weight for each Gaussian.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lvpcfg.estimate.estimator import TaggingTask
from lvpcfg.estimate.gaussian import DISTURBED, GaussianOptions
from lvpcfg.estimate.gaussian_start import Shape, near, places
from lvpcfg.estimate.gradient import LOG_WEIGHTS
from lvpcfg.estimate.tag_likelihood import TagLayer, TagLikelihood
from lvpcfg.grammar.gaussian import overlaps
from lvpcfg.sequence.tagging import TagChain


class GaussianTagLayer(TagLayer):
    """A chain over Gaussians, with means and log sigmas among its parameters."""

    def __init__(self, grammar: TagChain, mu: Float[Tensor, "states d"], log_sigma: Float[Tensor, "states _"]) -> None:
        super().__init__(grammar, LOG_WEIGHTS)
        self.mu, self.log_sigma = nn.Parameter(mu), nn.Parameter(log_sigma)
        with torch.no_grad():  # each Gaussian sees a mean of those it overlaps with, so that the start stays what it is
            sums = self.overlaps().sum(0).log()
            self.initial.sub_(sums)
            self.transition.sub_(sums)

    def overlaps(self) -> Float[Tensor, "states states"]:
        """G of all tags, zero between tags."""
        shape = len(self.start.tags), self.start.states
        mu, log_sigma = self.mu.unflatten(0, shape), self.log_sigma.unflatten(0, shape)
        others = (column.repeat_interleave(self.start.states, 0) for column in (mu, log_sigma))
        return torch.block_diag(*overlaps(self.mu, self.log_sigma, *others).unflatten(0, shape))

    def grammar(self) -> TagChain:
        grammar, g = super().grammar(), self.overlaps()
        assert grammar.chain.final is not None
        tensors = [grammar.chain.initial @ g, grammar.chain.transition @ g, grammar.chain.final]
        return replace(grammar, chain=grammar.chain.with_tensors(tensors))


class GaussianTags(TagLikelihood):
    """Log p(tags | words) of such a tagger."""

    def __init__(self, options: GaussianOptions, task: TaggingTask) -> None:
        self.gaussians = options
        super().__init__(options, task)

    def _fresh(self) -> TagChain:
        generator = torch.Generator().manual_seed(self.task.seed)
        return self.task.refinement(rare=0).split(self.gaussians.lexical, DISTURBED, generator).grammar()

    def _layer(self, grammar: TagChain) -> TagLayer:
        options, generator = self.gaussians, torch.Generator().manual_seed(self.task.seed)
        states = torch.full((len(grammar.tags),), grammar.states)
        _, log_sigma = Shape.of(options).standard(len(grammar.chain.initial), torch.float32)
        mu = near(places(states, options.dimension, options.apart, torch.float32), options.noise, generator)
        return GaussianTagLayer(grammar, mu, log_sigma)
