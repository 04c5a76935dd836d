"""job=serve: what it answers, to whom and how many, in which batches, and how it ends."""

import asyncio
import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from io import StringIO

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tree import Tree
from rich.console import Console
from running import ROOT, arguments, options_of
from running import run as start
from webdriver import browser

from lvpcfg import InputError, Parser, corpus, train
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.serving import Server, address, bound
from lvpcfg.serve.answers import Answers
from lvpcfg.serve.asked import Asked, Details, RefusedError
from lvpcfg.serve.batcher import Batcher, Size, Ticket, Waiting
from lvpcfg.trees.brackets import format_tree

SMALL = {"max_body": 20_000, "max_sentences": 30, "max_words": 40, "max_k_best": 4, "max_waiting": 100}
KEYS = {"words", "tree", "log_prob", "posterior", "sentence_log_prob", "flat"}


# ---------------------------------------------------------------- who is parsed with whom


def ticket(lengths, k_best=1):
    return Ticket(Asked([["w"] * length for length in lengths], Details(k_best=k_best)), None)


REQUESTS = st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 2)), max_size=8)


@settings(max_examples=50)
@given(REQUESTS, st.integers(1, 5), st.integers(1, 30), st.integers(1, 100))
def test_batches(requests, sentences, words, spans):
    """Nothing is lost, batches are as small as they have to be, and each request has its turn."""
    waiting, tickets, done = Waiting(Size(sentences, words, spans)), [ticket(*request) for request in requests], []
    for one in tickets:
        waiting.add(one)
    before = {one: place for place, one in enumerate(tickets)}
    while waiting.tickets:
        first = waiting.tickets[0]
        batch = waiting.take()
        done += batch
        lengths = [len(one.asked.sentences[place]) for one, place in batch]
        assert batch[0][0] is first
        assert len({one.asked.details for one, _ in batch}) == 1
        assert len(batch) <= sentences
        assert len(batch) == 1 or (sum(lengths) <= words and sum(length**2 for length in lengths) <= spans)
        shares = [sum(one is other for other, _ in batch) for one in {one for one, _ in batch} if one.left()]
        assert max(shares, default=0) - min(shares, default=0) <= 1  # of those who still wait
        for one in waiting.tickets:  # who was left out is nearer to its turn
            if all(one is not other for other, _ in batch):
                now = waiting.tickets.index(one)
                assert now < before[one]
        before = {one: place for place, one in enumerate(waiting.tickets)}
        assert waiting.sentences == sum(one.left() for one in tickets)
    for one in tickets:
        assert [place for other, place in done if other is one] == list(range(len(one.asked.sentences)))


def test_a_large_request_does_not_keep_small_ones_waiting():
    waiting = Waiting(Size(8, 1000))
    waiting.add(ticket([5] * 1000))
    waiting.take()
    small = [ticket([5]) for _ in range(6)]
    for one in small:
        waiting.add(one)
    batch = [one for one, _ in waiting.take()]
    assert all(one in batch for one in small)


class Echo:
    """Finds the words, and keeps what it was asked."""

    compared = None

    def __init__(self, seconds=0.0):
        self.batches, self.seconds, self.may_go = [], seconds, threading.Event()
        self.may_go.set()

    def __call__(self, sentences, details):
        self.batches.append(sentences)
        self.may_go.wait(30)
        time.sleep(self.seconds)
        if ["bug"] in sentences:
            raise ZeroDivisionError
        if ["wrong"] in sentences:
            raise InputError("this is wrong.")
        if ["large"] in sentences:
            raise MemoryError
        return [" ".join(words) for words in sentences]


def with_batcher(parse, use):
    """Runs `use(batcher)` beside the batcher."""

    async def run():
        batcher = Batcher(parse, Size(8, 100), wait=0.01, max_waiting=100)
        running = asyncio.ensure_future(batcher.run())
        try:
            return await asyncio.wait_for(use(batcher), 60)
        finally:
            running.cancel()
            batcher.close()

    return asyncio.run(run())


def one(*words, **details):
    return Asked([list(words)], Details(**details))


