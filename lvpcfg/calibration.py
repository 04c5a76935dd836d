"""Posteriors that are right as often as they say, by Platt scaling (Platt 1999).

    p' = sigmoid(slope logit(p) + offset)

The two numbers maximise the likelihood of what was right and what was wrong in sentences with gold trees. The order of
posteriors does not change.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float64
from nltk.tree import Tree

from lvpcfg.errors import InputError, show
from lvpcfg.evaluation.evalb import evalb_label, sentence
from lvpcfg.files import PathLike, read_text, write_text
from lvpcfg.parses import Parse

if TYPE_CHECKING:
    from lvpcfg.parser import Parser

SURE = 1 - 1e-6  # float32 tells no larger posteriors apart
TREES = 5  # of each sentence, so that trees that are wrong are among them


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Posteriors, and which of them were right."""

    posteriors: Float64[np.ndarray, "outcomes"]
    right: Bool[np.ndarray, "outcomes"]

    @staticmethod
    def of(pairs: Sequence[tuple[float, bool]]) -> "Outcomes":
        posteriors, right = np.array(pairs, float).reshape(-1, 2).T
        return Outcomes(posteriors, right == 1)

    def bins(self, number: int = 10) -> list[tuple[int, float, float]]:
        """Bins of equal size, from small posteriors to large: the number, their mean, and the share that was right."""
        order = np.argsort(self.posteriors, kind="stable")
        parts = np.array_split(order, min(number, len(order)) or 1)
        return [(len(part), self.posteriors[part].mean(), self.right[part].mean()) for part in parts if len(part)]

    def error(self, number: int = 10) -> float:
        """The expected calibration error: the mean distance of posteriors from the share that was right, over bins."""
        return sum(size * abs(mean - share) for size, mean, share in self.bins(number)) / max(1, len(self.right))


@dataclass(frozen=True)
class Scaling:
    slope: float
    offset: float

    def __call__(self, posterior: float) -> float:
        """Nothing can be said of what the grammar does not have: 0 stays 0."""
        if posterior <= 0:
            return 0.0
        return 1 / (1 + math.exp(min(700.0, -self.slope * _logit(posterior) - self.offset)))

    def scaled(self, outcomes: Outcomes) -> Outcomes:
        return replace(outcomes, posteriors=np.array([self(posterior) for posterior in outcomes.posteriors]))

    @staticmethod
    def fit(outcomes: Outcomes, what: str) -> "Scaling":
        """Platt's targets are a little above 0 and a little below 1, so that few outcomes give no certainty."""
        some = outcomes.posteriors > 0
        right = torch.from_numpy(outcomes.right[some])
        number = right.sum().double()
        target = torch.where(right, (number + 1) / (number + 2), 1 / (len(right) - number + 2))
        logits = torch.tensor([_logit(posterior) for posterior in outcomes.posteriors[some]], dtype=torch.float64)
        found = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([found], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            optimiser.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(found[0] * logits + found[1], target)
            loss.backward()
            return loss

        if right.any() and not right.all():
            optimiser.step(loss)
        slope, offset = found.tolist()
        if not (right.any() and not right.all() and slope > 0):
            raise InputError(
                f"{len(right)} {what}, {int(number)} of them right, do not show what their posteriors are worth: "
                "expected more gold trees."
            )
        return Scaling(slope, offset)


@dataclass(frozen=True)
class Calibration:
    """How the posteriors of a model with a decoder are scaled: those of phrases, and those of trees."""

    spans: Scaling
    trees: Scaling

    @staticmethod
    def fit(spans: Outcomes, trees: Outcomes) -> "Calibration":
        """Learned from the outcomes of phrases and of trees."""
        return Calibration(Scaling.fit(spans, "phrases"), Scaling.fit(trees, "trees"))

    def of(self, parse: Parse) -> Parse:
        """The parse with scaled posteriors."""
        spans = parse.spans
        if spans is not None:
            spans = tuple(replace(span, posterior=self.spans(span.posterior)) for span in spans)
        return replace(parse, posterior=self.trees(parse.posterior), spans=spans)

    def save(self, path: PathLike) -> None:
        """Writes the four numbers into a file of JSON."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: PathLike) -> "Calibration":
        """Reads a file of `save`, or of job=calibrate."""
        try:
            about = json.loads(read_text(path))
            return Calibration(*(_scaling(about[name]) for name in ("spans", "trees")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{show(str(path), 200)} is no calibration: expected a file that job=calibrate wrote."
            ) from None


def calibrate(parser: "Parser", gold: Sequence[Tree]) -> Calibration:
    """The calibration of a parser, learned from normalised gold trees that its model was not trained on."""
    return Calibration.fit(*outcomes(parser, gold))


def outcomes(parser: "Parser", gold: Sequence[Tree], k: int = TREES) -> tuple[Outcomes, Outcomes]:
    """Of the phrases of the best tree that a parser finds for the words of each gold tree, and of its k best trees.

    A phrase is right if gold has its label over the same words, and a tree if it is the gold tree, with its tags.
    """
    if parser.calibration is not None:
        raise InputError("this parser has a calibration already: expected one without.")
    truths = [sentence([tree]) for tree in gold]
    spans, trees = list[tuple[float, bool]](), list[tuple[float, bool]]()
    for truth, parses in zip(
        truths, parser.k_best_sents([truth.words for truth in truths], k, progress=True, spans=True), strict=True
    ):
        brackets = set(truth.brackets)
        trees += [(parse.posterior, sentence([parse.tree]) == truth) for parse in parses]
        spans += [
            (span.posterior, (evalb_label(span.label), span.start, span.end) in brackets)
            for span in parses[0].spans or ()
        ]
    return Outcomes.of(spans), Outcomes.of(trees)


def _logit(posterior: float) -> float:
    posterior = min(posterior, SURE)
    return math.log(posterior) - math.log1p(-posterior)


def _scaling(about: Any) -> Scaling:
    found = Scaling(float(about["slope"]), float(about["offset"]))
    if not (0 < found.slope < math.inf and math.isfinite(found.offset)):
        raise ValueError
    return found
