"""The one exception for what a user can mend: a file, a value, an option.

Its text is a whole sentence that shows the user's own input and what was expected of it; the
command line prints it without a traceback.
"""

from collections.abc import Sequence


class InputError(ValueError):
    """Something the user gave cannot be used as it is."""


def show(value: object, width: int = 60) -> str:
    """The user's own input, quoted and short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 4] + "..." + text[-1]


def expect(name: str, value: object, allowed: Sequence[object]) -> None:
    """Stops with a sentence that lists what is allowed, unless `value` is among it."""
    if value not in allowed:
        *most, last = map(str, allowed)
        raise InputError(
            f"{name} is {show(value)}: expected {' or '.join([', '.join(most), last] if most else [last])}."
        )
