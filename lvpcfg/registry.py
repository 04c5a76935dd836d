"""Jobs, estimators and decompositions, found by name.

Each is two files: a module that registers it, and `conf/<group>/<name>.yaml`, which holds its defaults and says what
they mean. The module is imported when its name is asked for first. It holds the class of the options and imports
neither torch nor nltk before it runs, so that help and checks of options stay fast. Users register their own.
"""

import keyword
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lvpcfg.errors import InputError, expect


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

    def register(self, name: str, options: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorates what is to be found under `name`, with the class of its options."""

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            known = self._entries.get(name)
            if known is not None and known.run is not run:
                raise InputError(f"there is a {self.group} {name!r} already: choose another name.")
            self._entries[name] = Entry(name, options, run)
            return run

        return decorate

    def names(self) -> tuple[str, ...]:
        """Those that come with lvpcfg, and those that users registered."""
        provided = {path.stem for path in (configuration_folder() / self.group).glob("*.yaml")}
        return tuple(sorted(provided | self._entries.keys()))

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            expect(self.group, name, self.names())
            import_module(f"{self.package}.{name}{'_' if keyword.iskeyword(name) else ''}")
        return self._entries[name]


def configuration_folder() -> Path:
    """`conf/`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


JOBS = Registry("job", "lvpcfg.jobs")
ESTIMATORS = Registry("estimator", "lvpcfg.estimate")
