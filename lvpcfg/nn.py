"""Grammars as modules: their parameters are `nn.Parameter`s, their trees a distribution with gradients to them.

    layer = lvpcfg.nn.GrammarLayer.from_model(model)
    loss = -layer.log_prob(trees, sentences).sum()

Parameters are kept in one of three ways (`parametrisation`):

    logits       each is exp of its parameter, divided by what the state rewrites to in all: a normalised grammar
    log-weights  each is exp of its parameter: any non-negative grammar
    values       each is its parameter: signed grammars too

In the first two, what is zero in the model has the parameter -inf: it stays zero. Which rules there are, and how charts
compute with them, is found out once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from nltk.tree import Tree
from torch import Tensor, nn

from lvpcfg.chart.fast.build import form, with_parameters
from lvpcfg.distributions import TreeDistribution, encoded, skeletal
from lvpcfg.errors import InputError, expect, show
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model

LOGITS, LOG_WEIGHTS, VALUES = PARAMETRISATIONS = ("logits", "log-weights", "values")


class GrammarLayer(nn.Module):
    """A model's grammar, in whatever representation its binary rules are."""

    def __init__(self, model: Model, parametrisation: str = LOGITS) -> None:
        super().__init__()
        expect("parametrisation", parametrisation, PARAMETRISATIONS)
        grammar = model.grammar
        if parametrisation != VALUES and grammar.signed:
            raise InputError(
                f"parametrisation is {show(parametrisation)}, and the model has negative parameters: "
                f"expected {VALUES!r}."
            )
        self.parametrisation, self.model = parametrisation, model

        def parameter(values: Tensor) -> nn.Parameter:
            values = values.detach().clone()
            return nn.Parameter(values if parametrisation == VALUES else values.log())

        self.root = parameter(grammar.root)
        self.unary = parameter(grammar.unary)
        self.binary = nn.ParameterDict({name: parameter(tensor) for name, tensor in grammar.binary.tensors.items()})
        self.words = parameter(grammar.lexical.value)
        self.unknown_words = parameter(grammar.lexical.backoff)
        self._place(grammar)

    @classmethod
    def from_model(cls, model: Model, parametrisation: str = LOGITS) -> "GrammarLayer":
        return cls(model, parametrisation)

    def grammar(self) -> Grammar:
        """With the parameters as they are; differentiable by them."""
        old = self._structure
        root, unary, words, unknown, *binary = (
            tensor if self.parametrisation == VALUES else tensor.exp()
            for tensor in (self.root, self.unary, self.words, self.unknown_words, *self.binary.values())
        )
        grammar = replace(
            old,
            root=root,
            unary=unary,
            binary=old.binary.with_tensors(dict(zip(self.binary.keys(), binary, strict=True))),
            lexical=replace(old.lexical, value=words, backoff=unknown),
        )
        return _normalised(grammar) if self.parametrisation == LOGITS else grammar

    def forward(
        self,
        sentences: Sequence[Sequence[str]] | None = None,
        word_scores: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> TreeDistribution:
        """The trees of sentences, or of words that are worth `word_scores` to the states of the preterminals.

        `word_scores`, [batch, length, states], stand in place of the lexicon: logarithms, or with `values` as the
        parametrisation ordinary numbers. `lengths`, [batch], says which sentences are shorter than the longest.
        """
        grammar = self.grammar()
        if (sentences is None) == (word_scores is None):
            raise InputError("a grammar layer takes sentences, or word_scores in place of them.")
        if sentences is not None:
            entries, lengths = encoded(self.model.lexicon, sentences, self.root.device)
            leaf = grammar.lexical.lookup(entries)
        else:
            assert word_scores is not None
            states = len(grammar.root) - grammar.interminal_states
            if word_scores.dim() != 3 or word_scores.shape[2] != states:
                raise InputError(
                    f"word_scores have the shape {tuple(word_scores.shape)}: expected [batch, length, {states}]."
                )
            leaf = word_scores if self.parametrisation == VALUES else word_scores.exp()
        rules = with_parameters(self._rules, grammar)
        return TreeDistribution(rules, leaf.transpose(0, 1), lengths, self._symbol_of_state)

    def log_prob(self, trees: Sequence[Tree], sentences: Sequence[Sequence[str]] | None = None) -> Tensor:
        """log p(tree | sentence) of treebank trees, [batch]; without sentences, of the words in the trees."""
        sentences = [tree.leaves() for tree in trees] if sentences is None else sentences
        return self(sentences).log_prob([skeletal(self.model, tree) for tree in trees])

    def to_model(self) -> Model:
        """The model with the parameters as they are now; its coarse grammar stays what it was."""
        grammar = self.grammar()
        lexical = replace(
            grammar.lexical, value=grammar.lexical.value.detach(), backoff=grammar.lexical.backoff.detach()
        )
        binary = grammar.binary.with_tensors({name: value.detach() for name, value in grammar.binary.tensors.items()})
        detached = replace(
            grammar, root=grammar.root.detach(), unary=grammar.unary.detach(), binary=binary, lexical=lexical
        )
        return replace(self.model, grammar=detached.to("cpu"))

    def _place(self, grammar: Grammar) -> None:
        """Finds out what depends on the rules alone."""
        self._structure, self._symbol_of_state = grammar, grammar.symbol_of_state.tolist()
        self._rules = form(grammar)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves the structure along with the parameters."""
        super()._apply(fn, recurse)
        if self.root.device != self._structure.root.device or self.root.dtype != self._structure.root.dtype:
            self._place(self._structure.to(self.root.device, self.root.dtype))
        return self


def _normalised(grammar: Grammar) -> Grammar:
    """Every (a, h) rewrites to 1 in all; one that rewrites to nothing is left so."""
    sums, inner = grammar.row_sums(), grammar.interminal_states
    factor = torch.where(sums > 0, 1 / torch.where(sums > 0, sums, 1), 0)
    return replace(
        grammar,
        root=grammar.root / grammar.root.sum(),
        unary=grammar.unary * factor[grammar.unary_states()[0]],
        binary=grammar.binary.scaled(factor[:inner]),
        lexical=grammar.lexical.scale(torch.ones_like(grammar.lexical.weight), factor[inner:]),
    )
