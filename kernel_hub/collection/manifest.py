"""`cubins/manifest.json` as dataclasses, and finding a package's `cubins/` folder.

Knows JSON and files; must not know the driver, ELF, or how a cubin is chosen.

A first launch touches one function of a manifest of perhaps megabytes, so nothing is decoded or
checked before it is asked for: `to_json` starts each cubin, arch and function on a line of its own
(indented by 0, 1 and 2 spaces), and `from_json` splits there, a level at a time as it is touched.
JSON laid out otherwise is decoded whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CubinCorruptError, CubinNotFoundError, ParamsError
from .manifest_text import decoded, loads, split
from .packages import locations_of

if TYPE_CHECKING:  # importlib.resources costs milliseconds, needed for zip imports alone
    from importlib.resources.abc import Traversable

FORMAT = 1
_HEAD = f'{{"format": {FORMAT}, "cubins": {{\n'
_TAIL = "\n}}\n"
_FILE = re.compile(r"[A-Za-z0-9_]+/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TARGET = re.compile(r"sm_?[0-9]{2,4}[af]?")

T = TypeVar("T")
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class ParamEntry:
    """One kernel parameter; `type` is spelled as `ctypes_table.canonical` spells it."""

    name: str
    type: str
    size_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class FunctionEntry:
    """One exported function: its parameters and what it takes of the GPU."""

    name: str
    params: tuple[ParamEntry, ...]
    num_regs: int
    static_shared_bytes: int
    local_bytes: int
    max_threads: int | None
    required_block: Triple | None
    cluster: Triple | None
    max_cluster_rank: int | None
    cooperative: bool
    # How a Triton kernel is launched; only formats.triton writes, checks and reads what is inside.
    triton: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)


@dataclass(frozen=True)
class CubinEntry:
    """One cubin: a source built for one architecture. `file` is relative to the manifest."""

    name: str
    arch: str
    file: str
    sha256: str
    size_bytes: int
    source: str
    source_sha256: str
    toolkit: str
    target: str
    flags: tuple[str, ...]
    os_abi: int
    abi_version: int
    minimum_driver: int
    functions: Mapping[str, FunctionEntry] = field(hash=False, repr=False)


class _Lazy(Mapping[str, T]):
    """A mapping whose values are made from `raw` at first touch."""

    def __init__(self, raw: Mapping[str, Any], make: Callable[[str, Any], T]) -> None:
        self._raw = raw
        self._make = make
        self._made: dict[str, T] = {}

    def __getitem__(self, key: str) -> T:
        try:
            return self._made[key]
        except KeyError:
            return self._made.setdefault(key, self._make(key, self._raw[key]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, key: object) -> bool:  # Mapping's own would make the value
        return key in self._raw

    def __repr__(self) -> str:
        return f"<{len(self)}: {', '.join(self)}>"


class _Reader:
    """A JSON object being taken apart; every complaint names the file and the field."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, dict):
            raise CubinCorruptError(f"{where} must be an object, found {raw!r}")
        self.raw = raw
        self.where = where

    def bad(self, key: str, expected: str) -> CubinCorruptError:
        found = f"found {self.raw[key]!r}" if key in self.raw else "it is missing"
        return CubinCorruptError(f"{self.where}.{key} must be {expected}, {found}")

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self.raw.get(key)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            raise self.bad(key, f"text like {pattern.pattern}" if pattern else "text")
        return value

    def number(self, key: str) -> int:
        value = self.raw.get(key)
        if type(value) is not int or value < 0:
            raise self.bad(key, "a whole number >= 0")
        return value

    def optional_number(self, key: str) -> int | None:
        return None if self.raw.get(key, 0) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def triple(self, key: str) -> Triple | None:
        value = self.raw.get(key, ())
        if value is None:
            return None
        if not isinstance(value, list) or [type(v) for v in value] != [int] * 3 or min(value) < 1:
            raise self.bad(key, "null or three whole numbers >= 1")
        return (value[0], value[1], value[2])

    def array(self, key: str) -> list[Any]:
        value = self.raw.get(key)
        if not isinstance(value, list):
            raise self.bad(key, "a list")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.raw.get(key)
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return value


