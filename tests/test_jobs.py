import gzip
import json
import os
import re
from dataclasses import asdict

import pytest
import yaml
from matplotlib.figure import Figure
from nltk.tree import Tree
from omegaconf import OmegaConf
from running import ROOT, call, command, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lvpcfg import InputError, Model, corpus, read_trees, train, write_trees
from lvpcfg.estimate.split_merge import SplitMergeOptions
from lvpcfg.jobs import board, story
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.registry import ESTIMATORS, JOBS
from lvpcfg.trees.brackets import format_tree

# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["datta.train=x"], "there is no option 'datta.train': did you mean 'data.train'?"),
        (["job=train", "binarization.vertical=2"], "did you mean 'binarisation.vertical'?"),
        (["estimator.nam=x"], "did you mean 'estimator.name'?"),
        (["hydra.run.dri=x"], "did you mean 'hydra.run.dir'?"),
        (["qqqqqqqq=1"], "there is no option 'qqqqqqqq'; see --help."),
        (["+extra=1"], "there is no option 'extra'"),
        (["+job=train"], "leave out the +"),
        (["~job=demo"], "'~job=demo' is no option"),
        (["estimator@foo=count"], "there is no option"),
        (["--cfg", "job", "jobb=train"], "did you mean 'job'?"),
        (["--help", "job"], "'job' is no option"),
        (["data.train=a.mrg"], "job=demo does not use 'data.train': it is an option of job=train."),
        (
            ["job=train", "model=a"],
            "job=train does not use 'model': it is an option of job=calibrate or job=check or job=compress or",
        ),
        (["decoder=best"], "decoder is 'best': expected max-rule, max-rule-sum,"),
        (["threads=0"], "threads is 0: expected 1, 2, ..."),
        (["dtype=half"], "dtype is 'half': expected float32 or float64."),
        (
            ["job=train", "gold=a.mrg"],
            "job=train does not use 'gold': it is an option of job=calibrate or job=components or job=evaluate or",
        ),
        (
            ["job=evaluate", "estimator=count"],
            "does not use 'estimator': it is an option of job=components or job=train.",
        ),
        (["job=train", "data=${job}"], "does not fit"),
        (["data.train=año.mrg"], "letters beyond ASCII"),
        (["binarisation.vertical=two"], "'two' of type 'str' could not be converted to Integer"),
        (["binarisation.vertical=3"], "vertical is 3: expected 1 or 2."),
        (["binarisation.direction=up"], "direction is 'up': expected right or left."),
        (["binarisation.horizontal=many"], "'binarisation.horizontal=many' does not fit"),
        (
            ["job=tain"],
            "job is 'tain': expected calibrate, check, components, compress, demo, evaluate, import, inspect, parse, "
            "profile, serve, tag, tightness, tradeoff",
        ),
        (
            ["estimator=count2"],
            "estimator is 'count2': expected cluster, count, em, gaussian, gradient, kruskal_em, spectral or split",
        ),
        (
            ["job=train", "estimator.states=8"],
            "'estimator.states' is an option of estimator=cluster or estimator=em or",
        ),
        (["job=train", "estimator=em", "estimator.states=0"], "estimator.states is 0: expected 1 or more."),
        (["job=train", "estimator=em", "estimator.states=two"], "'two' of type 'str' could not be converted"),
        (["job=train", "estimator=em", "estimator.name=count"], "estimator.name is 'count': expected em."),
        (["job=train", "estimator=split_merge", "estimator.merged=2"], "estimator.merged is 2.0: expected a fraction"),
        (["job=train", "estimator=split_merge", "estimator.merged=nan"], "estimator.merged is nan"),
        (
            ["job=train", "estimator=em", "estimator.merged=0.5"],
            "'estimator.merged' is an option of ",
        ),
        (["job=train", "restarts=0"], "restarts is 0: expected 1, 2, ..."),
        (["job=train", "restarts=2"], "restarts is 2, but this training is the same for every seed: expected 1."),
        (["job=train", "prune=2"], "prune is 2.0: expected a posterior from 0 to 1, such as 5e-5."),
        (["job=parse", "model=[a,null]"], "model is ['a', None]: expected a folder, or a list of folders"),
        (["job=parse", "model=[]"], "model is []: expected a folder, or a list of folders"),
        (["job=profile", "profile.sentences=0"], "profile.sentences is 0: expected 1, 2, ..."),
        (["job=profile", "output=x"], "job=profile does not use 'output': it is an option of job=parse or job=tag."),
        (["job=train", "checkpoint_every=0"], "checkpoint_every is 0: expected 1, 2, ..."),
        (["job=train", "resume=maybe"], "'maybe' is not a valid bool"),
        (
            ["resume=true"],
            "job=demo does not use 'resume': it is an option of job=components or job=tradeoff or job=train.",
        ),
        (["signature=klingon"], "there is no word signature 'klingon': expected english or suffix"),
        (["job=train", "data.on_error=ignore"], "data.on_error is 'ignore': expected raise or skip."),
        (["train"], "'train' is no option: expected key=value, such as job=train."),
        (["data.train=[a"], "'data.train=[a' cannot be read"),
        (["data.train=a=b"], "goes in quotes"),
        (["binarisation.vertical=1,2"], "add -m"),
        (["-m", "binarisation.vertical=1,3"], "vertical is 3: expected 1 or 2."),
        (
            ["-m", "estimator=count,emm"],
            "estimator is 'emm': expected cluster, count, em, gaussian, gradient, kruskal_em, spectral or split_merge.",
        ),
    ],
)
def test_wrong_options_get_one_sentence(arguments, expected):
    problem = problem_with(arguments)
    assert expected in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["job=train", "data.train=a.mrg", "estimator=count", "hydra.run.dir=x"],
        ["-m", "job=train", "binarisation.vertical=1,2", "binarisation.horizontal=0,inf"],
        ["job=evaluate", "gold=a b.mrg", 'test="/x/y=z,1.mrg"'],
        ["--help"],
        ["--cfg", "job", "job=train"],
        ["hydra/job_logging=none"],
        ["-m", "job=train", "estimator=glob(*)"],
        ["-m", "job=train", "estimator=em,split_merge", "seed=1,2"],
        [
            "job=train",
            "estimator=em",
            "estimator.states=16",
            "data.dev=b.mrg",
            "restarts=3",
            "resume=true",
            "threads=2",
        ],
        ["job=demo", "job=train", "data.train=x"],
        ["++hydra.job.env_set.FOO=1"],
    ],
)
def test_right_options_pass(arguments):
    assert problem_with(arguments) is None


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_the_defaults_of_estimators_are_the_same_from_python_and_from_the_command_line(name):
    written = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/estimator/{name}.yaml"))
    options = ESTIMATORS[name].options
    assert written.keys() == asdict(options()).keys()
    assert asdict(options(**written)) == asdict(options())


