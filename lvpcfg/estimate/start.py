"""Training that starts from a model: its states, and its expected counts in the trees.

A spectral model has signed parameters, and no counts: it gives its clusters (`clusters.py`).
"""

import hashlib
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.cluster import ClusterOptions
from lvpcfg.estimate.clusters import clustered
from lvpcfg.estimate.estimator import Step, Task
from lvpcfg.estimate.latent import Counts, Latent
from lvpcfg.estimate.spectral import ProjectionOptions, SpectralOptions
from lvpcfg.estimate.states import Refinement
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.reader import JSON
from lvpcfg.trees.lexicon import Lexicon

START = Step("start", "start", "always")


def made_of(init: str) -> dict[str, Any]:
    """What a training that takes this one up must share with it: the model it began with."""
    return {"model of estimator.init": hashlib.sha256((Path(init) / JSON).read_bytes()).hexdigest()[:16]}


def load_model(init: str, task: Task) -> Model:
    """The model in a folder; refused, if it was trained on other trees."""
    model, bank = Model.load(init), task.treebank
    grammar = model.grammar
    same = grammar.symbols == bank.symbols and model.binarisation == bank.binarisation and not grammar.closed
    if not same or not all(
        torch.equal(getattr(grammar, of), getattr(bank, of)) for of in ("binary_rules", "unary_rules")
    ):
        raise InputError(
            f"the model in {show(init, 200)} has other symbols, rules or binarisation than the trees: expected one "
            "that was trained on these trees."
        )
    return model


def of_any_model(init: str, task: Task, rare: int) -> Refinement:
    """The clusters of a spectral model; of any other one its states, and the counts that it expects in the trees."""
    model = load_model(init, task)
    if model.provenance.get("estimator") == SpectralOptions.name:
        return _clusters_of(model, init, task, rare)
    return of_model(model, init, task, rare)


def of_model(model: Model, init: str, task: Task, rare: int) -> Refinement:
    """The states of a model, in its representation of rules, and the counts that it expects in the trees."""
    name = show(init, 200)
    if model.grammar.lexical.network is not None:
        raise InputError(f"the model in {name} has a character lexicon, which EM does not learn: expected one without.")
    if model.grammar.signed:
        raise InputError(
            f"the model in {name} has negative parameters: expected a non-negative one, such as of "
            "decompose.nonnegative=true."
        )
    grammar = model.grammar.to(dtype=torch.float64)
    refinement = Refinement.of(task.observed, rare)
    latent = refinement.latent.over(grammar.binary)
    words = refinement.counts.lexical  # not looked at: words are worth what the model's lexicon says
    parameters = Counts(grammar.root, grammar.binary, grammar.unary, words)
    log_likelihood, counts = latent.expect_under(parameters, _leaf(latent, grammar, model.lexicon))
    if not log_likelihood > -math.inf:
        raise InputError(
            f"the model in {name} makes some of the {len(task.treebank)} trees impossible: expected one that was "
            "trained on these trees."
        )
    return Refinement(latent, counts, grammar.hierarchy)


def _leaf(latent: Latent, grammar: Grammar, lexicon: Lexicon) -> Tensor:
    """What each word of the trees here is worth to the states of its tag, by the model's lexicon; [words, states]."""
    bank = latent.treebank
    entries = torch.tensor([lexicon.encode([word])[0] for word in bank.words])
    tag, word = bank.lexical_rules[bank.rule[bank.is_lexical]].unbind(1)
    state = torch.arange(int(latent.states.max()))
    column = (latent.first[tag] - latent.first[latent.inner]).unsqueeze(1) + state
    inside = state < latent.states[tag].unsqueeze(1)
    table = grammar.lexical.lookup(entries)
    leaf = torch.where(inside, table[word.unsqueeze(1), torch.where(inside, column, 0)], 0)
    return leaf.to(latent.device, torch.float32)


def _clusters_of(model: Model, init: str, task: Task, rare: int) -> Refinement:
    """Those of the same vectors of nodes: with the features, states and seed that the model was made with."""
    made, names = model.provenance, [field.name for field in fields(ProjectionOptions) if field.name != "name"]
    options, seed = made.get("options"), made.get("seed")
    if not isinstance(options, dict) or not {*names} <= options.keys() or type(seed) is not int:
        raise InputError(
            f"the model in {show(init, 200)} does not say with which options and seed it was made: expected one of "
            f"estimator={SpectralOptions.name}."
        )
    return clustered(ClusterOptions(rare=rare, **{name: options[name] for name in names}), task, seed)
