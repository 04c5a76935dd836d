"""What a compressed grammar keeps of its residual, so that scores of the exact one can be bracketed.

    T^ - E <= T <= T^ + E  elementwise,     E = e_a x e_b x e_c, all of them non-negative

for rules in CP form; of those whose E would be too wide, T itself is kept. E is one more term of a CP form, so that
the brackets of a rule of rank r have rank r + 1. E covers the rounding of both.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lvpcfg.errors import InputError
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors

NONE = (
    "the model has no certificate: expected one that was compressed with decompose=als certify=true, or one that was "
    "never compressed or trimmed."
)


@dataclass(frozen=True, eq=False)
class Envelope:
    """Of the rules in CP form of a grammar: `exact` ones, and the others in their order, which have a term each."""

    exact: Int64[Tensor, "exact"]  # rows of `rules`, ascending
    values: Float[Tensor, "numbers"]  # T of these, end to end
    u: Float[Tensor, "covered widest"]  # e_a, zeros for states that a symbol does not have
    v: Float[Tensor, "covered widest"]
    w: Float[Tensor, "covered widest"]
    compressed: str  # the digests of the grammars that it is about
    source: str

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What goes into a model folder."""
        return {name: getattr(self, name) for name in ("exact", "values", "u", "v", "w")}


@dataclass(frozen=True, eq=False)
class Bracketed:
    """A grammar between two others, in float64: `centre` -+ `terms`, one for each of its rules in CP form, if any."""

    centre: Grammar
    terms: Factors | None  # [cp_rules, 1, widest]

    def to(self, device: torch.device) -> "Bracketed":
        return Bracketed(self.centre.to(device), self.terms and self.terms.map(lambda factor: factor.to(device)))


def bracketed(grammar: Grammar, envelope: Envelope | None) -> Bracketed:
    """What is known of the exact grammar: of one whose rules are tensors all, of a compressed one by its envelope."""
    if envelope is not None and envelope.compressed != digest(grammar):
        raise InputError("the model is not the one that its certificate was made for: expected it as compressed.")
    if isinstance(grammar.binary, RuleTensors):
        expect_nonnegative(grammar)
        return Bracketed(grammar.to(dtype=torch.float64), None)
    if envelope is None or not isinstance(grammar.binary, RuleCP):
        raise InputError(NONE)
    return _centre(grammar.to(dtype=torch.float64), envelope)


def expect_nonnegative(exact: Grammar) -> None:
    if exact.signed or bool((exact.lexical.weight < 0).any()):
        raise InputError("the exact model has numbers below zero: certificates are for models without.")


def _centre(grammar: Grammar, envelope: Envelope) -> Bracketed:
    binary = grammar.binary
    assert isinstance(binary, RuleCP)
    is_exact = torch.zeros_like(binary.is_cp).index_fill(0, envelope.exact, True)
    covered = ~is_exact[binary.cp_rules]
    volume = binary.states[binary.rules].prod(1)
    of_number = torch.repeat_interleave(torch.where(binary.is_cp & ~is_exact, 0, volume))  # the rule of each number
    values = binary.values.new_zeros(len(of_number))
    values[~binary.is_cp[of_number]] = binary.values
    values[is_exact[of_number]] = envelope.values.double()
    u, v, w = (factor[covered] for factor in (binary.u, binary.v, binary.w))
    rules = RuleCP(binary.state_counts, binary.interminals, binary.rules, values, binary.cp_rules[covered], u, v, w)
    terms = Factors(*(factor.double().unsqueeze(1) for factor in (envelope.u, envelope.v, envelope.w)))
    return Bracketed(replace(grammar, binary=rules), terms if bool(covered.any()) else None)


def digest(grammar: Grammar) -> str:
    """Of all numbers of a grammar, and of its rules."""
    found = hashlib.sha256()
    lexical = grammar.lexical
    for tensor in (
        grammar.binary_rules,
        grammar.states,
        *grammar.binary.tensors.values(),
        grammar.unary_rules,
        grammar.unary,
        grammar.root,
        *(lexical.row, lexical.state, lexical.value, lexical.weight, lexical.source, lexical.backoff),
    ):
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
