"""Reads the command line before Hydra does: a wrong option gets one sentence and the nearest right one."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lvpcfg import processes
from lvpcfg.errors import InputError, expect, show
from lvpcfg.jobs.config import GROUPS, register, typed
from lvpcfg.registry import JOBS, configuration_folder

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
    if processes.number() > 1 and any(argument in SWEEPS for argument in arguments):
        return "-m runs one job after the other, and torchrun runs one job in several processes: leave out one of them."
    if not any(argument in SWEEPS for argument in arguments):
        for override in overrides:
            if override.is_sweep_override():
                return f"{show(override.input_line)} has several values: add -m to run one job for each; {QUOTES}."
    register(arguments)
    with initialize_config_dir(str(configuration_folder()), version_base="1.3"):
        try:
            return next(_problems(overrides), None)
        except InputError as error:
            return str(error)


def _problems(overrides: list[Override]) -> Iterator[str]:
    for override in overrides:
        if override.package is not None:
            yield f"there is no option {show(override.get_key_element())}; see --help."
    chosen: dict[str, list[str]] = {"job": ["demo"]}  # from each group; the last choice counts
    for override in overrides:
        group = override.key_or_group
        if group == "job" or group in GROUPS:
            known = JOBS.names() if group == "job" else GROUPS[group][0]()
            for value in (values := list(_values(override))):
                expect(group, value, known)
            chosen[group] = values or chosen.get(group, [])
    for job in chosen["job"]:
        if processes.number() > 1 and job not in ("train", "parse"):
            yield f"job={job} runs in one process: start it without torchrun, which is for job=train and job=parse."
        yield from _problems_of(job, chosen, overrides)


def _problems_of(job: str, chosen: dict[str, list[str]], overrides: list[Override]) -> Iterator[str]:
    """What one job cannot do with the options. They are looked at one by one only if they do not fit together."""
    used = get_type_hints(JOBS[job].options)
    choices = {group: names[0] for group, names in chosen.items() if group in used and names} | {"job": job}
    composed = compose(
        "config", overrides=[f"{group}={name}" for group, name in choices.items()], return_hydra_config=True
    )
    choices = dict(composed.hydra.runtime.choices)
    known = sorted(_keys(OmegaConf.to_container(composed)))
    swept = any(override.is_sweep_override() for override in overrides)
    together = [str(override.input_line) for override in overrides if override.key_or_group in {*known} - {"hydra"}]
    looked_at = swept or _problem(together, choices) is not None
    for override in overrides:
        key = override.key_or_group
        if key.startswith("hydra/") or (key.startswith("hydra.") and (override.is_add() or override.is_force_add())):
            continue
        if key == "hydra":
            yield f"{show(override.input_line)} sets all options of Hydra: expected one, as in hydra.run.dir=FOLDER."
        elif key not in known:
            yield _unknown(key, job, known)
        elif override.is_add():
            yield f"{show(override.input_line)} adds an option that is there already: leave out the +."
        elif looked_at and key != "job" and key not in GROUPS:
            yield from _misfits(override, choices, overrides)


def _unknown(key: str, job: str, known: list[str]) -> str:
    """A sentence about an option that the job does not have, as it is."""
    group, _, name = key.partition(".")
    if group in known and group in GROUPS:
        names, options = GROUPS[group]
        owners = [f"{group}={owner}" for owner in names() if name in get_type_hints(options(owner))]
        if owners:
            return f"{show(key)} is an option of {' or '.join(owners)}: choose that first."
    keys = {other: set(_fields(JOBS[other].options)) for other in JOBS.names()}
    users = " or ".join(f"job={other}" for other, used in keys.items() if key in used)
    if users:
        return f"job={job} does not use {key!r}: it is an option of {users}."
    near = get_close_matches(key, sorted(set(known).union(*keys.values())), n=1, cutoff=0.5)
    return f"there is no option {show(key)}" + (f": did you mean {near[0]!r}?" if near else "; see --help.")


def _fields(options: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a class of options."""
    for name, kind in get_type_hints(options).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _fields(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif name in GROUPS:
            names, options_of = GROUPS[name]
            for one in names():
                yield from _fields(options_of(one), f"{name}.")


def _misfits(override: Override, choices: dict[str, str], overrides: list[Override]) -> Iterator[str]:
    """Values that do not fit their option, be it alone or together with the other options."""
    others = [str(other.input_line) for other in overrides if other is not override and not other.is_sweep_override()]
    groups = [f"{group}={name}" for group, name in choices.items() if group == "job" or group in GROUPS]
    for value in _lines(override):
        try:
            typed(compose("config", overrides=[*groups, value]), choices)
        except InputError as error:
            together = _problem([*others, value], choices)
            if together is not None:
                yield str(together if isinstance(together, InputError) else error)
        except (HydraException, OmegaConfBaseException, AttributeError) as error:
            yield f"{show(value)} does not fit: {show(_first_line(error.__cause__ or error), 120)[1:-1]}."


def _problem(overrides: list[str], choices: dict[str, str]) -> Exception | None:
    """Of all options together."""
    try:
        typed(compose("config", overrides=overrides), choices)
    except (InputError, HydraException, OmegaConfBaseException, AttributeError) as error:
        return error
    return None


def _lines(override: Override) -> Iterator[str]:
    """The override, or one for each value of a sweep."""
    if override.is_sweep_override():
        yield from (f"{override.get_key_element()}={value}" for value in _values(override))
    else:
        yield str(override.input_line)


def _values(override: Override) -> Iterator[str]:
    """The value, or each value of a sweep, as text; what a glob stands for only Hydra knows."""
    if override.is_sweep_override():
        if not isinstance(override.value(), Glob):
            yield from map(str, override.sweep_string_iterator())
    else:
        yield str(override.value())


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested dictionary."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _keys(value, f"{prefix}{key}.")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].rstrip(".")
