"""Loading an image in a child process first: what kills or hangs the driver ends the child alone.

`survives` is what the loader asks; the child's half is `probe_child`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import cache_folder, driver
from ..errors import CubinCorruptError, ProbeError
from . import probe_child

VARIABLE = "KERNEL_HUB_PROBE"
SECONDS = 60  # that an image may take, the child's own start included
_LOCK_SECONDS = 600  # that probes of other processes may take
_ADVICE = "the image is damaged or not for this driver; it was not loaded in this process"

# The child's whole program. Isolated (-I -S) it has the standard library and nothing else to import
# from: neither the working folder nor any folder of packages, where a module called `ctypes` may
# lie. This package alone is looked for in its own folder, which never comes onto the path.
_PROGRAM = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
name = sys.argv[2]
spec = PathFinder.find_spec(name, [sys.argv[1]])
package = sys.modules[name] = module_from_spec(spec)
spec.loader.exec_module(package)
sys.exit(import_module(name + ".launch.probe_child").main())
"""
_PACKAGE = Path(__file__).absolute().parents[1]
_FOLDER, _NAME = str(_PACKAGE.parent), _PACKAGE.name  # or the zip file
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")  # no driver raises these


def is_off() -> bool:
    """Whether $KERNEL_HUB_PROBE=0 trusts every image."""
    return os.environ.get(VARIABLE) == "0"


def survives(
    cuda: driver.Driver, image: bytes, label: str, symbols: Sequence[str], device: int
) -> bool:
    """Have a child process load `image` and `symbols` of it on `device`, unless one did before.

    The answer is kept by image, driver build and GPU; one probe runs on a machine at a time.

    Returns: True when a child was asked now, False when the answer was known.
    Raises: CubinCorruptError when the child died, hung or was refused; ProbeError when it got no
        further than its own start, which says nothing of the image.
    """
    gpu = cuda.device_name(device), cuda.compute_capability(device)
    key = cache_folder.key(_build(cuda), *gpu, image)
    if _answer(key, label):
        return False
    with _one_at_a_time(label):
        if _answer(key, label):
            return False
        verdict = _ask(image, label, symbols, device)
        cache_folder.store("probed", key, verdict.encode())
    if verdict:
        raise CubinCorruptError(f"{label}: {verdict}; {_ADVICE}")
    return True


def _build(cuda: driver.Driver) -> str:
    """Which driver this is, to the build: the file it was loaded from, where that can be told."""
    address = cuda.launch_ex_address
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            span, _, _, _, _, *path = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end and path:
                status = os.stat(path[0])
                return f"{os.path.basename(path[0])} {status.st_size} {status.st_mtime_ns}"
    return f"{cuda.path} {cuda.version}"


def _answer(key: str, label: str) -> bool:
    """Whether a child is known to have survived; raises where it is known not to have."""
    known = cache_folder.load("probed", key)
    if known:
        raise CubinCorruptError(f"{label}: {known.decode(errors='replace')}; {_ADVICE}")
    return known is not None


def _ask(image: bytes, label: str, symbols: Sequence[str], device: int) -> str:
    """What the child came to, '' when it survived."""
    import signal
    import subprocess

    if not sys.executable or getattr(sys, "frozen", False):
        raise _unprobed(label, "this process has no interpreter to start another with")
    token = os.urandom(16).hex()
    ready, survived = f"ready {token}", f"survived {token}"
    head = {"device": device, "names": list(symbols), "ready": ready, "survived": survived}
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, _FOLDER, _NAME],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
    except OSError as error:
        raise _unprobed(label, f"no child process could be started: {error}") from error
    with child:
        try:
            said, failure = child.communicate(json.dumps(head).encode() + b"\n" + image, SECONDS)
            hung = False
        except subprocess.TimeoutExpired:
            child.kill()
            said, failure = child.communicate()
            hung = True
    status, words = child.returncode, said.decode(errors="replace").splitlines()
    text = failure.decode(errors="replace").strip().splitlines()
    last = text[-1] if text else f"exit {status}"
    if ready not in words:
        reason = f"it did not start within {SECONDS} s" if hung else last
        if status < 0 and not hung:
            reason = f"it died of signal {-status} before it had a context"
        raise _unprobed(label, f"the child process has no context: {reason}")
    if hung:
        return f"the driver hung for {SECONDS} s on it in a child process"
    if -status in [getattr(signal, name, None) for name in _FROM_OUTSIDE]:
        raise _unprobed(label, f"the child process was ended from outside (signal {-status})")
    if status == probe_child.FULL:
        raise _unprobed(label, f"the child process ran out of GPU memory: {last}")
    if status < 0:
        return f"the driver died on it in a child process (signal {-status})"
    if status:
        return f"the driver refused it in a child process ({last})"
    if survived not in words:
        raise _unprobed(label, "the child process ended without an answer")
    return ""


def _unprobed(label: str, reason: str) -> ProbeError:
    return ProbeError(
        f"{label} could not be probed, so it was not loaded: {reason}. {VARIABLE}=0 loads images "
        "unprobed, if you trust them"
    )


@contextlib.contextmanager
def _one_at_a_time(label: str) -> Iterator[None]:
    """Hold the machine's lock for probes; without one where the system has none to give."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    import tempfile  # milliseconds, for the few images that are probed

    path = Path(tempfile.gettempdir(), "kernel_hub_probe.lock")
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:  # another user's file may be read, and that is enough to lock it; a pipe is not waited for
        handle = os.open(path, flags | os.O_NONBLOCK, 0o644)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    reason = f"another process has held {path} for {_LOCK_SECONDS} s"
                    raise _unprobed(label, reason) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)
