"""A treebank whose symbols have latent states: expected counts, and the grammar they make.

    E-step   c(rule, states) = t * d log p(trees) / d t        (by autograd, on the observed trees)
    M-step   t(a -> b c, h2, h3 | h1, a) = c(a -> b c, h1, h2, h3) / c(a, h1)

All that training knows is its expected counts, in float64: parameters are made of them, and splitting and
merging states splits and merges counts.

Words that occur at most `rare` times share one profile over the states of a tag, that of all such words together
(Petrov & Klein 2007 take it from unseen words): q(s -> x) = q(s -> rare) p(x | tag, rare). That is a model like any
other, so EM with it is EM.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lvpcfg.chart.forest.forest import Forest, Plan, log_likelihood
from lvpcfg.chart.forest.tiles import Tensors
from lvpcfg.decompose.coarse import covered
from lvpcfg.estimate.observed import observed_forest
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import starts_of
from lvpcfg.trees.lexicon import LexicalPairs, LexicalTable, Lexicon, UnseenSample, build_lexicon, emissions
from lvpcfg.trees.treebank import Treebank

ROWS = 1 << 10  # of rules, handled at once


@dataclass(frozen=True, eq=False)
class Counts:
    """Expected counts of everything in a grammar, or its parameters; float64."""

    root: Tensor  # [states]
    rules: Tensor  # of all binary rules and then all unary rules, end to end
    lexical: Tensor  # in the layout of `LexicalPairs`: of words, and of the classes of unknown words

    def map(self, function: Callable[[Tensor], Tensor]) -> "Counts":
        return Counts(function(self.root), function(self.rules), function(self.lexical))


@dataclass(frozen=True, eq=False)
class Smoothing:
    """p'_x = (1 - w) p_x + w * the mean over the states that have the branch of x."""

    branch: Tensor  # [states]: within its symbol
    rules: float  # w of rules
    words: float  # w of words


