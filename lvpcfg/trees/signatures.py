"""What an unknown word looks like: named functions from a word to a coarse class.

`english` follows Petrov & Klein 2007 (capitals, digits, dashes, English suffixes); `suffix` knows
no language: the shape of the word and its last letters. Bring your own with `register_signature`.
"""

import re
from collections.abc import Callable

from lvpcfg.errors import InputError, show

# (word, is it the first of its sentence, is its lower-cased form another, known word) -> class
Signature = Callable[[str, bool, bool], str]

SUFFIXES = ("ing", "ion", "est", "ity", "ed", "er", "ly", "al", "y")


def english(word: str, first: bool, lower_known: bool) -> str:
    shape, lower = _shape(word, first, lower_known), word.lower()
    if word.isupper():
        return shape
    if len(word) >= 3 and re.search("[^siu]s$", lower):
        return shape + "-s"
    ending = next((suffix for suffix in SUFFIXES if lower.endswith(suffix)), None)
    return f"{shape}-{ending}" if ending and len(word) >= 5 else shape


def suffix(word: str, first: bool, lower_known: bool) -> str:
    return f"{_shape(word, first, lower_known)}-{word[-3:].lower() if len(word) > 4 else ''}"


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


SIGNATURES: dict[str, Signature] = {"english": english, "suffix": suffix}


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
