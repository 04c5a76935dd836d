"""Grammars and tensors -> forms."""

from dataclasses import replace
from functools import singledispatch

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, WORDS, Block, DenseBlock
from lvpcfg.chart.fast.cp import CPForm, weights_of
from lvpcfg.chart.fast.forms import AnyForm, DenseForm, TensorForm, by_child_types
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import BinaryRules, within_padding
from lvpcfg.grammar.whole_cp import WholeCP

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
CHILD_TYPES = (PHRASES, WORD_LAST, WORD_FIRST, WORDS)  # by whether the left and the right child are words
LANES = 1 << 16  # pairs x y x z in one block at the most: bounds what is held at once


def form(grammar: Grammar, fixed: bool = False) -> TensorForm | CPForm:
    """The form with which charts of the grammar compute.

    If parameters are `fixed`, the terms of a CP form can be sorted by the children that their zeros allow. Charts then
    leave out what is impossible, and have no derivative by those zeros.
    """
    return form_of(grammar.binary.for_charts(), grammar, fixed)


@singledispatch
def form_of(binary: BinaryRules, grammar: Grammar, fixed: bool) -> TensorForm | CPForm:
    """The form of rules as `for_charts` gives them. A new form of charts is registered here."""
    raise TypeError(f"charts have no form for binary rules as {type(binary).__name__}: see `BinaryRules.for_charts`")


@form_of.register
def _(binary: RuleTensors, grammar: Grammar, fixed: bool) -> TensorForm:
    return tensor_form(replace(grammar, binary=binary))


@form_of.register
def _(binary: WholeCP, grammar: Grammar, fixed: bool) -> CPForm:
    source = replace(grammar, binary=binary.of_rules(binary.rules))
    built = cp_form(grammar.root, binary.u, binary.v, binary.w, source, sort_terms=fixed)
    return built if len(binary.rules) else replace(built, source=None)  # there are none to score


