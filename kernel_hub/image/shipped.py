"""The images a Kernel can stand for: a shipped cubin, or one from elsewhere by path or bytes.

An image knows its functions and gives the bytes for a compute capability; it never loads them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..collection.entries import OWN_PACKAGE
from ..collection.manifest import Collection, CubinEntry, open_collection
from ..collection.resolve import fitting, not_found
from ..errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    ParamsError,
    listed,
    nearest,
)
from ..files import read_file
from ..signature.function_spec import Chosen, FunctionSpec, Image, spec_of
from ..signature.params import Param
from .foreign import ForeignImage

__all__ = ["Chosen", "ForeignImage", "FunctionSpec", "Image", "ShippedImage", "open_image"]

SUFFIXES = (".cubin", ".fatbin", ".ptx")
SOURCES = (".cu", ".cuh", ".cpp", ".cc", ".cxx")
_MAX_JSON_BYTES = 1 << 20
_FRESH_NS = 2_000_000_000  # also the step of some file systems' clocks


class TritonCubin(ForeignImage):
    """A cubin with Triton's json beside it. `hint` says what launches it."""

    def __init__(self, image: ForeignImage, path: Path) -> None:
        self.__dict__.update(vars(image))
        self.hint = (
            f"{path} is a kernel of Triton's ({path.stem}.json lies beside it): "
            f"kernel_hub.formats.triton.load({str(path)!r}) knows its block, its shared memory and "
            "its hidden parameters, and takes the declared arguments only"
        )

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        try:
            return super().choose(compute_capability)
        except CubinNotFoundError as error:
            arch = "sm{}{}".format(*compute_capability)
            raise not_found(
                self.label,
                compute_capability,
                error.rejected,
                build="Build it for this GPU with Triton: run its Python code there, or without "
                f"one kernel-hub build-triton FILE.py:NAME --arch {arch} …",
            ) from None


class ShippedImage:
    """A cubin of a collection, built for several architectures."""

    def __init__(self, collection: Collection, name: str) -> None:
        self._collection = collection
        self._entries: Mapping[str, CubinEntry] = collection.manifest.cubins[name]
        self._name = name
        self._specs: dict[str, _EntrySpecs] = {}  # by architecture
        # Images that were read ahead of their load, and of which architectures any was read.
        self._ahead: dict[str, bytes] = {}
        self._were_read: set[str] = set()
        self._reading = threading.Lock()
        self.label = f"{collection.package}'s cubin {name!r}"

    def names(self) -> Sequence[str]:
        found: dict[str, None] = {}
        for entry in self._entries.values():
            found.update(dict.fromkeys(entry.functions))
        return list(found)

    def has(self, name: object) -> bool:
        """Whether it is a function of some architecture, without a list of all."""
        entries = reversed(list(self._entries.values()))  # as `spec` asks them
        return isinstance(name, str) and any(name in entry.functions for entry in entries)

    def spec(self, name: str) -> FunctionSpec:
        # The newest architecture stands for all: signatures are the same, resources nearly.
        for entry in reversed(list(self._entries.values())):
            if name in entry.functions:
                return self._specs_of(entry)[name]
        raise FunctionNotFoundError.among(name, self.names(), self.label)

    def _specs_of(self, entry: CubinEntry) -> _EntrySpecs:
        return self._specs.setdefault(entry.arch, _EntrySpecs(entry))

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        entry, rejected = fitting(compute_capability, self._entries.values())
        if entry is None:
            major, minor = compute_capability
            raise not_found(
                self.label,
                compute_capability,
                rejected,
                build=f"Shipped: {', '.join(sorted(self._entries))}. From a checkout, "
                f"./build_cubins.sh --arch sm{major}{minor} --only {self._name} would build one.",
            )
        return Chosen(
            entry.sha256,
            "cubin",
            f"{self.label} ({entry.file})",
            lambda: self._read(entry),
            self._specs_of(entry),
            entry.minimum_driver,
            True,
        )

    def read_ahead(self, compute_capability: tuple[int, int]) -> None:
        """Read and verify what `choose` gives now, once; whoever asks for it first has these bytes.

        Raises as that would, which tries again.
        """
        entry, _ = fitting(compute_capability, self._entries.values())
        with self._reading:
            if entry is not None and entry.arch not in self._were_read:
                self._ahead[entry.arch] = self._collection.read(entry)
                self._were_read.add(entry.arch)

    def _read(self, entry: CubinEntry) -> bytes:
        with self._reading:  # it may be under way
            self._were_read.add(entry.arch)
            return self._ahead.pop(entry.arch, None) or self._collection.read(entry)


