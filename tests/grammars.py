"""Random grammars as rules over lanes, of any number of children, and all their derivations one by one.

Independent of the charts: derivations come from full arrays over states, as the definition reads.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lvpcfg.chart.lanes import Map, Rules
from lvpcfg.chart.textbook import CFG, unary_closure

F64 = torch.float64
INNER, OUTER = 2, 2  # states of interminals and of preterminals, in this order
STATES = INNER + OUTER


@dataclass(frozen=True)
class Span:
    start: int
    width: int
    top: int
    bottom: int
    rule: int | None = None  # the skeletal rule
    lane: int | None = None
    last: int = 0  # how many words stand before the last child


@dataclass
class Full:
    """A grammar written out: root [states], rules [lanes, parents, states, states, ...] by number of children."""

    root: Tensor
    rules: dict[int, Tensor]
    skeletal: dict[int, list[int]]  # of each lane
    unary: Tensor | None  # [interminals, states], one step

    def steps(self) -> Tensor:
        """[top states, bottom states]: any number of unary steps, by their series."""
        total = power = torch.eye(STATES, dtype=F64)
        if self.unary is not None:
            once = torch.cat([self.unary, torch.zeros(OUTER, STATES, dtype=F64)])
            for _ in range(100):
                power = power @ once
                total = total + power
        return total

    def derivations(self, words: Tensor) -> dict[tuple[Span, ...], float]:
        """derivation -> weight; `words` is [length, preterminal states]."""
        steps = self.steps().tolist()
        rules = {arity: [(at, float(t[tuple(at)])) for at in t.nonzero().tolist()] for arity, t in self.rules.items()}
        made: dict[tuple[int, int], dict[int, list]] = {}  # span -> top state -> [(weight, spans)]
        n = len(words)
        for width in range(1, n + 1):
            for i in range(n - width + 1):
                bottoms = []  # (bottom state, weight, rule, lane, last, spans below)
                if width == 1:
                    bottoms = [(INNER + s, float(words[i, s]), None, None, 0, ()) for s in range(OUTER) if words[i, s]]
                for arity, entries in rules.items():
                    for cuts in itertools.combinations(range(i + 1, i + width), arity - 1):
                        ends = [i, *cuts, i + width]
                        below = [made[ends[c], ends[c + 1]] for c in range(arity)]
                        for (lane, parent, *states), weight in entries:
                            ways = [cells.get(state, []) for cells, state in zip(below, states, strict=True)]
                            for chosen in itertools.product(*ways):
                                product = weight * math.prod(w for w, _ in chosen)
                                spans = sum((s for _, s in chosen), ())
                                rule = self.skeletal[arity][lane]
                                bottoms.append((parent, product, rule, lane, ends[-2] - i, spans))
                cells = made[i, i + width] = {}
                for top in range(STATES):
                    for bottom, weight, rule, lane, last, spans in bottoms:
                        if steps[top][bottom]:
                            span = Span(i, width, top, bottom, rule, lane, last)
                            cells.setdefault(top, []).append((steps[top][bottom] * weight, (span, *spans)))
        return {
            spans: float(self.root[top]) * weight
            for top, ways in made[0, n].items()
            for weight, spans in ways
            if self.root[top]
        }


def random_grammar(
    form: str, arities: tuple[int, ...] = (2,), unary: bool = False, signed: bool = False, seed: int = 0
) -> tuple[CFG, Full]:
    """A grammar in ordinary numbers and itself written out."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        values = torch.rand(*shape, generator=generator, dtype=F64)
        return values - 0.3 if signed else values

    root, one_step = random(STATES), random(INNER, STATES) * 0.1 if unary else None
    made, full, skeletal = [], {}, {}
    for arity in arities:
        rules, full[arity], skeletal[arity] = random_rules(form, arity, random)
        made.append(rules)
    closure = None if one_step is None else Map(unary_closure(one_step))
    return CFG(root, tuple(made), closure), Full(root, full, skeletal, one_step)


def random_rules(form: str, arity: int, random) -> tuple[Rules, Tensor, list[int]]:
    """Rules of one form, themselves written out [lanes, ...], and the skeletal rule of each of these lanes."""
    shape = [INNER, *[STATES] * arity]
    if form == "dense":
        tensor = random(*shape)
        return Rules.from_tensor(tensor, arity), tensor.unsqueeze(0), [0]
    if form == "whole cp":
        factors = [random(2, size) for size in shape]
        return Rules.from_cp(*factors), outer(factors), [0, 0]
    if form == "entries":  # a third of all entries, in three skeletal rules
        some = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(7))
        place = some[: math.prod(shape) // 3]
        parent, *children = torch.unravel_index(place, shape)
        values, rule = random(len(place)), torch.arange(len(place)) % 3
        full = torch.zeros(3, *shape, dtype=F64).index_put((rule, parent, *children), values)
        return Rules.from_entries(parent, children, values, INNER, rule), full, [0, 1, 2]
    assert form == "rule cp"  # two rules of rank 2; the second one has a parent and a first child of one state
    states = [torch.tensor([[0, 1], [1, 9]]), torch.tensor([[2, 3], [0, 9]])]
    states += [torch.tensor([[1, 3], [1, 2]]) for _ in range(arity - 1)]
    factors = [random(2, 2, 2) for _ in states]
    rules = Rules.from_rule_cp(states, factors, STATES, INNER)
    written = []
    for factor, state, size in zip(factors, states, shape, strict=True):
        full = torch.zeros(2, 2, 10, dtype=F64)
        full.scatter_(2, state.unsqueeze(1).expand(2, 2, 2), factor)
        written.append(full[..., :size].flatten(0, 1))
    return rules, outer(written), [0, 0, 1, 1]


def outer(factors: list[Tensor]) -> Tensor:
    """[terms, x], [terms, y], ... -> [terms, x, y, ...]"""
    product = factors[0]
    for factor in factors[1:]:
        product = product.unsqueeze(-1) * factor.view(len(factor), *[1] * (product.dim() - 1), -1)
    return product


def without_lanes(full: Full) -> Full:
    """The same grammar with one weight for each choice of states."""
    rules = {arity: t.sum(0, keepdim=True) for arity, t in full.rules.items()}
    return replace(full, rules=rules, skeletal={arity: [0] for arity in rules})
