"""Trees drawn from a model, top down.

    p(tree) = pi(root) * product over nodes of t, r or q

All rewrites stand in one table, sorted by what is rewritten, with cumulative weights. In each round every open node of
every tree draws its rewrite, all at once; trees are built at the end.
"""

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float64, Int64
from nltk.tree import Tree
from torch import Tensor

from lvpcfg.chart.semirings import require_nonnegative
from lvpcfg.errors import InputError, show
from lvpcfg.evaluation.inspect import state_names
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.tightness import tightness
from lvpcfg.trees.binarise import unbinarised, with_top
from lvpcfg.trees.brackets import garbage_collection_paused

TREES, WORDS = 4096, 1 << 20  # that are drawn at once, at the most
REWRITES = 10  # for each word that a tree may have: chains of unary rules end too
SHARE = 1000  # one tree of so many has to be short enough
NEAR, NEAR_CLOSED = 1e-3, 0.1  # 1, for sums of probabilities; of chains a closed grammar has the best alone

log = logging.getLogger(__name__)


def generate(model: Model, n: int, seed: int = 0, longest: int = 200) -> list[Tree]:
    """Draws n trees independently; the first ones are the same for any n.

    The trees are debinarised. All words are known: the probability that a state gives to classes of unknown words is
    divided among its known words, in proportion. Trees of more than `longest` words are replaced by others, and a
    warning counts them. So trees are drawn from p(tree | `longest` words at the most).
    """
    for name, value, least in (("n", n, 0), ("seed", seed, 0), ("longest", longest, 1)):
        if type(value) is not int or value < least:
            raise InputError(f"{name} is {show(value)}: expected a whole number from {least} on.")
    table, generator = _table(model), torch.Generator().manual_seed(seed)
    found: list[Tree] = []
    drawn = left_out = 0
    while len(found) < n:
        trees = table.draw(max(1, min(TREES, WORDS // longest)), longest, generator)
        drawn, left_out = drawn + len(trees.short), left_out + int((~trees.short).sum())
        if drawn >= SHARE and (drawn - left_out) * SHARE < drawn:
            raise InputError(
                f"of {drawn} trees drawn from the model, {drawn - left_out} have no more than {longest} words: "
                "expected a model whose trees end, or a larger number for longest."
            )
        with garbage_collection_paused():
            found += trees.built(n - len(found))
    if left_out:
        log.warning(
            "%d of %d trees had more than %d words: they are left out, and others drawn in their place.",
            left_out,
            drawn,
            longest,
        )
        found_tight = tightness(model)
        if not found_tight.tight and found_tight.mass is not None:
            log.warning("The model is not tight: only %.4g %% of its trees end.", 100 * found_tight.mass)
    return found


@dataclass(frozen=True, eq=False)
class Table:
    """All rewrites of all kinds of nodes, sorted by kind; the weights of each kind add up to 1.

    The kinds are: the states of all symbols; in a closed grammar the same states once more, below the chain of unary
    rules; classes of words that are alike; and what is above the root, which is the last. Children are kinds or, from
    `kinds` on, words.
    """

    model: Model
    kinds: int
    parent: Int64[Tensor, "rewrites"]
    children: Int64[Tensor, "rewrites 2"]  # the second is -1 where there is only one
    weight: Float64[Tensor, "rewrites"]

    @cached_property
    def begin(self) -> Int64[Tensor, "kinds_plus_1"]:
        """Where the rewrites of each kind begin."""
        return torch.searchsorted(self.parent, torch.arange(self.kinds + 1))

    @cached_property
    def cumulative(self) -> Float64[Tensor, "rewrites"]:
        return self.weight.cumsum(0)

    @cached_property
    def below(self) -> Float64[Tensor, "kinds_plus_1"]:
        """The cumulative weight of all kinds before each."""
        return torch.nn.functional.pad(self.cumulative, (1, 0))[self.begin]

    def draw(self, trees: int, longest: int, generator: torch.Generator) -> "Drawn":
        first = torch.arange(trees)
        short, rewrites, sizes = torch.ones(trees, dtype=torch.bool), torch.zeros_like(first), torch.ones_like(first)
        columns = [(torch.full_like(first, self.kinds - 1), first, first)]  # value, tree, parent of each node
        nodes = 0
        while len(columns[-1][0]):
            value, tree, _ = columns[-1]
            is_open = (value < self.kinds) & short[tree]
            value, tree, number = value[is_open], tree[is_open], nodes + is_open.nonzero().squeeze(1)
            nodes += len(is_open)
            children = self.children[self._drawn(value, generator)]
            has = children >= 0
            rewrites.index_add_(0, tree, torch.ones_like(tree))
            sizes.index_add_(0, tree, has[:, 1].long())
            short &= (sizes <= longest) & (rewrites <= REWRITES * longest)
            tree, number = (of.unsqueeze(1).expand(-1, 2)[has] for of in (tree, number))
            columns.append((children[has], tree, number))
        return Drawn(self, short, *map(torch.cat, zip(*columns, strict=True)))

    def _drawn(self, kind: Int64[Tensor, "open"], generator: torch.Generator) -> Int64[Tensor, "open"]:
        """A rewrite for each."""
        begin, end = self.begin[kind], self.begin[kind + 1]
        if bool((begin == end).any()):
            state = int(kind[begin == end][0]) % len(self.model.grammar.root)
            name = state_names(self.model.grammar)[state]
            raise InputError(f"{name} came up in a tree, and the model has no rules or known words for it.")
        low, high = self.below[kind], self.below[kind + 1]
        random = torch.rand(len(kind), generator=generator, dtype=torch.float64)
        place = torch.searchsorted(self.cumulative, low + random * (high - low), right=True)
        return torch.minimum(torch.maximum(place, begin), end - 1)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The nodes of some trees, parents before their children, left children before right ones."""

    table: Table
    short: Bool[Tensor, "trees"]  # those that came to an end
    value: Int64[Tensor, "nodes"]  # kinds, then words
    tree: Int64[Tensor, "nodes"]
    parent: Int64[Tensor, "nodes"]  # what is above the roots are the first nodes, their own parents

    def built(self, most: int) -> list[Tree]:
        """The first of those that came to an end."""
        roots = self.short.nonzero().squeeze(1)[:most].tolist()
        kept = torch.zeros_like(self.short)
        kept[roots] = True
        nodes = kept[self.tree].nonzero().squeeze(1).flip(0)  # children before their parents
        words, kinds = self.table.model.lexicon.words, self.table.kinds
        names = (*self.table.model.grammar.symbols.names, None)  # None is not written
        below: dict[int, list[Tree | str]] = {}  # from right to left
        symbols = self._symbols
        columns = (nodes, self.value[nodes], self.parent[nodes], symbols[nodes])
        for node, value, parent, symbol in zip(*(column.tolist() for column in columns), strict=True):
            if node == parent:
                continue
            if value >= kinds:
                made: list[Tree | str] = [words[value - kinds]]
            else:
                made, name = below.pop(node)[::-1], names[symbol]
                made = made if name is None else unbinarised(name, made)
            below.setdefault(parent, []).extend(reversed(made))
        return [with_top(below[root][::-1]) for root in roots]

    @property
    def _symbols(self) -> Int64[Tensor, "nodes"]:
        """What each node is written as; -1 for nothing."""
        grammar = self.table.model.grammar
        states = len(grammar.root)
        of_kind = torch.full((self.table.kinds + len(self.table.model.lexicon.words),), -1)
        of_kind[:states] = grammar.symbol_of_state
        if grammar.closed:
            of_kind[states : 2 * states] = grammar.symbol_of_state
        symbol = of_kind[self.value]
        again = grammar.closed & (self.value >= states) & (symbol == symbol[self.parent])
        return torch.where(again, -1, symbol)  # a chain from a symbol to itself


def _table(model: Model) -> Table:
    grammar = model.grammar.to("cpu", torch.float64).written_out()
    lexical, known, inner = grammar.lexical, len(model.lexicon.words), grammar.interminal_states
    if lexical.network is not None:
        raise InputError("generate needs a model with probabilities of words: this one has a network for them.")
    (binary,) = grammar.binary.tensors.values()
    require_nonnegative(
        [grammar.root, binary, grammar.unary, lexical.value, lexical.weight, lexical.backoff], "generate"
    )
    worth = _checked(grammar)

    states = torch.arange(len(grammar.root))
    below = states + len(states) * grammar.closed  # the same where no unary rule may follow
    classes = int(below[-1]) + 1
    kinds = classes + len(lexical.backoff) + 1
    entry = torch.repeat_interleave(lexical.row[1:] - lexical.row[:-1])
    of_words = entry < known  # of each value
    weight, source = lexical.weight[:known], lexical.source[:known]
    of_classes = lexical.backoff * weight.new_zeros(len(lexical.backoff)).index_add(0, source, weight).unsqueeze(1)
    class_of, tag = (of_classes > 0).nonzero().unbind(1)
    parts = [
        _parts(torch.full_like(states, kinds - 1), states, grammar.root),
        _binary(grammar, below),
        _parts(below[inner + lexical.state[of_words]], kinds + entry[of_words], lexical.value[of_words]),
        _parts(below[inner + tag], classes + class_of, of_classes[class_of, tag]),
        _parts(classes + source, kinds + torch.arange(known), weight),
    ]
    parent, child = grammar.unary_states()
    if grammar.closed:
        parts += [_parts(states, below, worth), _parts(parent, below[child], grammar.unary * worth[child])]
    else:
        parts.append(_parts(parent, child, grammar.unary))
    parents, children, weights = map(torch.cat, zip(*parts, strict=True))
    order = parents.argsort(stable=True)
    parents, weights = parents[order], weights[order]
    total = weights.new_zeros(kinds).index_add(0, parents, weights)
    return Table(model, kinds, parents, children[order], weights / total[parents])


Parts = tuple[Int64[Tensor, "some"], Int64[Tensor, "some 2"], Float64[Tensor, "some"]]


def _parts(parent: Tensor, child: Tensor, weight: Tensor) -> Parts:
    """The rewrites with one child, as far as they have a weight."""
    some = weight > 0
    return parent[some], torch.stack([child, torch.full_like(child, -1)], 1)[some], weight[some]


def _binary(grammar: Grammar, parents: Int64[Tensor, "states"]) -> Parts:
    rules = grammar.binary.written_out()
    place = rules.values.nonzero().squeeze(1)
    children = torch.stack(rules.child_states(), 1)[place]
    return parents[rules.parent_states[place].long()], children, rules.values[place]


def _checked(grammar: Grammar) -> Float64[Tensor, "states"]:
    """What each state rewrites to, in all; in a closed grammar without a chain of unary rules."""
    sums, near = grammar.row_sums(), NEAR
    if grammar.closed:
        near, chains = NEAR_CLOSED, grammar.unary_matrix()
        worth = sums - torch.nn.functional.pad(chains.sum(1), (0, len(sums) - len(chains)))
        sums = worth.index_add(0, torch.arange(len(chains)), chains @ worth)
    else:
        worth = sums
    named = dict(zip(["the root", *state_names(grammar)], [float(grammar.root.sum()), *sums.tolist()], strict=True))
    for name, total in named.items():
        if total and abs(total - 1) > near:
            raise InputError(
                f"the probabilities of {name} add up to {total:.3g}: generate needs a model where it is 1."
            )
    return worth
