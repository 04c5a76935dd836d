"""Corpora: bytes -> records -> pieces -> parts -> bytes again, whatever the bytes are and wherever a job is stopped."""

import gzip
import json
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from nltk.tree import Tree
from running import run

from lvpcfg import InputError, Parser, corpus, train
from lvpcfg.batch import formats, pieces, records
from lvpcfg.batch.formats import Writer
from lvpcfg.batch.parts import Parts
from lvpcfg.batch.pieces import Parsed, Piece, Summary, Work
from lvpcfg.batch.records import Corpus, Reader, Record
from lvpcfg.calibration import Calibration, Scaling
from lvpcfg.jobs import batch
from lvpcfg.jobs.parse import PARSED
from lvpcfg.parses import Parse, Span
from lvpcfg.trees.brackets import trees_from_text
from lvpcfg.trees.walk import words

NASTY = [
    "a",
    "dog",
    "(",
    ")",
    "-LRB-",
    "\x00",
    "\x1b[31m",
    "\x7f",
    "é",
    "🐕",
    "\u2028",
    "\u00a0",
    "\x85",
    "\ufeff",
    "#",
    "=",
    "/",
]
BYTES = [b" ", b"\t", b"\r", b"\x0b", b"\xff", b"\xc3", b"\xed\xa0\x80", *(text.encode() for text in NASTY)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train(corpus("train")[:40]).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def parser(model):
    return Parser.load(model, device="cpu")


def read(data, kind="text", **options):
    return list(Reader(kind, **options).records(data.splitlines(keepends=True) if kind == "jsonl" else lines(data)))


def lines(data):
    return [line + b"\n" for line in data.split(b"\n")[:-1]] + [rest for rest in data.split(b"\n")[-1:] if rest]


# ---------------------------------------------------------------- reading


def test_lines_of_text():
    found = read(b"A dog .\n\n  \t \r\n(x)\rb\nlast")
    assert [record.words for record in found] == [["A", "dog", "."], [], [], ["-LRB-x-RRB-", "b"], ["last"]]
    assert not any(record.repaired or record.problem for record in found)


def test_bytes_that_are_no_text_are_replaced_and_told():
    (record,) = read(b"A \xff\xfe dog\n")
    assert (record.words, record.repaired) == (["A", "��", "dog"], True)


@given(st.lists(st.sampled_from(BYTES), max_size=12).map(b"".join))
def test_each_line_is_a_record_of_words_that_can_stand_in_trees(line):
    (record,) = read(line + b"\n")
    for word in record.words:
        assert word
        assert not set(word) & set(" \t\r\n\f\v()")


def test_ten_thousand_lines_of_anything_are_ten_thousand_trees_with_their_words(model, tmp_path):
    generator = random.Random(0)
    data = [b"".join(generator.choices(BYTES, k=generator.randrange(9))) for _ in range(10_000)]
    (tmp_path / "in.txt").write_bytes(b"".join(line + b"\n" for line in data))
    output = tmp_path / "out.mrg"
    result, _ = run("parse", tmp_path / "run", model=model, input=str(tmp_path / "in.txt"), output=str(output))
    found = output.read_bytes().decode().split("\n")
    expected = [record.words for record in read(b"".join(line + b"\n" for line in data))]
    assert result["records"] == len(found) - 1 == 10_000
    assert found.pop() == ""
    assert result["repaired"] == sum(line.decode("utf-8", "replace").encode() != line for line in data)
    for line, there in zip(found, expected, strict=True):
        trees = trees_from_text(line) if line else []
        assert [words(tree) for tree in trees] == [there] * bool(there)


def test_raw_text_is_split_into_words():
    (record,) = read("He didn't (really) say “no”.\n".encode(), tokenize=True)
    assert record.words == ["He", "did", "n't", "-LRB-", "really", "-RRB-", "say", "“no”", "."]


def test_tags_of_text():
    (record,) = read(b"A/DT 1/2/CD dog b/ /c\n", tags=True)
    assert record.words == ["A", "1/2", "dog", "b/", "/c"]
    assert record.tags == ["DT", "CD", None, None, None]


def test_lines_of_json():
    data = [
        {"id": 7, "tokens": ["New York", "", "("]},
        {"id": "../../x", "text": "A dog ."},
        {"tokens": ["A"], "tags": ["DT"]},
        {"id": [1], "tokens": ["A"]},
        {"id": 1, "tokens": "A"},
        {"tokens": ["A"], "tags": []},
    ]
    found = read(
        "".join(json.dumps(each) + "\n" for each in data).encode() + b"nonsense\n[1]\n\n" + b"[" * 10_000,
        "jsonl",
        tags=True,
    )
    assert found[0] == Record(["New_York", "_", "-LRB-"], None, 7, None, True)
    assert found[1] == Record(["A", "dog", "."], [None] * 3, "../../x")
    assert found[2].tags == ["DT"]
    assert [record.problem for record in found[3:6]] == [
        'expected "id", a text or a number',
        'expected "tokens", a list of words, or "text"',
        'expected "tags", one for each word, or null',
    ]
    assert found[4].id == 1
    assert [record.words for record in found[6:]] == [[], [], [], []]
    assert found[6].problem.startswith("no JSON")
    assert found[7].problem.startswith("expected a JSON object")
    assert found[8] == Record([])  # an empty line
    assert found[9].problem.startswith("no JSON")


def test_sentences_of_conllu():
    text = (
        "# sent_id = a1\n1-2\tdunno\t_\n1\tdo\t_\tAUX\tVB\n2\tn't\t_\tPART\t_\n\n\n"
        "# text = x\n1\tA dog\n\nno columns\n2\tb\n\n"
    )
    first, second, third = read(text.encode(), "conllu", tags=True)
    assert (first.id, first.words, first.tags) == ("a1", ["do", "n't"], ["VB", None])
    assert (second.words, second.tags, second.repaired) == (["A_dog"], [None], True)
    assert third.problem == "expected columns separated by tabs: 'no columns'"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstandard"])
def test_files_are_unpacked_whatever_their_names(tmp_path, pack):
    path = tmp_path / "in.txt"
    path.write_bytes(pack(b"\xef\xbb\xbfA dog\nb") + (pack(b"c\n") if pack is not bytes else b"c\n"))
    some = Corpus(((str(path), Reader("text")), (str(path), Reader("text"))))
    assert [record.words for record in some.records()] == [["A", "dog"], ["bc"]] * 2
    assert some.survey()[1] == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(b"A dog .\n" * 1000, mtime=0)[:-20], "the compressed data is damaged"),
        ("A dog".encode("utf-16"), "in UTF-16: expected UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, data, message):
    (tmp_path / "in.gz").write_bytes(data)
    with pytest.raises(InputError, match=f"cannot read '.*in.gz': .*{message}"):
        Corpus(((str(tmp_path / "in.gz"), Reader("text")),)).survey()


def test_the_digest_is_that_of_the_contents(tmp_path):
    def digest(*contents):
        for number, content in enumerate(contents):
            (tmp_path / str(number)).write_bytes(content)
        return Corpus(tuple((str(tmp_path / str(number)), Reader("text")) for number in range(len(contents)))).survey()

    assert digest(b"a\nb\n") == digest(gzip.compress(b"a\nb\n"))
    assert len({digest(b"a\nb\n")[0], digest(b"a\n", b"b\n")[0], digest(b"a\nb")[0], digest(b"a\nc\n")[0]}) == 4


# ---------------------------------------------------------------- writing


def parse_of(text):
    return Parse(Tree.fromstring(text), -1.5, 0.25, -0.1, False)


def test_trees_as_json():
    writer = Writer(formats.JSONL)
    found = json.loads(writer.bytes(Record(["b"], id="x"), [parse_of("(A b)")]))
    assert found == {"id": "x", "tree": "(A b)", "log_prob": -1.5, "posterior": 0.25, "flat": False}
    more = Writer(formats.JSONL, k_best=2, spans=True)
    other = replace(parse_of("(B b)"), log_prob=-math.inf, posterior=0.0, flat=True)
    best = replace(parse_of("(A b)"), spans=(Span("A", 0, 1, 0.75),))
    assert json.loads(more.bytes(Record(["b"], id="x"), [best, other])) == found | {
        "spans": [["A", 0, 1, 0.75]],
        "k_best": [
            {"tree": "(A b)", "log_prob": -1.5, "posterior": 0.25, "spans": [["A", 0, 1, 0.75]]},
            {"tree": "(B b)", "log_prob": None, "posterior": 0.0},
        ],
    }
    assert json.loads(writer.bytes(Record([], id=3, problem="why"), [])) == {"id": 3, "tree": None, "problem": "why"}
    assert json.loads(writer.bytes(Record([]), [])) == {"id": None, "tree": None}
    half = writer.bytes(Record(["b"], id="\ud800"), [parse_of("(A b)")]).decode()  # of a surrogate pair, as in JSON
    assert r'"id": "\ud800"' in half


def test_trees_as_columns():
    tree = Tree.fromstring("(S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .))")
    text = Writer(formats.CONLL).bytes(Record(tree.leaves()), [tree]).decode()
    rows = [line.split("\t") for line in text.split("\n")[:-2]]
    assert [row[5] for row in rows] == ["(TOP(S(NP*", "*)", "(VP*)", "*))"]
    assert [row[2:5] for row in rows] == [
        ["0", "the", "DT"],
        ["1", "dog", "NN"],
        ["2", "barks", "VBZ"],
        ["3", ".", "."],
    ]
    assert len(rows[0]) == 12
    assert Writer(formats.CONLL).bytes(Record([]), []) == b"\n"


# ---------------------------------------------------------------- pieces


lengths = st.lists(st.integers(0, 9), max_size=40)


@given(lengths, st.integers(1, 20), st.integers(1, 12))
def test_pieces_hold_all_records_once(lengths, most, window):
    some = [Record(["x"] * length, id=number) for number, length in enumerate(lengths)]
    found = list(pieces.pieces(some, most, [window] * len(some)))
    assert sorted(record.id for piece in found for _, record in piece.records) == list(range(len(some)))
    assert [piece.number for piece in found] == list(range(len(found)))
    counted = Counter(piece.window for piece in found)
    for piece in found:
        assert piece.of_window == counted[piece.window]
        assert len(piece.records) == 1 or sum(len(record.words) for _, record in piece.records) <= most
        assert all(record.id == piece.window * window + place for place, record in piece.records)
        assert Piece.from_json(piece.to_json()) == piece


@given(st.lists(st.binary(max_size=9), max_size=5), st.integers(0), st.integers(0, 7))
def test_what_is_parsed_is_kept_as_it_is_or_known_to_be_damaged(trees, place, bit):
    parsed = Parsed(3, 1, 2, list(range(len(trees))), trees, Counter(records=len(trees)), [[2, 0.5]])
    data = bytearray(parsed.to_bytes())
    assert Parsed.from_bytes(bytes(data)) == parsed
    data[place % len(data)] ^= 1 << bit
    assert Parsed.from_bytes(bytes(data)) is None
    assert Parsed.from_bytes(bytes(data[: place % len(data)])) is None


# ---------------------------------------------------------------- parts

SENTENCES = ["A dog barks .", "", "The man sleeps .", "No .", "The old man saw a dog .", "A cat ."] * 5


@pytest.fixture
def job(tmp_path, model):
    """Parses the file `in.txt` into a file, in small pieces."""
    (tmp_path / "in.txt").write_text("".join(line + "\n" for line in SENTENCES))
    return partial(
        run,
        "parse",
        tmp_path / "run",
        model=model,
        input=str(tmp_path / "in.txt"),
        output=str(tmp_path / "out.mrg"),
        batch_tokens=8,
    )


class StoppedError(Exception):
    pass


def stopped(job, monkeypatch, after, **options):
    """The numbers of the pieces that a job parses; it is stopped after some of them."""
    parsed, before = [], pieces.parse

    def parse(parser, piece, writer):
        if len(parsed) == after:
            raise StoppedError
        parsed.append(piece.number)
        return before(parser, piece, writer)

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "parse", parse)
        try:
            job(**options)
        except StoppedError:
            assert len(parsed) == after
    return parsed


