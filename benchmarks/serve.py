"""Requests a second of job=serve, and how long each waits: parsed together, and one by one.

    python benchmarks/serve.py --model DIR --trees dev.mrg

Clients at once, each of which sends a sentence, waits for its tree and sends the next one. The server is a process of
its own; its contenders differ in `batch_sentences` alone and are measured in turns. Every answer has to have the words
that were sent.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from lvpcfg import corpus, read_trees
from lvpcfg.trees.walk import words

ROOT = Path(__file__).parents[1]
QUANTILES = (0.5, 0.95, 0.99)
LONGEST = 40  # words


@contextmanager
def server(model: str, batch: int, folder: str):
    """Its address."""
    options = ["job=serve", f"model={model}", "port=0", "device=cpu", f"batch_sentences={batch}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *options, f"hydra.run.dir={folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().split(" at ")[1].split(",")[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


async def load(url: str, sentences: Sequence[list[str]], clients: int, seconds: float) -> list[tuple[float, float]]:
    """When each request was sent and when it was answered."""
    found = list[tuple[float, float]]()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as http:
            place = number
            while (begin := time.perf_counter()) < end:
                given = sentences[place % len(sentences)]
                answer = await http.post("/parse", json={"sentences": [given]})
                answer.raise_for_status()
                assert answer.json()["results"][0]["words"] == given
                found.append((begin, time.perf_counter()))
                place += clients

    await asyncio.gather(*(client(number) for number in range(clients)))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, help="folder of a model")
    arguments.add_argument("--trees", help="file of trees whose words are sent; else those of the embedded corpus")
    arguments.add_argument("--clients", type=int, nargs="+", default=[1, 16, 100, 400])
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="batch_sentences of the contenders")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options = arguments.parse_args()
    trees = corpus("dev") if options.trees is None else read_trees(options.trees)
    sentences = [some for tree in trees if len(some := words(tree)) <= LONGEST]
    table = Table("clients", "batch_sentences", "requests/s", *(f"{100 * share:g} %, ms" for share in QUANTILES))
    for clients in options.clients:
        for batch in options.batches:
            with tempfile.TemporaryDirectory() as folder, server(options.model, batch, folder) as url:
                asyncio.run(load(url, sentences, min(clients, 8), 1.0))  # what is made once is made now
                found = asyncio.run(load(url, sentences, clients, options.seconds))
            times = np.array(found)
            waits = 1000 * (times[:, 1] - times[:, 0])
            rate = len(times) / (times[:, 1].max() - times[:, 0].min())
            shown = (f"{value:,.0f}" for value in np.quantile(waits, QUANTILES))
            table.add_row(str(clients), str(batch), f"{rate:.1f}", *shown)
    Console().print(table)


if __name__ == "__main__":
    main()
