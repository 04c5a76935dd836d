"""From the command line to the options of a job: `conf/` is composed by Hydra, and typed by the classes of options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lvpcfg.decompose.options import METHODS
from lvpcfg.errors import InputError, show
from lvpcfg.registry import ESTIMATORS, JOBS

LARGEST = 10**18 - 1
# Groups of options within those of a job: what can be chosen from each, and the class of its options.
GROUPS: dict[str, tuple[Callable[[], Sequence[str]], Callable[[str], type]]] = {
    "estimator": (ESTIMATORS.names, lambda name: ESTIMATORS[name].options),
    "decompose": (lambda: sorted(METHODS), lambda name: METHODS[name]),
}


def typed(composed: DictConfig, choices: Mapping[str, str]) -> Any:
    """The options of a job, as an instance of their class, which checks them.

    `choices` names what is chosen from each group: the job, and for some jobs an estimator or a decomposition.
    """
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    _check_sizes(values)
    of_groups = {group: values.pop(group) for group in GROUPS if group in values}
    del values["job"]
    merged: Any = OmegaConf.merge(JOBS[choices["job"]].options, values)
    for group, own in of_groups.items():
        merged[group] = OmegaConf.merge(GROUPS[group][1](choices[group]), own)
    return OmegaConf.to_object(merged)


def _check_sizes(values: Any, name: str = "") -> None:
    """Whole numbers are of 64 bits to whoever takes them."""
    if isinstance(values, dict):
        for key, value in values.items():
            _check_sizes(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list):
        for value in values:
            _check_sizes(value, name)
    elif isinstance(values, int) and not -LARGEST <= values <= LARGEST:
        raise InputError(f"{name} is {show(values)}: expected a number of 18 digits at the most.")


def register(arguments: Sequence[str]) -> None:
    """Tells Hydra of jobs and estimators that have no file in `conf/`: those of users, as far as they are named."""
    store = ConfigStore.instance()
    for registry in (JOBS, ESTIMATORS):
        for name in registry.names():
            if not registry.has_file(name) and any(name in argument for argument in arguments):
                values = asdict(registry[name].options())
                if registry is JOBS:
                    store.store(group="job", name=name, node={"job": name, **values}, package="_global_")
                else:
                    store.store(group=registry.group, name=name, node=values)
