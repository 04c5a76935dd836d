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

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
    child: list[list[dict[int, Tensor]]] = [[{} for _ in rules.children] for rules in grammar.rules]  # by width
    prefix: list[list[dict[int, Tensor]]] = [[{} for _ in rules.children] for rules in grammar.rules]
    for r in range(len(grammar.rules)):
        prefix[r][0] = child[r][0]
    tops: list[Tensor] = []
    for width in range(1, n + 1):
        parts = [nothing.narrow(2, 0, n - width + 1)]
        if width == 1:
            parts = [torch.cat([nothing[..., words.shape[-1] :], words], -1)]
        for r, rules in enumerate(grammar.rules):
            for p in range(1, min(width, len(rules.children))):
                last = weights.rules.get(width) if p == len(rules.children) - 1 else None
                lanes = (rules.children[0].lanes if p == 1 else None, rules.children[p].lanes)
                if rules.every_pair and getattr(semiring, "products_fit", False):
                    prefix[r][p][width] = combine_every_pair(semiring, child[r][0], child[r][1], width)
                    continue
                prefix[r][p][width] = combine(
                    semiring, prefix[r][p - 1], child[r][p], width, lanes, last, rules.skeletal
                )
            if width >= len(rules.children):
                lifted = rules.lift(semiring, prefix[r][-1].pop(width))
                parts.append(torch.cat([lifted, parts[0][..., lifted.shape[-1] :]], -1))
        bottom = parts[-1] if len(parts) <= 2 else semiring.sum(torch.stack(parts[1:], -1))
        bottom = _weighted(semiring, bottom, weights.bottom, width)
        top = bottom if grammar.closure is None else grammar.closure(semiring, bottom)
        top = _weighted(semiring, top, weights.top, width)
        tops.append(top)
        for r, rules in enumerate(grammar.rules):
            for p, project in enumerate(rules.children):
                child[r][p][width] = top if project.lanes is not None else project(semiring, top)
    sentence = tops[-1][:, :, 0]  # [size, batch, states]: the span of all words
    if lengths is not None:
        prefixes = torch.stack(
            [top[:, :, 0] for top in tops], 2
        )  # [size, batch, width, states]: from the first word on
        sentence = prefixes[:, torch.arange(batch, device=words.device), lengths - 1]
    root = grammar.root if grammar.root.dim() == 3 else grammar.root.unsqueeze(1)
    return semiring.sum(semiring.mul(sentence, root)), tops


Cells = dict[int, Float[Tensor, "size batch _ _"]]  # by width, [size, batch, spans, lanes] or [.., states]
Lanes = Int[Tensor, "lanes"] | None  # the state of each lane; None where cells hold lanes already


def combine(
    semiring: Semiring,
    left: Cells,
    right: Cells,
    width: int,
    lanes: tuple[Lanes, Lanes] = (None, None),
    weights: Float[Tensor, "size batch spans splits skeletal_rules"] | None = None,
    skeletal: Int[Tensor, "lanes"] | None = None,
) -> Float[Tensor, "size batch spans lanes"]:
    """sum over k of left(i, i + k) * right(i + k, i + width), lane by lane.

    `left` and `right` hold lanes, or states, from which `lanes` selects. `weights` multiply each skeletal rule at each
    split, and `skeletal` is the skeletal rule of each lane.
    """
    splits = [k for k in left if width - k in right]
    _, batch, words, size = right[1].shape
    size = size if lanes[1] is None else len(lanes[1])
    return in_parts(
        lambda first, spans: semiring.sum(
            torch.stack(
                [
                    _product(
                        semiring,
                        _select(left[k].narrow(2, first, spans), lanes[0]),
                        _select(right[width - k].narrow(2, first + k, spans), lanes[1]),
                        None
                        if weights is None or skeletal is None
                        else _select(weights[:, :, first : first + spans, k - 1], skeletal),
                    )
                    for k in splits
                ],
                -1,
            )
        ),
        words - width + 1,
        semiring.size() ** 2 * batch * size * len(splits),
    )


def combine_every_pair(
    semiring: Semiring, left: Cells, right: Cells, width: int
) -> Float[Tensor, "size batch spans pairs"]:
    """The same where every pair of states is a lane, as products of matrices [states, splits] and [splits, states]."""
    spans, splits = right[1].shape[2] - width + 1, range(1, width)
    lefts = torch.stack([left[k].narrow(2, 0, spans) for k in splits], -1)
    rights = torch.stack([right[width - k].narrow(2, k, spans) for k in splits], -2)
    return semiring.matmul(lefts, rights).flatten(-2)


def _select(cells: Tensor, lanes: Lanes) -> Tensor:
    return cells if lanes is None else cells.index_select(-1, lanes)


def _product(semiring: Semiring, left: Tensor, right: Tensor, weights: Tensor | None) -> Tensor:
    product = semiring.mul(left, right)
    return product if weights is None else semiring.mul(product, weights)


def unary_closure(steps: Float[Tensor, "parents states"]) -> Float[Tensor, "states states"]:
    """(I - R)^-1, [top, bottom]: any number of unary rules, or none. `steps` is R; parents are the first states."""
    identity = torch.eye(steps.shape[-1], dtype=steps.dtype, device=steps.device)
    return torch.linalg.inv(identity - torch.cat([steps, torch.zeros_like(identity)[len(steps) :]]))


def _weighted(semiring: Semiring, cells: Tensor, weights: Tensor | None, width: int) -> Tensor:
    return cells if weights is None else semiring.mul(cells, weights.diagonal(width - 1, 2, 3).movedim(-1, 2))


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
