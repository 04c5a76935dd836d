"""F1 against the time a sentence takes, for families of models: one command, one table, one picture.

    python benchmarks/curve.py --gold dev.mrg --output curve.png \\
        "split-merge: 4 cycles=A/model_0,A/model_1,A/model_2" "in CP form: r = 500=B/model,C/model,D/model" ...

Each argument is a family, a label and the folders of models that differ in their seed alone; their F1 and their time
are means. All models parse the same pieces of the sentences in turns, in one process and one thread, and the fastest
of several rounds counts. Points of one family are joined by a line.
"""

import argparse
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command has it, before torch is imported

import matplotlib.pyplot as plt
import torch
from nltk.tree import Tree
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lvpcfg import InputError, Parser, evaluate, read_trees
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words

PIECE = 250  # sentences that a model parses in its turn


@dataclass
class Seed:
    """One model, and what it took."""

    folder: str
    seconds: float = 0.0
    trees: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parser = Parser.load(self.folder, device="cpu")
        self.parser.parse(["."])  # what is made once is made now

    def parse(self, sentences: Sequence[Sequence[str]]) -> tuple[float, list[Tree]]:
        begin = time.perf_counter()
        trees = self.parser.parse_sents(sentences)
        return time.perf_counter() - begin, trees


@dataclass
class Point:
    """Models that differ in their seed alone."""

    family: str
    label: str
    seeds: list[Seed]

    @staticmethod
    def of(argument: str) -> "Point":
        name, separator, folders = argument.rpartition("=")
        family, colon, label = name.partition(":")
        if not (separator and colon and folders):
            raise SystemExit(f"{argument!r} is no point: expected 'family: label=FOLDER,FOLDER,...'.")
        return Point(family.strip(), label.strip(), [Seed(folder) for folder in folders.split(",")])


def measure(points: Sequence[Point], sentences: Sequence[Sequence[str]], rounds: int) -> None:
    seeds = [seed for point in points for seed in point.seeds]
    for begin in tqdm(range(0, len(sentences), PIECE), desc="pieces", unit="piece"):
        piece, best = sentences[begin : begin + PIECE], [math.inf] * len(seeds)
        for _ in range(rounds):
            for number, seed in enumerate(seeds):
                seconds, trees = seed.parse(piece)
                best[number] = min(best[number], seconds)
                seed.trees[begin:] = trees
        for seed, seconds in zip(seeds, best, strict=True):
            seed.seconds += seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="+", help="'family: label=FOLDER,FOLDER,...'")
    parser.add_argument("--gold", required=True, help="file of gold trees")
    parser.add_argument("--output", default="curve.png", help="where the picture goes")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gold = normalise_all(read_trees(options.gold))
    points = [Point.of(argument) for argument in options.points]
    measure(points, [words(tree) for tree in gold], options.rounds)

    table, families = Table("", "", "ms a sentence", "F1", "of each seed"), defaultdict(list)
    for point in points:
        scores = [evaluate(gold, seed.trees).all.f1 for seed in point.seeds]
        milliseconds = 1000 * sum(seed.seconds for seed in point.seeds) / len(point.seeds) / len(gold)
        f1 = sum(scores) / len(scores)
        families[point.family].append((milliseconds, f1, point.label))
        each = ", ".join(f"{score:.2f}" for score in scores)
        table.add_row(point.family, point.label, f"{milliseconds:.2f}", f"{f1:.2f}", each)
    Console().print(table)
    draw(families, options.output)


def draw(families: dict[str, list[tuple[float, float, str]]], path: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for family, points in families.items():
        times, scores, labels = zip(*sorted(points), strict=True)
        axes.plot(times, scores, marker="o", label=family)
        for x, y, label in zip(times, scores, labels, strict=True):
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(xlabel="milliseconds a sentence, one core", ylabel="F1")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(str(error)) from None
