"""What TensorBoard shows of a training: the events, and the pages in a browser."""

import html
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from running import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lvpcfg import corpus, write_trees
from lvpcfg.estimate.split_merge import SplitMergeOptions


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    files = {name: str(folder / f"{name}.mrg") for name in ("train", "dev")}
    write_trees(corpus("train")[:30], files["train"])
    write_trees(corpus("dev")[:5], files["dev"])
    options = SplitMergeOptions(cycles=2, split_iterations=2, merge_iterations=2, smooth_iterations=1)
    result, _ = run("train", folder, **files, estimator=options)
    return folder, files, result


def test_what_the_log_of_a_training_holds(trained):
    tmp_path, files, result = trained
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = log.Tags()
    scores = ("precision", "recall", "f1", "f1_all", "unlabelled_sentence_f1", "tagging_accuracy", "errors")
    dev = {f"dev/{name}" for name in scores}
    every = {"log_likelihood_per_word", "states", "rules", "seconds_per_iteration", "memory_mb"}
    assert set(tags["scalars"]) == dev | every | {"best/f1", "best/log_likelihood_per_word"}
    assert [event.step for event in log.Scalars("states")] == list(range(1, 11))
    assert [event.step for event in log.Scalars("dev/f1")] == [0, 5, 10]
    assert log.Scalars("dev/f1")[-1].value == pytest.approx(result["last_f1"], abs=0.01)
    assert log.Scalars("best/f1")[-1].value == pytest.approx(result["f1"], abs=0.01)
    assert log.Scalars("states")[-1].value == result["last_states"]
    assert log.Scalars("memory_mb")[0].value > 50
    parses = [tag for tag in tags["images"] if tag.startswith("parses/")]
    assert set(tags["images"]) == {"states_per_symbol", *parses}
    assert len(parses) == 3
    assert [image.step for image in log.Images(parses[0])] == [0, 5, 10]
    assert log.Images("states_per_symbol")[0].encoded_image_string.startswith(b"\x89PNG")
    assert b"seed: 0" in log.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    begin = HParamsPluginData.FromString(
        log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    assert begin.hparams["estimator.cycles"].number_value == 2
    assert begin.hparams["estimator.name"].string_value == "split_merge"
    assert begin.hparams["data.dev"].string_value == files["dev"]
    experiment = HParamsPluginData.FromString(
        log.summary_metadata["_hparams_/experiment"].plugin_data.content
    ).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["best/f1", "best/log_likelihood_per_word"]


# ---------------------------------------------------------------- in a browser

CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-webgl", "--disable-webgl2", "--virtual-time-budget=15000", "--window-size=1400,4000", "--dump-dom"),
)
# A page that shows TensorBoard and then writes down what can be read there; most of it stands in shadow trees.
READER = """<iframe id="board" src="/#TAB" width="1400" height="4000"></iframe><pre id="read"></pre><script>
function read(node) {
  if (["STYLE", "SCRIPT"].includes(node.nodeName)) return "";
  let text = node.nodeType === 3 ? node.data + " " : "";
  if (node.nodeName === "IMG") text += " an image " + node.naturalWidth + " wide ";
  if (node.nodeName === "path" && (node.getAttribute("d") || "").includes("L")) text += " a line ";
  for (const child of [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes]) text += read(child);
  return text;
}
setTimeout(() => {
  const board = document.getElementById("board");
  document.getElementById("read").textContent = read(board.contentDocument.body);
  board.remove();
}, 13000);
</script>"""


@contextmanager
def tensorboard(folder):
    """TensorBoard at work, behind a server that has the page /read/TAB too; gives out its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    board = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/read/"):
                self.answer(200, "text/html", READER.replace("TAB", self.path.removeprefix("/read/")).encode())
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
            kind = {"Content-Type": self.headers["Content-Type"]} if body else {}
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}{self.path}", body, kind)
                with urllib.request.urlopen(request) as found:
                    self.answer(found.status, found.headers["Content-Type"], found.read())
            except urllib.error.HTTPError as error:
                self.answer(error.code, "text/plain", b"")

        do_POST = do_GET  # noqa: N815

        def answer(self, status, kind, body):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs").close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        board.terminate()
        board.wait()


@pytest.mark.browser
def test_what_a_browser_shows(trained, tmp_path):
    folder, _, result = trained
    pages = {}
    with tensorboard(folder / "tensorboard") as address:
        for tab in ("timeseries", "images", "text", "hparams"):
            options = (*CHROMIUM, f"--user-data-dir={tmp_path / tab}", f"{address}/read/{tab}")
            done = subprocess.run([shutil.which("chromium"), *options], capture_output=True, text=True, timeout=300)
            text = html.unescape(done.stdout.split('<pre id="read">')[1].split("</pre>")[0])
            pages[tab] = re.sub(r"\s+", "", text)  # names are broken anywhere
    scalars = ("dev/f1", "dev/precision", "dev/tagging_accuracy", "log_likelihood_per_word", "states", "memory_mb")
    for name in scalars:
        assert name in pages["timeseries"]
    for name in ("states_per_symbol", "parses/sentence_"):
        assert name in pages["images"]
    assert "aline" in pages["timeseries"]
    assert len(re.findall(r"animage[1-9]\d\d+wide", pages["images"])) >= 4
    assert "seed:0" in pages["text"]
    for text in ("estimator.cycles", "best/f1", f"{result['f1']:.3f}"[:5]):
        assert text in pages["hparams"]
