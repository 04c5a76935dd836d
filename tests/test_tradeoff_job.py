"""job=tradeoff: its rows, what it leaves, how it is stopped and taken up; the notebook that reads them."""

import json
import math
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from running import begin, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lvpcfg import InputError, Model, Parser, compress, corpus, train, write_trees
from lvpcfg.decompose.compress import ALSOptions, fit_rules
from lvpcfg.decompose.dense import divergence
from lvpcfg.evaluation.evalb import evaluate
from lvpcfg.evaluation.pictures import draw_tradeoff
from lvpcfg.evaluation.tradeoff import read_rows, write_rows
from lvpcfg.jobs import candidates
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.jobs.tradeoff import Settings
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words

LENGTH = 12
CHOSEN = Settings(ranks=[1, 2], thresholds=[1.0, 1e-3, 0], terms=[5, 40], max_length=LENGTH)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A grammar with latent states, one without, and a few trees."""
    folder = tmp_path_factory.mktemp("models")
    trees = corpus("train")[:200]
    train(trees, estimator="em", states=4, iterations=5).save(folder / "latent")
    train(trees).save(folder / "pcfg")
    write_trees(corpus("dev")[:24], folder / "gold.mrg")
    models = [str(folder / name) for name in ("latent", "pcfg")]
    return {"model": models, "gold": str(folder / "gold.mrg"), "tradeoff": CHOSEN}


@pytest.fixture(scope="module")
def done(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    result, printed = run("tradeoff", folder, **files)
    return folder, result, printed


def gold_trees():
    return [tree for tree in normalise_all(corpus("dev")[:24]) if len(words(tree)) <= LENGTH]


# ---------------------------------------------------------------- what it finds


def test_every_setting_has_a_row(done):
    folder, result, printed = done
    names = ["m=4 exact", *(f"m=4 als r={r} t={t}" for r in (1, 2) for t in ("1", "0.001"))]
    names += ["m=1 exact", "m=1 cover", "m=1 svd", "m=1 apr r=5", "m=1 apr r=40"]
    rows = read_rows(folder / "tradeoff.csv")
    assert [row.setting for row in rows] == names
    for row in rows:
        assert row.setting + ":" in printed
        name = row.setting.replace(" ", "_").replace("=", "")
        assert result[f"{name}_f1"] == row.f1
        assert result[f"{name}_ratio"] == row.ratio > 0
        stages = row.coarse + row.gather + row.middle + row.plan + row.inside_outside
        assert row.seconds == pytest.approx(stages)
        assert (row.coarse > 0) == (row.states > 1)
        assert row.inside_outside > 0
        assert row.decode > 0
        assert row.sentences == len(gold_trees())
    assert [row.ratio for row in rows if row.method == "exact"] == [1, 1]
    listed = json.loads((folder / "tradeoff.json").read_text(), parse_constant=lambda _: pytest.fail("no JSON"))
    assert [row["f1"] for row in listed] == [row.f1 for row in rows]


def test_rows_are_those_of_the_compressed_models(done, files):
    folder, _, _ = done
    rows = {row.setting: row for row in read_rows(folder / "tradeoff.csv")}
    gold = gold_trees()

    def f1(model):
        found = Parser(model, device="cpu").parse_sents(map(words, gold))
        return evaluate(gold, found).figures()["f1"]

    latent, pcfg = map(Model.load, files["model"])
    fitted = fit_rules(latent.grammar, ALSOptions(rank=2))
    row = rows["m=4 als r=2 t=0.001"]
    used = fitted.gamma[fitted.gamma <= 1e-3]
    assert 0 < row.approximated == len(used) < row.rules
    assert row.gamma == pytest.approx(float(used.max()))
    assert row.numbers == latent.grammar.binary.size - row.approximated * (64 - 2 * 12)
    assert row.f1 == f1(replace(latent, grammar=fitted.within(1e-3)))
    assert math.isnan(row.kl)
    assert rows["m=4 als r=1 t=1"].share == 100
    assert rows["m=4 exact"].f1 == f1(latent)

    apr = compress(pcfg, "apr", rank=5)
    assert rows["m=1 apr r=5"].kl == pytest.approx(divergence(pcfg.grammar, apr.grammar.binary.factors))
    assert rows["m=1 apr r=5"].f1 == f1(apr)
    assert rows["m=1 cover"].kl < 1e-9 < rows["m=1 apr r=40"].kl < rows["m=1 apr r=5"].kl
    assert rows["m=1 cover"].f1 == rows["m=1 exact"].f1
    assert rows["m=1 cover"].rank == compress(pcfg, "cover").grammar.binary.factors.rank


def test_figures_are_drawn_and_logged(done):
    folder, _, printed = done
    assert (folder / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "tradeoff.svg").read_text()
    assert "inside" in printed
    log = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert log.Tags()["images"] == ["tradeoff"]
    rows = {row.setting: row for row in read_rows(folder / "tradeoff.csv")}
    line = {event.step: event.value for event in log.Scalars("f1/m=4 r=2")}
    names = ["m=4 exact", "m=4 als r=2 t=0.001", "m=4 als r=2 t=1"]
    assert line == {step: pytest.approx(rows[name].f1, abs=1e-4) for step, name in enumerate(names)}
    assert [event.step for event in log.Scalars("kl/m=1 apr")] == [5, 40]
    session = EventAccumulator(str(folder / "tensorboard/m4_als_r2_t0.001")).Reload()
    assert session.Scalars("row/f1")[0].value == pytest.approx(rows[names[1]].f1, abs=1e-4)
    assert "_hparams_/session_start_info" in session.summary_metadata


def test_the_picture_has_a_line_for_each_model_and_rank(done):
    rows = read_rows(done[0] / "tradeoff.csv")
    figure = draw_tradeoff(rows)
    assert len(figure.axes) == 6
    solid, dashed = figure.axes[2].lines  # F1 over thresholds
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert solid.get_ydata()[0] == dashed.get_ydata()[0] == rows[0].f1  # exact, at the left edge
    assert list(solid.get_xdata()) == sorted(solid.get_xdata())
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["m=4, r = 1", "m=4, r = 2"]
    assert len(draw_tradeoff([row for row in rows if row.states > 1]).axes) == 3


# ---------------------------------------------------------------- stopped and taken up


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(candidates, "draw_tradeoff", lambda *_: Figure((0.1, 0.1)))


def test_a_run_that_is_stopped_is_taken_up(tmp_path, done, files, monkeypatch, no_pictures):
    measure, measured = candidates.Candidate.measure, []

    def cut(self, setting, *rest):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(setting.name)
        return measure(self, setting, *rest)

    monkeypatch.setattr(candidates.Candidate, "measure", cut)
    printed = tmp_path / "printed"
    with printed.open("w") as stream, pytest.raises(KeyboardInterrupt):
        begin("tradeoff", tmp_path / "out", stream, **files)
    *_, said, line = printed.read_text().strip().split("\n")
    assert said == "Stopped after 3 of 10 settings. To go on:"
    assert line.endswith(f" resume=true hydra.run.dir={tmp_path / 'out'}")
    first = read_rows(tmp_path / "out/tradeoff.csv")
    assert [row.setting for row in first] == measured

    monkeypatch.setattr(candidates.Candidate, "measure", measure)
    result, text = run("tradeoff", tmp_path / "out", **files, resume=True)
    assert "3 of 10 settings are in" in text
    rows, whole = read_rows(tmp_path / "out/tradeoff.csv"), read_rows(done[0] / "tradeoff.csv")
    assert write_rows(rows[:3]) == write_rows(first)
    assert [(row.setting, row.f1, row.gamma) for row in rows] == [(row.setting, row.f1, row.gamma) for row in whole]
    assert result.keys() == done[1].keys()


def test_what_is_finished_is_not_done_again(tmp_path, done, files, monkeypatch, no_pictures):
    """And settings that are new are added."""
    text = (done[0] / "tradeoff.csv").read_text()
    (tmp_path / "tradeoff.csv").write_text(text)
    monkeypatch.setattr(candidates.Candidate, "measure", lambda *_: pytest.fail("measured again"))
    result, _ = run("tradeoff", tmp_path, **files, resume=True)
    assert result == done[1]
    assert (tmp_path / "tradeoff.csv").read_text() == text
    monkeypatch.undo()
    more = files | {"model": files["model"][1], "tradeoff": replace(CHOSEN, terms=[5, 40, 6])}
    rows = [row for row in read_rows(tmp_path / "tradeoff.csv") if row.states == 1]
    (tmp_path / "tradeoff.csv").write_text(write_rows(rows))
    run("tradeoff", tmp_path, **more, resume=True)
    *before, last = read_rows(tmp_path / "tradeoff.csv")
    assert before == rows
    assert last.setting == "m=1 apr r=6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": False}, r"tradeoff\.csv exists already: resume=true goes on with it"),
        ({"decoder": "recall"}, "has 'm=4 exact', made with another model, gold file or options"),
        ({"tradeoff": replace(CHOSEN, max_length=5)}, "made with another model, gold file or options"),
        ({"tradeoff": replace(CHOSEN, ranks=[3])}, "has 'm=4 als r=1 t=1', made with another"),
    ],
)
def test_another_run_is_refused_and_nothing_is_changed(done, files, change, message):
    before = {path: path.read_bytes() for path in done[0].rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=message):
        run("tradeoff", done[0], **(files | {"resume": True} | change))
    assert {path: path.read_bytes() for path in done[0].rglob("*") if path.is_file()} == before


def test_a_table_of_something_else(tmp_path, files):
    (tmp_path / "tradeoff.csv").write_text("setting,f1\nm=4 exact,many\n")
    with pytest.raises(InputError, match=r"tradeoff\.csv' is not a table of job=tradeoff"):
        run("tradeoff", tmp_path, **files, resume=True)


# ---------------------------------------------------------------- what it cannot use


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"job=tradeoff needs models: model=FOLDER or model=\[A,B,C\]"),
        ({"model": "none"}, "'none' is not a model folder"),
        ({"gold": "none.mrg"}, "cannot read 'none.mrg'"),
        ({"tradeoff": replace(CHOSEN, max_length=1)}, "there is no tree of up to 1 words in"),
    ],
)
def test_without_what_it_needs(tmp_path, files, change, message):
    with pytest.raises(InputError, match=message):
        run("tradeoff", tmp_path / "out", **(files | change))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_compressed_already(tmp_path, files):
    compress(Model.load(files["model"][1]), "cover").save(tmp_path / "small")
    with pytest.raises(InputError, match="is compressed already: expected one whose rules are tensors"):
        run("tradeoff", tmp_path / "out", **(files | {"model": [files["model"][0], str(tmp_path / "small")]}))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("tradeoff.ranks=[2,0]", "tradeoff.ranks is [2, 0]: expected different numbers from 1 on."),
        ("tradeoff.thresholds=[0.1,-1]", "tradeoff.thresholds is [0.1, -1.0]: expected different numbers from 0 on."),
        ("tradeoff.terms=[2,2]", "tradeoff.terms is [2, 2]: expected different numbers from 1 on."),
        ("tradeoff.ranks=[two]", "could not be converted to Integer"),
        ("tradeoff.max_length=0", "tradeoff.max_length is 0: expected 1, 2, ..."),
        ("tradeoff.rank=[2]", "did you mean 'tradeoff.ranks'?"),
        ("decompose=als", "job=tradeoff does not use 'decompose'"),
    ],
)
def test_wrong_options_get_one_sentence(option, expected):
    assert expected in problem_with(["job=tradeoff", "model=[a,b]", option])


def test_models_of_one_size_are_told_apart(tmp_path, files, no_pictures):
    model = files["model"][1]
    settings = files | {"model": [model, model], "tradeoff": replace(CHOSEN, terms=[])}
    run("tradeoff", tmp_path, **settings)
    names = [f"m=1 #{number} {method}" for number in (1, 2) for method in ("exact", "cover", "svd")]
    assert [row.setting for row in read_rows(tmp_path / "tradeoff.csv")] == names
