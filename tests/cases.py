"""One small grammar in every form a chart can have, each with itself written out in full."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import torch
from enumeration import Dense, derivations, total
from torch import Tensor

from lvpcfg.chart.decode.exhaustive import Exhaustive, SymbolChart
from lvpcfg.chart.derivations import Node
from lvpcfg.chart.fast.build import cp_form, dense_form, tensor_form
from lvpcfg.chart.fast.inside import Chart, FastForm
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.options import PRODUCT, RECALL, RULE_SUM
from lvpcfg.trees.lexicon import LexicalTable
from lvpcfg.trees.treebank import Symbols


@dataclass
class Case:
    form: FastForm
    full: Dense
    symbol: list[int]  # of each state
    grammar: Grammar | None

    def leaf(self, length: int, batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random words, [length, batch, preterminal states]."""
        generator = torch.Generator().manual_seed(seed)
        preterminals = len(self.full.root) - self.full.interminals
        return torch.rand(length, batch, preterminals, generator=generator, dtype=dtype)


def no_words(states: int) -> LexicalTable:
    """For grammars whose words are given as numbers."""
    nothing, one = torch.zeros(0), torch.zeros(1).long()
    return LexicalTable(torch.zeros(2).long(), nothing.long(), nothing, torch.ones(1), one, torch.ones(1, states), 0)


def make_grammar(
    states: tuple[int, ...], rules: list[tuple[int, int, int]], unary: bool, signed: bool, seed: int
) -> Grammar:
    """Two interminals and two preterminals with random parameters."""
    generator = torch.Generator().manual_seed(seed)

    def random(size: int) -> Tensor:
        values = torch.rand(size, generator=generator, dtype=torch.float64)
        return values - 0.3 if signed else values

    m = torch.tensor(states)
    binary_rules, unary_rules = (
        torch.tensor(rules),
        torch.tensor([[0, 1], [1, 0], [1, 3]] if unary else [], dtype=torch.int64),
    )
    unary_rules = unary_rules.reshape(-1, 2)
    outer = states[2] + states[3]
    return Grammar(
        symbols=Symbols(("S", "@A"), ("N", "V")),
        root=random(sum(states)),
        binary=RuleTensors(states, 2, binary_rules, random(int(m[binary_rules].prod(1).sum()))),
        unary_rules=unary_rules,
        unary=random(int(m[unary_rules].prod(1).sum())) * 0.1,
        lexical=no_words(outer),
    )


RULES = [(0, 2, 1), (0, 1, 1), (1, 3, 2), (1, 2, 3), (0, 1, 3), (0, 3, 1), (1, 0, 1), (0, 2, 2)]


def of_grammar(grammar: Grammar) -> Case:
    first, inner = grammar.first_state.tolist(), int(grammar.first_state[2])
    rules = torch.zeros(1, inner, first[-1], first[-1], dtype=torch.float64)
    for r, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        rules[0, first[a] : first[a + 1], first[b] : first[b + 1], first[c] : first[c + 1]] = grammar.binary.tensor(r)
    unary = grammar.unary_matrix() if len(grammar.unary_rules) else None
    symbol = torch.repeat_interleave(grammar.states).tolist()
    return Case(tensor_form(grammar), Dense(grammar.root, rules, unary), symbol, grammar)


def make(name: str, signed: bool = False, seed: int = 1) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        values = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return values - 0.3 if signed else values

    if name == "rule list":
        return of_grammar(make_grammar((1, 1, 1, 1), RULES, False, signed, seed))
    if name == "rule list, unary":
        return of_grammar(make_grammar((1, 1, 1, 1), RULES, True, signed, seed))
    if name == "rule tensors":
        return of_grammar(make_grammar((2, 5, 1, 3), RULES, False, signed, seed))  # 5 is rounded up to 6
    if name == "rule tensors, unary":
        return of_grammar(make_grammar((2, 1, 1, 2), RULES, True, signed, seed))
    if name == "dense":
        root = torch.cat([random(3), torch.zeros(2, dtype=torch.float64)])
        rules = random(3, 5, 5)
        return Case(dense_form(root, rules), Dense(root, rules.unsqueeze(0), None), list(range(5)), None)
    if name in ("cp", "cp sorted"):
        root, u, v, w = random(5), random(2, 3), random(2, 5), random(2, 5)
        if name == "cp sorted":
            u, v, w = one_of_each_child_type(u, v, w)
        full = torch.einsum("ra,rb,rc->rabc", u, v, w)
        form = cp_form(root, u, v, w, sort_terms=name == "cp sorted")
        return Case(form, Dense(root, full, None), list(range(5)), None)
    if name in ("cp, unary", "cp sorted, unary"):
        case = make("rule list, unary", signed, seed)
        grammar = case.grammar
        assert grammar is not None
        inner, states = case.full.interminals, len(case.full.root)
        u, v, w = random(2, inner), random(2, states), random(2, states)
        if name == "cp sorted, unary":
            u, v, w = one_of_each_child_type(u, v, w)
        full = torch.einsum("ra,rb,rc->rabc", u, v, w)
        form = cp_form(grammar.root, u, v, w, grammar, sort_terms=name == "cp sorted, unary")
        return Case(form, replace(case.full, rules=full), case.symbol, grammar)
    raise ValueError(name)


