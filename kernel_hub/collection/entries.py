"""What a manifest says of one cubin and of one function, and taking it out of its JSON.

Nothing is decoded or checked before it is asked for; every complaint names the file and the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import CubinCorruptError
from .manifest_text import EntryLines, decoded, loads, split

# This package, by whatever name it was imported: a hub repository's build has its own.
OWN_PACKAGE = __name__.rsplit(".", 2)[0]
_FILE = re.compile(r"[A-Za-z0-9_]+/[A-Za-z0-9_][A-Za-z0-9_.-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
_TARGET = re.compile(r"sm_?[0-9]{2,4}[af]?")

T = TypeVar("T")
Triple = tuple[int, int, int]


class ParamEntry(NamedTuple):
    """One kernel parameter; `type` is spelled as `ctypes_table.canonical` spells it."""

    name: str
    type: str
    size_bytes: int
    offset_bytes: int


class LaunchFacts(NamedTuple):
    """What the source of a kernel says of its launches, as its builder read it there.

    grid: which blocks there are, in words. block: the blockDim it was built for; None: any within
    its limits. shared_bytes: the fewest bytes of dynamic shared memory. sizes: all else by name, as
    `csrc/include/kernel_hub/launch_facts.cuh` lists it: block_m, stages, ...
    """

    grid: str
    block: Triple | None = None
    shared_bytes: int | None = None
    sizes: Mapping[str, int] = {}

    def describe(self) -> str:
        """The facts in words, without the grid's."""
        said = []
        if self.block is not None:
            said.append(f"blockDim {self.block}")
        if self.shared_bytes:
            said.append(f"sharedMemBytes from {self.shared_bytes}")
        return ", ".join(said + [f"{name} {value}" for name, value in self.sizes.items()])


class FunctionEntry(NamedTuple):
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
    triton: Mapping[str, Any] | None = None
    launch: LaunchFacts | None = None  # None: the source does not state any


class CubinEntry(NamedTuple):
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
    functions: Mapping[str, FunctionEntry]


class Lazy(Mapping[str, T]):
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
        return key in self._made or key in self._raw

    def __repr__(self) -> str:
        return f"<{len(self)}: {', '.join(self)}>"


class JsonObject:
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


_PARAM = ("name", "type", "size_bytes", "offset_bytes")
_COLUMN_TYPES: list[set[type]] = [{str}, {str}, {int}, {int}]
# `ParamEntry(*row)`, without a line of Python.
_new_entry: Any = partial(tuple.__new__, ParamEntry)
# What a function's entry leaves out from format 2 on, being so of most.
UNSAID = {
    "static_shared_bytes": 0, "local_bytes": 0, "max_threads": None, "required_block": None,
    "cluster": None, "max_cluster_rank": None, "cooperative": False,
}  # fmt: skip


class Shared:
    """The lists that functions of a manifest refer to by number: `params` and `launches`."""

    def __init__(self, params: Sequence[object], launches: Sequence[object], where: str) -> None:
        self._params = _Numbered("params", params, _params, where)
        self._launches = _Numbered("launches", launches, _launch, where)

    def params(self, read: JsonObject) -> tuple[ParamEntry, ...]:
        """Those of the function that `read` reads."""
        return self._params.of(read, "params")

    def launch(self, read: JsonObject) -> LaunchFacts | None:
        """The same, where it states any."""
        return self._launches.of(read, "launch") if "launch" in read.raw else None


class _Numbered(Generic[T]):
    """A list whose entries are made when one is first asked for."""

    def __init__(
        self, name: str, raw: Sequence[object], make: Callable[[object, str], T], where: str
    ) -> None:
        self._name, self._raw, self._make, self._where = name, raw, make, where
        self._made: dict[int, T] = {}

    def of(self, read: JsonObject, key: str) -> T:
        number = read.number(key)
        if number not in self._made:
            try:
                raw = self._raw[number]
            except IndexError:
                last = f"a number below {len(self._raw)}, of the list {self._name}"
                raise read.bad(key, last) from None
            where = f"{self._where}: {self._name}[{number}]"
            self._made[number] = self._make(decoded(raw, where), where)
        return self._made[number]


def _params(raw: object, where: str) -> tuple[ParamEntry, ...]:
    rows = JsonObject({"params": raw}, where).array("params")
    if _are_rows(rows):  # without a line of Python for each
        return tuple(map(_new_entry, rows))
    return tuple([_param(row, where, i) for i, row in enumerate(rows)])


