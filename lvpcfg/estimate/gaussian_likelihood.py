"""The likelihood of trees under mixtures of Gaussians, which start from a grammar or from noise."""

from dataclasses import replace

import torch
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.gaussian import DISTURBED, OWN, TIED, GaussianOptions
from lvpcfg.estimate.gaussian_start import Shape, mixtures, near, places, tied, with_mixtures
from lvpcfg.estimate.states import Refinement
from lvpcfg.estimate.tree_likelihood import TreeLikelihood
from lvpcfg.grammar.gaussian import GaussianRules
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model


class GaussianLikelihood(TreeLikelihood):
    def __init__(self, options: GaussianOptions, task: Task) -> None:
        self.gaussians = options
        self.shape = Shape.of(options)
        super().__init__(options, task)

    def _fresh(self) -> Model:
        options, observed = self.gaussians, self.task.observed
        generator = torch.Generator().manual_seed(self.task.seed)
        if options.sharing == TIED:
            states = Refinement.of(observed, rare=0).split(
                options.components, DISTURBED, generator, remember=False, parts_of_tags=options.lexical
            )
            grammar = self._tied(states.latent.grammar(states.counts), generator)
        else:
            pcfg, own = observed.latent.grammar(observed.counts), options.sharing == OWN
            grammar = mixtures(pcfg, self.shape, options.components, options.lexical, own)
            rules = _rules_of(grammar)
            apart = 0.0 if own else options.apart
            moved = {"mu": near(self._places(grammar, apart), options.noise, generator)}
            moved["child_mu"] = near(rules.child_mu, options.noise, generator)
            grammar = with_mixtures(grammar, rules.with_tensors(rules.tensors | moved), grammar.lexical)
        grammar = replace(grammar, binary=replace(_rules_of(grammar), most=options.kept))
        return replace(self.task.model(options, 0, grammar), coarse=observed.coarse)

    def _taken_up(self, model: Model) -> Model:
        """A model of Gaussians as it is; the states of any other one become Gaussians."""
        rules = model.grammar.binary
        if isinstance(rules, GaussianRules):
            return model
        if model.grammar.signed or model.grammar.closed:
            raise InputError(
                f"the model in {show(self.gaussians.init, 200)} has negative parameters, or chains of unary rules for "
                "rules: expected one without."
            )
        return replace(model, grammar=self._tied(model.grammar, torch.Generator().manual_seed(self.task.seed)))

    def _tied(self, grammar: Grammar, generator: torch.Generator) -> Grammar:
        options = self.gaussians
        return tied(grammar, self.shape, near(self._places(grammar, options.apart), options.noise, generator))

    def _places(self, grammar: Grammar, apart: float) -> Tensor:
        return places(grammar.states, self.gaussians.dimension, apart, grammar.root.dtype)

    def measure(self) -> dict[str, float]:
        """Whole charts of rules with lanes of their own would be too wide."""
        return {} if self.gaussians.sharing == OWN else super().measure()


def _rules_of(grammar: Grammar) -> GaussianRules:
    assert isinstance(grammar.binary, GaussianRules)
    return grammar.binary
