"""Kernels written out as C: images as arrays, and one typed launch function a kernel.

Writes text only; the C files need the driver's header and library, and no Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...archs import tokens_of
from ...collection.manifest import Collection, find_collection
from ...errors import (
    CubinNotFoundError,
    FunctionNotFoundError,
    KernelHubError,
    ParamsError,
    listed,
    nearest,
)
from ...image.shipped import SUFFIXES, TritonCubin, open_file
from ...kernel import Kernel
from .. import carray
from ..triton import TritonCollection, TritonFunction
from ..triton import load as load_triton
from . import folder
from .dispatch import render_dispatcher
from .images import Build, of_collection, of_image, of_kernel, of_source
from .source import c_name, render_plain
from .text import checked_prefix
from .triton_source import render_triton

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _Options:
    archs: list[str] | None
    prefix: str
    dlpack: bool
    tvm_ffi: bool
    signatures: Mapping[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "dlpack": self.dlpack, "tvm_ffi": self.tvm_ffi}


def export(
    names: Any,
    to: str | Path,
    *,
    package: str | Path = "kernel_hub",
    archs: str | Sequence[str] | None = None,
    prefix: str = "",
    dlpack: bool = False,
    tvm_ffi: bool = False,
    signatures: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write `NAME.c` and `NAME.h` for each kernel image, and a CMakeLists.txt.

    names: one of these, or a list:
        - a cubin of `package`, as `kernel-hub list` shows it;
        - a Triton kernel of it by the kernel's own name: all its configurations, and NAME.c with
          the function that chooses among them;
        - a path: a .cubin, .fatbin or .ptx (with Triton's json beside it a Triton kernel), a C or
          C++ source with images as arrays, CUDA C++ (.cu, compiled by NVRTC), or the folder of a
          collection, of which all is written;
        - a dict, name -> such a path, the image as bytes, a Kernel (`Kernel.from_source` too) or a
          TritonFunction.
    to: folder, made where it does not exist. What was exported to it before is replaced where the
        names are the same, else it stays and is in the CMakeLists.txt too.
    package: whose cubins, or a folder with a manifest.json.
    archs: which builds to take ('sm80', 'sm_90'); None takes all. C++ source that was compiled for
        the GPU at hand is compiled for these, or for that GPU alone.
    prefix: put before the name of each file and function.
    dlpack: also a function FUNCTION_dlpack for each, which takes DLTensors and checks them.
    tvm_ffi: also a TVM-FFI function for each (and dlpack); compiling needs apache-tvm-ffi.
    signatures: C types for images that carry only sizes, {function: 'float* out, int n'} as for
        Kernel; a parameter of unknown type is passed by address.

    Returns: the files written. Raises CubinNotFoundError for a name or arch that is not shipped;
    FunctionNotFoundError for a function that C cannot name, or that two of the cubins have;
    CubinCorruptError for an image or a parameter that is not what the manifest says;
    ParamsError for an argument of another kind; KernelHubError when the folder cannot be written,
    or has files of these names that no export wrote. Nothing is written then.

    Each header declares `NAME_load`, `NAME_unload`, `NAME_get` and `CUresult FUNCTION(CUstream
    stream, kernel_hub_dim3 grid, kernel_hub_dim3 block, unsigned int shared_bytes, parameters
    ...)`. A TVM-FFI function is called as `FUNCTION(grid, block, shared_bytes, parameters ...)`.
    A Triton kernel's takes `(stream, programs, arguments ...)`, without `programs` where a grid was
    kept with it.
    """
    wanted = None if archs is None else tokens_of(archs, "archs")
    checked_prefix(prefix)
    if not isinstance(to, (str, Path)) or not str(to) or "\0" in str(to):
        raise ParamsError(f"to={to!r:.80}: the folder to write to")
    if signatures is not None and not isinstance(signatures, Mapping):
        raise ParamsError(
            f"signatures={signatures!r:.80}: a dict, function -> its parameters' types"
        )
    options = _Options(wanted, prefix, dlpack or tvm_ffi, tvm_ffi, signatures or {})
    texts: dict[str, str] = {}
    for made in _items(names, package, options):
        for file, text in made.items():
            if texts.setdefault(file, text) != text:
                raise FunctionNotFoundError(
                    f"two of the exported kernels would be {file}: name one of them otherwise"
                )
    return folder.write(Path(to), texts)


