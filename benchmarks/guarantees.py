"""What guarantees give on real sentences: pruning losses beside their bound, and exact pruning beside whole charts.

    python benchmarks/guarantees.py --model DIR --dev dev.mrg --picture loss.png

The true loss of each sentence is the difference of log Z of its whole chart and of what pruning leaves. Times are
seconds of one core, parsers in turns, sentence by sentence.
"""

import argparse
import math
import time
from statistics import median

import torch

import lvpcfg
from lvpcfg.trees.walk import words


def losses(model: lvpcfg.Model, sentences: list[list[str]], prune: float) -> list[tuple[float, float]]:
    """(true share of Z, bound) of each sentence."""
    found = []
    parser = lvpcfg.Parser(model, device="cpu", dtype="float64", prune=prune)
    for sentence, known in zip(sentences, parser.pruning_loss(sentences), strict=True):
        truth = float(lvpcfg.distributions.ModelTrees(model, [sentence]).partition)
        found.append((-math.expm1(known.log_z - truth), known.lost))
    return found


def exact(model: lvpcfg.Model, sentences: list[list[str]]) -> str:
    parsers = {prune: lvpcfg.Parser(model, "viterbi", device="cpu", prune=prune) for prune in ("exact", 5e-5, 0)}
    seconds, same, worse = dict.fromkeys(parsers, 0.0), dict.fromkeys(parsers, 0), 0
    for sentence in sentences:
        parses = {}
        for prune, parser in parsers.items():
            begin = time.process_time()
            parses[prune] = parser.analyse([sentence])[0]
            seconds[prune] += time.process_time() - begin
        for prune, parse in parses.items():
            same[prune] += parse.tree == parses[0].tree
        worse += parses["exact"].tree != parses[0].tree and abs(parses["exact"].log_prob - parses[0].log_prob) > 1e-3
    numbers = ", ".join(f"prune={prune}: {same[prune]} trees the same, {seconds[prune]:.1f} s" for prune in parsers)
    ratio = seconds[0] / seconds["exact"]
    return f"{len(sentences)} sentences; {numbers}; exact {ratio:.1f} times faster than whole, {worse} differ in worth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--dev", required=True, help="file of trees")
    parser.add_argument("--longest", type=int, default=12)
    parser.add_argument("--sentences", type=int, default=30)
    parser.add_argument("--picture")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = lvpcfg.Model.load(given.model)
    every = [words(lvpcfg.normalise(tree)) for tree in lvpcfg.read_trees(given.dev)]
    sentences = [some for some in every[1::2] if 2 <= len(some) <= given.longest][: given.sentences]
    print(lvpcfg.tightness(model).line())
    points = {}
    for prune in (5e-5, 1e-3):
        points[prune] = losses(model, sentences, prune)
        truth, bound = zip(*points[prune], strict=True)
        print(
            f"prune={prune}: true loss {median(truth):.2g} (largest {max(truth):.2g}), bound {median(bound):.2g} "
            f"(largest {max(bound):.2g}); below the truth {sum(b < t - 1e-9 for t, b in points[prune])} times",
            flush=True,
        )
    if given.picture:
        from matplotlib.figure import Figure

        figure = Figure((5, 4), layout="tight")
        axes = figure.subplots()
        for prune, pairs in points.items():
            axes.loglog(*zip(*((max(t, 1e-12), b) for t, b in pairs), strict=True), ".", label=f"prune={prune:g}")
        axes.plot([1e-12, 1], [1e-12, 1], color="grey", linewidth=0.5)
        axes.set(xlabel="share of Z lost", ylabel="bound")
        axes.legend()
        figure.savefig(given.picture, dpi=120)
    print(exact(model, sentences), flush=True)


if __name__ == "__main__":
    main()
