"""job=parse as its users meet it: files and streams, several processes and machines, and ends of all kinds."""

import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from multiprocessing import active_children

import pytest
from running import ROOT, arguments, command, run

from lvpcfg import InputError, Model, Parser, corpus, read_trees, train
from lvpcfg.batch import formats
from lvpcfg.batch.formats import Writer
from lvpcfg.jobs.workers import workers
from lvpcfg.trees.brackets import trees_from_text
from lvpcfg.trees.walk import words

DEV = [words(tree) for tree in corpus("dev")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train(corpus("train"), estimator="em", states=2, iterations=2).save(folder)
    return str(folder)


def test_parse_keeps_the_order_and_the_empty_lines(tmp_path, model):
    sentences = [words(tree) for tree in corpus("dev")[:12]]
    lines = [*(" ".join(sentence) for sentence in sentences), "", "a ( b\u2028c )"]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result, printed = run(
        "parse", tmp_path / "out", model=model, input=str(tmp_path / "in.txt"), output=str(tmp_path / "trees.mrg")
    )
    written = (tmp_path / "trees.mrg").read_text(encoding="utf-8").split("\n")
    assert [words(tree) for tree in trees_from_text("\n".join(written[:12]))] == sentences
    assert written[12] == written[14] == ""
    assert "-LRB-" in written[13]
    assert "b\u2028c" in written[13]  # one word
    assert result["sentences"] == 13
    assert str(tmp_path / "trees.mrg") in printed


@pytest.fixture(scope="module")
def some(model):
    with workers(model, {"device": "cpu", "prune": 1e-3, "batch_tokens": 30}, processes=2, threads=1) as some:
        yield some


class TestProcesses:
    def test_find_the_trees_that_one_finds(self, model, some):
        parser = Parser.load(model, device="cpu")
        sentences = [words(tree) for tree in corpus("dev")[:12]] + [["."]]
        done = []
        assert some.parse_sents(sentences, update=done.append) == parser.parse_sents(sentences)
        assert len(done) > 3
        assert sum(done) == len(sentences) == some.counts.sentences
        assert some.parse_sents([]) == []

    def test_that_are_killed_leave_a_sentence(self, some):  # the last test: nothing of them is left
        for process in active_children():
            process.kill()
        with pytest.raises(InputError, match="one of the 2 processes was ended from outside"):
            some.parse_sents([["."]] * 4)


def test_parse_in_two_processes_as_a_command(tmp_path, model):
    """The file of the command is imported by them too."""
    sentences = [words(tree) for tree in corpus("dev")[:6]]
    (tmp_path / "in.txt").write_text("".join(" ".join(sentence) + "\n" for sentence in sentences))
    options = ("job=parse", f"model={model}", "input=in.txt", "output=out.mrg", "processes=2", "hydra.run.dir=out")
    done = command(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [words(tree) for tree in read_trees(tmp_path / "out.mrg")] == sentences
    assert json.loads((tmp_path / "out/result.json").read_text())["sentences"] == 6


def test_parse_from_standard_input_to_standard_output(tmp_path, model):
    """Trees alone on the standard output, in UTF-8 whatever the locale, the rest on the other."""
    arguments = [sys.executable, str(ROOT / "run.py"), "job=parse", f"model={model}", "hydra.run.dir=out"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        arguments,
        input="\ufeffThe dog barks .\r\nA señor sleeps .\n".encode(),
        cwd=tmp_path,
        capture_output=True,
        env=environment,
    )
    trees = trees_from_text(done.stdout.decode("utf-8"))
    assert [words(tree) for tree in trees] == [["The", "dog", "barks", "."], ["A", "señor", "sleeps", "."]]
    assert done.stderr.decode().strip().split("\n")[-1] == str(tmp_path / "out")


def test_parse_of_nothing_is_nothing(tmp_path, model):
    (tmp_path / "in.txt").write_text("")
    result, _ = run("parse", tmp_path, model=model, input=str(tmp_path / "in.txt"), output=str(tmp_path / "out.mrg"))
    assert (tmp_path / "out.mrg").read_text() == ""
    assert result["sentences"] == 0


def test_parse_does_not_overwrite_its_input(tmp_path, model):
    path = tmp_path / "in.txt"
    path.write_text("A dog .\n")
    with pytest.raises(InputError, match="input and output are the same file"):
        run("parse", tmp_path, model=model, input=str(path), output=str(path))
    assert path.read_text() == "A dog .\n"


def test_a_reader_of_trees_that_leaves_is_no_error(tmp_path, model):
    (tmp_path / "in.txt").write_text("A dog .\n")
    options = ("job=parse", f"model={model}", "input=in.txt")
    done = command(*options, cwd=tmp_path, reader=False)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "needs a model folder: model=FOLDER"),
        ({"model": "none"}, "'none' is not a model folder"),
        ({"input": "none.txt"}, "cannot read 'none.txt': no such file"),
        ({"output": "none/trees.mrg"}, "cannot write 'none/trees.mrg': no such file"),
        ({"device": "warp"}, "device is 'warp', which cannot be used here"),
        ({"processes": 0}, "processes is 0: expected 1, 2"),
        ({"processes": 2, "model": None}, "needs a model folder: model=FOLDER"),
        ({"processes": 2, "model": "none"}, "'none' is not a model folder"),
    ],
)
def test_parse_without_what_it_needs(tmp_path, model, options, message):
    (tmp_path / "in.txt").write_text("A dog .\n")
    with pytest.raises(InputError, match=message):
        run("parse", tmp_path, **({"model": model, "input": str(tmp_path / "in.txt")} | options))


