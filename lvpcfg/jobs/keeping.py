"""The work of job=components: a training for each number of components that are kept, and a table of the outcomes."""

import csv
import hashlib
import io
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg.device import usable_device
from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.gaussian import OWN, gaussian
from lvpcfg.evaluation.evalb import evaluate
from lvpcfg.evaluation.pictures import draw_components
from lvpcfg.files import read_text, write_text
from lvpcfg.grammar.model import Model
from lvpcfg.jobs.components import ComponentsOptions
from lvpcfg.jobs.run import Run
from lvpcfg.parser import Parser
from lvpcfg.trees import signatures
from lvpcfg.trees.brackets import format_tree, read_trees
from lvpcfg.trees.corpus import corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.treebank import build_treebank
from lvpcfg.trees.walk import words


@dataclass(frozen=True)
class Row:
    kept: int  # components of a node; 0: all
    f1: float
    f1_all: float
    log_likelihood: float  # log p(tree | words) per word, in the last epoch
    seconds: float  # of the CPU, an epoch
    made_with: str  # a digest of the trees and the options


def run(config: ComponentsOptions, run: Run) -> None:
    table, rows = run.folder / "components.csv", list[Row]()
    if table.exists() and not config.resume:
        raise InputError(
            f"{table} exists already: resume=true goes on with it, hydra.run.dir=FOLDER chooses another folder."
        )
    train = _trees(config.trees, "train", config.components.longest_train)
    test = _trees(config.gold, "dev", config.components.longest_test)
    made_with = _digest(config, train, test)
    if table.exists():
        rows = _finished(table, made_with)
    run.begin()
    settings = config.components.kept
    done = {row.kept for row in rows}
    try:
        for kept in tqdm([kept for kept in settings if kept not in done], desc="components", disable=None):
            rows.append(_measured(kept, config, train, test, made_with))
            write_text(table, _text(rows))
            _log(rows[-1], run)
    except (KeyboardInterrupt, SystemExit):
        run.say_how_to_go_on(f"{len(rows)} of {len(settings)} settings")
        raise
    rows.sort(key=lambda row: settings.index(row.kept) if row.kept in settings else len(settings))
    for row in rows:
        name = f"kept_{row.kept}" if row.kept else "exact"
        run.result |= {f"{name}_f1": row.f1, f"{name}_f1_all": row.f1_all, f"{name}_seconds": row.seconds}
    run.table(
        f"{len(train):,} trees to learn from, {len(test):,} to parse",
        ["components", "F1", "F1 all", "log p per word", "CPU seconds an epoch"],
        [[str(row.kept or "all"), *_shown(row)] for row in rows],
    )
    run.picture("components", draw_components([(row.kept, row.f1_all, row.seconds) for row in rows]))
    run.say(f"The table is in {table}.")


def _shown(row: Row) -> tuple[str, ...]:
    return f"{row.f1:.2f}", f"{row.f1_all:.2f}", f"{row.log_likelihood:.4f}", f"{row.seconds:.1f}"


def _trees(path: str | None, part: str, longest: int) -> list[Tree]:
    trees = normalise_all(corpus(part) if path is None else read_trees(path))
    found = [tree for tree in trees if len(words(tree)) <= longest]
    if not found:
        raise InputError(f"there is no tree of up to {longest} words in {show(path, 200)}.")
    return found


def _digest(config: ComponentsOptions, train: Sequence[Tree], test: Sequence[Tree]) -> str:
    about = [asdict(config.estimator), vars(config.binarisation), config.signature, config.seed, config.parser()]
    text = "\n".join([repr(about), *map(format_tree, train), "", *map(format_tree, test)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _finished(table: Path, made_with: str) -> list[Row]:
    """The rows of an earlier run, which must have been made with the same trees and options."""
    try:
        rows = [
            Row(**{field.name: field.type(row[field.name]) for field in fields(Row)})  # type: ignore[operator]
            for row in csv.DictReader(io.StringIO(read_text(table)))
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{show(str(table), 200)} is not a table of job=components: {show(str(error))}.") from None
    if any(row.made_with != made_with for row in rows):
        raise InputError(
            f"{show(str(table), 200)} was made with other trees or options: resume with the same ones, or in another "
            "folder."
        )
    return rows


def _text(rows: Sequence[Row]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return stream.getvalue()


def _measured(kept: int, config: ComponentsOptions, train: Sequence[Tree], test: Sequence[Tree], made_with: str) -> Row:
    treebank = build_treebank(train, config.binarisation.scheme())
    task = Task(treebank, config.signature or signatures.OF_TREES, config.seed, usable_device(config.device).type)
    training = gaussian(replace(config.estimator, kept=kept, sharing=OWN), task)
    training.figures()  # forests are found before the first epoch
    begin = time.process_time()
    for _ in training.run():
        pass
    seconds = (time.process_time() - begin) / config.estimator.epochs
    model = training.model()
    assert isinstance(model, Model)
    found = Parser(model, **config.parser()).parse_sents(map(words, test))
    scores = evaluate(test, found).figures()
    return Row(kept, scores["f1"], scores["f1_all"], training.figures()[training.shown[-1]], seconds, made_with)


def _log(row: Row, run: Run) -> None:
    """TensorBoard: lines over the number of components; that of all of them stands at 0."""
    for name in ("f1", "f1_all", "log_likelihood", "seconds"):
        run.board.add_scalar(f"components/{name}", getattr(row, name), row.kept)
    run.board.flush()
