"""The finder of modules behind `install()`; what those modules hold is in the others here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import base

_PACKAGE = "cpm_kernels"
_NAMES = (_PACKAGE, "pkg_resources")
# Ours in their place, whether the package is installed or not.
_OURS = {
    f"{_PACKAGE}.kernels.base": f"{__package__}.base",
    f"{_PACKAGE}.device": f"{__package__}.device",
}
_LIBRARY = f"{_PACKAGE}.library"
# Ours where no package is installed.
_INSTEAD = {
    f"{_LIBRARY}.base": f"{__package__}.library",
    f"{_LIBRARY}.cuda": f"{__package__}.cuda",
    f"{_LIBRARY}.cudart": f"{__package__}.cudart",
    "pkg_resources": f"{__package__}.pkg_resources",
}
# Parents of these: there must be such packages even where none is installed.
_PARENTS = (_PACKAGE, f"{_PACKAGE}.kernels", _LIBRARY)


def install(*, substitute: bool = False) -> None:
    """Let `import cpm_kernels…` resolve here, in this process, from now on.

    `cpm_kernels.kernels.base` and `cpm_kernels.device` are kernel_hub's; the other modules of an
    installed cpm_kernels work on top, and open no library before one of its functions is used.
    Where none is installed, `cpm_kernels.library.base`, `.cuda` and `.cudart` are kernel_hub's too,
    and so is `pkg_resources` where setuptools has it no longer. Modules that imported cpm_kernels
    earlier keep what they got.

    substitute: where a client's own image has no code for the GPU, launch kernel_hub's kernels of
        the same names and parameter sizes (`weight_extraction`), with a warning that says so. A
        further call changes it.
    """
    base.set_substitute(substitute)
    if _finder not in sys.meta_path:
        _displaced.update(_take_modules())
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo `install`; modules that imported cpm_kernels meanwhile keep what they got."""
    base.set_substitute(False)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        _take_modules()
        sys.modules.update(_displaced)
        _displaced.clear()


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    stand_in = sys.modules.get("pkg_resources")
    if isinstance(getattr(stand_in, "__loader__", None), _Ours):
        names.append("pkg_resources")
    return {name: sys.modules.pop(name) for name in names}


class _Ours(Loader):
    """A module with the public names of one of kernel_hub's."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        home = import_module(self._home)
        module.__doc__ = home.__doc__
        for name in home.__all__:
            setattr(module, name, getattr(home, name))
        if "__getattr__" in vars(home):
            module.__getattr__ = home.__getattr__  # type: ignore[method-assign]


class _DeferredModule(ModuleType):
    """A module of the installed package whose code runs when a name of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        # Python's own machinery asks for other __names__; `import *` for this one.
        if not name.startswith("__") or name == "__all__":
            loader = self.__dict__["__spec__"].loader
            loader.run(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Deferred(Loader):
    """Makes a module at once, and runs the code that `actual` would load (None: none) later."""

    def __init__(self, actual: Loader | None) -> None:
        self._actual = actual
        self._ran = False
        self._lock = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def run(self, module: ModuleType) -> None:
        """Run the code once; while it runs, it sees the module as far as it got."""
        with self._lock:
            if not self._ran and self._actual is not None:
                self._ran = True
                try:
                    self._actual.exec_module(module)
                except BaseException:
                    self._ran = False
                    raise


def _ours(name: str, home: str) -> ModuleSpec:
    return ModuleSpec(name, _Ours(home), origin=home)


class _Finder(MetaPathFinder):
    """Finds cpm_kernels and what is in it, before any other finder does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _NAMES:
            return None
        if fullname in _OURS:
            return _ours(fullname, _OURS[fullname])
        found = self._installed(fullname, path)
        if found is None and fullname in _INSTEAD:
            return _ours(fullname, _INSTEAD[fullname])
        if found is None:
            return (
                ModuleSpec(fullname, _Deferred(None), is_package=True)
                if fullname in _PARENTS
                else None
            )
        # `library` opens CUDA's libraries, and the parents' own code imports all the rest.
        if fullname in _PARENTS or f"{fullname}.".startswith(f"{_LIBRARY}."):
            found.loader = _Deferred(found.loader)
        return found

    def _installed(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                found: ModuleSpec | None = find(fullname, path)
                if found is not None:
                    return found
        return None


_finder = _Finder()
_displaced: dict[str, ModuleType] = {}