@pytest.mark.parametrize("output", ["out.mrg", "out.jsonl.gz", "out.conll.zst"])
def test_a_job_that_was_stopped_goes_on_to_the_same_output(job, tmp_path, monkeypatch, output):
    path = tmp_path / output
    number = len(stopped(job, monkeypatch, None, output=str(path)))
    expected = path.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {"in.txt", output, "run"}
    path.unlink()
    first = stopped(job, monkeypatch, 3, output=str(path))
    assert not path.exists()
    second = stopped(job, monkeypatch, 4, output=str(path))
    rest = stopped(job, monkeypatch, None, output=str(path))
    assert [*first, *second, *rest] == list(range(number))
    assert path.read_bytes() == expected
    assert {each.name for each in tmp_path.iterdir()} == {"in.txt", output, "run"}


def test_damaged_and_strange_parts_are_made_again(job, tmp_path, monkeypatch):
    job()
    expected = (tmp_path / "out.mrg").read_bytes()
    stopped(job, monkeypatch, 5)
    folder = tmp_path / "out.mrg.parts"
    damaged = folder / "00000002.part"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    (folder / "99999999.part").write_bytes(b"nonsense")
    (folder / ".00000007.part.123.tmp").write_bytes(b"half of it")
    (folder / "notes.txt").write_text("mine")
    assert stopped(job, monkeypatch, None)[0] == 2
    assert (tmp_path / "out.mrg").read_bytes() == expected
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]  # what is not ours stays


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"decoder": "viterbi"}, "its decoder was None, not 'viterbi'"),
        ({"batch_tokens": 9}, "its batch_tokens was 8, not 9"),
        ({"dtype": "float64"}, "its dtype was 'float32', not 'float64'"),
        ({"input": None}, "its input was"),
        ({"model": None}, "its model was"),
    ],
)
def test_what_would_be_mixed_is_refused(job, tmp_path, monkeypatch, options, what):
    stopped(job, monkeypatch, 2)
    if "input" in options:
        (tmp_path / "other.txt").write_text("".join(line + "\n" for line in SENTENCES[1:]))
        options = {"input": str(tmp_path / "other.txt")}
    if "model" in options:
        train(corpus("train")[:41]).save(tmp_path / "other")
        options = {"model": str(tmp_path / "other")}
    with pytest.raises(InputError, match=f"out.mrg.parts holds trees of an earlier job, and {what}"):
        job(**options)
    assert stopped(job, monkeypatch, None)[0] == 2  # nothing is lost


