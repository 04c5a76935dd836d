"""That the benchmarks of parsing and of posteriors work, at a size that tells nothing."""

import importlib.util
import os
import sys
from contextlib import nullcontext

import pytest
import torch
from running import ROOT

from lvpcfg import Parser, corpus, train, write_trees

JAVA = """#!/bin/sh
[ "$5" = grammar.gr ] || exit 1
sed 's/[^ ][^ ]*/(NN &)/g; s/.*/( (S &))/'
"""


@pytest.fixture
def benchmark(request):
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / f"benchmarks/{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("benchmark", ["parse"], indirect=True)
def test_parsing_beside_others(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, trees = "model", "dev.mrg"  # short, for the table
    monkeypatch.setattr(benchmark, "corpus", lambda split: corpus(split)[:100])
    train(corpus("train")[:100], "em", states=2, iterations=1).save(model)
    write_trees(sorted(corpus("dev"), key=lambda tree: len(tree.leaves()))[20:22], trees)
    java = tmp_path / "bin/java"
    java.parent.mkdir()
    java.write_text(JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{java.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(
        benchmark, "alone", lambda *_: {"times": [1, 1, 1], "peak": 77, "looser": 0, "fallbacks": 1}
    )  # a process of its own takes seconds to begin
    monkeypatch.setattr(benchmark, "workers", lambda folders, *_, **__: nullcontext(Parser.load(folders)))
    arguments = [
        "--processes",
        "2",
        "--model",
        model,
        "--trees",
        trees,
        "--compress",
        "1",
        "1",
        "--product",
        model,
        model,
    ]
    arguments += ["--exhaustive", "1", "--long", "5", "--peer-sentences", "1", "--peer-length", "4"]
    arguments += ["berkeley_jar=some_parser.jar", "--berkeley-grammar", "grammar.gr"]
    monkeypatch.setattr(sys, "argv", ["parse.py", *arguments])
    benchmark.main()
    printed = capsys.readouterr().out.replace("\n", " ")
    for text in ("r = 1, t = 1", "product of 2", "prune = 0", "77 MB, flat", "NLTK", "torch-struct", "Berkeley parser"):
        assert text in printed
    assert "100.0 % of the trees" in printed


@pytest.mark.parametrize("benchmark", ["reliability"], indirect=True)
def test_reliability(benchmark, tmp_path, monkeypatch, capsys):
    train(corpus("train")).save(tmp_path / "model")
    write_trees([tree for tree in corpus("dev") if len(tree.leaves()) < 8][:30], tmp_path / "dev.mrg")
    options = {"model": "model", "trees": "dev.mrg", "output": "x.png"}
    arguments = [text for name, path in options.items() for text in (f"--{name}", str(tmp_path / path))]
    monkeypatch.setattr(sys, "argv", ["reliability.py", *arguments])
    benchmark.main()
    assert capsys.readouterr().out.count("calibrated") >= 6
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("benchmark", ["spectral"], indirect=True)
def test_spectral(benchmark, tmp_path, monkeypatch, capsys):
    write_trees(corpus("train")[:100], tmp_path / "train.mrg")
    write_trees([tree for tree in corpus("dev") if len(tree.leaves()) < 6][:4], tmp_path / "dev.mrg")
    monkeypatch.setattr(benchmark, "PRODUCT", 2)
    paths = {"train": "train.mrg", "dev": "dev.mrg", "table": "x.csv", "picture": "x.png"}
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(tmp_path / path))]
    arguments += ["--sizes", "2", "--rows"]
    monkeypatch.setattr(sys, "argv", ["spectral.py", *arguments, "spectral", "product of clusters"])
    benchmark.main()
    assert "product of clusters" in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 1000
    monkeypatch.setattr(sys, "argv", ["spectral.py", *arguments, "features not scaled", "--ablations"])
    benchmark.main()
    assert (tmp_path / "x.csv").read_text().splitlines()[1].startswith("features not scaled,2,1,")


@pytest.mark.parametrize("benchmark", ["spectral"], indirect=True)
def test_a_level_of_back_off_is_left_out(benchmark):
    levels = [torch.tensor(float(number)) for number in (8, 4, 2, 1)]
    assert benchmark.Without(-2)(levels, 0.5) == 0.5 * 8 + 0.25 * 4 + 0.25 * 1
    assert benchmark.Without(-3)(levels[1:], 0.5) == 0.5 * 4 + 0.25 * 2 + 0.25 * 1  # a unary rule has no such level


@pytest.mark.parametrize("benchmark", ["sequences"], indirect=True)
def test_sequences(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "LENGTH", 10)
    monkeypatch.setattr(benchmark, "HELD_OUT", 5)
    arguments = ["--words", "500", "1000", "--states", "2", "--symbols", "5", "--seeds", "1", "--iterations", "2"]
    arguments += ["--error-states", "20", "--ranks", "2", "4", "--rank", "3", "--sizes", "8", "16"]
    monkeypatch.setattr(sys, "argv", ["sequences.py", *arguments, "--output", str(tmp_path / "x.png")])
    benchmark.main()
    printed = capsys.readouterr().out
    for text in ("2 states, 5 symbols", "NMF", "exact: CPU seconds ~ states ^", "rank 3: CPU seconds ~ states ^"):
        assert text in printed
    assert (tmp_path / "x.png").stat().st_size > 1000
