"""Measured choices of a collection: `tuned.json`, read once, and the function for a problem's size.

Knows files and names; measures nothing.
"""

from __future__ import annotations

import json
import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .... import driver as _driver
from ....arrays.interop import current_device
from ....errors import CubinNotFoundError, ParamsError, TableError
from ....tuning import Gpu
from ....tuning.file import FileReader, write
from ..function import TritonFunction

if TYPE_CHECKING:
    from .collection import TritonCollection

FILE = "tuned.json"
FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ARCH = re.compile(r"sm\d{2,3}")
_SIZE = re.compile(r"[A-Za-z_]\w*=\d{1,10}")
_MAX_SIZE = 1 << 31
_MAX_RECENT = 4096
Bucket = tuple[int, ...]


class TunedChoice(NamedTuple):
    """The function that is the fastest up to some sizes, and of which image that was measured."""

    function: str
    us: float
    sha256: str


@dataclass(frozen=True)
class TunedSection:
    """What was measured on one GPU: bucket -> choice."""

    gpu: Gpu
    choices: Mapping[Bucket, TunedChoice]


@dataclass(frozen=True)
class TunedTable:
    """The choices of one kernel: `keys` name the sizes that they depend on."""

    keys: tuple[str, ...]
    sections: tuple[TunedSection, ...]


def bucket_of(keys: Iterable[str], sizes: Mapping[str, int]) -> Bucket:
    """Sizes up to the same powers of two are alike: (512, 512, 100) is in (9, 9, 7)."""
    return tuple((operator.index(sizes[key]) - 1).bit_length() for key in keys)


