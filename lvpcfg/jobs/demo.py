"""job=demo: the story on the embedded corpus: learn states, look at them, parse, compress."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lvpcfg.jobs.options import TreebankOptions
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class DemoOptions(TreebankOptions):
    pass


@JOBS.register("demo", DemoOptions)
def run(options: DemoOptions, run: "Run") -> None:
    from lvpcfg.jobs import story

    run.begin()
    story.run(options, run)