def test_another_calibration_is_refused(job, tmp_path, monkeypatch):
    """By what it holds: its file may have another name."""
    options = {"output": str(tmp_path / "out.jsonl")}
    for slope in (0.5, 0.7):
        Calibration(Scaling(slope, 0.0), Scaling(slope, 0.0)).save(tmp_path / f"{slope}.json")
    (tmp_path / "same.json").write_bytes((tmp_path / "0.5.json").read_bytes())
    stopped(job, monkeypatch, 2, calibration=str(tmp_path / "0.5.json"), **options)
    with pytest.raises(InputError, match=r"out.jsonl.parts holds trees of an earlier job, and its calibration was"):
        job(calibration=str(tmp_path / "0.7.json"), **options)
    assert stopped(job, monkeypatch, None, calibration=str(tmp_path / "same.json"), **options)[0] == 2


def test_an_input_that_changes_under_the_job_is_refused(job, tmp_path, monkeypatch):
    before = pieces.parse

    def parse(parser, piece, writer):
        with (tmp_path / "in.txt").open("a") as stream:
            stream.write("No .\n")
        return before(parser, piece, writer)

    monkeypatch.setattr(pieces, "parse", parse)
    with pytest.raises(InputError, match="the input was changed while it was parsed"):
        job()
    assert not (tmp_path / "out.mrg").exists()