def test_requests_that_come_together_are_parsed_together():
    parse = Echo()

    async def use(batcher):
        found = await asyncio.gather(*(batcher.ask(one(str(number))) for number in range(8)))
        assert found == [[str(number)] for number in range(8)]
        assert len(parse.batches) == 1
        await asyncio.gather(batcher.ask(one("a")), batcher.ask(one("b", k_best=2)))
        assert len(parse.batches) == 3
        assert (batcher.figures.requests, batcher.figures.answered, batcher.figures.sentences) == (10, 10, 10)

    with_batcher(parse, use)


def test_what_is_wrong_with_one_request_is_no_harm_to_others(caplog):
    async def use(batcher):
        asked = [one("a"), one("wrong"), one("bug"), one("large"), Asked([["b"], ["wrong"], ["c"]]), one("d")]
        found = await asyncio.gather(*map(batcher.ask, asked), return_exceptions=True)
        assert [found[0], found[5]] == [["a"], ["d"]]
        assert [error.status for error in found[1:5]] == [422, 500, 500, 422]
        assert str(found[1]) == "this is wrong."
        assert "memory" in str(found[3])
        assert not batcher.open
        assert not batcher.waiting.sentences

    with_batcher(Echo(), use)
    assert "ZeroDivisionError" in caplog.text


def test_who_does_not_wait_is_not_parsed_and_too_many_are_refused():
    parse = Echo()
    parse.may_go.clear()

    async def use(batcher):
        tasks = [asyncio.ensure_future(batcher.ask(one(str(number)))) for number in range(3)]
        while not parse.batches:
            await asyncio.sleep(0.01)
        gone = asyncio.ensure_future(batcher.ask(Asked([["gone"]] * 90)))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="90 sentences are waiting already") as refused:
            await batcher.ask(Asked([["more"]] * 11))
        assert refused.value.status == 503
        assert int(refused.value.headers["Retry-After"]) >= 1
        gone.cancel()
        last = asyncio.ensure_future(batcher.ask(Asked([["last"]] * 11)))
        await asyncio.sleep(0.01)
        parse.may_go.set()
        await asyncio.gather(*tasks, last)
        assert not any(["gone"] in batch for batch in parse.batches)
        assert (batcher.figures.left, batcher.figures.refused) == (1, 1)

    with_batcher(parse, use)


def test_giving_up():
    parse = Echo()
    parse.may_go.clear()

    async def use(batcher):
        tasks = [asyncio.ensure_future(batcher.ask(one("a"))) for _ in range(20)]
        await asyncio.sleep(0.05)
        batcher.give_up()
        parse.may_go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {error.status for error in found} == {503}

    with_batcher(parse, use)


# ---------------------------------------------------------------- a server in this process


@pytest.fixture(scope="module")
def model():
    return train(corpus("train")[:400])


@pytest.fixture(scope="module")
def parser(model):
    return Parser(model, device="cpu")


@pytest.fixture(scope="module")
def compared(model):
    return Parser(model, decoder="viterbi", device="cpu")


@contextmanager
def serving(answers, folder, **options):
    """A server at work in a thread; gives out it and its address."""
    chosen = options_of("serve", **{"model": "the model", "port": 0, **SMALL, **options})
    run = Run(folder, Console(file=StringIO()))
    with bound(chosen.host, chosen.port) as listener:
        server = Server.of(chosen, answers, run)
        listener.listen(100)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield server, address(listener)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def client(parser, compared, tmp_path_factory):
    options = {"compared": "another", "hosts": ["parse.example.org"]}
    server = serving(Answers(parser, compared), tmp_path_factory.mktemp("run"), **options)
    with server as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def results(client, **asked):
    found = client.post("/parse", json=asked)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == "application/json"
    assert list(found.json()) == ["results"]
    return found.json()["results"]


