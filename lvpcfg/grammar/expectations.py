"""What a grammar is expected to produce: M_ab, the expected number of b's in one rewrite of a."""

import torch
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar


def expected_states(grammar: Grammar) -> Tensor:
    """[states]: how often each occurs in a tree, v = root + M^T v; all alike where that tells nothing.

    M is B + R, of binary and unary rules. Where R is closed, a span has one chain at the most: v = (I + R)^T (root +
    B^T v).
    """
    inner = int(grammar.first_state[len(grammar.symbols.interminals)])
    binary, unary = rewrites(grammar)
    start, m = grammar.root.detach().to(binary.dtype), (binary + unary).T  # M^T: [states, interminal states]
    if grammar.closed:
        start, m = start + unary.T @ start[:inner], binary.T + unary.T @ binary[:, :inner].T
    identity = torch.eye(inner, dtype=m.dtype, device=m.device)
    phrases, info = torch.linalg.solve_ex(identity - m[:inner], start[:inner])
    tags = start[inner:] + m[inner:] @ phrases
    expected = torch.cat([phrases, tags])
    if int(info) or not bool((expected.isfinite() & (expected >= 0)).all()) or not bool(tags.any()):
        expected = torch.ones_like(expected)
    return expected.to(grammar.root.dtype)


def rewrites(grammar: Grammar) -> tuple[Tensor, Tensor]:
    """B and R, [interminal states, states], float64."""
    inner, states = int(grammar.first_state[len(grammar.symbols.interminals)]), len(grammar.root)
    binary, unary = torch.zeros(2, inner, states, dtype=torch.float64, device=grammar.root.device)
    first = grammar.first_state.tolist()

    def span(symbol: int) -> slice:
        return slice(first[symbol], first[symbol + 1])

    for rule, (a, b, c) in enumerate(grammar.binary_rules.tolist()):
        t = grammar.binary_tensor(rule).detach().to(binary.dtype)
        binary[span(a), span(b)] += t.sum(2)
        binary[span(a), span(c)] += t.sum(1)
    for rule, (a, b) in enumerate(grammar.unary_rules.tolist()):
        unary[span(a), span(b)] += grammar.unary_tensor(rule).detach().to(unary.dtype)
    return binary, unary
