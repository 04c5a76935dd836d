"""Pieces of a corpus on a Ray cluster, by Ray Data.

One task reads the corpus and cuts it; its pieces go one by one to a pool of actors, each with the model to itself; what
they make of them comes back here. An actor that dies is started again, and its piece given to another. Ray Data keeps
neither order nor numbers: which pieces are done is known from the parts of the output.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lvpcfg.batch import pieces
from lvpcfg.batch.formats import AnyWriter
from lvpcfg.batch.pieces import Parsed, Piece
from lvpcfg.errors import InputError
from lvpcfg.jobs.parsing import make_parser
from lvpcfg.parser import Parser

if TYPE_CHECKING:
    from pandas import DataFrame

    from lvpcfg.jobs.parse import ParseOptions

READING = 0.25  # of a CPU, for the task that reads


@dataclass(frozen=True)
class Cluster:
    options: "ParseOptions"
    writer: AnyWriter
    device: str
    cpus: float  # of each actor

    def results(self, work: Iterable[Piece]) -> Iterator[Parsed]:
        from ray.data import ActorPoolStrategy, read_datasource

        actors = ActorPoolStrategy(size=self.options.processes)
        arguments = (self.options.model, self.options.parser() | {"device": self.device}, self.options.threads)
        done = read_datasource(_source(work), num_cpus=READING, override_num_blocks=1).map(
            Actor,
            fn_constructor_args=(*arguments, self.writer),
            compute=actors,
            num_cpus=self.cpus,
            num_gpus=int(self.device == "cuda"),
        )
        for row in done.iter_rows():
            parsed = Parsed.from_bytes(row["parsed"])
            assert parsed is not None
            yield parsed


class Actor:
    """A parser in a process of its own, on some machine."""

    def __init__(self, model: Any, options: dict[str, Any], threads: int, writer: AnyWriter) -> None:
        torch.set_num_threads(threads)
        self.parser, self.parse = Parser.load(model, **options), partial(pieces.parse, writer=writer)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"parsed": self.parse(self.parser, Piece.from_json(row["piece"])).to_bytes()}


@contextmanager
def cluster(options: "ParseOptions", writer: AnyWriter) -> Iterator[Cluster]:
    """The cluster that RAY_ADDRESS names, or this machine."""
    try:
        import ray
        from ray.data import DataContext
    except ImportError:
        raise InputError("backend=ray needs Ray: pip install 'lvpcfg[ray]'.") from None
    make_parser(options.model, options, "parse")  # what is wrong with them shows here
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"Ray cannot be started or reached: {str(error).splitlines()[0]}") from None
    try:
        context = DataContext.get_current()
        context.target_max_block_size = 1  # a piece goes on its way when it is read
        context.enable_progress_bars = False
        yield Cluster(options, writer, *_resources(options, ray.cluster_resources()))
    finally:
        ray.shutdown()


def _resources(options: "ParseOptions", available: dict[str, float]) -> tuple[str, float]:
    """The device of each actor, and its share of the CPUs. Together with the task that reads, no more is asked for than
    there is: Ray would wait for ever."""
    cpus, gpus, actors = available.get("CPU", 0), available.get("GPU", 0), options.processes
    device = options.device or ("cuda" if gpus >= actors else "cpu")
    if actors > cpus or (device == "cuda" and actors > gpus):
        raise InputError(
            f"processes is {actors}, for a Ray cluster of {cpus:g} CPUs and {gpus:g} GPUs: expected no more actors "
            "than there are of what they need."
        )
    return device, min(1.0, (cpus - READING) / actors)


def _source(work: Iterable[Piece]) -> Any:
    """Rows of one piece each, for Ray Data."""
    from pandas import DataFrame
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Source(Datasource):
        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
            unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ReadTask(rows, unknown)]

        def estimate_inmemory_data_size(self) -> None:
            """Not known before the corpus is read."""

    def rows() -> "Iterator[DataFrame]":
        for piece in work:
            yield DataFrame({"piece": [piece.to_json()]})

    return Source()
