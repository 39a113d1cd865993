"""The user's cache folder, and entries in it: bytes by the digest of all that they depend on.

A damaged entry is as good as none, a folder that cannot be written as good as off. Knows no kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from pathlib import Path

VARIABLE = "KERNEL_HUB_CACHE"
_DIGEST_BYTES = 32


def root() -> Path | None:
    """$KERNEL_HUB_CACHE ('0' is off), else $XDG_CACHE_HOME/kernel_hub, else ~/.cache/kernel_hub.

    None where the cache is off, or for a user without a home.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return None if asked == "0" else Path(asked).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification: a relative one is to be ignored
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return Path(base, "kernel_hub")


def folder(kind: str) -> Path | None:
    """Where entries of `kind` ('source', 'ptx') are; it need not exist."""
    base = root()
    return None if base is None else base / kind


def key(*parts: object) -> str:
    """The digest of `parts` (text, bytes, numbers), each told apart from its neighbours."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def load(kind: str, key: str) -> bytes | None:
    """The entry, or None where there is none; a damaged one, or another's, is `discard`ed."""
    base = folder(kind)
    if base is None:
        return None
    path = base / key
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if _seal(kind, key, content) == digest:
        return content
    discard(kind, key, "its digest is another")
    return None


def discard(kind: str, key: str, reason: object) -> None:
    """Remove an entry that is not what it should be, with a warning that names the file."""
    base = folder(kind)
    if base is None:
        return
    warnings.warn(
        f"the cached entry {base / key} is damaged and is made anew: {reason}", RuntimeWarning, 3
    )
    with contextlib.suppress(OSError):
        (base / key).unlink()


def store(kind: str, key: str, content: bytes) -> bool:
    """Keep an entry, whole or not at all; False where that is not possible."""
    base = folder(kind)
    if base is None:
        return False
    part = None
    try:
        base.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=".", dir=base)
        with open(handle, "wb") as file:
            file.write(_seal(kind, key, content) + content)
        os.replace(part, base / key)
    except OSError:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return False
    return True


def _seal(kind: str, name: str, content: bytes) -> bytes:
    """What an entry begins with: its own name counts, so that files are not exchanged unnoticed."""
    return bytes.fromhex(key(kind, name, content))
