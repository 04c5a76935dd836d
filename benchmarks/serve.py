"""Requests a second of job=serve, and how long each waits: parsed together, and one by one.

    python benchmarks/serve.py --model DIR --trees dev.mrg

Clients at once, each of which sends a sentence, waits for its tree and sends the next one. The server is a process of
its own; those that are compared differ in `batch_sentences` alone. Every answer has to have the words that were sent.
Requests per CPU second of the server say how much work one is, whatever else the machine does.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lvpcfg import corpus, read_trees
from lvpcfg.trees.walk import words

ROOT = Path(__file__).parents[1]
QUANTILES = (0.5, 0.95, 0.99)
LONGEST = 40  # words
HEAD = b"POST /parse HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


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
    host, port = url.removeprefix("http://").strip("/").split(":")
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        place = number
        while (begin := time.perf_counter()) < end:
            given = sentences[place % len(sentences)]
            body = json.dumps({"sentences": [given]}).encode()
            writer.write(HEAD % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            answer = json.loads(await reader.readexactly(int(length.split()[1])))
            assert answer["results"][0]["words"] == given
            found.append((begin, time.perf_counter()))
            place += clients
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return found


def cpu_seconds(url: str) -> float:
    """Of the server, so far."""
    with urllib.request.urlopen(f"{url}health") as answer:
        return float(json.load(answer)["cpu_seconds"])


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
    table = Table(
        "clients", "batch_sentences", "requests/s", "a CPU second", *(f"{100 * share:g} %, ms" for share in QUANTILES)
    )
    for clients in options.clients:
        for batch in options.batches:
            with tempfile.TemporaryDirectory() as folder, server(options.model, batch, folder) as url:
                asyncio.run(load(url, sentences, min(clients, 8), 1.0))  # what is made once is made now
                before = cpu_seconds(url)
                found = asyncio.run(load(url, sentences, clients, options.seconds))
                cpu = cpu_seconds(url) - before
            times = np.array(found)
            waits = 1000 * (times[:, 1] - times[:, 0])
            rate = len(times) / (times[:, 1].max() - times[:, 0].min())
            shown = (f"{value:,.0f}" for value in np.quantile(waits, QUANTILES))
            table.add_row(str(clients), str(batch), f"{rate:.1f}", f"{len(times) / cpu:.1f}", *shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
