"""What an export is made of: images for one target each, of a collection or of any Kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...collection.manifest import Collection, FunctionEntry, ParamEntry
from ...collection.manifest_write import function_entry
from ...collection.resolve import names_target, parse_target
from ...cubin import read_cubin, read_ptx
from ...errors import CubinNotFoundError, FunctionNotFoundError, listed, nearest
from ...image.shipped import Image
from ...kernel import Kernel, device_number
from ...signature.params import Param

# Every GPU there is: what an image has for each is what is exported of it.
_CAPABILITIES = (
    *((7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)),
)


@dataclass(frozen=True)
class Build:
    """One image of an export. functions: by the name that C offers, `symbol` being the image's."""

    arch: str
    target: str
    label: str
    functions: Mapping[str, FunctionEntry]
    read: Callable[[], bytes] = field(repr=False)
    is_ptx: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict, repr=False)

    def symbol(self, function: str) -> str:
        """The name of an offered function in the image."""
        return self.symbols.get(function, function)


def of_collection(
    collection: Collection, name: str, archs: Sequence[str] | None = None
) -> list[Build]:
    """The builds of a collection's cubin, the one to prefer first."""
    cubins = collection.manifest.cubins
    if name not in cubins:
        shipped = listed(nearest(name, cubins))
        raise CubinNotFoundError(f"{collection.package} ships no cubin {name!r}; it has: {shipped}")
    return _sorted(
        name,
        (
            Build(e.arch, e.target, e.file, e.functions, partial(collection.read, e))
            for e in cubins[name].values()
        ),
        archs,
    )


def of_kernel(name: str, kernel: Kernel, archs: Sequence[str] | None = None) -> list[Build]:
    """The builds of the image of any Kernel; see `of_image`."""
    return of_image(name, kernel._image, kernel.function_names, archs)


def of_image(
    name: str, image: Image, offered: Sequence[str], archs: Sequence[str] | None = None
) -> list[Build]:
    """The builds of an image, with the functions `offered`: what a Kernel would load on each GPU.

    C++ source without an architecture of its own is compiled for each of `archs`, or for the GPU at
    hand.
    """
    source: Any = image
    while hasattr(source, "_image"):  # under declared types and other names
        source = source._image
    compiles = getattr(source, "compiles_for_any", False)
    found: dict[tuple[str, bool], Build] = {}
    reasons: dict[str, str] = {}
    for capability in _wanted(archs, name) if compiles else _CAPABILITIES:
        try:
            chosen = image.choose(capability)
        except CubinNotFoundError as error:
            reasons |= error.rejected
            continue
        data, is_ptx = chosen.read(), bool(chosen.jit_target)
        if chosen.kind == "fatbin":
            raise CubinNotFoundError(
                f"{chosen.label}: what is compressed with zstd is not unpacked here: build it with "
                "-no-compress, or install kernel_hub[fatbin]"
            )
        target = read_ptx(data).target if is_ptx else read_cubin(data).target
        if (target, is_ptx) not in found:
            found[target, is_ptx] = _build(offered, chosen, data, target, is_ptx)
    if not found:
        shown = "".join(f"\n  {target}: {why}" for target, why in reasons.items())
        raise CubinNotFoundError(f"{name} has nothing for any GPU{shown}")
    return _sorted(name, found.values(), None if compiles else archs)


def of_source(name: str, path: Path, archs: Sequence[str] | None = None) -> list[Build]:
    """The builds of a file of CUDA C++, compiled now: for each of `archs`, else the GPU at hand."""
    found: list[Build] = []
    wanted: Sequence[str | None] = archs or (None,)
    for arch in wanted:
        found += of_kernel(name, Kernel.from_source(path, arch=arch))
    return _sorted(name, {build.target: build for build in found}.values(), None)


def _wanted(archs: Sequence[str] | None, name: str) -> list[tuple[int, int]]:
    from ... import driver

    if archs is None:
        return [driver.get().compute_capability(device_number(None, name))]
    return [parse_target(arch)[:2] for arch in archs]


def _build(names: Sequence[str], chosen: Any, data: bytes, target: str, is_ptx: bool) -> Build:
    read = {} if is_ptx else read_cubin(data).functions
    entries, symbols = {}, {}
    for offered in names:
        spec = chosen.functions.get(offered)
        if spec is None:
            continue
        symbol = spec.symbol or spec.name
        params = tuple(map(_param, spec.params or ()))
        entries[offered] = (
            function_entry(read[symbol], params)
            if symbol in read
            else FunctionEntry(
                symbol, params, 0, 0, 0, spec.max_threads, spec.required_block, spec.cluster, None,
                False,
            )
        )  # fmt: skip
        symbols[offered] = symbol
    label = f"{chosen.label} for {target}"
    return Build(target.replace("_", ""), target, label, entries, lambda: data, is_ptx, symbols)


def _param(param: Param) -> ParamEntry:
    kind = param.type or "struct unknown"
    return ParamEntry(param.name, kind, param.size_bytes, param.offset_bytes)


def _sorted(name: str, builds: Iterable[Build], archs: Sequence[str] | None) -> list[Build]:
    """Those for `archs`, machine code before PTX, the nearest to the newest GPU first."""
    built = list(builds)
    if missing := [a for a in archs or () if not any(names_target(a, b.target) for b in built)]:
        targets = ", ".join(build.arch for build in built)
        raise CubinNotFoundError(
            f"{name} is not built for {', '.join(missing)}; it is for {targets}"
        )
    chosen = [b for b in built if archs is None or any(names_target(a, b.target) for a in archs)]
    if not any(build.functions for build in chosen):
        raise FunctionNotFoundError(f"{name} has no function to export")
    return sorted(chosen, key=lambda b: (not b.is_ptx, parse_target(b.target)), reverse=True)
