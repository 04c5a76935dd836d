"""Relative frequencies: the treebank PCFG, m = 1.

    pi(a) = count(root a) / trees,   p(a -> b c) = count(a -> b c) / count(a)

and q(a -> x) from the smoothed lexicon.
"""

import torch
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.trees.lexicon import LexicalTable, Lexicon, UnseenSample, build_lexicon, emissions, smoothed_tags
from lvpcfg.trees.treebank import Treebank


def count(treebank: Treebank, signature: str = "english") -> Model:
    """The relative-frequency estimate of a treebank."""
    symbols = treebank.symbols
    symbol_counts = _frequencies(treebank.symbol, len(symbols))

    def relative(rules: Tensor, nodes: Tensor) -> Tensor:
        return _frequencies(treebank.rule[nodes], len(rules)) / symbol_counts[rules[:, 0]]

    lexicon, unseen = build_lexicon(treebank, signature)
    grammar = Grammar(
        symbols=symbols,
        states=torch.ones(len(symbols), dtype=torch.int64),
        binary_rules=treebank.binary_rules,
        unary_rules=treebank.unary_rules,
        root=_frequencies(treebank.symbol[treebank.roots[:-1]], len(symbols)) / len(treebank),
        binary=relative(treebank.binary_rules, treebank.is_binary),
        unary=relative(treebank.unary_rules, treebank.is_unary),
        lexical=emissions(*tag_table(treebank, lexicon, unseen)),
    )
    provenance = {"estimator": "count", "trees": len(treebank), "words": int(treebank.lengths.sum())}
    return Model(grammar, lexicon, treebank.binarisation, provenance)


def tag_table(treebank: Treebank, lexicon: Lexicon, unseen: UnseenSample) -> tuple[LexicalTable, Tensor]:
    """The smoothed p(tag | word) of a treebank, and p(word)."""
    first = len(treebank.symbols.interminals)
    tags, words = treebank.lexical_rules.T
    tokens = _frequencies(treebank.rule[treebank.is_lexical], len(words))
    return smoothed_tags(
        lexicon,
        entry=torch.cat([words, unseen.entry]),
        state=torch.cat([tags, treebank.symbol[unseen.node]]) - first,
        count=torch.cat([tokens, tokens.new_ones(len(unseen.node))]),
        states=len(treebank.symbols.preterminals),
    )


def _frequencies(index: Tensor, size: int) -> Tensor:
    return torch.bincount(index, minlength=size).to(torch.float64)