# ---------------------------------------------------------------- what is read and written


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_same_bytes_are_the_same_trees_from_a_file_and_from_standard_input(tmp_path, model, pack):
    data = pack(b"\xef\xbb\xbfA dog\r sleeps .\r\n\nThe \xff man\x00 . \n")
    (tmp_path / "in.txt").write_bytes(data)
    done = subprocess.run(
        arguments("job=parse", f"model={model}", "hydra.run.dir=out"), input=data, cwd=tmp_path, capture_output=True
    )
    run("parse", tmp_path / "run", model=model, input=str(tmp_path / "in.txt"), output=str(tmp_path / "out.mrg"))
    assert done.stdout == (tmp_path / "out.mrg").read_bytes()
    lines = done.stdout.decode().split("\n")
    assert len(lines) == 4
    assert lines[1] == ""
    assert [words(tree) for tree in trees_from_text(lines[0])] == [["A", "dog", "sleeps", "."]]
    assert b"Records with bytes or words that no tree can hold, replaced: 1." in done.stderr


def test_several_files_and_patterns_are_read_in_order(tmp_path, model):
    for number, sentence in enumerate(["A dog .", "A cat .", "No ."]):
        (tmp_path / f"part{number}.txt").write_text(sentence + "\n")
    names = [str(tmp_path / "part2.txt"), str(tmp_path / "part[01].txt")]
    run("parse", tmp_path / "run", model=model, input=names, output=str(tmp_path / "out.mrg"))
    assert [words(tree)[0:2] for tree in read_trees(tmp_path / "out.mrg")] == [["No", "."], ["A", "dog"], ["A", "cat"]]
    with pytest.raises(InputError, match=r"input is '.*none\*.txt': there is no such file"):
        run("parse", tmp_path / "run", model=model, input=str(tmp_path / "none*.txt"), output=str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "MODEL/model.json"}, "in the folder of the model: choose another place"),
        ({"output": "RUN/config.yaml"}, "a file of the job's own: choose another name"),
        ({"output": "."}, "output is '.', a folder: expected a file"),
        ({"output_format": "xml"}, "output_format is 'xml': expected brackets, jsonl or conll"),
        ({"input_format": "xml"}, "input_format is 'xml': expected text, jsonl or conllu"),
        ({"input": 3}, "input is 3: expected a file, a pattern such as part"),
        (
            {"k_best": 3},
            "k_best, spans, calibration and certify=true need output_format=jsonl, or an output whose name ends",
        ),
        (
            {"k_best": 3, "output_format": "conll"},
            "k_best, spans, calibration and certify=true need output_format=jsonl, .*: found conll",
        ),
        (
            {"calibration": "x.json"},
            "k_best, spans, calibration and certify=true need output_format=jsonl, or an output whose",
        ),
        ({"calibration": "x.json", "output_format": "jsonl"}, "cannot read 'x.json': no such file"),
        ({"tokenize": True, "tags": True}, "tokenize and tags are both true"),
        ({"backend": "ray", "input": None}, "job=parse by backend=ray needs input=FILE and output=FILE"),
        ({"backend": "spark"}, "backend is 'spark': expected processes or ray"),
    ],
)
def test_what_cannot_be_done_is_said_before_work(tmp_path, model, options, message):
    (tmp_path / "in.txt").write_text("A dog .\n")
    places = {"MODEL": model, "RUN": str(tmp_path / "run")}
    given = {"model": model, "input": str(tmp_path / "in.txt"), "output": str(tmp_path / "out.mrg")} | options
    for name, place in places.items():
        given["output"] = given["output"].replace(name, place)
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match=message):
        run("parse", tmp_path / "run", **given)
    assert Model.load(model)