class Latent:
    """A treebank under given numbers of states: the layout of its counts, and EM's two steps."""

    def __init__(
        self,
        treebank: Treebank,
        lexicon: Lexicon,
        unseen: UnseenSample,
        states: Tensor,
        rare: int,
        forest: Forest,
    ) -> None:
        self.treebank, self.lexicon, self.unseen, self.states, self.rare = treebank, lexicon, unseen, states, rare
        self.forest, self.device = forest, forest.rule.device
        self.first, self.inner = starts_of(states), len(treebank.symbols.interminals)
        self.tag_of_state = torch.repeat_interleave(states[self.inner :])  # among preterminals
        self._lay_out_rules()
        self._lay_out_words()

    def _lay_out_rules(self) -> None:
        binary, unary = self.treebank.binary_rules, self.treebank.unary_rules
        self.rules = torch.cat([binary, torch.nn.functional.pad(unary, (0, 1), value=-1)])  # -1: no child
        self.sizes = torch.where(self.rules < 0, 1, self.states[self.rules])
        self.binary_size = int(self.sizes[: len(binary)].prod(1).sum())
        parents = self.sizes[:, 0]
        self.row_rule = torch.repeat_interleave(parents)  # a row is a rule and a state of its parent
        state = torch.arange(len(self.row_rule)) - starts_of(parents)[self.row_rule]
        self.row_state = self.first[self.rules[self.row_rule, 0]] + state
        self.row_length = self.sizes[:, 1:].prod(1)[self.row_rule]

    def _lay_out_words(self) -> None:
        """Pairs of an entry and a tag, entry by entry: words of the trees, then classes of unknown words."""
        treebank, symbols = self.treebank, len(self.states)
        tag = torch.cat([treebank.lexical_rules[:, 0], treebank.symbol[self.unseen.node]])
        entry = torch.cat([treebank.lexical_rules[:, 1], self.unseen.entry])
        key, pair = torch.unique(entry * symbols + tag, return_inverse=True)
        self.pair_tag, pair_entry = key % symbols, key // symbols
        sizes = self.states[self.pair_tag]
        self.pair_start, self.pair_of_value = starts_of(sizes), torch.repeat_interleave(sizes)
        self.state_in_symbol = torch.arange(len(self.pair_of_value)) - self.pair_start[self.pair_of_value]
        first = self.first - self.first[self.inner]
        self.pairs = LexicalPairs(
            lexicon=self.lexicon,
            entry=pair_entry[self.pair_of_value],
            state=first[self.pair_tag[self.pair_of_value]] + self.state_in_symbol,
            states=int(first[-1]),
        )
        self.known = self.pairs.entry < len(self.lexicon.words)
        leaves = treebank.rule[treebank.is_lexical]
        place = torch.arange(int(self.states.max()))
        inside = place < sizes.unsqueeze(1)
        self.places = torch.where(inside, self.pair_start[:-1].unsqueeze(1) + place, len(self.pair_of_value))
        self.leaf_places = self.places[pair[leaves]].to(self.device)  # [words of the treebank, states]
        self.unseen_places = self.places[pair[len(treebank.lexical_rules) :]].to(self.device)
        occurrences = torch.bincount(treebank.lexical_rules[leaves, 1], minlength=len(self.lexicon))
        self.is_rare = self.known & (occurrences <= self.rare)[self.pairs.entry]
        is_leaf = treebank.is_lexical.long().cumsum(0) - 1
        self.unseen_leaf = is_leaf[self.unseen.node].to(self.device)

    @cached_property
    def plan(self) -> Plan:
        root = torch.stack([torch.ones_like(self.states), self.states, torch.ones_like(self.states)], 1)
        return Plan(self.forest, torch.cat([self.sizes, root]))

    def with_states(self, states: Tensor) -> "Latent":
        return Latent(self.treebank, self.lexicon, self.unseen, states, self.rare, self.forest)

    def with_rare(self, rare: int) -> "Latent":
        return Latent(self.treebank, self.lexicon, self.unseen, self.states, rare, self.forest)

    def parameters(self, counts: Counts, smoothing: Smoothing | None = None) -> Counts:
        """The M-step. Lexical parameters are those of words alone, relative frequencies where nothing is smoothed."""
        sums = counts.rules  # of a grammar without rules
        if len(sums):
            sums = torch.segment_reduce(counts.rules, "sum", lengths=self.row_length)
        total = torch.zeros_like(counts.root).index_add(0, self.row_state, sums)
        rules = self._scaled(counts.rules, _inverse(total)[self.row_state])
        root = counts.root / counts.root.sum()
        if smoothing is None:
            words = self.tied(counts.lexical) * self.known
            total = words.new_zeros(self.pairs.states).index_add(0, self.pairs.state, words)
            return Counts(root, rules, words * _inverse(total)[self.pairs.state])
        table = self.lexical_table(counts, smoothing)
        words = (
            table.value
            + table.weight[self.pairs.entry] * table.backoff[table.source[self.pairs.entry], self.pairs.state]
        )
        return Counts(root, self._smooth_rules(rules, smoothing), words * self.known)

    def _scaled(self, rules: Tensor, factor: Tensor) -> Tensor:
        """The numbers of each row times its factor, some rows at a time: beside the numbers there is little room."""
        scaled, begin = torch.empty_like(rules), 0
        for factors, lengths in zip(factor.split(ROWS), self.row_length.split(ROWS), strict=True):
            end = begin + int(lengths.sum())
            torch.mul(rules[begin:end], torch.repeat_interleave(factors, lengths), out=scaled[begin:end])
            begin = end
        return scaled

    def tied(self, lexical: Tensor) -> Tensor:
        """Counts with those of rare words in the profile of their tag."""
        profile = lexical.new_zeros(self.pairs.states).index_add(0, self.pairs.state, lexical * self.is_rare)
        tags = profile.new_zeros(len(self.states) - self.inner).index_add(0, self.tag_of_state, profile)
        profile = profile * _inverse(tags)[self.tag_of_state]
        pairs = lexical.new_zeros(len(self.pair_tag)).index_add(0, self.pair_of_value, lexical)
        return torch.where(self.is_rare, pairs[self.pair_of_value] * profile[self.pairs.state], lexical)

    def lexical_table(self, counts: Counts, smoothing: Smoothing | None) -> LexicalTable:
        """The smoothed q(s -> x) of words, classes and all else."""
        table = emissions(*self.pairs.tags(self.tied(counts.lexical)))
        if smoothing is None:
            return table
        matrix = self._matrix(smoothing.branch, smoothing.words)
        values = torch.cat([table.value, table.value.new_zeros(1)])[self.places].unsqueeze(-1)  # [pairs, states, 1]
        values = torch.bmm(matrix[self.pair_tag], values).squeeze(-1)
        inside = torch.arange(matrix.shape[-1]) < self.states[self.inner :].unsqueeze(1)
        padded = table.backoff.new_zeros(len(table.backoff), *inside.shape)  # [sources, tags, states]
        padded[:, inside] = table.backoff
        backoff = torch.einsum("tij,btj->bti", matrix[self.inner :], padded)[:, inside]
        return replace(table, value=values[self.places < len(table.value)], backoff=backoff)

    def _smooth_rules(self, rules: Tensor, smoothing: Smoothing) -> Tensor:
        matrix = self._matrix(smoothing.branch, smoothing.rules).to(self.device)
        # The root rules of the plan, whose parent has one state, are left as they are.
        parent = torch.nn.functional.pad(self.rules[:, 0], (0, len(self.states)), value=-1).to(self.device)
        matrix = torch.cat([matrix, torch.eye(matrix.shape[1], dtype=matrix.dtype, device=self.device).unsqueeze(0)])
        all_rules = torch.nn.functional.pad(rules.to(self.device), (0, int(self.first[-1])))
        weights = self.plan.weights(all_rules, rules.dtype)
        for numbers, some in zip(self.plan.rules, weights, strict=True):
            assert isinstance(some, Tensors)
            x = some.values.shape[1]
            some.values.copy_(torch.bmm(matrix[parent[numbers], :x, :x], some.values))
        return self.plan.flat(weights)[: len(rules)].cpu()

    def _matrix(self, branch: Tensor, weight: float) -> Tensor:
        """[symbols, states, states]: from parameters to smoothed ones."""
        widest = int(self.states.max())
        inside = torch.arange(widest) < self.states.unsqueeze(1)  # [symbols, states]
        branches = torch.full(inside.shape, -1).masked_scatter(inside, branch)
        same = (branches.unsqueeze(2) == branches.unsqueeze(1)).double()
        return (1 - weight) * torch.eye(widest, dtype=torch.float64) + weight * same / same.sum(2, keepdim=True)

    def expect(self, counts: Counts, smoothing: Smoothing | None = None) -> tuple[float, Counts]:
        """The E-step: log p(trees) and the expected counts under the parameters that `counts` make."""
        rules, leaf = self._inputs(self.parameters(counts, smoothing))
        total = log_likelihood(self.plan, rules.requires_grad_(), leaf.requires_grad_()).sum()
        by_rules, by_leaf = torch.autograd.grad(total, [rules, leaf])
        posterior = (leaf * by_leaf).detach().double()  # [words, states]
        lexical = posterior.new_zeros(len(counts.lexical) + 1)
        lexical.index_add_(0, self.leaf_places.flatten(), posterior.flatten())
        lexical.index_add_(0, self.unseen_places.flatten(), posterior[self.unseen_leaf].flatten())
        found = by_rules.mul_(rules.detach()).cpu()
        of_rules, root = found.split([len(counts.rules), len(counts.root)])
        return float(total.detach()), Counts(root, of_rules, lexical[:-1].cpu())

    def posteriors(self, parameters: Counts) -> tuple[Tensor, Tensor]:
        """alpha and beta of all nodes, [nodes, states]; their products are the posteriors of states."""
        rules, leaf = self._inputs(parameters)
        weights = self.plan.weights(rules, leaf.dtype)
        scores = self.plan.inside(weights, leaf)
        beta = self.plan.outside(weights, scores, torch.ones_like(scores.log_z))
        nodes = len(self.treebank.symbol)
        return scores.alpha[:nodes], beta[:nodes]

    def _inputs(self, parameters: Counts) -> tuple[Tensor, Tensor]:
        """All rules, with those of the root, and the lexical parameters of each word of the treebank."""
        rules = torch.cat([parameters.rules, parameters.root]).to(self.device)  # float64, as their gradients shall be
        lexical = torch.nn.functional.pad(parameters.lexical, (0, 1)).to(self.device, torch.float32)
        return rules, lexical[self.leaf_places]

    def grammar(self, counts: Counts, smoothing: Smoothing | None = None, hierarchy: Tensor | None = None) -> Grammar:
        """What the counts make, with the smoothed lexicon."""
        parameters, symbols = self.parameters(counts, smoothing), self.treebank.symbols
        states, values = tuple(self.states.tolist()), parameters.rules[: self.binary_size]
        return Grammar(
            symbols=symbols,
            binary=RuleTensors(states, len(symbols.interminals), self.treebank.binary_rules, values),
            unary_rules=self.treebank.unary_rules,
            root=parameters.root,
            unary=parameters.rules[self.binary_size :],
            lexical=self.lexical_table(counts, smoothing),
            hierarchy=torch.zeros(0, len(counts.root), dtype=torch.int64) if hierarchy is None else hierarchy,
        )


