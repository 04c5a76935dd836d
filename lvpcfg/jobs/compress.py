"""job=compress: a model folder -> a smaller one, with its rules in CP form, and what that did to them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.decompose.options import check
from lvpcfg.jobs.options import DeviceOptions, folders
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class CompressOptions(DeviceOptions):
    model: Any  # a folder
    decompose: Any  # the options of one of METHODS
    seed: int
    certify: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)
        check(self.decompose)


@JOBS.register("compress", CompressOptions)
def run(options: CompressOptions, run: "Run") -> None:
    from lvpcfg.jobs import compression

    compression.run(options, run)