def tensor_form(grammar: Grammar) -> TensorForm:
    """The rule tensors of a grammar, in blocks of one shape; numbers of states are rounded up to a few sizes."""
    inner, device = len(grammar.symbols.interminals), grammar.root.device
    tensors = grammar.binary.written_out()
    m, rules = grammar.states.cpu(), tensors.rules.cpu()
    interminals = int(m[:inner].sum())
    dense = inner == 1 and len(m) == 2  # one tensor, no choice of states
    rounded = m if dense or len(m.unique()) == 1 else _rounded(m)
    is_inner = torch.arange(len(m)) < inner
    first = grammar.first_state.cpu()[:-1] - torch.where(is_inner, 0, interminals)
    past = torch.where(is_inner, interminals, int(m[inner:].sum()))
    begin, beyond = tensors.starts.cpu(), len(tensors.values)

    def states(symbols: Int[Tensor, "symbols"], size: int) -> Int[Tensor, "symbols {size}"]:
        number = torch.arange(size)
        inside = number < m[symbols].unsqueeze(1)
        return torch.where(inside, first[symbols].unsqueeze(1) + number, past[symbols].unsqueeze(1)).to(device)

    keys = torch.cat([tensors.child_types.cpu().unsqueeze(1), rounded[rules]], 1)
    blocks: list[Block | DenseBlock] = []
    for key in keys.unique(dim=0):
        number, x, y, z = key.tolist()
        child_types = CHILD_TYPES[number]
        group = (keys == key).all(1).nonzero().squeeze(1)
        source = begin[group].view(-1, 1, 1, 1) + torch.arange(x * y * z).view(x, y, z)
        if dense:
            tensor = DenseBlock(child_types, (x, y, z), group.to(device), None)
            source = source.permute(tensor.order).squeeze(0)
            source = source.flatten(1) if child_types == PHRASES else source
            blocks.append(replace(tensor, source=source.to(device)))
            continue
        group = group[(rules[group, 1] * len(m) + rules[group, 2]).argsort(stable=True)]
        by_pair = child_types in (PHRASES, WORDS)
        lanes = y * z if by_pair else x * max(y, z)
        for some in group.split(max(1, LANES // lanes)):
            a, b, c = rules[some].unbind(1)
            pair = None
            if by_pair:
                pairs, pair = torch.unique_consecutive(b * len(m) + c, return_inverse=True)
                b, c = pairs // len(m), pairs % len(m)
                pair = None if len(pairs) == len(some) else pair.to(device)
            source = within_padding(begin[some], m[rules[some]], (x, y, z), beyond)
            block = Block(
                child_types=child_types,
                shape=(x, y, z),
                rules=some.to(device),
                pair=pair,
                left=states(b, y),
                right=states(c, z),
                parent=states(a, x),
                parents=interminals,
                source=source,
            )
            source = source.permute(block.order).flatten(2).to(torch.int32 if beyond < 2**31 else torch.int64)
            blocks.append(replace(block, source=source.to(device)))
    padded = bool((rounded != m).any())
    return with_parameters(TensorForm(grammar.root, None, None, (), interminals, tuple(blocks), padded), grammar)


def with_parameters(form: AnyForm, grammar: Grammar) -> AnyForm:
    """The same rules with the parameters of `grammar`, differentiable by them."""
    closure, promotion = unary_closure(grammar)
    return replace(form, root=grammar.root, closure=closure, promotion=promotion).with_binary(grammar.binary)


def _rounded(m: Int[Tensor, "symbols"]) -> Int[Tensor, "symbols"]:
    """Up to the next of SIZES, if there is one."""
    sizes = torch.tensor(SIZES)
    return torch.where(m <= sizes[-1], sizes[torch.searchsorted(sizes, m).clamp_max(len(sizes) - 1)], m)


def unary_closure(
    grammar: Grammar,
) -> tuple[Float[Tensor, "inner inner"], Float[Tensor, "word_states inner"]] | tuple[None, None]:
    """From the bottom layer to the top, (I - R)^{-1}, and from the states of a word: transposed, as cells are rows."""
    if not len(grammar.unary_rules):
        return None, None
    chains = grammar.unary_matrix()  # [interminals, states]
    inner = len(chains)
    identity = torch.eye(inner, dtype=chains.dtype, device=chains.device)
    phrases, words = chains.split([inner, chains.shape[1] - inner], 1)
    if grammar.closed:
        return (identity + phrases).T, words.T
    closure = _without_rounding(torch.linalg.inv(identity - phrases), phrases)
    return closure.T, (closure @ words).T


def _without_rounding(
    closure: Float[Tensor, "inner inner"], steps: Float[Tensor, "inner inner"]
) -> Float[Tensor, "inner inner"]:
    """The inverse has rounding errors where no rules lead, and below zero: exact zeros there. `steps` is R."""
    reach = torch.eye(len(steps), dtype=steps.dtype, device=steps.device) + (steps != 0)
    for _ in range(len(steps).bit_length()):
        reach = (reach @ reach).clamp_max_(1)
    closure = torch.where(reach > 0, closure, 0)
    return torch.where((steps < 0).any(), closure, closure.clamp_min(0))


def dense_form(root: Float[Tensor, "states"], rules: Float[Tensor, "inner states states"]) -> DenseForm:
    """One rule tensor over all states, as of a grammar without zeros."""
    inner = len(rules)
    only_rule = torch.zeros(1, dtype=torch.int64, device=rules.device)
    blocks = tuple(
        DenseBlock(child_types, (inner, part.shape[1], part.shape[2]), only_rule, None)
        for child_types, part in zip(CHILD_TYPES, by_child_types(rules, inner), strict=True)
    )
    return DenseForm(root, None, None, (), inner, blocks, False, rules).with_tensors([root, rules])


def cp_form(
    root: Float[Tensor, "states"],
    u: Float[Tensor, "rank inner"],
    v: Float[Tensor, "rank states"],
    w: Float[Tensor, "rank states"],
    source: Grammar | None = None,
    sort_terms: bool = False,
) -> CPForm:
    """One CP form of all rules.

    If the factors do not change, their terms can be sorted by their children. Charts then leave out what the zeros of v
    and w make impossible, and have no derivative by those zeros.
    """
    counts = (len(u), 0, 0, 0)
    if sort_terms:
        inner = u.shape[1]
        (left, left_word), (right, right_word) = (
            (factor[:, :inner].any(1), factor[:, inner:].any(1)) for factor in (v, w)
        )
        child_types = torch.where(left | right, 0, 3)
        child_types = torch.where(left & ~left_word & ~right, 1, child_types)
        child_types = torch.where(right & ~right_word & ~left, 2, child_types)
        order = child_types.argsort(stable=True)
        u, v, w = u[order], v[order], w[order]
        general, last, first, words = torch.bincount(child_types, minlength=4).tolist()
        counts = (general, last, first, words)
    closure, promotion = (None, None) if source is None else unary_closure(source)
    rules = None if source is None else tensor_form(source)
    return CPForm(root, closure, promotion, weights_of(u, v, w), u.shape[1], rules, counts)
