"""Collections of ahead-of-time built Triton kernels: a folder, or a package's `cubins/`.

Reads and writes manifests; needs no Triton. What a launch does is TritonFunction's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .... import driver as _driver
from .... import registry
from ....archs import token_of
from ....collection import manifest_write
from ....collection.manifest import (
    Collection,
    CubinEntry,
    FunctionEntry,
    Manifest,
    find_collection,
    open_collection,
    read_manifest,
)
from ....collection.resolve import fitting, not_found
from ....cubin import read_cubin
from ....errors import (
    CubinCorruptError,
    CubinNotFoundError,
    KernelHubError,
    ParamsError,
    listed,
    nearest,
)
from ....image.shipped import ShippedImage
from ....kernel import Kernel
from ....launch.function import device_number
from ..function import TritonFunction
from ..grid import Grid, check_names
from ..metadata import Metadata
from ..signature import arguments_from_json
from .family import Described, Family, family

if TYPE_CHECKING:
    from ....cubin.model import CubinInfo
    from .compiling import Built
    from .dispatcher import Dispatcher
    from .tuned_file import Tuned

MANIFEST = "manifest.json"
# What the launch's checks take from the manifest, and the cubin says too.
_FIGURES = (
    *("required_block", "max_threads", "cluster", "max_cluster_rank", "cooperative"),
    "static_shared_bytes",
)


def collection(where: str | Path) -> TritonCollection:
    """Open the collection in the folder `where`, or the one that the package `where` ships.

    A package is named by its entry point of the group `kernel_hub.cubins`, or as it is imported.
    Needs neither Triton nor a GPU. Raises CubinNotFoundError, CubinCorruptError.
    """
    if not isinstance(where, (str, Path)):
        raise ParamsError(f"collection({where!r:.80}): a folder, or a package's name")
    folder = Path(where)
    if folder.joinpath(MANIFEST).is_file():
        return TritonCollection(find_collection(folder))
    if isinstance(where, Path) or not where.replace(".", "_").isidentifier():
        raise CubinNotFoundError(
            f"no collection in {str(folder)!r}: there is no {folder / MANIFEST}; "
            "kernel-hub build-triton makes one"
        )
    return TritonCollection(open_collection(registry.packages().get(where, where)))


class TritonCollection:
    """Name -> TritonFunction for the GPU at hand; names, not kernels, are read before that."""

    def __init__(self, found: Collection) -> None:
        self.root = found.root
        self._collection = found
        self._functions: dict[tuple[str, str], TritonFunction] = {}

    def __repr__(self) -> str:
        return f"<TritonCollection {self._collection.package}: {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        cubins = self._collection.manifest.cubins
        return (name for name in sorted(cubins) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        cubins = self._collection.manifest.cubins
        known = isinstance(name, str) and name in cubins
        return known and _launchable(self.entries(str(name))) is not None

    def __getitem__(self, name: str) -> TritonFunction:
        return self.function(name)

    def entries(self, name: str) -> Mapping[str, CubinEntry]:
        """What the manifest says of `name`, by architecture."""
        cubins = self._collection.manifest.cubins
        if not isinstance(name, str):
            raise ParamsError(f"a kernel's name is a string, not {name!r:.80}")
        if name not in cubins:
            shipped = listed(nearest(name, cubins))
            raise CubinNotFoundError(
                f"{self._collection.package} has no {name!r}; it has: {shipped}"
            )
        return cubins[name]

    def function(self, name: str, *, arch: str | None = None, device: Any = None) -> TritonFunction:
        """`name` as built for `arch` ('sm90'), or for the GPU `device`, None being the current one.

        device: a number, or a device of torch, CuPy or cuda.core. With `arch` no GPU is needed, as
            long as nothing is launched.

        Raises CubinNotFoundError with every architecture there is, CubinCorruptError where manifest
        and image do not say how to launch it, or not the same.
        """
        entries = self.entries(name)
        arch = self._arch(name, device) if arch is None else token_of(arch)
        if arch not in entries:
            raise CubinNotFoundError(
                f"{name} of {self._collection.package} is not built for {arch!r}; it is for "
                + ", ".join(entries)
            )
        found = self._functions.get((name, arch))
        if found is None:
            found = self._functions.setdefault((name, arch), self._open(entries[arch]))
        return found

    def image_of(self, name: str) -> str:
        """SHA-256 of the image that the current GPU runs for `name`."""
        return self.entries(name)[self._arch(name, None)].sha256

    def kernels(self) -> list[str]:
        """The kernels' own names: each may be there in several configurations."""
        return sorted({each.function for each in map(self.described, self)})

    def kernel(self, name: str) -> Dispatcher:
        """All configurations of the kernel `name` (its own name, of `kernels()`) as one function.

        Raises CubinNotFoundError, ParamsError where they do not take the same arguments.
        """
        from .dispatcher import Dispatcher

        return Dispatcher(self, self.family(name))

    def family(self, kernel: str, among: Iterable[str] | None = None) -> Family:
        """The configurations of `kernel`, all or those `among` some names."""
        found = [self.described(name) for name in (self if among is None else among)]
        members = [each for each in found if each.function == kernel]
        if not members:
            shown = ", ".join(self.kernels()) or "none"
            raise CubinNotFoundError(
                f"{self._collection.package} has no kernel {kernel!r:.80}; it has: {shown}"
            )
        return family(kernel, members)

    def described(self, name: str) -> Described:
        """What the manifest says of a configuration, the same for every architecture."""
        arch, entry = next(iter(self.entries(name).items()))
        function = _launchable({arch: entry})
        where = f"{self.root}{os.sep}{MANIFEST}: cubins.{name}.{arch}"
        if function is None:
            raise CubinNotFoundError(f"{where}: it is no Triton kernel")
        where = f"{where}.functions.{function.name}.triton"
        read = launch_of(function, where)
        said, order = read["configuration"], read.get("names", [])
        if not isinstance(order, list) or not all(isinstance(each, str) for each in order):
            raise CubinCorruptError(f"{where}.names must be a list of names, found {order!r:.80}")
        return Described(
            name,
            function.name,
            arguments_from_json(read["arguments"], f"{where}.arguments"),
            said["signature"],
            said["constexprs"],
            said["options"],
            tuple(order),
            grid_of(read, where),
        )

    def tuned(self, table: str | None = None) -> Tuned:
        """What `tune` found best: a dispatcher by problem size, for the GPU at hand.

        table: which, where the collection holds several (by default a kernel's name).
        """
        from .tuned_file import Tuned

        return Tuned.open(self, table)

    def _arch(self, name: str, device: Any) -> str:
        driver = _driver.get()
        capability = driver.compute_capability(device_number(device, name))
        entry, rejected = fitting(capability, self.entries(name).values())
        if entry is None:
            raise not_found(
                f"{self._collection.package}'s {name!r}",
                capability,
                rejected,
                build="Build it for this GPU: kernel-hub build-triton … --arch "
                f"sm{capability[0]}{capability[1]}",
            )
        return entry.arch

    def _open(self, entry: CubinEntry) -> TritonFunction:
        name, arch = entry.name, entry.arch
        where = f"{self.root}{os.sep}{MANIFEST}: cubins.{name}.{arch}.functions"
        launchable = _launchable({arch: entry})
        if launchable is None:
            raise CubinNotFoundError(
                f"{where}: none has a 'triton' object: it is no Triton kernel, "
                f"Kernel({name!r}) launches it"
            )
        where = f"{where}.{launchable.name}.triton"
        read = launch_of(launchable, where)
        metadata = Metadata.from_mapping(read["metadata"], f"{where}.metadata")
        if metadata.name != launchable.name or f"sm{_token(metadata)}" != arch:
            raise CubinCorruptError(
                f"{where}.metadata is of {metadata.name!r} for sm{_token(metadata)}, found at "
                f"{launchable.name!r} for {arch}"
            )
        arguments = arguments_from_json(read["arguments"], f"{where}.arguments")
        grid = grid_of(read, where)
        _check_image(read_cubin(self._collection.read(entry)), entry, launchable, where)
        # What a launch refuses need not name the field.
        metadata = replace(metadata, label=f"{self.root}{os.sep}{MANIFEST}: {name} for {arch}")
        only = self._collection._replace(manifest=Manifest({name: {arch: entry}}))
        kernel = Kernel.__new__(Kernel)
        try:
            kernel._offer(ShippedImage(only, name), None, None, False)
            function = kernel[launchable.name]
        except ParamsError as error:  # sizes and types that cannot be
            raise CubinCorruptError(f"{where.removesuffix('.triton')}.params: {error}") from error
        try:
            return TritonFunction.wrap(
                function, metadata, arguments, read["configuration"]["constexprs"], grid
            )
        except ParamsError as error:
            raise CubinCorruptError(str(error)) from error


