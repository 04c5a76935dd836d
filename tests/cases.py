"""One small grammar in every form a chart can have, each with itself written out in full."""

from dataclasses import dataclass, replace

import torch
from enumeration import Dense
from torch import Tensor

from lvpcfg.chart.build import dense, exact, kruskal, unary_matrix
from lvpcfg.chart.inside import AnyRules
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.trees.lexicon import LexicalTable
from lvpcfg.trees.treebank import Symbols


@dataclass
class Case:
    form: AnyRules
    full: Dense
    symbol: list[int]  # of each state
    grammar: Grammar | None

    def leaf(self, length: int, batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random words, [length, batch, preterminal states]."""
        generator = torch.Generator().manual_seed(seed)
        preterminals = len(self.full.root) - self.full.interminals
        return torch.rand(length, batch, preterminals, generator=generator, dtype=dtype)


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
    nothing = torch.zeros(0)
    return Grammar(
        symbols=Symbols(("S", "@A"), ("N", "V")),
        states=m,
        binary_rules=binary_rules,
        unary_rules=unary_rules,
        root=random(sum(states)),
        binary=random(int(m[binary_rules].prod(1).sum())),
        unary=random(int(m[unary_rules].prod(1).sum())) * 0.1,
        lexical=LexicalTable(torch.zeros(2).long(), nothing.long(), nothing, torch.ones(1), torch.ones(outer), 0),
    )


RULES = [(0, 2, 1), (0, 1, 1), (1, 3, 2), (1, 2, 3), (0, 1, 3), (0, 3, 1), (1, 0, 1), (0, 2, 2)]


def of_grammar(grammar: Grammar) -> Case:
    first, inner = grammar.first_state.tolist(), int(grammar.first_state[2])
    rules = torch.zeros(1, inner, first[-1], first[-1], dtype=torch.float64)
    for r, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        rules[0, first[a] : first[a + 1], first[b] : first[b + 1], first[c] : first[c + 1]] = grammar.binary_tensor(r)
    unary = unary_matrix(grammar) if len(grammar.unary_rules) else None
    symbol = torch.repeat_interleave(grammar.states).tolist()
    return Case(exact(grammar), Dense(grammar.root, rules, unary), symbol, grammar)


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
        return Case(dense(root, rules), Dense(root, rules.unsqueeze(0), None), list(range(5)), None)
    if name == "kruskal":
        root, u, v, w = random(5), random(2, 3), random(2, 5), random(2, 5)
        full = torch.einsum("ra,rb,rc->rabc", u, v, w)
        return Case(kruskal(root, u, v, w), Dense(root, full, None), list(range(5)), None)
    if name == "kruskal, unary":
        case = make("rule list, unary", signed, seed)
        grammar = case.grammar
        assert grammar is not None
        inner, states = case.full.interminals, len(case.full.root)
        u, v, w = random(2, inner), random(2, states), random(2, states)
        full = torch.einsum("ra,rb,rc->rabc", u, v, w)
        return Case(kruskal(grammar.root, u, v, w, grammar), replace(case.full, rules=full), case.symbol, grammar)
    raise ValueError(name)


FORMS = (
    "rule list",
    "rule list, unary",
    "rule tensors",
    "rule tensors, unary",
    "dense",
    "kruskal",
    "kruskal, unary",
)
