"""The user's cache folder, and entries in it: bytes by the digest of all that they depend on.

A damaged entry is as good as none, a folder that cannot be written as good as off. What is in the
folder is trusted only as far as nobody else can have put it there: see `_Folder`. Knows no kernel.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "KERNEL_HUB_CACHE"
KINDS = ("source", "ptx", "probed", "tuned", "nvrtc_headers")
MAX_BYTES = 1 << 30  # of an entry: far above any image of kernels
_DIGEST_BYTES = 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HAS_OWNERS = hasattr(os, "geteuid") and os.open in os.supports_dir_fd
_FOLLOW_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# Without waiting for a pipe's other end, and without making a terminal ours.
_READ = (
    os.O_RDONLY
    | _FOLLOW_NO_LINK
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_LINK_OR_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FOLLOW_NO_LINK | getattr(os, "O_BINARY", 0)

# Cache folders that are not used, and why; each was said once.
_refused: dict[Path, str] = {}


class UntrustedError(OSError):
    """A file or folder of the cache that somebody else may have written, or that is none."""


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


def problem() -> str:
    """Why the cache folder is not used, '' where it is; looks at each folder that is there."""
    base = root()
    if base is None:
        return ""
    for kind in KINDS if base not in _refused else ():
        try:
            with _Folder(base, (kind,)):
                pass
        except UntrustedError as error:
            _refuse(base, error, quiet=True)
            break
        except OSError:  # not there, or out of reach: nothing is read from it
            continue
    return _refused.get(base, "")


def key(*parts: object) -> str:
    """The digest of `parts` (text, bytes, numbers), each told apart from its neighbours."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def load(kind: str, key: str) -> bytes | None:
    """The entry, or None where there is none; a damaged one, or another's, is `discard`ed."""
    try:
        data = read(kind, key)
    except UntrustedError as error:
        discard(kind, key, error)
        return None
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if _seal(kind, key, content) == digest:
        return content
    discard(kind, key, "its digest is another")
    return None


def read(kind: str, *names: str) -> bytes:
    """The file `names` (folders, then the file) below the folder of `kind`.

    Raises UntrustedError for a file that is not the user's alone, OSError where there is none. A
    folder that is not to be trusted turns the cache off: that is a FileNotFoundError.
    """
    with _opened(kind, *names[:-1]) as place:
        return place.read(names[-1])


def discard(kind: str, key: str, reason: object) -> None:
    """Remove an entry that is not what it should be, with a warning that names the file."""
    base = folder(kind)
    if base is None:
        return
    warnings.warn(
        f"the cached entry {base / key} is damaged and is made anew: {reason}", RuntimeWarning, 3
    )
    with contextlib.suppress(OSError), _opened(kind) as place:
        place.remove(key)


def store(kind: str, key: str, content: bytes) -> bool:
    """Keep an entry, whole or not at all; False where that is not possible."""
    try:
        write(_seal(kind, key, content) + content, kind, key)
    except OSError:
        return False
    return True


def write(content: bytes, kind: str, *names: str) -> None:
    """Replace the file `names` below the folder of `kind` whole, making its folders.

    Raises OSError where that is not possible, or the cache is off.
    """
    with _opened(kind, *names[:-1], make=True) as place:
        place.replace(names[-1], content)


def private_folder(kind: str) -> Path | None:
    """The folder of `kind`, made where it is missing and nobody else's to write; None without."""
    with contextlib.suppress(OSError), _opened(kind, make=True) as place:
        return place.path if os.access(place.path, os.W_OK) else None
    return None


def _seal(kind: str, name: str, content: bytes) -> bytes:
    """What an entry begins with: its own name counts, so that files are not exchanged unnoticed."""
    return bytes.fromhex(key(kind, name, content))


@contextlib.contextmanager
def _opened(*names: str, make: bool = False) -> Iterator[_Folder]:
    """The folder `names` below the cache's root, while nothing about it is to be distrusted."""
    base = root()
    if base is None or base in _refused:
        raise FileNotFoundError("the cache is off")
    try:
        place = _Folder(base, names, make=make)
    except UntrustedError as error:
        _refuse(base, error)
        raise FileNotFoundError("the cache is off") from error
    with place:
        yield place