def _check_image(image: CubinInfo, entry: CubinEntry, said: FunctionEntry, where: str) -> None:
    """What the launch relies on is what the cubin itself says, or CubinCorruptError."""
    where = where.removesuffix(".triton")
    found = image.functions.get(said.name)
    if found is None or image.target != entry.target:
        raise CubinCorruptError(
            f"{where} for {entry.target}: the cubin {entry.file} holds "
            f"{', '.join(image.functions) or 'nothing'} for {image.target}: build it again"
        )
    pairs = [(name, getattr(said, name), getattr(found, name)) for name in _FIGURES]
    sizes = [[(p.offset_bytes, p.size_bytes) for p in each.params] for each in (said, found)]
    for name, ours, real in [("params (offset, size in bytes)", *sizes), *pairs]:
        if ours != real:
            raise CubinCorruptError(
                f"{where}.{name} is {ours}, the cubin says {real}: they are not of one build; "
                "build it again"
            )


def _token(metadata: Metadata) -> str:
    return "{}{}".format(*metadata.compute_capability)


def _launchable(entries: Mapping[str, CubinEntry]) -> FunctionEntry | None:
    """The first function that says how Triton launches it."""
    for entry in entries.values():
        for function in entry.functions.values():
            if function.triton is not None:
                return function
    return None


