"""Measured choices of variants: an op's shipped table, the user's own file, forcing one.

Knows no op, no tensor and no driver; `kernel-hub tune` measures and writes. Files are read at an
op's first plan, once a process; a repeated launch never comes here.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .. import cache_folder
from ..collection.entries import OWN_PACKAGE
from ..collection.manifest import CubinEntry, open_collection
from ..collection.resolve import fitting
from ..errors import CubinNotFoundError, TableError
from . import file
from .file import Choice, GpuSection, Layout, Row

__all__ = ["Choice", "Gpu", "GpuSection", "Layout", "Row", "Table", "tables", "user_folder"]

VARIABLE = "KERNEL_HUB_TUNED"


class Gpu(NamedTuple):
    """What choices depend on. `name` as the driver says it; '' is no real GPU."""

    compute_capability: tuple[int, int]
    num_sms: int
    name: str = ""

    @property
    def arch(self) -> str:
        """'sm90'."""
        return "sm{}{}".format(*self.compute_capability)


def is_enabled() -> bool:
    """Whether files of `kernel-hub tune` are read: KERNEL_HUB_TUNED=0 turns them off."""
    return os.environ.get(VARIABLE, "1") not in ("", "0")


def user_folder() -> Path | None:
    """Where `kernel-hub tune` keeps its files; None for a user without a home, or without cache."""
    return cache_folder.folder("tuned")


def _in_user_folder(path: Path) -> tuple[str, ...] | None:
    """The parts of `path` below the user's folder; None for a file elsewhere."""
    folder = user_folder()
    inside = folder is not None and folder in path.parents and ".." not in path.parts
    return path.relative_to(folder).parts if inside and folder is not None else None


def write(path: Path, text: str) -> None:
    """Replace the table `path` whole, making its folder; TableError where that is not possible."""
    if (own := _in_user_folder(path)) is None:
        return file.write(path, text)
    try:
        cache_folder.write(text.encode(), "tuned", *own)
    except OSError as error:
        reason = cache_folder.problem() or error.strerror or error
        raise TableError(f"cannot write {path}: {reason}") from error


def folder_name(gpu: Gpu) -> str:
    """'nvidia_h200_sm90'."""
    plain = re.sub(r"[^a-z0-9]+", "_", gpu.name.lower()).strip("_")
    return f"{plain}_{gpu.arch}"