def _refuse(base: Path, error: UntrustedError, *, quiet: bool = False) -> None:
    _refused[base] = str(error)
    if not quiet:
        warnings.warn(
            f"the cache folder {base} is not used: {error}. Make it yours alone, or name another "
            f"with {VARIABLE} (0 for none)",
            RuntimeWarning,
            3,
        )


class _Folder:
    """A folder of the cache, held open: what is done in it is done in that very folder.

    The root may be reached through links and lie anywhere (~/.cache on a scratch disk); each folder
    below it is opened without following one. A folder is the user's own or root's, and an entry is
    an ordinary file of the user or root that nobody else may write: who else could have put it
    there? A folder of ours that is looser (made under umask 002) is tightened. Files are replaced
    by renaming and never locked, which holds on network file systems too. Windows has no such
    owners and modes: there the kind of file is checked alone.

    Raises UntrustedError, or OSError where there is no such folder (unless it is to be made).
    """

    def __init__(self, base: Path, names: tuple[str, ...], *, make: bool = False) -> None:
        self.path = base
        if make:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handle = self._open_root(base)
        try:
            for name in names:
                self._enter(name, make)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _open_root(self, base: Path) -> int | None:
        if not _HAS_OWNERS:
            return None
        handle = os.open(base, _FOLDER)
        try:
            status = os.fstat(handle)
            # Elsewhere than in our own folder (in /tmp, say) others may have files: those below
            # it are what counts.
            ours = status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX
            if ours and status.st_mode & _OTHERS_WRITE and set(os.listdir(handle)) <= {*KINDS}:
                _tighten(handle, status.st_mode, base)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _enter(self, name: str, make: bool) -> None:
        self.path /= name
        if not _HAS_OWNERS:
            if make:
                self.path.mkdir(exist_ok=True)
            return
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._handle)
        try:
            handle = os.open(name, _FOLDER | _FOLLOW_NO_LINK, dir_fd=self._handle)
        except OSError as error:
            if error.errno in _LINK_OR_NO_FOLDER:
                raise UntrustedError(f"{self.path} is a link, or no folder") from error
            raise
        self.close()
        self._handle = handle
        status = os.fstat(handle)
        if status.st_uid not in (os.geteuid(), 0):
            raise UntrustedError(f"{self.path} belongs to the user {status.st_uid}")
        if status.st_mode & _OTHERS_WRITE:
            _tighten(handle, status.st_mode, self.path)

    def read(self, name: str) -> bytes:
        """All of an entry. Raises UntrustedError, OSError."""
        at = name if self._handle is not None else self.path / name
        try:
            handle = os.open(at, _READ, dir_fd=self._handle)
        except OSError as error:
            if error.errno in _LINK_OR_NO_FOLDER:
                raise UntrustedError("it is a link") from error
            raise
        status = os.fstat(handle)
        if reason := _wrong_file(status):
            os.close(handle)
            raise UntrustedError(reason)
        with open(handle, "rb") as file:
            return file.read(status.st_size)

    def replace(self, name: str, content: bytes) -> None:
        """Write an entry whole, under a name of its own first."""
        part = f".{name[:32]}.{os.urandom(8).hex()}"
        at, to = (part, name) if self._handle is not None else (self.path / part, self.path / name)
        handle = os.open(at, _MAKE, 0o600, dir_fd=self._handle)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(at, to, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(part)
            raise

    def remove(self, name: str) -> None:
        """Remove an entry, or a link to one."""
        at = name if self._handle is not None else self.path / name
        os.unlink(at, dir_fd=self._handle)


def _wrong_file(status: os.stat_result) -> str:
    """Why a file is not to be read, '' where it is."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no ordinary file"
    if status.st_size > MAX_BYTES:
        return f"it is larger than {MAX_BYTES >> 20} MiB"
    if _HAS_OWNERS and status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to the user {status.st_uid}"
    if _HAS_OWNERS and status.st_mode & _OTHERS_WRITE:
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _tighten(handle: int, mode: int, path: Path) -> None:
    """Take the others' right to write from a folder of ours. Raises UntrustedError."""
    with contextlib.suppress(OSError):
        os.fchmod(handle, stat.S_IMODE(mode) & ~_OTHERS_WRITE)
    if (found := os.fstat(handle).st_mode) & _OTHERS_WRITE:
        raise UntrustedError(
            f"others may write in {path} (mode {stat.S_IMODE(found):o}), and that cannot be changed"
        )