def launch_of(function: FunctionEntry, where: str) -> Mapping[str, Any]:
    """The `triton` object of a function, its own fields checked; `where` names it in messages."""
    found = function.triton or {}
    for key, kind in (("metadata", dict), ("arguments", list), ("configuration", dict)):
        if not isinstance(found.get(key), kind):
            expected = "a list" if kind is list else "an object"
            raise CubinCorruptError(
                f"{where}.{key} must be {expected}, found {found.get(key)!r:.80}"
            )
    for key in ("signature", "constexprs", "options"):
        value = found["configuration"].get(key)
        if not isinstance(value, dict):
            raise CubinCorruptError(
                f"{where}.configuration.{key} must be an object, found {value!r:.80}"
            )
    for name, text in found["configuration"]["signature"].items():
        if not isinstance(text, str):
            raise CubinCorruptError(f"{where}.configuration.signature.{name} is {text!r:.80}")
    return found


def grid_of(read: Mapping[str, Any], where: str) -> Grid | None:
    """The grid in a `triton` object. Raises CubinCorruptError."""
    text, configuration = read.get("grid"), read["configuration"]
    if text is None:
        return None
    try:
        grid = Grid(text)
        check_names(grid, configuration["signature"], configuration["constexprs"], "the kernel")
    except ParamsError as error:
        raise CubinCorruptError(f"{where}.grid: {error}") from error
    return grid


def add(out: str | Path, built: Sequence[Built]) -> None:
    """Write what was built into the collection in `out`, leaving what else is there.

    A name stands for one configuration of one source: what an architecture not built now has of
    another goes. Raises CubinCorruptError (a damaged collection, left as it is), KernelHubError.
    """
    folder = Path(out)
    if all(one.entry is None for one in built):
        return
    try:
        with manifest_write.locked(folder):
            _add(folder, built)
    except OSError as error:
        raise KernelHubError(f"cannot write the collection {str(folder)!r}: {error}") from error


def _add(folder: Path, built: Sequence[Built]) -> None:
    present = folder / MANIFEST
    old = read_manifest(present) if present.exists() else Manifest({})
    tables = {name: dict(old.cubins[name]) for name in old.cubins}
    for entries in tables.values():
        for entry in entries.values():
            list(entry.functions.values())  # decoded now: a wrong field stops us before we write
    dropped: set[str] = set()
    for one in built:
        if one.entry is None:
            continue
        kept = tables.setdefault(one.name, {})
        if kept and _launchable(kept) is None:
            raise KernelHubError(
                f"{folder / MANIFEST}: {one.name!r} is a kernel that Triton did not make: "
                "give another name or folder"
            )
        for arch, entry in list(kept.items()):
            if _identity(entry) != _identity(one.entry):
                dropped.add(kept.pop(arch).file)
        kept[one.arch] = one.entry
    for one in built:
        if one.entry is not None and one.image is not None:
            manifest_write.write(folder / one.entry.file, one.image)
            dropped.discard(one.entry.file)
    manifest_write.write(folder / MANIFEST, Manifest(tables).to_json().encode())
    for file in dropped:
        (folder / file).unlink(missing_ok=True)


def _identity(entry: CubinEntry) -> object:
    """What all architectures of a name have in common."""
    function = _launchable({entry.arch: entry})
    said = function.triton if function and function.triton else {}
    return entry.source_sha256, said.get("configuration"), said.get("grid")
