"""Grammars that the Berkeley parser wrote as text: four files with one prefix.

    PREFIX.numstates   NP 2                       symbol, m
    PREFIX.binary      NP_1 DT_0 NN_1 0.12        a, b, c with their states, t
    PREFIX.unary       S_0 VP_1 0.2               top, bottom, probability of the best chain between them
    PREFIX.lexicon     NN dog [1.2E-4, 3.0E-6]    tag, word or class of unknown words, q for each state of the tag

Unary entries are closed chains (1 for a chain of no rules), at most one of them for a span: `Grammar.closed`. ROOT, the
symbol on every tree, becomes TOP, which no chain is drawn above.
"""

import logging
import math
import os
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, read_text
from lvpcfg.grammar.coarse import is_large, projected_coarse
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model, problem_with_marks
from lvpcfg.grammar.reader import MOST_STATES
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import starts_of
from lvpcfg.trees.binarisation import INTERMEDIATE, Binarisation
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.treebank import Symbols

log = logging.getLogger(__name__)

ROOT, UNKNOWN = "ROOT", "UNK"
Weights = dict[tuple[str, ...], float]  # of states as they are written
Entries = dict[str, dict[int, float]]  # of words, q of states: 0 .. states of all tags


def read_berkeley(prefix: PathLike, lexicon: bool = True) -> Model:
    """The model in the files `prefix`.numstates, .binary, .unary and .lexicon.

    `lexicon=False` reads the rules alone, if there is no lexicon. Such a model knows no words.
    """
    name = os.fspath(prefix)
    if lexicon and not os.path.exists(f"{name}.lexicon") and os.path.exists(f"{name}.binary"):
        raise InputError(
            f"there is no file {show(f'{name}.lexicon', 200)}, so this grammar can parse no words: "
            "read_berkeley(..., lexicon=False) reads its rules."
        )
    numbers = _read_states(f"{name}.numstates")
    binary = _read_rules(f"{name}.binary", 3, numbers)
    unary = _read_rules(f"{name}.unary", 2, numbers)
    layout = _Layout(numbers, {_symbol(rule[0]) for rule in (*binary, *unary)})
    problem = problem_with_marks(layout.symbols)
    if problem:
        raise InputError(f"the grammar {show(name, 200)} cannot be used: {problem}.")
    words, table = _lexical(_read_lexicon(f"{name}.lexicon", layout.tags) if lexicon else {}, sum(layout.tags.values()))
    binary_rules, binary_values = layout.blocks(binary, 3)
    unary_rules, unary_values = layout.blocks(unary, 2)
    grammar = Grammar(
        symbols=layout.symbols,
        binary=RuleTensors(tuple(layout.states.tolist()), len(layout.symbols.interminals), binary_rules, binary_values),
        unary_rules=unary_rules,
        root=layout.root,
        unary=unary_values,
        lexical=table,
        closed=True,
    )
    rightwards = any(right.startswith(INTERMEDIATE) for _, _, right in binary)
    scheme = Binarisation(direction="right" if rightwards else "left", unaries="keep")
    provenance = {"estimator": "berkeley", "name": os.path.basename(name)}
    return Model(grammar, words, scheme, provenance, projected_coarse(grammar) if is_large(grammar) else None)


def _symbol(state: str) -> str:
    return state.rpartition("_")[0]


class _Layout:
    """Symbols and states in their order: those that rules rewrite first, then the tags, each by the alphabet."""

    def __init__(self, numbers: dict[str, int], parents: set[str]) -> None:
        inner, outer = sorted({ROOT, *parents}), sorted(numbers.keys() - {ROOT, *parents})
        self.tags = {name: numbers[name] for name in outer}
        self.symbols = Symbols(tuple(TOP if name == ROOT else name for name in inner), tuple(outer))
        self.states = torch.tensor([numbers[name] for name in (*inner, *outer)])
        self.first = starts_of(self.states)
        written = [f"{name}_{state}" for name in (*inner, *outer) for state in range(numbers[name])]
        self.number = {state: i for i, state in enumerate(written)}
        self.root = torch.zeros(len(written), dtype=torch.float64)
        self.root[self.number[f"{ROOT}_0"]] = 1

    def blocks(self, weights: Weights, width: int) -> tuple[Tensor, Tensor]:
        """The rules between symbols, [rules, width], and their tensors end to end."""
        names = [self.number[state] for states in weights for state in states]
        state = torch.tensor(names, dtype=torch.int64).view(-1, width)
        symbol_of_state = torch.repeat_interleave(self.states)
        rules, rule = symbol_of_state[state].unique(dim=0, return_inverse=True)
        shape, within = self.states[rules], state - self.first[symbol_of_state[state]]
        starts = starts_of(shape.prod(1))
        place = torch.zeros(len(state), dtype=torch.int64)
        for i in range(width):
            place = place * shape[rule, i] + within[:, i]
        values = torch.zeros(int(starts[-1]), dtype=torch.float64)
        values[starts[rule] + place] = torch.tensor(list(weights.values()), dtype=torch.float64)
        return rules, values


