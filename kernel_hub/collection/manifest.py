"""`cubins/manifest.json` as records, and finding a package's `cubins/` folder.

Knows JSON and files; must not know the driver, ELF, or how a cubin is chosen.

Format 2: `files` are other files of machine code, each with its digest; `params` the different
lists of parameters, rows of (name, type, size_bytes, offset_bytes); `launches` the different facts
that kernels state of their launches; `cubins` by name and arch, whose functions name an entry of
each list by its number and leave out what is so of most (`entries.UNSAID`). Format 1 has the
cubins alone, and every function says all itself.

A first launch touches one function of thousands, so nothing is decoded or checked before it is
asked for: `to_json` starts each entry of a list, cubin, arch and function on a line of its own (the
last three indented by 0, 1 and 2 spaces), and `from_json` splits there, a level at a time as it is
touched. JSON laid out otherwise is decoded whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CubinCorruptError, CubinNotFoundError, ParamsError
from .entries import (
    OWN_PACKAGE,
    SHA256,
    UNSAID,
    CubinEntry,
    FunctionEntry,
    JsonObject,
    LaunchFacts,
    Lazy,
    ParamEntry,
    Shared,
    archs_of,
)
from .manifest_text import EntryLines, Lines, loads
from .packages import locations_of

if TYPE_CHECKING:  # importlib.resources costs milliseconds, needed for zip imports alone
    from importlib.resources.abc import Traversable

__all__ = [
    "FORMAT",
    "Collection",
    "CubinEntry",
    "FunctionEntry",
    "LaunchFacts",
    "Manifest",
    "ParamEntry",
    "find_collection",
    "open_collection",
    "read_manifest",
]

FORMAT = 2
_HEAD, _PARAMS = f'{{"format": {FORMAT}, "files": ', ', "params": [\n'
_LAUNCHES, _CUBINS, _TAIL = '\n], "launches": [\n', '\n], "cubins": {\n', "\n}}\n"
_HEAD_1 = '{"format": 1, "cubins": {\n'


class Manifest(NamedTuple):
    """What a `cubins/` folder holds: name -> arch -> CubinEntry.

    files: sha256 of the package's other files of machine code, by their path in the package.
    """

    cubins: Mapping[str, dict[str, CubinEntry]]
    files: Mapping[str, str] = {}

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Manifest:
        """Reads a manifest; a bad field raises CubinCorruptError when it is first touched.

        text: of which only what is asked for is decoded. where: the file's name, for messages.
        """
        data = text.encode() if isinstance(text, str) else text
        table: Mapping[str, Any] | None
        found = _own_layout(data, where)
        if found is not None:
            files, shared, table = found
        else:
            read = JsonObject(loads(data, where), where)
            if read.number("format") not in (1, FORMAT):
                raise read.bad("format", f"1 or {FORMAT} (a newer kernel_hub may read it)")
            files, shared, table = {}, None, read.table("cubins")
            if read.number("format") == FORMAT:
                files = read.table("files")
                shared = Shared(read.array("params"), read.array("launches"), where)
        checked = JsonObject(files, f"{where}.files")

        def archs(name: str, value: Any) -> dict[str, CubinEntry]:
            return archs_of(name, value, where, shared)

        return cls(Lazy(table, archs), {name: checked.text(name, SHA256) for name in files})

    def to_json(self) -> str:
        """The same bytes for the same content: sorted, one entry of a list, cubin, arch or function
        a line."""
        params, launches = _Numbers(), _Numbers()
        # Numbers go by content, not by who asks first, so that one function more moves few lines.
        for archs in self.cubins.values():
            for function in (f for entry in archs.values() for f in entry.functions.values()):
                params.add(_param_rows(function))
                if function.launch is not None:
                    launches.add(_launch_row(function.launch))
        blocks = [
            _cubin_lines(name, archs, params, launches)
            for name, archs in sorted(self.cubins.items())
        ]
        head = _HEAD + json.dumps(dict(sorted(self.files.items()))) + _PARAMS + params.lines()
        return head + _LAUNCHES + launches.lines() + _CUBINS + ",\n".join(blocks) + _TAIL


def _own_layout(
    data: bytes, where: str
) -> tuple[dict[str, Any], Shared | None, Mapping[str, Any]] | None:
    """(files, shared lists, places of the cubins) of a text that `to_json` wrote; else None."""
    end = len(data) - len(_TAIL)
    if not data.endswith(_TAIL.encode()):
        return None
    if data.startswith(_HEAD_1.encode()):
        return {}, None, EntryLines(data, slice(len(_HEAD_1), end), b"", f"{where}.cubins")
    if not data.startswith(_HEAD.encode()):
        return None
    # No mark is inside a string: JSON text holds no line break there.
    marks, at = [], 0
    for mark in (_PARAMS, _LAUNCHES, _CUBINS):
        at = data.find(mark.encode(), at)
        if at < 0:
            return None
        marks.append((at, at + len(mark)))
        at += len(mark) - 1
    (files_end, params_at), (params_end, launches_at), (launches_end, cubins_at) = marks
    table = EntryLines(data, slice(cubins_at, end), b"", f"{where}.cubins")
    params = Lines(data, slice(params_at, params_end))
    launches = Lines(data, slice(launches_at, launches_end))
    files = loads(data[len(_HEAD) : files_end], f"{where}.files")
    return JsonObject(files, f"{where}.files").raw, Shared(params, launches, where), table


class _Numbers:
    """Different JSON texts, which get their numbers when all are there."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._is_sorted = False

    def add(self, text: str) -> None:
        self._texts[text] = 0

    def lines(self) -> str:
        return ",\n".join(sorted(self._texts))

    def __getitem__(self, text: str) -> int:
        if not self._is_sorted:
            self._texts = {text: number for number, text in enumerate(sorted(self._texts))}
            self._is_sorted = True
        return self._texts[text]


def _param_rows(function: FunctionEntry) -> str:
    return json.dumps(function.params)


def _launch_row(launch: LaunchFacts) -> str:
    row = {"grid": launch.grid, "block": launch.block, "shared_bytes": launch.shared_bytes}
    return json.dumps({k: v for k, v in {**row, **launch.sizes}.items() if v is not None})


def _fields(entry: Any, *skipped: str) -> dict[str, Any]:
    return {name: value for name, value in entry._asdict().items() if name not in skipped}


def _cubin_lines(
    name: str, archs: dict[str, CubinEntry], params: _Numbers, launches: _Numbers
) -> str:
    lines = []
    for arch, cubin in sorted(archs.items()):
        functions = []
        for function in sorted(cubin.functions.values(), key=lambda f: f.name):
            skipped = [key for key, value in UNSAID.items() if getattr(function, key) == value]
            if not function.triton:
                skipped.append("triton")
            row = _fields(function, "name", "params", "launch", *skipped)
            row["params"] = params[_param_rows(function)]
            if function.launch is not None:
                row["launch"] = launches[_launch_row(function.launch)]
            functions.append(f"  {json.dumps(function.name)}: {json.dumps(row)}")
        head = json.dumps(_fields(cubin, "name", "arch", "functions"))[:-1]
        table = ",\n".join(functions)
        lines.append(f' {json.dumps(arch)}: {head}, "functions": {{\n{table}}}}}')
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "}"


class Collection(NamedTuple):
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


def open_collection(package: str = OWN_PACKAGE) -> Collection:
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
    is_place = isinstance(where, (str, Path)) and where not in ("", OWN_PACKAGE)
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
