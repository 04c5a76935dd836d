"""The spectral grammar: its parameters are means of products of the projections of nodes.

    t(a -> b c)_ijk = count(a -> b c) / count(a) * E_ijk,    E = mean of Z_i(o) Y_j(t2) Y_k(t3) over the rule's nodes
    r(a -> b)_ij    = count(a -> b) / count(a) * mean of Z_i(o) Y_j(t2)
    q(a -> x)_i     = p(x | a) * mean of Z_i(o) over the nodes of the word
    pi(a)_i         = count(root a) / count(root) * mean of Y_i(t) over the roots

Rules seen n < 1,000 times back off: with l = sqrt(n) / (C + sqrt(n)),

    E <- l E + (1 - l) (l E2 + (1 - l) (l E3 + (1 - l) E4))

E2 is the mean of the three products of one pair's mean with the mean of the third, E3 the product of all three means,
E4 that of the means over all nodes of the symbols (Cohen et al. 2013, section 5.4). p(x | a) is that of the treebank
PCFG.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from lvpcfg.estimate.features import RARE
from lvpcfg.estimate.latent import Observed
from lvpcfg.estimate.moments import Projected
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import starts_of
from lvpcfg.trees.lexicon import LexicalTable
from lvpcfg.trees.treebank import Treebank

ENOUGH = 1000  # occurrences of a rule or a word that needs no back-off
CLASS_WEIGHT = 10  # occurrences of rare words of any class, for each class of rare words


@dataclass(frozen=True, eq=False)
class SpectralGrammar:
    treebank: Treebank
    observed: Observed
    nodes: Projected
    backoff: float  # C
    words: float  # weight of a word's own mean, where it occurs less than 1,000 times

    def grammar(self) -> Grammar:
        bank, states = self.treebank, self.nodes.states
        rules = RuleTensors(tuple(states.tolist()), len(bank.symbols.interminals), bank.binary_rules, self.binary())
        none = torch.zeros(0, int(states.sum()), dtype=torch.int64)
        return Grammar(bank.symbols, rules, bank.unary_rules, self.unary(), self.root(), self.lexical(), none)

    def binary(self) -> Float64[Tensor, "numbers"]:
        bank, found = self.treebank, []
        for (a, b, c), nodes in self._by_rule(bank.is_binary, bank.binary_rules):
            z, y2, y3 = self._z(a, nodes), self._y(b, bank.left[nodes]), self._y(c, bank.right[nodes])
            found.append((self._share(a, nodes) * triple(z, y2, y3, self._own(nodes))).flatten())
        return torch.cat([*found, torch.zeros(0, dtype=torch.float64)])

    def unary(self) -> Float64[Tensor, "numbers"]:
        bank, found = self.treebank, []
        for (a, b), nodes in self._by_rule(bank.is_unary, bank.unary_rules):
            z, y2 = self._z(a, nodes), self._y(b, bank.left[nodes])
            found.append((self._share(a, nodes) * pair(z, y2, self._own(nodes))).flatten())
        return torch.cat([*found, torch.zeros(0, dtype=torch.float64)])

    def root(self) -> Float64[Tensor, "states"]:
        roots, states = self.treebank.roots[:-1], self.nodes.states
        symbol = self.treebank.symbol[roots]
        sums = torch.zeros(len(states), self.nodes.inside.shape[1], dtype=torch.float64)
        sums.index_add_(0, symbol, self.nodes.inside[roots])
        return sums[torch.arange(sums.shape[1]) < states.unsqueeze(1)] / len(roots)

    def _by_rule(
        self, some: Bool[Tensor, "nodes"], rules: Int64[Tensor, "rules order"]
    ) -> Iterator[tuple[list[int], Int64[Tensor, "of_rule"]]]:
        """The symbols of each rule, and its nodes."""
        nodes = some.nonzero().squeeze(1)
        rule = self.treebank.rule[nodes]
        counts = torch.bincount(rule, minlength=len(rules)).tolist()
        yield from zip(rules.tolist(), nodes[rule.argsort(stable=True)].split(counts), strict=True)

    def _z(self, symbol: int, nodes: Int64[Tensor, "n"]) -> Float64[Tensor, "n m"]:
        return self.nodes.outside[nodes, : self.nodes.states[symbol]]

    def _y(self, symbol: int, nodes: Int64[Tensor, "n"]) -> Float64[Tensor, "n m"]:
        return self.nodes.inside[nodes, : self.nodes.states[symbol]]

    def _share(self, symbol: int, nodes: Int64[Tensor, "n"]) -> float:
        return len(nodes) / int(self.nodes.sizes[symbol])

    def _own(self, nodes: Int64[Tensor, "n"]) -> float:
        """l, the weight of a rule's own mean."""
        root = math.sqrt(len(nodes))
        return 1 if len(nodes) >= ENOUGH else root / (self.backoff + root)

    # Words

    def lexical(self) -> LexicalTable:
        """q of one state for each tag, times the mean of Z: of words that occur often their own and that of the rare
        words that look like them; of others this alone."""
        bank, lexicon = self.treebank, self.observed.lexicon
        inner, tags = len(bank.symbols.interminals), len(bank.symbols.preterminals)
        table = self.observed.latent.lexical_table(self.observed.counts, None)
        leaves = bank.is_lexical.nonzero().squeeze(1)
        tag, word, z = bank.symbol[leaves] - inner, bank.lexical_rules[bank.rule[leaves], 1], self.nodes.outside[leaves]

        occurrences = torch.bincount(word, minlength=len(lexicon))
        rare = occurrences[word] <= RARE
        of_tag = _means(z[rare], tag[rare], tags, _constant(z), 1)  # of unknown words, [tags, m]
        kinds = len(lexicon.classes) + 1
        of_class = _means(
            z[rare], lexicon.source[word[rare]] * tags + tag[rare], kinds * tags, of_tag.repeat(kinds, 1), CLASS_WEIGHT
        )
        of_class = of_class.view(kinds, tags, -1)
        of_class[-1] = of_tag

        entry = torch.repeat_interleave(table.row[1:] - table.row[:-1])  # of each value
        is_class = entry >= len(lexicon.words)
        like = of_class[torch.where(is_class, entry - len(lexicon.words), lexicon.source[entry]), table.state]
        pairs, pair = torch.unique(word * tags + tag, return_inverse=True)
        of_pair = _means(z, pair, len(pairs), torch.zeros_like(_constant(z)), 0)
        own = of_pair[torch.searchsorted(pairs, entry * tags + table.state).clamp_max(len(pairs) - 1)]  # classes: any
        times = occurrences[entry]
        weight = torch.where(times >= ENOUGH, 1, self.words) * (times > RARE)
        values = weight.unsqueeze(1) * own + (1 - weight).unsqueeze(1) * like
        return with_states(table, self.nodes.states[inner:], values, of_class)


