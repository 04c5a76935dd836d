"""Splitting and merging latent states (Petrov et al. 2006).

States are split in two, with a little noise; after EM the least useful pairs of siblings are merged
again. With w the relative frequency of a state, merging i and j loses

    sum over nodes  log[ 1 / (1 - I_i O_i - I_j O_j + ((w_i I_i + w_j I_j) / (w_i + w_j)) (O_i + O_j)) ]

since sum_k I_k O_k = 1 at every node of an observed tree. What chooses and numbers pairs here serves the terms of rules
in CP form too (`terms.py`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from lvpcfg import processes
from lvpcfg.estimate.latent import Counts, Latent, Observed, Smoothing
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.trees.normalise import TOP

CHUNK = 1 << 22  # numbers handled at once


@dataclass(frozen=True, eq=False)
class Refinement:
    """A treebank with latent states: their expected counts, and where they came from."""

    latent: Latent
    counts: Counts
    hierarchy: Tensor  # [splits, states]: the ancestor of each state before each split, numbered within its symbol

    @staticmethod
    def of(observed: Observed, rare: int) -> "Refinement":
        """The treebank as it stands, one state for each symbol."""
        counts = observed.counts
        return Refinement(observed.latent.with_rare(rare), counts, torch.zeros(0, len(counts.root), dtype=torch.int64))

    def split(
        self,
        parts: int,
        noise: float,
        generator: torch.Generator,
        remember: bool = True,
        parts_of_tags: int | None = None,
    ) -> "Refinement":
        """Splits every state into so many parts; the hierarchy remembers it, or begins anew."""
        latent, counts = split(self.latent, self.counts, parts, noise, generator, parts_of_tags)
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

    def figures(self) -> dict[str, float]:
        """States, and how many numbers of binary and unary rules are not zero."""
        numbers = (self.counts.unary, *self.counts.binary.tensors.values())
        rules = sum(int(tensor.count_nonzero()) for tensor in numbers)
        return {"states": int(self.latent.states.sum()), "rules": rules}

    def grammar(self, smoothing: Smoothing | None) -> Grammar:
        """What the counts make."""
        return self.latent.grammar(self.counts, smoothing, self.hierarchy)

    def tensors(self) -> dict[str, Tensor]:
        """All there is to it, for checkpoints."""
        counts = self.counts
        found = {"root": counts.root, "unary": counts.unary, "lexical": counts.lexical, "hierarchy": self.hierarchy}
        return found | {"states": self.latent.states} | {f"binary.{n}": t for n, t in counts.binary.saved().items()}

    def with_tensors(self, found: dict[str, Tensor]) -> "Refinement":
        """Backwards through `tensors`."""
        old = self.counts.binary
        fields = {name: found[f"binary.{name}"] for name in old.saved()}
        binary = replace(old, **dict[str, Any](fields, state_counts=tuple(found["states"].tolist())))
        counts = Counts(found["root"], binary, found["unary"], found["lexical"])
        return Refinement(self.latent.over(binary), counts, found["hierarchy"])

    def smoothing(self, rules: float, words: float) -> Smoothing:
        """Smoothing within branches: the halves of the first split of a symbol that was not undone. States that no
        split has made are all of one branch."""
        symbol = torch.repeat_interleave(self.latent.states)
        own = torch.arange(len(symbol)) - self.latent.first[symbol]
        branch = torch.zeros_like(own)
        if not len(self.hierarchy):
            return Smoothing(branch, rules, words)
        for ancestor in reversed([*self.hierarchy, own]):
            split_then = torch.zeros_like(self.latent.states).scatter_reduce(0, symbol, ancestor, "amax") > 0
            branch = torch.where(split_then[symbol], ancestor, branch)
        return Smoothing(branch, rules, words)


def split(
    latent: Latent,
    counts: Counts,
    parts: int,
    noise: float,
    generator: torch.Generator,
    parts_of_tags: int | None = None,
) -> tuple[Latent, Counts]:
    """Every state in so many, but for those of the root; their counts differ by up to the factor exp(noise)."""
    symbols, of_tags = latent.treebank.symbols, parts if parts_of_tags is None else parts_of_tags
    phrases = [1 if name == TOP else parts for name in symbols.interminals]
    factor = torch.tensor(phrases + [of_tags] * len(symbols.preterminals))
    old, new = (torch.arange(int(states.max())) for states in (latent.states, latent.states * factor))
    came_from = new // factor.unsqueeze(1)  # [symbols, new states]
    basis = (came_from.unsqueeze(1) == old.unsqueeze(1)).double() / factor.view(-1, 1, 1)
    new_latent, counts = latent.transformed(counts, latent.states * factor, basis)
    return new_latent, counts.map(lambda values: disturbed(values, noise, generator))


def disturbed(values: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """`values`, each times exp of a random number up to `noise`."""
    for some in values.view(-1).split(CHUNK):
        some *= torch.exp(noise * torch.rand(len(some), generator=generator, dtype=values.dtype))
    return values


def merge_losses(latent: Latent, counts: Counts) -> tuple[Tensor, Tensor]:
    """[symbols, pairs]: what merging the states 2k and 2k + 1 of a symbol would lose; and which pairs there are."""
    alpha, beta = latent.posteriors(latent.parameters(counts))
    symbol = latent.treebank.symbol.to(latent.device)
    alpha, beta = (torch.nn.functional.pad(tensor, (0, tensor.shape[1] % 2)) for tensor in (alpha, beta))
    frequency = alpha.new_zeros(len(latent.states), alpha.shape[1], dtype=torch.float64)
    frequency.index_add_(0, symbol, (alpha * beta).double())
    frequency = processes.sum_over_processes(frequency)
    loss = losses_of_nodes(alpha, beta, share_in_pair(frequency).to(alpha.dtype)[symbol])
    losses = loss.new_zeros(len(latent.states), loss.shape[1]).index_add_(0, symbol, loss)
    losses = processes.sum_over_processes(losses).cpu()
    return losses, 2 * torch.arange(losses.shape[1]) + 1 < latent.states.unsqueeze(1)


def share_in_pair(frequency: Float64[Tensor, "_ twice_pairs"]) -> Float64[Tensor, "_ twice_pairs"]:
    """w_i / (w_i + w_j) of the two in each pair."""
    return frequency / frequency.unflatten(1, (-1, 2)).sum(2).clamp_min(1e-300).repeat_interleave(2, 1)


def losses_of_nodes(
    inside: Float[Tensor, "nodes twice_pairs"],
    outside: Float[Tensor, "nodes twice_pairs"],
    share: Float[Tensor, "_ twice_pairs"],
) -> Float64[Tensor, "nodes pairs"]:
    """What merging each pair would lose at each node; the products of I and O sum to 1 at a node."""
    both = (inside * outside).unflatten(1, (-1, 2)).sum(2)
    merged = (share * inside).unflatten(1, (-1, 2)).sum(2) * outside.unflatten(1, (-1, 2)).sum(2)
    return -torch.log((1 - both + merged).clamp_min(1e-30)).double()


def merge(latent: Latent, counts: Counts, fraction: float) -> tuple[Latent, Counts, Tensor]:
    """Merges this fraction of all pairs, those worth least; also the place of each old state among the new ones."""
    losses, exists = merge_losses(latent, counts)
    chosen = least(losses, exists, fraction)
    alive = torch.arange(2 * chosen.shape[1]) < latent.states.unsqueeze(1)
    number = after_merging(chosen, alive)  # [symbols, states]
    widest = int(latent.states.max())
    basis = torch.nn.functional.one_hot(number[:, :widest], widest).double()
    new, counts = latent.transformed(counts, latent.states - chosen.sum(1), basis)
    symbol = torch.repeat_interleave(latent.states)
    state = torch.arange(len(symbol)) - latent.first[symbol]
    return new, counts, new.first[symbol] + number[symbol, state]


def least(
    losses: Float64[Tensor, "_ pairs"], exists: Bool[Tensor, "_ pairs"], fraction: float
) -> Bool[Tensor, "_ pairs"]:
    """This fraction of all pairs that exist: those with the least loss."""
    order = torch.where(exists, losses, torch.inf).flatten().argsort(stable=True)
    chosen = torch.zeros(losses.numel(), dtype=torch.bool)
    chosen[order[: int(fraction * int(exists.sum()))]] = True
    return chosen.view_as(losses)


def after_merging(
    chosen: Bool[Tensor, "_ pairs"], alive: Bool[Tensor, "_ twice_pairs"]
) -> Int64[Tensor, "_ twice_pairs"]:
    """The new numbers where the second of each chosen pair 2k, 2k + 1 moves to the first, and what is not alive goes:
    the number that stands for it means nothing."""
    kept = alive.clone()
    kept[:, 1::2] &= ~(chosen & alive[:, ::2])
    return (kept.cumsum(1) - 1).clamp_min(0)
