"""The textbook chart: inside scores of spans, width by width, in any semiring; outside scores by autograd.

    project   child p of a rule:     child_p(i, j) = V_p top(i, j)                        states -> lanes
    combine   over the split points: prefix_p(i, j) = sum over k of prefix_{p-1}(i, k) * child_p(k, j)
    lift      the last prefix:       bottom(i, j) = U prefix(i, j)                        lanes -> states
    close     unary rules:           top(i, j) = C bottom(i, j),   C = (I - R)^-1

    total = sum over states of root * top(0, length)

A lane is one thing that rules multiply: a pair of children's states for a tensor, a term for a CP form (Cohen, Satta &
Collins 2013, section 4). With two children this is the inside algorithm; with more, a lane is binarised from the left.
Posteriors are derivatives of the total by weights of one, which multiply spans or rules, and can be differentiated
again. In a max semiring they mark the best derivation, in a sampling semiring a random one.

Numbers are given as the semiring's `convert` takes them: logarithms, or ordinary numbers for `Signed`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lvpcfg.chart.derivations import Allowed
from lvpcfg.chart.lanes import Map, Rules, in_parts
from lvpcfg.chart.semirings import Log, Semiring, ones, zeros


@dataclass(frozen=True, eq=False)
class CFG:
    """A grammar over states. Its parameters are shared by a batch, or each sentence has its own ones (`*batch`)."""

    root: Float[Tensor, "*batch states"]
    rules: tuple[Rules, ...]
    closure: Map | None = None  # bottom -> top states of a span; None: there are no unary rules

    @property
    def tensors(self) -> list[Tensor]:
        unary = [] if self.closure is None or self.closure.values is None else [self.closure.values]
        return [self.root, *(tensor for rules in self.rules for tensor in rules.tensors), *unary]

    def change(self, function: Callable[[Tensor], Tensor]) -> "CFG":
        """The same grammar with other values: `grammar.change(safe_log)` for one of probabilities."""
        root, rules = function(self.root), tuple(rules.change(function) for rules in self.rules)
        return CFG(root, rules, None if self.closure is None else self.closure.change(function))


@dataclass(frozen=True, eq=False)
class Weights:
    """Values of the semiring that multiply the spans (i, j), first and last word, or the rules of a derivation."""

    top: Float[Tensor, "size batch i j states"] | None = None
    bottom: Float[Tensor, "size batch i j states"] | None = None
    # By width; a split is where the last child begins.
    rules: dict[int, Float[Tensor, "size batch _ _ skeletal_rules"]] = field(default_factory=dict)


def inside(
    semiring: Semiring,
    grammar: CFG,
    words: Float[Tensor, "*pair batch n word_states"],
    lengths: Int[Tensor, "batch"] | None = None,
    weights: Weights | None = None,
) -> tuple[Float[Tensor, "size batch"], list[Float[Tensor, "size batch _ states"]]]:
    """The total of each sentence, and by width the tops of the n - width + 1 spans.

    `words` holds the weight of each word under each of the states that words have: they are the last of all states.
    `lengths` is given where some sentences are shorter than n.
    """
    grammar, words, weights = grammar.change(semiring.convert), semiring.convert(words), weights or Weights()
    (batch, n), states = words.shape[1:3], grammar.root.shape[-1]
    nothing = zeros(semiring, words, batch, n, states)
    groups = [Lanes(semiring, rules) for rules in grammar.rules]
    tops: list[Tensor] = []
    for width in range(1, n + 1):
        parts = [lanes.lifted(width, weights.rules.get(width)) for lanes in groups if width >= lanes.children]
        parts = [torch.cat([part, nothing[:, :, : n - width + 1, part.shape[-1] :]], -1) for part in parts]
        if width == 1:
            parts = [torch.cat([nothing[..., words.shape[-1] :], words], -1)]
        bottom = semiring.sum(torch.stack(parts, -1)) if len(parts) > 1 else [*parts, nothing[:, :, : n - width + 1]][0]
        bottom = _weighted(semiring, bottom, weights.bottom, width)
        top = bottom if grammar.closure is None else grammar.closure(semiring, bottom)
        top = _weighted(semiring, top, weights.top, width)
        tops.append(top)
        for lanes in groups:
            lanes.project(width, top)
    sentences = torch.stack([top[:, :, 0] for top in tops], 2)  # [size, batch, width, states]: from the first word on
    if lengths is not None:
        sentences = sentences[:, torch.arange(batch, device=words.device), lengths - 1].unsqueeze(2)
    root = grammar.root if grammar.root.dim() == 3 else grammar.root.unsqueeze(1)
    return semiring.sum(semiring.mul(sentences[:, :, -1], root)), tops


class Lanes:
    """The lanes of one group of rules: projections of finished spans, and prefixes of rules, by width."""

    def __init__(self, semiring: Semiring, rules: Rules) -> None:
        self.semiring, self.rules, self.children = semiring, rules, len(rules.children)
        # Spans as child p, [size, batch, spans, lanes]; where lanes are choices of states, the states to choose from.
        self.child: list[dict[int, Tensor]] = [{} for _ in rules.children]
        self.prefix: list[dict[int, Tensor]] = [self.child[0], *({} for _ in rules.children[1:])]

    def project(self, width: int, top: Tensor) -> None:
        """Keeps finished spans, and what they are worth as the last of some of the children but not of all."""
        for p, project in enumerate(self.rules.children):
            self.child[p][width] = top if project.lanes is not None else project(self.semiring, top)
        for p in range(1, min(width, self.children - 1)):
            self.prefix[p][width] = self.combine(p, width)

    def lifted(self, width: int, weights: Tensor | None) -> Tensor:
        """What the rules bring to the bottoms of spans, [size, batch, spans, states of parents]."""
        return self.rules.lift(self.semiring, self.combine(self.children - 1, width, weights))

    def combine(self, p: int, width: int, weights: Tensor | None = None) -> Tensor:
        """sum over k of prefix_{p-1}(i, i + k) * child_p(i + k, i + width), lane by lane, [size, batch, spans, lanes].

        `weights` are [size, batch, spans, width - 1, skeletal rules].
        """
        splits = [k for k in self.prefix[p - 1] if width - k in self.child[p]]
        _, batch, words, lanes = self.child[p][1].shape
        which = self.rules.children[p].lanes
        each = self.semiring.size() ** 2 * batch * (lanes if which is None else len(which)) * len(splits)
        return in_parts(partial(self._sums, p, width, splits, weights), words - width + 1, each)

    def _sums(self, p: int, width: int, splits: list[int], weights: Tensor | None, first: int, spans: int) -> Tensor:
        """The same for some of the spans."""
        semiring, rules, left, right = self.semiring, self.rules, self.prefix[p - 1], self.child[p]
        lefts = torch.stack([left[k].narrow(2, first, spans) for k in splits], -1)
        rights = torch.stack([right[width - k].narrow(2, first + k, spans) for k in splits], -1)
        if rules.every_pair and getattr(semiring, "products_fit", False):
            return semiring.matmul(lefts, rights.mT).flatten(-2)
        of_left, of_right = rules.children[0].lanes if p == 1 else None, rules.children[p].lanes
        lefts = lefts if of_left is None else lefts.index_select(-2, of_left)
        rights = rights if of_right is None else rights.index_select(-2, of_right)
        products = semiring.mul(lefts, rights)
        if weights is not None and rules.skeletal is not None:
            of_splits = weights[:, :, first : first + spans, splits[0] - 1 : splits[-1]]
            products = semiring.mul(products, of_splits.index_select(-1, rules.skeletal).mT)
        return semiring.sum(products)


def unary_closure(steps: Float[Tensor, "parents states"]) -> Float[Tensor, "states states"]:
    """(I - R)^-1, [top, bottom]: any number of unary rules, or none. `steps` is R; parents are the first states."""
    identity = torch.eye(steps.shape[-1], dtype=steps.dtype, device=steps.device)
    return torch.linalg.inv(identity - torch.cat([steps, torch.zeros_like(identity)[len(steps) :]]))


def _weighted(semiring: Semiring, cells: Tensor, weights: Tensor | None, width: int) -> Tensor:
    return cells if weights is None else semiring.mul(cells, weights.diagonal(width - 1, 2, 3).movedim(-1, 2))


def only_allowed(semiring: Semiring, words: Float[Tensor, "batch n _"], allowed: Allowed) -> Weights:
    """One for the states of spans that are allowed, zero for all others."""
    return Weights(_by_span(semiring, words, allowed.top), _by_span(semiring, words, allowed.bottom))


def _by_span(semiring: Semiring, like: Tensor, layer: Tensor) -> Tensor:
    """[starts, batch, widths, states], true or false -> one or zero, [size, batch, i, j, states]."""
    i = torch.arange(len(layer), device=layer.device).unsqueeze(1)
    width = (torch.arange(len(layer), device=layer.device) - i).clamp_min(0)  # [i, j], less one
    there = layer.transpose(0, 1)[:, i, width]
    return torch.where(there, ones(semiring, like, *there.shape), zeros(semiring, like, *there.shape))


def log_partition(
    grammar: CFG,
    words: Float[Tensor, "*pair batch n word_states"],
    lengths: Int[Tensor, "batch"] | None = None,
    semiring: Semiring = Log,
) -> Float[Tensor, "batch"]:
    """log Z of each sentence, or what else the semiring computes: entropy, the weight of the best derivation."""
    return semiring.unconvert(inside(semiring, grammar, words, lengths)[0])


def marginals(
    grammar: CFG,
    words: Float[Tensor, "*pair batch n word_states"],
    lengths: Int[Tensor, "batch"] | None = None,
    semiring: Semiring = Log,
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch n n states"], Float[Tensor, "batch n n states"]]:
    """log Z, and the posteriors of the top and of the bottom states of the spans [i, j], first and last word.

    They are differentiable, and 0 for a sentence without derivations. In the semiring `Max` they are 1 on the best
    derivation and 0 elsewhere, and so on a random one in `Sampled`.
    """
    (batch, n), states = words.shape[-3:-1], grammar.root.shape[-1]
    top, bottom = (ones(semiring, words, batch, n, n, states).requires_grad_() for _ in range(2))
    if grammar.closure is None:  # the layers are one
        log_z, (posterior,) = _derivatives(semiring, grammar, words, lengths, Weights(top), [top])
        return log_z, posterior, posterior
    log_z, (of_top, of_bottom) = _derivatives(semiring, grammar, words, lengths, Weights(top, bottom), [top, bottom])
    return log_z, of_top, of_bottom


def rule_posteriors(
    grammar: CFG,
    words: Float[Tensor, "*pair batch n word_states"],
    width: int,
    number: int,
    lengths: Int[Tensor, "batch"] | None = None,
    semiring: Semiring = Log,
) -> Float[Tensor, "batch starts splits {number}"]:
    """Posteriors of the skeletal rules, of which there are `number`, over the spans of one width.

    At split k there are k + 1 words to the left of the last child.
    """
    batch, n = words.shape[-3:-1]
    weights = ones(semiring, words, batch, n - width + 1, width - 1, number).requires_grad_()
    return _derivatives(semiring, grammar, words, lengths, Weights(rules={width: weights}), [weights])[1][0]


def _derivatives(
    semiring: Semiring, grammar: CFG, words: Tensor, lengths: Tensor | None, weights: Weights, by: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """log Z and its derivatives by weights of one, which are posteriors; differentiable where gradients are wanted."""
    again = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (words, *grammar.tensors))
    with torch.enable_grad():
        log_z = semiring.unconvert(inside(semiring, grammar, words, lengths, weights)[0])
        total = torch.where(log_z > -torch.inf, log_z, 0).sum()
        found = torch.autograd.grad(total, by, create_graph=again)
    return (log_z if again else log_z.detach()), [each[0] for each in found]
