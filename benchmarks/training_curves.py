"""How trainings went: F1 on dev and log-likelihood after each look, one line for each run folder of job=train.

python benchmarks/training_curves.py curves.png runs/seed_0 runs/seed_1 runs/seed_2
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from lvpcfg.estimate.checkpoint import Checkpoint

KINDS = {"f1": "F1 on dev", "log_likelihood_per_word": "log-likelihood per word in training"}


def main(output: str, *folders: str) -> None:
    figure, places = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for folder in folders:
        for path in sorted(Path(folder).glob("checkpoint*.safetensors")):
            records = Checkpoint.load(path, {}).notes["records"]
            for axes, kind in zip(places, KINDS, strict=True):
                names = [name for name in records[-1] if name.endswith(kind) and not name.startswith("last")]
                # The start has no log-likelihood yet.
                known = [(look, record[names[0]]) for look, record in enumerate(records) if names and record[names[0]]]
                axes.plot(*zip(*known, strict=True), marker="o", label=Path(folder).name)
    for axes, title in zip(places, KINDS.values(), strict=True):
        axes.set(title=title, xlabel="look at dev (0: the start)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(output, dpi=80)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} OUTPUT RUN_FOLDER ...")
    main(*sys.argv[1:])