class _EntrySpecs(Mapping[str, FunctionSpec]):
    """Function specs of a manifest entry, made when asked for."""

    def __init__(self, entry: CubinEntry) -> None:
        self._entry = entry
        self._made: dict[str, FunctionSpec] = {}

    def __getitem__(self, name: str) -> FunctionSpec:
        if name not in self._made:
            if name not in self._entry.functions:
                raise KeyError(name)
            self._made[name] = _entry_spec(self._entry, name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry.functions)

    def __len__(self) -> int:
        return len(self._entry.functions)


def _entry_spec(entry: CubinEntry, name: str) -> FunctionSpec:
    function = entry.functions[name]
    return spec_of(function, entry.arch, Param.make_all(function.params))


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
        return open_file(filename)
    if not isinstance(filename, str):
        raise ParamsError(
            f"filename={filename!r} is a {type(filename).__name__}; pass a shipped cubin's name, a "
            "path, or the image as bytes"
        )
    if "\n" in filename and not _is_cuda(filename):  # no name of a file or a cubin
        return ForeignImage(
            filename.encode(errors="replace"), f"a text of {len(filename)} characters"
        )
    if _is_cuda(filename):
        raise CubinCorruptError(
            f"{_start(filename)!r} is neither cubin, fatbin nor PTX but CUDA C++: "
            "Kernel.from_source(code) compiles it"
        )
    name = filename
    for suffix in SUFFIXES[:2]:
        name = name.removesuffix(suffix)
    is_path = name != Path(name).name or filename.endswith(SUFFIXES)
    collection = open_collection(package or OWN_PACKAGE)
    if name in collection.manifest.cubins:
        return ShippedImage(collection, name)
    if (is_path or filename.endswith(SOURCES)) and package is None:
        try:
            return open_file(Path(filename))
        except CubinNotFoundError as error:
            if (stem := Path(filename).stem) not in collection.manifest.cubins:
                raise
            text = f"{error}. A shipped cubin goes by its name: {collection.package} has {stem!r}"
            raise CubinNotFoundError(text) from error
    shipped = listed(nearest(name, collection.manifest.cubins))
    raise CubinNotFoundError(
        f"{collection.package} ships no cubin {name!r}; it ships: {shipped}. "
        "A path to a file of your own ends in .cubin, .fatbin or .ptx."
    )


@lru_cache(maxsize=32)
def _read_file(path: Path, stamp: tuple[int, ...]) -> ForeignImage:
    """The image in `path`, read again whenever `stamp` says that it is another file."""
    data = read_file(path)
    try:
        return ForeignImage(data, str(path))
    except CubinCorruptError as error:
        named = CubinCorruptError(f"{path}: {error.args[0]}")
        named.offset = error.offset
        raise named from error


def open_file(path: Path) -> ForeignImage:
    """The image in a file. Raises CubinNotFoundError, CubinCorruptError."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        text = _nothing_at(path, error)
        if path.suffix in SOURCES:
            text += f". Kernel.from_source(Path({str(path)!r})) compiles a file of CUDA C++"
        raise CubinNotFoundError(text) from error
    if path.suffix in SOURCES:
        raise CubinCorruptError(
            f"{path} is a file of CUDA C++: Kernel.from_source(Path({str(path)!r})) compiles it "
            f"now, nvcc -cubin -arch=sm_90 {path} ahead of time"
        )
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    # A clock of files ticks a few hundred times a second: what was written just now may be written
    # again within the same tick.
    is_fresh = abs(time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)) < _FRESH_NS
    read = _read_file.__wrapped__ if is_fresh else _read_file
    image = read(path.absolute(), stamp)
    return TritonCubin(image, path) if _has_triton_json(path) else image


def _nothing_at(path: Path, error: Exception) -> str:
    """That there is no such file, and what its folder has, nearest first."""
    text = f"no file {str(path)!r} (looked at {str(path.absolute())!r}): {error}"
    for folder in path.absolute().parents:
        try:
            there = [item.name for item in folder.iterdir()]
        except (OSError, ValueError):
            continue
        held = listed(nearest(path.name, there), 8) if there else "nothing"
        return f"{text}. {folder} holds: {held}"
    return text


def _is_cuda(text: str) -> bool:
    return "__global__" in text and ".version" not in text  # which PTX has


def _start(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _has_triton_json(path: Path) -> bool:
    json_file = path.with_suffix(".json")
    if path.suffix != ".cubin" or not json_file.is_file():
        return False
    try:
        found = json.loads(read_file(json_file, _MAX_JSON_BYTES))
    except (CubinNotFoundError, CubinCorruptError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"num_warps", "shared", "name"} <= found.keys()
