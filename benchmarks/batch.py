"""Sentences a second of job=parse: one process, several, torchrun, Ray; and what it costs that no line is ever lost.

    python benchmarks/batch.py --model DIR --input sentences.txt

Each contender is a command in processes of its own. They parse the same file in turns, and the fastest of several
rounds counts. `parser alone` parses the same pieces of the file and keeps the trees: no manifest, no parts, no output.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
ALONE, ONE = "parser alone", "job=parse"
CONTENDERS = {  # what starts the command, and its options
    ONE: ((), ()),
    "processes=N": ((), ("processes={}",)),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node={}"), ()),
    "backend=ray": ((), ("backend=ray", "processes={}")),
}


def parse_pieces(model: str, path: str) -> None:
    """Prints how many sentences a second, for a process that calls this."""
    import torch

    from lvpcfg import Parser
    from lvpcfg.batch.pieces import pieces
    from lvpcfg.batch.records import Corpus, Reader

    torch.set_num_threads(1)
    parser = Parser.load(model, device="cpu")
    parser.parse(["."])  # what is made once is made now
    begin, kept = time.perf_counter(), []
    for piece in pieces(Corpus(((path, Reader("text")),)).records()):
        kept += parser.parse_sents([record.words for _, record in piece.records if record.words])
    print(len(kept) / (time.perf_counter() - begin))


def rate(name: str, model: str, path: str, processes: int, folder: Path) -> float:
    """Sentences a second of one contender, once it has begun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    if name == ALONE:
        command = [sys.executable, __file__, "--alone", "--model", model, "--input", path]
        return float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    start, options = ([part.format(processes) for part in parts] for parts in CONTENDERS[name])
    common = ["job=parse", f"model={model}", f"input={path}", f"output={folder / 'trees.mrg'}", "device=cpu"]
    command = [sys.executable, *start, str(ROOT / "run.py"), *common, *options, f"hydra.run.dir={folder / 'run'}"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    result = json.loads((folder / "run/result.json").read_text())
    shutil.rmtree(folder / "run")
    return float((result["sentences"] - result["first_sentences"]) / (result["seconds"] - result["first_seconds"]))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, help="folder of a model")
    arguments.add_argument("--input", required=True, help="file of tokenised sentences, some thousands of them")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--contenders", nargs="+", default=[ALONE, *CONTENDERS], choices=[ALONE, *CONTENDERS])
    arguments.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.alone:
        parse_pieces(options.model, options.input)
        return
    best = dict.fromkeys(options.contenders, 0.0)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=options.rounds * len(best)) as bar:
        for _ in range(options.rounds):
            for name in best:
                bar.set_description(name)
                found = rate(name, options.model, options.input, options.processes, Path(folder))
                best[name] = max(best[name], found)
                bar.update()
    table = Table("", "sentences/s", f"to {ONE}")
    for name, found in best.items():
        table.add_row(name.replace("N", str(options.processes)), f"{found:.1f}", f"{found / best[ONE]:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
