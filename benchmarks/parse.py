"""How fast whole sentences are parsed, beside other parsers: one command, one table.

    python benchmarks/parse.py [--model DIR ... --trees dev.mrg] [--processes 2] [--exhaustive 50] [--long 300]
        [--product A B C D] [--compress R T] [berkeley_jar=BerkeleyParser.jar --berkeley-grammar eng_sm6.gr]

Without --model, a treebank PCFG and a small split-merge grammar are trained on the embedded corpus and parse its dev
sentences. What is compared parses the same pieces of the sentences in turns in one process; "time" is the ratio of
both. Each is started once more in a process of its own: the seconds until the first tree, the memory it needs.

NLTK's ViterbiParser and torch-struct's SentCFG are given the treebank PCFG of the embedded corpus, without unary rules,
and a few short sentences of it; the log-probabilities of best trees are compared with ours. The Berkeley parser
is run where its jar and a grammar of its own are given; the time it takes for a single sentence is its start-up.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command has it, before torch is imported

import nltk
import torch
from nltk.grammar import PCFG, Nonterminal, ProbabilisticProduction
from nltk.tree import Tree
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lvpcfg import Binarisation, InputError, Model, Parser, compress, corpus, evaluate, read_trees, train
from lvpcfg.evaluation.evalb import score, sentence
from lvpcfg.evaluation.evalb_files import read_sentences
from lvpcfg.jobs.workers import workers
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words

PIECE = 250  # sentences of similar length that each contender parses in its turn, or a few more
Sentences = Sequence[Sequence[str]]
COLUMNS = ("", "processes", "sentences", "a second", "time", "of", "F1", "ms a sentence", "")

# A process of its own: how long it takes to the first tree, how long each sentence takes, what it needs.
ALONE = """
import json, pathlib, re, resource, sys, time
times = [time.perf_counter()]
import torch, lvpcfg
folders, sentences = json.load(sys.stdin)
torch.set_num_threads(1)
times.append(time.perf_counter())
parser = lvpcfg.Parser.load(folders)
times.append(time.perf_counter())
for sentence in sentences:
    parser.parse(sentence)
    times.append(time.perf_counter())
