"""The work of job=serve: a socket, a parser or two, and uvicorn between them until it is told to stop."""

import asyncio
import ipaddress
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import uvicorn

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.parsing import make_parser, say_what_happened
from lvpcfg.jobs.run import Run, peak_memory
from lvpcfg.jobs.serve import ServeOptions
from lvpcfg.serve.answers import Answers
from lvpcfg.serve.app import LOOPBACK, Service, application
from lvpcfg.serve.asked import Limits
from lvpcfg.serve.batcher import Batcher, Size

BACKLOG = 2048  # connections that are not taken yet
CLOSING = 2.0  # seconds in which the last answers are sent


def run(options: ServeOptions, run: Run) -> None:
    with bound(options.host, options.port) as listener:  # a port that is taken is known before the model is read
        parser = make_parser(options.model, options, "serve")
        compared = None
        if options.compared is not None:
            compared = make_parser(options.compared, replace(options, calibration=None), "serve")
        run.begin()
        answers = Answers(parser, compared)
        answers.warm()
        server = Server.of(options, answers, run)
        listener.listen(BACKLOG)
        run.say(f"Serving {_name(options.model)} at {address(listener)}, on {parser.device.type}. Ctrl-C stops.")
        with suppress(KeyboardInterrupt, SystemExit):  # how it is told to stop; uvicorn says so again when it has
            server.run(sockets=[listener])
    figures = server.batcher.figures
    counts = vars(parser.counts) | asdict(figures)
    run.result |= counts | {"memory_mb": peak_memory()}
    run.say(f"Requests: {figures.requests:,}, parsed in {figures.batches:,} batches.")
    say_what_happened(counts, figures.sentences / max(figures.seconds, 1e-9), parser.device.type, run)


class Server(uvicorn.Server):
    """Stops when those who wait have their answers, or after so many seconds."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, grace: float, run: Run) -> None:
        super().__init__(config)
        self.batcher, self.grace, self.job = batcher, grace, run

    @staticmethod
    def of(options: ServeOptions, answers: Answers, run: Run) -> "Server":
        batcher = Batcher(
            answers,
            Size(options.batch_sentences, options.batch_tokens),
            options.wait / 1000,
            options.max_waiting,
            options.threads,
        )
        limits = Limits(options.max_sentences, min(options.max_words, options.max_length), options.max_k_best)
        service = Service(
            batcher,
            limits,
            options.max_body,
            About(options, answers, limits),
            answers.compared is not None,
            _hosts(options),
        )
        config = uvicorn.Config(
            application(service),
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(options.grace + CLOSING),
        )
        return Server(config, batcher, options.grace, run)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waiting = len(self.batcher.open)
        if waiting:
            self.job.say(
                f"Stopping when {waiting} waiting requests are answered, in {self.grace:g} seconds at the most."
            )
        giving_up = asyncio.get_running_loop().call_later(self.grace, self.batcher.give_up)
        await super().shutdown(sockets)
        giving_up.cancel()


@dataclass
class About:
    """What /health says of the server itself."""

    options: ServeOptions
    answers: Answers
    limits: Limits

    def __post_init__(self) -> None:
        self.begin = time.monotonic()

    def __call__(self) -> dict[str, Any]:
        parser = self.answers.parser
        return {
            "status": "ok",
            "model": _name(self.options.model),
            "compared": None if self.options.compared is None else _name(self.options.compared),
            "version": version("lvpcfg"),
            "device": parser.device.type,
            "decoder": parser.decoder,
            "seconds": round(time.monotonic() - self.begin, 3),
            "cpu_seconds": time.process_time(),
            "limits": asdict(self.limits) | {"max_body": self.options.max_body},
            "parsed": vars(parser.counts),
        }


def bound(host: str, port: int) -> socket.socket:
    """A socket with this address, which does not listen yet."""
    try:
        (family, *_, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"host is {show(host)}: {(error.strerror or str(error)).lower()}.") from None
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
    except OSError as error:
        found.close()
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot listen at {host}, port {port}: {reason}; port=0 takes any that is free.") from None
    return found


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _hosts(options: ServeOptions) -> Sequence[str] | None:
    """The names that the server answers to: any, where others than this machine reach it and no name is given."""
    local = options.host == "localhost"
    with suppress(ValueError):
        local = ipaddress.ip_address(options.host).is_loopback
    if not local and not options.hosts:
        return None
    own = f"[{options.host}]" if ":" in options.host else options.host
    return [*LOOPBACK, own, *options.hosts]


def _name(model: Any) -> str:
    return " + ".join(model) if isinstance(model, list) else str(model)
