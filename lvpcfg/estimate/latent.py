"""A treebank whose symbols have latent states: expected counts, and the grammar of these counts.

    E-step   c(rule, states) = t * d log p(trees) / d t        (by autograd, on the observed trees)
    M-step   t(a -> b c, h2, h3 | h1, a) = c(a -> b c, h1, h2, h3) / c(a, h1)

and, where binary rules are a sum over terms rho, with counts of what each term is made of,

    M-step   p(rho | a, h1) = c(a, h1, rho) / c(a, h1),   p(b, h2 | rho) = c(rho, b, h2) / c(rho),   and so for c, h3

All that training knows is its expected counts, in float64: parameters are made of them, and splitting and
merging states splits and merges counts.

Words that occur at most `rare` times share one profile over the states of a tag, that of all such words together
(Petrov & Klein 2007 take it from unseen words): q(s -> x) = q(s -> rare) p(x | tag, rare). That is a model like any
other, so EM with it is EM.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lvpcfg import processes
from lvpcfg.chart.forest.forest import Forest, Plan, log_likelihood
from lvpcfg.decompose.coarse import covered
from lvpcfg.estimate.observed import observed_forest
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import BinaryRules, starts_of, transformed
from lvpcfg.trees.lexicon import LexicalPairs, LexicalTable, Lexicon, UnseenSample, build_lexicon, emissions
from lvpcfg.trees.treebank import Treebank


@dataclass(frozen=True, eq=False)
class Counts:
    """Expected counts of everything in a grammar, or its parameters; float64."""

    root: Float64[Tensor, "states"]
    binary: BinaryRules  # in any representation
    unary: Float64[Tensor, "numbers"]  # of all rules, end to end
    lexical: Float64[Tensor, "pairs"]  # in the layout of `LexicalPairs`: of words, and of the classes of unknown words

    def map(self, function: Callable[[Tensor], Tensor]) -> "Counts":
        root = function(self.root)
        binary = self.binary.with_tensors({name: function(tensor) for name, tensor in self.binary.tensors.items()})
        return Counts(root, binary, function(self.unary), function(self.lexical))


@dataclass(frozen=True, eq=False)
class Smoothing:
    """p'_x = (1 - w) p_x + w * the mean over the states that have the branch of x."""

    branch: Int64[Tensor, "states"]  # within its symbol
    rules: float  # w of rules
    words: float  # w of words


@dataclass(frozen=True, eq=False)
class TreesHere:
    """The trees of a treebank that are computed in this process."""

    treebank: Treebank  # with the symbols, rules and words of all
    nodes: Int64[Tensor, "nodes"]  # their numbers among those of all
    forest: Forest

    @staticmethod
    def of(treebank: Treebank, trees: Int64[Tensor, "trees"], device: torch.device) -> "TreesHere":
        part, nodes = treebank.part(trees)
        return TreesHere(part, nodes, observed_forest(part, device))


