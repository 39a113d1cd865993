"""A folder for what tests compile and load, that nobody else can have put anything into."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder(name: str) -> Path:
    """$TMPDIR/kernel_hub_<name>_<user>: made for the user alone.

    Raises RuntimeError where it is a link, or belongs to somebody else, who may have put a library
    there for us to load.
    """
    path = Path(tempfile.gettempdir()) / f"kernel_hub_{name}_{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise RuntimeError(f"{path} is no folder of ours ({error}): remove it") from error
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid():
            raise RuntimeError(f"{path} belongs to the user {status.st_uid}: remove it")
        if stat.S_IMODE(status.st_mode) & 0o077:
            if status.st_mode & 0o022 and os.listdir(handle):
                raise RuntimeError(f"others may have written in {path}: remove it")
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return path
