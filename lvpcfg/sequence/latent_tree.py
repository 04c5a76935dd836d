"""Latent trees: a given tree of discrete variables, any of which may be hidden (Parikh, Song & Xing 2011).

    below_h(i)  = seen_h(i) * product over the children c of h of  sum over j of p(c = j | h = i) below_c(j)
    p(seen)     = sum over i of p(root = i) below_root(i)

This is the textbook chain with branches: the same maps in the same semirings, hidden states summed out from the leaves
up, posteriors by autograd. p(c | h) is a table, or in low rank sum over r of p(r | h) p(c | r), with one more hidden
variable r between the two.
"""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from lvpcfg.chart.lanes import Map
from lvpcfg.chart.semirings import Log, Max, Semiring, ones, safe_log
from lvpcfg.decompose.als import als
from lvpcfg.errors import InputError, listed
from lvpcfg.sequence.hmm import conditional, expect_counts


class LatentTree(nn.Module):
    """A tree of variables; each parameter is a table of logits, whose rows are distributions.

    `parents` are those of the variables, which come after them; the first variable is the root, its parent is -1.
    `states` are their numbers of values. Observations are [batch, variables], -1 where a variable is hidden.
    """

    def __init__(
        self,
        parents: Sequence[int] | Int[Tensor, "variables"],
        states: Sequence[int],
        rank: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """At random. `rank` is that of all tables between two variables, None if they are dense."""
        super().__init__()
        parents = listed("parents", parents, "the number of the parent of each variable")
        states = listed("states", states, "the number of values of each variable")
        expect_counts(rank=rank)
        before = [type(p) is int and -1 <= p < c and (p < 0) == (c == 0) for c, p in enumerate(parents)]
        if not parents or not all(before):
            raise InputError(f"parents are {parents}: expected -1, then a variable that stands before.")
        if len(states) != len(parents) or any(type(count) is not int or count < 1 for count in states):
            raise InputError(f"states are {states}: expected 1 or more for each of {len(parents)}.")
        self.parents, self.states = parents, states

        def tables(*sizes: int) -> nn.ParameterList:
            shapes = itertools.pairwise(sizes)
            return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)

        self.root = nn.Parameter(torch.randn(states[0], generator=generator))
        between = [] if rank is None else [rank]
        self.edges = nn.ModuleList(
            tables(states[parent], *between, states[child]) for child, parent in enumerate(parents) if child
        )

    def below(self, node: int) -> list[int]:
        """The children of a variable."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def tables(self) -> list[list[Tensor]]:
        """The distribution of the root, then for each other variable the factors of p(variable | parent)."""
        return [[self.root.softmax(-1)], *([table.softmax(-1) for table in edge.parameters()] for edge in self.edges)]

    def log_prob(self, observations: Int[Tensor, "batch variables"]) -> Float64[Tensor, "batch"]:
        """log p of what is seen; differentiable."""
        return self._log_prob(self.tables(), observations)

    def marginals(self, observations: Int[Tensor, "batch variables"]) -> list[Float64[Tensor, "batch _"]]:
        """The posterior of each variable."""
        return self._derivatives(Log, observations)

    def argmax(self, observations: Int[Tensor, "batch variables"]) -> Int[Tensor, "batch variables"]:
        """The best values of all variables together."""
        return torch.stack([marks.argmax(-1) for marks in self._derivatives(Max, observations)], 1)

    def em(self, observations: Int[Tensor, "batch variables"], iterations: int = 50) -> list[float]:
        """Expected counts are a parameter times its derivative. The log-likelihood before each iteration."""
        tables, likelihoods = self.tables(), []
        for _ in range(iterations):
            tables = [[table.detach().requires_grad_() for table in edge] for edge in tables]
            log_p = self._log_prob(tables, observations).sum()
            log_p.backward()
            likelihoods.append(float(log_p.detach()))
            tables = [[conditional(table.detach(), table.grad) for table in edge] for edge in tables]
        with torch.no_grad():
            for parameter, table in zip(self.parameters(), (table for edge in tables for table in edge), strict=True):
                parameter.copy_(table.log())
        return likelihoods

    @torch.no_grad()
    def sample(self, number: int, generator: torch.Generator | None = None) -> Int[Tensor, "{number} variables"]:
        """Values of all variables, drawn at random."""
        drawn: list[Tensor] = []
        for parent, (first, *others) in zip(self.parents, self.tables(), strict=True):
            rows = first.expand(number, -1) if parent < 0 else first[drawn[parent]]
            for factor in others:
                rows = rows @ factor
            drawn.append(rows.multinomial(1, generator=generator).squeeze(1))
        return torch.stack(drawn, 1)

    def factors(self, node: int) -> list[Float[Tensor, "_ _"]]:
        """The tensor of the parent and the children of a hidden variable in CP form, whose rank is its number of
        states: p(children | parent) = sum over r of factors[0][r, parent] factors[1][r, child 1] ... For the root
        the parent has one state."""
        tables = [self._multiplied(edge) for edge in self.tables()]
        above = tables[node].unsqueeze(0) if node == 0 else tables[node]
        return [above.mT, *(tables[child] for child in self.below(node))]

    def with_rank(self, node: int, rank: int) -> "LatentTree":
        """The same tree, but with fewer states of a hidden variable: the CP form of that rank of the tensor of its
        parent and its two children, non-negative, by alternating least squares."""
        children = self.below(node)
        if len(children) != 2:
            raise InputError(f"variable {node} has {len(children)} children: expected two.")
        with torch.no_grad():
            tensor = torch.einsum("ri,rj,rk->ijk", *self.factors(node))
            fit = als(tensor.unsqueeze(0), rank, nonnegative=True, restarts=2).factors
            u, v, w = (factor[0].to(tensor) for factor in (fit.u, fit.v, fit.w))
            u = u * v.sum(1, keepdim=True) * w.sum(1, keepdim=True)
            states = [rank if variable == node else count for variable, count in enumerate(self.states)]
            tree = LatentTree(self.parents, states).to(self.root)
            changed = {node: u.mT[0] if node == 0 else u.mT, children[0]: v, children[1]: w}
            for variable, (parameter, table) in enumerate(zip(tree.parameters(), self.tables(), strict=True)):
                rows = changed.get(variable, self._multiplied(table))
                parameter.copy_((rows / rows.sum(-1, keepdim=True)).log())
        return tree

    @staticmethod
    def _multiplied(edge: Sequence[Tensor]) -> Tensor:
        product = edge[0]
        for factor in edge[1:]:
            product = product @ factor
        return product

    def _log_prob(self, tables: Sequence[Sequence[Tensor]], observations: Tensor) -> Tensor:
        return Log.unconvert(self._total(Log, tables, self._seen(Log, observations)))

    def _seen(self, semiring: Semiring, observations: Tensor) -> list[Tensor]:
        """One at the value of each variable, or at all values of one that is hidden: [size, batch, states]."""
        if observations.dim() != 2 or observations.shape[1] != len(self.parents) or not len(observations):
            raise InputError(
                f"observations of the shape {tuple(observations.shape)}: expected [batch, {len(self.parents)}]."
            )
        seen = []
        for variable, states in enumerate(self.states):
            value = observations[:, variable].unsqueeze(1)
            for found in (int(value.min()), int(value.max())):
                if not -1 <= found < states:
                    raise InputError(f"variable {variable} is {found}: expected a number below {states}, or -1.")
            here = (value < 0) | (value == torch.arange(states, device=value.device))
            seen.append(semiring.convert(torch.where(here, 0.0, -torch.inf).double()))
        return seen

    def _total(self, semiring: Semiring, tables: Sequence[Sequence[Tensor]], seen: Sequence[Tensor]) -> Tensor:
        logs = [[semiring.convert(safe_log(table.double())) for table in edge] for edge in tables]
        below = list(seen)
        for child in reversed(range(1, len(below))):
            x = below[child].unsqueeze(1)
            for factor in reversed(logs[child]):
                x = Map(factor)(semiring, x)
            below[self.parents[child]] = semiring.mul(below[self.parents[child]], x.squeeze(1))
        return semiring.sum(semiring.mul(logs[0][0].unsqueeze(1), below[0]))

    def _derivatives(self, semiring: Semiring, observations: Tensor) -> list[Tensor]:
        """Of log p, or of the weight of the best values, by weights of one."""
        tables = [[self._multiplied(edge).detach()] for edge in self.tables()]  # the best is over states, not ranks
        with torch.enable_grad():
            seen = self._seen(semiring, observations)
            weights = [ones(semiring, x, *x.shape[1:]).requires_grad_() for x in seen]
            weighted = [semiring.mul(x, weight) for x, weight in zip(seen, weights, strict=True)]
            total = semiring.unconvert(self._total(semiring, tables, weighted))
            found = torch.autograd.grad(torch.where(total > -torch.inf, total, 0).sum(), weights)
        return [derivative[0] for derivative in found]
