"""A model -> a smaller or a faster one, and what that does to its rules.

als        each rule tensor in CP form by least squares, where its error is small (Cohen & Collins 2012)
cover      one CP form of all rules: exact
svd        the same by an SVD of each parent's slice, up to an error
apr        the same by CP-APR of the expected counts: normalised, and tight to a tolerance (Cohen, Satta & Collins 2013)
gradient   the same by gradient descent
trim       rule tensors without their smallest numbers, for a smaller folder
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from lvpcfg.decompose.als import als
from lvpcfg.decompose.apr import apr, conditional, expected_counts
from lvpcfg.decompose.child_types import apr_by_child_types, cover_by_child_types
from lvpcfg.decompose.dense import Difference, difference, rule_tensor
from lvpcfg.decompose.envelope import envelope_of, expect_certifiable
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
    TrimOptions,
    check,
)
from lvpcfg.decompose.svd import slice_svd
from lvpcfg.decompose.trim import trimmed
from lvpcfg.errors import InputError, expect, show
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.whole_cp import WholeCP

CHILD_TYPE_NAMES = ("two phrases", "a phrase and a word", "a word and a phrase", "two words")
Progress = Callable[[int, int], object]  # done, of how many


@dataclass(frozen=True, eq=False)
class Compression:
    """A compressed model, and what that did to its rules."""

    model: Model
    source: Grammar  # the grammar before
    factors: Factors | None  # the CP form of all rules, where the method makes one
    child_types: Int64[Tensor, "rules"]  # 0 .. 3, as in CHILD_TYPE_NAMES
    approximated: Bool[Tensor, "rules"]  # which rules are in CP form, each with its factors
    gamma: Float64[Tensor, "rules"]  # ||T - T^||_F of the rules that such a form was fitted to, else nan
    error: float  # ||T - T^||_F of all rules together
    negative: Float64[Tensor, "rules"]  # the share of |T^| in entries below zero of such a form, else 0
    difference: Difference | None  # between T and T^, where one CP form stands for all rules
    before: int  # how many numbers the binary rules were
    after: int  # and how many they are


def compress(model: Model, method: str = "als", seed: int = 0, certify: bool = False, **options: Any) -> Model:
    """The model with its binary rules in CP form, or trimmed. `options` are those of the method, such as `rank=8`.

    With `certify`, which needs the method als, the model keeps how far from the exact one it can be. Parsers then
    say of each sentence how wrong they can be.
    """
    if not isinstance(model, Model):
        raise InputError(f"what is to be compressed is {show(model)}: expected a model. Model.load reads a folder.")
    expect("method", method, tuple(METHODS))
    known = set(METHODS[method].__dataclass_fields__) - {"name"}
    for name in options:
        if name not in known:
            raise InputError(f"the method {method} has no option {show(name)}: it has {', '.join(sorted(known))}.")
    return decompose(model, METHODS[method](**options), seed, certify=certify).model


def decompose(
    model: Model, options: Options, seed: int = 0, progress: Progress | None = None, certify: bool = False
) -> Compression:
    """The model with its binary rules in CP form, and how far they are from what they were."""
    check(options)
    grammar = model.grammar
    if grammar.binary.compressed:
        raise InputError("the model is compressed already: expected one whose rules are tensors.")
    if certify:
        expect_certifiable(grammar, options)
    if isinstance(options, APROptions | TrimOptions) and grammar.signed:
        raise InputError(
            f"the model has negative parameters: expected a non-negative one, or another method than {options.name}."
        )
    if isinstance(options, APROptions) and options.rank < len(grammar.binary.child_types.unique()):
        options = replace(options, child_types=TOGETHER)  # there are more types than terms
    factors, against_source, approximated = None, None, torch.zeros(len(grammar.binary), dtype=torch.bool)
    if isinstance(options, ALSOptions):
        found = fit_rules(grammar, options, seed, progress)
        small, gamma, negative = found.within(options.threshold), found.gamma, found.negative
        approximated.index_fill_(0, found.used(options.threshold), True)
        error = float(torch.where(gamma <= options.threshold, gamma, 0).norm()) if options.threshold else 0.0
    elif isinstance(options, TrimOptions):
        small = trimmed(grammar, options.threshold)
        gamma = torch.full((len(grammar.binary_rules),), torch.nan, dtype=torch.float64)
        negative = torch.zeros_like(gamma)
        error = float((small.binary.written_out().values - grammar.binary.written_out().values).norm())
        small = small.to(dtype=getattr(torch, options.dtype))
    else:
        factors = _fit_all_rules(grammar, options, seed, progress).map(lambda x: x.to(grammar.binary.dtype))
        small = replace(grammar, binary=WholeCP.from_factors(factors, grammar.binary))
        against_source = difference(rule_tensor(grammar), factors)
        error = float(against_source.error.norm())
        gamma = torch.full((len(grammar.binary_rules),), torch.nan, dtype=torch.float64)
        negative = torch.zeros_like(gamma)
    provenance = model.provenance | {"compressed": asdict(options) | {"seed": seed}}
    return Compression(
        replace(model, grammar=small, provenance=provenance, envelope=envelope_of(grammar, small) if certify else None),
        grammar,
        factors,
        grammar.binary.child_types,
        approximated,
        gamma,
        error,
        negative,
        against_source,
        grammar.binary.size,
        small.binary.size,
    )


@dataclass(frozen=True, eq=False)
class FittedRules:
    """CP forms of the rules that they would make smaller; a threshold of their errors decides which are used."""

    grammar: Grammar
    rules: Int64[Tensor, "fitted"]  # which rules a form was fitted to, ascending
    factors: Factors  # of each of them, [fitted, rank, widest]: padded by zeros to the most states of a symbol
    gamma: Float64[Tensor, "rules"]  # ||T - T^||_F, nan where there is no form
    negative: Float64[Tensor, "rules"]  # the share of |T^| in entries below zero

    def used(self, threshold: float) -> Int64[Tensor, "used"]:
        """The rules whose form is used, ascending."""
        return self.rules[self.gamma[self.rules] <= (threshold or -1)]

    def within(self, threshold: float) -> Grammar:
        """The grammar in which a rule has its CP form where gamma <= threshold; at 0 none has."""
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
    """A CP form of each rule that it makes smaller, by ALS.

    Rules of nearly one shape are fitted together, padded by zeros; the factors of padding are zeros too.
    """
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
        group = (rounded[rules] == shape).all(1).nonzero().squeeze(1)
        x, y, z = shape.tolist()
        tensors = grammar.root.new_zeros(len(group), x, y, z)
        for tensor, rule in zip(tensors, rules[group].tolist(), strict=True):
            exact = grammar.binary.tensor(rule)
            tensor[: exact.shape[0], : exact.shape[1], : exact.shape[2]] = exact
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
            into[group, :, : found.shape[2]] = found
        gamma[rules[group]] = fit.error
        approximation = fit.factors.tensor().flatten(1)
        mass = approximation.abs().sum(1).clamp_min(1e-300)
        negative[rules[group]] = (-approximation.clamp_max(0).sum(1) / mass).double()
    return FittedRules(grammar, rules, factors, gamma, negative)


def _fit_all_rules(grammar: Grammar, options: Options, seed: int, progress: Progress | None) -> Factors:
    """One CP form of all binary rules, over the states of all symbols."""
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
