"""What a parser gives: trees, what is known about them, and what happened."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from nltk.tree import Tree

from lvpcfg.trees.svg import DEEPEST, depth, tree_svg


@dataclass(frozen=True)
class Span:
    """A phrase of a tree."""

    label: str
    start: int
    end: int  # one past its last word
    # p(a tree of the sentence has this label over this span | sentence), over all trees as they are written; of a
    # product the mean over its grammars; as calibrated, where the parser has a calibration. 0 in flat trees.
    posterior: float


class Interval(NamedTuple):
    """All that a number can be."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low if self.high > self.low else 0.0  # both may be -inf


@dataclass(frozen=True)
class Certificate:
    """What the exact grammar says of a sentence and of the tree that a compressed one found: never outside of these."""

    log_z: Interval
    log_prob: Interval  # -inf for flat trees
    posterior: Interval  # of the tree, p(tree | sentence), not calibrated
    over: str  # which trees Z is the sum of: WHOLE or PRUNED


WHOLE, PRUNED = "whole chart", "pruned forest"


@dataclass(frozen=True)
class Parse:
    """A tree and what is known about it."""

    tree: Tree
    # log p(tree, sentence), summed over states and over unary chains with the same ends; -inf for a tree that the
    # grammar does not have: a flat one, or one whose rules are possible each, but not together.
    log_prob: float
    posterior: float  # p(tree | sentence), or as calibrated; at most 1, which negative parameters could exceed
    sentence_log_prob: float  # log p(sentence); where charts are pruned, of what is left
    flat: bool  # the grammar has no tree for the sentence
    spans: tuple[Span, ...] | None = None  # the phrases in preorder, on request
    certificate: Certificate | None = None  # on request

    def _repr_svg_(self) -> str | None:
        """The tree, for notebooks; None, so that they show text, for one that is too deep for a picture."""
        return tree_svg(self.tree) if depth(self.tree) <= DEEPEST else None


@dataclass
class Counts:
    """What happened while parsing."""

    sentences: int = 0
    fallbacks: int = 0  # no path through the grammar: a flat tree
    float64: int = 0  # float32 was not enough
    log_sum_exp: int = 0  # float64 was not enough: decoded by Viterbi
    looser: int = 0  # pruning left nothing: parsed again with a lower threshold
    exhaustive: int = 0  # nor did lower thresholds: parsed without one
    too_long: int = 0  # more words than `max_length`: a flat tree
    bounded: int = 0  # a whole chart would have been too large: a flat tree
    split: int = 0  # batches that were too large for the memory, and were parsed in halves
    negative_rules: int = 0  # posteriors below zero, through signed parameters
    by_recall: int = 0  # sentences that those left without a tree: labelled recall instead
    certified: int = 0  # with an exact model: trees that the compressed one was sure of
    uncertified: int = 0  # and those that the exact one was asked for
    unknown_tags: int = 0  # given tags that the model does not know: any tag instead


def posterior_of(log_prob: float, log_z: float) -> float:
    return math.exp(min(0.0, log_prob - log_z)) if log_prob > -math.inf else 0.0


def certificate_of(log_z: Interval, log_prob: Interval, over: str) -> Certificate:
    low = math.exp(log_prob.low - log_z.high) if log_prob.low > -math.inf else 0.0
    high = math.exp(min(0.0, log_prob.high - log_z.low)) if log_prob.high > -math.inf else 0.0
    posterior = Interval(min(1.0, low * (1 - 1e-15)), min(1.0, high * (1 + 1e-15)))
    return Certificate(log_z, log_prob, posterior, over)
