"""Rule tensors without their smallest numbers: a smaller folder, whose sparse tensors are packed."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors


def trimmed(grammar: Grammar, threshold: float) -> Grammar:
    """Binary and unary rules in which numbers below `threshold` times the largest of their state are zero.

    No number is below zero. What is left of a state is scaled to add up to what it did. Its largest number stays, and
    so does every word.
    """
    binary, parent = grammar.binary.written_out(), grammar.unary_states()[0]
    states = grammar.interminal_states
    largest = torch.maximum(
        _largest(binary.values, binary.parent_states.long(), states), _largest(grammar.unary, parent, states)
    )
    least = threshold * largest
    values = torch.where(binary.values < least[binary.parent_states], 0, binary.values)
    unary = torch.where(grammar.unary < least[parent], 0, grammar.unary)
    rules: RuleTensors = binary.with_tensors({"values": values})
    small = replace(grammar, binary=rules, unary=unary)
    before, after = grammar.row_sums()[:states], small.row_sums()[:states]
    factor = torch.where(after == 0, 1, before / after)
    return replace(small, binary=rules.scaled(factor), unary=unary * factor[parent])


def _largest(values: Float[Tensor, "numbers"], parent: Tensor, states: int) -> Float[Tensor, "states"]:
    return values.new_zeros(states).scatter_reduce(0, parent, values, "amax")