def test_a_sentence_of_raw_text(client, parser):
    """Its words are those of job=parse tokenize=true."""
    (found,) = results(client, text="Doesn't the dog (a cat) bark?")
    words = ["Does", "n't", "the", "dog", "-LRB-", "a", "cat", "-RRB-", "bark", "?"]
    (expected,) = parser.analyse([words])
    assert found.keys() == KEYS
    assert found["words"] == words
    assert found["tree"] == format_tree(expected.tree)
    assert found["sentence_log_prob"] == pytest.approx(expected.sentence_log_prob, rel=1e-6)
    assert found["log_prob"] == pytest.approx(expected.log_prob, rel=1e-6)
    assert found["posterior"] == pytest.approx(expected.posterior, rel=1e-4)
    assert found["flat"] is False


def test_many_sentences_in_their_order(client, parser):
    given = [
        "The dog barks.",
        ["A", "cat", "(", "sleeps.", ")"],
        *(tree.leaves() for tree in corpus("dev")[:40] if len(tree.leaves()) < 9),
    ]
    found = results(client, sentences=given, k_best=3, spans=True)
    assert [one["words"] for one in found] == [
        ["The", "dog", "barks", "."],
        ["A", "cat", "-LRB-", "sleeps.", "-RRB-"],
        *given[2:],
    ]
    expected = parser.k_best_sents([one["words"] for one in found], 3, spans=True)
    for one, parses in zip(found, expected, strict=True):
        assert [tree["tree"] for tree in one["k_best"]] == [format_tree(parse.tree) for parse in parses]
        assert one["tree"] == one["k_best"][0]["tree"]
        assert [span[:3] for span in one["spans"]] == [[s.label, s.start, s.end] for s in parses[0].spans]


def test_a_flat_tree_has_no_log_prob(model):
    answers = Answers(Parser(model, max_length=2, device="cpu"))
    (found,) = answers([["a", "dog", "."]], Details(chart=True, spans=True))
    assert found["flat"]
    assert found["log_prob"] is found["sentence_log_prob"] is None
    assert (found["posterior"], found["chart"]) == (0.0, [])
    json.dumps(found, allow_nan=False)


def test_the_chart(client, parser):
    words = ["The", "old", "man", "saw", "the", "dog", "in", "the", "park", "."]
    (found,) = results(client, sentences=[words], chart=True, spans=True)
    (expected,) = parser.chart([words])
    assert [tuple(phrase[:3]) for phrase in found["chart"]] == [(s.label, s.start, s.end) for s in expected]
    sure = [span for span in found["spans"] if span[3] > 0.02]
    assert all(any(span[:3] == phrase[:3] for phrase in found["chart"]) for span in sure)


def test_two_models(client, compared):
    (found,) = results(client, text="The dog barks.", compare=True, k_best=2)
    assert found.keys() == KEYS | {"k_best", "seconds", "compared"}
    assert found["compared"].keys() == KEYS | {"k_best", "seconds"}
    (expected,) = compared.k_best_sents([found["words"]], 2)
    assert found["compared"]["tree"] == format_tree(expected[0].tree)
    assert min(found["seconds"], found["compared"]["seconds"]) > 0