def _param(raw: object, where: str) -> ParamEntry:
    read = _Reader(raw, where)
    return ParamEntry(
        read.text("name"), read.text("type"), read.number("size_bytes"), read.number("offset_bytes")
    )


def _function(name: str, raw: object, where: str) -> FunctionEntry:
    where = f"{where}.functions.{name}"
    read = _Reader(decoded(raw, where), where)
    return FunctionEntry(
        name=name,
        params=tuple(
            _param(param, f"{where}.params[{i}]") for i, param in enumerate(read.array("params"))
        ),
        num_regs=read.number("num_regs"),
        static_shared_bytes=read.number("static_shared_bytes"),
        local_bytes=read.number("local_bytes"),
        max_threads=read.optional_number("max_threads"),
        required_block=read.triple("required_block"),
        cluster=read.triple("cluster"),
        max_cluster_rank=read.optional_number("max_cluster_rank"),
        cooperative=read.flag("cooperative"),
        triton=read.table("triton") if "triton" in read.raw else None,
    )


def _cubin(name: str, arch: str, raw: object, where: str) -> CubinEntry:
    where = f"{where}.{arch}"
    functions = None
    if isinstance(raw, bytes) and raw.endswith(b"}}"):
        head, _, rest = raw[:-2].partition(b'"functions": {\n')
        if parts := split(rest, 0, len(rest), b"  "):
            functions = {function: rest[part] for function, part in parts.items()}
            raw = loads(head + b'"functions": {}}', where)
    read = _Reader(decoded(raw, where), where)
    if functions is None:
        functions = read.table("functions")
    flags = read.array("flags")
    if not all(isinstance(flag, str) for flag in flags):
        raise read.bad("flags", "a list of text")
    return CubinEntry(
        name=name,
        arch=arch,
        file=read.text("file", _FILE),
        sha256=read.text("sha256", _SHA256),
        size_bytes=read.number("size_bytes"),
        source=read.text("source"),
        source_sha256=read.text("source_sha256", _SHA256),
        toolkit=read.text("toolkit"),
        target=read.text("target", _TARGET),
        flags=tuple(flags),
        os_abi=read.number("os_abi"),
        abi_version=read.number("abi_version"),
        minimum_driver=read.number("minimum_driver"),
        functions=_Lazy(functions, lambda key, value: _function(key, value, where)),
    )


def _archs(name: str, raw: object, where: str) -> dict[str, CubinEntry]:
    where = f"{where}: cubins.{name}"
    table: dict[str, Any] = {}
    if isinstance(raw, bytes) and raw.startswith(b"{\n") and raw.endswith(b"}"):
        parts = split(raw, 2, len(raw) - 1, b" ") or {}
        table = {arch: raw[part] for arch, part in parts.items()}
    table = table or _Reader(decoded(raw, where), where).raw
    return {arch: _cubin(name, arch, value, where) for arch, value in table.items()}


