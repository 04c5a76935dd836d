"""How fast the inside routine is, beside torch-struct and beside plain matrix multiplication.

    python benchmarks/inside.py [--seconds 3] [--grammar FOLDER/wsj_0 --trees dev.mrg]

One thread, float32, log Z and all gradients; us and the peer in turns in one process, the fastest run of each.
Peak memory is that of a process of its own for each. "Share of peak" is the arithmetic of the algorithm (three
times that of the inside pass: the backward pass has two products for each) over the time, against the fastest
matrix multiplication measured in the same run. With --grammar, a Berkeley grammar as text parses the words of
--trees: sentences a second, stage by stage.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from nltk.tree import Tree
from rich.console import Console
from rich.table import Table
from torch_struct import SentCFG as PeerCFG

from lvpcfg import debinarise, evaluate, normalise, read_berkeley, read_trees
from lvpcfg.chart.decode.exhaustive import Exhaustive
from lvpcfg.chart.fast.build import cp_form, dense_form, tensor_form
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.fast.partition import Problem, log_partition, solve
from lvpcfg.options import PRODUCT
from lvpcfg.trees.walk import words


@dataclass(frozen=True)
class Setting:
    batch: int
    interminals: int
    preterminals: int
    length: int
    rank: int = 0  # 0: one dense tensor
    peer: bool = False

    def __str__(self) -> str:
        rank = f" r={self.rank}" if self.rank else ""
        return f"B={self.batch} NT={self.interminals} T={self.preterminals}{rank} n={self.length}"

    def flops(self) -> float:
        """Of the inside pass, two for a multiplication and an addition."""
        batch, inner, outer, n, rank = self.batch, self.interminals, self.preterminals, self.length, self.rank
        cells, words = batch * n * (n - 1) // 2, batch * n
        if rank:
            splits = batch * (n**3 - n) / 6
            return 2 * (3 * cells * inner * rank + 2 * words * outer * rank + splits * rank)
        splits = batch * sum((n - width + 1) * max(0, width - 3) for width in range(2, n + 1))
        filled = 2 * words * inner * inner * outer + words * outer * outer * inner  # words into rules
        return 2 * (cells * inner**3 + splits * inner**2 + 2 * cells * inner**2 + filled)

    def ours(self) -> Callable[[], None]:
        inner, states = self.interminals, self.interminals + self.preterminals
        leaf = torch.rand(self.length, self.batch, self.preterminals).requires_grad_()
        root = torch.rand(states).requires_grad_()
        shapes = (
            [(self.rank, inner), (self.rank, states), (self.rank, states)] if self.rank else [(inner, states, states)]
        )
        tensors = [torch.rand(shape).requires_grad_() for shape in shapes]

        def run() -> None:
            form = cp_form(root, *tensors) if self.rank else dense_form(root, *tensors)
            torch.autograd.grad(log_partition(form, leaf)[0].sum(), [leaf, root, *tensors])

        return run

    def theirs(self) -> Callable[[], None]:
        inner, states = self.interminals, self.interminals + self.preterminals
        terms = torch.rand(self.batch, self.length, self.preterminals).log().requires_grad_()
        rules = torch.rand(inner, states, states).log().requires_grad_()
        roots = torch.rand(inner).log().requires_grad_()

        def run() -> None:
            potentials = terms, rules.expand(self.batch, -1, -1, -1), roots.expand(self.batch, -1)
            torch.autograd.grad(PeerCFG(potentials).partition.sum(), [terms, rules, roots])

        return run


SETTINGS = (
    Setting(8, 10, 20, 20, peer=True),
    Setting(8, 30, 60, 40, peer=True),
    Setting(4, 30, 60, 30),
    Setting(4, 100, 200, 30),
    Setting(4, 250, 500, 30, rank=500),
)


def multiplication_peak() -> float:
    """Floating-point operations a second of the fastest of a few large products."""
    best = 0.0
    for size in (512, 1024, 2048):
        x = torch.rand(size, size)
        for _ in range(8):
            begin = time.perf_counter()
            x @ x
            best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def fastest(runs: list[Callable[[], None]], seconds: float) -> list[float]:
    """The shortest time of each, run in turns for so long, and three times at least.

    A turn is half a second: a short run right behind a long one would find the memory as that left it.
    """
    times: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    while min(map(len, times)) < 3 or time.perf_counter() - begin < seconds * len(runs):
        for run, found in zip(runs, times, strict=True):
            turn = time.perf_counter()
            while time.perf_counter() - turn < 0.5:
                start = time.perf_counter()
                run()
                found.append(time.perf_counter() - start)
    return [min(found) for found in times]


def peak_memory(setting: Setting, which: str) -> float:
    """Bytes that a run adds to a process of its own."""
    number = SETTINGS.index(setting)
    done = subprocess.run(
        [sys.executable, __file__, "--memory", which, str(number)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout))


def print_memory(which: str, number: int) -> None:
    run = getattr(SETTINGS[number], which)()
    getattr(Setting(1, 2, 2, 4, rank=2 * bool(SETTINGS[number].rank)), which)()()  # whatever is loaded at first use
    done = threading.Event()
    before = largest = resident()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.0005):
            largest = max(largest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    largest = max(largest, resident())
    done.set()
    watcher.join()
    print(largest - before)


def resident() -> int:
    """Bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def compare(seconds: float, console: Console) -> None:
    table = Table(
        "", "ms", "share of peak", "MB", "torch-struct ms", "MB", "times faster", "memory", title="log Z and gradients"
    )
    for setting in SETTINGS:
        runs = [setting.ours(), setting.theirs()] if setting.peer else [setting.ours()]
        ours, *peer = fastest(runs, seconds)
        share = 3 * setting.flops() / ours / multiplication_peak()
        memory = peak_memory(setting, "ours")
        row = [str(setting), f"{1e3 * ours:.1f}", f"{share:.0%}", f"{memory / 1e6:.0f}"]
        if peer:
            theirs = peak_memory(setting, "theirs")
            row += [
                f"{1e3 * peer[0]:.0f}",
                f"{theirs / 1e6:.0f}",
                f"{peer[0] / ours:.1f}",
                f"1/{theirs / max(memory, 1):.0f}",
            ]
        table.add_row(*row)
    console.print(table)
    console.print(f"fastest matrix multiplication: {multiplication_peak() / 1e9:.0f} GFlop/s")