def one_of_each_child_type(u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms for any children, and any left one with a word; for a phrase and a word, a word and a phrase, two words."""
    inner, terms = u.shape[1], torch.tensor([0, 1, 0, 1, 0])
    u, v, w = (factor[terms].clone() for factor in (u, v, w))
    v[2, inner:] = v[3:, :inner] = 0
    w[3, inner:] = w[1:3, :inner] = w[4, :inner] = 0
    return u, v, w


FORMS = (
    "rule list",
    "rule list, unary",
    "rule tensors",
    "rule tensors, unary",
    "dense",
    "cp",
    "cp, unary",
    "cp sorted",
    "cp sorted, unary",
)
WITH_GRAMMAR = FORMS[:4]


def small(name: str, seed: int = 1) -> Case:
    """With few enough derivations to list for four words."""
    if name != "rule tensors":
        return make(name, seed=seed)
    case = make("rule tensors, unary", seed=seed)
    assert case.grammar is not None
    return of_grammar(
        replace(case.grammar, unary_rules=torch.zeros(0, 2).long(), unary=torch.zeros(0, dtype=torch.float64))
    )


def listable(case: Case) -> int:
    """How many words may have all their derivations listed."""
    return 3 if len(case.symbol) * len(case.full.rules) * (1 if case.full.unary is None else 2) > 8 else 4


class Posteriors:
    """Of the parts of skeletal trees, added up over a list of derivations."""

    def __init__(self, case: Case, words: torch.Tensor) -> None:
        symbol, found = case.symbol, derivations(case.full, words)
        z = total(found)
        self.unary = case.full.unary is not None
        self.real = [not name.startswith("@") for name in case.grammar.symbols.names]
        self.trees: Counter = Counter()
        self.top, self.bottom, self.step, self.rule = (defaultdict(float) for _ in range(4))
        for weight, states in found:
            nodes = tuple(Node(n.start, n.width, symbol[n.top], symbol[n.bottom], n.split) for n in states)
            p = weight / z
            self.trees[nodes] += p
            for key, rule in zip(nodes, rules_of(nodes), strict=True):
                self.top[key.start, key.width, key.top] += p
                self.bottom[key.start, key.width, key.bottom] += p
                self.step[key.start, key.width, key.top, key.bottom] += p
                if rule:
                    self.rule[rule] += p

    def parts(self, nodes):
        """(posterior, that of the parent) of all that a tree is made of, from the root down."""
        yield self.top[nodes[0].start, nodes[0].width, nodes[0].top], 1.0
        for node, rule in zip(nodes, rules_of(nodes), strict=True):
            bottom = self.bottom[node.start, node.width, node.bottom]
            yield (self.rule[rule] if rule else bottom), bottom
            if self.unary:
                step = self.step[node.start, node.width, node.top, node.bottom]
                yield step, self.top[node.start, node.width, node.top]

    def objective(self, decoder, nodes):
        if decoder == RECALL:
            tops = sum(self.top[n.start, n.width, n.top] * self.real[n.top] for n in nodes)
            return tops + sum(self.bottom[n.start, n.width, n.bottom] for n in nodes if not n.split)
        parts = list(self.parts(nodes))
        if decoder == RULE_SUM:
            return sum(q for q, _ in parts)
        log = sum(math.log(q) for q, _ in parts)
        return log if decoder == PRODUCT else log - sum(math.log(parent) for _, parent in parts)

    def label(self, start, width):
        """The posterior of the best label of a span that is no symbol of the binarisation."""
        return max(self.top[start, width, symbol] * real for symbol, real in enumerate(self.real))


def rules_of(nodes):
    """For each node the anchored rule below it, None for a word."""
    at = {(node.start, node.width): node for node in nodes}
    return [
        (n.start, n.split, n.width, n.bottom, at[n.start, n.split].top, at[n.start + n.split, n.width - n.split].top)
        if n.split
        else None
        for n in nodes
    ]


def plain_grammar(inner, outer, binary, unary=(), root=None) -> Grammar:
    """A PCFG, m = 1: rules are (parent, left, right, probability) and (parent, child, probability) by name."""
    number = {name: i for i, name in enumerate([*inner, *outer])}

    def rules(some, size):
        return torch.tensor([[number[name] for name in rule[:size]] for rule in some]).long().reshape(-1, size)

    def values(some):
        return torch.tensor([rule[-1] for rule in some], dtype=torch.float64)

    return Grammar(
        symbols=Symbols(tuple(inner), tuple(outer)),
        binary=RuleTensors((1,) * len(number), len(inner), rules(binary, 3), values(binary)),
        unary_rules=rules(unary, 2),
        root=torch.tensor([float(name == (root or inner[0])) for name in number], dtype=torch.float64),
        unary=values(unary),
        lexical=no_words(len(outer)),
    )


def decoded(case: Case, leaf: torch.Tensor, decoder: str) -> list[list[Node] | None]:
    """The trees of whole charts."""
    chart = Chart(case.form, leaf)
    outside = Outside(chart, torch.ones_like(chart.log_z))
    found = Exhaustive(case.grammar, case.form, decoder).trees(chart, outside)
    return [trees[0] if trees else None for trees in found]


def worths(case: Case, leaf: torch.Tensor, decoder: str) -> torch.Tensor:
    """What the best tree of each sentence is worth."""
    chart = Chart(case.form, leaf)
    exhaustive = Exhaustive(case.grammar, case.form, decoder)
    chart = chart if exhaustive.form is case.form else chart.seen_through(exhaustive.form)
    return SymbolChart(
        exhaustive, chart, Outside(Chart(case.form, leaf), torch.ones_like(chart.log_z)), decoder
    ).root_worth
