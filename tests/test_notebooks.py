"""The notebooks run, and are committed with outputs, so that they can be read."""

import json
import sys

import pytest
from pages import ROOT

PRINTED = {  # what each notebook prints
    "first_steps": ["p(tree | sentence) = ", "split-merge    F1 "],
    "grammar_layer": ["log p(tree | words), a tree:", "zorbified", "grammar.binary_values"],
    "latent_states": ["VBD-0", "VP-0"],
    "spectral": ["spectral     1000", "em           1000", "NP: 8 states", "inside  "],
    "tradeoff": ["m=16 als r=2 t=0.1 ", "m=1 apr r=40", "of the exact time, F1"],
}
LARGEST = 250_000  # bytes of a notebook


def code(name):
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_all_notebooks_are_here():
    assert {path.stem for path in ROOT.glob("notebooks/*.ipynb")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_a_notebook_runs(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", [*sys.path])  # what a notebook adds goes again
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LVPCFG_TRADEOFF", str(tmp_path / "out"))
    monkeypatch.setenv("LVPCFG_TREES", "1000")
    exec("\n".join("".join(cell["source"]) for cell in code(name)), {"__name__": "notebook"})
    printed = capfd.readouterr().out
    for text in PRINTED[name]:
        assert text in printed


@pytest.mark.parametrize("name", PRINTED)
def test_a_notebook_has_its_outputs(name):
    cells = code(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run all cells, in order"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any(output["output_type"] == "stream" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    for output in outputs:
        assert str(ROOT) not in json.dumps(output)
    assert (ROOT / f"notebooks/{name}.ipynb").stat().st_size < LARGEST