def test_health(client):
    before = client.get("/health").json()
    results(client, sentences=["A dog.", "A cat."])
    found = client.get("/health").json()
    assert (found["status"], found["model"], found["compared"], found["device"]) == (
        "ok",
        "the model",
        "another",
        "cpu",
    )
    assert found["counts"]["requests"] - before["counts"]["requests"] == 1
    assert found["counts"]["sentences"] - before["counts"]["sentences"] == 2
    assert found["queue"] == {"requests": 0, "sentences": 0}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body is no JSON"),
        (b"{", 400, "the body is no JSON"),
        (b'{"text": NaN}', 400, "NaN is no number"),
        (b'{"text": "\xff"}', 400, "can't decode byte 0xff"),
        (b'{"k_best": ' + b"9" * 5000 + b"}", 400, "the body is no JSON"),
        (b"[" * 19000, 400, "the body is no JSON"),
        ([], 422, "the body is []: expected an object"),
        ({}, 422, 'expected either "text", one sentence, or "sentences"'),
        ({"text": "a", "sentences": ["a"]}, 422, "expected either"),
        ({"text": "a", "model": "/etc"}, 422, "there is no field 'model': expected text, sentences, k_best"),
        ({"text": 3}, 422, '"text" is 3: expected a sentence'),
        ({"text": None}, 422, '"text" is None'),
        ({"text": ["a"]}, 422, "\"text\" is ['a']: expected a sentence"),
        ({"text": " \n"}, 422, "sentence 1 is ' \\n': expected one or more words"),
        ({"sentences": "a"}, 422, "\"sentences\" is 'a': expected a list"),
        ({"sentences": []}, 422, '"sentences" is []'),
        ({"sentences": ["a", 3]}, 422, "sentence 2 is 3: expected a text, or a list of words"),
        ({"sentences": [["a", None]]}, 422, "sentence 1 is ['a', None]"),
        ({"sentences": ["a", []]}, 422, "sentence 2 is []: expected one or more words"),
        ({"sentences": ["a"] * 31}, 413, "there are 31 sentences in the request: expected 30 at the most"),
        ({"text": "a " * 41}, 422, "sentence 1 has 41 words: expected 40 at the most"),
        ({"text": "a", "k_best": 0}, 422, '"k_best" is 0: expected a number of trees from 1 to 4'),
        ({"text": "a", "k_best": 5}, 422, '"k_best" is 5'),
        ({"text": "a", "k_best": True}, 422, '"k_best" is True'),
        ({"text": "a", "k_best": 1.0}, 422, '"k_best" is 1.0'),
        ({"text": "a", "spans": 1}, 422, '"spans" is 1: expected true or false'),
        ({"text": "a", "chart": None}, 422, '"chart" is None'),
        ({"sentences": ["a", "b"], "compare": True}, 422, 'there are 2 sentences: "compare" takes one'),
        ({"text": "a" * 20_000}, 413, "the body has more than 20,000 bytes"),
    ],
)
def test_what_cannot_be_used_gets_one_sentence(client, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = client.post("/parse", content=content, headers={"Content-Type": "application/json; charset=utf-8"})
    assert found.status_code == status
    assert list(found.json()) == ["error"]
    assert message in found.json()["error"]
    assert found.json()["error"].endswith(".")


def test_words_that_no_tree_can_hold_are_replaced(client):
    body = rb'{"sentences": [["a b", "", "\ud800", "(x)"], "a \ud800 \u2028 b"]}'
    found = client.post("/parse", content=body, headers={"Content-Type": "application/json"}).json()["results"]
    assert found[0]["words"] == ["a_b", "_", "?", "-LRB-x-RRB-"]
    assert [Tree.fromstring(one["tree"]).leaves() == one["words"] for one in found[:1]] == [True]


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_pages_of_others_may_send_is_refused(client, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    found = client.post("/parse", content=b'{"text": "a"}', headers=headers)
    assert found.status_code == 415
    assert "expected application/json" in found.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/parse", 405),
        ("OPTIONS", "/parse", 405),
        ("POST", "/", 405),
        ("DELETE", "/health", 405),
        ("GET", "/parse/", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("POST", "/<script>", 404),
    ],
)
def test_other_places_and_methods(client, method, path, status):
    found = client.request(method, path)
    assert found.status_code == status
    assert "expected POST /parse, GET /health, or the page at GET /" in found.json()["error"]
    assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("LOCALHOST", 200),
        ("parse.example.org", 200),
        ("evil.example.org", 421),
        ("localhost.example.org", 421),
        ("127.0.0.1.example.org:8000", 421),
        ("", 421),
    ],
)
@pytest.mark.parametrize("path", ["/", "/health"])
def test_only_names_of_the_server_are_answered(client, path, host, status):
    found = client.get(path, headers={"Host": host})
    assert found.status_code == status
    assert status == 200 or "Host header" in found.json()["error"]


def test_the_page_loads_nothing_and_runs_nothing_but_itself(client):
    found = client.get("/")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in found.text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in found.text
    assert found.headers["x-content-type-options"] == client.get("/x").headers["x-content-type-options"] == "nosniff"


def raw(url, *parts):
    """What comes back for these bytes."""
    host, port = url.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        return connection.recv(65536)


