"""Writing a collection: entries of its manifest, one writer at a time, files whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import KernelHubError
from .manifest import FunctionEntry, LaunchFacts, Manifest, ParamEntry, read_manifest

_FIGURES = (
    *("num_regs", "static_shared_bytes", "local_bytes", "max_threads", "required_block"),
    *("cluster", "max_cluster_rank", "cooperative"),
)


def function_entry(
    read: Any,
    params: tuple[ParamEntry, ...],
    triton: dict[str, Any] | None = None,
    launch: LaunchFacts | None = None,
) -> FunctionEntry:
    """The entry of a function: `read` is what the cubin says of it (a FunctionInfo)."""
    figures = {name: getattr(read, name) for name in _FIGURES}
    return FunctionEntry(name=read.name, params=params, triton=triton, launch=launch, **figures)


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


def vouch(out: Path, package: Path, file: str, *, is_check: bool = False) -> None:
    """Write the digest of `file`, a path in `package`, into the manifest in `out`.

    is_check: raise KernelHubError where another one stands there, and write nothing.
    """
    digest = hashlib.sha256((package / file).read_bytes()).hexdigest()
    with locked(out):
        manifest = read_manifest(out / "manifest.json")
        if manifest.files.get(file) == digest:
            return
        if is_check:
            raise KernelHubError(f"{out / 'manifest.json'} does not vouch for {package / file}")
        text = Manifest(manifest.cubins, {**manifest.files, file: digest}).to_json()
        write(out / "manifest.json", text.encode())


def write(path: Path, content: bytes) -> None:
    """Replaces `path` whole: an interrupted build leaves the old file or the new one.

    The new one is a file of its own from the start, under a name that nobody can have put there: a
    link that was planted, at that name or at `path`, is not written through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(part, "wb", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
            file.write(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
