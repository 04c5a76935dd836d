"""Commands where something around them is unusual: streams, disks, folders, numbers beyond reason, hostile labels."""

import os
import resource
import subprocess
from io import StringIO

import pytest
from running import arguments, begin, call, options_of

from lvpcfg import Model, corpus, train, write_trees
from lvpcfg.errors import printable
from lvpcfg.jobs.arguments import problem_with
from lvpcfg.jobs.run import Run, Terminal
from lvpcfg.registry import JOBS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train(corpus("train")[:50]).save(folder)
    return str(folder)


def shell(line, *options, cwd):
    """Runs a command by a line of the shell, where it is called "$@"; its output has a buffer, as users' have."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = ["sh", "-c", line, "sh", *arguments(*options)]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done


# ---------------------------------------------------------------- streams


def test_all_standard_streams_may_be_closed(tmp_path, model):
    done = shell('"$@" <&- >&- 2>&-', "job=inspect", f"model={model}", "hydra.run.dir=out", cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.yaml", "grammar.html", "result.json"]


def test_trees_need_a_standard_output(tmp_path, model):
    done = shell('echo dog | "$@" >&-', "job=parse", f"model={model}", "hydra.run.dir=out", cwd=tmp_path)
    assert done.stderr == (
        "lvpcfg: standard output is closed: expected a place for the results there, or output=FILE.\n"
    )


def test_progress_needs_no_standard_error(tmp_path, model):
    done = shell('echo dog | "$@" 2>&-', "job=parse", f"model={model}", "hydra.run.dir=out", cwd=tmp_path)
    assert "dog)" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("options", [["--help"], ["job=inspect", "model=MODEL", "hydra.run.dir=out"]])
def test_a_full_standard_output_is_named(tmp_path, model, options):
    done = shell('"$@" > /dev/full', *(option.replace("MODEL", model) for option in options), cwd=tmp_path)
    assert done.stderr == "lvpcfg: cannot write to standard output: no space left on device.\n"
    assert done.returncode == 1


def test_a_full_output_is_named(tmp_path, model):
    options = ("job=parse", f"model={model}", "output=/dev/full", "hydra.run.dir=out")
    done = shell('echo dog | "$@"', *options, cwd=tmp_path)
    assert done.stderr == "lvpcfg: cannot write '/dev/full': no space left on device.\n"


def test_a_full_disk_under_tensorboard_is_named(tmp_path):
    write_trees(corpus("train")[:50], tmp_path / "train.mrg")
    options = ("job=train", "estimator=em", "estimator.states=2", "estimator.iterations=3", "data.train=train.mrg")
    done = subprocess.run(
        arguments(*options, "data.dev=train.mrg", "evaluate_every=1", "hydra.run.dir=out"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert done.stderr.startswith(f"lvpcfg: cannot write '{tmp_path}/out/")
    assert done.stderr.endswith(": file too large.\n")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_hints_at_another(tmp_path, model):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(SystemExit, match=r"^lvpcfg: .*out"):
        call("job=inspect", f"model={model}", f"hydra.run.dir={tmp_path / 'out'}")
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(SystemExit, match=r"cannot write '.*config.yaml': .*; hydra.run.dir=FOLDER chooses another"):
        call("job=inspect", f"model={model}", f"hydra.run.dir={tmp_path}")


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["threads=99999999999999999999"],
            "threads is 99999999999999999999: expected a number of 18 digits at the most.",
        ),
        (["threads=1025"], "threads is 1025: expected 1024 at the most."),
        (["job=parse", "processes=1025"], "processes is 1025: expected 1024 at the most."),
        (["job=train", "estimator=em", f"estimator.rare={10**20}"], "expected a number of 18 digits at the most."),
        (["job=train", "estimator=em", f"estimator.iterations={10**12}"], "expected 1000000 at the most."),
        (["job=train", "estimator=split_merge", "estimator.cycles=21"], "expected 20 at the most."),
        (["job=compress", f"decompose.rank={10**12}"], "expected 1000000 at the most."),
        (["job=tradeoff", f"tradeoff.ranks=[{10**20}]"], "tradeoff.ranks is 100000000000000000000: expected a number"),
        (["hydra=null"], "'hydra=null' sets all options of Hydra: expected one, as in hydra.run.dir=FOLDER."),
    ],
)
def test_what_is_beyond_reason_is_refused_before_work(options, message):
    assert message in problem_with(options)


# ---------------------------------------------------------------- labels and words of strangers

HOSTILE = "\x1b]0;owned\x07\x1b[31mN\x9b2J\u202e"
SHOWN = r"\x1b]0;owned\x07\x1b[31mN\x9b2J\u202e"


def test_control_characters_are_shown():
    assert printable(HOSTILE) == SHOWN
    assert printable("señor\u00a0\t\n🐕") == "señor\u00a0\t\n🐕"


def test_tables_lose_nothing(tmp_path, monkeypatch):
    """In a file they are as wide as they have to be; in a narrow terminal words go on in the next line."""
    monkeypatch.delenv("COLUMNS", raising=False)
    names = [f"a long name, {number}" for number in range(9)]
    for narrow in (False, True):
        printed = StringIO()
        console = Terminal(file=printed, width=40, force_terminal=True) if narrow else Terminal(file=printed)
        Run(tmp_path, console).table("Title", names, [names])
        assert "…" not in printed.getvalue()
        if not narrow:
            assert all(printed.getvalue().count(name) == 2 for name in names)


@pytest.fixture
def hostile(tmp_path):
    """The folder of a model whose labels and words are such."""
    text = f"(S (NP ({HOSTILE} {HOSTILE})) (VP (V{HOSTILE} x)))\n" * 3
    (tmp_path / "trees.mrg").write_text(text, encoding="utf-8")
    return tmp_path


def test_no_job_prints_control_characters(hostile):
    printed = StringIO()
    console = Terminal(file=printed, width=120, force_terminal=False)
    result, _ = begin("train", hostile / "out", train=str(hostile / "trees.mrg"))
    assert result.result["trees"] == 3
    model = str(hostile / "out/model")
    assert any(HOSTILE in name for name in Model.load(model).grammar.symbols.names)
    inspected = Run(hostile / "inspected", console)
    JOBS["inspect"].run(options_of("inspect", model=model), inspected)
    inspected.say(HOSTILE)
    inspected.table(HOSTILE, [HOSTILE], [[HOSTILE]])
    assert not set(printed.getvalue()) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert r"\x1b]0;owned" in printed.getvalue()
    with pytest.raises(SystemExit) as ended:
        call("job=inspect", f"model={model}", "symbol=XX", f"hydra.run.dir={hostile}/x")
    assert not set(str(ended.value)) & {"\x1b", "\x07", "\x9b", "\u202e"}
