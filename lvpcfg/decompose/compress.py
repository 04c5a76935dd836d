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

from lvpcfg.decompose.als import als
from lvpcfg.decompose.apr import apr, conditional, expected_counts
from lvpcfg.decompose.child_types import apr_by_child_types, cover_by_child_types
from lvpcfg.decompose.dense import Difference, difference, rule_tensor
from lvpcfg.decompose.gradient import CPGrammar
from lvpcfg.decompose.options import (
    APART,
    METHODS,
    TOGETHER,
    ALSOptions,
    APROptions,
    GradientOptions,
    Options,
    SVDOptions,
    check,
)
from lvpcfg.decompose.svd import slice_svd
from lvpcfg.errors import InputError, expect, show
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.whole_cp import WholeCP

KINDS = ("two phrases", "a phrase and a word", "a word and a phrase", "two words")
Progress = Callable[[int, int], object]  # done, of how many


@dataclass(frozen=True, eq=False)
class Compression:
    """What became of the rules of a model."""

    model: Model
    source: Grammar  # what was compressed
    factors: Factors | None  # all rules as one CP form, where the method makes one
    kind: Tensor  # [rules]: 0 .. 3, as in KINDS
    approximated: Tensor  # [rules]: which are in a CP form of their own
    gamma: Tensor  # [rules]: ||T - T^||_F of the rules that a Kruskal form of their own was tried for, else nan
    error: float  # ||T - T^||_F of the whole grammar
    negative: Tensor  # [rules]: the share of |T^| in entries below zero, of rules with a form of their own, else 0
    whole: Difference | None  # of T^ and T, where one form stands for all rules
    before: int  # numbers that the binary rules take
    after: int


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
    if grammar.binary.compressed:
        raise InputError("the model is compressed already: expected one as job=train makes it.")
    if isinstance(options, APROptions) and options.rank < len(grammar.binary.child_types.unique()):
        options = replace(options, child_types=TOGETHER)  # there is no term for each
    factors, whole, approximated = None, None, torch.zeros(len(grammar.binary), dtype=torch.bool)
    if isinstance(options, ALSOptions):
        found = fit_rules(grammar, options, seed, progress)
        small, gamma, negative = found.within(options.threshold), found.gamma, found.negative
        approximated.index_fill_(0, found.used(options.threshold), True)
        error = float(torch.where(gamma <= options.threshold, gamma, 0).norm()) if options.threshold else 0.0
    else:
        factors = _whole(grammar, options, seed, progress).map(lambda x: x.to(grammar.binary.dtype))
        small = replace(grammar, binary=WholeCP.from_factors(factors, grammar.binary))
        whole = difference(rule_tensor(grammar), factors)
        error = float(whole.error.norm())
        gamma = torch.full((len(grammar.binary_rules),), torch.nan, dtype=torch.float64)
        negative = torch.zeros_like(gamma)
    provenance = model.provenance | {"compressed": asdict(options) | {"seed": seed}}
    return Compression(
        replace(model, grammar=small, provenance=provenance),
        grammar,
        factors,
        grammar.binary.child_types,
        approximated,
        gamma,
        error,
        negative,
        whole,
        grammar.binary.size,
        small.binary.size,
    )


@dataclass(frozen=True, eq=False)
class FittedRules:
    """Kruskal forms of the rules that would be smaller so; which of them are used is a matter of a threshold."""

    grammar: Grammar
    rules: Tensor  # [some]: numbers of the rules that a form was tried for
    factors: Factors  # of each of them, padded with zeros to the most states of a symbol
    gamma: Tensor  # [rules], nan where there is no form
    negative: Tensor  # [rules]

    def used(self, threshold: float) -> Tensor:
        """[some]: the rules whose form is used, ascending."""
        return self.rules[self.gamma[self.rules] <= (threshold or -1)]

    def within(self, threshold: float) -> Grammar:
        """A rule keeps its tensor unless gamma <= threshold; 0 is exact inference."""
        grammar, forms = self.grammar, self.factors
        rules = self.used(threshold)
        chosen = torch.isin(self.rules, rules)
        if not len(rules):
            return grammar
        tensors = grammar.binary.written_out()
        is_exact = torch.ones(len(tensors), dtype=torch.bool).index_fill(0, rules, False)
        values = tensors.values[torch.repeat_interleave(is_exact, tensors.starts.diff())]
        u, v, w = (factor[chosen] for factor in (forms.u, forms.v, forms.w))
        binary = RuleCP(tensors.state_counts, tensors.interminals, tensors.rules, values, rules, u, v, w)
        return replace(grammar, binary=binary)


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
    factors = Factors(*grammar.root.new_zeros(3, len(rules), options.rank, widest))
    total, done = len(rules) * (options.restarts + 1), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    for shape in rounded[rules].unique(dim=0):
        places = (rounded[rules] == shape).all(1).nonzero().squeeze(1)
        x, y, z = shape.tolist()
        tensors = grammar.root.new_zeros(len(places), x, y, z)
        for tensor, rule in zip(tensors, rules[places].tolist(), strict=True):
            own = grammar.binary.tensor(rule)
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
    return FittedRules(grammar, rules, factors, gamma, negative)


def _whole(grammar: Grammar, options: Options, seed: int, progress: Progress | None) -> Factors:
    """All binary rules together, over the states of all symbols."""
    if not len(grammar.binary):
        raise InputError("the grammar has no binary rules to decompose.")
    tensor = rule_tensor(grammar)
    if isinstance(options, SVDOptions):
        return slice_svd(tensor, options.error).factors
    if isinstance(options, APROptions):
        inner = tensor.shape[0]
        fit = (apr_by_child_types if options.child_types == APART else apr)(
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
        parameters = CPGrammar(options.rank, (x, y, z), options.values, seed, tensor.device, tensor.dtype, mass)
        parameters.fit(
            tensor,
            options.loss,
            options.optimiser,
            options.iterations,
            progress=None if progress is None else lambda step, _: progress(step + 1, options.iterations),
        )
        return parameters().map(torch.Tensor.detach)
    return cover_by_child_types(tensor)