status = pathlib.Path("/proc/self/status")
if status.exists():  # Linux, whose getrusage counts what the parent had
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 2**10
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"times": [b - a for a, b in zip(times, times[1:])], "peak": peak, **vars(parser.counts)}))
"""


@dataclass
class Contender:
    """One way to parse, and what it took."""

    name: str
    folders: list[str]  # of the model, or of several
    prune: float | None = None
    base: "Contender | None" = None  # what it is compared with
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    trees: dict[int, Tree] = field(default_factory=dict)

    def load(self) -> None:
        self.parser = Parser.load(self.folders, **({} if self.prune is None else {"prune": self.prune}))
        self.parser.parse(["."])  # what is made once is made now

    def parse(self, numbers: Sequence[int], sentences: Sentences, rounds: int) -> Iterator[None]:
        """Parses a piece so often; the fastest counts."""
        best = math.inf
        for _ in range(rounds):
            before, begin = self.parser.times, time.perf_counter()
            trees = self.parser.parse_sents([sentences[number] for number in numbers])
            seconds = time.perf_counter() - begin
            if seconds < best:
                best, after = seconds, self.parser.times
                stages = {name: spent - before.get(name, 0.0) for name, spent in after.items()}
            yield
        self.seconds += best
        for name, spent in stages.items():
            self.stages[name] += spent
        self.trees |= zip(numbers, trees, strict=True)

    def row(self, gold: Sequence[Tree], remark: str = "") -> list[str]:
        found = [self.trees[number] for number in range(len(gold))]
        stages = self.stages | {"other": self.seconds - sum(self.stages.values())}
        return [
            self.name,
            "1",
            f"{len(gold):,}",
            f"{len(gold) / self.seconds:.1f}",
            *(("", "") if self.base is None else (f"{self.seconds / self.base.seconds:.2f}", self.base.name)),
            f"{evaluate(gold, found).all.f1:.2f}",
            ", ".join(f"{name} {1000 * spent / len(gold):.1f}" for name, spent in stages.items()),
            remark,
        ]


def race(contenders: Sequence[Contender], sentences: Sentences, rounds: int, title: str) -> None:
    """Lets all of them parse a piece of the sentences, then the next; who begins changes from piece to piece."""
    by_length = sorted(range(len(sentences)), key=lambda number: -len(sentences[number]))
    pieces = max(1, len(sentences) // PIECE)
    for contender in contenders:
        contender.load()
    with tqdm(total=pieces * rounds * len(contenders), desc=title, unit=" pieces", disable=None, leave=False) as bar:
        for piece in range(pieces):
            numbers = by_length[piece * len(sentences) // pieces : (piece + 1) * len(sentences) // pieces]
            turns = [contender.parse(numbers, sentences, rounds) for contender in contenders]
            for _ in range(rounds):
                for place in range(len(turns)):
                    next(turns[(place + piece) % len(turns)])
                    bar.update()
            for turn in turns:
                next(turn, None)


def alone(contender: Contender, sentences: Sentences) -> dict[str, float]:
    """Figures of a process that does nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=json.dumps([contender.folders, sentences]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def start_up(contender: Contender, first: Sequence[str]) -> str:
    imports, load, parse = alone(contender, [first])["times"]
    return f"start-up {imports + load + parse:.1f} s: import {imports:.1f}, load {load:.1f}, first tree {parse:.1f}"


# Peers with the grammar of the embedded corpus


@dataclass(frozen=True)
class Plain:
    """A PCFG without unary rules, and sentences as entries of its lexicon, in groups of one length."""

    model: Model
    sentences: list[list[list[str]]]

    def entries(self, group: Sentences) -> torch.Tensor:
        return torch.tensor([self.model.lexicon.encode(one) for one in group])

    def nltk(self) -> Callable[[Sentences], list[float]]:
        grammar = self.model.grammar
        inner = len(grammar.symbols.interminals)
        used = torch.cat([self.entries(group).flatten() for group in self.sentences]).unique()
        names = [Nonterminal(number) for number in range(len(grammar.symbols))]
        start = Nonterminal("start")
        rules = [(start, [names[i]], p) for i, p in enumerate(grammar.root.tolist())]
        rules += [
            (names[a], [names[b], names[c]], p)
            for (a, b, c), p in zip(grammar.binary_rules.tolist(), grammar.binary.values.tolist(), strict=True)
        ]
        emits = grammar.lexical.lookup(used)
        for tag, column in enumerate(emits.T.tolist(), inner):
            rules += [(names[tag], [str(entry)], p) for entry, p in zip(used.tolist(), column, strict=True)]
            rules.append((names[tag], ["any other word"], 1 - sum(column)))
        made = [ProbabilisticProduction(parent, right, prob=p) for parent, right, p in rules if p > 0]
        parser = nltk.ViterbiParser(PCFG(start, made))
        parser._max_time = None  # newer versions give up after some seconds

        def parse(group: Sentences) -> list[float]:
            tokens = [[str(entry) for entry in entries] for entries in self.entries(group).tolist()]
            return [math.log(2) * next(parser.parse(one)).logprob() for one in tokens]

        return parse

    def torch_struct(self) -> Callable[[Sentences], list[float]] | None:
        try:
            from torch_struct import SentCFG
        except ImportError:
            return None
        grammar = self.model.grammar.to(dtype=torch.float32)
        inner, states = len(grammar.symbols.interminals), len(grammar.symbols)
        rules = torch.zeros(inner, states, states)
        rules[tuple(grammar.binary_rules.T)] = grammar.binary.values
        lowest = -1e4  # in place of log 0, which has no gradient

        def log(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.log().clamp(min=lowest)

        def parse(group: Sentences) -> list[float]:
            terms = log(grammar.lexical.lookup(self.entries(group)))
            batch = len(group)
            trees = SentCFG((terms, log(rules).expand(batch, -1, -1, -1), log(grammar.root[:inner]).expand(batch, -1)))
            best = trees.argmax
            return trees.struct().score(trees.log_potentials, best).tolist()

        return parse

    def ours(self) -> tuple[Callable[[Sentences], object], Parser]:
        parser = Parser(self.model, decoder="viterbi")
        parser.parse(["."])
        return parser.parse_sents, parser


def peers(number: int, longest: int, say: Callable[[str], None]) -> list[list[str]]:
    """Rows for lvpcfg, NLTK and torch-struct on the same sentences with the same grammar."""
    model = train(corpus("train"), binarisation=Binarisation(unaries="collapse"))
    short = (words(tree) for tree in normalise_all(corpus("dev")))
    chosen = list(islice((one for one in short if 2 <= len(one) <= longest), number))
    groups = [list(group) for _, group in groupby(sorted(chosen, key=len), key=len)]
    plain = Plain(model, groups)
    parse, parser = plain.ours()
    runs: dict[str, Callable[[Sentences], object]] = {"lvpcfg, viterbi": parse, "NLTK, ViterbiParser": plain.nltk()}
    struct = plain.torch_struct()
    if struct is None:
        say("torch-struct is not installed: skipped.")
    else:
        runs["torch-struct, argmax, no trees"] = struct
    seconds, differ = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0.0)
    for group in tqdm(groups, desc="peers", unit=" lengths", disable=None, leave=False):
        best = [one.log_prob for one in parser.analyse(group)]
        for name, run in runs.items():
            begin = time.perf_counter()
            found = run(group)
            seconds[name] += time.perf_counter() - begin
            if run is not parse:
                off = max(abs(one - other) for one, other in zip(found, best, strict=True))
                differ[name] = max(differ[name], off)
    ours = seconds["lvpcfg, viterbi"]
    return [
        [
            name,
            "1",
            f"{len(chosen):,}, up to {longest} words",
            f"{len(chosen) / spent:.1f}",
            *(("", "") if spent is ours else (f"{spent / ours:.2f}", "lvpcfg, viterbi")),
            *("", ""),
            "" if spent is ours else f"log p of best trees differs by {differ[name]:.0e} at the most",
        ]
        for name, spent in seconds.items()
    ]


def berkeley(
    jar: str, grammar: str, beside: Contender, sentences: Sentences, gold: Sequence[Tree], folder: Path
) -> list[str]:
    """The Berkeley parser, by max-rule, right after ours on the same sentences."""
    folder.mkdir()
    begin = time.perf_counter()
    beside.parser.parse_sents(sentences)
    ours = time.perf_counter() - begin
    seconds = []
    for name, some in (("one", sentences[:1]), ("all", sentences)):
        (folder / name).write_text("".join(" ".join(one) + "\n" for one in some), encoding="utf-8")
        begin = time.perf_counter()
        with (folder / name).open() as source, (folder / "trees").open("w") as target:
            command = ["java", "-XX:ActiveProcessorCount=1", "-jar", jar, "-gr", grammar]
            done = subprocess.run(command, stdin=source, stdout=target, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise InputError(f"the Berkeley parser stopped: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        seconds.append(time.perf_counter() - begin)
    spent = max(seconds[1] - seconds[0], 1e-9)
    f1 = score([sentence([tree]) for tree in gold], read_sentences(folder / "trees")).all.f1
    name = f"Berkeley parser, {Path(grammar).name}"
    speed, ratio, remark = len(gold) / spent, spent / ours, f"start-up {seconds[0]:.1f} s"
    return [name, "1", f"{len(gold):,}", f"{speed:.1f}", f"{ratio:.2f}", beside.name, f"{f1:.2f}", "", remark]


# The table


def settings(options: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], str | None]]:
    """Models alone, compressed, together: names -> model folders, and the name of what each is compared with."""
    models = dict.fromkeys([*(options.model or []), *(options.product or [])[:1]])
    found = {name: ([name], None if place == 0 else next(iter(models))) for place, name in enumerate(models)}
    if not found:
        plain, latent = "treebank PCFG", "split-merge"
        found = {plain: ([str(folder / "plain")], None), latent: ([str(folder / "latent")], plain)}
        train(corpus("train")).save(folder / "plain")
        cycles = {"cycles": 2, "split_iterations": 15, "merge_iterations": 5, "smooth_iterations": 5}
        train(corpus("train"), "split_merge", progress=True, **cycles).save(folder / "latent")
    if options.compress:
        rank, threshold = int(options.compress[0]), options.compress[1]
        for number, (name, (folders, _)) in enumerate(list(found.items())):
            model = Model.load(folders[0])
            if int(model.grammar.states.max()) > 1:  # else rules are single numbers
                compress(model, "als", rank=rank, threshold=threshold).save(folder / f"small-{number}")
                found[f"{name}, r = {rank}, t = {threshold:g}"] = ([str(folder / f"small-{number}")], name)
    if options.product:
        found[f"product of {len(options.product)}"] = (options.product, options.product[0])
    return found


def compare(options: argparse.Namespace, folder: Path, table: Table, say: Callable[[str], None]) -> None:
    gold = normalise_all(read_trees(options.trees) if options.trees else corpus("dev"))[: options.sentences]
    if not gold:
        raise InputError(f"{options.trees}: expected trees, found none.")
    sentences = [words(tree) for tree in gold]
    named: dict[str, Contender] = {}
    for name, (folders, base) in settings(options, folder).items():
        named[name] = Contender(name, folders, base=None if base is None else named[base])
    first = list(named.values())
    race(first, sentences, options.rounds, "parsing")
    for one in tqdm(first, desc="starting up", disable=None, leave=False):
        table.add_row(*one.row(gold, start_up(one, sentences[0])))
    if options.berkeley_jar and options.berkeley_grammar and shutil.which("java"):
        jar = (options.berkeley_jar, options.berkeley_grammar)
        table.add_row(*berkeley(*jar, first[0], sentences, gold, folder / "berkeley"))
    else:
        say("The Berkeley parser is skipped: it takes java, berkeley_jar=PATH and --berkeley-grammar FILE.gr.")
    if options.exhaustive:
        table.add_section()
        for row in exhaustive(options, gold, first):
            table.add_row(*row)
    if options.long:
        table.add_section()
        for row in long(options, sentences, first):
            table.add_row(*row)
    if options.peer_sentences:
        table.add_section()
        for row in peers(options.peer_sentences, options.peer_length, say):
            table.add_row(*row)
    if options.processes > 1:
        table.add_section()
        for row in in_processes(options, sentences, first):
            table.add_row(*row)


def in_processes(
    options: argparse.Namespace, sentences: Sentences, contenders: Sequence[Contender]
) -> Iterator[list[str]]:
    """All sentences, three times over, in several processes."""
    many = [*sentences] * 3
    for one in tqdm(contenders, desc=f"in {options.processes} processes", disable=None, leave=False):
        best = math.inf
        with workers(one.folders, {}, options.processes, threads=1) as parser:
            parser.parse_sents(many[: len(sentences)])
            for _ in range(options.rounds):
                begin = time.perf_counter()
                parser.parse_sents(many)
                best = min(best, time.perf_counter() - begin)
        ratio = best / 3 / one.seconds
        numbers = [str(options.processes), f"{len(many):,}", f"{len(many) / best:.1f}", f"{ratio:.2f}"]
        yield [one.name, *numbers, one.name, "", "", ""]


def exhaustive(options: argparse.Namespace, gold: list[Tree], contenders: Sequence[Contender]) -> Iterator[list[str]]:
    """Pruned charts beside whole ones, on sentences evenly spread over all."""
    some = gold[:: max(1, len(gold) // options.exhaustive)][: options.exhaustive]
    for one in contenders:
        if len(one.folders) > 1:
            continue  # a product has no whole charts
        pruned = Contender(one.name, one.folders)
        whole = Contender(f"{one.name}, prune = 0", one.folders, prune=0.0, base=pruned)
        race([pruned, whole], [words(tree) for tree in some], 1, "exhaustively")
        same = sum(pruned.trees[number] == whole.trees[number] for number in range(len(some)))
        yield pruned.row(some, f"{100 * same / len(some):.1f} % of the trees are those of prune = 0")
        yield whole.row(some)


def long(options: argparse.Namespace, sentences: Sentences, contenders: Sequence[Contender]) -> Iterator[list[str]]:
    """One sentence made of many, each without its last word, in processes of their own."""
    chain = [word for one in sentences for word in one[:-1]]
    while len(chain) < options.long:
        chain *= 2
    made = [*chain[: options.long - 1], sentences[0][-1]]
    for one in tqdm(contenders, desc="a long sentence", disable=None, leave=False):
        found = alone(one, [sentences[0], made])
        seconds = found["times"][-1]
        remark = f"{seconds:.1f} s, peak of memory {found['peak']:,.0f} MB"
        remark += ", parsed again: pruning left no tree" * bool(found["looser"]) + ", flat" * bool(found["fallbacks"])
        yield [one.name, "1", f"1 of {options.long} words", f"{1 / seconds:.2f}", *[""] * 4, remark]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", nargs="+", help="model folders, each on its own")
    arguments.add_argument("--trees", help="gold trees whose words are parsed")
    arguments.add_argument("--sentences", type=int, help="the first so many of them")
    arguments.add_argument("--rounds", type=int, default=3, help="the fastest of so many runs of each piece counts")
    arguments.add_argument("--processes", type=int, default=1, help="2: in two processes as well")
    arguments.add_argument("--product", nargs="+", help="model folders that parse together")
    arguments.add_argument(
        "--compress", type=float, nargs=2, metavar=("R", "T"), help="rank and threshold of als, for each model"
    )
    arguments.add_argument("--exhaustive", type=int, default=0, help="sentences that are parsed without pruning too")
    arguments.add_argument("--long", type=int, default=0, help="words of a long sentence")
    arguments.add_argument(
        "--peer-sentences", type=int, default=20, help="for NLTK and torch-struct; 0: leave them out"
    )
    arguments.add_argument("--peer-length", type=int, default=12, help="words of the longest of these")
    arguments.add_argument("--berkeley-jar", help="berkeley_jar=PATH is the same")
    arguments.add_argument("--berkeley-grammar", help="its grammar, a .gr file")
    given = [one.replace("berkeley_jar=", "--berkeley-jar=", 1) for one in sys.argv[1:]]
    options = arguments.parse_args(given)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*arg_constraints.*")
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(*COLUMNS, title="Parsing", title_justify="left")
    try:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, Path(folder), table, console.print)
    except InputError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        console.print("Stopped: these are the rows so far.")
    console.print(table)
    console.print('"time" is the time as a multiple of that of the row named beside it, measured in turns.')


if __name__ == "__main__":
    main()
