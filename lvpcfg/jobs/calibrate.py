"""job=calibrate: a model and gold trees -> how often its posteriors are right, and a calibration of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError
from lvpcfg.jobs.options import ParserOptions, folders
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class CalibrateOptions(ParserOptions):
    model: Any  # a folder, or a list of folders
    gold: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        folders(self.model)


@JOBS.register("calibrate", CalibrateOptions)
def run(options: CalibrateOptions, run: "Run") -> None:
    from lvpcfg.calibration import Calibration, outcomes
    from lvpcfg.jobs.parsing import make_parser
    from lvpcfg.trees.brackets import read_trees
    from lvpcfg.trees.normalise import normalise_all

    run.begin()
    if options.gold is None:
        raise InputError("job=calibrate needs gold trees: gold=FILE.")
    parser = make_parser(options.model, options, "calibrate")
    spans, trees = outcomes(parser, normalise_all(read_trees(options.gold)))
    calibration = Calibration.fit(spans, trees)
    path = run.folder / "calibration.json"
    calibration.save(path)
    rows = []
    for name, known, scaling in (("phrases", spans, calibration.spans), ("trees", trees, calibration.trees)):
        errors = 100 * known.error(), 100 * scaling.scaled(known).error()
        run.result |= {name: len(known.right), f"{name}_error": errors[0], f"{name}_error_calibrated": errors[1]}
        rows.append([name, str(len(known.right)), *(f"{error:.2f} %" for error in errors)])
    run.table("Expected calibration error, on these trees", ["", "number", "as they are", "calibrated"], rows)
    run.say(f"The calibration is in {path}: job=parse calibration={path}")
