"""The trainings of job=train: looks at dev, the best model, checkpoints, restarts, TensorBoard."""

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg import processes
from lvpcfg.device import usable_device
from lvpcfg.errors import InputError, show
from lvpcfg.estimate.checkpoint import Checkpoint
from lvpcfg.estimate.estimator import Estimator, Step
from lvpcfg.grammar.model import Model
from lvpcfg.jobs.material import Material, Record, TreeMaterial, read_material
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.train import TrainOptions
from lvpcfg.registry import ESTIMATORS

if TYPE_CHECKING:
    from lvpcfg.jobs.board import Board

MATTER = ("estimator", "binarisation", "signature", "seed", "data", "decoder")  # what sweeps may want to compare


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end a job are not heard while it ends. torchrun sends one when another process has ended."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears them
        yield
        return
    ends = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in ends]
    try:
        yield
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def run(config: TrainOptions, run: Run) -> None:
    _look_around(config, run)
    if not config.resume:
        run.begin()
    trainings = train(read_material(config, run), config, run)
    if processes.is_first():
        conclude(trainings, run)


def _look_around(config: TrainOptions, run: Run) -> None:
    """A training is never written over, and what a crash left half-written is removed."""
    checkpoints = sorted(run.folder.glob("checkpoint*.safetensors"))
    if checkpoints and not config.resume:
        raise InputError(
            f"{run.folder} holds a training already: resume=true goes on with it, hydra.run.dir=FOLDER chooses "
            "another folder."
        )
    if checkpoints and not _checkpoint_path(config, run, 0).exists():
        raise InputError(
            f"{checkpoints[0]} was not made with restarts={config.restarts}: resume with the same number, or in "
            "another folder."
        )
    if config.resume and not checkpoints:
        run.say(f"There is no checkpoint in {run.folder}: training begins anew.")
    if not processes.is_first():
        return
    for left in (*run.folder.glob(".checkpoint*.tmp"), *run.folder.glob("model*/.model.*.tmp")):
        left.unlink()


def _checkpoint_path(config: TrainOptions, run: Run, restart: int) -> Path:
    return run.folder / f"checkpoint{_suffix(config, restart)}.safetensors"


def _suffix(config: TrainOptions, restart: int) -> str:
    return f"_{restart}" if config.restarts > 1 else ""


def estimate(trees: list[Tree], gold: list[Tree], config: TrainOptions, run: Run) -> Model:
    """Trains on `trees` and keeps the model that is best on `gold`; without gold trees, the last one."""
    trainings = train(TreeMaterial(trees, gold, config), config, run)
    conclude(trainings, run)
    return Model.load(run.folder / "model")


def train(material: Material, config: TrainOptions, run: Run) -> "list[Training]":
    trainings: list[Training] = []
    for restart in range(config.restarts):
        training = Training(material, config, run, restart, trainings)
        if config.resume and restart == 0:
            run.begin()  # now that the checkpoint has been accepted
        training.finish()
        trainings.append(training)
    return trainings


def conclude(trainings: "list[Training]", run: Run) -> None:
    """What is to be said of the best model."""
    best = max(trainings, key=Training.score)
    about = best.material.about(run.folder / "model")
    report(*about, run)
    run.chosen_by = best.chosen_by
    for training in trainings:
        training.show()
    run.result |= best.best | {f"last_{name}": value for name, value in best.records[-1].items()}
    run.result |= {"seed": best.seed, "train_seconds": sum(training.seconds for training in trainings)}
    best.material.warn(run.folder / "model", run)
    if len(trainings) > 1:
        run.say(f"The best of {len(trainings)} restarts is the one with seed {best.seed}.")


