"""Further import paths of modules, which people know: `epifuse.arguments` is `epifuse.runtime.arguments`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Aliases(MetaPathFinder, Loader):
    """Finds the module itself under its other name, so that a class imported by either name is the same class."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self.homes = homes
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The import specification of an alias, or of a submodule of one; None for any other name."""
        return ModuleSpec(name, self) if self._home(name) is not None else None

    def _home(self, name: str) -> str | None:
        for alias, home in self.homes.items():
            if name == alias or name.startswith(f"{alias}."):
                return home + name[len(alias) :]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The real module, imported under its own name."""
        home = self._home(spec.name)
        assert home is not None, "found as an alias"
        module = importlib.import_module(home)
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing, since the module has run already. Undo what the import machinery did: it replaced `__spec__`."""
        assert module.__spec__ is not None, "put there by the import machinery"
        module.__spec__ = self.specs.pop(module.__spec__.name)


def install(homes: Mapping[str, str]) -> None:
    """Let each key of `homes` be imported as the module that its value names."""
    sys.meta_path.insert(0, _Aliases(homes))
