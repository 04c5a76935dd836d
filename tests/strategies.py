"""Random trees and grammars for property tests."""

from itertools import product

import torch
from hypothesis import strategies as st
from nltk.tree import Tree
from torch import Tensor

from lvpcfg.grammar.gaussian import GaussianRules
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.trees.binarise import Binarisation
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.treebank import Symbols

# Marks of the binarisation among the labels, and white space that is not ASCII among the words.
labels = st.text(alphabet="ABX@+^|%-=$é", min_size=1, max_size=4)
words = st.text(alphabet="abc@+*-\u00a0é#", min_size=1, max_size=4)


def preterminals() -> st.SearchStrategy[Tree]:
    return st.builds(lambda label, word: Tree(label, [word]), labels, words)


def constituents() -> st.SearchStrategy[Tree]:
    return st.recursive(
        preterminals(),
        lambda children: st.builds(Tree, labels, st.lists(children, min_size=1, max_size=5)),
        max_leaves=12,
    )


def sentences() -> st.SearchStrategy[Tree]:
    return st.builds(lambda children: Tree("TOP", children), st.lists(constituents(), min_size=1, max_size=3))


def random_model(seed: int = 0, states: tuple[int, ...] = (2, 3, 1, 4), dtype: torch.dtype = torch.float64) -> Model:
    """A normalised grammar S, A, (N, V) with its own number of states for each symbol."""
    generator = torch.Generator().manual_seed(seed)

    def random(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=dtype)

    m = torch.tensor(states)
    binary_rules = torch.tensor([[0, 2, 1], [0, 1, 1], [1, 3, 2], [1, 2, 3]])
    unary_rules = torch.tensor([[0, 1], [1, 3]])
    emitting = states[2] + states[3]
    lexical = LexicalTable(
        row=torch.tensor([0, 2, 2 + states[3], 2 + states[3], 2 + states[3]]),
        state=torch.tensor([0, states[2], *range(states[2], emitting)]),
        value=random(2 + states[3]),
        weight=random(4),
        source=torch.tensor([0, 1, 0, 1]),
        backoff=random(2 * emitting).view(2, emitting),
        widest=max(2, states[3]),
    )
    grammar = Grammar(
        symbols=Symbols(("S", "A"), ("N", "V")),
        binary=RuleTensors(states, 2, binary_rules, random(int(m[binary_rules].prod(1).sum()))),
        unary_rules=unary_rules,
        root=torch.nn.functional.pad(torch.full((states[0],), 1 / states[0], dtype=dtype), (0, sum(states[1:]))),
        unary=random(int(m[unary_rules].prod(1).sum())),
        lexical=lexical,
    )
    return Model(grammar, Lexicon(("dog", "barks"), ("<unknown>",), "english"), Binarisation(), {"made by": "chance"})


def gaussians(
    grammar: Grammar, components: int, signed: bool = False, dimension: int = 2, spreads: int = 2
) -> GaussianRules:
    """Random mixtures of so many components a rule over the states of a grammar; 0 components: tied ones."""
    binary, unary, k = grammar.binary, grammar.unary_rules, components
    generator = torch.Generator().manual_seed(components)

    def random(*shape: int, least: float = 0.0) -> Tensor:
        return least + torch.rand(shape, generator=generator, dtype=torch.float64)

    parents = torch.cat([binary.rules[:, 0], unary[:, 0]]).repeat_interleave(k)
    children = (2 * len(binary) + len(unary) + len(binary.states)) * k
    sizes = [size * k for size in (len(binary), len(unary), len(binary.states))]
    if not k:
        sizes = [len(binary.values), len(grammar.unary), len(grammar.root)]
    numbers = [random(*shape, least=-0.5) for shape in product((len(grammar.root), children), (dimension, spreads))]
    weights = [0.2 * random(size, least=-0.3 * signed) for size in sizes]
    weights[2][k or binary.state_counts[0] :] = 0  # trees begin with the first symbol
    lane = (random(len(parents)) * binary.states[parents]).long()
    return GaussianRules(binary.state_counts, binary.interminals, binary.rules, unary, *numbers, *weights, lane)