def test_a_refused_job_leaves_the_output_as_it_was(tmp_path, model):
    (tmp_path / "kept.jsonl").write_text("precious")
    done = subprocess.run(
        arguments("job=parse", f"model=[{model},{model}]", "certify=true", "output=kept.jsonl", "hydra.run.dir=out"),
        input="A dog .\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "certify needs one grammar" in done.stderr
    assert (tmp_path / "kept.jsonl").read_text() == "precious"


def test_output_over_standard_input_is_refused(tmp_path, model):
    (tmp_path / "x.txt").write_text("A dog .\n")
    with (tmp_path / "x.txt").open() as source:
        done = subprocess.run(
            arguments("job=parse", f"model={model}", "output=x.txt", "hydra.run.dir=out"),
            stdin=source,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "lvpcfg: input and output are the same file, 'x.txt': its sentences would be lost.\n"
    assert (tmp_path / "x.txt").read_text() == "A dog .\n"


def test_a_closed_standard_input_is_said(tmp_path, model):
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *arguments("job=parse", f"model={model}", "hydra.run.dir=out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr == "lvpcfg: standard input is closed: expected sentences there, or input=FILE.\n"


# ---------------------------------------------------------------- ends of all kinds


@pytest.fixture
def options(tmp_path, model):
    """Those of a job of some thirty pieces."""
    (tmp_path / "in.txt").write_text("".join(" ".join(sentence) + "\n" for sentence in DEV * 3))
    return ["job=parse", f"model={model}", "input=in.txt", "output=out.mrg", "batch_tokens=150", "hydra.run.dir=out"]


@pytest.fixture
def expected(tmp_path, options, parser):
    """What an undisturbed job writes."""
    writer = Writer(formats.BRACKETS)
    return b"".join(writer.bytes(None, [tree]) for tree in parser.parse_sents(DEV)) * 3


@pytest.fixture(scope="module")
def parser(model):
    return Parser.load(model, device="cpu")


def begun(options, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments(*options), cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_parts(folder, number, process):
    """Until there are so many, or the job has ended."""
    while process.poll() is None and len(list(folder.glob("*.part"))) < number:
        time.sleep(0.002)


def children(process):
    """The numbers of the processes that a process has started to parse."""
    told = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in told.stdout.splitlines() if "spawn_main" in line]


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.endurance)])
def test_a_job_that_is_killed_anywhere_goes_on_to_the_same_output(tmp_path, options, expected, kills):
    generator, ended = random.Random(kills), 0
    while kills:
        process = begun(options, tmp_path)
        if generator.random() < 0.5:
            wait_for_parts(tmp_path / "out.mrg.parts", generator.randrange(25), process)
            time.sleep(generator.random() * 0.05)
        else:
            time.sleep(generator.random() * 5)
        if process.poll() is None:
            process.kill()
            kills -= 1
        process.communicate()
        if process.returncode == 0:
            assert (tmp_path / "out.mrg").read_bytes() == expected
            (tmp_path / "out.mrg").unlink()
            ended += 1
    process = begun(options, tmp_path)
    assert process.communicate()[1] == ""
    assert (tmp_path / "out.mrg").read_bytes() == expected
    assert not (tmp_path / "out.mrg.parts").exists()


