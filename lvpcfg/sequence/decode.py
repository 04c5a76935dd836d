"""Tags of words, from the posteriors of a chain's states.

    recall     the tag with the largest posterior, word by word: most right tags to expect
    max-rule   the sequence with the largest product of posteriors of steps (Petrov & Klein 2007):
               p(a_1 | words)  prod_t p(a_t -> a_{t+1} emits w_{t+1} | words)

A sentence of which the chain makes no sequence of tags gets, word by word, the tags that go best with its words.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lvpcfg.chart.semirings import safe_log
from lvpcfg.options import RECALL
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.fast import Backward, Forward, posteriors

STEPS = 1 << 10  # of which the posteriors of tag pairs are computed at once


def best_tags(
    chain: Chain, words: Float[Tensor, "batch n states"], lengths: Int[Tensor, "batch"], tags: int, decoder: str
) -> tuple[Int[Tensor, "batch n"], Bool[Tensor, "batch"]]:
    """The tags of each word, and which sentences the chain has no sequence for."""
    log_z, found = posteriors(chain, words, lengths)
    impossible = ~log_z.isfinite()
    best = _of_tags(found, tags).argmax(-1)
    if decoder != RECALL:
        best = _max_rule(chain, words, lengths, tags)
    if bool(impossible.any()):
        best = torch.where(impossible.unsqueeze(1), _of_tags(words, tags).argmax(-1), best)
    return best, impossible


def _of_tags(values: Float[Tensor, "*places states"], tags: int) -> Float[Tensor, "*places tags"]:
    return values.unflatten(-1, (tags, -1)).sum(-1)


def _max_rule(
    chain: Chain, words: Float[Tensor, "batch n states"], lengths: Int[Tensor, "batch"], tags: int
) -> Int[Tensor, "batch n"]:
    """By Viterbi over tags, with the words in the order of `Places`; in float64, which scaled sums do not leave."""
    forward = Forward(chain.to(torch.float64), words.transpose(0, 1).double(), lengths)
    places, after = forward.places, Backward(forward, torch.ones_like(forward.total)).after
    first = places.first[1]
    steps = safe_log(_pairs(chain, forward.alpha[places.before], after[first:], tags))
    score = safe_log(_of_tags(after[:first] * chain.initial, tags))
    best, came_from = score, list[Tensor]()
    at_end = torch.empty_like(score)
    for step, active in enumerate(places.active):
        if step:
            rows = places.rows(step)
            best, origin = (best[:active].unsqueeze(2) + steps[rows.start - first : rows.stop - first]).max(1)
            came_from.append(origin)
        at_end[:active] = best
    tag = at_end.argmax(1)  # of the last word of each sentence, the longest first
    found = torch.zeros(len(lengths), words.shape[1], dtype=torch.int64, device=words.device)
    for step in reversed(range(len(places.active))):
        active = places.active[step]
        found[:active, step] = tag[:active]
        if step:
            tag = torch.cat([came_from[step - 1].gather(1, tag[:active].unsqueeze(1)).squeeze(1), tag[active:]])
    return torch.empty_like(found).index_copy_(0, places.order, found)


def _pairs(
    chain: Chain, alpha: Float[Tensor, "steps states"], after: Float[Tensor, "steps states"], tags: int
) -> Float[Tensor, "steps tags tags"]:
    """Posteriors of the tags at either end of a step, up to a factor for each step."""
    transition = chain.transition.double().unflatten(0, (tags, -1))  # [tags, m, states]
    found = []
    for x, y in zip(alpha.split(STEPS), after.split(STEPS), strict=True):
        reached = torch.bmm(x.unflatten(1, (tags, -1)).transpose(0, 1), transition)  # [tags, steps, states]
        found.append(_of_tags(reached * y, tags).transpose(0, 1))
    pairs = torch.cat(found) if found else alpha.new_zeros(0, tags, tags)
    return pairs / pairs.sum((1, 2), keepdim=True)
