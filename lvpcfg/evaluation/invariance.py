"""Whether charts are right: what no change of basis may change (Cohen & Collins 2012), and two checks beside it.

With an invertible G^a for each symbol, cells y become G^a y:

    T'(a -> b c) = G^a T ((G^b)^-1, (G^c)^-1)      R' = G^a R (G^b)^-1      q' = G^a q      pi' = (G^a)^-T pi

log Z and the posteriors of symbols over spans and of anchored rules stay as they are. What mixes up axes, children or
states, or treats a state by itself (clamped, normalised, padded), shows. A lost or doubled term does not, since every
tree's score is invariant by itself. Two checks see those: the posteriors of the tags of each word add up to 1, and with
all weights 1, Z is the number of trees.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm import tqdm

from lvpcfg.chart.fast.build import form
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.marginals import anchored, by_symbol, marginals
from lvpcfg.distributions import ModelTrees, TreeDistribution
from lvpcfg.errors import InputError, show
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model

TOLERANCE = 1e-6
LENGTHS = (2, 3, 5)  # words of the sentences that a function is tried on
COUNTED = 5  # words, at the most, of the sentences whose trees are counted
OWN = (2, 3, 1, 2)  # states of S, A, N, V in the grammar that a function is tried on

# root [states], rules [interminals, states, states], words [n, word_states] -> log Z, posteriors [n, n, states] of the
# spans i, j, first and last word, and if it has them the expected counts of rules, [interminals, states, states].
Function = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Difference:
    """A score that is not what it should be."""

    score: str
    sentence: int  # from 1 on
    where: str
    expected: float
    found: float

    def __str__(self) -> str:
        return (
            f"sentence {self.sentence}, {self.score}{self.where}: expected {self.expected:.8g}, found {self.found:.8g}"
        )


@dataclass(frozen=True)
class Invariance:
    """What was compared, and the first differences of each kind, shortest spans first."""

    compared: int  # numbers
    largest: float  # difference
    differences: tuple[Difference, ...]
    missed: str  # what could not show

    @property
    def passed(self) -> bool:
        return not self.differences

    def line(self) -> str:
        """The verdict, as sentences."""
        if self.passed:
            text = f"{self.compared:,} scores are what they should be; the largest difference is {self.largest:.2g}."
        else:
            text = f"Scores differ. First, {self.differences[0]}."
        return f"{text} {self.missed}"


@dataclass(frozen=True, eq=False)
class Scores:
    """Of one sentence: numbers by kind, and where each of them is."""

    log_z: float
    spans: dict[str, Float64[Tensor, "i j symbols"]]  # by layer
    rules: list[tuple[str, float]]  # anchored, or all over the sentence


def check_invariance(
    model_or_distribution: "Model | TreeDistribution | Function",
    sentences: Iterable[Iterable[str]] | None = None,
    trials: int = 3,
    seed: int = 0,
    logarithms: bool = False,
    progress: bool = False,
) -> Invariance:
    """Checks whether a model's charts, or those of your own function, are right.

    With a model, give sentences; a `lvpcfg.distributions.ModelTrees` has its own. A function takes root, rules and
    words and returns log Z and the posteriors of spans (see `Function`). It is tried on a small random grammar. With
    `logarithms` it gets logarithms, and G is positive and diagonal. `progress` shows a bar.
    """
    if type(trials) is not int or trials < 1:
        raise InputError(f"trials is {show(trials)}: expected 1, 2, ...")
    subject = _subject(model_or_distribution, sentences, seed, logarithms)
    generator = torch.Generator().manual_seed(seed)
    bases = [[_basis(m, generator, logarithms) for m in subject.states] for _ in range(trials)]
    found = _Findings()
    for sentence in tqdm(
        range(subject.sentences), desc="checking", unit=" sentences", disable=None if progress else True, leave=False
    ):
        truth = subject.scores(sentence, None)
        for basis in bases:
            found.compare(sentence, truth, subject.scores(sentence, basis))
        found.tags(sentence, truth, subject.interminals)
        counts = subject.counts(sentence)
        if counts is not None:
            found.add("log Z with all weights 1", sentence, "", *counts)
    missed = "Each tree is invariant by itself: that trees are lost or doubled shows in their number alone."
    if logarithms:
        missed = (
            "G was diagonal, as logarithms need it: what mixes up states of one symbol, takes their maximum for their "
            "sum or clamps at zero does not show."
        )
    return Invariance(found.compared, found.largest, tuple(found.first.values()), missed)


class _Findings:
    """The first difference of each kind."""

    def __init__(self) -> None:
        self.first: dict[str, Difference] = {}
        self.compared, self.largest = 0, 0.0

    def add(self, score: str, sentence: int, where: str, expected: float, found: float) -> None:
        self.compared += 1
        difference = abs(expected - found)
        if expected == found:  # both infinite, for one
            return
        if not difference <= TOLERANCE * max(1.0, abs(expected)):
            self.first.setdefault(score, Difference(score, sentence + 1, where, expected, found))
        self.largest = max(self.largest, difference)

    def compare(self, sentence: int, truth: Scores, other: Scores) -> None:
        self.add("log Z", sentence, "", truth.log_z, other.log_z)
        for layer, spans in truth.spans.items():
            n = len(spans)
            for width in range(1, n + 1):
                for i in range(n - width + 1):
                    pairs = zip(
                        spans[i, i + width - 1].tolist(), other.spans[layer][i, i + width - 1].tolist(), strict=True
                    )
                    for symbol, (one, two) in enumerate(pairs):
                        where = f" of symbol {symbol} over words {i + 1} to {i + width}"
                        self.add(f"posterior{layer}", sentence, where, one, two)
        for (where, one), (_, two) in zip(truth.rules, other.rules, strict=True):
            self.add("posterior of a rule", sentence, where, one, two)

    def tags(self, sentence: int, truth: Scores, interminals: int) -> None:
        """The posteriors of each word's tags add up to 1."""
        spans = truth.spans.get(" below unary rules", next(iter(truth.spans.values())))
        if truth.log_z == -torch.inf:
            return
        for word, total in enumerate(spans.diagonal(0, 0, 1)[interminals:].sum(0).tolist(), 1):
            self.add("sum of the tags' posteriors", sentence, f" of word {word}", 1.0, total)


