"""Viterbi: the best derivation of each sentence, by a textbook chart in the max semiring."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.fast.as_textbook import as_textbook
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.marks import MarkedChart
from lvpcfg.chart.semirings import Max, require_nonnegative, safe_log


def best_derivations(
    form: FastForm, leaf: Float[Tensor, "length batch word_states"], lengths: Int[Tensor, "batch"] | None = None
) -> tuple[list[Skeleton | None], Float[Tensor, "batch"]]:
    """The best derivations, their nodes labelled with states, and their log-probabilities.

    `leaf` and the form are in ordinary numbers. A sentence without derivations has None and -inf.
    """
    require_nonnegative((*form.tensors, leaf), "Viterbi")
    with torch.no_grad():
        grammar, words = as_textbook(form, by_rule=False).change(safe_log), safe_log(leaf.transpose(0, 1))
    chart = MarkedChart(Max, grammar, words, lengths, form.terms_of_derivations)
    return chart.derivations(last=True), chart.values[0]
