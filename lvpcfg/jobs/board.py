"""What TensorBoard shows of a training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nltk.tree import Tree
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lvpcfg.evaluation.pictures import draw_states
from lvpcfg.evaluation.tree_pictures import draw_trees
from lvpcfg.jobs.run import peak_memory
from lvpcfg.trees.walk import words

OF_TREES = ("precision", "recall", "f1", "f1_all", "unlabelled_sentence_f1", "tagging_accuracy", "errors")
DEV = (*OF_TREES, "token_accuracy", "sentence_accuracy", "unknown_accuracy")
SAMPLES, LENGTH = 3, 10  # so many sentences, of about so many words, are drawn


class Board:
    """The TensorBoard log of one training; its steps are those of the estimator."""

    def __init__(self, folder: Path, step: int, config: str, options: dict[str, Any], best: Sequence[str]) -> None:
        """What an earlier run wrote from `step` on is forgotten; the HParams tab compares trainings by `best`."""
        self.best = best
        self.writer = SummaryWriter(str(folder), purge_step=step, flush_secs=10)
        self.writer.add_text("config", f"```yaml\n{config}\n```")
        # Not add_hparams, which would put them into a run of their own.
        experiment, begin, self.end = hparams(_flat(options), {f"best/{name}": 0.0 for name in best})
        self._add(experiment)
        self._add(begin)

    def _add(self, summary: Any) -> None:
        assert self.writer.file_writer is not None
        self.writer.file_writer.add_summary(summary)

    def iteration(self, step: int, figures: dict[str, float], seconds: float) -> None:
        self._scalars(step, figures)
        self._scalars(step, {"seconds_per_iteration": seconds, "memory_mb": _memory()})

    def record(
        self,
        step: int,
        states: dict[str, list[tuple[str, int]]],
        record: dict[str, float],
        best: dict[str, float],
    ) -> None:
        """`states` are those of symbols, in columns."""
        self._scalars(step, {f"dev/{name}": record[name] for name in DEV if name in record})
        self._scalars(step, {f"best/{name}": best[name] for name in self.best if name in best})
        self.writer.add_figure(
            "states_per_symbol", draw_states({title: some for title, some in states.items() if some}), step
        )
        self.writer.flush()

    def _scalars(self, step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def parses(self, step: int, gold: list[Tree], found: list[Tree]) -> None:
        """The same few sentences each time."""
        for i in _some([len(words(tree)) for tree in gold]):
            figure = draw_trees({"gold": gold[i], "predicted": found[i]}, gold="gold")
            self.writer.add_figure(f"parses/sentence_{i + 1}", figure, step)

    def tags(self, step: int, gold: Sequence[Sequence[tuple[str, str]]], found: Sequence[Sequence[str]]) -> None:
        """The same few sentences each time, a word a line; tags that are wrong are set off."""
        for number, i in enumerate(_some([len(sentence) for sentence in gold]), 1):
            rows = (
                f"| {word} | {tag} | {mine if mine == tag else f'**{mine}**'} |"
                for (word, tag), mine in zip(gold[i], found[i], strict=True)
            )
            text = "\n".join(("| word | gold | predicted |", "|---|---|---|", *rows))
            self.writer.add_text(f"tags/sentence_{number}", text, step)

    def close(self, finished: bool) -> None:
        if finished:
            self._add(self.end)
        self.writer.close()


def _some(lengths: Sequence[int]) -> list[int]:
    """Sentences of about the length to be shown."""
    return sorted(range(len(lengths)), key=lambda i: abs(lengths[i] - LENGTH))[:SAMPLES]


def _memory() -> float:
    """The most that was in use so far, on CUDA if it was used, in MB."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_memory()


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Dotted names to what TensorBoard can show: it knows no None, and its pages no infinity."""
    values: dict[str, bool | int | float | str] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            values |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            values[prefix + name] = value
        else:
            values[prefix + name] = str(value)
    return values
