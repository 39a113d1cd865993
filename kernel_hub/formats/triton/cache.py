"""`load`: a compiled Triton kernel from Triton's cache, or from a cubin and the json beside it.

Only reads files, each up to a stated size; the hash names of the cache are Triton's.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    ParamsError,
    listed,
)
from ...files import read_file
from ...image.shipped import open_file
from ...kernel import Kernel
from .function import TritonFunction, check_fit, declared_of
from .metadata import Metadata
from .signature import Argument, c_types, read_ptx_arguments, with_signature
from .ttir import read_ttir

_MAX_JSON_BYTES = 1 << 24
_MAX_TEXT_BYTES = 1 << 28
_MAX_SHOWN = 12
_GROUP = "__grp__"  # Triton's own notes of which files belong together


def load(
    path: str | Path,
    name: str | None = None,
    *,
    signature: str | Mapping[str, str] | None = None,
) -> TritonFunction:
    """A kernel that Triton 2.1 or later has compiled, to be launched without Triton.

    path: a folder of Triton's cache; a `.cubin`, or the `.json` beside it; the name of a folder in
        the cache ($TRITON_CACHE_DIR, else ~/.triton/cache), the kernel's hash in its json, or the
        kernel's name where the cache holds one of that name.
    name: which kernel, where the folder holds several.
    signature: the declared arguments as for `triton.compile` (':16' is checked at launches, and so
        is what the files say); where it is not given they are read from the `.ttir` or `.ttgir`
        beside the cubin, else from the `.ptx`;
        where none is there only sizes and tensor descriptors are known, and numbers are passed with
        their width (`ctypes.c_int(3)`). Triton before 3.5 writes no argument names: they are arg0,
        arg1, …

    Returns: a TritonFunction, called with the declared run-time arguments. Nothing is loaded on a
    GPU yet. Raises: CubinNotFoundError (also for what is whole but not launched here, such as a
    kernel of Triton 2.0), CubinCorruptError, FunctionNotFoundError and ParamsError, naming file and
    field.

        add = triton.load("~/.triton/cache/GTSCC6DQ…")
        add[(4,)](x, y, out, 1000)
    """
    cubin = _locate(path, name)
    metadata = Metadata.from_json(
        read_file(cubin.with_suffix(".json"), _MAX_JSON_BYTES), str(cubin.with_suffix(".json"))
    )
    image = open_file(cubin)
    names = image.names()
    if names is not None and metadata.name not in names:
        wrong = FunctionNotFoundError.among(metadata.name, names, str(cubin))
        raise FunctionNotFoundError(f"{metadata.label}: name: {wrong}")
    arguments = _arguments(cubin, metadata)
    if signature is not None:
        arguments = with_signature(arguments, signature, metadata)
    spec = image.spec(metadata.name)
    if arguments is None and metadata.maps:
        arguments = declared_of(spec, metadata)
    signatures = None
    if arguments is not None and names is not None:
        # Before their types are declared: what does not fit is explained with the json's fields.
        check_fit(spec, metadata, arguments)
        types = {kind_name: kind for kind, kind_name in c_types(arguments, metadata)}
        signatures = {metadata.name: types}
    # Not by `Kernel(cubin)`, which would hint to come here instead.
    kernel = Kernel.__new__(Kernel)
    offered = None if names is None else [metadata.name]  # None is refused: all is compressed
    kernel._offer(image, offered, signatures, False)
    return TritonFunction.wrap(kernel[metadata.name], metadata, arguments)


def cache_folder() -> Path:
    """Where Triton keeps what it compiles."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _arguments(cubin: Path, metadata: Metadata) -> tuple[Argument, ...] | None:
    """What is written beside the cubin; None where nothing is, and only sizes are known."""
    for suffix in (".ttir", ".ttgir"):  # Gluon has only the second
        if (ir := cubin.with_suffix(suffix)).is_file():
            return read_ttir(_text(ir), metadata.name, str(ir))
    ptx = cubin.with_suffix(".ptx")
    if ptx.is_file():
        return read_ptx_arguments(_text(ptx), metadata.name, metadata, str(ptx))
    return None


