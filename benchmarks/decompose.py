"""How fast charts of decomposed grammars are.

    python benchmarks/decompose.py [--seconds 1] [--grammar FOLDER/wsj_0 --trees dev.mrg [--rank 260]]

One thread, float32, all in turns in one process, the fastest run of each. Without --grammar: a dense rule tensor
beside a Kruskal form, how time grows with the rank, with the states at one rank and with the length, and log Z of
grammars with extreme probabilities. With it, the rules of a Berkeley grammar as text one by one, their exact cover, and
CP-APR of some rank parse the words of --trees: inside and outside pass, for batches of one length and for batches of
neighbouring lengths, of which each form may take what suits it; posteriors beside those of the rules; decoding by
max-rule and F1.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from nltk.tree import Tree
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lvpcfg import InputError, debinarise, evaluate, normalise, read_berkeley, read_trees
from lvpcfg.chart.decode.exhaustive import Exhaustive
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.fast.build import cp_form, dense_form, tensor_form
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.fast.partition import Problem, Solution, log_partition, solve_outside
from lvpcfg.decompose.apr import conditional, expected_counts
from lvpcfg.decompose.child_types import apr_by_child_types, cover_by_child_types
from lvpcfg.decompose.dense import rule_tensor
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.options import PRODUCT
from lvpcfg.trees.walk import words

RULES = "rule list"
LONGEST = 40  # words
BATCH, NEAR = 32, 3  # sentences in a batch, and by how many words their lengths differ, at the most
ROUNDS = 4


def fastest(runs: Sequence[Callable[[], object]], seconds: float, rounds: int = 3) -> list[float]:
    """The shortest time of each, in turns for so long, and so many times at least."""
    best, begin, done = [math.inf] * len(runs), time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds * len(runs):
        for place, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[place] = min(best[place], time.perf_counter() - start)
        done += 1
    return best


# Random grammars


def random_form(inner: int, outer: int, rank: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> FastForm:
    """A Kruskal form, or with rank 0 a dense one, of softmaxes of random logits; the same for both dtypes."""
    generator, states = torch.Generator().manual_seed(0), inner + outer

    def draw(*shape: int) -> Tensor:
        logits = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return logits.flatten(1).softmax(1).view(shape).to(dtype).requires_grad_()

    root = draw(1, states).detach().squeeze(0).requires_grad_()
    if not rank:
        return dense_form(root, draw(inner, states, states))
    return cp_form(
        root, draw(inner, rank).detach().T.contiguous().requires_grad_(), draw(rank, states), draw(rank, states)
    )


def gradients(make: Callable[[], FastForm], outer: int, length: int, batch: int) -> Callable[[], object]:
    """A run of log Z and all its gradients."""
    leaf = torch.rand(length, batch, outer, generator=torch.Generator().manual_seed(1)).requires_grad_()
    form = make()
    return lambda: torch.autograd.grad(log_partition(form, leaf)[0].sum(), [leaf, *form.tensors])


def compare_dense(seconds: float, console: Console) -> None:
    inner, outer, length, batch = 30, 60, 40, 8
    ranks = (0, 64)
    runs = [gradients(lambda rank=rank: random_form(inner, outer, rank), outer, length, batch) for rank in ranks]
    slow, fast = fastest(runs, seconds)
    table = Table("", "ms", "times faster", title=f"log Z and gradients, NT={inner} T={outer} n={length} B={batch}")
    table.add_row("dense", f"{1e3 * slow:.1f}", "1.0")
    table.add_row("Kruskal, r=64", f"{1e3 * fast:.1f}", f"{slow / fast:.1f}")
    console.print(table)


def growth(seconds: float, console: Console) -> None:
    """Time against one size, the others fixed; the exponent is the slope of the logarithms over the larger half."""
    table = Table("of", "at", "ms", "exponent", "over the larger half", title="log Z and gradients of a Kruskal form")
    fixed = {"r": 128, "m": 150, "n": 30}
    for name, sizes in (
        ("r", (32, 64, 128, 256, 512, 1024)),
        ("m", (75, 150, 300, 600, 1200, 2400)),
        ("n", (10, 20, 40, 80)),
    ):
        settings = [fixed | {name: size} for size in sizes]
        runs = [
            gradients(
                lambda at=at: random_form(at["m"] // 3, at["m"] - at["m"] // 3, at["r"]),
                at["m"] - at["m"] // 3,
                at["n"],
                4,
            )
            for at in settings
        ]
        times = fastest(runs, seconds / 2)
        others = ", ".join(f"{other}={size}" for other, size in fixed.items() if other != name)
        half = len(sizes) // 2
        table.add_row(
            f"{name} = {', '.join(map(str, sizes))}",
            f"{others}, B=4",
            ", ".join(f"{1e3 * one:.1f}" for one in times),
            f"{slope(sizes, times):.2f}",
            f"{slope(sizes[half:], times[half:]):.2f}",
        )
    console.print(table)


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Of the least-squares line through the logarithms."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, times))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def peaky(console: Console) -> None:
    """log Z in float32 beside float64 where probabilities are extreme."""
    table = Table("logits times", "form", "log Z", "error", title="grammars with extreme probabilities, n=30")
    for scale, rank in itertools.product((1, 12), (0, 64)):
        leaf = (scale * torch.randn(30, 4, 60, generator=torch.Generator().manual_seed(2))).double().softmax(-1)
        narrow, wide = (
            log_partition(random_form(30, 60, rank, scale, dtype), leaf.to(dtype))[0]
            for dtype in (torch.float32, torch.float64)
        )
        error = float((narrow - wide).detach().abs().max())
        table.add_row(str(scale), "Kruskal, r=64" if rank else "dense", f"{float(wide[0]):.3f}", f"{error:.1e}")
    console.print(table)


# A treebank grammar


class Batch:
    """Sentences parsed at once, and charts of them in every form."""

    def __init__(
        self, numbers: Sequence[int], sentences: Sequence[Sequence[str]], model: Model, grammar: Grammar
    ) -> None:
        self.numbers = numbers
        lengths = [len(sentences[number]) for number in numbers]
        entries = [model.lexicon.encode(sentences[number]) for number in numbers]
        longest = max(lengths)
        padded = torch.tensor([[*entry, *entry[:1] * (longest - len(entry))] for entry in entries])
        self.leaf = grammar.lexical.lookup(padded).transpose(0, 1)
        self.lengths = None if min(lengths) == longest else torch.tensor(lengths)

    def solve(self, form: FastForm) -> list[Solution]:
        ones = torch.ones(len(self.numbers), dtype=torch.float64)
        return solve_outside(Problem(form, self.leaf, self.lengths), ones)


def batches(lengths: Sequence[int], near: int) -> list[list[int]]:
    """Numbers of sentences, shortest first."""
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if found and len(found[-1]) < BATCH and lengths[number] - lengths[found[-1][0]] <= near:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def make_forms(model: Model, grammar: Grammar, rank: int) -> dict[str, FastForm]:
    def form(factors: Factors) -> FastForm:
        u, v, w = (factor.to(grammar.binary.dtype) for factor in vars(factors).values())
        return cp_form(grammar.root, u, v, w, grammar, sort_terms=True)

    counts = expected_counts(model.grammar)
    fit = apr_by_child_types(counts, rank)
    fitted = conditional(fit.factors, expected_states(model.grammar)[: counts.shape[0]].double())
    covered = cover_by_child_types(rule_tensor(grammar))
    return {
        RULES: tensor_form(grammar),
        f"cover, r={covered.rank}": form(covered),
        f"apr, r={rank}": form(fitted),
    }


def decode(batch: Batch, solutions: Sequence[Solution], decoder: Exhaustive) -> dict[int, Skeleton]:
    """The trees of a batch of sentences of one length."""
    found = {}
    for solution in solutions:
        assert solution.sums is not None
        for place, skeleton in zip(solution.sentences.tolist(), decoder.trees(*solution.sums), strict=True):
            if skeleton:
                found[batch.numbers[place]] = skeleton
    return found


def tree_of(skeleton: Skeleton, sentence: Sequence[str], names: Sequence[str]) -> Tree:
    built: list[Tree] = []
    for node in reversed(skeleton):
        tree = Tree(names[node.bottom], [built.pop(), built.pop()] if node.split else [sentence[node.start]])
        built.append(tree if node.top == node.bottom else Tree(names[node.top], [tree]))
    return debinarise(built[0])


def difference(one: Sequence[Solution], other: Sequence[Solution]) -> float:
    """The largest between posteriors; charts that were computed in different ways are left out."""
    if len(one) > 1 or len(other) > 1:
        return 0.0
    found = 0.0
    for layer in ("top", "bottom"):
        posteriors = (
            torch.cat(
                [
                    value * beta
                    for value, beta in zip(
                        getattr(solution.chart, layer), getattr(solution.outside, layer), strict=True
                    )
                ]
            )
            for (solution,) in (one, other)
        )
        found = max(found, float(torch.sub(*posteriors).abs().max()))
    return found


def parse(stem: str, trees: str, rank: int, console: Console) -> None:
    model = read_berkeley(stem)
    gold = [tree for tree in map(normalise, read_trees(trees)) if tree is not None and len(words(tree)) <= LONGEST]
    if not gold:
        raise InputError(f"{trees}: expected trees of up to {LONGEST} words, found none.")
    grammar = model.grammar.to(dtype=torch.float32)
    if not len(grammar.binary):
        raise InputError(f"{stem}: expected a grammar with binary rules, found none.")
    sentences = [words(tree) for tree in gold]
    forms = make_forms(model, grammar, rank)
    names = grammar.symbols.names
    decoders = {name: Exhaustive(grammar, form, PRODUCT) for name, form in forms.items()}
    passes = {near: dict.fromkeys(forms, 0.0) for near in (0, NEAR)}
    decoding, largest = dict.fromkeys(forms, 0.0), dict.fromkeys(forms, 0.0)
    found: dict[str, dict[int, Skeleton]] = {name: {} for name in forms}
    lengths = [len(sentence) for sentence in sentences]
    tasks = [(near, numbers) for near in passes for numbers in batches(lengths, near)]
    tasks.sort(key=lambda task: lengths[task[1][0]])  # what is compared is measured in turns
    for near, numbers in tasks:
        batch = Batch(numbers, sentences, model, grammar)
        runs = [partial(batch.solve, form) for form in forms.values()]
        for name, one in zip(forms, fastest(runs, 0, ROUNDS), strict=True):
            passes[near][name] += one
        if near:
            continue
        solved = {name: batch.solve(form) for name, form in forms.items()}
        for name, solutions in solved.items():
            begin = time.perf_counter()
            found[name] |= decode(batch, solutions, decoders[name])
            decoding[name] += time.perf_counter() - begin
            largest[name] = max(largest[name], difference(solved[RULES], solutions))
    table = Table(
        "",
        "terms",
        "one length, s",
        "times faster",
        f"within {NEAR} words, s",
        "times faster",
        "best of both",
        "posteriors differ by",
        "decoding, s",
        "F1",
        title=f"{Path(stem).name}: {len(grammar.binary_rules):,} rules, {len(gold)} sentences, inside and outside",
    )
    least = {name: min(seconds[name] for seconds in passes.values()) for name in forms}
    for name, form in forms.items():
        parses = [
            tree_of(found[name][i], sentence, names) if i in found[name] else None
            for i, sentence in enumerate(sentences)
        ]
        table.add_row(
            name,
            "+".join(map(str, getattr(form, "term_counts", [len(grammar.binary_rules)]))),
            *(text for one in passes.values() for text in (f"{one[name]:.2f}", f"{one[RULES] / one[name]:.1f}")),
            f"{least[RULES] / least[name]:.1f}",
            f"{largest[name]:.1e}",
            f"{decoding[name]:.1f}",
            f"{evaluate(gold, parses).f1_all:.2f}",
        )
    console.print(table)
    console.print(
        "Terms: for two phrases, a phrase and a word, a word and a phrase, two words. "
        "Best of both: each form in the batches that suit it."
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=1, help="for each measurement")
    arguments.add_argument("--grammar", help="stem of a Berkeley grammar's text files")
    arguments.add_argument("--trees", help="trees whose words it parses")
    arguments.add_argument("--rank", type=int, default=260, help="of CP-APR")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    console = Console(width=160)
    try:
        if (options.grammar is None) != (options.trees is None):
            raise InputError("expected --grammar and --trees together, found one of them.")
        if options.rank < 1:
            raise InputError(f"--rank is {options.rank}: expected a number from 1 on.")
        if options.grammar:
            parse(options.grammar, options.trees, options.rank, console)
            return
    except InputError as error:
        sys.exit(str(error))
    compare_dense(options.seconds, console)
    growth(options.seconds, console)
    peaky(console)


if __name__ == "__main__":
    main()
