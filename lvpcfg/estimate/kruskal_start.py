"""Where EM of grammars in CP form begins: with the counts of the treebank, or what a model expects in its trees."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.kruskal_em import KruskalEMOptions
from lvpcfg.estimate.latent import Counts, Latent
from lvpcfg.estimate.states import Refinement
from lvpcfg.estimate.terms import split_terms
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rules import BinaryRules
from lvpcfg.grammar.whole_cp import WholeCP


def fresh(options: KruskalEMOptions, task: Task) -> Refinement:
    """A rule of single states is one term; terms that rules share are random."""
    generator = torch.Generator().manual_seed(task.seed)
    refinement = Refinement.of(task.observed, options.rare)
    binary = refinement.counts.binary
    binary = _shared(binary, options.rank, generator) if options.shared else _of_rules(binary)
    refinement = Refinement(
        refinement.latent.over(binary), replace(refinement.counts, binary=binary), refinement.hierarchy
    )
    if options.states > 1:
        refinement = refinement.split(options.states, options.noise, generator, remember=False)
        if not options.shared:
            refinement = split_terms(refinement, options.rank, options.noise, generator)
    return refinement


def _of_rules(binary: BinaryRules) -> RuleCP:
    """Each rule as one term."""
    counts = binary.tensors["values"].view(-1, 1, 1)
    none, every = counts.new_zeros(0), torch.arange(len(binary))
    return RuleCP(binary.state_counts, binary.interminals, binary.rules, none, every, counts, counts, counts)


def _shared(binary: BinaryRules, rank: int, generator: torch.Generator) -> WholeCP:
    """Each symbol's counts as a parent, a left and a right child, shared out among all terms at random."""
    counts, factors = binary.tensors["values"], []
    for symbols, size in zip(
        binary.rules.unbind(1), (binary.interminals, len(binary.states), len(binary.states)), strict=True
    ):
        frequency = counts.new_zeros(size).index_add(0, symbols, counts)
        shares = -torch.rand(rank, size, generator=generator, dtype=counts.dtype).log()
        factors.append(frequency * shares / shares.sum(0))
    return WholeCP(binary.state_counts, binary.interminals, binary.rules, *factors)


def of_model(options: KruskalEMOptions, task: Task) -> Refinement:
    """The states and terms of a model, and the counts that it expects in the trees."""
    grammar, model = _usable(options, task)
    refinement = Refinement.of(task.observed, options.rare)
    latent = refinement.latent.over(grammar.binary)
    words = refinement.counts.lexical  # not looked at: words are worth what the model's lexicon says
    parameters = Counts(grammar.root, grammar.binary, grammar.unary, words)
    log_likelihood, counts = latent.expect_under(parameters, _leaf(latent, grammar, model))
    if not log_likelihood > -math.inf:
        raise InputError(
            f"the model in {show(options.init, 200)} makes some of the {len(task.treebank)} trees impossible: expected "
            "one that was trained on these trees."
        )
    return Refinement(latent, counts, grammar.hierarchy)


def _leaf(latent: Latent, grammar: Grammar, model: Model) -> Tensor:
    """What each word of the treebank is worth to the states of its tag, by the model's lexicon; [words, states]."""
    bank = latent.treebank
    entries = torch.tensor([model.lexicon.encode([word])[0] for word in bank.words])
    tag, word = bank.lexical_rules[bank.rule[bank.is_lexical]].unbind(1)
    state = torch.arange(int(latent.states.max()))
    column = (latent.first[tag] - latent.first[latent.inner]).unsqueeze(1) + state
    inside = state < latent.states[tag].unsqueeze(1)
    table = grammar.lexical.lookup(entries)
    leaf = torch.where(inside, table[word.unsqueeze(1), torch.where(inside, column, 0)], 0)
    return leaf.to(latent.device, torch.float32)


def _usable(options: KruskalEMOptions, task: Task) -> tuple[Grammar, Model]:
    """The model to begin with, in float64; refused, if EM cannot take it up."""
    assert options.init is not None
    model, bank = Model.load(options.init), task.treebank
    grammar, name = model.grammar.to(dtype=torch.float64), show(options.init, 200)
    if not isinstance(grammar.binary, RuleCP | WholeCP):
        raise InputError(
            f"the rules of the model in {name} are tensors: expected a model in CP form, as job=compress and "
            "estimator=kruskal_em make it."
        )
    if grammar.lexical.network is not None:
        raise InputError(f"the model in {name} has a character lexicon, which EM does not learn: expected one without.")
    if grammar.signed:
        raise InputError(
            f"the model in {name} has negative parameters: expected a non-negative one, such as of "
            "decompose.nonnegative=true."
        )
    same = grammar.symbols == bank.symbols and model.binarisation == bank.binarisation and not grammar.closed
    if not same or not all(
        torch.equal(getattr(grammar, of), getattr(bank, of)) for of in ("binary_rules", "unary_rules")
    ):
        raise InputError(
            f"the model in {name} has other symbols, rules or binarisation than the trees: expected one that was "
            "trained on these trees."
        )
    return grammar, model