def check_sizes(sizes: Mapping[str, Any], where: str) -> None:
    """Raises ParamsError, which begins with `where`, unless the sizes are whole numbers."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or not 0 <= operator.index(size) <= _MAX_SIZE:
            raise ParamsError(f"{where}: {name}={size!r}: a whole number from 0 to {_MAX_SIZE}")


def current_gpu() -> Gpu:
    """The GPU at hand."""
    driver, device = _driver.get(), current_device()
    sms = driver.attribute(device, _driver.MULTIPROCESSOR_COUNT)
    return Gpu(driver.compute_capability(device), sms, driver.device_name(device))


class Tuned:
    """A kernel in several configurations: the one that was the fastest for a problem's size.

    keys: the names of the sizes. choices: what was measured, {'M=512 N=512': name}.
    """

    def __init__(
        self, keys: tuple[str, ...], choices: Mapping[Bucket, tuple[str, TritonFunction]]
    ) -> None:
        self.keys = keys
        self.choices = {text_of(keys, bucket): name for bucket, (name, _) in choices.items()}
        self._measured = {bucket: function for bucket, (_, function) in choices.items()}
        self._nearest = dict(self._measured)  # of each bucket asked for
        self._recent: dict[tuple[tuple[str, int], ...], TritonFunction] = {}
        self._names = {function: name for name, function in choices.values()}

    def select(self, **sizes: int) -> TritonFunction:
        """The function for these sizes: `tuned.select(M=512, N=512, K=100)`.

        Sizes up to the same power of two are alike; where nothing was measured for them, the
        nearest that was counts. Sizes seen before cost one look into a dict; no file is read.
        """
        try:
            return self._recent[tuple(sizes.items())]
        except (KeyError, TypeError):
            return self._search(sizes)

    def name(self, **sizes: int) -> str:
        """What the collection calls the function for these sizes."""
        return self._names[self.select(**sizes)]

    def _search(self, sizes: Mapping[str, Any]) -> TritonFunction:
        if sizes.keys() != set(self.keys):
            raise ParamsError(
                f"select takes {', '.join(self.keys)}, not {', '.join(sizes) or 'nothing'}"
            )
        check_sizes(sizes, "select")
        bucket = bucket_of(self.keys, sizes)

        found = self._nearest.get(bucket)
        if found is None:

            def distance(measured: Bucket) -> tuple[int, Bucket]:
                return sum(abs(a - b) for a, b in zip(bucket, measured, strict=True)), measured

            found = self._measured[min(self._measured, key=distance)]
            self._nearest[bucket] = found
        if len(self._recent) >= _MAX_RECENT:
            self._recent.clear()
        self._recent[tuple(sizes.items())] = found
        return found

    @classmethod
    def open(cls, collection: TritonCollection, table: str | None) -> Tuned:
        """The choices for the GPU at hand: of such a GPU, else of its architecture, else of any.

        Raises TableError for a wrong file, CubinNotFoundError where nothing chosen can run.
        """
        where = str(collection.root.joinpath(FILE))
        if table is not None and not isinstance(table, str):
            raise ParamsError(f"table={table!r:.80}: the name of a table, or None")
        tables = read(collection)
        if table is None and len(tables) == 1:
            (table,) = tables
        if table not in tables:
            raise TableError(
                f"{where}: no choices for {table!r}; it has: {', '.join(tables) or 'nothing'} "
                "(formats.triton.tune measures and writes them)"
            )
        gpu, found = current_gpu(), tables[table]

        def foreign(section: TunedSection) -> tuple[bool, bool]:
            return section.gpu != gpu, section.gpu.arch != gpu.arch

        refused: dict[str, str] = {}
        for section in sorted(found.sections, key=foreign):
            choices = {}
            for bucket, choice in section.choices.items():
                check_image(collection, choice, f"{where}: {table}")
                try:
                    function = collection.function(choice.function)
                except CubinNotFoundError as error:
                    refused[choice.function] = str(error)
                else:
                    choices[bucket] = choice.function, function
            if choices:
                return cls(found.keys, choices)
        reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
        raise CubinNotFoundError(f"{where}: {table}: no choice runs on this GPU{reasons}")


def check_image(collection: TritonCollection, choice: TunedChoice, where: str) -> None:
    """A choice is of the collection, or TableError; a warning where it was built anew."""
    if choice.function not in collection:
        raise TableError(
            f"{where}: chooses {choice.function!r}, which the collection does not hold: tune again"
        )
    images = {entry.sha256 for entry in collection.entries(choice.function).values()}
    if choice.sha256 not in images:
        warnings.warn(
            f"{where}: {choice.function} was built anew since it was measured: tune again",
            RuntimeWarning,
            stacklevel=4,
        )


def text_of(keys: Iterable[str], bucket: Bucket) -> str:
    """'M=512 N=512 K=128': the largest sizes of a bucket."""
    return " ".join(f"{key}={1 << bits}" for key, bits in zip(keys, bucket, strict=True))


def read(collection: TritonCollection) -> dict[str, TunedTable]:
    """The tables of a collection; none where there is no file. Raises TableError."""
    file = collection.root.joinpath(FILE)
    where = str(file)
    try:
        raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"{where}: cannot be read: {error}") from None
    if raw is None:
        return {}
    whole = FileReader(raw, where, "")
    whole.only(("format", "tables"))
    whole.number("format", FORMAT, FORMAT)
    return {name: _table(each, where, name) for name, each in whole.table("tables").items()}


def _table(raw: object, where: str, name: str) -> TunedTable:
    reader = FileReader(raw, where, f"tables.{name}")
    reader.only(("keys", "gpus"))
    keys, gpus = reader.raw.get("keys"), reader.raw.get("gpus")
    if not isinstance(keys, list) or not keys or not all(map(is_name, keys)):
        raise reader.bad("keys", "a list of names such as M", keys)
    if len(set(keys)) != len(keys):
        raise reader.bad("keys", "names that differ", keys)
    if not isinstance(gpus, list):
        raise reader.bad("gpus", "a list", gpus)
    sections = [_section(g, where, f"{reader.name}.gpus[{i}]", keys) for i, g in enumerate(gpus)]
    return TunedTable(tuple(keys), tuple(sections))


def is_name(key: object) -> bool:
    """Whether it may name a size."""
    return isinstance(key, str) and key.isidentifier()


def _section(raw: object, where: str, name: str, keys: list[str]) -> TunedSection:
    reader = FileReader(raw, where, name)
    reader.only(("arch", "gpu", "num_sms", "choices"))
    arch = reader.text("arch", _ARCH)
    gpu = Gpu(divmod(int(arch[2:]), 10), reader.number("num_sms", 1, 10000), reader.text("gpu"))
    choices = {}
    for text, each in reader.table("choices").items():
        choice = FileReader(each, where, f"{name}.choices.{text}")
        choice.only(("function", "us", "sha256"))
        us = choice.raw.get("us")
        if isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 <= us < 1e12:
            raise choice.bad("us", "microseconds", us)
        bucket = _parse(text, keys)
        if bucket is None:
            like = " ".join(f"{key}=512" for key in keys)
            raise reader.bad("choices", f"powers of two like '{like}'", text)
        function, sha256 = choice.text("function"), choice.text("sha256", _SHA256)
        choices[bucket] = TunedChoice(function, float(us), sha256)
    return TunedSection(gpu, choices)


def _parse(text: str, keys: list[str]) -> Bucket | None:
    parts = text.split(" ")
    if len(parts) != len(keys) or not all(_SIZE.fullmatch(part) for part in parts):
        return None
    sizes = {name: int(value) for name, _, value in (part.partition("=") for part in parts)}
    if list(sizes) != keys or max(sizes.values()) > _MAX_SIZE:
        return None
    bucket = bucket_of(keys, sizes)
    return bucket if text_of(keys, bucket) == text else None


def merged(old: TunedTable | None, keys: tuple[str, ...], new: TunedSection) -> TunedTable:
    """`new`, with what `old` says of other GPUs and of other buckets of this one."""
    if old is None or old.keys != keys:
        return TunedTable(keys, (new,))
    own = next((s.choices for s in old.sections if s.gpu == new.gpu), {})
    others = tuple(s for s in old.sections if s.gpu != new.gpu)
    return TunedTable(keys, (*others, TunedSection(new.gpu, {**own, **new.choices})))


def save(path: Path, tables: Mapping[str, TunedTable]) -> None:
    """Replace the file whole: the same bytes for the same content. Raises TableError."""
    raw = {"format": FORMAT, "tables": {name: _raw(t) for name, t in sorted(tables.items())}}
    write(path, json.dumps(raw, indent=1) + "\n")


def _raw(table: TunedTable) -> dict[str, Any]:
    return {
        "keys": list(table.keys),
        "gpus": [
            {
                "arch": section.gpu.arch,
                "gpu": section.gpu.name,
                "num_sms": section.gpu.num_sms,
                "choices": {
                    text_of(table.keys, bucket): choice._asdict()
                    for bucket, choice in sorted(section.choices.items())
                },
            }
            for section in table.sections
        ],
    }
