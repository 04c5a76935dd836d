"""HMMs from samples, by moments and by EM; and forward-backward in low rank.

    python benchmarks/sequences.py --output sequences.png

1. An HMM of 10 states and 100 symbols is sampled from. Prediction error: the mean distance sum |p - q| between the true
   distribution of the next symbol and what the model says, over held-out sequences.
2. An exact HMM, whose states lie in a square and go to their neighbours, against factors of its two matrices: bits of
   log Z lost for each word, the distance between posteriors, and CPU seconds of forward-backward against the number
   of states. Times are the least of some turns, exact and approximate one after the other.
"""

import argparse
import time
from collections.abc import Callable
from statistics import mean

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lvpcfg.sequence.chain import Chain
from lvpcfg.sequence.hmm import HMM, words_of
from lvpcfg.sequence.low_rank import nmf, svd
from lvpcfg.sequence.marginals import marginals
from lvpcfg.sequence.spectral import spectral_hmm, triples_of

LENGTH, HELD_OUT = 50, 100  # symbols of a sequence; sequences
SHARP = 3.0  # logits are normal numbers times this
WIDTH = 0.15  # how far states go in the unit square
SENTENCES, WORDS = 16, 20  # of forward-backward in low rank
TURNS = 3


def cpu_seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def true_hmm(states: int, symbols: int, seed: int) -> HMM:
    """At random, beginning with its stationary distribution."""
    generator = torch.Generator().manual_seed(seed)
    transition, emission = (
        (SHARP * torch.randn(states, size, generator=generator)).softmax(1) for size in (states, symbols)
    )
    stationary = torch.linalg.matrix_power(transition.double(), 1024)[0].float()
    return HMM.from_probabilities(stationary / stationary.sum(), [transition], [emission])


