"""Whether a grammar is a distribution: how much of its probability is on trees that end.

    Z_a = least fixed point of  Z_a = sum over a -> b c of t Z_b Z_c + sum over a -> b of r Z_b + sum over a -> x of q
    by Newton from below:  z <- z + (I - J)^-1 (F(z) - z),  one strongly connected component after the other

M, the derivative J where all Z are 1, holds the expected number of b's in one rewrite of a: where its spectral radius
is below 1, the grammar is tight (Chi 1999; Etessami & Yannakakis 2009 for Newton). A grammar whose radius is 1 is
critical: Newton converges by halves there, and about 1e-8 is what float64 can say of Z.

Chi's renormalisation, p' = p Z_b Z_c / Z_a, makes a grammar tight and leaves the probability of trees given words.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.grammar.expectations import components, radius
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model

NEARLY = 1 - 1e-6  # of the probability on trees that end is all of it
ROUNDING = 1e-4  # sums of probabilities as near to 1 are 1, but for rounding
CRITICAL = 1 - 1e-7  # a spectral radius from here on is 1, as far as float64 can tell
STEPS = 200  # of Newton; a critical component needs about 30
LITTLE = 1e-11  # |F(z) - z| of a fixed point, but for rounding
GENERATIONS = 300  # that shares of states are looked at over
LEAKS = 10  # rules in a report


@dataclass(frozen=True)
class Leak:
    """A rule by which trees become infinite."""

    rule: str
    share: float  # of all nodes of large trees: those that rewrite by it and never end


@dataclass(frozen=True)
class Verdict:
    """What is known of one symbol."""

    symbol: str
    mass: float | None  # of the finite trees below it, from the worst of its states; None where it is not finite
    tight: bool


@dataclass(frozen=True, eq=False)
class Tightness:
    """Whether a grammar is a distribution over finite trees."""

    spectral_radius: float
    mass: float | None  # total probability of finite trees; None where the weights of all trees have no finite sum
    tight: bool
    expected_length: float | None  # words of a tree; None where it is infinite
    expected_size: float | None  # nodes of a binarised tree, tags among them
    partition: Float64[Tensor, "states"]  # Z of each state of each symbol
    symbols: tuple[Verdict, ...]
    leaks: tuple[Leak, ...]  # where it is not tight, the rules that leak most
    normalised: bool  # whether what each state rewrites to adds up to 1; else mass is lost without any infinite tree
    signed: bool  # whether it has numbers below zero, and is no distribution whatever its mass
    residual: float  # the largest |F(Z) - Z|: the check of Newton's result

    def figures(self) -> dict[str, float | None]:
        """For `result.json`."""
        return {
            "spectral_radius": self.spectral_radius,
            "mass": self.mass,
            "tight": int(self.tight),
            "expected_length": self.expected_length,
        }

    def line(self) -> str:
        """The verdict, as a sentence."""
        mass = "have no finite sum" if self.mass is None else f"add up to {self.mass:.8g}"
        verdict = "tight" if self.tight else "not tight"
        text = f"The probabilities of its trees {mass}; the spectral radius is {self.spectral_radius:.6g}: {verdict}."
        if self.signed:
            text += " It has numbers below zero: its sums are no probabilities."
        elif not self.normalised:
            text += " What its states rewrite to does not add up to 1."
        elif abs(self.spectral_radius - 1) <= 1 - CRITICAL:
            text += " It is critical: its mass is known to about 1e-8."
        if self.expected_length is not None:
            text += f" A tree has {self.expected_length:.4g} words on average."
        return text


def tightness(model: Model | Grammar) -> Tightness:
    """Whether the trees of a grammar end: `mass` is the total probability of its finite trees."""
    grammar = _grammar(model)
    system = _system(grammar)
    z, residual = _least_fixed_point(system, not grammar.signed)
    worth = system.of_states(z)
    mass = float((grammar.root * worth)[grammar.root != 0].sum())
    found = system.spectral_radius()
    tight = mass >= NEARLY
    sizes = _expected_sizes(grammar, system) if tight and math.isfinite(mass) else None
    length, size = (None, None) if sizes is None else sizes
    return Tightness(
        spectral_radius=found,
        mass=mass if math.isfinite(mass) else None,
        tight=tight and math.isfinite(mass),
        expected_length=length,
        expected_size=size,
        partition=worth,
        symbols=_verdicts(grammar, worth),
        leaks=() if tight or grammar.signed else _leaks(grammar, system, worth),
        normalised=_normalised(grammar),
        signed=grammar.signed,
        residual=residual,
    )


def mass_of(grammar: Grammar) -> float:
    """The total probability of its finite trees, and nothing else: infinite where there is no finite sum."""
    plain = _grammar(grammar)
    system = _system(plain)
    worth = system.of_states(_least_fixed_point(system, not plain.signed)[0])
    return float((plain.root * worth)[plain.root != 0].sum())


def renormalise(model: Model) -> Model:
    """Chi's renormalisation: a tight model with the same probabilities of trees given their words.

    p'(a -> b c) = p Z_b Z_c / Z_a, and likewise for unary rules, words and root. Every representation of binary rules
    keeps its form and its rank. States without finite trees lose their rules.
    """
    if not isinstance(model, Model):
        raise InputError(f"what is to be renormalised is {show(model)}: expected a model. Model.load reads a folder.")
    grammar = model.grammar
    if grammar.signed:
        raise InputError("the model has numbers below zero: expected one of probabilities.")
    if grammar.closed:
        raise InputError(
            "the model has closed chains of unary rules, of which a span takes one: expected single rules."
        )
    if grammar.lexical.network is not None:
        raise InputError("renormalise needs a model with probabilities of words: this one has a network for them.")
    plain = _with_rounded_rows(grammar.to("cpu", torch.float64))
    system = _system(plain)
    z = system.of_states(_least_fixed_point(system, True)[0])
    mass = (plain.root * z)[plain.root != 0].sum()
    if not bool(mass.isfinite()):
        raise InputError("the weights of the model's trees have no finite sum: nothing can make it a distribution.")
    if not bool(mass > 0):
        raise InputError("no tree of the model ends: there is nothing to renormalise.")
    back, inner = torch.where(z > 0, 1 / z, 0), plain.interminal_states
    parent, child = plain.unary_states()
    made = replace(
        plain,
        root=plain.root * z / mass,
        binary=plain.binary.scaled(back[:inner], z),
        unary=plain.unary * back[parent] * z[child],
        lexical=plain.lexical.scale(torch.ones_like(plain.lexical.weight), back[inner:]),
    )
    made = made.to(grammar.root.device, grammar.root.dtype)
    return replace(model, grammar=made, provenance=model.provenance | {"renormalised": True})


@dataclass(frozen=True, eq=False)
class OverStates:
    """The unknowns are Z of the states of interminals.

    In a closed grammar a span has one chain at the most: F = (I + R)(T(z, z)) + what chains give to tags.
    """

    grammar: Grammar
    tags: Float64[Tensor, "tag_states"]  # Z of the states of preterminals

    @property
    def unknowns(self) -> int:
        return self.grammar.interminal_states

    @cached_property
    def unary(self) -> Float64[Tensor, "interminal_states states"]:
        return self.grammar.unary_matrix()

    def _above(self, binary: Float64[Tensor, "interminal_states *some"]) -> Float64[Tensor, "interminal_states *some"]:
        """What stands above a binary rule: in a closed grammar, a chain or none."""
        return binary + self.unary[:, : self.unknowns] @ binary if self.grammar.closed else binary

    def _rewrites(self, x: Float64[Tensor, "x"]) -> Float64[Tensor, "x states"]:
        return self._above(self.grammar.binary.rewrites(self.of_states(x)))

    def at(self, x: Float64[Tensor, "x"]) -> tuple[Float64[Tensor, "x"], Float64[Tensor, "x x"]]:
        z, rewrites = self.of_states(x), self._rewrites(x)
        value, jacobian = rewrites @ z / 2, rewrites[:, : self.unknowns]  # T(z, z) is half of its derivative, times z
        if self.grammar.closed:  # phrases are below chains already
            return value + self.unary[:, self.unknowns :] @ self.tags, jacobian
        return value + self.unary @ z, jacobian + self.unary[:, : self.unknowns]

    def of_states(self, x: Float64[Tensor, "x"]) -> Float64[Tensor, "states"]:
        return torch.cat([x, self.tags])

    @cached_property
    def once(self) -> Float64[Tensor, "x states"]:
        """M: what is expected in one rewrite."""
        found = self._rewrites(torch.ones_like(self.tags).new_ones(self.unknowns))
        if not self.grammar.closed:
            return found + self.unary
        return found + torch.nn.functional.pad(self.unary[:, self.unknowns :], (self.unknowns, 0))

    def children(self, parents: Float64[Tensor, "states"]) -> Float64[Tensor, "states"]:
        return self.once.T @ parents[: self.unknowns]

    def expected(
        self, root: Float64[Tensor, "states"], some: Int64[Tensor, "reached"]
    ) -> Float64[Tensor, "states"] | None:
        """v = root + M^T v, where these states of interminals are reached; None where it is infinite.

        Of a tight grammar it is finite where the radius of M between them is below 1.
        """
        used = _geometric(self.once[some][:, some], root[some])
        return None if used is None else root + self.once[some].T @ used

    def spectral_radius(self) -> float:
        return radius(self.once[:, : self.unknowns])


@dataclass(frozen=True, eq=False)
class OverTerms:
    """The unknowns are what the terms of one CP form are worth, t = (V z) * (W z), where z = U^T t: O(m r) a step.

    For grammars without unary rules that have fewer terms than states; the rules are never written out.
    """

    terms: Factors
    tags: Float64[Tensor, "tag_states"]

    @property
    def unknowns(self) -> int:
        return self.terms.rank

    def at(self, x: Float64[Tensor, "x"]) -> tuple[Float64[Tensor, "x"], Float64[Tensor, "x x"]]:
        z = self.of_states(x)
        jacobian = self._derivative(z)[:, : self.terms.u.shape[1]] @ self.terms.u.T
        return (self.terms.v @ z) * (self.terms.w @ z), jacobian

    def _derivative(self, z: Float64[Tensor, "states"]) -> Float64[Tensor, "x states"]:
        v, w = self.terms.v, self.terms.w
        return v * (w @ z).unsqueeze(1) + w * (v @ z).unsqueeze(1)

    def of_states(self, x: Float64[Tensor, "x"]) -> Float64[Tensor, "states"]:
        return torch.cat([self.terms.u.T @ x, self.tags])

    @cached_property
    def once(self) -> Float64[Tensor, "x states"]:
        return self._derivative(self.terms.v.new_ones(self.terms.v.shape[1]))

    def children(self, parents: Float64[Tensor, "states"]) -> Float64[Tensor, "states"]:
        return self.once.T @ (self.terms.u @ parents[: self.terms.u.shape[1]])

    def expected(
        self, root: Float64[Tensor, "states"], some: Int64[Tensor, "reached"]
    ) -> Float64[Tensor, "states"] | None:
        """As `OverStates.expected`, by how often each term is used."""
        u = self.terms.u[:, some]
        through = (u != 0).any(1).nonzero().squeeze(1)
        u, once = u[through], self.once[through]
        used = _geometric(once[:, some] @ u.T, u @ root[some])
        return None if used is None else root + once.T @ used

    def spectral_radius(self) -> float:
        return radius(self.once[:, : self.terms.u.shape[1]] @ self.terms.u.T)  # U^T K and K U^T have the same


System = OverStates | OverTerms  # z = F(z) as positive polynomials of degree two, in as few unknowns as possible


def _geometric(m: Float64[Tensor, "x x"], start: Float64[Tensor, "x"]) -> Float64[Tensor, "x"] | None:
    """The sum of all (M^T)^k start; None where it is infinite."""
    if radius(m) >= CRITICAL:
        return None
    return torch.linalg.solve((torch.eye(len(m), dtype=m.dtype) - m).T, start)


def _grammar(model: Model | Grammar) -> Grammar:
    """In float64, with sums of probabilities that are 1 but for rounding made 1."""
    if not isinstance(model, Model | Grammar):
        raise InputError(f"tightness of {show(model)}: expected a model or a grammar. Model.load reads a folder.")
    grammar = model.grammar if isinstance(model, Model) else model
    return _with_rounded_rows(grammar.to("cpu", torch.float64))


def _with_rounded_rows(grammar: Grammar) -> Grammar:
    """Rounding errors add up over the rules of a tree, and would look like mass that is lost."""
    sums, total, inner = grammar.row_sums().detach(), grammar.root.detach().sum(), grammar.interminal_states
    near = (sums - 1).abs() <= ROUNDING
    # In a closed grammar rows do not add up to 1: it holds the best chains.
    factor = torch.where(near & (not grammar.closed), 1 / sums, 1)
    parent, _ = grammar.unary_states()
    binary = grammar.binary.with_tensors({name: x.detach() for name, x in grammar.binary.tensors.items()})
    return replace(
        grammar,
        root=grammar.root.detach() / torch.where((total - 1).abs() <= ROUNDING, total, 1),
        binary=binary.scaled(factor[:inner]),
        unary=grammar.unary.detach() * factor[parent],
        lexical=grammar.lexical.scale(torch.ones_like(grammar.lexical.weight), factor[inner:]),
    )


def _normalised(grammar: Grammar) -> bool:
    """But for rounding; states that rewrite to nothing do not count."""
    sums = torch.cat([grammar.row_sums(), grammar.root.sum().unsqueeze(0)])
    return bool(((sums == 0) | ((sums - 1).abs() <= ROUNDING)).all())


def _system(grammar: Grammar) -> System:
    tags = grammar.lexical.column_sums()
    if grammar.lexical.network is not None:  # which shares out among words what a tag has
        tags = (tags != 0).to(tags.dtype)
    terms = grammar.binary.few_terms
    if terms is not None and not len(grammar.unary_rules):
        return OverTerms(terms, tags)
    return OverStates(grammar, tags)


def _least_fixed_point(system: System, nonnegative: bool) -> tuple[Float64[Tensor, "x"], float]:
    """x = F(x) from below, and the largest |F(x) - x|. Components that have none are infinite, and all that need them.

    With numbers below zero nothing is monotone: then it is the fixed point that Newton finds from 0, or nan.
    """
    x = torch.zeros(system.unknowns, dtype=torch.float64)
    if not system.unknowns:
        return x, 0.0
    if not nonnegative:
        return _newton(system, x, torch.ones(len(x), dtype=torch.bool), False)
    productive, depends = _productive(system)
    residual = 0.0
    for level in _levels(depends):
        members = level & productive
        needs = members & depends[:, x.isinf()].any(1)
        while bool((more := needs | (members & depends[:, needs].any(1))).ne(needs).any()):
            needs = more
        x[needs] = torch.inf
        members &= ~needs
        if bool(members.any()):
            x, error = _newton(system, x, members, True)
            residual = max(residual, error)
    return x, residual


def _productive(system: System) -> tuple[Bool[Tensor, "x"], Bool[Tensor, "x x"]]:
    """Which unknowns are above zero, since they have a finite tree, and which of them need which others."""
    some = torch.zeros(system.unknowns, dtype=torch.bool)
    value, jacobian = system.at(some.double())
    while bool((value > 0).ne(some).any()):
        some = value > 0
        value, jacobian = system.at(some.double())
    return some, (jacobian > 0) & some & some.unsqueeze(1)


def _levels(depends: Bool[Tensor, "x x"]) -> list[Bool[Tensor, "x"]]:
    """Strongly connected components, those that others depend on first.

    Components of one level do not depend on each other: they are one set, and Newton on it is Newton on each.
    """
    component, reach = components(depends)
    depth = torch.zeros(len(depends), dtype=torch.int64)
    for number in reach.sum(1).argsort().tolist():  # what it reaches reaches less, or is of its component
        others = reach[number] & (component != component[number])
        if bool(others.any()):
            depth[number] = 1 + depth[others].max()
    return [depth == level for level in range(int(depth.max()) + 1)]


def _newton(
    system: System, x: Float64[Tensor, "x"], members: Bool[Tensor, "x"], nonnegative: bool
) -> tuple[Float64[Tensor, "x"], float]:
    """Newton over some unknowns, the others as they are, and |F(x) - x| in the end.

    Where there is no fixed point they are infinite; with signs, where none is found, nan.
    """
    some, finite = members.nonzero().squeeze(1), x.isfinite()
    identity = torch.eye(len(some), dtype=torch.float64)
    best, smallest = x, math.inf
    for _ in range(STEPS):
        value, jacobian = system.at(torch.where(finite, x, 0))
        rest = value[some] - x[some]
        error = float(rest.abs().max())
        if error >= smallest and smallest < LITTLE:  # as near as rounding lets it come
            break
        if nonnegative and bool((rest < -LITTLE * (1 + x[some])).any()):  # it was above: there is none
            break
        best, smallest = x, error
        step, _ = torch.linalg.solve_ex(identity - jacobian[some][:, some], rest)
        if not error or not bool(step.isfinite().all()):
            break
        if nonnegative:
            if bool((step < -LITTLE * (1 + x[some])).any()):
                break
            step = step.clamp_min(0)
        x = x.index_add(0, some, step)
    if smallest > LITTLE * (1 + float(best[some].abs().max())):
        best = best.index_fill(0, some, torch.inf if nonnegative else torch.nan)
        smallest = 0.0
    return best, smallest


def _expected_sizes(grammar: Grammar, system: System) -> tuple[float, float] | None:
    """Words and nodes of a tree; None, where they are infinite."""
    reached = grammar.root != 0
    while bool((more := reached | (system.children(reached.double()) != 0)).ne(reached).any()):
        reached = more
    inner = grammar.interminal_states
    expected = system.expected(grammar.root, reached[:inner].nonzero().squeeze(1))
    return None if expected is None else (float(expected[inner:].sum()), float(expected.sum()))


def _verdicts(grammar: Grammar, worth: Float64[Tensor, "states"]) -> tuple[Verdict, ...]:
    """Of each symbol by the worst of its states; states without rules do not count."""
    first, used = grammar.first_state.tolist(), grammar.row_sums() != 0
    found = []
    for symbol, name in enumerate(grammar.symbols.names):
        here = slice(first[symbol], first[symbol + 1])
        of_states = worth[here][used[here]] if bool(used[here].any()) else worth[here]
        mass = float(of_states.min()) if bool(of_states.isfinite().all()) else None
        found.append(Verdict(name, mass, mass is not None and mass >= NEARLY))
    return tuple(found)


def _leaks(grammar: Grammar, system: System, worth: Float64[Tensor, "states"]) -> tuple[Leak, ...]:
    """The rules by which most nodes of large trees rewrite and never end: p (1 - Z_b Z_c), summed over states."""
    share = _shares(grammar, system)
    inner, symbols = grammar.interminal_states, len(grammar.symbols)
    ends = torch.where(worth.isfinite(), worth.clamp_max(1), 0)

    def of_rules(children: Tensor) -> tuple[Tensor, Tensor]:
        """Each rule's sum over states, of parents by their share and of children by these weights."""
        binary = grammar.binary.scaled(share[:inner], children)
        widest = max(binary.state_counts)
        together = torch.ones(symbols, widest, 1, dtype=torch.float64)
        values = binary.transformed((1,) * symbols, together, together).listed().values
        parent, child = grammar.unary_states()
        numbers = grammar.unary * share[parent] * children[child]
        rule = torch.repeat_interleave(grammar.unary_starts.diff(), output_size=len(numbers))
        return values, numbers.new_zeros(len(grammar.unary_rules)).index_add(0, rule, numbers)

    lost = torch.cat(
        [every - ending for every, ending in zip(of_rules(torch.ones_like(ends)), of_rules(ends), strict=True)]
    )
    rules, names = [*grammar.binary_rules.tolist(), *grammar.unary_rules.tolist()], grammar.symbols.names
    found = []
    for number in lost.argsort(descending=True)[:LEAKS].tolist():
        parent, *children = (names[symbol] for symbol in rules[number])
        if lost[number] > 0:
            found.append(Leak(f"{parent} -> {' '.join(children)}", float(lost[number])))
    return tuple(found)


def _shares(grammar: Grammar, system: System) -> Float64[Tensor, "states"]:
    """How often each state of an interminal stands in large trees, in proportion: the mean over many generations."""
    now, total = grammar.root.clone(), torch.zeros_like(grammar.root)
    for _ in range(GENERATIONS):
        now[grammar.interminal_states :] = 0
        if not bool(now.sum() > 0):
            break
        now = now / now.sum()
        total += now
        now = system.children(now)
    return total / total.sum().clamp_min(1e-300)
