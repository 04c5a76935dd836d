"""job=import: a grammar of the Berkeley parser, as text -> a model folder."""

from lvpcfg.errors import InputError
from lvpcfg.grammar.berkeley import read_berkeley
from lvpcfg.jobs.config import Config
from lvpcfg.jobs.run import Run


def run(config: Config, run: Run) -> None:
    if config.berkeley is None:
        raise InputError("job=import needs a grammar: berkeley=FOLDER/NAME, for the files NAME.binary, NAME.unary, ...")
    model = read_berkeley(config.berkeley)
    model.save(run.folder / "model")
    grammar = model.grammar
    sizes = {
        "vocabulary": len(model.lexicon.words),
        "unknown_word_classes": len(model.lexicon.classes),
        "interminals": len(grammar.symbols.interminals),
        "preterminals": len(grammar.symbols.preterminals),
        "states": int(grammar.states.sum()),
        "binary_rules": len(grammar.binary_rules),
        "unary_chains": len(grammar.unary_rules),
    }
    run.result.update(sizes)
    rows = [[name.replace("_", " "), f"{size:,}"] for name, size in sizes.items()]
    run.table(f"Grammar ({model.provenance['name']})", ["", "number"], rows)
    run.say(f"The model is in {run.folder / 'model'}.")
