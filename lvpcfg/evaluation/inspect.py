"""What the states of a grammar stand for: how often each is expected, and its likeliest rules and words.

The parameters of a spectral model have signs: they are no probabilities, and its states, directions, are not expected
any number of times. The largest numbers are shown, whatever their sign.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float64
from torch import Tensor

from lvpcfg.evaluation.directions import Directions, directions_of
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.spelling import Spellings, Tokens

RULES, WORDS, TYPICAL = 8, 10, 10  # how many are shown of a state
OTHER = "any other word"
LEAST = 1e-6  # a word with less surplus is not called typical
CHUNK = 4096  # words that are looked up at once


@dataclass(frozen=True)
class Rule:
    children: tuple[int, ...]  # their numbers among the states of all symbols
    probability: float  # or a signed number


@dataclass(frozen=True)
class Word:
    text: str
    known: bool  # False: the text is the name of a class of unknown words
    probability: float


@dataclass(frozen=True)
class State:
    number: int  # among the states of all symbols
    name: str  # NP-3, or NP where the symbol has one state
    expected: float | None  # occurrences in a tree; None for directions
    share: float | None  # of the occurrences of its symbol
    ancestors: tuple[int, ...]  # the states that it came from by splits, numbered within the symbol, coarsest first
    rules: tuple[Rule, ...] = ()
    words: tuple[Word, ...] = ()
    typical: tuple[str, ...] = ()  # more words, likelier here than in the other states of the symbol


@dataclass(frozen=True)
class Symbol:
    name: str
    preterminal: bool
    expected: float
    states: tuple[State, ...]  # sorted, so that states of one ancestor are neighbours
    signed: bool = False  # whether the grammar is one of directions
    directions: Directions | None = None


def look_inside(model: Model) -> list[Symbol]:
    """What the states of every symbol stand for, the most frequent symbol first."""
    grammar, directions = model.grammar.to("cpu"), directions_of(model)
    first, inner, signed = grammar.first_state.tolist(), len(grammar.symbols.interminals), bool(directions)
    expected, total = _expected(model, signed)
    share = torch.where(expected > 0, expected / total[grammar.symbol_of_state], 0)
    names, rules = state_names(grammar), likeliest_rules(grammar, signed)
    words = likeliest_words(model, share[first[inner] :], signed)
    ancestors = grammar.hierarchy.T.tolist()
    found = []
    for symbol, name in enumerate(grammar.symbols.names):
        states = []
        for number in range(first[symbol], first[symbol + 1]):
            below = words[number - first[inner]] if symbol >= inner else ((), ())
            above = tuple(ancestors[number]) if ancestors else ()
            often = None if signed else float(expected[number])
            part = None if signed else float(share[number])
            states.append(State(number, names[number], often, part, above, rules[number], *below))
        states.sort(key=lambda state: (state.ancestors, state.number))
        about = float(total[symbol]), tuple(states), signed, directions.get(name)
        found.append(Symbol(name, symbol >= inner, *about))
    return sorted(found, key=lambda symbol: -symbol.expected)


def _expected(model: Model, signed: bool) -> tuple[Float64[Tensor, "states"], Float64[Tensor, "symbols"]]:
    """How often each state and each symbol occurs in a tree. Where states are directions, nothing is known of them, 0,
    and of symbols what the coarse grammar says."""
    grammar = model.grammar.to("cpu")
    if not signed:
        expected = expected_states(grammar).double()
        return expected, expected.new_zeros(len(grammar.symbols)).index_add(0, grammar.symbol_of_state, expected)
    none = torch.zeros(len(grammar.root), dtype=torch.float64)
    if model.coarse is None:
        return none, none.new_ones(len(grammar.symbols))
    return none, expected_states(model.coarse.grammar.to("cpu")).double()


def state_names(grammar: Grammar) -> list[str]:
    """A name for each state: NP-0, NP-1, ...; the name of the symbol where it has one state."""
    numbers = zip(grammar.symbols.names, grammar.states.tolist(), strict=True)
    return [f"{name}-{state}" if m > 1 else name for name, m in numbers for state in range(m)]


def likeliest_rules(grammar: Grammar, signed: bool) -> list[tuple[Rule, ...]]:
    """The likeliest rules of each state, binary and unary ones together; with signs, those with the largest numbers."""
    first, m = grammar.first_state.tolist(), grammar.states.tolist()
    blocks: defaultdict[int, list[tuple[list[int], Tensor]]] = defaultdict(list)  # by parent: children, T [m, ...]
    binary = grammar.binary.written_out()
    for rule, (parent, *children) in enumerate(binary.rules.tolist()):
        blocks[parent].append((children, binary.tensor(rule).detach().flatten(1)))
    for rule, (parent, *children) in enumerate(grammar.unary_rules.tolist()):
        blocks[parent].append((children, grammar.unary_tensor(rule).detach()))
    found: list[tuple[Rule, ...]] = [()] * len(grammar.root)
    for parent, some in blocks.items():
        begin = list(accumulate((block.shape[1] for _, block in some), initial=0))
        numbers = _shown(torch.cat([block for _, block in some], 1), signed)
        places = numbers.abs().topk(min(RULES, begin[-1]), dim=1).indices
        best = numbers.gather(1, places)
        for state, values, columns in zip(range(m[parent]), best.tolist(), places.tolist(), strict=True):
            rules = []
            for value, column in zip(values, columns, strict=True):
                number = bisect_right(begin, column) - 1
                children = some[number][0]
                left, right = divmod(column - begin[number], m[children[-1]])
                states = (left, right) if len(children) == 2 else (right,)
                below = tuple(first[child] + of_child for child, of_child in zip(children, states, strict=True))
                if value:
                    rules.append(Rule(below, value))
            found[first[parent] + state] = tuple(rules)
    return found


def likeliest_words(
    model: Model, share: Tensor, signed: bool = False
) -> list[tuple[tuple[Word, ...], tuple[str, ...]]]:
    """The likeliest words of each state of the preterminals, and other words that are typical of it.

    A word is typical where q log(q / mean) is large: what it adds to the divergence of q from the mean over the states
    of the symbol.
    """
    grammar, lexicon = model.grammar.to("cpu"), model.lexicon
    inner = len(grammar.symbols.interminals)
    tag = grammar.symbol_of_state[-len(share) :] - inner
    member = torch.nn.functional.one_hot(tag, len(grammar.symbols.preterminals)).double()  # [states, tags]
    likely = torch.zeros(0, len(share)).double()
    likely_entry = torch.zeros(0, len(share)).long()
    typical, typical_entry = likely, likely_entry
    for entries, values in _word_values(grammar, lexicon):
        q = _shown(values, signed)
        mean = (q * share) @ member @ member.T
        surplus = torch.where((q > 0) & (mean > 0), q * (q / mean).log(), 0).clamp_min(0)
        entry = entries.unsqueeze(1).expand_as(q)
        likely, likely_entry = _best(likely, likely_entry, q, entry, WORDS)
        typical, typical_entry = _best(typical, typical_entry, surplus, entry, TYPICAL)
    names = [*lexicon.words, *lexicon.classes, OTHER]
    found = []
    for state in range(len(share)):
        shown = dict(zip(likely_entry[:, state].tolist(), likely[:, state].tolist(), strict=True))
        words = [Word(names[entry], entry < len(lexicon.words), value) for entry, value in shown.items() if value]
        more = zip(typical_entry[:, state].tolist(), typical[:, state].tolist(), strict=True)
        others = [names[entry] for entry, value in more if value > LEAST and entry not in shown]
        found.append((tuple(words), tuple(others)))
    return found


def _word_values(grammar: Grammar, lexicon: Lexicon) -> Iterator[tuple[Tensor, Tensor]]:
    """Entries, and what they are worth to each state, [entries, states]: words, then classes of unknown words."""
    known, classes = torch.arange(len(lexicon)).tensor_split([len(lexicon.words)])
    for entries in known.split(CHUNK):
        words = [(lexicon.words[entry], False) for entry in entries.tolist()]
        tokens = Tokens(entries, torch.arange(len(words)), Spellings(words, lexicon.alphabet))
        yield entries, grammar.lexical.values_of(tokens).detach().double()
    yield classes, grammar.lexical.lookup(classes).detach().double()


def _shown(values: Tensor, signed: bool) -> Tensor:
    """Without what is below zero, where that is an error of an approximation."""
    return values if signed else values.clamp_min(0)


def _best(value: Tensor, entry: Tensor, more: Tensor, more_entry: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The largest values of each column, whatever their sign, and their entries."""
    value, entry = torch.cat([value, more]), torch.cat([entry, more_entry])
    place = value.abs().topk(min(most, len(value)), dim=0).indices
    return value.gather(0, place), entry.gather(0, place)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def amount(value: float, signed: bool) -> str:
    """A probability; or a signed number as it is."""
    return f"{value:+.3g}" if signed else percent(value)


def heading(symbol: Symbol) -> str:
    """What is listed of its states."""
    return f"{'largest numbers of' if symbol.signed else 'likeliest'} {'words' if symbol.preterminal else 'rules'}"
