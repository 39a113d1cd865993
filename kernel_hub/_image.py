"""The images a Kernel can stand for: a shipped cubin, or a cubin, fatbin or PTX from elsewhere.

An image knows its functions and gives the bytes for a compute capability; it never loads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    ParamsError,
    nearest,
)
from .manifest import Collection, CubinEntry, FunctionEntry, open_collection
from .params import Param
from .resolve import Candidate, not_found, resolve

if TYPE_CHECKING:  # the readers take milliseconds to import, and shipped cubins need none
    from .cubin import CubinInfo, FunctionInfo

SUFFIXES = (".cubin", ".fatbin", ".ptx")
_PTX_FLOATS = {".f32": "float", ".f64": "double"}


@dataclass(frozen=True)
class FunctionSpec:
    """What is known of one function. `params` None: an image only the driver can read."""

    name: str
    arch: str
    params: tuple[Param, ...] | None
    num_regs: int | None = None
    static_shared_bytes: int | None = None
    local_bytes: int | None = None
    max_threads: int | None = None
    required_block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None

    def prototype(self) -> str:
        """`name(float* out, int n)`."""
        params = "…" if self.params is None else ", ".join(map(str, self.params))
        return f"{self.name}({params})"

    def describe(self) -> str:
        """The prototype and the resources, for repr and docstrings."""
        facts: list[str] = [self.arch]
        if self.num_regs is not None:
            facts.append(f"{self.num_regs} registers")
        if self.static_shared_bytes is not None:
            facts.append(f"{self.static_shared_bytes} bytes static shared memory")
        if self.local_bytes:
            facts.append(f"{self.local_bytes} bytes local memory")
        if self.required_block is not None:
            facts.append(f"blockDim exactly {self.required_block}")
        elif self.max_threads is not None:
            facts.append(f"at most {self.max_threads} threads")
        if self.cluster is not None:
            facts.append(f"cluster {self.cluster}")
        return f"{self.prototype()} [{', '.join(facts)}]"


@dataclass(frozen=True)
class Chosen:
    """The image that runs on a device: its bytes, and what is known of its functions."""

    key: str
    kind: str
    label: str
    read: Callable[[], bytes]
    functions: Mapping[str, FunctionSpec]
    minimum_driver: int
    vouched: bool
    # Puts the caller's types onto what only the driver could tell.
    declare: Callable[[FunctionSpec], FunctionSpec] = lambda spec: spec


class Image(Protocol):
    """What Kernel needs of an image."""

    label: str

    def names(self) -> Sequence[str] | None:
        """Function names; None where only the driver can tell (a compressed fatbin)."""

    def spec(self, name: str) -> FunctionSpec:
        """One function, before any device is known."""

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        """What to load on a GPU, or CubinNotFoundError."""


class ShippedImage:
    """A cubin of a collection, built for several architectures."""

    def __init__(self, collection: Collection, name: str) -> None:
        self._collection = collection
        self._entries: Mapping[str, CubinEntry] = collection.manifest.cubins[name]
        self._name = name
        self.label = f"{collection.package}'s cubin {name!r}"

    def names(self) -> Sequence[str]:
        found: dict[str, None] = {}
        for entry in self._entries.values():
            found.update(dict.fromkeys(entry.functions))
        return list(found)

    def spec(self, name: str) -> FunctionSpec:
        # The newest architecture stands for all: signatures are the same, resources nearly.
        for entry in reversed(list(self._entries.values())):
            if name in entry.functions:
                return _entry_spec(entry, name)
        raise FunctionNotFoundError.among(name, self.names(), self.label)

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        candidates = {e.target: e for e in self._entries.values()}
        found = resolve(compute_capability, [Candidate(e.arch, t) for t, e in candidates.items()])
        if found.chosen is None:
            major, minor = compute_capability
            raise not_found(
                self.label,
                compute_capability,
                found.rejected,
                build=f"Shipped: {', '.join(sorted(self._entries))}. From a checkout, "
                f"./build_cubins.sh --arch sm{major}{minor} --only {self._name} would build one.",
            )
        entry = candidates[found.chosen.target]
        return Chosen(
            entry.sha256,
            "cubin",
            f"{self.label} ({entry.file})",
            lambda: self._collection.read(entry),
            _EntrySpecs(entry),
            entry.minimum_driver,
            True,
        )


class _EntrySpecs(Mapping[str, FunctionSpec]):
    """Function specs of a manifest entry, made when asked for."""

    def __init__(self, entry: CubinEntry) -> None:
        self._entry = entry

    def __getitem__(self, name: str) -> FunctionSpec:
        if name not in self._entry.functions:
            raise KeyError(name)
        return _entry_spec(self._entry, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry.functions)

    def __len__(self) -> int:
        return len(self._entry.functions)


def _entry_spec(entry: CubinEntry, name: str) -> FunctionSpec:
    function = entry.functions[name]
    params = [
        Param.make(i, p.name, p.type, p.size_bytes, p.offset_bytes)
        for i, p in enumerate(function.params)
    ]
    return _spec(function, entry.arch, params)


def _cubin_specs(info: CubinInfo) -> dict[str, FunctionSpec]:
    specs = {}
    for name, function in info.functions.items():
        params = [
            Param.make(p.ordinal, None, None, p.size_bytes, p.offset_bytes) for p in function.params
        ]
        specs[name] = _spec(function, info.arch, params)
    return specs


def _spec(function: FunctionEntry | FunctionInfo, arch: str, params: list[Param]) -> FunctionSpec:
    return FunctionSpec(
        function.name,
        arch,
        tuple(params),
        function.num_regs,
        function.static_shared_bytes,
        function.local_bytes,
        function.max_threads,
        function.required_block,
        function.cluster,
    )


def _floor(toolkit: tuple[int, int] | None) -> int:
    # Machine code of toolkit 13 needs a driver of 13.0 (580), of 12 one of 12.0 (525).
    return 13000 if toolkit is not None and toolkit[0] >= 13 else 12000


class ForeignImage:
    """A cubin, fatbin or PTX that no manifest vouches for: read and validated here."""

    def __init__(self, data: bytes, label: str) -> None:
        from .cubin import image_kind

        self.label = label
        self._data = data
        self._kind = image_kind(data)
        self._key = hashlib.sha256(data).hexdigest()
        self._targets: list[str] = []
        self._floor = 12000
        self._opaque = False
        self._specs: dict[str, FunctionSpec] = {}
        {"cubin": self._read_cubin, "fatbin": self._read_fatbin, "ptx": self._read_ptx}[self._kind](
            data
        )

    def _read_cubin(self, data: bytes) -> None:
        from .cubin import read_cubin

        info = read_cubin(data)
        self._targets.append(info.target)
        self._floor = max(self._floor, _floor(info.toolkit))
        self._specs |= _cubin_specs(info)

    def _read_ptx(self, data: bytes) -> None:
        from .cubin import read_ptx

        info = read_ptx(data)
        for name, params in info.functions.items():
            made, offset = [], 0
            for index, param in enumerate(params):
                offset += -offset % max(param.align, 1)
                kind = _PTX_FLOATS.get(param.type)
                made.append(Param.make(index, None, kind, param.size_bytes, offset))
                offset += param.size_bytes
            self._specs.setdefault(name, FunctionSpec(name, f"ptx {info.target}", tuple(made)))

    def _read_fatbin(self, data: bytes) -> None:
        from .cubin import read_cubin, read_fatbin

        for entry in read_fatbin(data).entries:
            if entry.kind == "cubin":
                major, minor = entry.compute_capability
                self._targets.append(f"sm_{major}{minor}{'a' * entry.arch_specific}")
            if entry.image is None:
                self._opaque = True
            elif entry.kind == "cubin":
                info = read_cubin(entry.image)
                self._floor = max(self._floor, _floor(info.toolkit))
                self._specs |= _cubin_specs(info)
            else:
                self._read_ptx(entry.image)

    def names(self) -> Sequence[str] | None:
        return None if self._opaque else list(self._specs)

    def spec(self, name: str) -> FunctionSpec:
        if name in self._specs:
            return self._specs[name]
        if self._opaque:
            return FunctionSpec(name, "fatbin", None)
        raise FunctionNotFoundError.among(name, self._specs, self.label)

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        # Fatbins and PTX go to the driver untouched: it chooses among entries and may JIT.
        if self._kind == "cubin":
            found = resolve(compute_capability, [Candidate(t, t) for t in self._targets])
            if found.chosen is None:
                major, minor = compute_capability
                raise not_found(
                    self.label,
                    compute_capability,
                    found.rejected,
                    build=f"Build it for this GPU: nvcc -cubin -arch=sm_{major}{minor} …",
                )
        return Chosen(
            self._key, self._kind, self.label, lambda: self._data, self._specs, self._floor, False
        )


def open_image(filename: Any, package: str | None) -> Image:
    """The image `filename` stands for: a shipped name, a path, or the bytes themselves."""
    if package is not None and not isinstance(package, str):
        raise ParamsError(
            f"package={package!r}: a package's name, or None for kernel_hub's own, not "
            f"{type(package).__name__}"
        )
    if isinstance(filename, (bytes, bytearray, memoryview)):
        return ForeignImage(bytes(filename), f"an image of {len(filename)} bytes")
    if isinstance(filename, Path):
        return _open_file(filename)
    if not isinstance(filename, str):
        raise ParamsError(
            f"filename={filename!r} is a {type(filename).__name__}; pass a shipped cubin's name, a "
            "path, or the image as bytes"
        )
    name = filename
    for suffix in SUFFIXES[:2]:
        name = name.removesuffix(suffix)
    is_path = name != Path(name).name or filename.endswith(SUFFIXES)
    collection = open_collection(package or "kernel_hub")
    if name in collection.manifest.cubins:
        return ShippedImage(collection, name)
    if is_path and package is None:
        return _open_file(Path(filename))
    shipped = nearest(name, collection.manifest.cubins)
    raise CubinNotFoundError(
        f"{collection.package} ships no cubin {name!r}; it ships: {', '.join(shipped[:12])}. "
        "A path to a file of your own ends in .cubin, .fatbin or .ptx."
    )


@lru_cache(maxsize=32)
def _read_file(path: Path, stamp: tuple[int, int]) -> ForeignImage:
    try:
        return ForeignImage(path.read_bytes(), str(path))
    except CubinCorruptError as error:
        named = CubinCorruptError(f"{path}: {error.args[0]}")
        named.offset = error.offset
        raise named from error


def _open_file(path: Path) -> ForeignImage:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        found = f"no file {str(path)!r} (looked at {path.absolute()}): {error}"
        raise CubinNotFoundError(found) from error
    if path.is_dir():
        raise CubinNotFoundError(f"{path} is a folder; name a .cubin, .fatbin or .ptx file")
    return _read_file(path.absolute(), (status.st_mtime_ns, status.st_size))
