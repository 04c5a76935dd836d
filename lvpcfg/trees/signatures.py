"""Signatures: named functions from an unknown word to its classes, from fine to coarse.

`english` ends in the classes of Petrov & Klein 2007 (capitals, digits, dashes, English suffixes). `suffix` knows
no language, nor does `affixes`, which is for taggers and looks at both ends of a word. Finer than these are a word's
last letters, and what a number looks like. `berkeley` spells the classes of the Berkeley parser, for its grammars.
Bring your own with `register_signature`.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby

from lvpcfg.errors import InputError, show

# (word, is it the first of its sentence, is its lower-cased form another, known word) -> its class, or its classes,
# finest first
Signature = Callable[[str, bool, bool], str | Sequence[str]]

SUFFIXES = ("ing", "ion", "est", "ity", "ed", "er", "ly", "al", "y")


def english(word: str, first: bool, lower_known: bool) -> tuple[str, ...]:
    shape = _shape(word, first, lower_known)
    return (*_fine(word, shape), shape + _english_suffix(word), shape)


def suffix(word: str, first: bool, lower_known: bool) -> tuple[str, ...]:
    shape = _shape(word, first, lower_known)
    return (*_fine(word, shape), shape)


def affixes(word: str, first: bool, lower_known: bool) -> tuple[str, ...]:
    """The first two letters with the last three or two; then the last letters alone, and the shape of the word."""
    shape, lower = _case(word, first, lower_known), word.lower()
    if any(character.isdigit() for character in word):
        return (*_fine(word, shape), shape)
    both = tuple(f"{shape}~{lower[:2]}~{lower[-letters:]}" for letters in (3, 2) if len(lower) > letters + 2)
    return (*both, *_fine(word, shape), shape)


def _english_suffix(word: str) -> str:
    lower = word.lower()
    if word.isupper():
        return ""
    if len(word) >= 3 and re.search("[^siu]s$", lower):
        return "-s"
    ending = next((suffix for suffix in SUFFIXES if lower.endswith(suffix)), None)
    return f"-{ending}" if ending and len(word) >= 5 else ""


def _fine(word: str, shape: str) -> tuple[str, ...]:
    """By the last letters, or by the pattern of digits and letters: 1989-90 is like 0-0."""
    if any(character.isdigit() for character in word):
        pattern = (("0" if character.isdigit() else "a" if character.isalpha() else character) for character in word)
        return ("<unknown>~" + "".join(character for character, _ in groupby(pattern)),)
    return tuple(f"{shape}~{word[-letters:].lower()}" for letters in (4, 3, 2) if len(word) > letters + 1)


BERKELEY_SUFFIXES = ("ed", "ing", "ion", "er", "est", "ly", "ity", "y", "al")


def berkeley(word: str, first: bool, lower_known: bool) -> str:
    """UNK, then capitals (-INITC: one, at the head of a sentence), -NUM, -DASH and a suffix."""
    capitals = sum(character.isalpha() and not character.islower() for character in word)
    digit, dash, lower = any(character.isdigit() for character in word), "-" in word, word.lower()
    shape = "UNK"
    if word[:1].isupper() or word[:1].istitle():
        if first and capitals == 1:
            shape += "-INITC-KNOWNLC" if lower_known else "-INITC"
        else:
            shape += "-CAPS"
    elif capitals and not word[0].isalpha():
        shape += "-CAPS"
    elif any(character.islower() for character in word):
        shape += "-LC"
    shape += "-NUM" * digit + "-DASH" * dash
    if len(word) >= 3 and lower.endswith("s"):
        return shape if lower[-2] in "siu" else shape + "-s"
    if len(word) < 5 or dash or (digit and capitals):
        return shape
    ending = next((suffix for suffix in BERKELEY_SUFFIXES if lower.endswith(suffix)), None)
    return f"{shape}-{ending}" if ending else shape


def _case(word: str, first: bool, lower_known: bool) -> str:
    """Capitals anywhere in the sentence, and whether the word is known without them; signs, digits and dashes."""
    shape = "<unknown>"
    if word[:1].isupper():
        capital = "-INITIAL" if first else "-CAPITAL"
        shape += "-CAPS" if len(word) > 1 and word.isupper() else capital
        shape += "-KNOWN" * lower_known
    elif any(character.islower() for character in word):
        shape += "-lower"
    elif not any(character.isalnum() for character in word):
        shape += "-SIGNS"
    return shape + "-DIGIT" * any(character.isdigit() for character in word) + "-DASH" * ("-" in word)


def _shape(word: str, first: bool, lower_known: bool) -> str:
    shape = "<unknown>"
    if word[:1].isupper():
        if len(word) > 1 and word.isupper():
            shape += "-CAPS"
        elif first:
            shape += "-INITIAL-KNOWN" if lower_known else "-INITIAL"
        else:
            shape += "-CAPITAL"
    elif any(character.islower() for character in word):
        shape += "-lower"
    if any(character.isdigit() for character in word):
        shape += "-DIGIT"
    if "-" in word:
        shape += "-DASH"
    return shape


OF_TREES, OF_TAGS = "english", "affixes"  # where none is given
SIGNATURES: dict[str, Signature] = {"english": english, "suffix": suffix, "affixes": affixes, "berkeley": berkeley}


def register_signature(name: str, function: Signature) -> None:
    """Makes `function` available under `name`, for training and for loading models that name it."""
    SIGNATURES[name] = function


def get_signature(name: str) -> Signature:
    if name not in SIGNATURES:
        raise InputError(
            f"there is no word signature {show(name)}: expected {' or '.join(SIGNATURES)}, "
            "or one added by lvpcfg.register_signature."
        )
    return SIGNATURES[name]
