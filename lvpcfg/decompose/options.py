"""The options of the decompositions, and what they may be. What they mean stands in `conf/decompose/`.

Nothing here imports torch, so that options are checked at once.
"""

from dataclasses import asdict, dataclass
from numbers import Integral, Real

from lvpcfg.errors import InputError, expect, show
from lvpcfg.options import DTYPE_NAMES

ALS_STARTS = ("hosvd", "random")
APR_STARTS = ("cover", "random")
APART, TOGETHER = CHILD_TYPES = ("apart", "together")  # terms for each type of children, or all for all of them
SIGNED, NONNEGATIVE, NORMALISED = VALUES = ("signed", "nonnegative", "normalised")
LOSSES = ("squared", "kl")
OPTIMISERS = ("adam", "lbfgs")
MOST = 1_000_000  # of whole numbers


@dataclass
class Options:
    """Of the method `cover`, which has none, and of all others. What they mean stands in `conf/decompose/`."""

    name: str = "cover"


@dataclass
class ALSOptions(Options):
    name: str = "als"
    rank: int = 8
    threshold: float = 1e-3
    iterations: int = 1000
    tolerance: float = 1e-3
    start: str = "hosvd"
    restarts: int = 0
    steps: int = 100
    nonnegative: bool = False


@dataclass
class SVDOptions(Options):
    name: str = "svd"
    error: float = 1e-3


@dataclass
class APROptions(Options):
    name: str = "apr"
    rank: int = 260
    iterations: int = 100
    tolerance: float = 1e-4
    start: str = "cover"
    starts: int = 1
    child_types: str = APART


@dataclass
class GradientOptions(Options):
    name: str = "gradient"
    rank: int = 64
    loss: str = "squared"
    optimiser: str = "lbfgs"
    values: str = NONNEGATIVE
    iterations: int = 200


@dataclass
class TrimOptions(Options):
    name: str = "trim"
    threshold: float = 1e-8
    dtype: str = "float32"


METHODS: dict[str, type[Options]] = {
    "als": ALSOptions,
    "cover": Options,
    "svd": SVDOptions,
    "apr": APROptions,
    "gradient": GradientOptions,
    "trim": TrimOptions,
}
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "als": {"start": ALS_STARTS},
    "apr": {"start": APR_STARTS, "child_types": CHILD_TYPES},
    "gradient": {"loss": LOSSES, "optimiser": OPTIMISERS, "values": VALUES},
    "trim": {"dtype": DTYPE_NAMES},
}


def check(options: Options) -> None:
    """Values that make no sense stop here."""
    expect("decompose.name", options.name, (type(options)().name,))
    for name, value in asdict(options).items():
        known = CHOICES.get(options.name, {}).get(name)
        if known is not None:
            expect(f"decompose.{name}", value, known)
        elif name != "name" and type(getattr(type(options), name)) in (int, float):
            whole = type(getattr(type(options), name)) is int
            if not isinstance(value, Integral if whole else Real):
                raise InputError(f"decompose.{name} is {show(value)}: expected a {'whole ' * whole}number.")
            least = 1 if name in ("rank", "iterations", "starts") else 0
            if not least <= float(value) < float("inf"):
                raise InputError(f"decompose.{name} is {show(value)}: expected a number from {least} on.")
            if whole and float(value) > MOST:
                raise InputError(f"decompose.{name} is {show(value)}: expected {MOST} at the most.")
    if isinstance(options, SVDOptions) and options.error >= 1:
        raise InputError(f"decompose.error is {options.error}: expected a share of the squared norm, less than 1.")
    if isinstance(options, TrimOptions) and options.threshold > 1:
        raise InputError(
            f"decompose.threshold is {options.threshold}: expected a share of the largest number, up to 1."
        )
    if isinstance(options, GradientOptions) and options.loss == "kl" and options.values == "signed":
        raise InputError("decompose.loss is kl: expected decompose.values=nonnegative or normalised with it.")
