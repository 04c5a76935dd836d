"""Posteriors of the states of words and of steps between words, for batches; their scores are those of `fast.py`.

p(state i at t, state j at t + 1) = alpha_t(i) T_ij words_{t+1}(j) beta_{t+1}(j)
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lvpcfg.chart.fast.partition import Problem, Solution, solve_outside
from lvpcfg.chart.semirings import Log, log_shares, safe_log
from lvpcfg.sequence import chain as textbook
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.fast import Backward, ChainProblem


@torch.no_grad()
def marginals(
    chain: Chain, words: Float[Tensor, "batch n states"], lengths: Int[Tensor, "batch"] | None = None
) -> tuple[Float64[Tensor, "batch"], Float[Tensor, "batch n states"]]:
    """log Z, and the posteriors of the states of words: 0 beyond the end of a sentence and in impossible ones."""
    log_z, states, _ = _posteriors(chain, words, lengths, None)
    return log_z, states


@torch.no_grad()
def step_marginals(
    chain: Chain,
    words: Float[Tensor, "batch n states"],
    label: Int[Tensor, "states"],
    labels: int,
    lengths: Int[Tensor, "batch"] | None = None,
) -> tuple[Float64[Tensor, "batch"], Float[Tensor, "batch n states"], Float[Tensor, "batch steps {labels} {labels}"]]:
    """The same, and the posteriors of the labels of a word and the next one, summed over the states of both.

    `label` is that of each state; there are `labels` of them.
    """
    member = torch.nn.functional.one_hot(label, labels).to(words.dtype)
    log_z, states, steps = _posteriors(chain, words, lengths, member)
    assert steps is not None
    return log_z, states, steps


def _posteriors(
    chain: Chain, words: Tensor, lengths: Tensor | None, member: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    problem = ChainProblem(chain, words.transpose(0, 1), lengths)
    (batch, n), labels = words.shape[:2], 0 if member is None else member.shape[1]
    log_z = words.new_empty(batch, dtype=torch.float64)
    states, steps = torch.zeros_like(problem.leaf), words.new_zeros(n - 1, batch, labels, labels)
    for solution in solve_outside(problem, torch.ones_like(log_z)):
        assert solution.outside is not None
        log_z.index_copy_(0, solution.sentences, solution.chart.log_z)
        part = problem.part(solution.sentences)
        found = (solution.outside.leaf * part.leaf).nan_to_num_(0, 0, 0)
        states.index_copy_(1, solution.sentences, found.to(states.dtype))
        if member is not None:
            steps.index_copy_(1, solution.sentences, _steps(part, solution, found, member).to(steps.dtype))
    return log_z, states.transpose(0, 1), None if member is None else steps.transpose(0, 1)


def _steps(
    part: Problem, solution: Solution, states: Tensor, member: Tensor
) -> Float[Tensor, "steps batch labels labels"]:
    backward, member = solution.outside, member.to(states.dtype)
    if not isinstance(backward, Backward):
        return _steps_in_logarithms(part, states, member)
    forward, places = backward.forward, backward.forward.places
    factors, first = forward.chain.factors, places.first[1]
    alpha, after = forward.alpha.index_select(0, places.before), backward.after[first:]
    rows = []
    for own in _states(member):
        x = alpha.index_select(1, own) @ factors[0].index_select(0, own)
        for factor in factors[1:]:
            x = x @ factor
        rows.append((x * after) @ member)
    n, batch = states.shape[:2]
    found, labels = torch.stack(rows, 1), member.shape[1]
    steps = found.new_zeros(batch * (n - 1), labels, labels)
    row = places.words[first:] - places.sentence[first:] - 1  # of the word before; the last of a sentence has none
    return steps.index_copy_(0, row, found).view(batch, n - 1, labels, labels).transpose(0, 1)


def _steps_in_logarithms(part: Problem, states: Tensor, member: Tensor) -> Tensor:
    """p(i, j) = p(i | j, the words before) p(j), a word at a time."""
    chain: Any = part.form
    logs = chain.to(torch.float64).change(safe_log)
    alpha = textbook.forward(Log, logs, safe_log(part.leaf.transpose(0, 1).double()))[0]
    transition, steps = safe_log(chain.transition.double()), []
    for word, state in enumerate(states[1:]):
        terms = alpha[:, word].unsqueeze(1) + transition.mT  # [batch, j, i]
        share = torch.where(terms > -torch.inf, log_shares(terms)[1].exp(), 0)
        steps.append(torch.einsum("bji,bj,il,jm->blm", share, state, member, member))
    return torch.stack(steps)


def _states(member: Tensor) -> Iterator[Tensor]:
    """Those of each label."""
    return (column.nonzero().squeeze(1) for column in member.unbind(1))