def _locate(path: Any, name: Any) -> Path:
    """The cubin that `path` and `name` stand for, its json beside it."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise ParamsError(f"path={path!r}: a path or a hash, not {type(path).__name__}")
    if name is not None and (not isinstance(name, str) or not _is_plain(name)):
        raise ParamsError(f"name={name!r}: a kernel's name, without a path")
    try:
        found = Path(path).expanduser()
        if found.suffix in (".cubin", ".json") and not found.is_dir():
            return _pair(found, name)
        if found.is_dir():
            return _in_folder(found, name)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, (ParamsError, CubinNotFoundError)):
            raise
        raise CubinNotFoundError(f"cannot look at {str(path)!r}: {error}") from error
    if isinstance(path, Path) or not _is_plain(path):
        raise CubinNotFoundError(
            f"no file or folder {str(path)!r} (looked at {found.absolute()}); give a folder of "
            "Triton's cache, a .cubin or the .json beside it"
        )
    return _in_cache(path, name)


def _is_plain(name: str) -> bool:
    return name == Path(name).name and name not in ("", ".", "..") and "\0" not in name


def _pair(path: Path, name: str | None) -> Path:
    for suffix in (".cubin", ".json"):
        if not path.with_suffix(suffix).is_file():
            raise CubinNotFoundError(
                f"no file {str(path.with_suffix(suffix))!r}: Triton's cubin and json lie side by "
                "side, and a launch needs both"
            )
    if name not in (None, path.stem) and name != _function_name(path):
        raise CubinNotFoundError(f"{path} holds {path.stem}, not name={name!r}")
    return path.with_suffix(".cubin")


def _in_folder(folder: Path, name: str | None) -> Path:
    stems = sorted(item.stem for item in folder.glob("*.json") if not item.name.startswith(_GROUP))
    if name is not None:
        fitting = [stem for stem in stems if stem == name]
        fitting = fitting or [s for s in stems if _function_name(folder / f"{s}.json") == name]
    else:
        fitting = stems
    if len(fitting) == 1:
        return _pair(folder / f"{fitting[0]}.json", None)
    shown = listed(stems, _MAX_SHOWN)
    if not stems:
        raise CubinNotFoundError(
            f"{folder} holds no .json: it is no folder of a kernel in Triton's cache"
        )
    if not fitting:
        raise CubinNotFoundError(f"{folder} holds no kernel name={name!r}; it holds: {shown}")
    raise CubinNotFoundError(f"{folder} holds several kernels: give name=, one of {shown}")


def _in_cache(key: str, name: str | None) -> Path:
    """By the folder's name, by the hash in the json (which the folder's name encodes), by name."""
    root = cache_folder()
    for folder in _folder_names(key):
        if (root / folder).is_dir():
            return _in_folder(root / folder, name)
    found = [path.parent for path in root.glob(f"*/{_escaped(key)}.json")] if root.is_dir() else []
    if len(found) == 1:
        return _in_folder(found[0], name or key)
    if found:
        shown = listed(sorted(folder.name for folder in found), _MAX_SHOWN)
        raise CubinNotFoundError(
            f"Triton's cache {root} holds {len(found)} kernels {key!r}: give the folder's name, "
            f"one of {shown}"
        )
    raise CubinNotFoundError(
        f"{key!r} is no file or folder here (looked at {Path(key).absolute()}) and no hash or "
        f"kernel in Triton's cache {root}"
    )


def _folder_names(key: str) -> Iterator[str]:
    yield key
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        return
    yield base64.b32encode(digest).decode().rstrip("=")  # Triton 3.3 on
    yield base64.urlsafe_b64encode(digest).decode().rstrip("=")  # 3.2


def _escaped(name: str) -> str:
    """`name` for a glob, taken literally."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _function_name(path: Path) -> str | None:
    """The function that a json names, where it can be read at all."""
    try:
        path = path.with_suffix(".json")
        return Metadata.from_json(read_file(path, _MAX_JSON_BYTES), str(path)).name
    except (CubinCorruptError, CubinNotFoundError):
        return None


def _text(path: Path) -> str:
    return read_file(path, _MAX_TEXT_BYTES).decode("utf-8", errors="replace")
