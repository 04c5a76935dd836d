"""The work of job=tradeoff: approximations of models, and a table of the time they save and the F1 they lose."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg.decompose.bounds import upwards
from lvpcfg.decompose.compress import FittedRules, decompose, fit_rules
from lvpcfg.decompose.dense import divergence
from lvpcfg.decompose.options import ALSOptions, APROptions, Options, SVDOptions
from lvpcfg.device import usable_device
from lvpcfg.errors import InputError, show
from lvpcfg.evaluation.evalb import evaluate
from lvpcfg.evaluation.pictures import draw_tradeoff
from lvpcfg.evaluation.tradeoff import ALS, APR, COVER, EXACT, SVD, Row, plain, read_rows, write_rows
from lvpcfg.files import read_bytes, write_text
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.reader import JSON
from lvpcfg.jobs.compression import fitting
from lvpcfg.jobs.options import ParserOptions, folders
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.tradeoff import TradeoffOptions
from lvpcfg.parser import Parser
from lvpcfg.trees.brackets import format_tree, read_trees
from lvpcfg.trees.corpus import corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words

PIECES, SMALLEST = 8, 16  # sentences are parsed in so many pieces, of so many sentences at least, the longest first
ENOUGH = 20.0  # seconds after which the exact grammar no longer parses the same pieces for comparison
STAGES = ("coarse", "gather", "middle", "plan", "fine")  # of parsing, except decoding
Times = dict[str, float]  # seconds, by stage
FIGURES = ("seconds", "inside_outside", "ratio", "ratio_inside_outside", "f1", "f1_all", "share", "gamma", "kl")


@dataclass(frozen=True)
class Setting:
    label: str  # of the model
    method: str
    rank: int = 0  # 0 where the method has none to choose
    threshold: float = 0

    @property
    def name(self) -> str:
        chosen = [f"r={self.rank}"] if self.rank else []
        chosen += [f"t={self.threshold:g}"] if self.threshold else []
        return " ".join([self.label, self.method, *chosen])


def run(config: TradeoffOptions, run: Run) -> None:
    table, rows = run.folder / "tradeoff.csv", list[Row]()
    if table.exists() and not config.resume:
        raise InputError(
            f"{table} exists already: resume=true goes on with it, hydra.run.dir=FOLDER chooses another folder."
        )
    gold = _gold(config)
    candidates = _candidates(config, gold)
    settings = {setting: candidate for candidate in candidates for setting in candidate.settings(config)}
    if table.exists():
        rows = _finished(table, settings)
    run.begin()
    done = {row.setting for row in rows}
    if config.resume:
        run.say(f"{len(done)} of {len(settings)} settings are in {table} already.")
    with (
        _told_if_stopped(run, rows, len(settings)),
        tqdm(total=len(settings), initial=len(done), unit="setting", desc="trade-off", disable=None) as bar,
    ):
        for setting, candidate in settings.items():
            if setting.name not in done:
                bar.set_postfix_str(setting.name)
                row = candidate.measure(setting, gold, bar.update)
                rows.append(row)
                write_text(table, write_rows(rows))
                _log(row, config, run)
                with bar.external_write_mode():
                    run.say(_line(row))
            if setting == candidate.last(config):
                candidate.forget()
    ordered = sorted(rows, key=lambda row: [setting.name for setting in settings].index(row.setting))
    write_text(run.folder / "tradeoff.json", json.dumps([plain(row) for row in ordered], indent=1) + "\n")
    for row in ordered:
        figures = {figure: getattr(row, figure) for figure in FIGURES}
        run.result |= {f"{_flat(row)}_{figure}": value for figure, value in figures.items() if math.isfinite(value)}
    for candidate in candidates:
        its_rows = [row for row in ordered if row.label == candidate.label]
        show_rows(its_rows, run, f"{candidate.label}, {candidate.path}, {len(gold):,} sentences, ms a sentence")
    run.picture("tradeoff", draw_tradeoff(ordered), ("png", "svg"))
    run.say(f"The table is in {table}.")


def _gold(config: TradeoffOptions) -> list[Tree]:
    trees = normalise_all(corpus("dev") if config.gold is None else read_trees(config.gold))
    longest = config.tradeoff.max_length
    gold = [tree for tree in trees if len(words(tree)) <= longest]
    if not gold:
        raise InputError(f"there is no tree of up to {longest} words in {show(config.gold, 200)}.")
    return gold


def _candidates(config: TradeoffOptions, gold: list[Tree]) -> "list[Candidate]":
    if config.model is None:
        raise InputError("job=tradeoff needs models: model=FOLDER or model=[A,B,C], as job=train makes them.")
    found = [Candidate(path, config, config.seed) for path in folders(config.model)]
    labels = [candidate.label for candidate in found]
    for number, candidate in enumerate(found):
        if labels.count(candidate.label) > 1:
            candidate.label += f" #{number + 1}"
        candidate.sign(gold)
    return found


def _finished(table: Path, settings: "dict[Setting, Candidate]") -> list[Row]:
    """The rows of an earlier run, which must have been made with the same models, trees and options."""
    rows, made_with = read_rows(table), {setting.name: candidate.digest for setting, candidate in settings.items()}
    for row in rows:
        if made_with.get(row.setting) != row.made_with:
            raise InputError(
                f"{show(str(table), 200)} has {row.setting!r}, made with another model, gold file or options: "
                "resume with the same ones, or in another folder."
            )
    return rows


@contextmanager
def _told_if_stopped(run: Run, rows: list[Row], total: int) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        run.say_how_to_go_on(f"{len(rows)} of {total} settings")
        raise


@dataclass(frozen=True, eq=False)
class Approximation:
    model: Model
    rank: int
    approximated: int  # rules
    gamma: float
    kl: float
    seconds: float  # it took


class Candidate:
    """A model whose approximations are measured."""

    def __init__(self, path: str, options: ParserOptions, seed: int) -> None:
        self.path, self.options, self.seed = path, options, seed
        grammar = self.model.grammar
        if grammar.binary.compressed:
            raise InputError(
                f"the model in {show(path, 200)} is compressed already: expected one whose rules are tensors."
            )
        if not len(grammar.binary_rules):
            raise InputError(f"the model in {show(path, 200)} has no binary rules to decompose.")
        self.states = int(grammar.states.max())
        self.label = f"m={self.states}"
        self.digest = ""
        self.forget()

    def forget(self) -> None:
        """Frees the memory of the model, its parser and its fits; they are made again when they are needed."""
        self.fits: dict[int, tuple[FittedRules, float]] = {}
        for name in ("model", "exact"):
            self.__dict__.pop(name, None)

    @cached_property
    def model(self) -> Model:
        model = Model.load(self.path)
        return replace(model, grammar=model.grammar.to(usable_device(self.options.device)))

    @cached_property
    def exact(self) -> Parser:
        return self._parser(self.model)

    def _parser(self, model: Model) -> Parser:
        # One CP form of all rules fills full charts, so the rule list it is compared with does so too.
        prune = self.options.prune if self.states > 1 else 0
        parser = Parser(model, **self.options.parser() | {"prune": prune})
        parser.parse(["."])  # so that no measurement includes what is prepared once
        return parser

    def sign(self, gold: list[Tree]) -> None:
        """Sets the digest of everything that a row depends on."""
        options = self.options
        device = str(usable_device(options.device))
        made_by = [options.decoder, options.prune, options.dtype, device, options.threads, self.seed]
        digest = hashlib.sha256(json.dumps(made_by).encode())
        digest.update("\n".join(map(format_tree, gold)).encode())
        digest.update(read_bytes(Path(self.path) / JSON))
        self.digest = digest.hexdigest()[:16]

    def settings(self, config: TradeoffOptions) -> list[Setting]:
        chosen, label = config.tradeoff, self.label
        if self.states == 1:
            fits = [Setting(label, APR, rank) for rank in chosen.terms]
            return [Setting(label, EXACT), Setting(label, COVER), Setting(label, SVD), *fits]
        thresholds = [threshold for threshold in chosen.thresholds if threshold]
        return [Setting(label, EXACT), *(Setting(label, ALS, rank, t) for rank in chosen.ranks for t in thresholds)]

    def last(self, config: TradeoffOptions) -> Setting:
        return self.settings(config)[-1]

    def approximate(self, setting: Setting) -> Approximation:
        model, grammar = self.model, self.model.grammar
        begin = time.perf_counter()
        if setting.method == EXACT:
            return Approximation(model, 0, 0, 0.0, 0.0, 0.0)
        if setting.method == ALS:
            if setting.rank not in self.fits:
                self.fits.clear()
                with fitting(f"als, r = {setting.rank}") as progress:
                    fitted = fit_rules(grammar, ALSOptions(rank=setting.rank), self.seed, progress)
                self.fits[setting.rank] = fitted, time.perf_counter() - begin
            fitted, seconds = self.fits[setting.rank]
            small = replace(model, grammar=fitted.within(setting.threshold))
            used = fitted.used(setting.threshold)
            gamma = float(fitted.gamma[used].max()) if len(used) else 0.0
            return Approximation(small, setting.rank, len(used), gamma, math.nan, seconds)
        options = {COVER: Options(), SVD: SVDOptions(), APR: APROptions(rank=setting.rank)}[setting.method]
        with fitting(setting.name) as progress:
            found = decompose(model, options, self.seed, progress)
        seconds, factors = time.perf_counter() - begin, found.factors
        assert factors is not None
        kl = divergence(grammar, factors)
        return Approximation(found.model, factors.rank, len(grammar.binary_rules), found.error, kl, seconds)

    def measure(self, setting: Setting, gold: list[Tree], advance: Callable[[float], object] | None = None) -> Row:
        """Parses the gold sentences; `advance` is called with the share of them that is done, again and again."""
        made = self.approximate(setting)
        parser = self.exact if setting.method == EXACT else self._parser(made.model)
        before = dict(vars(parser.counts))
        by_length = sorted(range(len(gold)), key=lambda number: -len(words(gold[number])))
        found: dict[int, Tree] = {}
        times, exact = list[Times](), list[Times]()
        pieces = max(2, min(PIECES, len(gold) // SMALLEST))
        for piece in range(pieces):
            numbers = by_length[piece * len(gold) // pieces : (piece + 1) * len(gold) // pieces]
            sentences = [words(gold[number]) for number in numbers]
            compare = setting.method != EXACT and _spent(exact, *STAGES) < ENOUGH
            if compare and piece % 2:
                exact.append(_timed(self.exact, sentences)[1])
            trees, seconds = _timed(parser, sentences)
            if compare and not piece % 2:
                exact.append(_timed(self.exact, sentences)[1])
            found |= zip(numbers, trees, strict=True)
            times.append(seconds)
            if advance is not None:
                advance(1 / pieces)
        compared = times[: len(exact)] if exact else times
        exact = exact or times
        counts = {name: number - before[name] for name, number in vars(parser.counts).items()}
        scores = evaluate(gold, [found[number] for number in range(len(gold))]).figures()
        return Row(
            setting=setting.name,
            model=self.path,
            label=self.label,
            states=self.states,
            method=setting.method,
            rank=made.rank,
            threshold=setting.threshold,
            rules=len(self.model.grammar.binary_rules),
            approximated=made.approximated,
            gamma=made.gamma,
            kl=made.kl,
            numbers=made.model.grammar.binary.size,
            fit_seconds=made.seconds,
            sentences=len(gold),
            **{name: scores[name] for name in ("precision", "recall", "f1", "f1_all")},
            fallbacks=counts["fallbacks"],
            negative_rules=counts["negative_rules"],
            seconds=_spent(times, *STAGES) / len(gold),
            coarse=_spent(times, "coarse") / len(gold),
            gather=_spent(times, "gather") / len(gold),
            middle=_spent(times, "middle") / len(gold),
            plan=_spent(times, "plan") / len(gold),
            inside_outside=_spent(times, "fine") / len(gold),
            decode=_spent(times, "decode") / len(gold),
            ratio=_spent(compared, *STAGES) / _spent(exact, *STAGES),
            ratio_inside_outside=_spent(compared, "fine") / _spent(exact, "fine"),
            made_with=self.digest,
        )


def _timed(parser: Parser, sentences: list[list[str]]) -> tuple[list[Tree], Times]:
    before = parser.times
    trees = parser.parse_sents(sentences)
    return trees, {stage: seconds - before.get(stage, 0.0) for stage, seconds in parser.times.items()}


def _spent(times: list[Times], *stages: str) -> float:
    return sum(one.get(stage, 0.0) for one in times for stage in stages)


def _line(row: Row) -> str:
    text = f"{row.setting}: {row.seconds:.4f} s/sentence, inside-outside {row.inside_outside:.4f}"
    if row.method != EXACT:
        text += f" ({100 * row.ratio:.0f} and {100 * row.ratio_inside_outside:.0f} % of exact)"
    return f"{text}, F1 {row.f1:.2f}"


def _log(row: Row, config: TradeoffOptions, run: Run) -> None:
    """TensorBoard: lines over the thresholds, smallest first, or over the ranks; and a session of the HParams tab."""
    figures = {name: float(getattr(row, name)) for name in FIGURES}
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}
    if row.states == 1:
        lines, step = [f"{row.label} {row.method}"], row.rank
    else:
        lines = [f"{row.label} r={rank}" for rank in ([row.rank] if row.rank else config.tradeoff.ranks)]
        step = sorted({0.0, *config.tradeoff.thresholds}).index(row.threshold)
    for line in lines:
        for name, value in figures.items():
            run.board.add_scalar(f"{name}/{line}", value, step)
    options = {"model": row.label, "method": row.method, "rank": row.rank, "threshold": row.threshold}
    run.board.add_hparams(options, {f"row/{name}": value for name, value in figures.items()}, run_name=_flat(row))
    run.board.flush()


def _flat(row: Row) -> str:
    """The name of its setting, as figures and folders have it."""
    return row.setting.replace(" ", "_").replace("=", "")


def show_rows(rows: Sequence[Row], run: Run, title: str) -> None:
    """A table of the settings of one model, the exact one first."""
    latent, exact = rows[0].states > 1, rows[0].numbers
    columns = ["", *(["rules\nused", "gamma"] if latent else ["terms", "KL"]), "size", "ms"]
    columns += ["of\nexact", *(["inside\noutside", "of\nexact"] if latent else []), "decode", "F1"]
    lines = []
    for row in rows:
        line = [row.setting.removeprefix(f"{row.label} ").removeprefix("als ")]
        if row.method == EXACT:
            line += ["", ""]
        elif latent:
            line += [f"{row.share:.0f} %", upwards(row.gamma, 2)]
        else:
            line += [f"{row.rank:,}", f"{row.kl:.3g}"]
        line += [f"{100 * row.numbers / exact:.0f} %", f"{1000 * row.seconds:.2f}", f"{100 * row.ratio:.0f} %"]
        if latent:
            line += [f"{1000 * row.inside_outside:.2f}", f"{100 * row.ratio_inside_outside:.0f} %"]
        lines.append([*line, f"{1000 * row.decode:.2f}", f"{row.f1:.2f}"])
    run.table(title, columns, lines)
