"""A model -> a smaller or a faster one, and what that does to its rules.

als        each rule tensor in Kruskal form by least squares, where its error is small (Cohen & Collins 2012)
cover      all rules as one sum of rank-one terms, exactly
svd        the same by an SVD of each parent's slice, up to an error
apr        the same by CP-APR of the expected counts: normalised, and tight to a tolerance (Cohen, Satta & Collins 2013)
gradient   the same by gradient descent
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lvpcfg.decompose.als import STARTS, als
from lvpcfg.decompose.apr import STARTS as APR_STARTS
from lvpcfg.decompose.apr import apr, conditional, expected_counts
from lvpcfg.decompose.gradient import LOSSES, NONNEGATIVE, OPTIMISERS, VALUES, KruskalGrammar
from lvpcfg.decompose.kinds import APART, CHILD_TYPES, TOGETHER, apr_by_kind, cover_by_kind
from lvpcfg.decompose.svd import slice_svd
from lvpcfg.decompose.whole import Difference, difference, rule_tensor
from lvpcfg.errors import InputError, expect, show
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.kruskal import Factors, RuleFactors
from lvpcfg.grammar.model import Model

KINDS = ("two phrases", "a phrase and a word", "a word and a phrase", "two words")
Progress = Callable[[int, int], object]  # done, of how many


@dataclass
class Options:
    """Of the method `cover`, which has none, and of all others. What they mean stands in `conf/decompose/`."""

    name: str = "cover"


@dataclass
class ALSOptions(Options):
    name: str = "als"
    rank: int = 8
    threshold: float = 1e-3
    iterations: int = 1000
    tolerance: float = 1e-3
    start: str = "hosvd"
    restarts: int = 0
    steps: int = 100
    nonnegative: bool = False


@dataclass
class SVDOptions(Options):
    name: str = "svd"
    error: float = 1e-3


@dataclass
class APROptions(Options):
    name: str = "apr"
    rank: int = 260
    iterations: int = 100
    tolerance: float = 1e-4
    start: str = "cover"
    starts: int = 1
    child_types: str = APART


@dataclass
class GradientOptions(Options):
    name: str = "gradient"
    rank: int = 64
    loss: str = "squared"
    optimiser: str = "lbfgs"
    values: str = NONNEGATIVE
    iterations: int = 200


METHODS: dict[str, type[Options]] = {
    "als": ALSOptions,
    "cover": Options,
    "svd": SVDOptions,
    "apr": APROptions,
    "gradient": GradientOptions,
}
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "als": {"start": STARTS},
    "apr": {"start": tuple(APR_STARTS), "child_types": CHILD_TYPES},
    "gradient": {"loss": LOSSES, "optimiser": OPTIMISERS, "values": VALUES},
}


def check(options: Options) -> None:
    """Values that make no sense stop here."""
    expect("decompose.name", options.name, (type(options)().name,))
    for name, value in asdict(options).items():
        known = CHOICES.get(options.name, {}).get(name)
        if known is not None:
            expect(f"decompose.{name}", value, known)
        elif type(value) in (int, float):
            least = 1 if name in ("rank", "iterations", "starts") else 0
            if not least <= value < float("inf"):
                raise InputError(f"decompose.{name} is {show(value)}: expected a number from {least} on.")
    if isinstance(options, SVDOptions) and options.error >= 1:
        raise InputError(f"decompose.error is {options.error}: expected a share of the squared norm, less than 1.")
    if isinstance(options, GradientOptions) and options.loss == "kl" and options.values == "signed":
        raise InputError("decompose.loss is kl: expected decompose.values=nonnegative or normalised with it.")


@dataclass(frozen=True, eq=False)
class Compression:
    """What became of the rules of a model."""

    model: Model
    kind: Tensor  # [rules]: 0 .. 3, as in KINDS
    gamma: Tensor  # [rules]: ||T - T^||_F of the rules that a Kruskal form of their own was tried for, else nan
    error: float  # ||T - T^||_F of the whole grammar
    negative: Tensor  # [rules]: the share of |T^| in entries below zero, of rules with a form of their own, else 0
    whole: Difference | None  # of T^ and T, where one form stands for all rules
    before: int  # numbers that the binary rules take
    after: int

    @property
    def approximated(self) -> Tensor:
        """[rules]"""
        factored = self.model.grammar.factored
        mask = torch.zeros_like(self.kind, dtype=torch.bool)
        return mask if factored is None else mask.index_fill(0, factored.rules, True)


def compress(model: Model, method: str = "als", seed: int = 0, **options: Any) -> Model:
    """The model with its binary rules in Kruskal form; `options` are those of the method: `rank=8` and so on."""
    expect("method", method, tuple(METHODS))
    known = set(METHODS[method].__dataclass_fields__) - {"name"}
    for name in options:
        if name not in known:
            raise InputError(f"the method {method} has no option {show(name)}: it has {', '.join(sorted(known))}.")
    return decompose(model, METHODS[method](**options), seed).model


def decompose(model: Model, options: Options, seed: int = 0, progress: Progress | None = None) -> Compression:
    check(options)
    grammar = model.grammar
    if grammar.factored is not None or grammar.kruskal is not None:
        raise InputError("the model is compressed already: expected one as job=train makes it.")
    if isinstance(options, APROptions) and options.rank < len(grammar.binary_kinds.unique()):
        options = replace(options, child_types=TOGETHER)  # there is no term for each
    if isinstance(options, ALSOptions):
        found = fit_rules(grammar, options, seed, progress)
        small, gamma, negative, whole = found.within(options.threshold), found.gamma, found.negative, None
        error = float(torch.where(gamma <= options.threshold, gamma, 0).norm()) if options.threshold else 0.0
    else:
        factors = _whole(grammar, options, seed, progress).map(lambda x: x.to(grammar.binary.dtype))
        small, whole = replace(grammar, kruskal=factors), difference(rule_tensor(grammar), factors)
        error = float(whole.error.norm())
        gamma = torch.full((len(grammar.binary_rules),), torch.nan, dtype=torch.float64)
        negative = torch.zeros_like(gamma)
    provenance = model.provenance | {"compressed": asdict(options) | {"seed": seed}}
    return Compression(
        replace(model, grammar=small, provenance=provenance),
        grammar.binary_kinds,
        gamma,
        error,
        negative,
        whole,
        grammar.binary.numel(),
        numbers_of(small),
    )


def numbers_of(grammar: Grammar) -> int:
    """How many numbers the binary rules are computed with."""
    if grammar.kruskal is not None:
        return sum(factor.numel() for factor in vars(grammar.kruskal).values())
    if grammar.factored is None:
        return grammar.binary.numel()
    sizes = grammar.states[grammar.binary_rules[grammar.factored.rules]]
    return grammar.binary.numel() + grammar.factored.factors.rank * int(sizes.sum())


@dataclass(frozen=True, eq=False)
class FittedRules:
    """Kruskal forms of the rules that would be smaller so; which of them are used is a matter of a threshold."""

    grammar: Grammar
    forms: RuleFactors
    gamma: Tensor  # [rules], nan where there is no form
    negative: Tensor  # [rules]

    def within(self, threshold: float) -> Grammar:
        """A rule keeps its tensor unless gamma <= threshold; 0 is exact inference."""
        grammar, forms = self.grammar, self.forms
        chosen = self.gamma[forms.rules] <= (threshold or -1)
        rules = forms.rules[chosen]
        if not len(rules):
            return grammar
        volume = grammar.states[grammar.binary_rules].prod(1)
        kept = torch.ones_like(volume, dtype=torch.bool).index_fill(0, rules, False)
        binary = grammar.binary[torch.repeat_interleave(kept, volume)]
        factored = RuleFactors(rules, forms.factors.map(lambda factor: factor[chosen]))
        return replace(grammar, binary=binary, factored=factored)


def fit_rules(grammar: Grammar, options: ALSOptions, seed: int = 0, progress: Progress | None = None) -> FittedRules:
    """Rules of similar shapes are fitted together, padded by zeros, which least squares keeps."""
    sizes = grammar.states[grammar.binary_rules]
    smaller = options.rank * sizes.sum(1) < sizes.prod(1)
    rounded = 2 ** sizes.double().log2().ceil().long()
    rounded = torch.minimum(rounded, sizes.amax(0))
    gamma = torch.full((len(sizes),), torch.nan, dtype=torch.float64)
    negative = torch.zeros_like(gamma)
    widest = int(grammar.states.max())
    rules = smaller.nonzero().squeeze(1)
    factors = Factors(*grammar.binary.new_zeros(3, len(rules), options.rank, widest))
    total, done = len(rules) * (options.restarts + 1), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    for shape in rounded[rules].unique(dim=0):
        places = (rounded[rules] == shape).all(1).nonzero().squeeze(1)
        x, y, z = shape.tolist()
        tensors = grammar.binary.new_zeros(len(places), x, y, z)
        for tensor, rule in zip(tensors, rules[places].tolist(), strict=True):
            own = grammar.binary_tensor(rule)
            tensor[: own.shape[0], : own.shape[1], : own.shape[2]] = own
        fit = als(
            tensors,
            options.rank,
            options.iterations,
            options.tolerance,
            options.start,
            options.restarts,
            options.nonnegative,
            seed,
            options.steps,
            advance,
        )
        for into, found in zip(vars(factors).values(), vars(fit.factors).values(), strict=True):
            into[places, :, : found.shape[2]] = found
        gamma[rules[places]] = fit.error
        approximation = fit.factors.tensor().flatten(1)
        mass = approximation.abs().sum(1).clamp_min(1e-300)
        negative[rules[places]] = (-approximation.clamp_max(0).sum(1) / mass).double()
    return FittedRules(grammar, RuleFactors(rules, factors), gamma, negative)


def _whole(grammar: Grammar, options: Options, seed: int, progress: Progress | None) -> Factors:
    """All binary rules together, over the states of all symbols."""
    if not len(grammar.binary):
        raise InputError("the grammar has no binary rules to decompose.")
    tensor = rule_tensor(grammar)
    if isinstance(options, SVDOptions):
        return slice_svd(tensor, options.error).factors
    if isinstance(options, APROptions):
        inner = tensor.shape[0]
        fit = (apr_by_kind if options.child_types == APART else apr)(
            expected_counts(grammar),
            options.rank,
            options.iterations,
            progress=None if progress is None else lambda sweep, *_: progress(sweep, options.iterations),
            tolerance=options.tolerance,
            start=options.start,
            starts=options.starts,
            seed=seed,
        )
        return conditional(fit.factors, expected_states(grammar)[:inner].double())
    if isinstance(options, GradientOptions):
        tensor = tensor.double()
        x, y, z = tensor.shape
        mass = tensor.values().new_zeros(x).index_add(0, tensor.indices()[0], tensor.values())
        parameters = KruskalGrammar(options.rank, (x, y, z), options.values, seed, tensor.device, tensor.dtype, mass)
        parameters.fit(
            tensor,
            options.loss,
            options.optimiser,
            options.iterations,
            progress=None if progress is None else lambda step, _: progress(step + 1, options.iterations),
        )
        return parameters().map(torch.Tensor.detach)
    return cover_by_kind(tensor)
