"""Induced grammars whose parameters are functions of embeddings (Kim et al. 2019; Yang et al. 2021, 2022).

    root     softmax over phrases of MLP(e_root)
    words    softmax over words of MLP(e_tag)
    rules    p(rho | a) p(b | rho) p(c | rho), each a softmax of a linear map of e_a, e_b, e_c    (in rank space)
             p(b, c | a), a softmax of a linear map of e_a                                       (as one tensor)

An MLP is Linear, two residual layers, Linear. The networks are a parametrisation alone: `to_model` writes down
what they say, and that is a model like any other.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lvpcfg.errors import InputError
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import BinaryRules
from lvpcfg.grammar.whole_cp import WholeCP
from lvpcfg.nn import LOGITS, GrammarLayer, Structure


class NeuralGrammarLayer(GrammarLayer):
    """A `GrammarLayer` for grammars of one phrase symbol and one tag, with many states: see `estimate/induction.py`."""

    def __init__(self, model: Model, dimension: int = 256) -> None:
        """Of `model`, the sizes and the lexicon are taken; all else is random."""
        nn.Module.__init__(self)
        grammar, binary = model.grammar, model.grammar.binary
        if len(grammar.symbols) != 2 or len(grammar.unary_rules) or grammar.lexical.widest:
            raise InputError("networks stand for grammars of one phrase symbol and one tag, without unary rules.")
        self.parametrisation, self.model, self._structure = LOGITS, model, Structure(grammar)
        inner, states, entries = grammar.interminal_states, len(grammar.root), len(model.lexicon)
        self.symbols = nn.Embedding(states, dimension)
        self.start = nn.Parameter(torch.randn(1, dimension))
        self.root_network, self.word_network = network(dimension, inner), network(dimension, entries)
        if isinstance(binary, WholeCP):
            self.rules = nn.ModuleList(small_network(dimension, binary.factors.rank) for _ in "uvw")
        else:
            self.rules = nn.ModuleList([nn.Linear(dimension, states * states)])
        self.inner = inner
        # Symbols that are almost the same at first are told apart by the sentences, not by chance.
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def grammar(self) -> Grammar:
        old, (phrases, tags) = self._structure.grammar, self.symbols.weight.tensor_split([self.inner])
        return replace(
            old,
            root=nn.functional.pad(self.root_network(self.start).squeeze(0).softmax(0), (0, len(tags))),
            binary=self._rules(old.binary, phrases),
            lexical=replace(old.lexical, backoff=self.word_network(tags).softmax(1).T),
        )

    def _rules(self, old: BinaryRules, phrases: Tensor) -> BinaryRules:
        if isinstance(old, WholeCP):
            parent, left, right = self.rules
            u, v, w = parent(phrases).softmax(1), *(side(self.symbols.weight).softmax(0) for side in (left, right))
            return old.with_tensors({"u": u.T, "v": v.T, "w": w.T})
        states = len(self.symbols.weight)
        rules = self.rules[0](phrases).softmax(1).unflatten(1, (states, states))
        assert isinstance(old, RuleTensors)
        sides = [slice(None, self.inner), slice(self.inner, None)]
        return old.with_tensors({"values": torch.cat([rules[:, b, c].flatten() for b in sides for c in sides])})


class Residual(nn.Module):
    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dimension, dimension), nn.ReLU(), nn.Linear(dimension, dimension), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def network(dimension: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(dimension, dimension), Residual(dimension), Residual(dimension), nn.Linear(dimension, out)
    )


def small_network(dimension: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dimension, dimension), nn.ReLU(), nn.Linear(dimension, out))
