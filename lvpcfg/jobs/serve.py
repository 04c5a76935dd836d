"""job=serve: a model folder -> a server that parses sentences, and a page to try it."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.options import ParserOptions, expect_positive, folders
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run

LAST_PORT = 65535


@dataclass(kw_only=True)
class ServeOptions(ParserOptions):
    model: Any  # a folder, or a list of folders
    compared: Any
    calibration: str | None
    host: str
    port: int
    hosts: list[str]
    wait: float
    batch_sentences: int
    max_body: int
    max_sentences: int
    max_words: int
    max_k_best: int
    max_waiting: int
    grace: float

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)
        folders(self.compared, "compared")
        expect_positive(self, "batch_sentences", "max_body", "max_sentences", "max_words", "max_k_best", "max_waiting")
        if not 0 <= self.port <= LAST_PORT:
            raise InputError(f"port is {self.port}: expected 0 to {LAST_PORT}.")
        for host in self.hosts:
            if not re.fullmatch(r"[\w.:\[\]-]+", host):
                raise InputError(f"hosts has {show(host)}: expected the name of a host, such as parse.example.org.")
        for name, unit in (("wait", "milliseconds"), ("grace", "seconds")):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}: expected {unit}, 0 or more.")
        if self.max_waiting < self.max_sentences:
            raise InputError(
                f"max_waiting is {self.max_waiting}: expected {self.max_sentences} or more, as max_sentences says."
            )

    def parser(self) -> dict[str, Any]:
        return super().parser() | {"calibration": self.calibration}


@JOBS.register("serve", ServeOptions)
def run(options: ServeOptions, run: "Run") -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise InputError("job=serve needs uvicorn and starlette: pip install 'lvpcfg[serve]'.") from None
    from lvpcfg.jobs import serving

    serving.run(options, run)
