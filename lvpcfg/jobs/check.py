"""Reads the command line before Hydra does: a wrong option gets one sentence and the nearest right one."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lvpcfg.errors import InputError, show
from lvpcfg.jobs import config

GROUPS = ("estimator",)
QUOTES = "a value with commas, brackets or = in it goes in quotes of its own, as in gold='\"a=b.mrg\"'"


def problem_with(arguments: Sequence[str]) -> str | None:
    """What is wrong with the command line, or None."""
    options = [argument for argument in arguments if not argument.startswith("-")]
    flags = [argument for argument in arguments if argument.startswith("-")]
    if any(flag not in ("-m", "--multirun", "-r", "--run") for flag in flags):
        return None  # a look at the configuration, or another one: Hydra's business
    for option in options:
        if "=" not in option:
            return f"{show(option)} is no option: expected key=value, such as job=train."
    try:
        overrides = OverridesParser.create().parse_overrides(options)
    except OverrideParseException as error:
        return f"{show(error.override)} cannot be read as key=value ({_first_line(error)}); {QUOTES}."
    if not flags:
        for override in overrides:
            if override.is_sweep_override():
                return f"{show(override.input_line)} has several values: add -m to run one job for each; {QUOTES}."
    with initialize_config_dir(str(config.folder()), version_base="1.3"):
        return next(_problems(overrides), None)


def _problems(overrides: list[Override]) -> Iterator[str]:
    choices = [override for override in overrides if override.key_or_group in GROUPS]
    for override in choices:
        group = override.key_or_group
        names = sorted(path.stem for path in (config.folder() / group).glob("*.yaml"))
        for line in _single(override):
            if line.partition("=")[2] not in names:
                yield f"there is no {show(line)}: expected {group}={' or '.join(names)}."
                return
    chosen = [next(_single(override)) for override in choices]
    composed = compose("config", overrides=chosen, return_hydra_config=True)
    known = sorted(_keys(OmegaConf.to_container(composed)))
    for override in overrides:
        key = override.key_or_group
        if key in GROUPS:
            continue
        if key not in known or override.is_add():
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            yield f"there is no option {show(key)}" + (f": did you mean {near[0]!r}?" if near else "; see --help.")
            continue
        for line in _single(override):
            try:
                config.typed(compose("config", overrides=[*chosen, line]))
            except InputError as error:
                yield str(error)
            except (HydraException, OmegaConfBaseException) as error:
                yield f"{show(line)} does not fit: {_first_line(error.__cause__ or error)}."


def _single(override: Override) -> Iterator[str]:
    """The override, or each value of a sweep, as text."""
    key = override.get_key_element()
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
