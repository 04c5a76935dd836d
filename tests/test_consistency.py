"""The method of moments comes nearer to the truth with more trees; benchmarks/consistency.py measures it."""

import csv
import importlib.util
import logging
import sys

import pytest
import torch
from running import ROOT

import lvpcfg
from lvpcfg import build_treebank
from lvpcfg.grammar.expectations import spectral_radius


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("consistency", ROOT / "benchmarks/consistency.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_truth_is_a_tight_grammar(benchmark):
    grammar = benchmark.truth().grammar
    torch.testing.assert_close(grammar.row_sums(), torch.ones(len(grammar.root), dtype=torch.float64))
    assert float(grammar.root.sum()) == pytest.approx(1)
    assert spectral_radius(grammar) < 0.8


def test_the_errors_fall_as_one_over_the_root_of_the_number_of_trees(benchmark):
    truth = benchmark.truth()
    compared = benchmark.Compared(truth, 100)
    assert compared.errors(truth) == (0, 0)
    errors = torch.zeros(2, 2, dtype=torch.float64)  # [sizes, kinds]
    for row, size in enumerate((500, 8000)):
        for seed in (0, 1):
            bank = build_treebank(benchmark.drawn(truth, size, seed))
            errors[row] += torch.tensor(compared.errors(benchmark.estimated("spectral", bank)))
    few, many = errors / 2
    assert bool((2 * many < few).all()), errors  # 4 times, but for chance
    assert float(many[0]) < 0.25
    assert float(many[1]) < 0.02


def test_one_state_for_each_symbol_is_not_enough(benchmark):
    truth = benchmark.truth()
    compared = benchmark.Compared(truth, 100)
    bank = build_treebank(benchmark.drawn(truth, 8000, 0))
    assert compared.errors(benchmark.estimated("spectral", bank, states=1))[0] > 0.5


def test_a_symbol_whose_nodes_all_look_alike_is_reported(benchmark, caplog):
    truth = benchmark.truth()
    bank = build_treebank(benchmark.drawn(truth, 2000, 0))
    with caplog.at_level(logging.INFO):
        model = benchmark.estimated("spectral", bank)
    about = model.provenance["symbols"]
    assert all(value < 1e-9 for value in about["S"]["singular_values"])  # nothing is around a root
    assert about["S"]["inside"] == []
    assert about["NP"]["singular_values"][0] > 0.1
    states = dict(zip(model.grammar.symbols.names, model.grammar.states.tolist(), strict=True))
    assert states == {name: 1 + (name != "S") for name in states}
    (message,) = [record.getMessage() for record in caplog.records if "singular" in record.getMessage()]
    assert message.startswith("Too few singular values count for all states of 1 symbols: S 1 of 2 (")
    assert lvpcfg.Parser(model, device="cpu").parse(["d1", "n1", "v1"]).leaves() == ["d1", "n1", "v1"]


def test_the_command_writes_a_table_and_a_picture(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "COMPARED", 20)
    monkeypatch.setitem(benchmark.ESTIMATES["em"], "iterations", 2)
    monkeypatch.setattr(sys, "argv", ["consistency.py", "--sizes", "600", "1200", "--seeds", "0"])
    benchmark.main()
    assert "em: slopes" in capsys.readouterr().out
    with open("consistency.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["estimator"], row["size"]) for row in rows] == [
        (name, size) for size in ("600", "1200") for name in ("spectral", "em")
    ]
    assert all(0 < float(row["trees"]) < 10 for row in rows)
    assert (tmp_path / "consistency.png").read_bytes().startswith(b"\x89PNG")


def test_the_slope_is_that_of_a_power(benchmark):
    rows = [benchmark.Row("em", size, 0, 3 * size**-0.5, 2 / size, 1.0) for size in (100, 1000, 5000)]
    assert benchmark.slope(rows, "em", "trees") == pytest.approx(-0.5)
    assert benchmark.slope(rows, "em", "marginals") == pytest.approx(-1)