class Training:
    """One training, from one seed: its estimator, its records and its files."""

    def __init__(
        self,
        material: Material,
        config: TrainOptions,
        run: Run,
        restart: int,
        rivals: "list[Training]",
    ) -> None:
        """`rivals` are the restarts before this one."""
        self.material, self.gold = material, bool(material.gold)
        self.config, self.run, self.rivals = config, run, rivals
        self.suffix, self.path = _suffix(config, restart), _checkpoint_path(config, run, restart)
        self.seed = config.seed + restart
        device = processes.own_device(usable_device(config.device))
        task = material.task(self.seed, str(device))
        self.estimator: Estimator = ESTIMATORS[config.estimator.name].run(config.estimator, task)
        self.records: list[Record] = []  # of the models that were looked at
        self.seconds = 0.0  # of all steps
        if config.resume and self.path.exists():
            self._load()
            ready = f"goes on after iteration {self.estimator.done}" if self._is_open() else "is finished already"
            run.say(f"The training in {self.path} {ready}.")
        self.checkpoint = self._make_checkpoint()
        start = [self.checkpoint.made_of, self.checkpoint.done, self.records, self._chosen_by]
        processes.expect_same("trees or checkpoints", start)

    def _make_checkpoint(self) -> Checkpoint:
        notes = {"records": [*self.records], "seconds": self.seconds, "chosen_by": self._chosen_by}
        return self.estimator.checkpoint(notes)

    def _load(self) -> None:
        notes = self.estimator.load(self.path)
        for name, mine in self._chosen_by.items():
            if notes["chosen_by"][name] != mine:
                raise InputError(
                    f"{show(str(self.path), 200)} was made with another {name}: resume with the same one, or in "
                    "another folder."
                )
        self.records, self.seconds = notes["records"], notes["seconds"]

    @cached_property
    def _chosen_by(self) -> dict[str, str]:
        """What the best model depends on beside the training itself."""
        digest = hashlib.sha256(self.material.gold_text().encode()).hexdigest()
        return {"data.dev": digest, "decoder": str(self.config.decoder), "prune": str(self.config.prune)}

    @property
    def best(self) -> Record:
        return max(self.records, key=lambda record: record[self.chosen_by]) if self.gold else self.records[-1]

    def score(self) -> float:
        return self.best[self.chosen_by if self.gold else self.objective]

    @property
    def chosen_by(self) -> str:
        return self.material.chosen_by

    @property
    def objective(self) -> str:
        """The figure that tells how well the estimator did, where there are no dev trees."""
        return self.estimator.shown[-1]

    def finish(self) -> None:
        """Does the steps that are still to come."""
        estimator, config = self.estimator, self.config
        if not self._is_open():
            return
        title = f"restart {self.suffix[1:]}" if self.suffix else "training"
        with (
            self._saved_if_stopped(),
            self._board() as board,
            tqdm(total=len(estimator.steps), initial=estimator.done, desc=title, unit="iteration", disable=None) as bar,
        ):
            if self._is_due():
                self._look(board, bar)
                if estimator.done:  # it was stopped while it was looked at
                    self._save()
            begin = time.perf_counter()
            for _ in () if self._gave_up() else estimator.run():
                seconds = time.perf_counter() - begin
                self.seconds += seconds
                figures = estimator.figures()
                if board:
                    board.iteration(estimator.done, figures, seconds)
                self.checkpoint = self._make_checkpoint()  # and the tensors before this step are let go
                if self._is_due():
                    self._look(board, bar)
                if estimator.done % config.checkpoint_every == 0 or estimator.finished:
                    self._save()
                bar.set_postfix_str(_said(self.objective, figures[self.objective]), refresh=False)
                bar.update()
                if self._gave_up():
                    self._save()
                    break
                begin = time.perf_counter()

    def _save(self) -> None:
        if processes.is_first():
            self.checkpoint.save(self.path)

    @contextmanager
    def _saved_if_stopped(self) -> Iterator[None]:
        """Whatever stops a training, the steps that are done stay done."""
        try:
            yield
        except BaseException as reason:
            if self.estimator.steps:
                with _undisturbed():
                    self._save()
                if isinstance(reason, KeyboardInterrupt | SystemExit | processes.LostError):
                    done, steps = self.checkpoint.done, len(self.estimator.steps)
                    self.run.say_how_to_go_on(f"{done} of {steps} iterations")
            raise

    @contextmanager
    def _board(self) -> Iterator["Board | None"]:
        """That of the first process."""
        if not processes.is_first():
            yield None
            return
        from lvpcfg.jobs.board import Board  # a second that other jobs need not wait

        settings = asdict(self.config) | {"seed": self.seed}
        options = {name: settings[name] for name in MATTER}
        folder = self.run.folder / "tensorboard" / (f"restart{self.suffix}" if self.suffix else "")
        step = self.estimator.done + 1 if self.records else 0
        try:
            board = Board(folder, step, self.run.config, options, best=(self.chosen_by, self.objective))
            try:
                yield board
            finally:
                board.close(self.estimator.finished)
        except OSError as error:  # the disk is full; all else that is written says so itself
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"cannot write {show(str(folder), 200)}: {reason}.") from None

    def _is_open(self) -> bool:
        return self._is_due() or not (self.estimator.finished or self._gave_up())

    def _gave_up(self) -> bool:
        """Whether the last looks at dev, as many as patience allows, found nothing better."""
        if not self.gold or not self.config.patience or not self.records:
            return False
        return len(self.records) - 1 - self.records.index(self.best) >= self.config.patience

    def _step(self, done: int) -> Step | None:
        """The step that made the model after so many steps; None where there is no model yet."""
        return self.estimator.steps[done - 1] if done else self.estimator.start

    def _is_due(self) -> bool:
        """Whether the model as it is now shall be looked at, and was not."""
        done, step = self.estimator.done, self._step(self.estimator.done)
        if step is None or (self.records and self.records[-1]["iterations"] == done):
            return False
        sometimes = step.evaluate == "sometimes" and done % self.config.evaluate_every == 0
        return step.evaluate == "always" or sometimes or self.estimator.finished

    def _look(self, board: "Board | None", bar: "tqdm[NoReturn]") -> None:
        """Records the figures of the model as it is now, and saves it if it is the best so far.

        All processes learn what the first one finds, so that they decide alike.
        """
        estimator = self.estimator
        model = estimator.model()
        record: Record = {"iterations": estimator.done} | estimator.figures() | {"seconds": self.seconds}
        if self.gold and board:
            figures, found = self.material.look(model)
            record |= figures
            self.material.show(board, estimator.done, found)
        record = processes.from_first(record)
        self.records.append(record)
        if board:
            self._keep(model, record)
        self.checkpoint = self._make_checkpoint()
        if board:
            board.record(estimator.done, self.material.states(model), record, self.best)
        with bar.external_write_mode():
            self.run.say(self._line(record))

    def _keep(self, model: Any, record: Record) -> None:
        """Saves the model that belongs to the last record, if it is the best so far."""
        folder = self.run.folder
        if record is self.best:
            if self.suffix:
                model.save(folder / f"model{self.suffix}")
            # Without dev, what the last step leaves is what a restart is like.
            if not self.rivals or (
                (self.gold or self.estimator.finished) and self.score() > max(rival.score() for rival in self.rivals)
            ):
                model.save(folder / "model")

    def _line(self, record: Record) -> str:
        text = f"{self._title(record)}: " + ", ".join(_said(name, record[name]) for name in self.estimator.shown)
        if self.gold:
            text += f", {self.material.line(record)}"
        return text + (", the best so far" if record is self.best else "")

    def _title(self, record: Record) -> str:
        step = self._step(int(record["iterations"]))
        assert step is not None
        return step.title

    def show(self) -> None:
        """All records, as a table."""
        shown = self.estimator.shown
        scores = {name: title for name, title in self.material.columns.items() if name in self.records[-1]}
        rows, before = [], 0.0
        for record in self.records:
            row = [self._title(record) + " *" * (record is self.best), *(_number(record[name]) for name in shown)]
            if self.gold:
                row += [f"{record[name]:.2f}" if type(record[name]) is float else str(record[name]) for name in scores]
            rows.append([*row, f"{record['seconds'] - before:.1f}"])
            before = record["seconds"]
        columns = [_spoken(name).replace("log-likelihood", "log p").replace("/", "\nper ") for name in shown]
        columns = ["", *columns, *(scores.values() if self.gold else ()), "seconds"]
        where = ", scores on dev, * the best" if self.gold else ""
        self.run.table(f"Training with seed {self.seed}{where}", columns, rows)


def _said(name: str, number: float) -> str:
    """A figure in a sentence: "75 states", "log-likelihood/word -4.7249"."""
    return f"{_number(number)} {_spoken(name)}" if isinstance(number, int) else f"{_spoken(name)} {_number(number)}"


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.4f}"


def _spoken(name: str) -> str:
    return name.replace("log_likelihood", "log-likelihood").replace("_per_", "/").replace("_", " ")


def report(title: str, sizes: dict[str, int], run: Run) -> None:
    """The size of a grammar or a tagger, as a table and as figures."""
    run.result.update(sizes)
    rows = [[name.replace("_", " "), f"{size:,}"] for name, size in sizes.items()]
    run.table(title, ["", "number"], rows)
    run.say(f"The model is in {run.folder / 'model'}.")
