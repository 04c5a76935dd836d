"""What guarantees give on real sentences: pruning losses beside their bound, and exact pruning beside whole charts;
certificates of compressed models beside their true errors.

    python benchmarks/guarantees.py --model DIR --dev dev.mrg --picture loss.png
    python benchmarks/guarantees.py --model DIR --dev dev.mrg --compressed DIR DIR --longest 40 --picture widths.png

The true loss of each sentence is the difference of log Z of its whole chart and of what pruning leaves. Times are
seconds of one core, parsers in turns, sentence by sentence.
"""

import argparse
import math
import operator
import time
from collections.abc import Callable
from statistics import median
from typing import Any

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


def seconds(parse: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    begin = time.process_time()
    found = parse()
    return time.process_time() - begin, found


def certificates(exact: lvpcfg.Model, folder: str, sentences: list[list[str]]) -> list[tuple[float, float]]:
    """(true error of log Z, how far from the approximate one the interval lets it be) of each sentence."""
    small, sample = lvpcfg.Model.load(folder), sentences[:3]
    truth = lvpcfg.Parser(exact, device="cpu", dtype="float64").analyse(sentences)
    near = lvpcfg.Parser(small, device="cpu", dtype="float64").analyse(sentences)
    parsers = [
        lvpcfg.Parser(exact, device="cpu"),
        lvpcfg.Parser(small, device="cpu"),
        lvpcfg.Parser(small, device="cpu", exact=exact),
    ]
    for parser in parsers:
        parser.parse_sents(sample)
        parser.counts = lvpcfg.parses.Counts()
    (t_exact, by_exact), (t_plain, by_plain), (t_sure, by_sure) = (
        seconds(lambda parser=parser: parser.parse_sents(sentences)) for parser in parsers
    )
    t_analysed, _ = seconds(lambda: parsers[1].analyse(sentences))
    t_certified, parses = seconds(lambda: parsers[1].analyse(sentences, certify=True))
    t_exactly, _ = seconds(lambda: parsers[0].analyse(sentences))
    points, wrong, counts = [], 0, parsers[2].counts
    for known, approximate, parse in zip(truth, near, parses, strict=True):
        low, high = parse.certificate.log_z
        z = approximate.sentence_log_prob
        points.append((abs(z - known.sentence_log_prob), max(high - z, z - low)))
        wrong += not low <= known.sentence_log_prob <= high
        if parse.tree == known.tree:
            wrong += not parse.certificate.log_prob.low <= known.log_prob <= parse.certificate.log_prob.high
    widths = torch.tensor([parse.certificate.log_z.width for parse in parses], dtype=torch.float64)
    quantiles = ", ".join(f"{float(widths.quantile(share)):.2g}" for share in (0.5, 0.9, 1.0))
    print(
        f"{folder}: {len(sentences)} sentences, widths of log Z {quantiles} (median, 90 %, largest), "
        f"{float((widths < 0.1).double().mean()):.3f} below 0.1, {wrong} wrong; true errors "
        f"{median(error for error, _ in points):.2g} (largest {max(points)[0]:.2g}); seconds: "
        f"analysed {t_analysed:.2f}, with certificates {t_certified:.2f}, by the exact model {t_exactly:.2f}; "
        f"trees {t_plain:.2f}, certified {t_sure:.2f}, exact {t_exact:.2f}; "
        f"{counts.certified} certified, {counts.uncertified} not, "
        f"{sum(map(operator.eq, by_sure, by_exact))} as the exact ones ({sum(map(operator.eq, by_plain, by_exact))} "
        "without certificates)",
        flush=True,
    )
    return points


def draw(points: dict[str, list[tuple[float, float]]], path: str, least: float, x: str, y: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((5, 4), layout="tight")
    axes = figure.subplots()
    for label, pairs in points.items():
        axes.loglog(*zip(*((max(t, least), b) for t, b in pairs), strict=True), ".", label=label)
    ends = [least, max(max(pair) for pairs in points.values() for pair in pairs)]
    axes.plot(ends, ends, color="grey", linewidth=0.5)
    axes.set(xlabel=x, ylabel=y)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--dev", required=True, help="file of trees")
    parser.add_argument("--longest", type=int, default=12)
    parser.add_argument("--sentences", type=int, default=30)
    parser.add_argument("--compressed", nargs="+", default=[], help="folders of job=compress certify=true")
    parser.add_argument("--picture")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = lvpcfg.Model.load(given.model)
    every = [words(lvpcfg.normalise(tree)) for tree in lvpcfg.read_trees(given.dev)]
    some_of_them = every if given.compressed else every[1::2]
    sentences = [some for some in some_of_them if 2 <= len(some) <= given.longest][: given.sentences]
    if given.compressed:
        found = {}
        for folder in given.compressed:
            threshold = lvpcfg.Model.load(folder).provenance["compressed"]["threshold"]
            found[f"threshold={threshold:g}"] = certificates(model, folder, sentences)
        if given.picture:
            draw(found, given.picture, 1e-9, "true error of log Z", "largest error by the certificate")
        return
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
        draw({f"prune={prune:g}": points[prune] for prune in points}, given.picture, 1e-12, "share of Z lost", "bound")
    print(exact(model, sentences), flush=True)


if __name__ == "__main__":
    main()