class Latent:
    """A treebank under given states of its symbols: the layout of its counts, and EM's two steps.

    The layout is that of the `whole` treebank; `treebank` has the trees that are computed in this process.
    """

    def __init__(
        self,
        whole: Treebank,
        lexicon: Lexicon,
        unseen: UnseenSample,
        binary: BinaryRules,
        rare: int,
        here: TreesHere,
    ) -> None:
        """`binary` has the states and the representation of binary rules. Of its numbers, only the zeros matter."""
        self.whole, self.lexicon, self.unseen, self.binary, self.rare = whole, lexicon, unseen, binary, rare
        self.here, self.treebank, self.device = here, here.treebank, here.forest.rule.device
        self.states, self.inner = binary.states, len(whole.symbols.interminals)
        self.first = starts_of(self.states)
        self.tag_of_state = torch.repeat_interleave(self.states[self.inner :])  # among preterminals
        self.unary_sizes = self.states[whole.unary_rules]
        parents = self.unary_sizes[:, 0]
        rule = torch.repeat_interleave(parents)  # of each row, a rule and a state of its parent
        row = self.first[whole.unary_rules[rule, 0]] + torch.arange(len(rule)) - starts_of(parents)[rule]
        self.unary_parent = torch.repeat_interleave(row, self.unary_sizes[rule, 1])  # of each number of unary rules
        self._lay_out_words()

    def _lay_out_words(self) -> None:
        """Pairs of an entry and a tag, entry by entry: words of the trees, then classes of unknown words."""
        treebank, symbols = self.whole, len(self.states)
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
        occurrences = torch.bincount(treebank.lexical_rules[leaves, 1], minlength=len(self.lexicon))
        self.is_rare = self.known & (occurrences <= self.rare)[self.pairs.entry]
        self._place_words_here(pair)

    def _place_words_here(self, pair: Int64[Tensor, "lexical_rules_and_unseen"]) -> None:
        """Where the words of the trees here, and those that are taken for unknown, stand among pairs."""
        is_leaf = self.treebank.is_lexical
        leaves = self.treebank.rule[is_leaf]
        self.leaf_places = self.places[pair[leaves]].to(self.device)  # [words, states]
        leaf = torch.full_like(self.whole.symbol, -1)
        leaf[self.here.nodes[is_leaf]] = torch.arange(len(leaves))
        unseen_leaf = leaf[self.unseen.node]
        is_here = unseen_leaf >= 0
        self.unseen_leaf = unseen_leaf[is_here].to(self.device)
        self.unseen_places = self.places[pair[len(self.whole.lexical_rules) :][is_here]].to(self.device)

    @cached_property
    def plan(self) -> Plan:
        """Its rules are numbered binary first, then unary, then a root rule for each symbol."""
        binary, one = self.states[self.treebank.binary_rules], torch.ones_like(self.states)
        unary, root = (
            torch.nn.functional.pad(self.unary_sizes, (0, 1), value=1),
            torch.stack([one, self.states, one], 1),
        )
        sizes = torch.cat([binary, unary, root]).to(self.device)
        return Plan(self.here.forest, sizes, self._binary_on_device.for_forests().cp)

    @cached_property
    def _binary_on_device(self) -> BinaryRules:
        binary = self.binary.to(self.device)
        for name in binary.structure + binary.of_zeros:  # found out now, and kept by `with_tensors`
            getattr(binary, name)
        return binary

    def over(self, binary: BinaryRules) -> "Latent":
        """With the states and the representation of other binary rules."""
        return Latent(self.whole, self.lexicon, self.unseen, binary, self.rare, self.here)

    def with_rare(self, rare: int) -> "Latent":
        return Latent(self.whole, self.lexicon, self.unseen, self.binary, rare, self.here)

    def with_trees(self, trees: Int64[Tensor, "trees"]) -> "Latent":
        """Some trees alone, in the layout of all."""
        here = TreesHere.of(self.whole, trees, self.device)
        return Latent(self.whole, self.lexicon, self.unseen, self.binary, self.rare, here)

    def transformed(
        self,
        counts: Counts,
        states: Int64[Tensor, "symbols"],
        basis: Float64[Tensor, "symbols m new_m"],
    ) -> tuple["Latent", Counts]:
        """Counts over other states, to each of which the state x of a symbol a hands on a share, basis[a, x]."""

        def moved(values: Tensor, blocks: Tensor) -> Tensor:
            return transformed(self.states, states, blocks, values, [basis] * blocks.shape[1])

        binary = counts.binary.transformed(tuple(states.tolist()), basis, basis)
        unary = moved(counts.unary, self.treebank.unary_rules)
        root = moved(counts.root, torch.arange(len(states)).unsqueeze(1))
        lexical = moved(counts.lexical, self.pair_tag.unsqueeze(1))
        return self.over(binary), Counts(root, binary, unary, lexical)

    def parameters(self, counts: Counts, smoothing: Smoothing | None = None) -> Counts:
        """The M-step. Lexical parameters are those of words alone, relative frequencies where nothing is smoothed."""
        binary = counts.binary.conditional()
        total = binary.row_sums().index_add(0, self.unary_parent, counts.unary)
        factor = inverse(total)
        binary, unary = binary.scaled(factor[: binary.interminal_states]), counts.unary * factor[self.unary_parent]
        root = counts.root / counts.root.sum()
        if smoothing is None:
            words = self.tied(counts.lexical) * self.known
            total = words.new_zeros(self.pairs.states).index_add(0, self.pairs.state, words)
            return Counts(root, binary, unary, words * inverse(total)[self.pairs.state])
        matrix, same = (self._matrix(smoothing.branch, weight) for weight in (smoothing.rules, 0.0))
        binary = binary.transformed(binary.state_counts, matrix, same)
        unary = transformed(self.states, self.states, self.treebank.unary_rules, unary, (matrix, same))
        table = self.lexical_table(counts, smoothing)
        words = (
            table.value
            + table.weight[self.pairs.entry] * table.backoff[table.source[self.pairs.entry], self.pairs.state]
        )
        return Counts(root, binary, unary, words * self.known)

    def tied(self, lexical: Tensor) -> Tensor:
        """Counts with those of rare words in the profile of their tag."""
        profile = lexical.new_zeros(self.pairs.states).index_add(0, self.pairs.state, lexical * self.is_rare)
        tags = profile.new_zeros(len(self.states) - self.inner).index_add(0, self.tag_of_state, profile)
        profile = profile * inverse(tags)[self.tag_of_state]
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

    def _matrix(self, branch: Tensor, weight: float) -> Tensor:
        """[symbols, states, states]: from parameters to smoothed ones."""
        widest = int(self.states.max())
        inside = torch.arange(widest) < self.states.unsqueeze(1)  # [symbols, states]
        branches = torch.full(inside.shape, -1).masked_scatter(inside, branch)
        same = (branches.unsqueeze(2) == branches.unsqueeze(1)).double()
        return (1 - weight) * torch.eye(widest, dtype=torch.float64) + weight * same / same.sum(2, keepdim=True)

    def expect(self, counts: Counts, smoothing: Smoothing | None = None) -> tuple[float, Counts]:
        """The E-step: log p(trees) and the expected counts under the parameters that `counts` make."""
        parameters = self.parameters(counts, smoothing)
        return self.expect_under(parameters, self._leaf(parameters))

    def expect_under(self, parameters: Counts, leaf: Float[Tensor, "words states"]) -> tuple[float, Counts]:
        """The same under any parameters of rules; `leaf` is what each word of the trees here is worth to its tag.

        What is found is that of all processes together.
        """
        binary = parameters.binary
        inputs = [*binary.tensors.values(), parameters.unary, parameters.root, leaf]
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        *tensors, unary, root, leaf = inputs
        given = binary.with_tensors(dict(zip(binary.tensors, tensors, strict=True)), zeros_stay=True)
        total = log_likelihood(*self._rules(replace(parameters, root=root, binary=given, unary=unary)), leaf).sum()
        found = torch.autograd.grad(total, inputs, materialize_grads=True)  # zeros for terms without rules
        *tensors, unary, root, posterior = (x.mul_(y.detach()) for x, y in zip(found, inputs, strict=True))
        total, root, unary, *tensors = map(processes.sum_over_processes, (total.detach(), root, unary, *tensors))
        counts = binary.with_tensors(dict(zip(binary.tensors, tensors, strict=True)), zeros_stay=True)
        return float(total), Counts(root, counts, unary, self.count_words(posterior.double()))

    def count_words(self, posterior: Float64[Tensor, "words states"]) -> Float64[Tensor, "pairs"]:
        """The counts of words and of classes of unknown words, given what each word of the trees here counts for each
        state of its tag; those of all processes together."""
        lexical = posterior.new_zeros(len(self.pair_of_value) + 1)
        lexical.index_add_(0, self.leaf_places.flatten(), posterior.flatten())
        lexical.index_add_(0, self.unseen_places.flatten(), posterior[self.unseen_leaf].flatten())
        return processes.sum_over_processes(lexical)[:-1].cpu()

    def posteriors(self, parameters: Counts) -> tuple[Tensor, Tensor]:
        """alpha and beta of all nodes here, [nodes, states]; their products are the posteriors of states."""
        plan, rules = self._rules(parameters)
        leaf = self._leaf(parameters)
        weights = plan.weights(rules, leaf.dtype)
        scores = plan.inside(weights, leaf)
        beta = plan.outside(weights, scores, torch.ones_like(scores.log_z))
        nodes = len(self.treebank.symbol)
        return scores.alpha[:nodes], beta[:nodes]

    def _rules(self, parameters: Counts) -> tuple[Plan, Float64[Tensor, "numbers"]]:
        """All rules, and those of the root, as the forest computes with them; float64, as their gradients shall be."""
        tensors = {name: tensor.to(self.device) for name, tensor in parameters.binary.tensors.items()}
        binary, plan = self._binary_on_device.with_tensors(tensors, zeros_stay=True).for_forests(), copy(self.plan)
        plan.cp = binary.cp  # the same rules with the numbers of now
        others = (tensor.to(self.device) for tensor in (parameters.unary, parameters.root))
        return plan, torch.cat([binary.values, *others])

    def _leaf(self, parameters: Counts) -> Float[Tensor, "words states"]:
        """The lexical parameters of each word of the trees here."""
        lexical = torch.nn.functional.pad(parameters.lexical, (0, 1)).to(self.device, torch.float32)
        return lexical[self.leaf_places]

    def grammar(self, counts: Counts, smoothing: Smoothing | None = None, hierarchy: Tensor | None = None) -> Grammar:
        """What the counts make, with the smoothed lexicon."""
        parameters = self.parameters(counts, smoothing)
        return Grammar(
            symbols=self.treebank.symbols,
            binary=parameters.binary.economical(),
            unary_rules=self.treebank.unary_rules,
            root=parameters.root,
            unary=parameters.unary,
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
        latent, counts = observed_counts(treebank, lexicon, unseen, device=device)
        share = processes.share(range(len(treebank)))
        if len(share) < len(treebank):
            latent = latent.with_trees(torch.tensor(share))
        return Observed(lexicon, latent, counts)

    @cached_property
    def coarse(self) -> CoarseGrammar:
        """The treebank PCFG, by which the charts of any model of this treebank are pruned."""
        return covered(CoarseGrammar(self.latent.grammar(self.counts)))


def inverse(x: Tensor) -> Tensor:
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
    binary, unary = (
        torch.bincount(treebank.rule[nodes], minlength=len(rules)).double()
        for nodes, rules in ((treebank.is_binary, treebank.binary_rules), (treebank.is_unary, treebank.unary_rules))
    )
    symbols = treebank.symbols
    rules = RuleTensors((1,) * len(symbols), len(symbols.interminals), treebank.binary_rules, binary)
    every = TreesHere.of(treebank, torch.arange(len(treebank)), device)
    latent = Latent(treebank, lexicon, unseen, rules, rare, every)
    root = torch.bincount(treebank.symbol[treebank.roots[:-1]], minlength=len(symbols)).double()
    lexical = torch.zeros(len(latent.pair_of_value), dtype=torch.float64)
    for places in (latent.leaf_places, latent.unseen_places):
        lexical += torch.bincount(places.flatten(), minlength=len(lexical)).cpu()
    return latent, Counts(root, rules, unary, lexical)