def test_a_worker_that_is_killed_ends_the_job_with_a_sentence_and_the_same_command_goes_on(tmp_path, options, expected):
    options.append("processes=2")
    process = begun(options, tmp_path)
    while not (workers := children(process)) and process.poll() is None:
        time.sleep(0.1)
    wait_for_parts(tmp_path / "out.mrg.parts", 3, process)
    os.kill(workers[0], signal.SIGKILL)
    assert "lvpcfg: one of the 2 processes was ended from outside" in process.communicate()[1]
    assert process.returncode == 1
    left = len(list((tmp_path / "out.mrg.parts").glob("*.part")))
    assert left >= 3
    process = begun(options, tmp_path)
    wait_for_parts(tmp_path / "out.mrg.parts", left + 3, process)
    process.kill()
    assert process.communicate()[1] == ""  # nor does what Python leaves behind say anything
    process = begun(options, tmp_path)
    assert process.communicate()[1] == ""
    assert (tmp_path / "out.mrg").read_bytes() == expected


def test_ctrl_c_says_how_to_go_on(tmp_path, options, expected):
    process = begun(options, tmp_path)
    wait_for_parts(tmp_path / "out.mrg.parts", 3, process)
    process.send_signal(signal.SIGINT)
    said, error = process.communicate()
    assert "Stopped. What is parsed is kept. To go on:\n" in said
    assert error.endswith("lvpcfg: interrupted.\n")
    assert process.returncode == 130
    assert begun(options, tmp_path).communicate()[1] == ""
    assert (tmp_path / "out.mrg").read_bytes() == expected


def test_a_full_disk_loses_nothing(tmp_path, options, expected):
    """Files may not grow beyond what the parts need: the output has no room."""
    largest = len(expected) // 2
    process = subprocess.Popen(
        arguments(*options),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )
    assert process.communicate()[1] == "lvpcfg: cannot write 'out.mrg': file too large.\n"
    assert not (tmp_path / "out.mrg").exists()
    done = len(list((tmp_path / "out.mrg.parts").glob("*.part")))
    assert done > 10
    assert begun(options, tmp_path).communicate()[1] == ""
    assert (tmp_path / "out.mrg").read_bytes() == expected


# ---------------------------------------------------------------- several processes and machines


def torchrun(options, cwd):
    """Started by torchrun; each process is the leader of none."""
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "run.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *how], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_torchrun_shares_the_pieces_and_goes_on_where_a_process_was_killed(tmp_path, options, expected):
    process = torchrun(options, tmp_path)
    wait_for_parts(tmp_path / "out.mrg.parts", 3, process)
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    os.kill(int(told.stdout.split()[-1]), signal.SIGKILL)
    process.communicate()
    assert process.returncode != 0
    assert not (tmp_path / "out.mrg").exists()
    process = torchrun(options, tmp_path)
    said, error = process.communicate()
    assert process.returncode == 0, error
    assert "The trees are in out.mrg." in said
    assert (tmp_path / "out.mrg").read_bytes() == expected


def test_ray_gives_the_pieces_of_a_killed_actor_to_another(tmp_path, options, expected):
    pytest.importorskip("ray")
    options += ["backend=ray", "processes=2"]
    process = begun(options, tmp_path)
    wait_for_parts(tmp_path / "out.mrg.parts", 3, process)
    killed = subprocess.run(["pkill", "-9", "-o", "-f", "ray::MapWorker"])
    assert killed.returncode == 0
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert (tmp_path / "out.mrg").read_bytes() == expected


def test_ray_is_not_asked_for_more_than_there_is():
    pytest.importorskip("ray")
    from lvpcfg.jobs.cluster import READING, _resources

    class Options:
        device, processes = None, 2

    assert _resources(Options, {"CPU": 2.0}) == ("cpu", (2 - READING) / 2)
    assert _resources(Options, {"CPU": 64.0, "GPU": 2.0}) == ("cuda", 1.0)
    assert _resources(Options, {"CPU": 64.0, "GPU": 1.0}) == ("cpu", 1.0)
    Options.processes = 3
    with pytest.raises(InputError, match="processes is 3, for a Ray cluster of 2 CPUs and 0 GPUs: expected no more"):
        _resources(Options, {"CPU": 2.0})
    Options.device = "cuda"
    with pytest.raises(InputError, match="processes is 3, for a Ray cluster of 9 CPUs and 1 GPUs"):
        _resources(Options, {"CPU": 9.0, "GPU": 1.0})
