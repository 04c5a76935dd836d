"""job=import: a grammar of the Berkeley parser, as text -> a model folder."""

from lvpcfg.decompose.coarse import with_coarse
from lvpcfg.errors import InputError
from lvpcfg.grammar.berkeley import read_berkeley
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.run import Run
from lvpcfg.jobs.train import report


def run(config: Config, run: Run) -> None:
    if config.berkeley is None:
        raise InputError("job=import needs a grammar: berkeley=FOLDER/NAME, for the files NAME.binary, NAME.unary, ...")
    model = with_coarse(read_berkeley(config.berkeley))
    model.save(run.folder / "model")
    report(model, run)
