"""What a grammar is expected to produce: M_ab, the expected number of b's in one rewrite of a."""

import torch
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar


def expected_states(grammar: Grammar) -> Tensor:
    """[states]: how often each occurs in a tree, v = root + M^T v; all alike where that tells nothing."""
    inner = int(grammar.first_state[len(grammar.symbols.interminals)])
    m = rewrites(grammar)  # [interminal states, states]
    identity = torch.eye(inner, dtype=m.dtype, device=m.device)
    root = grammar.root.detach().to(m.dtype)
    phrases, info = torch.linalg.solve_ex(identity - m[:, :inner].T, root[:inner])
    tags = root[inner:] + m[:, inner:].T @ phrases
    expected = torch.cat([phrases, tags])
    if int(info) or not bool((expected.isfinite() & (expected >= 0)).all()) or not bool(tags.any()):
        expected = torch.ones_like(expected)
    return expected.to(grammar.root.dtype)


def rewrites(grammar: Grammar) -> Tensor:
    """M, [interminal states, states], float64."""
    inner, states = int(grammar.first_state[len(grammar.symbols.interminals)]), len(grammar.root)
    m = torch.zeros(inner, states, dtype=torch.float64, device=grammar.root.device)
    first = grammar.first_state.tolist()

    def span(symbol: int) -> slice:
        return slice(first[symbol], first[symbol + 1])

    for rule, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        t = grammar.binary_tensor(rule).detach().to(m.dtype)
        m[span(a), span(b)] += t.sum(2)
        m[span(a), span(c)] += t.sum(1)
    for rule, (a, b) in enumerate(grammar.unary_rules.tolist()):
        m[span(a), span(b)] += grammar.unary_tensor(rule).detach().to(m.dtype)
    return m