def render(
    collection: Collection,
    name: str,
    archs: Sequence[str] | None = None,
    *,
    prefix: str = "",
    dlpack: bool = False,
    tvm_ffi: bool = False,
) -> dict[str, str]:
    """The header and the source of one cubin, by file name."""
    builds = of_collection(collection, name, archs)
    triton = TritonCollection(collection)
    if name not in triton:
        return render_plain(name, builds, prefix=prefix, dlpack=dlpack, tvm_ffi=tvm_ffi)
    built = [(build, triton.function(name, arch=build.arch)) for build in builds]
    return render_triton(name, built, prefix=prefix, dlpack=dlpack, tvm_ffi=tvm_ffi)


def _items(names: Any, package: Any, options: _Options) -> Iterable[dict[str, str]]:
    """The files of each thing that `names` stands for."""
    if isinstance(names, Mapping):
        for name, source in names.items():
            if not isinstance(name, str) or not name:
                raise ParamsError(f"names has the key {name!r:.80}: a name for the files")
            yield from _of_source(source, name, options)
        return
    if isinstance(names, (Kernel, TritonFunction, bytes, bytearray, memoryview)):
        raise ParamsError(f"names is a {type(names).__name__}: give it a name, {{'name': …}}")
    if isinstance(names, os.PathLike) or (isinstance(names, str) and _is_path(names)):
        yield from _of_path(Path(names), None, options)
        return
    collection: Collection | None = None
    for name in dict.fromkeys(_listed("names", names, "rms_norm", (str, os.PathLike))):
        if isinstance(name, os.PathLike) or _is_path(name):
            yield from _of_path(Path(name), None, options)
            continue
        collection = collection or find_collection(package)
        yield from _of_name(collection, name, options)


def _is_path(name: str) -> bool:
    looks = name.endswith((*SUFFIXES, *_SOURCES)) or os.sep in name or name in (".", "..")
    return looks or os.path.isfile(Path(name, _MANIFEST))


_SOURCES = (".cu", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".inc")


def _listed(
    argument: str, value: object, example: str, kinds: type | tuple[type, ...] = str
) -> list[Any]:
    """What is given as a list of texts, or as one text with commas between."""
    found = value.split(",") if isinstance(value, str) else value
    items = list(found) if isinstance(found, Iterable) else []
    if not items or not all(isinstance(item, kinds) and str(item) for item in items):
        raise ParamsError(
            f"{argument}={value!r:.80}: a list of texts, or one text with commas between, such as "
            f"{example!r}"
        )
    return items


def _of_name(collection: Collection, name: str, options: _Options) -> Iterable[dict[str, str]]:
    """A cubin of a collection, or a Triton kernel in all its configurations."""
    if name in collection.manifest.cubins:
        yield render(collection, name, options.archs, **options.text)
        return
    triton = TritonCollection(collection)
    if name not in triton.kernels():
        known = sorted({*collection.manifest.cubins, *triton.kernels()})
        raise CubinNotFoundError(
            f"{collection.package} ships no cubin {name!r}; it has: " + listed(nearest(name, known))
        )
    yield from _configurations(collection, triton, name, options)


