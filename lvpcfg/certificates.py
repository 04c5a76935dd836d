"""Certificates for sentences: from words, trees and forests to intervals."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lvpcfg.chart.decode.certificate import Certifier
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.forest import Forest
from lvpcfg.chart.forest.prune import Nodes
from lvpcfg.errors import InputError, show
from lvpcfg.grammar.envelope import NONE, bracketed, digest
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.word_scores import Sentence, WordScores
from lvpcfg.options import PRODUCT
from lvpcfg.parses import PRUNED, WHOLE, Certificate, Interval, certificate_of

IMPOSSIBLE = Interval(-math.inf, -math.inf)
UNKNOWN = certificate_of(Interval(-math.inf, math.inf), IMPOSSIBLE, WHOLE)  # of sentences that were not looked at


def check_exact(models: Sequence[Model], exact: Model, decoder: str) -> None:
    """That they go together."""
    if not isinstance(exact, Model):
        raise InputError(f"exact is {show(exact)}: expected a model. Model.load reads a folder.")
    if decoder != PRODUCT:
        raise InputError(f"exact is for decoder={PRODUCT}: found {decoder}.")
    if len(models) != 1 or models[0].envelope is None:
        raise InputError(NONE)
    if models[0].envelope.source != digest(exact.grammar):
        raise InputError("exact is not the model that the other one was compressed from: expected that one.")


class Certificates:
    """By a compressed model with an envelope, or by an exact one; without numbers below zero."""

    def __init__(self, model: Model, device: torch.device) -> None:
        if "compressed" in model.provenance and model.envelope is None:
            raise InputError(NONE)
        self.certifier = Certifier(bracketed(model.grammar, model.envelope).to(device))
        self.words, self.device = WordScores(model.lexicon, self.certifier.known.centre), device

    def of(
        self, sentences: Sequence[Sentence], trees: Sequence[Skeleton | None], forest: tuple[Forest, Nodes] | None
    ) -> list[Certificate]:
        """Of sentences, each with its tree if it has one, over a forest of all of them or over whole charts."""
        words, lengths = self.of_words(sentences)
        log_z = (
            self.certifier.of_charts(words, lengths)
            if forest is None
            else self.certifier.brackets(words, lengths, *forest).log_z
        )
        some = [number for number, tree in enumerate(trees) if tree is not None]
        log_prob = dict(zip(some, self._of_trees(sentences, trees, some), strict=True))
        over = WHOLE if forest is None else PRUNED
        return [
            certificate_of(Interval(*bounds), log_prob.get(number, IMPOSSIBLE), over)
            for number, bounds in enumerate(zip(*(bound.tolist() for bound in log_z), strict=True))
        ]

    def of_words(self, sentences: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
        """What words are worth, and the lengths."""
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=self.device)
        return self.words.of(sentences), lengths

    def _of_trees(
        self, sentences: Sequence[Sentence], trees: Sequence[Skeleton | None], some: list[int]
    ) -> list[Interval]:
        if not some:
            return []
        known = [tree for tree in trees if tree is not None]
        bounds = self.certifier.of_trees(known, *self.of_words([sentences[number] for number in some]))
        return [Interval(*pair) for pair in zip(*(bound.tolist() for bound in bounds), strict=True)]
