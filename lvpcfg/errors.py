"""The one exception for what a user can mend: a file, a value, an option.

Its text is a whole sentence that shows the user's own input and what was expected of it; the
command line prints it without a traceback.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


class InputError(ValueError):
    """Something the user gave cannot be used as it is."""


# What a reader does with malformed input: "raise", "skip", or call a function with each error.
OnError = str | Callable[[InputError], None]


def show(value: object, width: int = 60) -> str:
    """The user's own input, quoted and short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 4] + "..." + text[-1]


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Without characters that a terminal obeys: those of files and models are shown as \\x1b and the like."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def expect(name: str, value: object, allowed: Sequence[object]) -> None:
    """Stops with a sentence that lists what is allowed, unless `value` is among it."""
    if value not in allowed:
        *most, last = map(str, allowed)
        raise InputError(
            f"{name} is {show(value)}: expected {' or '.join([', '.join(most), last] if most else [last])}."
        )


def listed(name: str, given: Any, expected: str) -> list[Any]:
    """What a caller gave as several things: a list, a generator, an array; but no text, no dictionary, no set."""
    if type(given) is list:
        return given
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise InputError(f"{name} is {show(given)}: expected {expected}.")
    return list(given)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the computer, or of a GPU, for which torch has errors of its own."""
    return isinstance(error, MemoryError) or re.search("allocate|out of memory", str(error)) is not None


@contextmanager
def handling(on_error: OnError, name: str) -> Iterator[Callable[[InputError], None]]:
    """Turns an `on_error` option into a function to call with each error."""
    if callable(on_error):
        yield on_error
    elif on_error == "raise":
        yield _raise
    elif on_error == "skip":
        errors: list[InputError] = []
        yield errors.append
        if errors:
            log.warning("%s: skipped %d malformed pieces; the first: %s", name, len(errors), errors[0])
    else:
        raise InputError(f"on_error is {on_error!r}: expected 'raise', 'skip' or a function.")


def _raise(error: InputError) -> None:
    raise error
