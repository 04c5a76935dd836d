"""The states of a grammar as one HTML file that needs nothing else."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import groupby

from lvpcfg.evaluation.inspect import State, Symbol, Word, amount, heading, percent

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1d2433, #dfe3ec); --paper: light-dark(#fff, #161a22);
  --faint: light-dark(#687187, #96a0b5); --line: light-dark(#e2e6ee, #2c3342); --bar: light-dark(#bcd3f7, #2f4f80);
  --shade: light-dark(#f4f6fa, #1e2430); --link: light-dark(#1a56b8, #8ab4f8); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 76rem;
  margin: 0 auto; padding: 1rem 1.5rem 6rem; }
h1 { font-size: 1.5rem; margin: 1rem 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; scroll-margin-top: .5rem; }
h2 small, .faint { color: var(--faint); font-weight: normal; font-size: .85em; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
nav { margin: 1rem 0; line-height: 2; }
nav a { white-space: nowrap; margin-right: .9rem; }
table { border-collapse: collapse; width: 100%; min-width: 46rem; }
td, th { border-top: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: normal; font-size: .85em; border: 0; }
td.split { background: var(--shade); border: 1px solid var(--line); color: var(--faint); font-size: .8em;
  width: 1.2rem; text-align: center; vertical-align: middle; padding: 0 .4rem; }
td.state { white-space: nowrap; font-weight: 600; width: 5rem; }
td.share { white-space: nowrap; width: 9rem; }
.bar { display: block; height: .55rem; min-width: 1px; background: var(--bar); border-radius: 2px; margin-top: .2rem; }
ul { list-style: none; margin: 0; padding: 0; }
li { display: inline-block; margin-right: 1.3rem; overflow-wrap: anywhere; }
tr:target td:not(.split) { background: light-dark(#fff5d6, #3a3420); }
em { color: var(--faint); }
td.features { font-size: .85em; white-space: nowrap; }
td.features li { display: block; margin: 0; }
img { max-width: 100%; background: #fff; }
"""


def page(symbols: Sequence[Symbol], title: str, summary: str, singular_values: bytes | None = None) -> str:
    """The page; `symbols` stand on it in their order. `singular_values` is their picture, a PNG file."""
    names = {state.number: state.name for symbol in symbols for state in symbol.states}
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f'<h1>{escape(title)}</h1>\n<p class="faint">{escape(summary)}</p>',
        _index(symbols, "Phrases", preterminal=False),
        _index(symbols, "Tags", preterminal=True),
    ]
    if singular_values is not None:
        data = b64encode(singular_values).decode()
        parts.append(f'<p><img alt="singular values of each symbol" src="data:image/png;base64,{data}"></p>')
    parts += [_section(place, symbol, names) for place, symbol in enumerate(symbols)]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _index(symbols: Sequence[Symbol], title: str, preterminal: bool) -> str:
    links = [
        f'<a href="#symbol-{place}">{escape(symbol.name)}</a>'
        for place, symbol in enumerate(symbols)
        if symbol.preterminal == preterminal
    ]
    return f'<nav><span class="faint">{title}:</span> {" ".join(links)}</nav>'


def _section(place: int, symbol: Symbol, names: dict[int, str]) -> str:
    states = symbol.states
    number = "1 state" if len(states) == 1 else f"{len(states)} states, {symbol.expected:.3g} a tree"
    levels = _levels(states)
    head = [f'<th colspan="{len(levels)}">splits</th>'] if levels else []
    head.append("<th>state</th>")
    if symbol.directions is not None:
        head += ["<th>singular value</th>", "<th>features inside</th>", "<th>features outside</th>"]
    if not symbol.signed:
        head.append("<th>share</th>")
    head.append(f"<th>{heading(symbol)}</th>")
    largest = max(state.share or 0 for state in states) or 1
    rows = []
    for row, state in enumerate(states):
        cells = [level[row] for level in levels]
        cells.append(f'<td class="state">{escape(state.name)}</td>')
        cells += _direction(symbol, row)
        cells += _share(state, largest, alone=len(states) == 1)
        shown = _words(state, symbol.signed) if symbol.preterminal else _rules(state, names, symbol.signed)
        cells.append(f"<td>{shown}</td>")
        rows.append(f'<tr id="state-{state.number}">{"".join(cells)}</tr>')
    return (
        f'<h2 id="symbol-{place}">{escape(symbol.name)} <small>{number}</small></h2>\n'
        f"<table>\n<tr>{''.join(head)}</tr>\n" + "\n".join(rows) + "\n</table>"
    )


def _direction(symbol: Symbol, row: int) -> list[str]:
    """Cells for what a state is a direction of; the first state is of none."""
    if symbol.directions is None:
        return []
    if row == 0:
        return ['<td class="faint" colspan="3">constant</td>']
    about = symbol.directions
    lists = ("".join(f"<li>{escape(line)}</li>" for line in side[row - 1]) for side in (about.inside, about.outside))
    cells = [f'<td class="features"><ul>{lines}</ul></td>' for lines in lists]
    return [f"<td>{about.singular_values[row - 1]:.3g}</td>", *cells]


def _share(state: State, largest: float, alone: bool) -> list[str]:
    """A cell for how often a state is expected, where that is known."""
    if state.expected is None or state.share is None:
        return []
    each = f'<span class="faint">{state.expected:.3g} a tree</span>'
    bar = f'<span class="bar" style="width:{100 * state.share / largest:.1f}%"></span>'
    return [f'<td class="share">{each if alone else f"{percent(state.share)} {each}{bar}"}</td>']


def _levels(states: Sequence[State]) -> list[list[str]]:
    """For each cycle that split the symbol, the cells in front of the rows: one for all states of an ancestor."""
    levels: list[list[str]] = []
    before = 1
    for level in range(len(states[0].ancestors)):
        groups = [len(list(group)) for _, group in groupby(states, key=lambda state: state.ancestors[: level + 1])]
        if before < len(groups) < len(states):
            cells = [""] * len(states)
            row = 0
            for size in groups:
                ancestor = states[row].ancestors[level]
                cells[row] = f'<td class="split" rowspan="{size}">{ancestor}</td>'
                row += size
            levels.append(cells)
            before = len(groups)
    return levels


def _rules(state: State, names: dict[int, str], signed: bool) -> str:
    items = []
    for rule in state.rules:
        children = " ".join(f'<a href="#state-{child}">{escape(names[child])}</a>' for child in rule.children)
        items.append(f'<li>{children} <span class="faint">{amount(rule.probability, signed)}</span></li>')
    return f"<ul>{' '.join(items)}</ul>"


def _words(state: State, signed: bool) -> str:
    items = [
        f'<li>{_word(word)} <span class="faint">{amount(word.probability, signed)}</span></li>' for word in state.words
    ]
    typical = " ".join(f"<li>{escape(word)}</li>" for word in state.typical)
    more = f'<ul><li class="faint">and typical:</li> {typical}</ul>' if typical else ""
    return f"<ul>{' '.join(items)}</ul>{more}"


def _word(word: Word) -> str:
    return escape(word.text) if word.known else f"<em>{escape(word.text)}</em>"
