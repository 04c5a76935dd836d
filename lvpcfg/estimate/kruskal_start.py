"""The start of EM for grammars in CP form: counts of the treebank, or expected counts of a model."""

from dataclasses import replace

import torch

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.kruskal_em import KruskalEMOptions
from lvpcfg.estimate.start import load_model, of_model
from lvpcfg.estimate.states import Refinement
from lvpcfg.estimate.terms import split_terms
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


def taken_up(init: str, task: Task, rare: int) -> Refinement:
    """The states and terms of a model in CP form."""
    model = load_model(init, task)
    if not isinstance(model.grammar.binary, RuleCP | WholeCP):
        raise InputError(
            f"the rules of the model in {show(init, 200)} are tensors: expected a model in CP form, as job=compress "
            "and estimator=kruskal_em make it."
        )
    return of_model(model, init, task, rare)