def test_the_story(tmp_path, monkeypatch):
    """On a part of the corpus, with fewer iterations; .ci/run runs all of it, as a command."""
    monkeypatch.setattr(story, "corpus", lambda split: corpus(split)[: 500 if split == "train" else 40])
    shorter = SplitMergeOptions(cycles=2, split_iterations=5, merge_iterations=3, smooth_iterations=2)
    monkeypatch.setitem(story.TRAINING, "estimator", shorter)
    monkeypatch.setattr(story, "MANY", {"states": 3, "iterations": 3})
    monkeypatch.setattr(story, "RANK", 1)
    for name in ("draw_trees", "draw_states"):
        monkeypatch.setattr(board, name, lambda *_, **__: Figure((0.1, 0.1)))  # test_board.py looks at these
    result, printed = run("demo", tmp_path)
    assert printed.strip().split("\n")[-1] == str(tmp_path)
    for text in (
        "What the labels hide",
        "Scores on dev",
        "that the treebank PCFG parses wrong",
        "tensorboard --logdir",
    ):
        assert text in printed
    assert re.search(r"NN-0 .* \d+(\.\d+)? % .* \w+ \d+(\.\d+)? %", printed)  # a state, its share, words
    for row in ("exact", "r=1 t=0.001", "r=1 t=0.01"):
        assert re.search(rf"^ *{row} .* \d\d\.\d\d *$", printed, re.MULTILINE)
    found = re.search(r"Inside-outside is ([\d.]+) times as fast,\nparsing .* ([\d.]+) times; F1 is ([\d.]+)", printed)
    ratios = 1 / result["compressed_ratio_inside_outside"], 1 / result["compressed_ratio"]
    assert [float(text) for text in found.groups()[:2]] == pytest.approx(ratios, abs=0.051)
    assert float(found[3]) == pytest.approx(result["compressed_f1"], abs=0.0051)
    assert abs(result["compressed_f1"] - result["many_states_f1"]) < 10
    assert Model.load(tmp_path / "many_states").grammar.states.tolist() == [3] * 50
    assert "treebank PCFG: 50 states" in printed
    assert result["fallbacks"] == 0
    for picture in ("tree.png", "chart.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "tree.svg").read_text().startswith("<svg")
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert 70 < log.Scalars("best/f1")[0].value < result["f1"] - 2 < 95
    assert log.Scalars("best/f1")[-1].value == pytest.approx(result["f1"], abs=0.01)
    assert {"tree", "chart"} <= set(log.Tags()["images"])
    assert len(Model.load(tmp_path / "model").grammar.binary_rules) == result["binary_rules"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch, error):
    def no_room(*_):
        raise error

    monkeypatch.setattr("lvpcfg.evaluation.evalb_files.read_parameters", no_room)
    with pytest.raises(SystemExit, match="lvpcfg: there is not enough memory"):
        call("job=evaluate", "gold=a", "test=b", "parameters=c", f"hydra.run.dir={tmp_path}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["job=tain"], "job is 'tain'"),
        (["job=train", "data.train=none.mrg"], "cannot read 'none.mrg': no such file"),
        (["hydra.run.dir=/dev/null/x"], "/dev/null/x"),
    ],
)
def test_errors_are_one_sentence(tmp_path, monkeypatch, capfd, arguments, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        call(*arguments)
    assert stopped.value.code.startswith("lvpcfg: ")
    assert expected in stopped.value.code
    assert "\n" not in stopped.value.code
    assert capfd.readouterr().err == ""


def test_errors_from_the_command_line(tmp_path):
    done = command("job=train", "data.train=none.mrg", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "lvpcfg: cannot read 'none.mrg': no such file or directory.\n"


def test_an_interrupt_while_the_command_is_imported(tmp_path):
    """Although whoever imports torch may go on without."""
    text = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(text)
    done = command("job=train", cwd=tmp_path, path=[tmp_path])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lvpcfg: interrupted.\n")


def test_an_interrupt_while_options_are_checked(tmp_path):
    """Nothing of the package but what answers is there yet."""
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    for module in ("hydra", "difflib"):
        (tmp_path / module).mkdir()
        (tmp_path / module / f"{module}.py").write_text(text)
        done = command("job=train", cwd=tmp_path, path=[tmp_path / module])
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "lvpcfg: interrupted.\n")


def test_a_reader_that_leaves_costs_no_work(tmp_path):
    write_trees(corpus("dev")[:50], tmp_path / "dev.mrg")
    for options in (["job=train", "data.train=dev.mrg", 'hydra.run.dir="[bold]x"'], ["--version"]):
        done = command(*options, cwd=tmp_path, reader=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert len(Model.load(tmp_path / "[bold]x/model").grammar.states) > 10
    assert "trees" in json.loads((tmp_path / "[bold]x/result.json").read_text())


def test_a_sweep_makes_a_run_for_each_value(tmp_path, monkeypatch):
    write_trees(corpus("dev")[:100], tmp_path / "dev.mrg")
    monkeypatch.chdir(tmp_path)
    call("-m", "job=train", "data.train=dev.mrg", "binarisation.horizontal=0,inf", "hydra.sweep.dir=out")
    sizes = [json.loads((tmp_path / f"out/{i}/result.json").read_text())["binary_rules"] for i in (0, 1)]
    assert sizes[0] < sizes[1]
    assert Model.load(tmp_path / "out/1/model").binarisation.horizontal == float("inf")
    written = yaml.safe_load((tmp_path / "out/1/config.yaml").read_text())["binarisation"]
    assert (written["direction"], written["horizontal"]) == ("right", float("inf"))


def test_help_names_the_jobs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    call("--help")
    printed = capfd.readouterr().out
    for job in JOBS.names():
        assert re.search(rf"^job={job} +\w+", printed, re.MULTILINE)
    assert "lvpcfg job=parse --help" in printed
    assert len(printed.splitlines()) <= 24  # a screen
    assert max(map(len, printed.splitlines())) <= 100
    call("job=evaluate", "--help")
    assert "job=evaluate gold=FILE test=FILE" in capfd.readouterr().out
    call("--version")
    assert capfd.readouterr().out.startswith("lvpcfg ")
    assert os.listdir(tmp_path) == []


def test_without_options_it_says_what_it_can_do_before_the_demo(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lvpcfg.jobs.main._run", lambda options: print(f"job={options.job}"))
    call()
    *welcome, empty, job = capfd.readouterr().out.splitlines()
    assert (empty, job) == ("", "job=demo")
    assert len(welcome) == 10
    for line in welcome:
        for option in re.findall(r"lvpcfg (job=.*?)(?: +#|$)", line):
            assert problem_with(option.split()) is None
    call("job=demo")
    assert capfd.readouterr().out == "job=demo\n"


# ---------------------------------------------------------------- the jobs


def test_train_on_a_file_that_is_partly_broken(tmp_path):
    write_trees(corpus("dev")[:50], tmp_path / "bank.mrg")
    with (tmp_path / "bank.mrg").open("a") as stream:
        stream.write("(S (NN dog)\n" * 7)
    result, printed = run("train", tmp_path / "out", train=str(tmp_path / "bank.mrg"), on_error="skip")
    assert (result["trees"], result["malformed"]) == (50, 7)
    assert printed.count("never closed") == 5
    assert "and 2 more" in printed


def test_evaluate_writes_figures_and_evalbs_report(tmp_path):
    write_trees(corpus("dev")[:20], tmp_path / "gold.mrg")
    write_trees(corpus("dev")[:20], tmp_path / "test.mrg")
    folder = tmp_path / "[/odd] [bold]name"  # no markup
    result, printed = run("evaluate", folder, gold=str(tmp_path / "gold.mrg"), test=str(tmp_path / "test.mrg"))
    assert str(folder / "evalb.txt") in printed
    names = "precision recall f1 f1_40 f1_all tagging_accuracy complete_match sentences errors"
    assert set(names.split()) <= set(result)
    assert result["f1"] == result["f1_all"] == 100
    assert json.loads((folder / "result.json").read_text()) == result
    assert "Bracketing FMeasure       = 100.00" in (folder / "evalb.txt").read_text()
    assert "100.00" in printed


def test_a_failed_run_leaves_no_figures_of_an_earlier_one(tmp_path):
    write_trees(corpus("dev")[:20], tmp_path / "bank.mrg")
    run("train", tmp_path, train=str(tmp_path / "bank.mrg"))
    assert (tmp_path / "result.json").exists()
    with pytest.raises(InputError):
        run("train", tmp_path, train="none.mrg")
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("files", [{"gold": "a"}, {"test": "b"}, {"gold": "a", "test": "b", "model": "c"}])
def test_evaluate_needs_gold_and_either_trees_or_a_model(tmp_path, files):
    with pytest.raises(InputError, match=r"gold=FILE, and either test=FILE \(trees\) or model=FOLDER"):
        run("evaluate", tmp_path, **files)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train(corpus("train")).save(folder)
    return str(folder)


def test_evaluate_parses_the_words_of_raw_gold_trees(tmp_path, model):
    """Traces, function tags and an empty top label in the gold file do not matter, and its tags are not looked at."""
    clean = corpus("dev")[:30]
    write_trees(clean, tmp_path / "clean.mrg")
    with (tmp_path / "raw.mrg").open("w") as stream:
        for tree in clean:
            (inner,) = tree
            raw = Tree("", [Tree(f"{inner.label()}-SBJ-1", [Tree("-NONE-", ["*T*-1"]), *inner])])
            stream.write(format_tree(raw) + "\n")
    results = [
        run("evaluate", tmp_path / name, gold=str(tmp_path / f"{name}.mrg"), model=model)[0]
        for name in ("clean", "raw")
    ]
    assert 60 < results[0]["f1"] < 100
    assert results[0]["f1"] == results[1]["f1"]
    assert results[0]["fallbacks"] == 0
    assert results[0]["sentences_per_second"] > 0
    assert len(read_trees(tmp_path / "raw/parses.mrg")) == 30


def test_profile_says_where_the_time_goes(tmp_path, model):
    (tmp_path / "in.txt").write_text("A dog saw the man .\n\nThe man sleeps .\n")
    result, printed = run("profile", tmp_path / "out", model=model, input=str(tmp_path / "in.txt"))
    assert result["sentences"] == 2
    assert result["sentences_per_second"] > 0
    assert result["memory_mb"] > 50
    stages = [name for name in result if name.startswith("seconds_")]
    assert {"seconds_model", "seconds_reading_and_writing", "seconds_fine", "seconds_other"} < set(stages)
    assert sum(result[name] for name in stages) == pytest.approx(result["seconds"])
    for text in ("Where the time goes", "reading and writing", "ms a sentence", "Operators on cpu", "aten::"):
        assert text in printed
    assert len(read_trees(tmp_path / "out/parses.mrg")) == 2
    assert (tmp_path / "out/profile.png").read_bytes().startswith(b"\x89PNG")
    (trace,) = (tmp_path / "out/tensorboard").glob(
        "*.pt.trace.json.gz"
    )  # the names that TensorBoard's plugin looks for
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"fine", "decode", "aten::mul"} < names
    assert EventAccumulator(str(tmp_path / "out/tensorboard")).Reload().Tags()["images"] == ["profile"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "job=profile needs a model folder: model=FOLDER"),
        ({"input": "none.txt"}, "cannot read 'none.txt': no such file"),
        ({}, "there is no sentence in '.*in.txt': expected one a line."),
    ],
)
def test_profile_without_what_it_needs(tmp_path, model, options, message):
    (tmp_path / "in.txt").write_text("\n \n")
    with pytest.raises(InputError, match=message):
        run("profile", tmp_path, **({"model": model, "input": str(tmp_path / "in.txt")} | options))


