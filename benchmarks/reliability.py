"""Are posteriors right as often as they say? A reliability diagram of phrases and trees, before and after calibration.

    python benchmarks/reliability.py --model DIR --trees dev.mrg --output reliability.png

Every second gold tree is what the calibration is found by, and the others are what is shown: expected calibration
error, log loss, and bins of as many posteriors each, ten of them or as many as hold 25.
"""

import argparse

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table

from lvpcfg import Calibration, Parser, normalise, read_trees
from lvpcfg.calibration import Outcomes, outcomes
from lvpcfg.options import DECODERS

PLAIN, SCALED = "as they are", "calibrated"
BINS, LEAST = 10, 25


def log_loss(known: Outcomes) -> float:
    """Nats an outcome."""
    posteriors = np.clip(known.posteriors, 1e-7, 1 - 1e-7)
    return float(-np.log(np.where(known.right, posteriors, 1 - posteriors)).mean())


def bins(known: Outcomes) -> int:
    return max(1, min(BINS, len(known.right) // LEAST))


def draw(found: dict[str, dict[str, Outcomes]], path: str) -> None:
    figure, places = plt.subplots(1, len(found), figsize=(3.7 * len(found), 3.6), layout="constrained")
    for axes, (what, ways) in zip(places, found.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for (name, known), marker in zip(ways.items(), "os", strict=True):
            _, mean, share = zip(*known.bins(bins(known)), strict=True)
            axes.plot(mean, share, marker=marker, markersize=4, linewidth=1, label=name)
        axes.set(title=what, xlabel="mean posterior of a bin", ylabel="share that is right", aspect="equal")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, nargs="+", help="folder of a model; of several, their product")
    arguments.add_argument("--trees", required=True, help="file of gold trees that the model was not trained on")
    arguments.add_argument("--decoder", choices=DECODERS)
    arguments.add_argument("--output", help="PNG file")
    options = arguments.parse_args()
    gold = [normalise(tree) for tree in read_trees(options.trees)]
    parser = Parser.load(options.model, options.decoder)
    calibration = Calibration.fit(*outcomes(parser, gold[::2]))
    print(calibration)
    spans, best = outcomes(parser, gold[1::2], 1)
    _, trees = outcomes(parser, gold[1::2])
    found = {
        "phrases": {PLAIN: spans, SCALED: calibration.spans.scaled(spans)},
        "best trees": {PLAIN: best, SCALED: calibration.trees.scaled(best)},
        "five best trees": {PLAIN: trees, SCALED: calibration.trees.scaled(trees)},
    }
    console = Console(width=120)
    summary = Table("", "", "number", "mean posterior", "right", "calibration error", "log loss")
    for what, ways in found.items():
        table = Table("number", *(f"{name}: {kind}" for name in ways for kind in ("posterior", "right")), title=what)
        for rows in zip(*(known.bins(bins(known)) for known in ways.values()), strict=True):
            table.add_row(str(rows[0][0]), *(f"{100 * value:.1f} %" for row in rows for value in row[1:]))
        console.print(table)
        for name, known in ways.items():
            shares = known.posteriors.mean(), known.right.mean(), known.error(bins(known))
            shown = (f"{100 * share:.1f} %" for share in shares)
            summary.add_row(what, name, str(len(known.right)), *shown, f"{log_loss(known):.3f}")
    console.print(summary)
    if options.output:
        draw(found, options.output)


if __name__ == "__main__":
    main()
