"""The work of job=profile: stages, timed, and operators as PyTorch's profiler sees them."""

import os
import time
from itertools import islice

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from tqdm import tqdm

from lvpcfg.batch.pieces import WINDOW
from lvpcfg.batch.records import Corpus, Reader, kind_of
from lvpcfg.chart.stages import Stages
from lvpcfg.errors import InputError, show
from lvpcfg.evaluation.pictures import draw_seconds
from lvpcfg.files import write_text, writing
from lvpcfg.jobs import parsing
from lvpcfg.jobs.profile import ProfileOptions
from lvpcfg.jobs.run import Run, peak_memory
from lvpcfg.parser import Parser
from lvpcfg.parses import Counts
from lvpcfg.trees.brackets import format_tree
from lvpcfg.trees.corpus import corpus
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import words

MODEL, FILES, OTHER = "model", "reading and writing", "other"  # beside the stages that the parser knows
OPERATORS = 12  # shown


def run(options: ProfileOptions, run: Run) -> None:
    run.begin()
    source = _embedded(run) if options.input is None else options.input
    clock, begin = Stages(torch.device("cpu")), time.perf_counter()
    with clock.stage(MODEL):
        parser = parsing.make_parser(options.model, options, "profile")
        parser.parse(["."])  # what is made once is made now
    parser.counts, before = Counts(), parser.times
    with clock.stage(FILES):
        read = (record.words for record in Corpus(((source, Reader(kind_of(source))),)).records() if record.words)
        sentences = list(islice(read, options.profile.sentences))
    if not sentences:
        raise InputError(f"there is no sentence in {show(source, 200)}: expected one a line.")
    path = run.folder / "parses.mrg"
    with (
        writing(path),
        path.open("w", encoding="utf-8") as output,
        tqdm(total=len(sentences), unit=" sentences", disable=None, desc="parsing") as bar,
    ):
        for begins in range(0, len(sentences), WINDOW):
            trees = parser.parse_sents(sentences[begins : begins + WINDOW], update=bar.update)
            with clock.stage(FILES):
                output.writelines(format_tree(tree) + "\n" for tree in trees)
    total = time.perf_counter() - begin
    stages = {name: seconds - before.get(name, 0.0) for name, seconds in parser.times.items()}
    seconds = {MODEL: clock.seconds[MODEL], FILES: clock.seconds[FILES], **stages}
    seconds[OTHER] = total - sum(seconds.values())
    _report(parser, seconds, run)
    run.say(f"The parses are in {path}.")
    run.picture("profile", draw_seconds(seconds))
    step = max(1, len(sentences) // options.profile.traced)
    _trace(parser, sentences[::step][: options.profile.traced], run)


def _embedded(run: Run) -> str:
    """A file with the words of the embedded corpus, which takes longer to make than to parse."""
    path = run.folder / "sentences.txt"
    write_text(path, "".join(" ".join(words(tree)) + "\n" for tree in normalise_all(corpus("dev"))))
    return str(path)


def _report(parser: Parser, seconds: dict[str, float], run: Run) -> None:
    number, total = parser.counts.sentences, sum(seconds.values())
    spent_parsing = total - seconds[MODEL]  # which is loaded once, however many sentences there are
    rows = [
        [name, f"{spent:.2f}", f"{100 * spent / total:.1f} %", f"{1000 * spent / number:.2f}" if name != MODEL else ""]
        for name, spent in seconds.items()
    ]
    rows.append(["all", f"{total:.2f}", "100.0 %", f"{1000 * spent_parsing / number:.2f}"])
    run.table("Where the time goes", ["", "seconds", "share", "ms a sentence"], rows)
    run.result |= {f"seconds_{name.replace(' ', '_')}": spent for name, spent in seconds.items()}
    run.result |= {"seconds": total, "sentences": number}
    parsing.report(parser, number / spent_parsing, run)
    run.result["memory_mb"] = peak_memory()
    run.say(f"Peak memory: {run.result['memory_mb']:,.0f} MB.")
    if parser.device.type == "cuda":
        run.result["cuda_memory_mb"] = torch.cuda.max_memory_allocated(parser.device) / 2**20
        run.say(f"Peak memory on CUDA: {run.result['cuda_memory_mb']:,.0f} MB.")


def _trace(parser: Parser, sentences: list[list[str]], run: Run) -> None:
    """Parses the sentences twice, so that the profiler is warm when it counts, and shows what took longest."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "7")  # the profiler tells of itself
    on_cuda = parser.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    write = tensorboard_trace_handler(str(run.folder / "tensorboard"), "lvpcfg", use_gzip=True)
    warm = schedule(wait=0, warmup=1, active=1, repeat=1)
    with (
        profile(activities=activities, schedule=warm, on_trace_ready=write) as profiler,
        tqdm(total=2, disable=None, desc="tracing", leave=False) as bar,
    ):
        for _ in range(2):
            parser.parse_sents(sentences)
            profiler.step()
            bar.update()
    events = [event for event in profiler.key_averages() if not (on_cuda and event.is_user_annotation)]
    spent = [(event.self_device_time_total if on_cuda else event.self_cpu_time_total, event) for event in events]
    total = sum(microseconds for microseconds, _ in spent)
    rows = []
    for microseconds, event in sorted(spent, key=lambda pair: -pair[0])[:OPERATORS]:
        name = f"Python, {event.key}" if event.is_user_annotation else event.key
        share = f"{100 * microseconds / max(1, total):.1f} %"
        rows.append([name.replace("ProfilerStep*", OTHER), f"{event.count:,}", f"{microseconds / 1000:.1f}", share])
    title = f"Operators on {parser.device.type}, by their own time, {len(sentences)} sentences"
    run.table(title, ["", "calls", "ms", "share"], rows)
