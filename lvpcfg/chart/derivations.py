"""Trees over the words of a sentence, as lists of nodes: with states or with symbols as labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lvpcfg.errors import InputError


@dataclass(frozen=True)
class Node:
    """A span of a skeletal tree: its symbols above and below unary rules, and the width of its left child."""

    start: int
    width: int
    top: int
    bottom: int
    split: int  # 0: a word
    rank: int | None = None  # in derivations of a CP form
    chain: tuple[int, ...] = ()  # all symbols from top to bottom, where they are known


Skeleton = list[Node]  # in preorder


@dataclass(frozen=True)
class Derivation:
    """A tree whose nodes, in preorder, are labelled with states."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Skeletal:
    """A tree whose nodes, in preorder, are labelled with symbols.

    Of a chain of unary rules it has the ends alone: its weight is that of all chains between them.
    """

    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Allowed:
    """The states that spans may have: in the bottom layer (binary rules and words) and in the top layer (with unary
    rules over them)."""

    bottom: Bool[Tensor, "starts batch widths states"]
    top: Bool[Tensor, "starts batch widths states"]


def only(
    trees: Sequence[Derivation | Skeletal], symbol: Sequence[int], leaf: Float[Tensor, "length batch word_states"]
) -> Allowed:
    """The spans of one tree for each sentence, with the states it allows; `symbol` is that of each state."""
    length, batch = leaf.shape[:2]
    member = {Derivation: torch.arange(len(symbol)), Skeletal: torch.tensor(symbol)}
    layers = torch.zeros(2, length, batch, length, len(symbol), dtype=torch.bool)
    for sentence, tree in enumerate(trees):
        for node in tree.nodes:
            if node.start + node.width > length:
                raise InputError(f"tree {sentence + 1} has more words than the {length} of the batch.")
            for layer, label in zip(layers, (node.bottom, node.top), strict=True):
                layer[node.start, sentence, node.width - 1] |= member[type(tree)] == label
    bottom, top = layers.to(leaf.device)
    return Allowed(bottom, top)
