"""Spectral estimation and clusters beside EM: F1 on dev, CPU seconds of training, sentences a second.

    python benchmarks/spectral.py --train train.mrg --dev dev.mrg --picture docs/spectral.png
    python benchmarks/spectral.py --train train.mrg --dev dev.mrg --ablations --sizes 16 20 24

F1 is that of every other sentence of dev, which chose the defaults; of the sentences between, which chose nothing; and
of all. A training begins with trees that are read and ends with a model, in one thread. Figures are means over seeds; a
product has four models of seeds in a row, from the first. With --ablations, each row is the spectral
estimator with one thing changed. Every line is written to the table as soon as it is measured.
"""

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from nltk.tree import Tree
from rich.console import Console
from rich.table import Table

import lvpcfg
from lvpcfg.estimate import spectral_grammar
from lvpcfg.estimate.features import INSIDE, OUTSIDE
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words

PRODUCT = 4  # models


@dataclass
class Row:
    estimator: str
    options: dict[str, Any] = field(default_factory=dict)
    models: int = 1  # of a product
    vertical: int = 1
    patched: dict[str, Any] = field(default_factory=dict)  # numbers and functions of the library


@dataclass
class Line:
    row: str
    states: int
    seeds: int
    seconds: float  # of training
    even: float
    odd: float
    all: float
    speed: float  # sentences a second


ROWS = {
    "spectral": Row("spectral"),
    "clusters": Row("cluster"),
    "product of clusters": Row("cluster", models=PRODUCT),
    "EM": Row("em", {"iterations": 30}),
    "EM from clusters": Row("cluster", {"iterations": 10}),
}


def ablations() -> dict[str, Row]:
    def changed(**options: Any) -> Row:
        return Row("spectral", options)

    rows = {"as it is": changed()}
    for side, names in (("inside", INSIDE), ("outside", OUTSIDE)):
        for name in names:
            rows[f"without {side}: {name}"] = changed(**{side: [other for other in names if other != name]})
    # A number so large that all features of a symbol have one scale.
    rows["features not scaled"] = Row("spectral", {"least": 0.0}, patched={"moments.ADDED": 1e12})
    rows["no back-off"] = changed(backoff=0.0)
    for level, place in (("E2", -3), ("E3", -2), ("E4", -1)):
        rows[f"back-off without {level}"] = Row("spectral", patched={"spectral_grammar.backed_off": Without(place)})
    rows |= {f"backoff={c}": changed(backoff=c) for c in (5.0, 12.2, 20.0, 60.0)}
    rows |= {f"words={weight}": changed(words=weight) for weight in (0.6, 1.0)}
    rows |= {f"share={share}": changed(share=share) for share in (0.001, 0.05, 0.2)}
    rows |= {f"{turns} turns of the subspace": Row("spectral", patched={"moments.TURNS": turns}) for turns in (1, 2, 6)}
    return rows | {"vertical=2": Row("spectral", vertical=2)}


@dataclass
class Without:
    """Backing off without one level, counted from the last."""

    place: int
    original: Any = spectral_grammar.backed_off

    def __call__(self, levels: list[torch.Tensor], own: float) -> torch.Tensor:
        first, *others = levels
        place = len(others) + self.place
        return self.original([first, *(level for number, level in enumerate(others) if number != place)], own)


def measured(name: str, row: Row, states: int, seeds: Sequence[int], train: list[Tree], dev: list[Tree]) -> Line:
    seeds = seeds[:1] if row.models > 1 else seeds
    figures = [_of_seed(row, states, seed, train, dev) for seed in seeds]
    return Line(name, states, len(seeds), *(sum(column) / len(seeds) for column in zip(*figures, strict=True)))


def _of_seed(row: Row, states: int, seed: int, train: list[Tree], dev: list[Tree]) -> list[float]:
    with ExitStack() as stack:
        for target, value in row.patched.items():
            stack.enter_context(patch(f"lvpcfg.estimate.{target}", value))
        begin = time.process_time()
        models = [
            lvpcfg.train(
                train,
                row.estimator,
                lvpcfg.Binarisation(vertical=row.vertical),
                seed=seed + number,
                states=states,
                **row.options,
            )
            for number in range(row.models)
        ]
        seconds = time.process_time() - begin
    parser = lvpcfg.Parser(models, device="cpu")
    parser.parse(["."])  # what is made once is made now
    begin = time.process_time()
    trees = parser.parse_sents([words(tree) for tree in dev])
    speed = len(dev) / (time.process_time() - begin)
    scores = [lvpcfg.evaluate(dev[part], trees[part]).all.f1 for part in (slice(0, None, 2), slice(1, None, 2))]
    return [seconds, *scores, lvpcfg.evaluate(dev, trees).all.f1, speed]


def show(lines: Sequence[Line]) -> None:
    table = Table("", "states", "seeds", "training, s", "even half", "odd half", "dev", "sentences/s")
    for line in lines:
        scores = (f"{score:.2f}" for score in (line.even, line.odd, line.all))
        seconds = f"{line.seconds:.1f}"
        table.add_row(line.row, str(line.states), str(line.seeds), seconds, *scores, f"{line.speed:.0f}")
    Console(width=110).print(table)


def draw(lines: Sequence[Line], path: str) -> None:
    """F1 against seconds of training; numbers at points are states."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    rows = defaultdict(list)
    for line in lines:
        rows[line.row].append(line)
    for name, points in rows.items():
        axes.plot([point.seconds for point in points], [point.all for point in points], marker="o", label=name)
        for point in points:
            place = (point.seconds, point.all)
            axes.annotate(str(point.states), place, textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xlabel="CPU seconds of training", ylabel="F1 on dev", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="file of trees")
    parser.add_argument("--dev", required=True, help="file of trees")
    parser.add_argument("--ablations", action="store_true", help="of the spectral estimator, instead of the table")
    parser.add_argument("--rows", nargs="*", help="their names; all, if none are named")
    parser.add_argument("--sizes", nargs="*", type=int, default=[4, 8, 16, 20, 24], help="numbers of states")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--table", default="spectral.csv", help="where the table goes")
    parser.add_argument("--picture", help="where the picture goes, if there is to be one")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    known = ablations() if settings.ablations else ROWS
    for name in settings.rows or ():
        if name not in known:
            parser.error(f"there is no row {name!r}: expected some of {', '.join(known)}.")
    train, dev = list(lvpcfg.read_trees(settings.train)), normalise_all(lvpcfg.read_trees(settings.dev))
    lines = []
    with open(settings.table, "w", newline="") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Line)])
        table.writeheader()
        for name in settings.rows or known:
            for states in settings.sizes:
                lines.append(measured(name, known[name], states, settings.seeds, train, dev))
                table.writerow(
                    {
                        key: value if isinstance(value, str) else round(value, 2)
                        for key, value in asdict(lines[-1]).items()
                    }
                )
                file.flush()
    show(lines)
    if settings.picture:
        draw(lines, settings.picture)


if __name__ == "__main__":
    try:
        main()
    except lvpcfg.InputError as error:
        raise SystemExit(str(error)) from None
