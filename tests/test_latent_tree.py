"""Latent trees and low-rank factors: against enumeration."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lvpcfg import InputError
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.distribution import HMMDistribution
from lvpcfg.sequence.hmm import HMM, words_of
from lvpcfg.sequence.latent_tree import LatentTree
from lvpcfg.sequence.low_rank import nmf, svd

F64 = torch.float64
PARENTS, STATES = [-1, 0, 0, 1, 1, 2, 2], [2, 3, 2, 3, 2, 2, 3]  # the first three are hidden, the others leaves
RANKS = pytest.mark.parametrize("rank", [None, 2])


def random_tree(rank=None, seed=0, parents=PARENTS, states=STATES) -> LatentTree:
    return LatentTree(parents, states, rank, torch.Generator().manual_seed(seed)).to(F64)


def joint(tree: LatentTree) -> dict[tuple[int, ...], float]:
    """p of all values of all variables, as the definition reads."""
    tables = [edge[0] if len(edge) == 1 else edge[0] @ edge[1] for edge in tree.tables()]
    tables = [table.tolist() for table in tables]
    found = {}
    for values in itertools.product(*map(range, tree.states)):
        p = tables[0][values[0]]
        for child in range(1, len(values)):
            p *= tables[child][values[tree.parents[child]]][values[child]]
        found[values] = p
    return found


def fitting(values: tuple[int, ...], seen: list[int]) -> bool:
    return all(one in (-1, value) for value, one in zip(values, seen, strict=True))


OBSERVATIONS = torch.tensor([[-1, -1, -1, 2, 0, 1, 2], [-1, 0, -1, -1, 1, -1, 0], [1, -1, -1, -1, -1, -1, -1]])


class TestLatentTree:
    @RANKS
    def test_against_enumeration(self, rank):
        tree = random_tree(rank)
        p, log_p = joint(tree), tree.log_prob(OBSERVATIONS)
        posteriors, best = tree.marginals(OBSERVATIONS), tree.argmax(OBSERVATIONS)
        assert sum(p.values()) == pytest.approx(1)
        for row, seen in enumerate(OBSERVATIONS.tolist()):
            some = {values: weight for values, weight in p.items() if fitting(values, seen)}
            total = math.fsum(some.values())
            assert log_p[row].item() == pytest.approx(math.log(total))
            for variable, states in enumerate(STATES):
                expected = [math.fsum(w for v, w in some.items() if v[variable] == state) for state in range(states)]
                assert posteriors[variable][row].tolist() == pytest.approx([x / total for x in expected])
            assert some[tuple(best[row].tolist())] == pytest.approx(max(some.values()))

    @RANKS
    def test_derivatives(self, rank):
        tree = random_tree(rank, parents=[-1, 0, 0], states=[2, 2, 3])
        names = [*dict(tree.named_parameters())]

        def log_p(*parameters: Tensor) -> Tensor:
            given = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(tree, given, (torch.tensor([[-1, 0, 2]]),))

        tree.forward = tree.log_prob
        assert torch.autograd.gradcheck(log_p, [*tree.parameters()])

    @RANKS
    def test_em(self, rank):
        observations = random_tree(seed=3).sample(400, torch.Generator().manual_seed(0))
        observations[:, :3] = -1
        observations[::5, 4] = -1  # leaves may be missing
        tree = random_tree(rank, seed=1)
        found = tree.em(observations, 30)
        assert all(after > before - 1e-8 for before, after in itertools.pairwise(found))
        assert tree.log_prob(observations).sum().item() > found[0] + 50
        assert sum(joint(tree).values()) == pytest.approx(1)

    def test_one_iteration_of_em_counts(self):
        tree, observation = random_tree(parents=[-1, 0, 0], states=[2, 2, 3]), torch.tensor([[-1, 1, 0]])
        p = joint(tree)
        counts = torch.tensor([p[0, 1, 0], p[1, 1, 0]], dtype=F64)
        tree.em(observation, 1)
        tables = [edge[0] for edge in tree.tables()]
        torch.testing.assert_close(tables[0], counts / counts.sum())
        assert tables[1].flatten().tolist() == [0, 1, 0, 1]

    @RANKS
    def test_samples(self, rank):
        tree = random_tree(rank, parents=[-1, 0], states=[2, 3])
        drawn = tree.sample(20_000, torch.Generator().manual_seed(0))
        found = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=6).double() / 20_000
        torch.testing.assert_close(found, torch.tensor([*joint(tree).values()], dtype=F64), atol=0.02, rtol=0)

    def test_the_tensor_of_a_node_in_cp_form(self):
        tree = random_tree()
        root = torch.einsum("ra,ri,rj->ij", *tree.factors(0))
        pairs = torch.zeros(3, 2, dtype=F64)
        for values, weight in joint(tree).items():
            pairs[values[1], values[2]] += weight
        torch.testing.assert_close(root, pairs)
        above, *children = tree.factors(1)
        assert [tuple(x.shape) for x in (above, *children)] == [(3, 2), (3, 3), (3, 2)]
        tensor = torch.einsum("ri,rj,rk->ijk", above, *children)
        torch.testing.assert_close(tensor.sum((1, 2)), torch.ones(2, dtype=F64))

    @pytest.mark.parametrize("node", [0, 1])
    def test_fewer_states(self, node):
        """A variable some of whose states are alike needs fewer."""
        tree = random_tree(states=[4, 4, 2, 3, 3, 2, 3])
        with torch.no_grad():  # states 2 and 3 are as 0 and 1
            for child in tree.below(node):
                tree.edges[child - 1][0][2:] = tree.edges[child - 1][0][:2]
        fewer = tree.with_rank(node, 2)
        assert fewer.states[node] == 2
        observations = tree.sample(50, torch.Generator().manual_seed(0))
        observations[:, :3] = -1
        torch.testing.assert_close(fewer.log_prob(observations), tree.log_prob(observations), rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: LatentTree([-1, 1], [2, 2]), r"parents are \[-1, 1\]"),
            (lambda: LatentTree([0], [2]), r"parents are \[0\]"),
            (lambda: LatentTree([-1, 0], [2]), r"states are \[2\]"),
            (lambda: LatentTree(torch.tensor([-1, 1]), [2, 2]), r"parents are \[-1, 1\]"),
            (lambda: LatentTree([-1, 0], [2, 2], rank=0), "rank is 0: expected 1, 2"),
            (lambda: random_tree().log_prob(OBSERVATIONS[:0]), r"\(0, 7\): expected \[batch, 7\]"),
            (lambda: random_tree().log_prob(OBSERVATIONS - 7), "variable 0 is -"),
            (lambda: random_tree().log_prob(OBSERVATIONS[:, 1:]), r"\(3, 6\): expected \[batch, 7\]"),
            (lambda: random_tree().log_prob(OBSERVATIONS + 1), "variable 0 is 2: expected a number below 2"),
            (lambda: random_tree().with_rank(3, 1), "variable 3 has 0 children"),
        ],
    )
    def test_wrong_input_is_a_sentence(self, call, message):
        with pytest.raises(InputError, match=message):
            call()


def stochastic(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        (2 * torch.randn(shape, generator=generator, dtype=F64)).softmax(1) for shape in ((rows, rank), (rank, columns))
    )
    return left @ right


class TestLowRank:
    @pytest.mark.parametrize("size", [20, 600])  # exactly, and by random projections
    def test_svd_has_the_least_error(self, size):
        matrix = stochastic(size, size, 6) + 0.1 * stochastic(size, size, 15, 1) / size
        values = torch.linalg.svdvals(matrix)
        left, right = svd(matrix, 5)
        assert (left.shape, right.shape) == ((size, 5), (5, size))
        assert torch.linalg.norm(matrix - left @ right).item() == pytest.approx(values[5:].norm().item(), rel=1e-3)

    def test_nmf_finds_what_is_there(self):
        matrix = stochastic(20, 30, 3)
        errors = []
        for iterations in (0, 1, 10, 1000):
            left, right = nmf(matrix, 3, iterations)
            for factor in (left, right):
                assert bool((factor >= 0).all())
                torch.testing.assert_close(factor.sum(1), torch.ones_like(factor[:, 0]))
            errors.append((matrix * (matrix / (left @ right)).log()).sum().item())
        assert errors[0] > errors[1] > errors[2] > errors[3]
        assert errors[3] < 1e-2 * errors[0]

    @pytest.mark.parametrize("way", [svd, nmf])
    def test_forward_backward(self, way):
        """More rank, less error; at the rank of the matrices none by SVD, and little by NMF."""
        transition, emission = stochastic(12, 12, 4), stochastic(12, 9, 4, 1)
        exact = HMM.from_probabilities(torch.full((12,), 1 / 12, dtype=F64), [transition], [emission])
        _, observations = exact.sample(20, 8, torch.Generator().manual_seed(0))
        expected, errors = exact(observations).marginals, []
        for rank in (1, 2, 4):
            chain = Chain(torch.full((12,), 1 / 12, dtype=F64), way(transition, rank))
            words = words_of([*way(emission, rank)], observations)
            found = HMMDistribution(chain, words).marginals
            errors.append((found - expected).abs().sum(-1).mean().item())
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < (1e-9 if way is svd else 0.05)

    def test_wrong_input_is_a_sentence(self):
        with pytest.raises(InputError, match="rank 4 of a matrix of 3 x 5: expected 1 to 3"):
            svd(torch.ones(3, 5), 4)
        with pytest.raises(InputError, match="a row of zeros"):
            nmf(torch.zeros(3, 5), 2)
        with pytest.raises(InputError, match="negative"):
            nmf(-torch.ones(3, 5), 2)
