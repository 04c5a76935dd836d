"""job=import: a grammar of the Berkeley parser, as text -> a model folder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lvpcfg.errors import InputError
from lvpcfg.registry import JOBS

if TYPE_CHECKING:
    from lvpcfg.jobs.run import Run


@dataclass(kw_only=True)
class ImportOptions:
    berkeley: str | None


@JOBS.register("import", ImportOptions)
def run(options: ImportOptions, run: "Run") -> None:
    from lvpcfg.decompose.coarse import with_coarse
    from lvpcfg.grammar.berkeley import read_berkeley
    from lvpcfg.jobs.material import about_grammar
    from lvpcfg.jobs.training import report

    run.begin()
    if options.berkeley is None:
        raise InputError("job=import needs a grammar: berkeley=FOLDER/NAME, for the files NAME.binary, NAME.unary, ...")
    model = with_coarse(read_berkeley(options.berkeley))
    model.save(run.folder / "model")
    report(*about_grammar(model), run)
