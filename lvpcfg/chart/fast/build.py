"""Grammars and tensors -> forms."""

from dataclasses import replace

import torch
from torch import Tensor

from lvpcfg.chart.fast.blocks import AFTER, BEFORE, INNER, WORDS, Block, DenseBlock
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.forms import AnyForm, DenseForm, TensorForm, quarters
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rules import within_padding
from lvpcfg.grammar.whole_cp import WholeCP

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
KINDS = (INNER, AFTER, BEFORE, WORDS)  # by whether the left and the right child are words
LANES = 1 << 16  # pairs x y x z in one block at the most: bounds what is held at once


def form(grammar: Grammar, fixed: bool = False) -> TensorForm | CPForm:
    """What charts of the grammar compute with.

    Where parameters are `fixed`, the terms of a CP form can be sorted by what children their zeros leave: charts then
    leave out what is impossible, and have no derivative by those zeros.
    """
    binary = grammar.binary.for_charts()
    if not isinstance(binary, WholeCP):
        return exact(replace(grammar, binary=binary))
    source = replace(grammar, binary=binary.of_rules(binary.rules))
    return cp_form(grammar.root, binary.u, binary.v, binary.w, source, by_child_types=fixed)


def exact(grammar: Grammar) -> TensorForm:
    """The rule tensors of a grammar, in blocks of one shape; numbers of states are rounded up to a few sizes."""
    inner, device = len(grammar.symbols.interminals), grammar.root.device
    tensors = grammar.binary.written_out()
    m, rules = grammar.states.cpu(), tensors.rules.cpu()
    interminals = int(m[:inner].sum())
    whole = inner == 1 and len(m) == 2  # one tensor, no choice of states
    rounded = m if whole or len(m.unique()) == 1 else _rounded(m)
    is_inner = torch.arange(len(m)) < inner
    first = grammar.first_state.cpu()[:-1] - torch.where(is_inner, 0, interminals)
    past = torch.where(is_inner, interminals, int(m[inner:].sum()))
    begin, beyond = tensors.starts.cpu(), len(tensors.values)

    def states(symbols: Tensor, size: int) -> Tensor:  # [symbols, size]
        place = torch.arange(size)
        inside = place < m[symbols].unsqueeze(1)
        return torch.where(inside, first[symbols].unsqueeze(1) + place, past[symbols].unsqueeze(1)).to(device)

    def places(block: Tensor, kind: str, shape: tuple[int, int, int]) -> Tensor:
        place = within_padding(begin[block], m[rules[block]], shape, beyond)
        order = {BEFORE: (0, 2, 1, 3), AFTER: (0, 3, 1, 2)}.get(kind, (0, 1, 2, 3))
        place = place.permute(order).flatten(2, 3)
        return place.to(torch.int32 if beyond < 2**31 else torch.int64).to(device)

    keys = torch.cat([tensors.child_types.cpu().unsqueeze(1), rounded[rules]], 1)
    blocks: list[Block | DenseBlock] = []
    for key in keys.unique(dim=0):
        number, x, y, z = key.tolist()
        kind = KINDS[number]
        group = (keys == key).all(1).nonzero().squeeze(1)
        if whole:
            place = begin[group] + torch.arange(x * y * z)
            place = place.view(x, y * z) if kind == INNER else place.view(x, y, z)
            place = place if kind in (INNER, AFTER) else place.transpose(0, 1)
            blocks.append(DenseBlock(kind, (x, y, z), group.to(device), place.to(device)))
            continue
        group = group[(rules[group, 1] * len(m) + rules[group, 2]).argsort(stable=True)]
        lanes = y * z if kind in (INNER, WORDS) else x * max(y, z)
        for block in group.split(max(1, LANES // lanes)):
            a, b, c = rules[block].unbind(1)
            pair = None
            if kind in (INNER, WORDS):
                pairs, pair = torch.unique_consecutive(b * len(m) + c, return_inverse=True)
                b, c = pairs // len(m), pairs % len(m)
                pair = None if len(pairs) == len(block) else pair.to(device)
            parent = states(a, x)
            blocks.append(
                Block(
                    kind=kind,
                    shape=(x, y, z),
                    rules=block.to(device),
                    pair=pair,
                    left=states(b, y),
                    right=states(c, z),
                    parent=parent,
                    sources=_sources(parent.cpu().flatten(), interminals).to(device),
                    places=places(block, kind, (x, y, z)),
                )
            )
    padded = bool((rounded != m).any())
    return with_parameters(TensorForm(grammar.root, None, None, (), interminals, tuple(blocks), padded), grammar)


def with_parameters(form: AnyForm, grammar: Grammar) -> AnyForm:
    """The same rules with the parameters of `grammar`, differentiable by them.

    A CP form loses its rules: they would have to be written out again.
    """
    closure, promotion = unary_closure(grammar)
    changed = replace(form, root=grammar.root, closure=closure, promotion=promotion)
    if isinstance(changed, CPForm):
        binary = grammar.binary.for_charts()
        assert isinstance(binary, WholeCP)
        return replace(changed, weights=_weights(binary.u, binary.v, binary.w), source=None)
    assert isinstance(changed, TensorForm)
    values = grammar.binary.written_out().values
    flat = torch.cat([values, values.new_zeros(1)])
    places = [block.places for block in changed.blocks if block.places is not None]
    return replace(changed, weights=tuple(flat.index_select(0, place.flatten()).view(place.shape) for place in places))


def _rounded(m: Tensor) -> Tensor:
    """Up to the next of SIZES, if there is one."""
    sizes = torch.tensor(SIZES)
    return torch.where(m <= sizes[-1], sizes[torch.searchsorted(sizes, m).clamp_max(len(sizes) - 1)], m)


def _sources(target: Tensor, size: int) -> Tensor:
    """[size, most]: the rows that go to each target, and one past the last row as padding."""
    rows = target.argsort(stable=True)
    rows = rows[target[rows] < size]
    counts = torch.bincount(target[rows], minlength=size)
    place = torch.arange(max(1, int(counts.max())))
    begin = (counts.cumsum(0) - counts).unsqueeze(1)
    padded = torch.cat([rows, rows.new_tensor([len(target)])])
    return padded[torch.where(place < counts.unsqueeze(1), begin + place, len(rows))]


def unary_closure(grammar: Grammar) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Bottom -> top layer, (I - R)^{-1}, and from the states of a word: transposed, as cells are rows."""
    if not len(grammar.unary_rules):
        return None, None
    chains = grammar.unary_matrix()  # [interminals, states]
    inner = len(chains)
    identity = torch.eye(inner, dtype=chains.dtype, device=chains.device)
    phrases, words = chains.split([inner, chains.shape[1] - inner], 1)
    if grammar.closed:
        return (identity + phrases).T, words.T
    closure = torch.linalg.inv(identity - phrases)
    return closure.T, (closure @ words).T


def dense(root: Tensor, rules: Tensor) -> DenseForm:
    """One rule tensor [interminals, states, states] over all states, as in a grammar without zeros."""
    inner = len(rules)
    none = torch.zeros(1, dtype=torch.int64, device=rules.device)
    blocks = tuple(
        DenseBlock(kind, (inner, part.shape[1], part.shape[2]), none, None)
        for kind, part in zip(KINDS, quarters(rules, inner), strict=True)
    )
    return DenseForm(root, None, None, (), inner, blocks, False, rules).with_tensors([root, rules])


def cp_form(
    root: Tensor, u: Tensor, v: Tensor, w: Tensor, source: Grammar | None = None, by_child_types: bool = False
) -> CPForm:
    """A whole-grammar CP form: u [rank, interminals], v and w [rank, states].

    Where the factors stay as they are, their terms can be sorted `by_child_types`: charts then leave out what the
    zeros of v and w make impossible, and have no derivative by those zeros.
    """
    inner, (any_kind, after, before, words) = u.shape[1], (len(u), 0, 0, 0)
    if by_child_types:
        (left, left_word), (right, right_word) = (
            (factor[:, :inner].any(1), factor[:, inner:].any(1)) for factor in (v, w)
        )
        kind = torch.where(left | right, 0, 3)
        kind = torch.where(left & ~left_word & ~right, 1, torch.where(right & ~right_word & ~left, 2, kind))
        order = kind.argsort(stable=True)
        u, v, w = u[order], v[order], w[order]
        any_kind, after, before, words = torch.bincount(kind, minlength=4).tolist()
    closure, promotion = (None, None) if source is None else unary_closure(source)
    rules = None if source is None else exact(source)
    return CPForm(root, closure, promotion, _weights(u, v, w), inner, rules, (any_kind, after, before, words))


def _weights(u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, and V beside W over interminals and over preterminals, each [states, 2 rank]."""
    sizes = [u.shape[1], v.shape[1] - u.shape[1]]
    phrases, tags = (torch.cat(half).T for half in zip(v.split(sizes, 1), w.split(sizes, 1), strict=True))
    return u, phrases, tags
