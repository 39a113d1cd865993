"""Collections of cubins by name: kernel_hub's own, and those of packages that announce theirs.

`from kernel_hub import registry` gives this module, which is the registry: `registry.rms_norm`,
`registry["rms_norm"]`, `list(registry)`, `registry.find(dtype="bf16")`, `registry.their_package.x`.
Nothing is loaded before it is launched.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .archs import token_of
from .collection.manifest import open_collection
from .collection.resolve import names_target
from .errors import CubinNotFoundError, ParamsError, listed, nearest
from .kernel import Kernel

ENTRY_POINT_GROUP = "kernel_hub.cubins"
DTYPE_TOKENS = ("fp16", "bf16", "fp32", "fp64", "e4m3", "e5m2", "int8", "int4")


@dataclass(frozen=True)
class Found:
    """One shipped function: its cubin, architecture, name and dtype token (None where unnamed)."""

    package: str
    cubin: str
    arch: str
    function: str
    dtype: str | None


class Registry:
    """The kernels of one package; `registry` itself also knows the other packages."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(open_collection(self._package).manifest.cubins))

    def __len__(self) -> int:
        return len(open_collection(self._package).manifest.cubins)

    def __contains__(self, name: object) -> bool:
        return name in open_collection(self._package).manifest.cubins

    def __getitem__(self, name: str) -> Kernel:
        with self._lock:
            if name not in self._kernels:
                if name not in self:
                    raise CubinNotFoundError(
                        f"{self._package} ships no cubin {name!r}; it ships: "
                        + listed(nearest(name, self))
                    )
                self._kernels[name] = Kernel(name, package=self._package)
            return self._kernels[name]

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self:
            return self[name]
        if self is own and name in packages():
            theirs: Any = collection(packages()[name])  # `collection(…)` has its type
            return theirs
        others = f" and the packages {', '.join(packages())}" if self is own and packages() else ""
        raise AttributeError(
            f"{self._package} ships no cubin {name!r}; it ships: "
            f"{listed(nearest(name, self))}{others}"
        )

    def __dir__(self) -> list[str]:
        extra = list(packages()) if self is own else []
        return sorted({*super().__dir__(), *self, *extra})

    def __repr__(self) -> str:
        return f"<Registry of {self._package}: {', '.join(self)}>"

    def find(self, *, arch: str | None = None, dtype: str | None = None) -> list[Found]:
        """The shipped functions, of one architecture ('sm90') and dtype token ('bf16') if given.

        Raises CubinNotFoundError for an architecture nothing is built for, or no dtype token.
        """
        manifest = open_collection(self._package).manifest
        entries = [entry for archs in manifest.cubins.values() for entry in archs.values()]
        every = [
            (entry.target, Found(self._package, entry.name, entry.arch, name, dtype_of(name)))
            for entry in sorted(entries, key=lambda entry: (entry.name, entry.arch))
            for name in sorted(entry.functions)
        ]
        if arch is not None:
            archs = sorted({found.arch for _, found in every})
            try:
                token = token_of(arch)
            except ParamsError as error:
                raise nothing_for(self._package, "arch", arch, archs) from error
            every = [pair for pair in every if names_target(token, pair[0])]
            if not every:
                raise nothing_for(self._package, "arch", arch, archs)
        if dtype is not None and dtype not in DTYPE_TOKENS:
            raise nothing_for(self._package, "dtype", dtype, DTYPE_TOKENS)
        return [found for _, found in every if dtype in (None, found.dtype)]


def nothing_for(
    where: str, argument: str, asked: object, there: Iterable[str]
) -> CubinNotFoundError:
    """The error for an architecture or a dtype that nothing in `where` has."""
    return CubinNotFoundError(
        f"{where} ships nothing for {argument}={asked!r}; it has: {listed(there)}"
    )


def dtype_of(function: str) -> str | None:
    """The dtype token in a function's name, if it has one."""
    return next((part for part in function.split("_") if part in DTYPE_TOKENS), None)


_packages: dict[str, str] | None = None
_collections: dict[str, Registry] = {}


def packages() -> dict[str, str]:
    """Installed packages that ship cubins: entry point name -> package (read once)."""
    global _packages
    if _packages is None:
        from importlib.metadata import entry_points

        _packages = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return _packages


def collection(package: str) -> Registry:
    """The registry of another package."""
    return _collections.setdefault(package, Registry(package))


class _Own(Registry):
    """What `kernel_hub.registry` is to type checkers: kernel_hub's own, which knows the others."""

    @staticmethod
    def packages() -> dict[str, str]:
        return packages()

    @staticmethod
    def collection(package: str) -> Registry:
        return collection(package)


own = _Own("kernel_hub")
_collections["kernel_hub"] = own


class _RegistryModule(types.ModuleType):
    # `kernel_hub.registry` is both this module and the object users index and iterate.
    def __iter__(self) -> Iterator[str]:
        return iter(own)

    def __len__(self) -> int:
        return len(own)

    def __contains__(self, name: object) -> bool:
        return name in own

    def __getitem__(self, name: str) -> Kernel:
        return own[name]

    def __getattr__(self, name: str) -> Any:
        return own if name == "registry" else getattr(own, name)

    def __dir__(self) -> list[str]:
        return dir(own)

    def __repr__(self) -> str:
        return repr(own)


sys.modules[__name__].__class__ = _RegistryModule
