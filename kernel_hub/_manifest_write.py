"""Writing a collection: entries of its manifest, one writer at a time, files whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .manifest import FunctionEntry, ParamEntry

_FIGURES = (
    *("num_regs", "static_shared_bytes", "local_bytes", "max_threads", "required_block"),
    *("cluster", "max_cluster_rank", "cooperative"),
)


def function_entry(
    read: Any, params: tuple[ParamEntry, ...], triton: dict[str, Any] | None = None
) -> FunctionEntry:
    """The entry of a function: `read` is what the cubin says of it (a FunctionInfo)."""
    figures = {name: getattr(read, name) for name in _FIGURES}
    return FunctionEntry(name=read.name, params=params, triton=triton, **figures)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """One build at a time writes to `out`; the lock is on the folder and leaves no file."""
    import fcntl  # POSIX only, as building is

    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write(path: Path, content: bytes) -> None:
    """Replaces `path` whole: an interrupted build leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)