@pytest.mark.treebank
def test_evaluate_reproduces_evalb(tmp_path, data):
    gold, test = (str(data / "evalb" / f"wsj-dev.{side}") for side in ("gld", "tst"))
    result, _ = run("evaluate", tmp_path, gold=gold, test=test, parameters=str(data / "evalb/COLLINS.prm"))
    assert round(result["f1"], 2) == 85.35
    assert round(result["f1_40"], 2) == 85.64
    assert (tmp_path / "evalb.txt").read_text() == (data / "evalb/wsj-dev.rsl").read_text()


@pytest.mark.treebank
def test_the_treebank_grammar_of_the_wsj_sample(tmp_path, data):
    """h = 0, v = 1: an unsplit treebank grammar scores about 61 with the Berkeley parser's preprocessing."""
    run("train", tmp_path / "train", train=str(data / "wsj-sample/train.mrg"))
    result, _ = run(
        "evaluate", tmp_path / "dev", model=str(tmp_path / "train/model"), gold=str(data / "wsj-sample/dev.mrg")
    )
    assert 60 < result["f1_all"] < 72
    assert result["sentences"] == 273
    assert result["fallbacks"] == 0


@pytest.mark.treebank
@pytest.mark.parametrize("name", ["wsj-sample", "craft", "gum", "cess-esp"])
def test_train_on_treebanks(tmp_path, data, name):
    result, _ = run("train", tmp_path, train=str(data / name / "dev.mrg"))
    assert result["binary_rules"] > 400