def _lexical(entries: Entries, states: int) -> tuple[Lexicon, LexicalTable]:
    """q of every word, then of every class of unknown words; of a class never met, the mean of all classes."""
    classes = sorted(word for word in entries if _is_class(word))
    words = [word for word in entries if not _is_class(word)]
    mean = dict.fromkeys((state for name in classes for state in entries[name]), 0.0)
    for name in classes:
        for state, value in entries[name].items():
            mean[state] += value / len(classes)
    rows = [*(entries[name] for name in (*words, *classes)), mean]
    sizes = torch.tensor([len(row) for row in rows])
    return (
        Lexicon(tuple(words), tuple(classes), "berkeley"),
        LexicalTable(
            row=starts_of(sizes),
            state=torch.tensor([state for row in rows for state in row], dtype=torch.int64),
            value=torch.tensor([value for row in rows for value in row.values()], dtype=torch.float64),
            weight=torch.zeros(len(rows), dtype=torch.float64),
            source=torch.zeros(len(rows), dtype=torch.int64),
            backoff=torch.zeros(1, states, dtype=torch.float64),
            widest=int(sizes.max()),
        ),
    )


def _is_class(word: str) -> bool:
    return word == UNKNOWN or word.startswith(f"{UNKNOWN}-")


def _read_states(path: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for place, line in _lines(path):
        name, _, number = line.strip().replace("\t", " ").rpartition(" ")
        if not name or not number.isdecimal() or not 1 <= float(number) <= MOST_STATES:
            raise InputError(f"{place}: expected a symbol and its number of states, found {show(line)}.")
        if name in numbers:
            raise InputError(f"{place}: the symbol {show(name)} stands there twice.")
        numbers[name] = int(number)
    if numbers.get(ROOT) != 1 or TOP in numbers:
        raise InputError(
            f"{path}: expected a symbol {ROOT} with one state, to stand on every tree, and none named {TOP}."
        )
    return numbers


def _read_rules(path: str, width: int, numbers: dict[str, int]) -> Weights:
    known = {f"{name}_{state}" for name, number in numbers.items() for state in range(number)}
    weights: Weights = {}
    for place, line in _lines(path):
        *states, text = line.split()
        value = _number(text)
        if len(states) != width or value is None:
            raise InputError(f"{place}: expected {width} states and a probability, found {show(line)}.")
        rule = tuple(states)
        if not known.issuperset(rule):
            stranger = next(state for state in rule if state not in known)
            raise InputError(f"{place}: {show(line)} has {show(stranger)}, no state of the symbols in .numstates.")
        if rule == (rule[0], rule[0]):  # a chain of no rules
            if value != 1:
                raise InputError(f"{place}: expected 1 from a state to itself, found {show(line)}.")
            continue
        if rule in weights:
            log.warning(
                "%s: %s stands there for the second time; the first, %g, is left out.", place, line, weights[rule]
            )
        weights[rule] = value
    return weights


def _read_lexicon(path: str, tags: dict[str, int]) -> Entries:
    first = dict(zip(tags, accumulate(tags.values(), initial=0), strict=False))  # among the states of all tags
    entries: Entries = {}
    for place, line in _lines(path):
        tag, _, rest = line.partition(" ")
        word, _, numbers = rest.partition(" ")
        values = [_number(text) for text in numbers.strip().removeprefix("[").removesuffix("]").split(",")]
        if tag not in first:
            raise InputError(f"{place}: {show(line)} begins with no tag, a symbol that no rule rewrites.")
        if not word or len(values) != tags[tag] or None in values:
            expected = f"a word and {tags[tag]} probabilities in brackets"
            raise InputError(f"{place}: expected {show(tag)}, {expected}, found {show(line)}.")
        row = entries.setdefault(word, {})
        if first[tag] in row:
            raise InputError(f"{place}: {show(word)} stands there twice as {tag}.")
        row.update((first[tag] + state, value) for state, value in enumerate(values) if value is not None)
    return entries


def _lines(path: str) -> Iterator[tuple[str, str]]:
    """Every line that is not blank, and where it stands."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line and not line.isspace():
            yield f"{path}, line {number}", line


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
