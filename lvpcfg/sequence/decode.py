"""Tags of words, from the posteriors of a chain's states.

    recall     the tag with the largest posterior, word by word: most right tags to expect
    max-rule   the sequence with the largest product of the posteriors of its steps (Petrov & Klein 2007):
               p(a_1 | words)  prod_t p(a_t, a_{t+1} | words)

A sentence of which the chain makes no sequence of tags gets, word by word, the tags that go best with its words.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lvpcfg.chart.semirings import safe_log
from lvpcfg.options import RECALL
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.marginals import marginals, step_marginals


def best_tags(
    chain: Chain, words: Float[Tensor, "batch n states"], lengths: Int[Tensor, "batch"], tags: int, decoder: str
) -> tuple[Int[Tensor, "batch n"], Bool[Tensor, "batch"]]:
    """The tags of each word, and which sentences the chain has no sequence for."""
    if decoder == RECALL:
        log_z, states = marginals(chain, words, lengths)
        best = _of_tags(states, tags).argmax(-1)
    else:
        label = torch.arange(tags, device=words.device).repeat_interleave(words.shape[2] // tags)
        log_z, states, steps = step_marginals(chain, words, label, tags, lengths)
        best = _max_rule(_of_tags(states, tags), steps, lengths.to(words.device))
    impossible = ~log_z.isfinite()
    if bool(impossible.any()):
        best = torch.where(impossible.unsqueeze(1), _of_tags(words, tags).argmax(-1), best)
    return best, impossible


def _of_tags(values: Float[Tensor, "batch n states"], tags: int) -> Float[Tensor, "batch n tags"]:
    return values.unflatten(-1, (tags, -1)).sum(-1)


def _max_rule(
    words: Float[Tensor, "batch n tags"], steps: Float[Tensor, "batch n-1 tags tags"], lengths: Int[Tensor, "batch"]
) -> Int[Tensor, "batch n"]:
    """By Viterbi over tags; beyond the end of a sentence its last tag stays."""
    score, stays = safe_log(words[:, 0]), torch.arange(words.shape[2], device=words.device)
    came_from = []
    for place, step in enumerate(safe_log(steps).unbind(1), start=1):
        best, origin = (score.unsqueeze(2) + step).max(1)
        goes_on = (place < lengths).unsqueeze(1)
        score = torch.where(goes_on, best, score)
        came_from.append(torch.where(goes_on, origin, stays))
    found = [score.argmax(1, keepdim=True)]
    for origin in reversed(came_from):
        found.append(origin.gather(1, found[-1]))
    return torch.cat(found[::-1], 1)
