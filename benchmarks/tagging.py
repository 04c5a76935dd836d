"""How well words are tagged: LVG-G-m by EM and LVG-D-m by gradient descent, the taggers of Zhao, Zhang & Tu 2018.

    python benchmarks/tagging.py runs/tagging train=a/train.conllu dev=a/dev.conllu states=1,2,4,8,16 seeds=0,1,2

trains each tagger by job=train in a folder of its own below `runs/tagging`, and prints a table: token and sentence
accuracy on dev, means over the seeds (one state for each tag has no seed). What is trained already is not trained
again. `estimators=em`, and other options of job=train, may follow.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
NAMES = {"em": "LVG-G", "gradient": "LVG-D"}


def main(folder: str, *arguments: str) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    data = [f"data.{name}={given.pop(name)}" for name in ("train", "dev")]
    states, seeds = (
        given.pop(name, usual).split(",") for name, usual in (("states", "1,2,4,8,16"), ("seeds", "0,1,2"))
    )
    estimators = given.pop("estimators", "em,gradient").split(",")
    others = [f"{name}={value}" for name, value in given.items()]
    print("| | tokens | sentences | unknown words | seconds |\n|---|---|---|---|---|")
    for estimator in estimators:
        for m in states:
            found = [
                trained(Path(folder) / f"{estimator}_{m}_{seed}", estimator, m, seed, [*data, *others])
                for seed in (seeds if m != "1" else seeds[:1])
            ]
            names = ("token_accuracy", "sentence_accuracy", "unknown_accuracy", "train_seconds")
            cells = (mean(each.get(name, 100.0) for each in found) for name in names)
            row = [f"{NAMES.get(estimator, estimator)}-{m}", *(f"{cell:.2f}" for cell in cells)]
            print(f"| {' | '.join(row)} |", flush=True)


def trained(folder: Path, estimator: str, states: str, seed: str, others: list[str]) -> dict[str, float]:
    """The figures of one training."""
    result = folder / "result.json"
    if not result.exists():
        options = [f"estimator={estimator}", f"estimator.states={states}", f"seed={seed}", *others]
        command = [
            sys.executable,
            str(ROOT / "run.py"),
            "job=train",
            *options,
            f"hydra.run.dir={folder}",
            "resume=true",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
