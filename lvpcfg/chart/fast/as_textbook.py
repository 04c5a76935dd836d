"""The forms of the fast engine as grammars of the textbook chart, which runs where the fast engine does not apply."""

import torch
from torch import Tensor

from lvpcfg.chart.fast.blocks import WORD_FIRST, WORD_LAST, WORDS, Block
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.forms import DenseForm, Form, TensorForm
from lvpcfg.chart.lanes import Map, Rules
from lvpcfg.chart.textbook import CFG


def as_textbook(form: Form, by_rule: bool = True) -> CFG:
    """The same grammar, in ordinary numbers, which are functions of the form's tensors.

    Without posteriors of skeletal rules, those that have the same children can share their lanes.
    """
    return CFG(form.root, rules(form, by_rule), closure(form))


def closure(form: Form) -> Map | None:
    """Bottom -> top states; a word may stay a word, or become a phrase."""
    if form.closure is None or form.promotion is None:
        return None
    words = len(form.promotion)
    stay = torch.eye(words, dtype=form.root.dtype, device=form.root.device)
    none = form.root.new_zeros(words, form.interminals)
    return Map(torch.cat([torch.cat([form.closure.T, form.promotion.T], 1), torch.cat([none, stay], 1)]))


def rules(form: Form, by_rule: bool) -> tuple[Rules, ...]:
    if isinstance(form, DenseForm):
        return (Rules.from_tensor(form.rules),)
    if isinstance(form, CPForm):
        u, inner, outer = form.weights
        if not form.lifts:  # its states are its terms
            u = torch.eye(len(u), dtype=u.dtype, device=u.device)
        v, w = torch.cat([inner, outer]).T.tensor_split(2)
        return (Rules.from_cp(u, v, w),)
    assert isinstance(form, TensorForm)
    if not form.blocks:
        return ()
    parent, left, right, rule, values = (
        torch.cat(column) for column in zip(*(_entries(form, i) for i in range(len(form.blocks))), strict=True)
    )
    return (Rules.from_entries(parent, [left, right], values, form.interminals, rule if by_rule else None),)


def _entries(form: TensorForm, number: int) -> list[Tensor]:
    """The rules of a block between states: parent, left and right state, number of the skeletal rule, and weight."""
    block, weights = form.blocks[number], form.weights[number]
    inner, (x, y, z), device = form.interminals, block.shape, weights.device
    if isinstance(block, Block):
        pair = torch.arange(len(block.rules), device=device) if block.pair is None else block.pair
        parent, left, right = block.parent, block.left[pair], block.right[pair]
    else:
        parent, left, right = (torch.arange(size, device=device) for size in block.shape)
    left_is_word, right_is_word = block.child_types in (WORD_FIRST, WORDS), block.child_types in (WORD_LAST, WORDS)
    grid = (len(block.rules), x, y, z)
    parent, rule = parent.view(-1, x, 1, 1).expand(grid), block.rules.view(-1, 1, 1, 1).expand(grid)
    left = (left + inner * left_is_word).view(-1, 1, y, 1).expand(grid)
    right = (right + inner * right_is_word).view(-1, 1, 1, z).expand(grid)
    beyond = form.root.shape[-1]  # states from here on are padding, and so are words where there are phrases
    real = (parent < inner) & (left < (beyond if left_is_word else inner))
    real = real & (right < (beyond if right_is_word else inner))
    order = block.order
    real, parent, left, right, rule = (column.permute(order).flatten() for column in (real, parent, left, right, rule))
    there = real.nonzero().squeeze(1)
    return [column[there] for column in (parent, left, right, rule, weights.flatten())]