def test_a_body_that_is_announced_as_too_large_is_not_read(client):
    head = b"POST /parse HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    found = raw(str(client.base_url), head + b"Content-Length: 999999999\r\n\r\n{")
    assert found.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in found.lower()
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    assert raw(str(client.base_url), head + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk).startswith(
        b"HTTP/1.1 413"
    )
    assert raw(str(client.base_url), b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_hundred_clients_get_their_own_answers(parser, tmp_path):
    sentences = [tree.leaves() for tree in corpus("dev")[:200] if len(tree.leaves()) <= 12]
    given = [[f"word{number}", *sentences[number % len(sentences)]] for number in range(100)]

    async def ask(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            asked = ({"sentences": [words] * (1 + number % 3)} for number, words in enumerate(given))
            return await asyncio.gather(*(client.post("/parse", json=one) for one in asked))

    with serving(Answers(parser), tmp_path, max_waiting=1000) as (server, url):
        found = asyncio.run(ask(url))
    for number, (words, answer) in enumerate(zip(given, found, strict=True)):
        assert answer.status_code == 200
        assert [one["words"] for one in answer.json()["results"]] == [words] * (1 + number % 3)
    figures = server.batcher.figures
    assert figures.answered == figures.requests == 100
    assert figures.sentences == sum(1 + number % 3 for number in range(100))
    assert figures.batches < 50


def test_the_benchmark(client):
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "benchmarks/serve.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    before = benchmark.cpu_seconds(str(client.base_url))
    found = asyncio.run(benchmark.load(str(client.base_url), [["A", "dog"], ["A", "cat", "."]], 3, 0.1))
    assert len(found) >= 3
    assert all(begin < end for begin, end in found)
    assert benchmark.cpu_seconds(str(client.base_url)) > before


def test_a_client_that_goes_leaves_no_work(tmp_path):
    parse = Echo()
    parse.may_go.clear()
    with serving(parse, tmp_path) as (server, url):
        first = threading.Thread(
            target=httpx.post, args=(url + "parse",), kwargs={"json": {"text": "a"}, "timeout": 60}
        )
        first.start()
        while not parse.batches:
            time.sleep(0.01)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "parse", json={"sentences": ["gone"] * 20}, timeout=0.3)
        while server.batcher.waiting.sentences:
            time.sleep(0.01)
        assert server.batcher.figures.left == 1
        full = [threading.Thread(target=httpx.post, args=(url + "parse",), kwargs={"json": {"sentences": ["b"] * 30}})]
        full[0].start()
        parse.may_go.set()
        first.join()
        full[0].join()
    assert not any(["gone"] in batch for batch in parse.batches)


def test_a_server_that_stops_answers_those_who_wait(tmp_path):
    parse, found = Echo(), []
    parse.may_go.clear()

    def ask(word):
        found.append(httpx.post(url + "parse", json={"text": word}, timeout=60))

    with serving(parse, tmp_path, batch_sentences=1) as (server, url):
        threads = [threading.Thread(target=ask, args=(word,)) for word in "abc"]
        for thread in threads:
            thread.start()
        while len(server.batcher.open) < 3:
            time.sleep(0.01)
        server.should_exit = True
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "health")
        parse.may_go.set()
        for thread in threads:
            thread.join()
    assert sorted(answer.json()["results"][0] for answer in found) == ["a", "b", "c"]
    assert "Stopping when 3 waiting requests are answered" in server.job.console.file.getvalue()


def test_a_server_that_stops_does_not_wait_for_ever(tmp_path):
    parse, found = Echo(), []
    parse.may_go.clear()
    with serving(parse, tmp_path, grace=0.2) as (server, url):
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(url + "parse", json={"text": "a"}, timeout=60))
        )
        asking.start()
        while not parse.batches:
            time.sleep(0.01)
        server.should_exit = True
        asking.join()
        parse.may_go.set()
    assert (found[0].status_code, found[0].json()) == (
        503,
        {"error": "the server is stopping: nothing more is parsed."},
    )


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_when_it_is_told_to(tmp_path, model, number):
    model.save(tmp_path / "model")
    options = ("job=serve", "model=model", "port=0", "device=cpu", "hydra.run.dir=out")
    process = subprocess.Popen(
        arguments(*options), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("Serving model at http://127.0.0.1:")
    url = line.split(" at ")[1].split(",")[0]
    assert len(httpx.post(url + "parse", json={"text": "A dog."}, timeout=60).json()["results"]) == 1
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert printed.strip().split("\n")[-1] == str(tmp_path / "out")
    assert "Requests: 1, parsed in 1 batches." in printed
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert (result["requests"], result["sentences"], result["refused"]) == (1, 1, 0)


def test_an_address_that_cannot_be_had():
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1, port {port}: .*in use; port=0 takes any"):
            bound("127.0.0.1", port)
    with pytest.raises(InputError, match=r"cannot listen at 192\.0\.2\.1, port 0"):
        bound("192.0.2.1", 0)
    with pytest.raises(InputError, match="host is 'no such name'"):
        bound("no such name", 0)


def test_other_addresses_are_called_by_any_name():
    from lvpcfg.jobs.serving import _hosts

    names = {
        ("127.0.0.2", ()): ["127.0.0.2"],
        ("::1", ()): ["[::1]"],
        ("localhost", ("a",)): ["a"],
        ("0.0.0.0", ("a",)): ["a"],
    }
    for (host, more), expected in names.items():
        assert set(expected) < set(_hosts(options_of("serve", host=host, hosts=list(more))))
    assert _hosts(options_of("serve", host="0.0.0.0")) is None
    assert _hosts(options_of("serve", host="parse.example.org")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port is 65536: expected 0 to 65535"),
        ({"wait": -1.0}, "wait is -1.0: expected milliseconds"),
        ({"grace": float("nan")}, "grace is nan: expected seconds"),
        ({"max_waiting": 10}, "max_waiting is 10: expected 1000 or more"),
        ({"max_words": 0}, "max_words is 0"),
        ({"compared": []}, "compared is"),
    ],
)
def test_options(options, message):
    with pytest.raises(InputError, match=message):
        options_of("serve", **options)


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=re.escape("needs uvicorn and starlette: pip install 'lvpcfg[serve]'.")):
        start("serve", tmp_path, model="x")