def _basis(m: int, generator: torch.Generator, positive: bool) -> Float64[Tensor, "{m} {m}"]:
    """A random invertible matrix, far from singular; or one that is diagonal and positive."""
    scale = torch.exp(torch.rand(m, generator=generator, dtype=torch.float64) - 0.5)
    if positive:
        return torch.diag(scale)
    rotation, _ = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))
    return rotation * scale


class OfModel:
    """The charts of this package, over a model's grammar, whatever its representation."""

    def __init__(self, trees: ModelTrees) -> None:
        self.grammar: Grammar = trees.model.grammar.to("cpu", torch.float64)
        self.leaf = trees.leaf.detach().to("cpu", torch.float64)
        sizes = [len(self.leaf)] * self.leaf.shape[1] if trees.lengths is None else trees.lengths.tolist()
        self.sizes: list[int] = sizes
        self.states, self.interminals = self.grammar.states.tolist(), len(self.grammar.symbols.interminals)
        self.sentences = len(sizes)

    def scores(self, sentence: int, basis: Sequence[Tensor] | None) -> Scores:
        leaf, grammar = self.leaf[: self.sizes[sentence], [sentence]], self.grammar
        if basis is not None:
            leaf = leaf @ torch.block_diag(*basis[self.interminals :]).T
            grammar = changed(grammar, basis)
        return self._scores(grammar, leaf)

    def _scores(self, grammar: Grammar, leaf: Float64[Tensor, "n 1 word_states"]) -> Scores:
        made = form(grammar)
        found = marginals(made, leaf)
        spans = {"": by_symbol(found.top[0], grammar), " below unary rules": by_symbol(found.bottom[0], grammar)}
        rules = []
        if isinstance(made, TensorForm) and len(grammar.binary) and bool(found.log_z.isfinite().all()):
            names, written = grammar.symbols.names, grammar.binary.written_out().rules.tolist()
            for width in range(2, len(leaf) + 1):
                values = anchored(made, leaf, width, len(written))[0]  # [starts, splits, rules]
                for i, of_start in enumerate(values.tolist()):
                    for k, of_split in enumerate(of_start, 1):
                        for (a, b, c), value in zip(written, of_split, strict=True):
                            where = f" {names[a]} -> {names[b]} {names[c]} over words {i + 1} to {i + k} and "
                            rules.append((f"{where}{i + k + 1} to {i + width}", value))
        return Scores(float(found.log_z[0]), spans, rules)

    def counts(self, sentence: int) -> tuple[float, float] | None:
        size, grammar = self.sizes[sentence], self.grammar
        if size > COUNTED:
            return None
        try:
            grammar = replace(grammar, binary=grammar.binary.written_out())
        except InputError:  # there are too many
            return None
        tensors = {name: torch.ones_like(tensor) for name, tensor in grammar.binary.tensors.items()}
        ones = replace(
            grammar,
            root=torch.ones_like(grammar.root),
            binary=grammar.binary.with_tensors(tensors),
            unary=torch.zeros_like(grammar.unary),  # chains of them may have no end
        )
        leaf = self.leaf.new_ones(size, 1, self.leaf.shape[2])
        found = marginals(form(ones), leaf).log_z
        return float(self._counted(ones, size).log()), float(found)

    @staticmethod
    def _counted(ones: Grammar, size: int) -> Float64[Tensor, ""]:
        """How many derivations there are of so many words, rule by rule."""
        a, b, c = ones.binary.rules.unbind(1)
        m, inner = ones.states.double(), len(ones.symbols.interminals)
        cells = {1: (torch.arange(len(m)) >= inner).double()}  # of any state of each symbol: they are all alike
        for width in range(2, size + 1):
            pairs = [(m * cells[k])[b] * (m * cells[width - k])[c] for k in range(1, width)]
            cells[width] = torch.zeros_like(m).index_add(0, a, torch.stack(pairs).sum(0))
        return (m * cells[size]).sum()


