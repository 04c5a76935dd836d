"""What a grammar is expected to produce: M_ab, the expected number of b's in one rewrite of a."""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from lvpcfg.grammar.grammar import Grammar


def expected_states(grammar: Grammar) -> Float[Tensor, "states"]:
    """How often each state occurs in a tree: v = root + M^T v.

    M is B + R, of binary and unary rules. Where R is closed, a span has one chain at the most: v = (I + R)^T (root +
    B^T v). Of a grammar that is not tight, or signed, v may be negative or infinite: then it is 1 for every state.
    """
    inner = grammar.interminal_states
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


def rewrites(
    grammar: Grammar,
) -> tuple[Float64[Tensor, "interminal_states states"], Float64[Tensor, "interminal_states states"]]:
    """B and R: how often each state is a child in one rewrite by a binary rule, and by a unary rule."""
    return grammar.binary.rewrites().detach(), grammar.unary_matrix().detach().double()


def spectral_radius(grammar: Grammar) -> float:
    """The spectral radius of M between interminal states: a normalised grammar is tight where it is below 1.

    Where unary rules are closed, a rewrite is a binary rule and then at most one chain above each child.
    """
    inner = grammar.interminal_states
    binary, unary = (matrix[:, :inner] for matrix in rewrites(grammar))
    m = binary + binary @ unary if grammar.closed else binary + unary
    return radius(m)


def radius(matrix: Float64[Tensor, "x x"]) -> float:
    """The spectral radius: the largest of those of its strongly connected components."""
    if not len(matrix):
        return 0.0
    component, _ = components(matrix != 0)
    largest = float(matrix.diagonal().abs().max())  # components of one
    for first, size in zip(*component.unique(return_counts=True), strict=True):
        if size > 1:
            some = (component == first).nonzero().squeeze(1)
            largest = max(largest, float(torch.linalg.eigvals(matrix[some][:, some]).abs().max()))
    return largest


def components(depends: Bool[Tensor, "x x"]) -> tuple[Int64[Tensor, "x"], Bool[Tensor, "x x"]]:
    """The first member of the strongly connected component of each unknown, and what each reaches, itself as well."""
    reach = depends | torch.eye(len(depends), dtype=torch.bool)
    while bool((more := reach.float() @ reach.float() > 0).ne(reach).any()):
        reach = more
    return (reach & reach.T).int().argmax(1), reach