@dataclass(frozen=True, eq=False)
class Observed:
    """A treebank as it stands, one state for each symbol: its lexicon and its counts."""

    lexicon: Lexicon
    latent: Latent
    counts: Counts

    @staticmethod
    def of(treebank: Treebank, signature: str, device: torch.device) -> "Observed":
        lexicon, unseen = build_lexicon(treebank, signature)
        return Observed(lexicon, *observed_counts(treebank, lexicon, unseen, device=device))

    @cached_property
    def coarse(self) -> CoarseGrammar:
        """The treebank PCFG, by which the charts of any model of this treebank are pruned."""
        return covered(CoarseGrammar(self.latent.grammar(self.counts)))


def _inverse(x: Tensor) -> Tensor:
    """1 / x, 0 where x is."""
    return torch.where(x > 0, 1 / x, 0)


def observed_counts(
    treebank: Treebank,
    lexicon: Lexicon,
    unseen: UnseenSample,
    rare: int = 0,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> tuple[Latent, Counts]:
    """The counts of a treebank as it stands, one state a symbol."""
    forest = observed_forest(treebank, device)
    latent = Latent(treebank, lexicon, unseen, torch.ones(len(treebank.symbols), dtype=torch.int64), rare, forest)
    binary, unary = (
        torch.bincount(treebank.rule[nodes], minlength=len(rules)).double()
        for nodes, rules in ((treebank.is_binary, treebank.binary_rules), (treebank.is_unary, treebank.unary_rules))
    )
    root = torch.bincount(treebank.symbol[treebank.roots[:-1]], minlength=len(treebank.symbols)).double()
    lexical = torch.zeros(len(latent.pair_of_value), dtype=torch.float64)
    for places in (latent.leaf_places, latent.unseen_places):
        lexical += torch.bincount(places.flatten(), minlength=len(lexical)).cpu()
    return latent, Counts(root, torch.cat([binary, unary]), lexical)