def changed(grammar: Grammar, basis: Sequence[Tensor]) -> Grammar:
    """The grammar in another basis of each symbol's states, without its words."""
    counts, widest = grammar.binary.state_counts, max(grammar.binary.state_counts)
    parent, child = torch.zeros(2, len(counts), widest, widest, dtype=torch.float64)
    for symbol, (m, g) in enumerate(zip(counts, basis, strict=True)):
        parent[symbol, :m, :m], child[symbol, :m, :m] = g.T, torch.linalg.inv(g)
    first = grammar.first_state.tolist()
    root = [
        child[symbol, :m, :m].T @ grammar.root[first[symbol] : first[symbol] + m] for symbol, m in enumerate(counts)
    ]
    unary = [
        (
            parent[a, : counts[a], : counts[a]].T @ grammar.unary_tensor(rule) @ child[b, : counts[b], : counts[b]]
        ).flatten()
        for rule, (a, b) in enumerate(grammar.unary_rules.tolist())
    ]
    return replace(
        grammar,
        root=torch.cat(root),
        binary=grammar.binary.transformed(counts, parent, child),
        unary=torch.cat([*unary, grammar.unary.new_zeros(0)]),
    )


class OfFunction:
    """A function of root, rules and words, on a random grammar S, A, (N, V) whose symbols may have any children."""

    def __init__(self, function: Function, seed: int, logarithms: bool) -> None:
        self.function, self.logarithms = function, logarithms
        self.states, self.interminals, self.sentences = [*OWN], 2, len(LENGTHS)
        generator = torch.Generator().manual_seed(seed)
        inner, states = sum(OWN[:2]), sum(OWN)

        def random(*shape: int) -> Tensor:
            return 0.1 + torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.root, self.rules = random(states), random(inner, states, states) / 4
        self.words = [random(n, states - inner) for n in LENGTHS]
        self.symbol = torch.repeat_interleave(torch.tensor(OWN))

    def scores(self, sentence: int, basis: Sequence[Tensor] | None) -> Scores:
        root, rules, words = self.root, self.rules, self.words[sentence]
        if basis is not None:
            g, inner = torch.block_diag(*basis), len(rules)
            back = torch.linalg.inv(g)
            root, words = back.T @ root, words @ g[inner:, inner:].T
            rules = torch.einsum("ix,xyz,yj,zk->ijk", g[:inner, :inner], rules, back, back)
        log_z, spans, *counts = self._called(root, rules, words)
        member = torch.nn.functional.one_hot(self.symbol).double()
        named = []
        if counts:
            of_rules = torch.einsum("xyz,xa,yb,zc->abc", counts[0].double(), member[: len(rules)], member, member)
            for a, b, c in (of_rules[: self.interminals] * 0 + 1).nonzero().tolist():
                named.append((f" {a} -> {b} {c}", float(of_rules[a, b, c])))
        return Scores(float(log_z), {"": spans.double() @ member}, named)

    def _called(self, *parameters: Tensor) -> list[Tensor]:
        given = [x.log() if self.logarithms else x for x in parameters]
        found = [torch.as_tensor(x).detach() for x in self.function(*(x.clone() for x in given))]
        n, states = len(parameters[2]), len(parameters[0])
        shapes = [(), (n, n, states), tuple(self.rules.shape)]
        if len(found) not in (2, 3) or any(x.shape != shape for x, shape in zip(found, shapes, strict=False)):
            raise InputError(
                f"the function gave {[tuple(x.shape) for x in found]} for {n} words: expected log Z, posteriors "
                f"{shapes[1]}, and if it has them counts of rules {shapes[2]}."
            )
        return found

    def counts(self, sentence: int) -> tuple[float, float] | None:
        words = torch.ones_like(self.words[sentence])
        ones = torch.ones_like(self.root), torch.ones_like(self.rules), words
        cells = {1: torch.cat([self.root.new_zeros(len(self.rules)), words[0]])}
        for width in range(2, len(words) + 1):
            pairs = sum((cells[k].sum() * cells[width - k].sum() for k in range(1, width)), self.root.new_zeros(()))
            cells[width] = torch.cat([pairs.expand(len(self.rules)), 0 * words[0]])
        return float(cells[len(words)].sum().log()), float(self._called(*ones)[0])


Subject = OfModel | OfFunction


def _subject(given: object, sentences: Iterable[Iterable[str]] | None, seed: int, logarithms: bool) -> Subject:
    if isinstance(given, Model | ModelTrees):
        if logarithms:
            raise InputError("logarithms are for functions of one's own: a model's charts take any numbers.")
        if isinstance(given, Model):
            if sentences is None:
                raise InputError("check_invariance of a model needs sentences: lists of words.")
            given = ModelTrees(given, sentences)
        elif sentences is not None:
            raise InputError("a distribution has its sentences already: expected no others.")
        return OfModel(given)
    if isinstance(given, TreeDistribution) or not callable(given):
        raise InputError(
            f"check_invariance of {show(given)}: expected a model, a ModelTrees distribution, or a function of root, "
            "rules and words."
        )
    if sentences is not None:
        raise InputError("a function is tried on words of its own: expected no sentences.")
    return OfFunction(given, seed, logarithms)
