"""Grammars as modules: their parameters are `nn.Parameter`s, their trees a distribution with gradients to them.

    layer = lvpcfg.nn.GrammarLayer.from_model(model)
    loss = -layer.log_prob(trees).sum()                  # log p(tree | sentence)

Parameters are kept in one of three ways (`parametrisation`):

    logits       exp of the parameter, divided by the sum over all rewrites of the state: a normalised grammar
    log-weights  exp of the parameter: any non-negative grammar whose chains of unary rules have a finite sum
    values       the parameter itself: for grammars with negative parameters too

In the first two, what is zero in the model has the parameter -inf: it stays zero, and its gradient is 0. Which rules
there are, and how charts and forests compute with them, is found out once. The numerator of a likelihood, the weight of
observed trees, and its denominator, the sum over all trees or over those that pruning leaves, are functions of the same
tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from nltk.tree import Tree
from torch import Tensor, nn

from lvpcfg.chart.derivations import Skeletal
from lvpcfg.chart.fast.build import form, with_parameters
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.forest.candidates import with_trees
from lvpcfg.chart.forest.observed import ForestOverWords, ObservedTrees, RuleNumbers
from lvpcfg.chart.forest.prune import FineRules
from lvpcfg.chart.forest.pruning import Pruning
from lvpcfg.chart.stages import Stages
from lvpcfg.decompose.coarse import covered
from lvpcfg.distributions import TreeDistribution, encoded, skeletal
from lvpcfg.errors import InputError, expect, show
from lvpcfg.grammar.coarse import projected_coarse
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.structures import checked_lengths, exponentials
from lvpcfg.trees.lexicon import LexicalTable
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.sentences import sentences_of
from lvpcfg.trees.spelling import Tokens
from lvpcfg.trees.walk import trees_of

LOGITS, LOG_WEIGHTS, VALUES = PARAMETRISATIONS = ("logits", "log-weights", "values")
UNARY = 0.99  # the unary rules of a state, as log-weights, add up to no more, so that chains of them have a sum


@dataclass(frozen=True, eq=False)
class Observed:
    """Treebank trees as a layer computes their weights; see `GrammarLayer.observe`."""

    words: list[list[str]]
    tokens: Tokens  # [batch, length]
    lengths: Int[Tensor, "batch"]
    trees: list[Skeletal]
    forest: ObservedTrees | None  # None, if the grammar makes none of the trees
    candidates: ForestOverWords | None  # what they are compared with; None: all trees of their sentences


@dataclass(frozen=True, eq=False)
class Words:
    """What words are worth to the states of the preterminals."""

    leaf: Float[Tensor, "length batch states"]
    lengths: Int[Tensor, "batch"] | None  # None, if all are the same
    constant: Float[Tensor, "batch"] | None = None  # log of a factor that `leaf` leaves out


class GrammarLayer(nn.Module):
    """A model's grammar as a module. Any representation of binary rules is possible.

    Calling it with sentences, or with scores of words, gives the distribution over their trees.
    """

    root: Float[Tensor, "states"]
    unary: Float[Tensor, "numbers"]
    _most_unary: Float[Tensor, "interminal_states"]  # what the unary rules of a state may add up to

    def __init__(self, model: Model, parametrisation: str = LOGITS) -> None:
        super().__init__()
        expect("parametrisation", parametrisation, PARAMETRISATIONS)
        if not isinstance(model, Model):
            raise InputError(f"a grammar layer is made of a model: found {show(model)}. Model.load reads a folder.")
        grammar = model.grammar
        if parametrisation != VALUES and grammar.signed:
            raise InputError(
                f"parametrisation is {show(parametrisation)}, and the model has negative parameters: "
                f"expected {VALUES!r}."
            )
        if parametrisation == LOGITS and grammar.closed:
            raise InputError(
                f"parametrisation is {LOGITS!r}, and the model lists closed chains in place of unary rules, which "
                f"do not sum to 1 with its other rules: expected {LOG_WEIGHTS!r} or {VALUES!r}."
            )
        beside = grammar.binary.beside
        if parametrisation == LOGITS and beside:
            raise InputError(
                f"parametrisation is {LOGITS!r}, and the rules of the model are mixtures, which do not sum to 1: "
                f"expected {LOG_WEIGHTS!r} or {VALUES!r}."
            )
        self.parametrisation, self.model = parametrisation, model

        def parameter(values: Tensor, of_reals: bool = False) -> nn.Parameter:
            values = values.detach().clone()
            return nn.Parameter(values if parametrisation == VALUES or of_reals else values.log())

        for name in ("root", "unary"):
            values: Tensor = getattr(grammar, name)
            if name in beside:  # made of the numbers of the binary rules
                self.register_buffer(name, values.detach().clone(), persistent=False)
            else:
                self.register_parameter(name, parameter(values))
        self._binary = [f"binary_{name}" for name in grammar.binary.tensors]
        for name, tensor in grammar.binary.tensors.items():
            self.register_parameter(f"binary_{name}", parameter(tensor, name in grammar.binary.of_reals))
        self.words = parameter(grammar.lexical.value)
        self.unknown_words = parameter(grammar.lexical.backoff)
        network = grammar.lexical.network
        tensors = {} if network is None else network.tensors
        self.characters = nn.ParameterDict({name: tensor.detach().clone() for name, tensor in tensors.items()})
        self._structure = Structure(grammar)
        sums = grammar.unary_matrix().detach().sum(1)
        self.register_buffer("_most_unary", torch.where(sums < 1, sums.clamp_min(UNARY), sums), persistent=False)

    @classmethod
    def from_model(cls, model: Model, parametrisation: str = LOGITS) -> "GrammarLayer":
        return cls(model, parametrisation)

    def grammar(self) -> Grammar:
        """The grammar that the parameters stand for now; differentiable by them."""
        old = self._structure.grammar
        tensors = {
            name: tensor if name in old.binary.of_reals else self._number(tensor)
            for name, tensor in zip(old.binary.tensors, map(self.get_parameter, self._binary), strict=True)
        }
        binary = old.binary.with_tensors(tensors, zeros_stay=self.parametrisation != VALUES)
        words, unknown = map(self._number, (self.words, self.unknown_words))
        beside = binary.beside
        network = old.lexical.network
        if network is not None:
            network = network.with_tensors(dict(self.characters))
        grammar = replace(
            old,
            root=beside["root"] if "root" in beside else self._number(self.root),
            unary=beside["unary"] if "unary" in beside else self._number(self.unary),
            binary=binary,
            lexical=replace(
                old.lexical, value=words, weight=old.lexical.weight.to(words.dtype), backoff=unknown, network=network
            ),
        )
        if self.parametrisation == LOGITS:
            return normalised(grammar).to(dtype=self.root.dtype)
        if self.parametrisation == LOG_WEIGHTS and not grammar.closed and "unary" not in beside:
            sums = grammar.unary_matrix().sum(1)
            factor = self._most_unary / torch.maximum(sums, self._most_unary)
            return replace(grammar, unary=grammar.unary * factor[grammar.unary_states()[0]])
        return grammar

    def _number(self, parameter: Tensor) -> Tensor:
        """What a parameter stands for."""
        if self.parametrisation == VALUES:
            return parameter
        # Logits are divided by their sum only now: exp of them may be more than float32 holds.
        return parameter.double().exp() if self.parametrisation == LOGITS else parameter.exp()

    def forward(
        self,
        sentences: Iterable[Iterable[str]] | None = None,
        word_scores: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> TreeDistribution:
        """The distribution over the trees of sentences, or of words with given scores.

        `word_scores`, [batch, length, states of preterminals], replace the lexicon. They are logarithms, or ordinary
        numbers if the parametrisation is `values`. `lengths`, [batch], are needed if some sentences are shorter.
        """
        grammar = self.grammar()
        return self._trees(grammar, self._words(grammar, sentences, word_scores, lengths))

    def observe(self, trees: Iterable[Tree], prune: float = 0.0) -> Observed:
        """Treebank trees prepared for any number of calls of `log_weight` and `log_prob`.

        With `prune`, `log_prob` compares a tree only with trees that the model's coarse grammar leaves: rules at splits
        with a smaller posterior are dropped, but never those of the tree itself. The result is then an upper bound.
        The prepared trees stay on the device where the layer is now.
        """
        trees = trees_of("what is to be observed", trees)
        normal = normalise_all(trees)
        if not normal or len(normal) < len(trees):
            raise InputError("a grammar layer observes trees of a word or more.")
        words = [tree.leaves() for tree in normal]
        tokens, _ = encoded(self.model.lexicon, words, self._device)
        lengths = torch.tensor([len(sentence) for sentence in words], device=self._device)
        skeletons = [skeletal(self.model, tree) for tree in normal]
        rules = self._structure.forest_rules
        forest = ObservedTrees.of(skeletons, rules, self._structure.rule_numbers)
        candidates = self._candidates(tokens, lengths, forest, prune) if prune > 0 else None
        return Observed(words, tokens, lengths, skeletons, forest, candidates)

    @torch.no_grad()
    def _candidates(
        self, tokens: Tokens, lengths: Tensor, trees: ObservedTrees | None, prune: float
    ) -> ForestOverWords:
        """What pruning by the model leaves, and the trees."""
        pruning, coarse = self._structure.pruning(self.model)
        flat = tokens[torch.arange(tokens.entries.shape[1], device=lengths.device) < lengths.unsqueeze(1)]
        words, coarse_words = self._structure.grammar.lexical.values_of(flat), coarse.values_of(flat)
        forest, nodes = pruning.forest(words, coarse_words, lengths, prune)
        rules = self._structure.forest_rules
        if trees is not None:
            forest, nodes = with_trees(forest, nodes, trees.forest, trees.nodes, trees.sentences, len(rules.sizes))
        return ForestOverWords.of(forest, nodes, rules)

    def log_weight(
        self,
        trees: Sequence[Tree] | Observed,
        sentences: Iterable[Iterable[str]] | None = None,
        word_scores: Tensor | None = None,
    ) -> Float[Tensor, "batch"]:
        """log of the weight of treebank trees, the sum over their states; in time linear in their size.

        The words are those of the trees or of `sentences`, or have `word_scores`, as in `forward`. In a normalised
        grammar the weight is p(tree, sentence).
        """
        grammar, observed = self.grammar(), self._observed(trees)
        words = self._words_over(observed, grammar, sentences, word_scores)
        return self._log_weight(observed, grammar, self._structure.forest_rules.with_parameters(grammar), words)

    def log_prob(
        self,
        trees: Sequence[Tree] | Observed,
        sentences: Iterable[Iterable[str]] | None = None,
        word_scores: Tensor | None = None,
    ) -> Float[Tensor, "batch"]:
        """log p(tree | sentence) of treebank trees; -inf for trees that the grammar does not have."""
        grammar, observed = self.grammar(), self._observed(trees)
        words = self._words_over(observed, grammar, sentences, word_scores)
        rules = self._structure.forest_rules.with_parameters(grammar)
        weight = self._log_weight(observed, grammar, rules, words)
        if observed.candidates is None:
            log_z = self._trees(grammar, words).partition
        else:
            log_z = observed.candidates.log_z(rules, words.leaf)
            log_z = log_z if words.constant is None else log_z + words.constant
        return torch.where(weight > -torch.inf, weight - log_z, -torch.inf)

    @property
    def _device(self) -> torch.device:
        return self._structure.grammar.root.device

    def to_model(self) -> Model:
        """The model with the present parameters. Its coarse grammar does not change."""
        grammar = self.grammar()

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().clone()

        lexical, network = grammar.lexical, grammar.lexical.network
        if network is not None:
            network = network.with_tensors({name: copied(tensor) for name, tensor in network.tensors.items()})
        lexical = replace(lexical, value=copied(lexical.value), backoff=copied(lexical.backoff), network=network)
        binary = {name: copied(tensor) for name, tensor in grammar.binary.tensors.items()}
        grammar = replace(
            grammar,
            root=copied(grammar.root),
            unary=copied(grammar.unary),
            binary=grammar.binary.with_tensors(binary),
            lexical=lexical,
        )
        return replace(self.model, grammar=grammar.to("cpu"))

    def _words(
        self,
        grammar: Grammar,
        sentences: Iterable[Iterable[str]] | None,
        word_scores: Tensor | None,
        lengths: Tensor | None,
    ) -> Words:
        if (sentences is None) == (word_scores is None):
            raise InputError("a grammar layer takes sentences, or word_scores in place of them.")
        if sentences is not None:
            if lengths is not None:
                raise InputError("sentences have their own lengths: `lengths` goes with word_scores.")
            tokens, lengths = encoded(self.model.lexicon, sentences, self._device)
            return Words(grammar.lexical.values_of(tokens).transpose(0, 1), lengths)
        assert word_scores is not None
        states = len(grammar.root) - grammar.interminal_states
        if not isinstance(word_scores, Tensor) or not word_scores.is_floating_point():
            raise InputError(f"word_scores are {show(word_scores)}: expected a tensor of floating-point numbers.")
        if word_scores.dim() != 3 or word_scores.shape[2] != states or not word_scores.numel():
            raise InputError(
                f"word_scores have the shape {tuple(word_scores.shape)}: expected [batch, length, {states}]."
            )
        if word_scores.device != self._device:
            raise InputError(
                f"word_scores are on {word_scores.device} and the layer on {self._device}: expected one device."
            )
        batch, length, _ = word_scores.shape
        lengths = checked_lengths(lengths, batch, length, word_scores.device)
        if self.parametrisation == VALUES:
            return Words(word_scores.transpose(0, 1), lengths)
        (leaf,), constant = exponentials(word_scores, lengths=lengths)
        return Words(leaf.transpose(0, 1), lengths, constant)

    def log_likelihood(
        self, entries: Int[Tensor, "batch length"], lengths: Int[Tensor, "batch"] | None = None
    ) -> Float[Tensor, "batch"]:
        """log Z of sentences that are given as entries of the lexicon: of a normalised grammar, log p(words)."""
        grammar = self.grammar()
        return self._trees(grammar, Words(grammar.lexical.lookup(entries).transpose(0, 1), lengths)).partition

    def _trees(self, grammar: Grammar, words: Words) -> TreeDistribution:
        """All trees over words."""
        rules = with_parameters(self._structure.form, grammar)
        dtype = torch.promote_types(words.leaf.dtype, rules.root.dtype)
        symbols = self._structure.symbol_of_state
        return TreeDistribution(rules.to(dtype), words.leaf.to(dtype), words.lengths, symbols, words.constant)

    def _observed(self, trees: Sequence[Tree] | Observed) -> Observed:
        return trees if isinstance(trees, Observed) else self.observe(trees)

    def _words_over(
        self,
        observed: Observed,
        grammar: Grammar,
        sentences: Iterable[Iterable[str]] | None,
        word_scores: Tensor | None,
    ) -> Words:
        """Those of the trees, if no others are given in their place."""
        if sentences is None and word_scores is None:
            return Words(grammar.lexical.values_of(observed.tokens).transpose(0, 1), observed.lengths)
        sizes = [len(words) for words in observed.words]
        sentences = None if sentences is None else sentences_of(sentences)
        if sentences is not None and (given := [len(words) for words in sentences]) != sizes:
            raise InputError(f"the trees have {show(sizes)} words and the sentences {show(given)}.")
        if word_scores is None:
            return self._words(grammar, sentences, None, None)
        if word_scores.dim() != 3 or len(word_scores) != len(sizes) or word_scores.shape[1] < max(sizes):
            expected = f"[{len(sizes)}, {max(sizes)}, states]"
            raise InputError(f"word_scores have the shape {tuple(word_scores.shape)}: expected {expected}.")
        return self._words(grammar, sentences, word_scores, observed.lengths.to(word_scores.device))

    def _log_weight(self, observed: Observed, grammar: Grammar, rules: FineRules, words: Words) -> Tensor:
        weight = torch.full((len(observed.words),), -torch.inf, dtype=torch.float64, device=self._device)
        if observed.forest is not None:
            weight = weight.index_copy(0, observed.forest.sentences, observed.forest.log_weights(rules, words.leaf))
        # Forests are sure of what is impossible, but for trees with rules that are not listed, to which one CP form of
        # all rules may give weight, and for negative numbers. Charts compute those.
        sure = grammar.binary.only_listed and self.parametrisation != VALUES
        failed = (~weight.isfinite()).nonzero().squeeze(1)
        if len(failed) and not sure:
            part = self._trees(grammar, words).part(failed)
            weight = weight.index_copy(0, failed, part.log_weight([observed.trees[i] for i in failed.tolist()]))
        return weight if words.constant is None else weight + words.constant

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves the structure along with the parameters."""
        kind = fn(next(self.parameters()).detach()[:0]).dtype
        if kind not in (torch.float32, torch.float64):
            raise InputError(f"a grammar layer cannot be of {kind}: expected float32 or float64.")
        super()._apply(fn, recurse)
        known, moved = self._structure.grammar.root, next(self.parameters())
        if moved.device != known.device or moved.dtype != known.dtype:
            self._structure = Structure(self._structure.grammar.to(moved.device, moved.dtype))
        return self


class Structure:
    """What depends on the rules of a grammar alone, whatever its numbers."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.symbol_of_state = grammar, grammar.symbol_of_state.tolist()
        for name in grammar.binary.structure + grammar.binary.of_zeros:  # found out now, and kept by `with_tensors`
            getattr(grammar.binary, name)
        self._pruning: tuple[Pruning, LexicalTable] | None = None

    @cached_property
    def form(self) -> TensorForm | CPForm:
        """Of whole charts."""
        return form(self.grammar)

    @cached_property
    def forest_rules(self) -> FineRules:
        return FineRules(self.grammar)

    @cached_property
    def rule_numbers(self) -> RuleNumbers:
        return RuleNumbers(self.forest_rules)

    def pruning(self, model: Model) -> tuple[Pruning, LexicalTable]:
        """How charts are pruned, by the model as it was given; and the words of its coarse grammar."""
        if self._pruning is None:
            root = self.grammar.root
            coarse = covered(model.coarse or projected_coarse(model.grammar)).to(root.device, root.dtype)
            self._pruning = Pruning(self.grammar, coarse, Stages(root.device)), coarse.grammar.lexical
        return self._pruning


def normalised(grammar: Grammar) -> Grammar:
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
