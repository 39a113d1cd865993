"""A package of somebody's name in `sys.modules`, and the distribution that programs look for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


class StandIn(MetaPathFinder):
    """Modules of kernel_hub under other names, until `uninstall()`.

    modules: their name -> ours. The first is the package; what of an installed one is not named
    here is imported from there. distribution, version: what importlib.metadata finds besides.
    """

    def __init__(self, modules: dict[str, str], distribution: str, version: str) -> None:
        self._modules = modules
        self._package = next(iter(modules))
        self._distribution = _Distribution(distribution, version, self._package)
        self._displaced: dict[str, ModuleType] = {}

    def install(self) -> None:
        """Put the modules in place; a second call changes nothing."""
        if self in sys.meta_path:
            return
        displaced = self._take_modules()
        try:
            spec = find_spec(self._package)
            folders = list((spec and spec.submodule_search_locations) or ())
            made = {name: self._made(name, home, folders) for name, home in self._modules.items()}
        except BaseException:
            sys.modules.update(displaced)
            raise
        self._displaced = displaced
        sys.modules.update(made)
        for name, module in made.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(made[parent], child, module)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Undo `install`; modules that imported the names meanwhile keep what they got."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._take_modules()
            sys.modules.update(self._displaced)
            self._displaced = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """None: what is ours is in sys.modules."""
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Ours, for a search by its name or for all."""
        name = getattr(context, "name", None)
        if name is None or _normal(name) == _normal(self._distribution.title):
            yield self._distribution

    def _take_modules(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == self._package]
        return {name: sys.modules.pop(name) for name in names}

    def _made(self, name: str, home: str, folders: list[str]) -> ModuleType:
        ours = import_module(home)
        made = ModuleType(name, ours.__doc__)
        is_package = name == self._package and len(self._modules) > 1
        made.__spec__ = ModuleSpec(name, Loader(), origin=home, is_package=is_package)
        made.__loader__ = made.__spec__.loader
        made.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            made.__path__ = made.__spec__.submodule_search_locations = folders
        public = [each for each in ours.__all__ if each not in ("install", "uninstall")]
        made.__all__ = public  # type: ignore[attr-defined]
        for each in (*public, "__version__"):
            if hasattr(ours, each):
                setattr(made, each, getattr(ours, each))

        def missing(asked: str) -> Any:
            if asked.startswith("__"):
                raise AttributeError(asked)
            raise AttributeError(
                f"{name} is kernel_hub's ({home}), which has no {asked}; it has "
                f"{', '.join(public)}. `import {self._modules[self._package]} as door; "
                "door.uninstall()` gives the installed package back"
            )

        made.__getattr__ = missing  # type: ignore[method-assign]
        return made


class _Distribution(Distribution):
    """A distribution without files, of one package."""

    def __init__(self, title: str, version: str, package: str) -> None:
        self.title = title
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n"
            "Summary: kernel_hub's stand-in\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
