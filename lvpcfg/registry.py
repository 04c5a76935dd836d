"""Jobs and estimators, found by name.

Each is two files: a module that registers it, and `conf/<group>/<name>.yaml`, which holds its defaults and says what
they mean. The module is imported when its name is asked for first. It holds the class of the options and imports
neither torch nor nltk before it runs, so that help and checks of options stay fast.

Users register their own, which need no yaml where their options have defaults. The command finds them by entry points
of installed packages, in the groups `lvpcfg.job` and `lvpcfg.estimator`: the name, and the module that registers it.
"""

import keyword
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from lvpcfg.errors import InputError, expect

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    name: str
    options: type  # a dataclass: the types of the options, and defaults where there is no yaml
    run: Callable[..., Any]


class Registry:
    """The items of one group of options, such as `estimator`."""

    def __init__(self, group: str, package: str) -> None:
        self.group, self.package = group, package
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, options: type) -> Callable[[Function], Function]:
        """Decorates what is to be found under `name`, with the class of its options."""

        def decorate(run: Function) -> Function:
            known = self._entries.get(name)
            if known is not None and known.run is not run:
                raise InputError(f"there is a {self.group} {name!r} already: choose another name.")
            self._entries[name] = Entry(name, options, run)
            return run

        return decorate

    def has_file(self, name: str) -> bool:
        """Whether it comes with lvpcfg."""
        return self.file(name).exists()

    def file(self, name: str) -> Path:
        return configuration_folder() / self.group / f"{name}.yaml"

    @cached_property
    def plugins(self) -> dict[str, str]:
        """The modules of installed packages, by the names that they register."""
        return {point.name: point.value for point in entry_points(group=f"lvpcfg.{self.group}")}

    def names(self) -> tuple[str, ...]:
        """Those that come with lvpcfg, and those of users."""
        provided = {path.stem for path in self.file("*").parent.glob("*.yaml")}
        return tuple(sorted(provided | self.plugins.keys() | self._entries.keys()))

    def __getitem__(self, name: str) -> Entry:
        if not isinstance(name, str) or name not in self._entries:
            expect(self.group, name, self.names())
            own = f"{self.package}.{name}{'_' if keyword.iskeyword(name) else ''}"
            module = own if self.has_file(name) else self.plugins[name]
            import_module(module)
            if name not in self._entries:
                raise InputError(f"the module {module} does not register the {self.group} {name!r}, as it should.")
        return self._entries[name]


def configuration_folder() -> Path:
    """`conf/`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


JOBS = Registry("job", "lvpcfg.jobs")
ESTIMATORS = Registry("estimator", "lvpcfg.estimate")