def triple(
    z: Float64[Tensor, "n x"], y2: Float64[Tensor, "n y"], y3: Float64[Tensor, "n z"], own: float
) -> Float64[Tensor, "x y z"]:
    """E of a binary rule, backed off where `own`, l, is less than 1."""
    n = len(z)
    mean = (z.T @ (y2.unsqueeze(2) * y3.unsqueeze(1)).flatten(1)).view(z.shape[1], y2.shape[1], -1) / n
    if own == 1:
        return mean
    z_mean, left, right = z.mean(0).view(-1, 1, 1), y2.mean(0).view(1, -1, 1), y3.mean(0).view(1, 1, -1)
    pairs = ((z.T @ y2).unsqueeze(2) * right + (z.T @ y3).unsqueeze(1) * left + (y2.T @ y3) * z_mean) / (3 * n)
    return backed_off([mean, pairs, z_mean * left * right, _first(mean)], own)


def pair(z: Float64[Tensor, "n x"], y2: Float64[Tensor, "n y"], own: float) -> Float64[Tensor, "x y"]:
    """E of a unary rule; there is no pair to back off to."""
    mean = z.T @ y2 / len(z)
    return backed_off([mean, z.mean(0).unsqueeze(1) * y2.mean(0), _first(mean)], own)


def backed_off(levels: list[Float64[Tensor, "*shape"]], own: float) -> Float64[Tensor, "*shape"]:
    """Each level with the weight `own` in what is left by those before it."""
    *levels, found = levels
    for level in reversed(levels):
        found = own * level + (1 - own) * found
    return found


def _first(like: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The product of means over all nodes of the symbols: 1 for their first states, 0 for the others."""
    found = torch.zeros_like(like)
    found[(0,) * like.dim()] = 1
    return found


def _constant(rows: Float64[Tensor, "n m"]) -> Float64[Tensor, "1 m"]:
    """The mean over all nodes of a symbol: 1, 0, 0, ..."""
    return torch.eye(1, rows.shape[1], dtype=rows.dtype)


def _means(
    rows: Float64[Tensor, "n m"],
    group: Int64[Tensor, "n"],
    groups: int,
    prior: Float64[Tensor, "_ m"],
    weight: float,
) -> Float64[Tensor, "groups m"]:
    """Of the rows of each group, and so many rows of a prior; 0 for groups without either."""
    sums = (weight * prior).expand(groups, -1).index_add(0, group, rows)
    counts = torch.bincount(group, minlength=groups) + weight
    return sums / torch.where(counts > 0, counts, 1).unsqueeze(1)


def with_states(
    table: LexicalTable,
    states: Int64[Tensor, "tags"],
    values: Float64[Tensor, "values m"],
    backoff: Float64[Tensor, "sources tags m"],
) -> LexicalTable:
    """A table over tags, times a vector over the states of the tag for each of its numbers."""
    first, sizes = starts_of(states), states[table.state]
    begin, of = starts_of(sizes), torch.repeat_interleave(sizes)
    place = torch.arange(len(of)) - begin[of]
    inside = torch.arange(backoff.shape[2]) < states.unsqueeze(1)
    row = begin[table.row]
    return replace(
        table,
        row=row,
        state=first[table.state[of]] + place,
        value=table.value[of] * values[of, place],
        backoff=(table.backoff.unsqueeze(2) * backoff)[:, inside],
        widest=int((row[1:] - row[:-1]).max()),
    )
