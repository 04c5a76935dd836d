"""job=tightness: a model folder -> whether it is a distribution over finite trees, and a model that is."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.options import folders, one_folder
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class TightnessOptions:
    model: Any  # a folder
    renormalised: str | None

    def __post_init__(self) -> None:
        if self.renormalised is not None and self.renormalised in folders(self.model):
            raise InputError(f"renormalised is {show(self.renormalised)}, the model itself: expected another folder.")


@JOBS.register("tightness", TightnessOptions)
def run(options: TightnessOptions, run: "Run") -> None:
    from lvpcfg.grammar.model import Model
    from lvpcfg.grammar.tightness import renormalise, tightness

    folder = one_folder(options.model, "tightness")
    if (
        options.renormalised is not None
        and Path(options.renormalised).exists()
        and Path(options.renormalised).samefile(folder)
    ):
        raise InputError(f"renormalised is {show(options.renormalised)}, the model itself: expected another folder.")
    model = Model.load(folder)
    run.begin()
    found = tightness(model)
    run.result |= found.figures()
    run.say(found.line())
    leaking = [one for one in found.symbols if not one.tight]
    if leaking:
        rows = [[one.symbol, "no finite sum" if one.mass is None else f"{one.mass:.8f}"] for one in leaking]
        run.table("Symbols that are not tight, and the mass of their finite trees", ["symbol", "mass"], rows)
    if found.leaks:
        rows = [[leak.rule, f"{100 * leak.share:.3g} %"] for leak in found.leaks]
        run.table("Rules that leak most: of all nodes of large trees", ["rule", "rewrite by it and never end"], rows)
    if options.renormalised is not None:
        made = renormalise(model)
        made.save(options.renormalised)
        run.say(f"The renormalised model is in {options.renormalised}. {tightness(made).line()}")