def test_two_jobs_do_not_write_the_same_output(tmp_path):
    parts = Parts(str(tmp_path / "out"), {"input": "x"})
    with parts.begun(), pytest.raises(InputError, match=r"another job is writing '.*out' now"), parts.begun():
        pass


def test_a_part_that_is_lost_before_the_end_is_named(tmp_path):
    parts = Parts(str(tmp_path / "out"), {})
    with parts.begun():
        parts.write(Parsed(0, 0, 1, [0], [b"x\n"], Counter(records=1)))
        with pytest.raises(InputError, match=r"part 1 in .* is lost or damaged"):
            parts.join(2, b"", b"")
        assert not (tmp_path / "out").exists()
        assert parts.join(1, b"<", b">").counts["records"] == 1
    assert (tmp_path / "out").read_bytes() == b"<x\n>"


def test_the_output_is_the_same_from_a_stream_and_in_other_pieces(job, tmp_path, parser):
    job()
    expected = (tmp_path / "out.mrg").read_bytes()
    job(batch_tokens=1000)
    assert (tmp_path / "out.mrg").read_bytes() == expected
    some = Corpus(((str(tmp_path / "in.txt"), Reader("text")),))
    with batch.Progress(None, SimpleNamespace(result={}), PARSED) as progress:
        engine = batch.Local(parser, Writer(formats.BRACKETS))
        windows = batch._windows(engine.results(pieces.pieces(some.records(), 8, [4] * 10)), progress)
        assert b"".join(batch.in_order(window) for window in windows) == expected


def test_work_leaves_out_what_is_done(tmp_path):
    (tmp_path / "in.txt").write_text("a b\nc\nd e f\n")
    some = Corpus(((str(tmp_path / "in.txt"), Reader("text")),))
    assert [piece.number for piece in Work(some, 3, {0, 2})] == [1]
    assert [piece.number for piece in Work(some, 3)] == [0, 1]


def test_a_summary_adds_up():
    summary = Summary()
    for number in range(2):
        summary.add(Parsed(number, 0, 2, [number], [b""], Counter(records=1, words=4), [(1, 0.5)]))
    assert (summary.counts["records"], summary.counts["words"], summary.counts["fallbacks"]) == (2, 8, 0)
    assert batch._quantiles([(9, 1.0), (90, 0.5), (1, 3.0)]) == {"median": 0.5, "p95": 1.0, "p99": 1.0}


@pytest.mark.parametrize(
    ("path", "kinds"),
    [("a.txt", ("text", "brackets")), ("a.jsonl.gz", ("jsonl", "jsonl")), ("a.conllu", ("conllu", "brackets"))],
)
def test_names_tell_formats(path, kinds):
    assert (records.kind_of(path), formats.kind_of(path)) == kinds
