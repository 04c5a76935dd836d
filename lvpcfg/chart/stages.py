"""How long the stages of parsing take."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stages:
    """Seconds spent so far, by stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = self._now()
        with torch.profiler.record_function(name):  # so that traces show it
            yield
        self.seconds[name] += self._now() - begin

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # without it, the time would be that of launching kernels
        return time.perf_counter()
