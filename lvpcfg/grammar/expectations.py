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

    def add(into: Tensor, parent: Tensor, child: Tensor, sums: Tensor) -> None:
        """[rules, states of a, states of b], zeros behind those that there are."""
        x, y = (torch.arange(size, device=into.device) for size in sums.shape[1:])
        row = (grammar.first_state[parent].unsqueeze(1) + x).clamp_max(inner - 1)
        column = (grammar.first_state[child].unsqueeze(1) + y).clamp_max(states - 1)
        into.view(-1).index_add_(0, (row.unsqueeze(2) * states + column.unsqueeze(1)).flatten(), sums.flatten())

    rules = grammar.binary_rules
    for some, tensors in grammar.padded(rules, grammar.binary_starts, grammar.binary.detach()):
        a, b, c = rules[some].unbind(1)
        add(binary, a, b, tensors.double().sum(3))
        add(binary, a, c, tensors.double().sum(2))
    rules = grammar.unary_rules
    for some, tensors in grammar.padded(rules, grammar.unary_starts, grammar.unary.detach()):
        a, b = rules[some].unbind(1)
        add(unary, a, b, tensors.double())
    return binary, unary
