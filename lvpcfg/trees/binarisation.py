"""The choices of `binarise.py`, without nltk: options are checked before it is imported."""

import math
from dataclasses import dataclass

from lvpcfg.errors import InputError, expect, show

INTERMEDIATE, CHAIN, PARENT, SIBLING = "@", "+", "^", "|"


@dataclass(frozen=True)
class Binarisation:
    """How trees become binary.

    - `direction`: "right" or "left".
    - `horizontal`: how many siblings an intermediate symbol remembers; `math.inf` for all.
    - `vertical`: 2 if phrase labels remember their parents, otherwise 1.
    - `unaries`: "keep" unary rules, or "collapse" a chain of them into one label.
    """

    direction: str = "right"
    horizontal: float = 0
    vertical: int = 1
    unaries: str = "keep"

    def __post_init__(self) -> None:
        expect("direction", self.direction, ("right", "left"))
        expect("vertical", self.vertical, (1, 2))
        expect("unaries", self.unaries, ("collapse", "keep"))
        order = self.horizontal
        if type(order) not in (int, float) or not (order == math.inf or (order >= 0 and order % 1 == 0)):
            raise InputError(f"horizontal is {show(self.horizontal)}: expected 0, 1, 2, ... or inf.")


RIGHT = Binarisation()
