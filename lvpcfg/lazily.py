"""nltk's trees without the rest of nltk, until somebody asks for it.

`nltk` imports all of itself, and with it scipy and scikit-learn where they are installed: seconds, for trees that need
none of it. Here a few of its modules are imported alone. The packages they are in are executed as soon as anything else
is asked for: a name, or another module. (`importlib.util.LazyLoader` would execute them for the first module.)
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

PACKAGES, MODULES = ("nltk", "nltk.parse"), ("nltk.tree", "nltk.parse.api")


class Waiting(MetaPathFinder, Loader):
    """Packages that have not been executed, outermost first. As a finder, it sees which modules are asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self.waiting: dict[str, tuple[ModuleType, Loader]] = {}
        for name in names:
            spec = find_spec(name)
            if spec is None or spec.loader is None:
                raise ImportError(name)
            module = sys.modules[name] = module_from_spec(spec)
            self.waiting[name] = module, spec.loader
            package, _, within = name.rpartition(".")
            if package:
                setattr(sys.modules[package], within, module)

    def close(self) -> None:
        """From here on, they are executed when more of them is asked for."""
        sys.meta_path.insert(0, self)
        for name, (module, _) in self.waiting.items():
            module.__dict__["__getattr__"] = lambda attribute, name=name: self.ask(name, attribute)

    def ask(self, name: str, attribute: str) -> Any:
        module = sys.modules[name]
        self.execute(name)
        if "__getattr__" in module.__dict__:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(module, attribute)

    def execute(self, last: str) -> None:
        """All of them, in order, up to one of them; each may ask for those that follow."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in list(self.waiting):
            if name in self.waiting:
                module, loader = self.waiting.pop(name)
                del module.__dict__["__getattr__"]
                loader.exec_module(module)
            if name == last:
                break

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGES[0]:
            return None
        self.execute(PACKAGES[0])
        if name not in sys.modules:
            return None
        # It has been imported by now, and the import that led here has to be given that very module.
        spec, module = spec_from_loader(name, self), sys.modules[name]
        assert spec is not None
        spec.loader_state, module.__spec__ = module.__spec__, spec
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if PACKAGES[0] not in sys.modules:
    try:
        packages = Waiting(PACKAGES)
        for name in MODULES:
            import_module(name)
        packages.close()
    except ImportError:  # a release that hangs together in another way: all of it, then
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGES[0]]:
            del sys.modules[name]