class Table:
    """The measured choices of one op; one object an op, at module level.

    op: its name; `kernel_hub/tuning/shipped/<op>.json` is what is shipped, and may be missing
    cubins: those that the variants are in; a user's file of other cubins is stale
    The other arguments are those of `Layout`.
    """

    def __init__(
        self,
        op: str,
        *,
        key: tuple[str, ...],
        bucket: str,
        cubins: tuple[str, ...],
        check: Callable[..., str],
        numbers: Mapping[str, tuple[int, int]] | None = None,
        function: str | None = None,
    ) -> None:
        name = function or f"{op}_{{dtype}}_{{variant}}"
        self.layout = Layout(op, name, key, bucket, dict(numbers or {}), check)
        self.cubins = cubins
        self._forced: Row | None = None
        self._ignores_user = False
        self._is_emptied = False
        self._shipped: list[GpuSection] | None = None
        self._users: dict[Gpu, GpuSection | None] = {}
        self._forget: list[Callable[[], None]] = []
        tables[op] = self

    @property
    def op(self) -> str:
        """The op's name."""
        return self.layout.op

    def lookup(self, gpu: Gpu, size: int, /, **key: int | str) -> Row | None:
        """The choice for sizes up to `size` of the bucket and `key`; None: not measured.

        The user's own file comes first, then what is shipped for GPUs of as many multiprocessors.
        """
        if self._forced is not None or self._is_emptied:
            return self._forced
        text = self.layout.text(key)
        user = self._user(gpu)
        found = user.find(text, size) if user is not None else None
        for section in self.shipped():
            if found is not None:
                break
            if section.arch == gpu.arch and section.num_sms == gpu.num_sms:
                found = section.find(text, size)
        return found

    def costs(self, arch: str) -> dict[str, dict[str, float]]:
        """Constants of the op's cost model, variant -> name -> figure; {} if none are shipped."""
        return next((s.costs for s in self.shipped() if s.arch == arch and s.costs), {})

    def shipped(self) -> list[GpuSection]:
        """What `kernel_hub/tuning/shipped/<op>.json` says; nothing where there is no such file."""
        if self._shipped is None:
            where = f"tuning/shipped/{self.op}.json"
            try:
                data = pkgutil.get_data(OWN_PACKAGE, where)
            except OSError:
                data = None
            text = None if data is None else data.decode()
            self._shipped = [] if text is None else file.read(text, self.layout, where=where)
        return self._shipped

    def user_file(self, gpu: Gpu) -> Path | None:
        """Where the user's choices for `gpu` are or would be."""
        folder = user_folder()
        return folder / folder_name(gpu) / f"{self.op}.json" if folder and gpu.name else None

    def sections_of(self, path: Path) -> list[GpuSection]:
        """What `path` holds; nothing where there is no file. Raises TableError for a wrong one."""
        own = _in_user_folder(path)
        try:
            data = path.read_bytes() if own is None else cache_folder.read("tuned", *own)
            text = data.decode("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"{path}: cannot be read: {error}") from None
        return file.read(text, self.layout, where=str(path))

    def read_user_file(self, path: Path, gpu: Gpu) -> GpuSection | None:
        """The section of `gpu` in `path`; None where there is no file or it has none.

        Raises TableError for a file that is not right, or is about other cubins.
        """
        for section in self.sections_of(path):
            if (section.arch, section.gpu, section.num_sms) == (gpu.arch, gpu.name, gpu.num_sms):
                stale = self._stale(section, gpu)
                if stale:
                    raise TableError(f"{path}: stale: {stale}")
                return section
        return None

    def hashes(self, gpu: Gpu) -> dict[str, str]:
        """cubin -> sha256 of the image that `gpu` loads, of those it can."""
        found = {}
        for name in self.cubins:
            entry, _ = fitting(gpu.compute_capability, _entries(name))
            if entry is not None:
                found[name] = entry.sha256
        return found

    def _stale(self, section: GpuSection, gpu: Gpu) -> str:
        now = self.hashes(gpu)
        changed = [name for name in now if section.cubins.get(name) != now[name]]
        return f"measured with another build of {', '.join(changed)}" if changed else ""

    def _user(self, gpu: Gpu) -> GpuSection | None:
        if gpu not in self._users:
            wanted = is_enabled() and not self._ignores_user
            path = self.user_file(gpu) if wanted else None
            try:
                self._users[gpu] = self.read_user_file(path, gpu) if path is not None else None
            except (TableError, CubinNotFoundError) as error:
                self._users[gpu] = None
                warnings.warn(
                    f"{self.op} goes on with kernel_hub's own choices: {error}; measure again with "
                    f"`kernel-hub tune {self.op}`, or `kernel-hub tune --clear` removes the file",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._users[gpu]

    def on_change(self, forget: Callable[[], None]) -> None:
        """Call `forget` whenever choices made so far no longer hold."""
        self._forget.append(forget)

    def changed(self) -> None:
        """Read the files again at the next plan, and have the op forget its plans."""
        self._users.clear()
        self._shipped = None
        for forget in self._forget:
            forget()

    def shipped_only(self) -> contextlib.AbstractContextManager[None]:
        """Within, the user's own files count for nothing."""
        return self._setting("_ignores_user")

    def emptied(self) -> contextlib.AbstractContextManager[None]:
        """Within, nothing measured counts, shipped or the user's: the op's cost model chooses."""
        return self._setting("_is_emptied")

    @contextlib.contextmanager
    def _setting(self, flag: str) -> Iterator[None]:
        before = getattr(self, flag)
        setattr(self, flag, True)
        self.changed()
        try:
            yield
        finally:
            setattr(self, flag, before)
            self.changed()

    @contextlib.contextmanager
    def forcing(self, row: Row) -> Iterator[None]:
        """Within, every plan of the op takes `row`; for measuring, in one thread."""
        before, self._forced = self._forced, row
        try:
            for forget in self._forget:
                forget()
            yield
        finally:
            self._forced = before
            for forget in self._forget:
                forget()


tables: dict[str, Table] = {}  # op -> its table, of the ops imported so far


def _entries(cubin: str) -> list[CubinEntry]:
    return list(open_collection().manifest.cubins.get(cubin, {}).values())
