"""How much pruning can have lost: a bound from above of the weight of all trees that are not in a forest.

    t^(a -> b c) = max over h1 of the sum over h2, h3 of T    s^(a -> b), q^(a -> x) likewise    pi^(a) = sum of pi

Under this grammar of one state a symbol every skeletal tree is worth at least what it is worth under the fine one: from
the leaves up, no state of a node has more than its symbol. So the trees that a forest lost are worth at most

    Z^(whole chart) - Z^(forest)

which is less than the sum of the dropped edges' own masses, since a tree without several of them counts once.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.coarse_to_fine import Fine
from lvpcfg.chart.fast.build import form
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.fast.partition import log_partition
from lvpcfg.chart.forest.arrays import take
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.prune import FineRules, Nodes
from lvpcfg.chart.forest.pruning import words_of
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors

ROUNDING = 1e-9  # of Z^, for that of the two charts in float64


@dataclass(frozen=True)
class PruningLoss:
    """Of one sentence: log Z of what pruning left, and what it can be of all trees at the most."""

    log_z: float
    highest: float  # infinite bounds say nothing

    @property
    def lost(self) -> float:
        """The share of Z that is lost, at the most."""
        return -math.expm1(self.log_z - self.highest) if self.highest > -math.inf else 0.0


class LossBound:
    """Bounds for the forests of one grammar, which has a list of rules and no numbers below zero."""

    def __init__(self, grammar: Grammar) -> None:
        self.fine = grammar.to(dtype=torch.float64)
        self.exact, self.rules = FineRules(self.fine), FineRules(coarsest(self.fine))
        self.form = form(self.rules.grammar)
        self.tags = self.fine.symbol_of_state[self.fine.interminal_states :] - len(self.fine.symbols.interminals)

    def of(
        self,
        words: Float64[Tensor, "words tag_states"],
        lengths: Int64[Tensor, "sentences"],
        forest: Forest,
        kept: Nodes,
    ) -> list[PruningLoss]:
        """Of the sentences of a forest."""
        word, symbol = words_of(forest, kept, lengths), take(kept.symbol, forest.leaves)
        log_z = Fine(forest, self.exact, self.exact.leaf(words, word, symbol)).log_z()
        tags = len(self.fine.symbols.preterminals)
        index = self.tags.expand_as(words)
        leaf = words.new_zeros(len(words), tags).scatter_reduce_(1, index, words, "amax")
        whole = whole_charts(self.form, leaf, lengths)
        left = Fine(forest, self.rules, self.rules.leaf(leaf, word, symbol)).log_z()
        share = torch.where(left > -torch.inf, -torch.expm1((left - whole).clamp_max(0)), 1) + ROUNDING
        lost = torch.where(whole > -torch.inf, whole + share.log(), -torch.inf)
        highest = torch.logaddexp(log_z, lost)
        return [PruningLoss(*pair) for pair in zip(log_z.tolist(), highest.tolist(), strict=True)]


def whole_charts(
    form: FastForm, words: Float64[Tensor, "words tag_states"], lengths: Int64[Tensor, "sentences"]
) -> Float64[Tensor, "sentences"]:
    """log Z of the whole chart of each sentence; `words` are those of all of them, end to end."""
    return torch.cat([log_partition(form, some.unsqueeze(1))[0] for some in words.split(lengths.tolist())])


def coarsest(grammar: Grammar) -> Grammar:
    """The grammar of one state a symbol under which every tree is worth at least as much."""
    rules, symbols = grammar.binary.written_out(), len(grammar.symbols)
    inner, widest = len(grammar.symbols.interminals), max(grammar.binary.state_counts)
    row = torch.repeat_interleave(rules.starts.diff()) * widest
    row += rules.parent_states - take(rules.first_state, rules.rules[row // widest, 0])
    sums = rules.values.new_zeros(len(rules) * widest).index_add(0, row, rules.values)
    steps = FineRules(grammar)
    above, below = steps.steps.unbind(1)
    volume = grammar.states[above] * grammar.states[below]
    begin = len(steps.values) - len(grammar.root) - int(volume.sum())
    chains = steps.values[begin : begin + int(volume.sum())]
    row = (
        torch.repeat_interleave(volume) * widest
        + steps.above
        - take(grammar.first_state, grammar.symbol_of_state[steps.above])
    )
    of_steps = chains.new_zeros(len(volume) * widest).index_add(0, row, chains).view(-1, widest).amax(1)
    unary = of_steps - (above == below).to(of_steps)  # a closed grammar has the identity beside it
    some = (above < inner).nonzero().squeeze(1)
    return replace(
        grammar,
        binary=RuleTensors((1,) * symbols, inner, rules.rules, sums.view(-1, widest).amax(1)),
        unary_rules=steps.steps[some],
        unary=unary[some].clamp_min(0),
        root=grammar.root.new_zeros(symbols).index_add(0, grammar.symbol_of_state, grammar.root),
        hierarchy=torch.zeros(0, symbols, dtype=torch.int64),
        closed=True,
    )
