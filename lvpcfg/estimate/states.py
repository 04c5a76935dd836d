"""Splitting and merging latent states (Petrov et al. 2006).

States are split in two, with a little noise; after EM the pairs of siblings that are worth least are merged
again. With w the relative frequency of a state, merging i and j loses

    sum over nodes  log[ 1 / (1 - I_i O_i - I_j O_j + ((w_i I_i + w_j I_j) / (w_i + w_j)) (O_i + O_j)) ]

since sum_k I_k O_k = 1 at every node of an observed tree.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lvpcfg.estimate.latent import Counts, Latent, Smoothing
from lvpcfg.grammar.rules import starts_of
from lvpcfg.trees.normalise import TOP

CHUNK = 1 << 22  # numbers handled at once


@dataclass(frozen=True, eq=False)
class Refinement:
    """A treebank with latent states: their expected counts, and where they came from."""

    latent: Latent
    counts: Counts
    hierarchy: Tensor  # [splits, states]: the ancestor of each state before each split, numbered within its symbol

    def split(self, parts: int, noise: float, generator: torch.Generator, remember: bool = True) -> "Refinement":
        """Splits every state into so many parts; the hierarchy remembers it, or begins anew."""
        latent, counts = split(self.latent, self.counts, parts, noise, generator)
        if not remember:
            return Refinement(latent, counts, self.hierarchy.new_zeros(0, len(counts.root)))
        symbol = torch.repeat_interleave(latent.states)
        factor = (latent.states // self.latent.states)[symbol]
        came_from = (torch.arange(len(symbol)) - latent.first[symbol]) // factor
        older = self.hierarchy[:, self.latent.first[symbol] + came_from]
        return Refinement(latent, counts, torch.cat([older, came_from.unsqueeze(0)]))

    def merge(self, fraction: float) -> "Refinement":
        """Merges this fraction of the pairs of states."""
        latent, counts, place = merge(self.latent, self.counts, fraction)
        hierarchy = self.hierarchy.new_empty(len(self.hierarchy), len(counts.root))
        return Refinement(latent, counts, hierarchy.index_copy(1, place, self.hierarchy))  # merged states are siblings

    def expect(self, smoothing: Smoothing | None) -> "tuple[float, Refinement]":
        """One EM iteration: log p(trees), and the same states with their expected counts."""
        log_likelihood, counts = self.latent.expect(self.counts, smoothing)
        return log_likelihood, replace(self, counts=counts)

    def smoothing(self, rules: float, words: float) -> Smoothing:
        """Smoothing within branches: the halves of the first split of a symbol that was not undone."""
        symbol = torch.repeat_interleave(self.latent.states)
        own = torch.arange(len(symbol)) - self.latent.first[symbol]
        branch = torch.zeros_like(own)
        for ancestor in reversed([*self.hierarchy, own]):
            split_then = torch.zeros_like(self.latent.states).scatter_reduce(0, symbol, ancestor, "amax") > 0
            branch = torch.where(split_then[symbol], ancestor, branch)
        return Smoothing(branch, rules, words)


def split(
    latent: Latent, counts: Counts, parts: int, noise: float, generator: torch.Generator
) -> tuple[Latent, Counts]:
    """Every state in so many, but for those of the root; their counts differ by up to the factor exp(noise)."""
    factor = torch.tensor([1 if name == TOP else parts for name in latent.treebank.symbols.names])
    new = latent.with_states(latent.states * factor)

    def disturbed(values: Tensor) -> Tensor:
        for some in values.split(CHUNK):
            some *= torch.exp(noise * torch.rand(len(some), generator=generator, dtype=values.dtype))
        return values

    symbol = torch.repeat_interleave(new.states)
    state = torch.arange(len(symbol)) - new.first[symbol]
    root = counts.root[latent.first[symbol] + state // factor[symbol]] / factor[symbol]
    factors = factor[new.pair_tag][new.pair_of_value]
    lexical = counts.lexical[latent.pair_start[new.pair_of_value] + new.state_in_symbol // factors] / factors
    return new, Counts(root, _split_rules(latent, new, counts.rules), lexical).map(disturbed)


def _split_rules(latent: Latent, new: Latent, rules: Tensor) -> Tensor:
    """What each number of `rules` is split into, in equal parts."""
    old_starts, starts = starts_of(latent.sizes.prod(1)), starts_of(new.sizes.prod(1))
    parts = rules.new_empty(int(starts[-1]))
    shapes, shape_of = torch.cat([latent.sizes, new.sizes], 1).unique(dim=0, return_inverse=True)
    for number, (x, y, z, *sizes) in enumerate(shapes.tolist()):
        volume, i, j, k = math.prod(sizes), sizes[0] // x, sizes[1] // y, sizes[2] // z
        for some in (shape_of == number).nonzero().split(max(1, CHUNK // volume)):
            old = rules[old_starts[some] + torch.arange(x * y * z)].view(-1, x, 1, y, 1, z, 1)
            parts[starts[some] + torch.arange(volume)] = (old / (i * j * k)).expand(-1, x, i, y, j, z, k).flatten(1)
    return parts


def merge_losses(latent: Latent, counts: Counts) -> tuple[Tensor, Tensor]:
    """[symbols, pairs]: what merging the states 2k and 2k + 1 of a symbol would lose; and which pairs there are."""
    alpha, beta = latent.posteriors(latent.parameters(counts))
    symbol = latent.treebank.symbol.to(latent.device)
    alpha, beta = (torch.nn.functional.pad(tensor, (0, tensor.shape[1] % 2)) for tensor in (alpha, beta))
    frequency = alpha.new_zeros(len(latent.states), alpha.shape[1], dtype=torch.float64)
    frequency.index_add_(0, symbol, (alpha * beta).double())
    w = (frequency / frequency.unflatten(1, (-1, 2)).sum(2).clamp_min(1e-300).repeat_interleave(2, 1)).to(alpha.dtype)
    both = (alpha * beta).unflatten(1, (-1, 2)).sum(2)
    merged = (w[symbol] * alpha).unflatten(1, (-1, 2)).sum(2) * beta.unflatten(1, (-1, 2)).sum(2)
    loss = -torch.log((1 - both + merged).clamp_min(1e-30)).double()
    losses = loss.new_zeros(len(latent.states), loss.shape[1]).index_add_(0, symbol, loss).cpu()
    return losses, 2 * torch.arange(losses.shape[1]) + 1 < latent.states.unsqueeze(1)


def merge(latent: Latent, counts: Counts, fraction: float) -> tuple[Latent, Counts, Tensor]:
    """Merges this fraction of all pairs, those worth least; also the place of each old state among the new ones."""
    losses, exists = merge_losses(latent, counts)
    order = torch.where(exists, losses, torch.inf).flatten().argsort(stable=True)
    chosen = torch.zeros(losses.numel(), dtype=torch.bool)
    chosen[order[: int(fraction * int(exists.sum()))]] = True
    merged = torch.zeros(len(losses), 2 * losses.shape[1], dtype=torch.int64)
    merged[:, 1::2] = chosen.view_as(losses)  # the second of a pair moves to the first
    number = torch.arange(merged.shape[1]) - merged.cumsum(1)  # [symbols, states]
    new = latent.with_states(latent.states - chosen.view_as(losses).sum(1))

    rule, states = _coordinates(latent)
    symbols = latent.rules[rule]
    states = torch.where(symbols < 0, 0, number[symbols, states])
    rules = counts.rules.new_zeros(int(new.sizes.prod(1).sum())).index_add(0, _places(new, rule, states), counts.rules)
    symbol = torch.repeat_interleave(latent.states)
    state = number[symbol, torch.arange(len(symbol)) - latent.first[symbol]]
    root = counts.root.new_zeros(int(new.first[-1])).index_add(0, new.first[symbol] + state, counts.root)
    tag = latent.pair_tag[latent.pair_of_value]
    place = new.pair_start[latent.pair_of_value] + number[tag, latent.state_in_symbol]
    lexical = counts.lexical.new_zeros(len(new.pair_of_value)).index_add(0, place, counts.lexical)
    return new, Counts(root, rules, lexical), new.first[symbol] + state


def _coordinates(latent: Latent) -> tuple[Tensor, Tensor]:
    """The rule of each number of `Counts.rules`, and its states [numbers, 3]."""
    volume = latent.sizes.prod(1)
    rule = torch.repeat_interleave(volume)
    within = torch.arange(len(rule)) - starts_of(volume)[rule]
    _, y, z = latent.sizes[rule].unbind(1)
    return rule, torch.stack([within // (y * z), within // z % y, within % z], 1)


def _places(latent: Latent, rule: Tensor, states: Tensor) -> Tensor:
    """Where they stand in `Counts.rules`."""
    _, my, mz = latent.sizes[rule].unbind(1)
    x, y, z = states.unbind(1)
    return starts_of(latent.sizes.prod(1))[rule] + (x * my + y) * mz + z
