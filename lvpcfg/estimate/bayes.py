"""Bayesian estimation from sentences: Dirichlet priors, and blocked Gibbs sampling of trees and grammars in turns.

    trees | grammar, words     drawn from charts of all sentences, independently
    grammar | trees            each row, what a state rewrites to: Dirichlet(prior + counts of the trees)

A prior on rule probabilities puts mass on grammars that are not tight, Z < 1. Three treatments:

    ignore         p(tree | grammar) as it is, whatever is lost
    tight          the prior on tight grammars alone: others are drawn again
    renormalised   p(tree | grammar) / Z: Metropolis-Hastings, with the Dirichlet posterior as the proposal, which is
                   accepted with probability min(1, (Z_old / Z_new)^n) for n sentences that have trees
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.chart.derivations import Derivation
from lvpcfg.distributions import ModelTrees
from lvpcfg.errors import InputError, expect, show
from lvpcfg.estimate.induction import full_rows
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.tightness import NEARLY, mass_of

IGNORE, TIGHT, RENORMALISED = TREATMENTS = ("ignore", "tight", "renormalised")
TRIES = 10_000  # of grammars, for one that is tight
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Draw:
    """A grammar from the posterior, and how it was come by."""

    model: Model
    log_likelihood: float  # of the sentences under the grammar before it
    accepted: bool  # whether it is a new one
    thrown_away: int  # grammars drawn in vain, since they were not tight


class Gibbs:
    """Draws grammars from the posterior given sentences, from a start on.

    The start is a model whose rules are tensors: its numbers above zero are what has a probability, the others stay
    zero. `prior` is the Dirichlet parameter of each.
    """

    def __init__(
        self,
        start: Model,
        sentences: Iterable[Iterable[str]],
        treatment: str = IGNORE,
        prior: float = 1.0,
        seed: int = 0,
    ) -> None:
        expect("treatment", treatment, TREATMENTS)
        if not prior > 0:
            raise InputError(f"prior is {show(prior)}: expected a number above 0.")
        grammar = start.grammar.to("cpu", torch.float64)
        if not isinstance(grammar.binary, RuleTensors) or grammar.signed or grammar.closed:
            raise InputError("Bayesian estimation needs a start of probabilities whose rules are tensors, one by one.")
        self.sentences = [[*words] for words in sentences]
        self.treatment, self.prior = treatment, prior
        self.generator, self.random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        words = grammar.lexical.lookup(torch.arange(len(start.lexicon)))
        self.tags = words.shape[1]
        self.values = torch.cat([grammar.root, grammar.binary.values, grammar.unary, words.flatten()])
        self.row = self._rows(grammar, words)
        self.sizes = [len(grammar.root), len(grammar.binary.values), len(grammar.unary), words.numel()]
        self.begin = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        self.start, self.binary = replace(start, grammar=grammar), grammar.binary
        self.entries = [start.lexicon.encode(sentence) for sentence in self.sentences]
        symbols = len(grammar.symbols)
        self.rule_of = torch.full((symbols, symbols, symbols), -1)
        self.rule_of[tuple(grammar.binary_rules.T)] = torch.arange(len(grammar.binary))

    @staticmethod
    def _rows(grammar: Grammar, words: Float64[Tensor, "entries tags"]) -> Int64[Tensor, "numbers"]:
        """Which numbers add up to 1: those of the root, and those of each state."""
        states, inner = len(grammar.root), grammar.interminal_states
        assert isinstance(grammar.binary, RuleTensors)
        tags = (inner + torch.arange(words.shape[1])).expand(words.shape)
        parents = [grammar.binary.parent_states.long(), grammar.unary_states()[0], tags.flatten()]
        return torch.cat([torch.full((states,), states), *parents])

    def run(self, iterations: int) -> Iterator[Draw]:
        """One draw after each sweep over all trees."""
        values = self.values
        model, mass = self.model(values), self._mass(values)
        if not 0 < mass < np.inf:
            raise InputError("no tree of the model ends: expected another start.")
        for _ in range(iterations):
            trees = ModelTrees(model, self.sentences)
            log_likelihood = float(trees.partition.sum())
            with_trees = int((trees.partition > -np.inf).sum())
            counts = self._counts(model, [drawn for (drawn,) in trees.sample(1, self.generator)])
            proposed, thrown_away = self._posterior(counts)
            accepted = True
            if self.treatment == RENORMALISED:
                new = self._mass(proposed)
                ratio = with_trees * (np.log(mass) - np.log(max(new, TINY)))
                accepted = bool(np.log(self.random.random()) < ratio)
                mass = new if accepted else mass
            if accepted:
                values = proposed
                model = self.model(values)
            yield Draw(model, log_likelihood, accepted, thrown_away)

    def _posterior(self, counts: Float64[Tensor, "numbers"]) -> tuple[Float64[Tensor, "numbers"], int]:
        """A grammar from the Dirichlet distributions, and how many were thrown away."""
        concentration = torch.where(self.values > 0, counts + self.prior, 0)
        for number in range(TRIES):
            gamma = torch.from_numpy(self.random.gamma(concentration.numpy()))
            gamma = torch.where(self.values > 0, gamma.clamp_min(TINY), 0)
            sums = gamma.new_zeros(int(self.row.max()) + 1).index_add(0, self.row, gamma)
            proposed = gamma / sums[self.row].clamp_min(TINY)
            if self.treatment != TIGHT or mass_of(self.model(proposed).grammar) >= NEARLY:
                return proposed, number
        raise InputError(f"of {TRIES:,} grammars drawn, none is tight: expected another prior, or more sentences.")

    def _mass(self, values: Float64[Tensor, "numbers"]) -> float:
        """Z, where it matters."""
        return mass_of(self.model(values).grammar) if self.treatment == RENORMALISED else 1.0

    def model(self, values: Float64[Tensor, "numbers"]) -> Model:
        root, binary, unary, words = values.split(self.sizes)
        grammar = replace(
            self.start.grammar,
            root=root,
            binary=self.binary.with_tensors({"values": binary}),
            unary=unary,
            lexical=full_rows(words.view(-1, self.tags)),
        )
        return replace(self.start, grammar=grammar)

    def _counts(self, model: Model, trees: list[Derivation]) -> Float64[Tensor, "numbers"]:
        """How often each number is used in the trees. A sentence without trees adds nothing."""
        roots, steps, rules, words = [], [], [], []
        inner = model.grammar.interminal_states
        for entries, tree in zip(self.entries, trees, strict=True):
            top = {(node.start, node.width): node.top for node in tree.nodes}
            roots += [node.top for node in tree.nodes[:1]]
            for node in tree.nodes:
                if node.top < inner:  # it may stand above unary rules
                    steps.append((node.top, node.bottom))
                if node.split:
                    right = top[node.start + node.split, node.width - node.split]
                    rules.append((node.bottom, top[node.start, node.split], right))
                else:
                    words.append(entries[node.start] * self.tags + node.bottom - inner)
        used = [
            torch.tensor(roots, dtype=torch.int64),
            self.begin[1] + self._places(torch.tensor(rules, dtype=torch.int64).view(-1, 3)),
            self.begin[2] + self._chains(model.grammar, steps),
            self.begin[3] + torch.tensor(words, dtype=torch.int64),
        ]
        return torch.bincount(torch.cat(used), minlength=self.begin[-1]).double()

    def _places(self, states: Int64[Tensor, "some 3"]) -> Int64[Tensor, "some"]:
        """Where the numbers of binary rules between these states are."""
        symbols = self.start.grammar.symbol_of_state[states]
        within = states - self.binary.first_state[symbols]
        m = self.binary.states[symbols]
        rule = self.rule_of[tuple(symbols.T)]
        return self.binary.starts[rule] + (within[:, 0] * m[:, 1] + within[:, 1]) * m[:, 2] + within[:, 2]

    def _chains(self, grammar: Grammar, steps: list[tuple[int, int]]) -> Int64[Tensor, "some"]:
        """Unary rules on random ways from the top to the bottom states of nodes.

        From a, the next is b with probability R_ab C_b,bottom / C_a,bottom, C = (I - R)^-1.
        """
        if not len(grammar.unary):
            return torch.zeros(0, dtype=torch.int64)
        parent, child = (state.tolist() for state in grammar.unary_states())
        matrix = torch.nn.functional.pad(grammar.unary_matrix(), (0, 0, 0, self.tags))
        closure = torch.linalg.inv(torch.eye(len(matrix), dtype=torch.float64) - matrix)
        place = {pair: number for number, pair in enumerate(zip(parent, child, strict=True))}
        used = []
        for state, bottom in steps:
            while True:
                ways = matrix[state] * closure[:, bottom]
                stop = float(state == bottom)  # the chain may end here, where it is at the bottom
                weights = torch.cat([ways.clamp_min(0), ways.new_tensor([stop])])
                chosen = int(torch.multinomial(weights, 1, generator=self.generator))
                if chosen == len(ways):
                    break
                used.append(place[state, chosen])
                state = chosen
        return torch.tensor(used, dtype=torch.int64)
