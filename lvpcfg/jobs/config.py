"""The types of the options; their defaults, and what they mean, stand in `conf/`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from lvpcfg.chart.decode import DECODERS
from lvpcfg.decompose import compress
from lvpcfg.errors import InputError, expect, show
from lvpcfg.estimate.estimator import Options
from lvpcfg.parser import DTYPES
from lvpcfg.registry import ESTIMATORS
from lvpcfg.trees.binarise import Binarisation
from lvpcfg.trees.signatures import get_signature

PARSER = ("decoder", "device", "dtype", "threads", "prune", "batch_tokens")
JOBS = {  # and the options each of them reads
    "demo": ("binarisation", "signature", "seed", *PARSER),
    "train": (
        *("data", "binarisation", "signature", "estimator", "seed", "restarts"),
        *("evaluate_every", "checkpoint_every", "resume"),
        *PARSER,
    ),
    "import": ("berkeley",),
    "inspect": ("model", "symbol"),
    "compress": ("model", "decompose", "seed", "device", "threads"),
    "tradeoff": ("model", "gold", "tradeoff", "seed", "resume", *PARSER),
    "parse": ("model", "input", "output", "processes", *PARSER),
    "profile": ("model", "input", "profile", *PARSER),
    "evaluate": ("gold", "test", "model", "parameters", "processes", *PARSER),
}


@dataclass
class DataConfig:
    train: Optional[str] = MISSING  # noqa: UP045  (OmegaConf reads the annotation)
    dev: Optional[str] = MISSING  # noqa: UP045
    on_error: str = MISSING


@dataclass
class BinarisationConfig:
    direction: str = MISSING
    horizontal: Union[int, float] = MISSING  # noqa: UP007
    vertical: int = MISSING
    unaries: str = MISSING


@dataclass
class TradeoffConfig:
    ranks: list[int] = MISSING
    thresholds: list[float] = MISSING
    terms: list[int] = MISSING
    max_length: int = MISSING


@dataclass
class ProfileConfig:
    sentences: int = MISSING
    traced: int = MISSING


@dataclass
class Config:
    job: str = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    binarisation: BinarisationConfig = field(default_factory=BinarisationConfig)
    estimator: Options = field(default_factory=Options)
    decompose: compress.Options = field(default_factory=compress.Options)
    tradeoff: TradeoffConfig = field(default_factory=TradeoffConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    signature: str = MISSING
    seed: int = MISSING
    restarts: int = MISSING
    evaluate_every: int = MISSING
    checkpoint_every: int = MISSING
    resume: bool = MISSING
    berkeley: Optional[str] = MISSING  # noqa: UP045
    model: Any = MISSING  # a folder, or a list of folders
    symbol: Any = MISSING  # a name, or a list of names
    input: Optional[str] = MISSING  # noqa: UP045
    output: Optional[str] = MISSING  # noqa: UP045
    decoder: str = MISSING
    device: Optional[str] = MISSING  # noqa: UP045
    dtype: str = MISSING
    threads: int = MISSING
    processes: int = MISSING
    prune: float = MISSING
    batch_tokens: int = MISSING
    gold: Optional[str] = MISSING  # noqa: UP045
    test: Optional[str] = MISSING  # noqa: UP045
    parameters: Optional[str] = MISSING  # noqa: UP045

    def __post_init__(self) -> None:
        """Wrong values stop here, with a sentence, before any job begins."""
        if self.job == MISSING:
            return  # this is the schema, not a config
        expect("job", self.job, tuple(JOBS))
        expect("data.on_error", self.data.on_error, ("raise", "skip"))
        compress.check(self.decompose)
        expect("decoder", self.decoder, DECODERS)
        expect("dtype", self.dtype, tuple(DTYPES))
        named = self.model if isinstance(self.model, list) else [] if self.model is None else [self.model]
        if not all(isinstance(name, str) for name in named) or self.model == []:
            raise InputError(f"model is {show(self.model)}: expected a folder, or a list of folders, [A,B,C].")
        if not 0 <= self.prune < 1:
            raise InputError(f"prune is {self.prune}: expected a posterior from 0 to 1, such as 5e-5.")
        for name in ("threads", "processes", "batch_tokens", "restarts", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: expected 1, 2, ...")
        for name, least in (("ranks", 1), ("thresholds", 0), ("terms", 1)):
            numbers = getattr(self.tradeoff, name)
            if not all(least <= number < float("inf") for number in numbers) or len(set(numbers)) != len(numbers):
                raise InputError(f"tradeoff.{name} is {show(numbers)}: expected different numbers from {least} on.")
        for name, number in (
            ("tradeoff.max_length", self.tradeoff.max_length),
            *((f"profile.{name}", number) for name, number in vars(self.profile).items()),
        ):
            if number < 1:
                raise InputError(f"{name} is {number}: expected 1, 2, ...")
        self.scheme()
        get_signature(self.signature)

    def parsing(self) -> dict[str, Any]:
        """What a parser is made with."""
        return {name: getattr(self, name) for name in ("decoder", "device", "dtype", "prune", "batch_tokens")}

    def scheme(self) -> Binarisation:
        return Binarisation(**vars(self.binarisation))


def typed(config: Any) -> Config:
    """The composed configuration as plain dataclasses."""
    value: Config = OmegaConf.to_object(config)  # type: ignore[assignment]
    return value


def register() -> None:
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name in ESTIMATORS.names():
        store.store(group="estimator", name=f"{name}_schema", node=ESTIMATORS[name].options)
    for name, method in compress.METHODS.items():
        store.store(group="decompose", name=f"{name}_schema", node=method)


def folder() -> Path:
    """`conf/`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())