def _are_rows(rows: list[Any]) -> bool:
    """Whether all are as `to_json` writes a parameter, looked at column by column."""
    if {*map(type, rows)} != {list} or {*map(len, rows)} != {len(_PARAM)}:
        return False
    columns = [*zip(*rows, strict=True)]
    types = [{*map(type, column)} for column in columns]
    return types == _COLUMN_TYPES and min(columns[2]) >= 0 <= min(columns[3])


def _param(raw: object, where: str, number: int) -> ParamEntry:
    if type(raw) is list:
        raw = dict(zip(_PARAM, raw, strict=False))
    read = JsonObject(raw, f"{where}[{number}]")
    return ParamEntry(
        read.text("name"), read.text("type"), read.number("size_bytes"), read.number("offset_bytes")
    )


def _launch(raw: object, where: str) -> LaunchFacts:
    read = JsonObject(raw, where)
    named = [key for key in read.raw if key not in ("grid", "block", "shared_bytes")]
    return LaunchFacts(
        grid=read.text("grid"),
        block=read.triple("block") if "block" in read.raw else None,
        shared_bytes=read.number("shared_bytes") if "shared_bytes" in read.raw else None,
        sizes={key: read.number(key) for key in named},
    )


def _function(name: str, raw: object, where: str, shared: Shared | None) -> FunctionEntry:
    where = f"{where}.functions.{name}"
    read = JsonObject(decoded(raw, where), where)
    if shared is None:  # format 1: each function has its own list, and says all
        params = _params(read.array("params"), f"{where}.params")
    else:
        read.raw = {**UNSAID, **read.raw}
        params = shared.params(read)
    return FunctionEntry(
        name=name,
        params=params,
        num_regs=read.number("num_regs"),
        static_shared_bytes=read.number("static_shared_bytes"),
        local_bytes=read.number("local_bytes"),
        max_threads=read.optional_number("max_threads"),
        required_block=read.triple("required_block"),
        cluster=read.triple("cluster"),
        max_cluster_rank=read.optional_number("max_cluster_rank"),
        cooperative=read.flag("cooperative"),
        triton=read.table("triton") if "triton" in read.raw else None,
        launch=shared.launch(read) if shared else None,
    )


def _cubin(name: str, arch: str, raw: object, where: str, shared: Shared | None) -> CubinEntry:
    where = f"{where}.{arch}"
    rest = b""
    if isinstance(raw, bytes) and raw.endswith(b"}}"):
        head, _, rest = raw[:-2].partition(b'"functions": {\n')
        if rest:
            raw = loads(head + b'"functions": {}}', where)
    read = JsonObject(decoded(raw, where), where)
    functions: Mapping[str, Any] = read.table("functions")
    if rest:
        functions = EntryLines(rest, slice(0, len(rest)), b"  ", f"{where}.functions")
    flags = read.array("flags")
    if not all(isinstance(flag, str) for flag in flags):
        raise read.bad("flags", "a list of text")
    return CubinEntry(
        name=name,
        arch=arch,
        file=read.text("file", _FILE),
        sha256=read.text("sha256", SHA256),
        size_bytes=read.number("size_bytes"),
        source=read.text("source"),
        source_sha256=read.text("source_sha256", SHA256),
        toolkit=read.text("toolkit"),
        target=read.text("target", _TARGET),
        flags=tuple(flags),
        os_abi=read.number("os_abi"),
        abi_version=read.number("abi_version"),
        minimum_driver=read.number("minimum_driver"),
        functions=Lazy(functions, lambda key, value: _function(key, value, where, shared)),
    )


def archs_of(name: str, raw: object, where: str, shared: Shared | None) -> dict[str, CubinEntry]:
    """{arch: entry} of one cubin. shared: None in format 1."""
    where = f"{where}: cubins.{name}"
    table: dict[str, Any] = {}
    if isinstance(raw, bytes) and raw.startswith(b"{\n") and raw.endswith(b"}"):
        parts = split(raw, 2, len(raw) - 1, b" ") or {}
        table = {arch: raw[part] for arch, part in parts.items()}
    table = table or JsonObject(decoded(raw, where), where).raw
    return {arch: _cubin(name, arch, value, where, shared) for arch, value in table.items()}
