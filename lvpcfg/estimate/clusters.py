"""States of nodes by k-means, and the counts of a treebank whose nodes have states."""

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from lvpcfg.estimate.cluster import ClusterOptions
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.latent import Counts
from lvpcfg.estimate.projections import Projections
from lvpcfg.estimate.states import Refinement
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import starts_of

ROUNDS = 30  # of a trial of k-means, at the most
TRIALS = 5


def clustered(options: ClusterOptions, task: Task, seed: int) -> Refinement:
    """The treebank with the states of clusters."""
    generator = torch.Generator().manual_seed(seed)
    projections = Projections.of(options, task, seed, options.dropout)
    nodes, symbol = projections.nodes, task.treebank.symbol
    scale = projections.singular.values[:, : nodes.outside.shape[1] - 1]
    vectors = torch.cat([nodes.inside[:, 1:], nodes.outside[:, 1:] * scale[symbol]], 1)  # U^T phi, V^T psi
    if options.noise:
        vectors *= 1 + options.noise * torch.randn(vectors.shape, generator=generator, dtype=vectors.dtype)
    state, states = torch.zeros_like(symbol), torch.ones_like(projections.most)
    for number in (nodes.states > 1).nonzero().flatten().tolist():
        some = (symbol == number).nonzero().squeeze(1)
        state[some] = found = k_means(vectors[some], int(projections.most[number]), generator)
        states[number] = int(found.max()) + 1
    return counted(task, options.rare, state, states)


def k_means(points: Float64[Tensor, "n d"], k: int, generator: torch.Generator) -> Int64[Tensor, "n"]:
    """The cluster of each point, in the best of some trials; empty clusters go."""
    trials = (_one_trial(points, k, generator) for _ in range(TRIALS))
    _, cluster = min(trials, key=lambda trial: trial[0])
    return torch.unique(cluster, return_inverse=True)[1]


def _one_trial(points: Float64[Tensor, "n d"], k: int, generator: torch.Generator) -> tuple[float, Int64[Tensor, "n"]]:
    """The sum of squared distances to the centres, and the cluster of each point. Centres begin far apart (Arthur &
    Vassilvitskii 2007)."""
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    nearest = _squares(points, centres).squeeze(1)
    while len(centres) < k and bool((nearest > 0).any()):
        # As torch.multinomial, which takes no more than 2^24 points.
        drawn = torch.rand(1, generator=generator, dtype=nearest.dtype) * nearest.sum()
        new = points[torch.searchsorted(nearest.cumsum(0), drawn).clamp_max(len(points) - 1)]
        centres, nearest = torch.cat([centres, new]), torch.minimum(nearest, _squares(points, new).squeeze(1))
    squares, cluster = _squares(points, centres).min(1)
    for _ in range(ROUNDS):
        sizes = torch.bincount(cluster, minlength=len(centres)).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add(0, cluster, points)
        before, centres = cluster, torch.where(sizes > 0, sums / sizes.clamp_min(1), centres)
        squares, cluster = _squares(points, centres).min(1)
        if torch.equal(before, cluster):
            break
    return float(squares.sum()), cluster


def _squares(points: Float64[Tensor, "n d"], centres: Float64[Tensor, "k d"]) -> Float64[Tensor, "n k"]:
    """Squared distances."""
    products = points @ centres.T
    return (points.square().sum(1, keepdim=True) - 2 * products + centres.square().sum(1)).clamp_min(0)


def counted(task: Task, rare: int, state: Int64[Tensor, "nodes"], states: Int64[Tensor, "symbols"]) -> Refinement:
    """The counts of a treebank of which each node has a state of its symbol; `states` are the numbers of states."""
    bank, observed = task.treebank, task.observed

    def tensors(some: Bool[Tensor, "nodes"], rules: Tensor, *children: Tensor) -> Float64[Tensor, "numbers"]:
        """How often each rule occurs with each states of its symbols, end to end."""
        nodes = some.nonzero().squeeze(1)
        rule = bank.rule[nodes]
        place = state[nodes]
        for mode, child in enumerate(children, 1):
            place = place * states[rules[rule, mode]] + state[child[nodes]]
        starts = starts_of(states[rules].prod(1))
        return torch.bincount(starts[rule] + place, minlength=int(starts[-1])).double()

    values = tensors(bank.is_binary, bank.binary_rules, bank.left, bank.right)
    binary = RuleTensors(tuple(states.tolist()), len(bank.symbols.interminals), bank.binary_rules, values)
    first, roots = starts_of(states), bank.roots[:-1]
    root = torch.bincount(first[bank.symbol[roots]] + state[roots], minlength=int(first[-1])).double()
    latent = observed.latent.with_rare(rare).over(binary)
    of_words = state[latent.here.nodes[latent.treebank.is_lexical]]
    lexical = latent.count_words(torch.nn.functional.one_hot(of_words, int(states.max())).double().to(latent.device))
    counts = Counts(root, binary, tensors(bank.is_unary, bank.unary_rules, bank.left), lexical)
    return Refinement(latent, counts, torch.zeros(0, len(root), dtype=torch.int64))
