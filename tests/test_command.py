"""What is imported when, what --help says, and jobs of users."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from pages import blocks
from running import ROOT, call, every_entry, options_of

import lvpcfg
from lvpcfg import InputError, corpus, read_trees, write_trees
from lvpcfg.estimate.estimator import Options
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.registry import ESTIMATORS, JOBS

HEAVY = {"torch", "nltk", "scipy", "matplotlib", "numpy"}


def python(code, **environment):
    """Runs code in a process of its own, since what has been imported stays imported; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(code):
    """The heavy libraries that are there after it."""
    return HEAVY & set(python(f"{code}\nimport sys\nprint(*sys.modules)").split("\n")[-2].split())


# ---------------------------------------------------------------- what is imported


@pytest.mark.parametrize("code", ["import lvpcfg; dir(lvpcfg)", "from lvpcfg import InputError, Binarisation"])
def test_the_package_is_light(code):
    assert not imported(code)


@pytest.mark.parametrize(
    "options",
    [
        ["--help"],
        ["--version"],
        ["job=train", "estimator=em", "--help"],
        ["job=prase"],
        ["job=train", "estimator=em", "estimator.statse=3"],
        ["job=compress", "decompose.rank=0"],
        *(
            [f"job={job}", "decoder=best"]
            for job in ("demo", "train", "parse", "serve", "profile", "evaluate", "tradeoff")
        ),
        ["job=calibrate", "decoder=best"],
        *([f"job={job}", "decoder=max-rule"] for job in ("import", "inspect", "compress")),
    ],
)
def test_answers_need_no_heavy_library(options):
    code = f"import sys\nfrom lvpcfg.command import main\nsys.argv = ['lvpcfg', *{options!r}]\n"
    assert not imported(code + "try:\n    main()\nexcept SystemExit:\n    pass\nprint()")


def test_help_needs_no_hydra():
    code = "import sys; from lvpcfg.command import main; sys.argv = ['lvpcfg', '--help']; main(); print(*sys.modules)"
    assert "hydra" not in python(code).split("\n")[-2].split()


def test_the_public_names():
    """They are found, they are listed, and type checkers see the same ones."""
    for name in lvpcfg.__all__:
        value = getattr(lvpcfg, name)
        module = sys.modules[f"lvpcfg.{lvpcfg._MODULES[name]}"]
        assert value is (module if lvpcfg._MODULES[name] == name else getattr(module, name))
    assert set(lvpcfg.__all__) <= set(dir(lvpcfg))
    (block,) = (node for node in ast.parse(inspect.getsource(lvpcfg)).body if ast.unparse(node).startswith("if TYPE"))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == {
        name: "lvpcfg" if module == name else f"lvpcfg.{module}" for name, module in lvpcfg._MODULES.items()
    }
    with pytest.raises(AttributeError, match="module 'lvpcfg' has no attribute 'parse'"):
        lvpcfg.parse  # noqa: B018


def test_a_function_is_not_hidden_by_a_module():
    """Whatever is imported first."""
    code = "import lvpcfg.{}, lvpcfg\nassert callable(lvpcfg.evaluate) and callable(lvpcfg.train), lvpcfg.evaluate"
    for module in ("evaluation.evalb", "estimate.train", "jobs.evaluate"):
        python(code.format(module))


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("job", JOBS.names())
def test_the_help_of_a_job_lists_its_options_and_no_others(job, capfd):
    call(f"job={job}", "--help")
    printed = capfd.readouterr().out
    listed = re.findall(r"^(\w+):", printed, re.MULTILINE)
    assert listed.pop(0) == "job"
    assert sorted(listed) == sorted(vars(options_of(job)))
    assert f"lvpcfg job={job}" in printed or job == "demo"


def test_the_help_of_a_choice(capfd):
    call("job=train", "--help")
    printed = capfd.readouterr().out
    assert "  on_error: raise    # raise: stop at a malformed tree" in printed
    assert "estimator=cluster or count or em or " in printed
    assert "states" not in printed.replace("states are", "").replace("latent states", "").replace("many states", "")
    call("job=train", "estimator=em", "-h")
    assert "\n  states: 16           # of every symbol\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["job=prase"], "job is 'prase': expected calibrate, check, components, compress, demo"),
        (["job=train", "estimator=me"], "estimator is 'me'"),
    ],
)
def test_help_for_what_is_not_there(options, expected):
    with pytest.raises(SystemExit, match=f"^lvpcfg: {expected}"):
        call(*options, "--help")


# ---------------------------------------------------------------- jobs


def test_options_of_one_job_are_its_own():
    assert set(vars(options_of("import"))) == {"berkeley"}
    assert set(vars(options_of("inspect"))) == {"model", "symbol"}
    assert set(vars(options_of("compress"))) == {"model", "decompose", "seed", "certify", "device", "threads"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "job=parse,inspect", "model=a", "symbol=NP"], "job=parse does not use 'symbol'"),
        (["-m", "job=parse,prase"], "job is 'prase'"),
        (["job=parse", "model=???"], "'model=???' does not fit: Missing mandatory value: model."),
        (["job=parse", "model="], "model is '': expected a folder"),
        (["estimator.states=2"], "job=demo does not use 'estimator.states': it is an option of job=components or"),
    ],
)
def test_wrong_options_get_one_sentence(arguments, expected):
    assert expected in problem_with(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "job=parse,inspect", "model=a"],
        ["job=parse", "input=a.txt", "output=${input}.mrg"],
        ['job="parse"', "model=a"],
    ],
)
def test_right_options_pass(arguments):
    assert problem_with(arguments) is None


