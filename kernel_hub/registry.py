"""Collections of cubins by name: kernel_hub's own, and those of packages that announce theirs.

`from kernel_hub import registry` gives this module, which is the registry: `registry.rms_norm`,
`registry["rms_norm"]`, `list(registry)`, `registry.find(dtype="bf16")`, `registry.their_package.x`.
Nothing is loaded before it is launched.
"""

from __future__ import annotations

import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import __version__
from .archs import token_of
from .collection.entries import OWN_PACKAGE
from .collection.manifest import open_collection
from .collection.resolve import names_target
from .errors import CubinNotFoundError, ParamsError, listed, nearest
from .kernel import Kernel
from .kernel import open_ahead as open_ahead
from .kernel import read_ahead as read_ahead

ENTRY_POINT_GROUP = "kernel_hub.cubins"
_VERSION = re.compile(r"\d+(\.\w+)*([+!-]\w[\w.]*)?")
_DIGEST = re.compile(r"[0-9a-fA-F]{16,64}")
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

    def has(self, name: str, *, arch: Any = None, dtype: str | None = None) -> bool:
        """Whether a cubin of that name is shipped, built for `arch`, with functions of `dtype`.

        Raises ParamsError for what is no architecture or no dtype token.
        """
        token = None if arch is None else token_of(arch)
        if dtype is not None and dtype not in DTYPE_TOKENS:
            raise ParamsError(f"dtype={dtype!r:.80}: one of {', '.join(DTYPE_TOKENS)}")
        entries = open_collection(self._package).manifest.cubins.get(name, {})
        return any(
            (token is None or names_target(token, entry.target))
            and (dtype is None or any(dtype_of(function) == dtype for function in entry.functions))
            for entry in entries.values()
        )

    def require(
        self,
        name: str,
        *,
        version: str | None = None,
        sha256: str | Mapping[str, str] | None = None,
    ) -> Kernel:
        """The Kernel of that name, if it is of the version and the build that were noted.

        version: of the package, or how it begins: '0.1' takes 0.1.0 and 0.1.7, not 0.10.
        sha256: the digest of one of its builds, or of several by architecture ({'sm90': '…'}); 16
            digits or more, as `kernel-hub verify` shows them.
        Raises CubinNotFoundError where it is not shipped, not for that architecture or otherwise;
        ParamsError for a version or a digest that is none.
        """
        if version is not None:
            self._require_version(version)
        kernel = self[name]
        entries = open_collection(self._package).manifest.cubins[name]
        built = {arch: entry.sha256 for arch, entry in entries.items()}
        if isinstance(sha256, Mapping):
            asked = {token_of(arch, "sha256"): digest for arch, digest in sha256.items()}
        else:
            asked = {} if sha256 is None else {"": sha256}
        for arch, digest in asked.items():
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise ParamsError(f"sha256={digest!r:.80}: 16 to 64 hexadecimal digits")
            there = built.values() if not arch else [built[arch]] if arch in built else []
            if not any(each.startswith(digest.lower()) for each in there):
                raise CubinNotFoundError(
                    f"{self._package} ships no {name} of sha256 {digest}"
                    + f" for {arch}" * bool(arch)
                    + f"; it ships: {', '.join(f'{a} {d}' for a, d in sorted(built.items()))}"
                )
        return kernel

    def _require_version(self, asked: Any) -> None:
        if not isinstance(asked, str) or not _VERSION.fullmatch(asked):
            raise ParamsError(f"version={asked!r:.80}: a version or its beginning, such as '0.1'")
        found = _version_of(self._package)
        parts = asked.split(".")
        if found is None or (found.split(".")[: len(parts)] != parts and found != asked):
            raise CubinNotFoundError(
                f"version {asked} of {self._package} was asked for; "
                + (f"{found} is installed" if found else "it is not installed as a package")
            )

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


def _version_of(package: str) -> str | None:
    """Of the distribution that brings it; None where none says that it does."""
    from importlib import metadata

    if package == OWN_PACKAGE:
        return __version__
    names = metadata.packages_distributions().get(package.partition(".")[0], [package])
    try:
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return None


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


own = _Own(OWN_PACKAGE)
_collections[OWN_PACKAGE] = own


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
