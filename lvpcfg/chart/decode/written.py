"""Skeletal trees as treebanks write them: without binarisation, and with the unary chains that are hidden in them."""

from collections.abc import Sequence
from functools import cache, cached_property

import torch
from jaxtyping import Float
from nltk.tree import Tree
from torch import Tensor

from lvpcfg.chart.decode.chains import Chains
from lvpcfg.chart.derivations import Node, Skeleton
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.trees.binarise import debinarise, labels_of, unbinarised, with_top
from lvpcfg.trees.normalise import TOP


class Writer:
    """Writes the skeletal trees of a grammar. Of a unary chain they have the ends: the likeliest one is written."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.names, self.interminals = grammar.symbols.names, len(grammar.symbols.interminals)
        self.chain = cache(self._chain)
        self.labels = cache(self._labels)

    @cached_property
    def _chains(self) -> Chains:
        return Chains.of_symbols(self.grammar)

    def _chain(self, top: int, bottom: int) -> tuple[int, ...]:
        """The symbols from top to bottom, both included."""
        return (top,) if top == bottom else tuple(self._chains.path(top, bottom))

    def _labels(self, chain: tuple[int, ...]) -> tuple[str, ...]:
        """The labels that a chain is written with, from top to bottom. TOP, which is on every tree, is left out."""
        return tuple(label for symbol in chain for label in labels_of(self.names[symbol]) if label != TOP)

    def labels_of_step(self, step: Node) -> tuple[str, ...]:
        return self.labels(self.chain_of(step))

    def phrase_labels(self, chain: tuple[int, ...]) -> tuple[str, ...]:
        """The same without the tag at its end."""
        return self.labels(chain)[: -1 if chain[-1] >= self.interminals else None]

    def chain_of(self, node: Node) -> tuple[int, ...]:
        return node.chain or self.chain(node.top, node.bottom)

    def distinct(self, skeletons: Sequence[Skeleton]) -> list[Skeleton]:
        """Without those that are written as one before them."""
        found: dict[tuple[tuple[int, int, tuple[str, ...]], ...], Skeleton] = {}
        for skeleton in skeletons:
            spans = ((node.start, node.width, self.labels_of_step(node)) for node in skeleton)
            found.setdefault(tuple(span for span in spans if span[2]), skeleton)
        return [*found.values()]

    def tree(self, skeleton: Skeleton, words: Sequence[str]) -> Tree:
        built: list[list[Tree | str]] = []
        for node in reversed(skeleton):  # children before their parents
            below = built.pop() + built.pop() if node.split else [words[node.start]]
            for symbol in reversed(self.chain_of(node)):
                below = unbinarised(self.names[symbol], below)
            built.append(below)
        return with_top(built.pop())

    def flat(self, words: Sequence[str], values: Float[Tensor, "words tag_states"]) -> Tree:
        """The commonest root over each word's likeliest tag: for sentences the grammar has no tree for.

        `values` are what the words are worth to the states of tags.
        """
        grammar, inner = self.grammar, self.interminals
        states = values * self._tag_frequency
        states = torch.where((states != 0).any(1, keepdim=True), states, values)
        phrases, tags_of_states = grammar.symbol_of_state.split([grammar.interminal_states, states.shape[1]])
        by_tag = states.new_zeros(len(words), len(self.names) - inner)
        by_tag = by_tag.index_add(1, tags_of_states - inner, states)
        best = (inner + by_tag.argmax(1)).tolist()
        tags = [Tree(self.names[tag], [word]) for tag, word in zip(best, words, strict=True)]
        roots = grammar.root.new_zeros(max(1, inner)).index_add(0, phrases, grammar.root[: len(phrases)])
        label = self.names[int(roots.argmax())] if inner and len(tags) > 1 else None
        if label is None or label == TOP:
            return debinarise(Tree(TOP, tags))
        return debinarise(Tree(TOP, [Tree(label, tags)]))

    @cached_property
    def _tag_frequency(self) -> Float[Tensor, "tag_states"]:
        """How often each is expected in a tree of the grammar."""
        return expected_states(self.grammar)[self.grammar.interminal_states :]
