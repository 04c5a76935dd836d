"""job=inspect: a model folder -> what its states stand for, as tables and as an HTML file.

Of a spectral model there is also a picture of the singular values, `singular_values.png`, and of Gaussian mixtures one
of the Gaussians of the symbols that are shown, `gaussians.png`.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any

from lvpcfg.errors import InputError, show
from lvpcfg.jobs.options import folders, one_folder
from lvpcfg.registry import JOBS
from lvpcfg.trees.binarisation import INTERMEDIATE

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from lvpcfg.evaluation.inspect import Symbol
    from lvpcfg.jobs.run import Run

PHRASES, TAGS = 2, 2  # shown in the terminal unless symbols are asked for
ITEMS = 6  # rules or words of a state


@dataclass(kw_only=True)
class InspectOptions:
    model: Any  # a folder
    symbol: Any  # a name, or a list of names

    def __post_init__(self) -> None:
        folders(self.model)


@JOBS.register("inspect", InspectOptions)
def run(options: InspectOptions, run: "Run") -> None:
    from lvpcfg.evaluation.inspect import look_inside
    from lvpcfg.evaluation.page import page
    from lvpcfg.evaluation.pictures import draw_gaussians
    from lvpcfg.files import write_text
    from lvpcfg.grammar.gaussian import GaussianRules
    from lvpcfg.grammar.model import Model

    run.begin()
    model = Model.load(one_folder(options.model, "inspect"))
    symbols = look_inside(model)
    names = {state.number: state.name for symbol in symbols for state in symbol.states}
    chosen = _chosen(symbols, options.symbol)
    for symbol in chosen:
        run.console.print(table_of(symbol, names))
    grammar = model.grammar
    if isinstance(grammar.binary, GaussianRules):
        found = {symbol.name: grammar.binary.gaussians([state.number for state in symbol.states]) for symbol in chosen}
        run.picture("gaussians", draw_gaussians(found))
    sizes = {
        "symbols": len(symbols),
        "states": len(names),
        "binary_rules": len(grammar.binary_rules),
        "unary_rules": len(grammar.unary_rules),
        "words": len(model.lexicon.words),
    }
    run.result.update(sizes)
    summary = ", ".join(f"{size:,} {name.replace('_', ' ')}" for name, size in sizes.items())
    path = run.folder / "grammar.html"
    write_text(path, page(symbols, f"The states of {options.model}", summary, _singular_values(symbols, run)))
    run.say(f"{summary}. All of them are in {path}.")


def _singular_values(symbols: "list[Symbol]", run: "Run") -> bytes | None:
    """Draws those of a spectral model."""
    found = {symbol.name: symbol.directions for symbol in symbols if symbol.directions is not None}
    if not found:
        return None
    from lvpcfg.evaluation.pictures import draw_singular_values

    values = {name: directions.singular_values for name, directions in found.items()}
    states = {symbol.name: len(symbol.states) for symbol in symbols}
    run.picture("singular_values", draw_singular_values(values, states))
    return (run.folder / "singular_values.png").read_bytes()


def _chosen(symbols: "list[Symbol]", wanted: object) -> "list[Symbol]":
    """The symbols that were asked for, or the most frequent ones with most to tell."""
    if wanted is None:
        told = sorted(symbols, key=lambda symbol: -symbol.expected * (len(symbol.states) > 1))
        phrases = (symbol for symbol in told if not symbol.preterminal and not symbol.name.startswith(INTERMEDIATE))
        tags = (symbol for symbol in told if symbol.preterminal)
        return [*islice(phrases, PHRASES), *islice(tags, TAGS)]
    chosen = []
    for name in wanted if isinstance(wanted, list) else [wanted]:
        found = [symbol for symbol in symbols if symbol.name == str(name)]
        if not found:
            near = get_close_matches(str(name), [symbol.name for symbol in symbols], n=3, cutoff=0)
            raise InputError(f"the grammar has no symbol {show(name)}: the nearest are {', '.join(map(repr, near))}.")
        chosen += found
    return chosen


def table_of(symbol: "Symbol", names: dict[int, str]) -> "Table":
    """The states of a symbol; `names` are those of all states."""
    from rich.table import Table
    from rich.text import Text

    from lvpcfg.evaluation.inspect import amount, heading, percent

    signed = symbol.signed
    title = f"{symbol.name}, {symbol.expected:.3g} a tree"
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_lines=False)
    table.add_column("state")
    if symbol.directions is not None:
        table.add_column("singular\nvalue", justify="right")
        table.add_column("features inside and outside")
    if not signed:
        table.add_column("share", justify="right")
    table.add_column(heading(symbol), overflow="fold")
    for row, state in enumerate(symbol.states):
        if symbol.preterminal:
            items = [f"{word.text} {amount(word.probability, signed)}" for word in state.words]
        else:
            items = [
                f"{' '.join(names[child] for child in rule.children)} {amount(rule.probability, signed)}"
                for rule in state.rules
            ]
        share = [] if state.share is None else [percent(state.share)]
        table.add_row(Text(state.name), *_direction(symbol, row), *share, Text(" · ".join(items[:ITEMS])))
    return table


def _direction(symbol: "Symbol", row: int) -> "list[Text]":
    """What a state is a direction of; the first one is of none."""
    from rich.text import Text

    about = symbol.directions
    if about is None:
        return []
    if row == 0:
        return [Text(""), Text("constant")]
    lines = (side[row - 1] for side in (about.inside, about.outside))
    return [Text(f"{about.singular_values[row - 1]:.3g}"), Text("\n".join(line for some in lines for line in some))]