@dataclass
class GreetOptions:
    name: str = "you"
    times: int = 1


def test_a_job_that_is_registered_in_this_process(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(JOBS, "_entries", every_entry(JOBS))

    @JOBS.register("greet", GreetOptions)
    def greet(options, run):
        run.begin()
        run.say(f"Hello, {options.name}!" * options.times)

    assert problem_with(["job=greet", "times=2"]) is None
    assert problem_with(["job=greet", "time=2"]) == "there is no option 'time': did you mean 'times'?"
    assert "'two' of type 'str' could not be converted to Integer" in problem_with(["job=greet", "times=two"])
    assert problem_with(["job=parse", "times=2"]) == "job=parse does not use 'times': it is an option of job=greet."
    call("job=greet", "name=Ann", f"hydra.run.dir={tmp_path}")
    assert "Hello, Ann!" in capfd.readouterr().out
    assert (tmp_path / "config.yaml").read_text() == "job: greet\nname: Ann\ntimes: 1\n"
    with pytest.raises(InputError, match="there is a job 'greet' already"):
        JOBS.register("greet", GreetOptions)(lambda *_: None)


@dataclass
class ConstantOptions(Options):
    name: str = "constant"
    times: int = 1


def test_an_estimator_that_is_registered_in_this_process(monkeypatch, capfd):
    monkeypatch.setattr(ESTIMATORS, "_entries", every_entry(ESTIMATORS))
    ESTIMATORS.register("constant", ConstantOptions)(lambda *_: None)
    assert problem_with(["job=train", "estimator=constant", "estimator.times=2"]) is None
    assert "could not be converted" in problem_with(["job=train", "estimator=constant", "estimator.times=two"])
    expected = "'estimator.times' is an option of estimator=constant: choose that first."
    assert problem_with(["job=train", "estimator.times=2"]) == expected
    call("job=train", "estimator=constant", "--help")
    assert "\n  times: 1\n" in capfd.readouterr().out


def test_a_module_that_does_not_register_what_it_should(monkeypatch):
    monkeypatch.setitem(JOBS.plugins, "nothing", "json")
    with pytest.raises(InputError, match="the module json does not register the job 'nothing'"):
        JOBS["nothing"]


# ---------------------------------------------------------------- docs/add_a_job.md


@pytest.fixture(params=["a package of one's own", "inside lvpcfg"])
def with_job(request, tmp_path):
    """A folder to import from, with the job of the page."""
    files = {block.file: block.text.partition("\n")[2] for block in blocks(ROOT / "docs/add_a_job.md") if block.file}
    folder = tmp_path / "installed"
    if request.param == "inside lvpcfg":
        for part in ("lvpcfg", "conf"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "lvpcfg/jobs/vocabulary.py").write_text(files["vocabulary.py"])
        (folder / "conf/job/vocabulary.yaml").write_text(files["conf/job/vocabulary.yaml"])
        return folder
    (tmp_path / "package").mkdir()
    for name in ("vocabulary.py", "pyproject.toml"):
        (tmp_path / "package" / name).write_text(files[name])
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(folder), str(tmp_path / "package")], check=True)
    return folder


def test_the_job_of_the_page(with_job, tmp_path):
    write_trees(corpus("dev")[:20], tmp_path / "dev.mrg")

    def lvpcfg_command(*options):
        code = "from lvpcfg.command import main; main()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(with_job), str(ROOT)])}
        return subprocess.run(
            [sys.executable, "-c", code, *options], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    done = lvpcfg_command("job=vocabulary", "trees=dev.mrg", "least=2", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    counts = Counter(word for tree in read_trees(tmp_path / "dev.mrg") for word in tree.leaves())
    expected = sum(number > 1 for number in counts.values())
    assert len((tmp_path / "out/vocabulary.txt").read_text().split()) == expected
    assert json.loads((tmp_path / "out/result.json").read_text()) == {"words": expected}
    assert f"{expected:,} of {len(counts):,} words occur 2 times or more." in done.stdout
    assert lvpcfg_command("job=vocabulary", "least=0").stderr == "lvpcfg: least is 0: expected 1, 2, ...\n"
    assert "did you mean 'least'?" in lvpcfg_command("job=vocabulary", "leats=2").stderr
    assert "least: 1" in lvpcfg_command("job=vocabulary", "--help").stdout
    assert "\njob=vocabulary  " in lvpcfg_command("--help").stdout


def test_jobs_do_not_wait_for_what_nltk_needs_of_scipy():
    pytest.importorskip("scipy")
    script = (
        "import sys; from lvpcfg.jobs.main import _import_libraries; _import_libraries(); "
        "assert 'scipy.stats' not in sys.modules; from scipy.stats import fisher_exact"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