def parse(stem: str, trees: str, console: Console) -> None:
    model = read_berkeley(stem)
    grammar = model.grammar.to(dtype=torch.float32)
    form = tensor_form(grammar)
    decoder, names = Exhaustive(grammar, form, PRODUCT), grammar.symbols.names
    gold = [normalise(tree) for tree in read_trees(trees)]
    sentences = [words(tree) for tree in gold]
    by_length = defaultdict(list)
    for number, sentence in enumerate(sentences):
        by_length[len(sentence)].append(number)
    stages, found = defaultdict(float), {}

    def stage(name: str, begin: float) -> float:
        stages[name] += time.perf_counter() - begin
        return time.perf_counter()

    for numbers in by_length.values():
        now = time.perf_counter()
        entry = torch.tensor([model.lexicon.encode(sentences[number]) for number in numbers])
        leaf = grammar.lexical.lookup(entry).transpose(0, 1)
        now = stage("lexicon", now)
        solution = solve(Problem(form, leaf), certify=False)[0]
        now = stage("inside", now)
        outside = Outside(solution.chart, torch.ones(len(solution.sentences), dtype=torch.float64))
        now = stage("outside", now)
        skeletons = decoder.trees(solution.chart, outside)
        now = stage("max-rule", now)
        for number, skeleton in zip(solution.sentences.tolist(), skeletons, strict=True):
            built = []
            for node in reversed(skeleton or []):
                tree = Tree(
                    names[node.bottom],
                    [built.pop(), built.pop()] if node.split else [sentences[numbers[number]][node.start]],
                )
                built.append(tree if node.top == node.bottom else Tree(names[node.top], [tree]))
            if built:
                found[numbers[number]] = debinarise(built[0])
        stage("trees", now)
    total = sum(stages.values())
    table = Table("stage", "seconds", "share", title=f"{Path(stem).name}: {len(grammar.binary_rules):,} binary rules")
    for name, seconds in stages.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / total:.0%}")
    console.print(table)
    f1 = evaluate(gold, [found.get(number) for number in range(len(gold))]).f1_all
    console.print(f"{len(gold) / total:.1f} sentences a second, {len(gold) - len(found)} without a tree, F1 {f1:.2f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=3, help="for each measurement")
    arguments.add_argument("--grammar", help="stem of a Berkeley grammar's text files")
    arguments.add_argument("--trees", help="trees whose words it parses")
    arguments.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*arg_constraints.*")
    if options.memory:
        print_memory(options.memory[0], int(options.memory[1]))
        return
    console = Console(width=140)
    if options.grammar:
        parse(options.grammar, options.trees, console)
    else:
        compare(options.seconds, console)


if __name__ == "__main__":
    main()