def estimation(console: Console, options: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
    """Errors by way: (words, mean error)."""
    table = Table(title=f"{options.states} states, {options.symbols} symbols, mean of {options.seeds} HMMs")
    for column in (
        "words",
        "spectral",
        "CPU s",
        f"Baum-Welch, {options.iterations} iterations",
        "CPU s",
        "frequencies",
    ):
        table.add_column(column, justify="right")
    curves: dict[str, list[tuple[int, float]]] = {"spectral": [], "Baum-Welch": []}
    for words in options.words:
        found: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            hmm = true_hmm(options.states, options.symbols, seed)
            generator = torch.Generator().manual_seed(seed)
            _, held_out = hmm.sample(HELD_OUT, LENGTH, generator)
            _, observations = hmm.sample(max(1, words // LENGTH), LENGTH, generator)
            expected = hmm.predict(held_out)

            def error(predicted: Tensor, expected: Tensor = expected) -> float:
                return float((predicted - expected).abs().sum(-1).mean())

            results: dict[str, object] = {}

            def by_moments(observations: Tensor = observations, results: dict = results) -> None:
                triples = triples_of(observations, sliding=True)
                results["spectral"] = spectral_hmm(triples, options.states, options.symbols)

            def by_em(observations: Tensor = observations, results: dict = results, seed: int = seed) -> None:
                learned = HMM(options.states, options.symbols, generator=torch.Generator().manual_seed(seed))
                learned.em(observations, iterations=options.iterations)
                results["Baum-Welch"] = learned

            for name, call in (("spectral", by_moments), ("Baum-Welch", by_em)):
                found.setdefault(f"{name} seconds", []).append(cpu_seconds(call))
                found.setdefault(name, []).append(error(results[name].predict(held_out)))
            counts = torch.bincount(observations.flatten(), minlength=options.symbols)
            found.setdefault("frequencies", []).append(error(counts / counts.sum()))
        means = {name: mean(values) for name, values in found.items()}
        for name, curve in curves.items():
            curve.append((words, means[name]))
        columns = ("spectral", "spectral seconds", "Baum-Welch", "Baum-Welch seconds", "frequencies")
        table.add_row(f"{words:,}", *(f"{means[name]:.3g}" for name in columns))
    console.print(table)
    return curves


def neighbours(states: int, symbols: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Initial, transition and emission of states in a square, which go to and emit what is close to them."""
    generator = torch.Generator().manual_seed(seed)
    places, of_symbols = torch.rand(states, 2, generator=generator), torch.rand(symbols, 2, generator=generator)

    def rows(others: Tensor) -> Tensor:
        weight = torch.rand(len(others), generator=generator)
        table = torch.cdist(places, others).square_().div_(-2 * WIDTH**2).exp_().mul_(weight)
        return table.div_(table.sum(1, keepdim=True))

    return torch.full((states,), 1 / states), rows(places), rows(of_symbols)


def sampled(initial: Tensor, transition: Tensor, emission: Tensor) -> Tensor:
    """Symbols of an HMM, [SENTENCES, WORDS]."""
    generator = torch.Generator().manual_seed(1)
    state = initial.multinomial(SENTENCES, replacement=True, generator=generator)
    symbols = []
    for _ in range(WORDS):
        symbols.append(emission[state].multinomial(1, generator=generator))
        state = transition[state].multinomial(1, generator=generator).squeeze(1)
    return torch.cat(symbols, 1)


def forward_backward(initial: Tensor, factors: tuple[Tensor, ...], words: Tensor) -> tuple[Tensor, Tensor]:
    return marginals(Chain(initial, factors), words)


def compared(
    states: int, ranks: list[int], ways: dict, turns: int
) -> list[tuple[str, int, float, float, float, float]]:
    """Of each way and rank: bits a word, distance of posteriors, CPU seconds, and those of the exact HMM."""
    initial, transition, emission = neighbours(states, 1000)
    observations = sampled(initial, transition, emission)
    words = words_of([emission], observations)
    exact_log_z, exact = forward_backward(initial, (transition,), words)
    rows = []
    for name, way in ways.items():
        for rank in ranks:
            factors = way(transition, rank)
            approximate = words_of([*way(emission, rank)], observations)
            if name == "SVD":
                approximate = approximate.clamp_min(
                    0
                )  # a word's weights are seen one by one: they need not be negative
            log_z, found = forward_backward(initial, factors, approximate)
            bits = float((log_z - exact_log_z).abs().mean()) / WORDS / np.log(2)
            distance = float((found - exact).abs().sum(-1).mean())
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(turns):
                times[0].append(cpu_seconds(lambda f=factors, w=approximate: forward_backward(initial, f, w)))
                times[1].append(cpu_seconds(lambda: forward_backward(initial, (transition,), words)))
            rows.append((name, rank, bits, distance, min(times[0]), min(times[1])))
    return rows


def exponent(points: list[tuple[int, float]]) -> float:
    """Of seconds ~ states ^ exponent, by least squares."""
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def low_rank(console: Console, options: argparse.Namespace) -> tuple[list, dict[str, list[tuple[int, float]]]]:
    errors = compared(options.error_states, options.ranks, {"SVD": svd, "NMF": nmf}, 1)
    table = Table(title=f"factors of both matrices, {options.error_states} states, 1,000 symbols")
    for column in ("way", "rank", "bits a word", "distance of posteriors"):
        table.add_column(column, justify="right")
    for name, rank, bits, distance, _, _ in errors:
        table.add_row(name, str(rank), f"{bits:.2g}", f"{distance:.2g}")
    console.print(table)
    table = Table(title=f"forward-backward, {SENTENCES} sentences of {WORDS} words, rank {options.rank}")
    for column in ("states", "exact, CPU s", "SVD, CPU s", "times faster", "bits a word", "distance of posteriors"):
        table.add_column(column, justify="right")
    times: dict[str, list[tuple[int, float]]] = {"exact": [], f"rank {options.rank}": []}
    for states in options.sizes:
        ((_, _, bits, distance, fast, exact),) = compared(states, [options.rank], {"SVD": svd}, TURNS)
        times["exact"].append((states, exact))
        times[f"rank {options.rank}"].append((states, fast))
        ratio = exact / fast
        table.add_row(f"{states:,}", f"{exact:.3g}", f"{fast:.3g}", f"{ratio:.3g}", f"{bits:.2g}", f"{distance:.2g}")
    console.print(table)
    for name, points in times.items():
        console.print(
            f"{name}: CPU seconds ~ states ^ {exponent(points[-4:]):.2f}, fitted to the largest {len(points[-4:])}"
        )
    return errors, times


def draw(curves: dict, errors: list, times: dict, path: str) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for (name, points), marker in zip(curves.items(), "os", strict=True):
        left.plot(*zip(*points, strict=True), marker=marker, label=name)
    left.set(title="prediction of the next symbol", xlabel="words of the sample", ylabel="mean sum |p - q|")
    for name, marker in (("SVD", "o"), ("NMF", "s")):
        points = [(rank, distance) for way, rank, _, distance, _, _ in errors if way == name]
        middle.plot(*zip(*points, strict=True), marker=marker, label=name)
    middle.set(title="posteriors in low rank", xlabel="rank", ylabel="mean sum |p - q|")
    for (name, points), marker in zip(times.items(), "os", strict=True):
        label = f"{name}: exponent {exponent(points[-4:]):.2f}"
        right.plot(*zip(*points, strict=True), marker=marker, label=label)
    right.set(title="forward-backward", xlabel="states", ylabel="CPU seconds")
    for axes in (left, middle, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--words", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    arguments.add_argument("--states", type=int, default=10)
    arguments.add_argument("--symbols", type=int, default=100)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--iterations", type=int, default=50, help="of EM")
    arguments.add_argument("--error-states", type=int, default=1024)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    arguments.add_argument("--rank", type=int, default=32)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384])
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--output", help="PNG file")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    curves = estimation(console, options)
    errors, times = low_rank(console, options)
    if options.output:
        draw(curves, errors, times, options.output)


if __name__ == "__main__":
    main()
