"""Reads the command line before Hydra does: a wrong option gets one sentence and the nearest right one."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lvpcfg.decompose.compress import METHODS
from lvpcfg.errors import InputError, show
from lvpcfg.jobs import config
from lvpcfg.registry import ESTIMATORS

GROUPS: dict[str, Mapping[str, type]] = {
    "estimator": {name: ESTIMATORS[name].options for name in ESTIMATORS.names()},
    "decompose": METHODS,
}  # and what can be chosen from each
QUOTES = "a value with commas, brackets, = or letters beyond ASCII goes in quotes of its own, as in gold='\"a=b.mrg\"'"
SWEEPS = ("-m", "--multirun")
ALONE = (*SWEEPS, "-r", "--run", "-h", "--help", "--hydra-help", "--version", "--resolve")  # take no value
OTHER_CONFIG = ("-cn", "-cp", "-cd", "--config", "-sc", "--shell", "--experimental")


def problem_with(arguments: Sequence[str]) -> str | None:
    """What is wrong with the command line, or None."""
    if any(argument.startswith(OTHER_CONFIG) for argument in arguments):
        return None  # another configuration than ours: Hydra's business
    before = ["--run", *arguments]  # so that each argument is paired with the one before it
    options = [
        argument
        for previous, argument in zip(before, arguments, strict=False)
        if not argument.startswith("-") and ("=" in argument or previous in ALONE or not previous.startswith("-"))
    ]
    for option in options:
        if "=" not in option or option.startswith("~"):
            return f"{show(option)} is no option: expected key=value, such as job=train."
    try:
        overrides = OverridesParser.create().parse_overrides(options)
    except OverrideParseException as error:
        return f"{show(error.override)} cannot be read as key=value; {QUOTES}."
    if not any(argument in SWEEPS for argument in arguments):
        for override in overrides:
            if override.is_sweep_override():
                return f"{show(override.input_line)} has several values: add -m to run one job for each; {QUOTES}."
    with initialize_config_dir(str(config.folder()), version_base="1.3"):
        return next(_problems(overrides), None)


def _problems(overrides: list[Override]) -> Iterator[str]:
    for override in overrides:
        if override.package is not None:
            yield f"there is no option {show(override.get_key_element())}; see --help."
            return
    choices = [override for override in overrides if override.key_or_group in GROUPS]
    for override in choices:
        group = override.key_or_group
        names = sorted(path.stem for path in (config.folder() / group).glob("*.yaml"))
        for line in _single(override):
            if line.partition("=")[2] not in names:
                yield f"there is no {show(line)}: expected {group}={' or '.join(names)}."
                return
    chosen = [line for override in choices for line in islice(_single(override), 1)]
    composed = compose("config", overrides=chosen, return_hydra_config=True)
    known = sorted(_keys(OmegaConf.to_container(composed)))
    job = [composed.job, *(str(override.value()) for override in overrides if override.key_or_group == "job")][-1]
    for override in overrides:
        key = override.key_or_group
        if key.startswith("hydra/") or (key.startswith("hydra.") and (override.is_add() or override.is_force_add())):
            continue
        if key not in known:
            group, _, name = key.partition(".")
            owners = [f"{group}={owner}" for owner, options in GROUPS.get(group, {}).items() if hasattr(options, name)]
            if owners:
                yield f"{show(key)} is an option of {' or '.join(owners)}: choose that first."
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            yield f"there is no option {show(key)}" + (f": did you mean {near[0]!r}?" if near else "; see --help.")
            continue
        if override.is_add():
            yield f"{show(override.input_line)} adds an option that is there already: leave out the +."
        if key not in GROUPS:
            yield from _misfits(override, chosen)
        if job in config.JOBS and key.split(".")[0] not in ("job", "hydra", *config.JOBS[job]):
            users = " or ".join(f"job={name}" for name, used in config.JOBS.items() if key.split(".")[0] in used)
            yield f"job={job} does not use {key!r}: it is an option of {users}."


def _misfits(override: Override, chosen: list[str]) -> Iterator[str]:
    """Values that do not fit their option."""
    for line in _single(override):
        try:
            config.typed(compose("config", overrides=[*chosen, line]))
        except InputError as error:
            yield str(error)
        except (HydraException, OmegaConfBaseException, AttributeError) as error:
            yield f"{show(line)} does not fit: {show(_first_line(error.__cause__ or error), 120)[1:-1]}."


def _single(override: Override) -> Iterator[str]:
    """The override, or each value of a sweep, as text; what a glob stands for only Hydra knows."""
    key = override.get_key_element()
    if isinstance(override.value(), Glob):
        return
    if override.is_sweep_override():
        for value in override.sweep_string_iterator():
            yield "=".join([key, str(value)])
    else:
        yield str(override.input_line)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested dictionary."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _keys(value, f"{prefix}{key}.")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].rstrip(".")
