"""Reading a file that somebody names: an ordinary one, up to a stated size. Knows no format."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import CubinCorruptError, CubinNotFoundError

MAX_IMAGE_BYTES = 1 << 30  # far above any image of kernels


def read_file(path: str | Path, most_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """All of `path`.

    Raises CubinNotFoundError where there is none, it cannot be read, or it is a folder, a pipe or a
    device (which would block, or never end); CubinCorruptError where it is over `most_bytes`.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CubinNotFoundError(
                    f"{str(path)!r} is a pipe or a device: name an ordinary file"
                )
            # Some files, those of /proc among them, hold more than they say.
            data = b"" if status.st_size > most_bytes else file.read(most_bytes + 1)
    except IsADirectoryError as error:
        raise CubinNotFoundError(f"{str(path)!r} is a folder: name a file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the name
        if isinstance(error, CubinNotFoundError):
            raise
        raise CubinNotFoundError(
            f"cannot read {str(path)!r} (looked at {os.path.abspath(path)!r}): {error}"
        ) from error
    if max(len(data), status.st_size) > most_bytes:
        raise CubinCorruptError(f"{path} is larger than the {most_bytes >> 20} MiB allowed here")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a pipe's other end."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
