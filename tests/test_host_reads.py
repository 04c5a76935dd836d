"""How often the host waits for numbers while a batch goes from words to decoded edges.

A read is a number, a list or an array of numbers asked for by Python, a copy to the CPU, or an operation whose result
has a size that depends on the numbers: CUDA waits for all of them. The way taken is that of CUDA, on the CPU.
"""

from collections import Counter

import pytest
import torch
from cases import make
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine, Fine
from lvpcfg.chart.decode.decode import chosen_trees, trees_of
from lvpcfg.chart.forest import arrays
from lvpcfg.chart.forest.pruning import pruned
from lvpcfg.decompose.coarse import covered
from lvpcfg.grammar.coarse import projected_coarse
from lvpcfg.options import PRODUCT
from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.fast import log_partition as chain_log_partition

# Operators whose result has a size that depends on numbers, and those that hand numbers to Python.
OPERATORS = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
    "is_nonzero",
}
ASKED_BY_PYTHON = {"tolist", "numpy", "cpu", "__array__"}  # which the CPU answers without an operator


class HostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        with_a_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        of_unknown_size = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in OPERATORS or with_a_mask or of_unknown_size:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class AskedByPython(TorchFunctionMode):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ASKED_BY_PYTHON:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def host_reads(function):
    reads = HostReads()
    with reads, AskedByPython(reads.counts):
        function()
    return reads.counts


def test_what_is_counted():
    x = torch.tensor([3, 1, 1])
    for function in (
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x.cpu(),
        lambda: int(x[0]),
        lambda: bool((x > 1).any()),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.unique(),
        lambda: x.unique_consecutive(),
        lambda: torch.bincount(x),
        lambda: torch.repeat_interleave(x),
    ):
        assert host_reads(function).total() == 1
    for function in (lambda: torch.repeat_interleave(x, output_size=5), lambda: x[torch.tensor([0])], lambda: x.sum()):
        assert host_reads(function).total() == 0


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(arrays, "on_host", lambda tensor: False)


@pytest.fixture(scope="module")
def grammar():
    return make("rule tensors, unary").grammar.to(dtype=torch.float32)


class Batch:
    """Random words that any symbol can have."""

    def __init__(self, grammar, sentences, length, threshold=1e-4):
        generator = torch.Generator().manual_seed(sentences + length)
        coarse = covered(projected_coarse(grammar)).to(dtype=torch.float32)
        self.parser = CoarseToFine([grammar], coarse, PRODUCT)
        inner = len(grammar.symbols.interminals)
        self.first = torch.arange(sentences) * length
        self.lengths = torch.full((sentences,), length)
        self.coarse_words = torch.rand(sentences * length, len(grammar.symbols) - inner, generator=generator) ** 3
        self.words = torch.rand(sentences * length, int(grammar.states[inner:].sum()), generator=generator)
        self.threshold = threshold

    def forest(self):
        return self.parser.pruning.coarse.forest(self.coarse_words, self.lengths, self.threshold)

    def fine(self, forest, nodes):
        rules, leaves = self.parser.rules[0], forest.leaves
        word = self.first[nodes.sentence[leaves]] + nodes.start[leaves]
        return Fine(forest, rules, rules.leaf(self.words, word, nodes.symbol[leaves]))


def reads_by_step(grammar, *size):
    """Of pruning, of pruning again, of plans, of posteriors, of Viterbi, of decoding, and the number of edges."""
    batch, reads = Batch(grammar, *size), {}
    reads["coarse"] = host_reads(batch.forest)
    forest, nodes = batch.forest()
    with torch.inference_mode():
        keep = torch.arange(len(forest.rule)) % 5 > 0
        reads["prune"] = host_reads(lambda: pruned(forest, nodes, keep))
        reads["plan"] = host_reads(lambda: batch.fine(forest, nodes))
        fine = batch.fine(forest, nodes)
        reads["posteriors"] = host_reads(fine.posteriors)
        reads["viterbi"] = host_reads(fine.best_derivations)
        known, (chosen, log_z) = fine.posteriors(), fine.best_derivations()
        decode = batch.parser.decoder.trees
        reads["decode"] = host_reads(lambda: decode(forest, nodes, [known], batch.lengths))
        reads["trees of viterbi"] = host_reads(
            lambda: trees_of(forest, nodes, chosen_trees(forest, chosen, log_z), batch.lengths)
        )
        assert all(decode(forest, nodes, [known], batch.lengths))
        assert bool(fine.posteriors().log_z.isfinite().all())
    return {name: counts.total() for name, counts in reads.items()}, len(forest.rule)


def test_they_do_not_grow_with_the_batch(grammar, as_on_cuda):
    few, edges_of_few = reads_by_step(grammar, 4, 10)
    for size in ((64, 10), (4, 30)):
        many, edges_of_many = reads_by_step(grammar, *size)
        assert many == few
        assert edges_of_many > 5 * edges_of_few
    assert few["coarse"] < 30
    assert few["plan"] < 20
    assert few["posteriors"] < 4
    assert few["viterbi"] < 4
    assert few["decode"] < 8
    assert few["trees of viterbi"] < 6


@pytest.mark.parametrize("threshold", [0.0, 1e-3])
def test_both_ways_find_the_same(grammar, monkeypatch, threshold):
    batch = Batch(grammar, 6, 9, threshold)
    found = []
    for on_host in (True, False):
        monkeypatch.setattr(arrays, "on_host", lambda tensor, on_host=on_host: on_host)
        forest, nodes = batch.forest()
        with torch.inference_mode():
            fine = batch.fine(forest, nodes)
            known, (best, log_z) = fine.posteriors(), fine.best_derivations()
            trees = batch.parser.decoder.trees(forest, nodes, [known], batch.lengths)
        node = torch.stack([*vars(nodes).values()], 1).tolist()
        node += [["top", number] for number in range(len(batch.lengths))] + [["zero"], ["one"]]

        def named(edge, node=node, forest=forest):
            ends = (int(column[edge]) for column in (forest.parent, forest.left, forest.right))
            return int(forest.rule[edge]), *(tuple(node[end]) for end in ends)

        posterior = {named(edge): float(known.edges[edge]) for edge in range(len(forest.rule))}
        derivation = {named(edge) for edge in best[best >= 0].tolist()}
        found.append((posterior, derivation, trees, log_z))
    (one, best, tree, log_z), (two, *others, log_z_too) = found
    assert one.keys() == two.keys()
    assert [one[edge] for edge in one] == pytest.approx([two[edge] for edge in one], rel=1e-4, abs=1e-7)
    assert [best, tree] == others
    torch.testing.assert_close(log_z, log_z_too)


@pytest.mark.parametrize("lengths", [None, [20, 3, 7]])
def test_chains(lengths):
    """The host waits for lengths, and for whether numbers are finite: log Z, backward scores, and derivatives."""
    chain = Chain(torch.rand(4), (torch.rand(4, 2), torch.rand(2, 4)), torch.rand(4))
    words, lengths = torch.rand(3, 20, 4, requires_grad=True), None if lengths is None else torch.tensor(lengths)
    reads = host_reads(lambda: chain_log_partition(chain, words, lengths).sum().backward())
    assert reads == {"_local_scalar_dense": 3} | ({} if lengths is None else {"cpu": 1, "numpy": 1})