# ---------------------------------------------------------------- the page


@pytest.mark.browser
@pytest.mark.skipif(not shutil.which("chromedriver"), reason="chromedriver is not installed")
def test_the_page_in_a_browser(client):
    with browser() as page:
        page.open(str(client.base_url))
        page.wait_for("return document.getElementById('about').textContent.includes('the model, beside another')")
        enter = "\ue007"
        page.type("#sentence", f"The old man saw the dog in the park.{enter}")
        page.wait_for("return document.querySelector('#tree svg') !== null")
        words = page.run("return [...document.querySelectorAll('#tree svg text')].map(text => text.textContent)")
        assert {"S", "NP", "VP", "saw", "park"} <= set(words)
        assert page.run("return document.querySelectorAll('#pair svg').length") == 2
        assert page.run("return document.querySelectorAll('#phrases tbody tr').length") > 3
        trees = page.run("return document.querySelectorAll('#choices input').length")
        assert trees > 1
        best = page.run("return document.getElementById('brackets').textContent")
        page.run("document.querySelectorAll('#choices input')[1].click()")
        assert page.run("return document.getElementById('brackets').textContent") != best

        page.type(
            "#sentence", f"<script>document.title='x'</script> <img src=x onerror=document.title='x'> & runs{enter}"
        )
        page.wait_for("return document.querySelector('#tree').textContent.includes('onerror')")
        shown = page.run("return document.getElementById('tree').textContent")
        assert "script" in shown
        assert page.run("return document.title") == "lvpcfg"
        assert page.run("return document.querySelectorAll('main img, main script').length") == 0

        assert page.console() == []
        page.type("#sentence", "a " * 41 + enter)
        page.wait_for("return document.querySelector('#status.wrong') !== null")
        assert "41 words" in page.run("return document.getElementById('status').textContent")
        assert [entry for entry in page.console() if entry["source"] != "network"] == []