@dataclass(frozen=True)
class Manifest:
    """What a `cubins/` folder holds: name -> arch -> CubinEntry."""

    cubins: Mapping[str, dict[str, CubinEntry]] = field(hash=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Manifest:
        """Reads a manifest; a bad field raises CubinCorruptError when it is first touched.

        text: megabytes, of which only what is asked for is decoded. where: the file's name, for
        messages.
        """
        data = text.encode() if isinstance(text, str) else text
        table: Mapping[str, Any] | None = None
        head, tail = _HEAD.encode(), _TAIL.encode()
        if data.startswith(head) and data.endswith(tail):
            table = split(data, len(head), len(data) - len(tail), b"")
        if table is None:
            read = _Reader(loads(data, where), where)
            if read.number("format") != FORMAT:
                raise read.bad("format", f"{FORMAT} (a newer kernel_hub may read it)")
            table = read.table("cubins")

        def archs(name: str, value: Any) -> dict[str, CubinEntry]:
            return _archs(name, data[value] if isinstance(value, slice) else value, where)

        return cls(_Lazy(table, archs))

    def to_json(self) -> str:
        """The same bytes for the same content: sorted, one cubin, arch or function a line."""
        blocks = (_cubin_lines(name, archs) for name, archs in sorted(self.cubins.items()))
        return _HEAD + ",\n".join(blocks) + _TAIL


def _fields(entry: Any, *skipped: str) -> dict[str, Any]:
    return {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in skipped}


def _cubin_lines(name: str, archs: dict[str, CubinEntry]) -> str:
    lines = []
    for arch, cubin in sorted(archs.items()):
        functions = []
        for function in sorted(cubin.functions.values(), key=lambda f: f.name):
            row = _fields(function, "name", "params", *(() if function.triton else ("triton",)))
            row["params"] = [_fields(param) for param in function.params]
            functions.append(f"  {json.dumps(function.name)}: {json.dumps(row)}")
        head = json.dumps(_fields(cubin, "name", "arch", "functions"))[:-1]
        table = ",\n".join(functions)
        lines.append(f' {json.dumps(arch)}: {head}, "functions": {{\n{table}}}}}')
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "}"


@dataclass(frozen=True)
class Collection:
    """A package's cubins: `root` is the folder that holds `manifest.json`."""

    package: str
    root: Traversable | Path
    manifest: Manifest

    def read(self, entry: CubinEntry) -> bytes:
        """The image of `entry`, with the digest the manifest gives for it."""
        where = f"{self.root}{os.sep}{entry.file}"
        try:
            image = self.root.joinpath(*entry.file.split("/")).read_bytes()
        except OSError as error:
            raise CubinNotFoundError(
                f"{where} is in the manifest but cannot be read ({error}); "
                "reinstall the package, or build it again"
            ) from error
        found = hashlib.sha256(image).hexdigest()
        if found != entry.sha256:
            raise CubinCorruptError(
                f"{where} is not the file the manifest describes: sha256 expected {entry.sha256}, "
                f"found {found}; reinstall the package, or build it again"
            )
        return image


_collections: dict[str, Collection] = {}
_lock = threading.Lock()


def open_collection(package: str = "kernel_hub") -> Collection:
    """The cubins that `package` ships; read once a process, and the package's code is not run.

    Looks for `cubins/manifest.json` inside the package (wheel, zip), then beside it (checkout,
    editable install). Raises CubinNotFoundError with the places it looked in.
    """
    if not isinstance(package, str):
        raise ParamsError(f"package={package!r:.80}: a package's name, such as 'kernel_hub'")
    collection = _collections.get(package)
    if collection is None:
        with _lock:
            collection = _collections.get(package)
            if collection is None:
                collection = _collections[package] = _open(package)
    return collection


def find_collection(where: str | Path) -> Collection:
    """The cubins in the folder `where`, if it has a manifest.json; else of the package `where`."""
    is_place = isinstance(where, (str, Path)) and where not in ("", "kernel_hub")
    if is_place and os.path.isfile(Path(where, "manifest.json")):
        return _read(str(where), Path(where))
    return open_collection(str(where) if isinstance(where, Path) else where)


def _open(package: str) -> Collection:
    locations = locations_of(package)
    places: list[Traversable | Path] = []
    for location in filter(Path.is_dir, map(Path, locations)):
        places += [location / "cubins", location.parent / "cubins"]
    if locations and not places:
        from importlib import resources

        places = [resources.files(package).joinpath("cubins")]
    for root in places:
        if root.joinpath("manifest.json").is_file():
            return _read(package, root)
    looked = ", ".join(f"{root}{os.sep}manifest.json" for root in places)
    raise CubinNotFoundError(
        f"package {package!r} ships no cubins: looked for {looked or 'a package folder: none'}; "
        "in a checkout, ./build_cubins.sh builds them"
    )


def _read(package: str, root: Traversable | Path) -> Collection:
    return Collection(package, root, read_manifest(root.joinpath("manifest.json")))


def read_manifest(file: Traversable | Path) -> Manifest:
    """The manifest in `file`. Raises CubinCorruptError."""
    try:
        text = file.read_bytes()
        if not text.isascii():
            text.decode()  # refuse now what is no text
    except (OSError, UnicodeDecodeError) as error:
        raise CubinCorruptError(f"{file} cannot be read: {error}") from error
    return Manifest.from_json(text, where=str(file))