def _configurations(
    collection: Collection, triton: TritonCollection, kernel: str, options: _Options
) -> Iterable[dict[str, str]]:
    """The files of each configuration of `kernel`, and of the function that chooses."""
    builds: dict[str, list[Build]] = {}
    refusal: CubinNotFoundError | None = None
    for name in (n for n in triton if triton.described(n).function == kernel):
        try:
            builds[name] = of_collection(collection, name, options.archs)
        except CubinNotFoundError as error:  # not for these architectures
            refusal = error
    if not builds:
        assert refusal is not None
        raise refusal
    if kernel in builds:
        raise FunctionNotFoundError(
            f"a configuration of {kernel} is called {kernel} too, as the function would be that "
            "chooses: build it under another name"
        )
    with_grid = {name: triton.described(name).grid is not None for name in builds}
    if len(set(with_grid.values())) > 1:
        without = ", ".join(name for name, has in with_grid.items() if not has)
        raise ParamsError(f"{kernel}: built without a grid: {without}; build all with one, or none")
    family = triton.family(kernel, builds)
    yield render_dispatcher(
        triton, family, builds, has_grid=any(with_grid.values()), prefix=options.prefix
    )
    for name in builds:
        yield render(collection, name, options.archs, **options.text)


def _of_source(source: Any, name: str, options: _Options) -> Iterable[dict[str, str]]:
    if isinstance(source, TritonFunction):
        builds = of_image(name, source._loader._image, [source.name], options.archs)
        yield render_triton(name, [(build, source) for build in builds], **options.text)
    elif isinstance(source, (str, os.PathLike)):
        yield from _of_path(Path(source), name, options)
    elif isinstance(source, Kernel):
        yield render_plain(name, of_kernel(name, source, options.archs), **options.text)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield from _of_source(_declared(partial(Kernel, bytes(source)), options), name, options)
    else:
        raise ParamsError(
            f"names[{name!r}] is a {type(source).__name__}: a Kernel, a TritonFunction, an image "
            "as bytes, or a path"
        )


def _declared(make: Any, options: _Options) -> Kernel:
    """The Kernel that `make` makes, with the declared types of the functions that it has."""
    plain = make()
    given = {name: types for name, types in options.signatures.items() if name in plain}
    found: Kernel = make(signatures=given) if given else plain
    return found


def _of_path(path: Path, name: str | None, options: _Options) -> Iterable[dict[str, str]]:
    path = path.expanduser()
    if path.is_dir():
        if not (path / _MANIFEST).is_file():
            raise CubinNotFoundError(f"no collection in {str(path)!r}: there is no {_MANIFEST}")
        yield from _of_folder(find_collection(path), options)
    elif path.suffix in SUFFIXES:
        own = name or c_name(path.stem)
        if isinstance(open_file(path), TritonCubin):
            yield from _of_source(load_triton(path), own, options)
        else:
            yield from _of_source(_declared(partial(Kernel, path), options), own, options)
    elif path.suffix == ".cu":
        own = name or c_name(path.stem)
        yield render_plain(own, of_source(own, path, options.archs), **options.text)
    else:
        images = carray.load(path)
        for array, data in images.items():
            own = (
                name if name and len(images) == 1 else f"{name}_{array}" if name else c_name(array)
            )
            yield from _of_source(data, own, options)


def _of_folder(collection: Collection, options: _Options) -> Iterable[dict[str, str]]:
    """All that a collection has for the architectures, and what chooses among configurations."""
    triton = TritonCollection(collection)
    done: set[str] = set()
    for kernel in triton.kernels():
        try:
            made = list(_configurations(collection, triton, kernel, options))
        except (CubinNotFoundError, FunctionNotFoundError, ParamsError):
            continue  # not one function: each by itself
        done |= {name for name in triton if triton.described(name).function == kernel}
        yield from made
    refused: list[KernelHubError] = []
    written = len(done)
    for name in (name for name in collection.manifest.cubins if name not in done):
        try:
            yield render(collection, name, options.archs, **options.text)
            written += 1
        except CubinNotFoundError as error:
            refused.append(error)
    if not written:
        raise refused[0] if refused else CubinNotFoundError(f"{collection.package} is empty")
