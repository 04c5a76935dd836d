"""Options that several jobs share: their types, and what they may be. Defaults and comments stand in `conf/shared/`."""

from dataclasses import dataclass
from typing import Any

from lvpcfg.errors import InputError, expect, show
from lvpcfg.options import DECODERS, DTYPE_NAMES, expect_prune
from lvpcfg.trees.binarisation import Binarisation
from lvpcfg.trees.signatures import get_signature

MOST_PROCESSES = 1024  # and threads
OF_TAGGERS = ("decoder", "device", "dtype", "batch_tokens")
OF_PARSERS = ("decoder", "device", "dtype", "prune", "batch_tokens", "max_length")


@dataclass(kw_only=True)
class DeviceOptions:
    device: str | None
    threads: int

    def __post_init__(self) -> None:
        expect_positive(self, "threads", most=MOST_PROCESSES)


@dataclass(kw_only=True)
class ParserOptions(DeviceOptions):
    decoder: str | None
    dtype: str
    prune: Any  # a posterior, or exact
    batch_tokens: int
    max_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder is not None:
            expect("decoder", self.decoder, DECODERS)
        expect("dtype", self.dtype, DTYPE_NAMES)
        if type(self.prune) is int:
            self.prune = float(self.prune)
        expect_prune(self.prune, self.decoder)
        expect_positive(self, "batch_tokens", "max_length")

    def parser(self) -> dict[str, Any]:
        """What a `Parser` is made with."""
        return {name: getattr(self, name) for name in OF_PARSERS}


@dataclass(kw_only=True)
class BinarisationOptions:
    direction: str
    horizontal: int | float
    vertical: int
    unaries: str

    def __post_init__(self) -> None:
        self.scheme()

    def scheme(self) -> Binarisation:
        return Binarisation(**vars(self))


@dataclass(kw_only=True)
class TreebankOptions(ParserOptions):
    """Of jobs that train: how trees become rules, and how dev is parsed."""

    binarisation: BinarisationOptions
    signature: str | None
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signature is not None:
            get_signature(self.signature)


def tagger_options(options: object) -> dict[str, Any]:
    """What a `Tagger` is made with."""
    return {name: getattr(options, name) for name in OF_TAGGERS}


def expect_positive(options: object, *names: str, prefix: str = "", most: int | None = None) -> None:
    for name in names:
        number = getattr(options, name)
        if number < 1:
            raise InputError(f"{prefix}{name} is {number}: expected 1, 2, ...")
        if most is not None and number > most:
            raise InputError(f"{prefix}{name} is {number}: expected {most} at the most.")


def folders(model: object, option: str = "model") -> list[str]:
    """The model folders that an option names: none, one, or a list of them."""
    return several(option, model, "a folder", "a list of folders")


def several(option: str, given: object, one: str, more: str) -> list[str]:
    """What an option names: nothing, one, or a list."""
    named: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(name, str) and name for name in named) or given == []:
        raise InputError(f"{option} is {show(given)}: expected {one}, or {more}, [A,B,C].")
    return named


def one_folder(model: object, job: str) -> str:
    if not isinstance(model, str):
        raise InputError(f"job={job} needs one model folder: model=FOLDER, as job=train makes one.")
    return model
