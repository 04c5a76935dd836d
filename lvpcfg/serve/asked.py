"""What a request asks for, out of the bytes of its body. Whatever cannot be used is refused with one sentence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lvpcfg.batch.records import Reader
from lvpcfg.errors import InputError, show
from lvpcfg.options import JSONL

READER = Reader(JSONL, tokenize=True)
ONE, MANY = "text", "sentences"
BAD, TOO_LARGE, UNUSABLE = 400, 413, 422  # as HTTP calls them


class RefusedError(InputError):
    """A request that gets a sentence in place of trees."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Details:
    """What is to be known of each sentence. Sentences are parsed together if it is the same."""

    k_best: int = 1
    spans: bool = False  # posteriors of the phrases of each tree
    chart: bool = False  # the phrases over all spans
    compare: bool = False  # the same by another model


@dataclass(frozen=True)
class Asked:
    sentences: list[list[str]]
    details: Details = field(default_factory=Details)


@dataclass(frozen=True)
class Limits:
    max_sentences: int
    max_words: int  # of a sentence
    max_k_best: int


FIELDS = (ONE, MANY, *(field.name for field in fields(Details)))


def read(body: bytes, limits: Limits, compares: bool) -> Asked:
    """`compares`: there is another model to compare with."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RefusedError(BAD, f"the body is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise RefusedError(
            UNUSABLE, f'the body is {show(found)}: expected an object, such as {{"{ONE}": "A dog barks."}}.'
        )
    for name in found:
        if name not in FIELDS:
            raise RefusedError(
                UNUSABLE, f"there is no field {show(name)}: expected {', '.join(FIELDS[:-1])} or {FIELDS[-1]}."
            )
    if (ONE in found) == (MANY in found):
        raise RefusedError(UNUSABLE, f'expected either "{ONE}", one sentence, or "{MANY}", a list of sentences.')
    details = _details(found, limits, compares)
    given = [found[ONE]] if ONE in found else found[MANY]
    if ONE in found and not isinstance(found[ONE], str):
        raise RefusedError(UNUSABLE, f'"{ONE}" is {show(found[ONE])}: expected a sentence, as text.')
    if not isinstance(given, list) or not given:
        raise RefusedError(UNUSABLE, f'"{MANY}" is {show(given)}: expected a list of one or more sentences.')
    if len(given) > limits.max_sentences:
        raise RefusedError(
            TOO_LARGE, f"there are {len(given)} sentences in the request: expected {limits.max_sentences} at the most."
        )
    if details.compare and len(given) > 1:
        raise RefusedError(UNUSABLE, f'there are {len(given)} sentences: "compare" takes one.')
    return Asked([_words(number, sentence, limits) for number, sentence in enumerate(given, 1)], details)


def _details(found: dict[str, Any], limits: Limits, compares: bool) -> Details:
    details = Details(**{name: value for name, value in found.items() if name not in (ONE, MANY)})
    if type(details.k_best) is not int or not 1 <= details.k_best <= limits.max_k_best:
        raise RefusedError(
            UNUSABLE, f'"k_best" is {show(details.k_best)}: expected a number of trees from 1 to {limits.max_k_best}.'
        )
    for name in ("spans", "chart", "compare"):
        if type(value := getattr(details, name)) is not bool:
            raise RefusedError(UNUSABLE, f'"{name}" is {show(value)}: expected true or false.')
    if details.compare and not compares:
        raise RefusedError(
            UNUSABLE, 'there is no model to "compare" with: the server was started without compared=FOLDER.'
        )
    return details


def _words(number: int, given: Any, limits: Limits) -> list[str]:
    """Raw text is split into words; words stay as they are."""
    if isinstance(given, str):
        words = READER.of_object({"text": given}).words
    elif isinstance(given, list) and all(isinstance(word, str) for word in given):
        words = READER.of_object({"tokens": given}).words
    else:
        raise RefusedError(UNUSABLE, f"sentence {number} is {show(given)}: expected a text, or a list of words.")
    if not words:
        raise RefusedError(UNUSABLE, f"sentence {number} is {show(given)}: expected one or more words.")
    if len(words) > limits.max_words:
        raise RefusedError(
            UNUSABLE, f"sentence {number} has {len(words)} words: expected {limits.max_words} at the most."
        )
    return words


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
