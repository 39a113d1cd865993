"""Loading an image in a child process first: what kills or hangs the driver ends the child alone.

`survives` is what the loader asks. `main` is the child's half, run as
`python -m kernel_hub._probe DEVICE NAME…`, without names for every function.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from ctypes import byref, c_uint, c_void_p
from pathlib import Path

from . import _cache, driver
from .errors import CubinCorruptError, KernelHubError, ProbeError

VARIABLE = "KERNEL_HUB_PROBE"
SECONDS = 60  # that an image may take, the child's own start included
_LOCK_SECONDS = 600  # that probes of other processes may take
_READY = b"ready\n"
_OUT_OF_MEMORY = 2
_EXIT_REFUSED, _EXIT_OUT_OF_MEMORY = 1, 75
_ADVICE = "the image is damaged or not for this driver; it was not loaded in this process"


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
    key = _cache.key(_build(cuda), *gpu, image)
    if _answer(key, label):
        return False
    with _one_at_a_time(label):
        if _answer(key, label):
            return False
        verdict = _ask(image, label, symbols, device)
        _cache.store("probed", key, verdict.encode())
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
    known = _cache.load("probed", key)
    if known:
        raise CubinCorruptError(f"{label}: {known.decode(errors='replace')}; {_ADVICE}")
    return known is not None


def _ask(image: bytes, label: str, symbols: Sequence[str], device: int) -> str:
    """What the child came to, '' when it survived."""
    import signal
    import subprocess

    if not sys.executable:
        raise _unprobed(label, "this process has no interpreter to start another with")
    command = [sys.executable, "-m", "kernel_hub._probe", str(device), *symbols]
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=_child_environment()
        )
    except OSError as error:
        raise _unprobed(label, f"no child process could be started: {error}") from error
    with child:
        try:
            said, failure = child.communicate(image, SECONDS)
            hung = False
        except subprocess.TimeoutExpired:
            child.kill()
            said, failure = child.communicate()
            hung = True
    status = child.returncode
    text = failure.decode(errors="replace").strip().splitlines()
    last = text[-1] if text else f"exit {status}"
    if not said.startswith(_READY):
        reason = f"it did not start within {SECONDS} s" if hung else last
        if status < 0 and not hung:
            reason = f"it died of signal {-status} before it had a context"
        raise _unprobed(label, f"the child process has no context: {reason}")
    if hung:
        return f"the driver hung for {SECONDS} s on it in a child process"
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        raise _unprobed(label, f"the child process was ended from outside (signal {-status})")
    if status == _EXIT_OUT_OF_MEMORY:
        raise _unprobed(label, f"the child process ran out of GPU memory: {last}")
    if status < 0:
        return f"the driver died on it in a child process (signal {-status})"
    return f"the driver refused it in a child process ({last})" if status else ""


def _unprobed(label: str, reason: str) -> ProbeError:
    return ProbeError(
        f"{label} could not be probed, so it was not loaded: {reason}. {VARIABLE}=0 loads images "
        "unprobed, if you trust them"
    )


def _child_environment() -> dict[str, str]:
    # The child must find this very package, however it was found here.
    found = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *found])}


@contextlib.contextmanager
def _one_at_a_time(label: str) -> Iterator[None]:
    """Hold the machine's lock for probes; without one where the system has none to give."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    path = Path(tempfile.gettempdir(), "kernel_hub_probe.lock")
    try:  # another user's file may be read, and that is enough to lock it
        handle = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
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


def main(device: int, names: Sequence[str]) -> int:
    """Load stdin's image on `device` and look up `names`; says when the context stands."""
    image = sys.stdin.buffer.read()
    library, function = c_void_p(), c_void_p()
    try:
        cuda = driver.get()
        with cuda.on_device(device):
            os.write(1, _READY)
            cuda.call("cuLibraryLoadData", byref(library), image, None, None, 0, None, None, 0)
            for kernel in _named(cuda, library, names) if names else _all(cuda, library):
                cuda.call("cuKernelGetFunction", byref(function), kernel)
                if cuda.has("cuFuncLoad"):
                    cuda.call("cuFuncLoad", function)
            cuda.call("cuLibraryUnload", library)
    except KernelHubError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        full = getattr(error, "code", None) == _OUT_OF_MEMORY
        return _EXIT_OUT_OF_MEMORY if full else _EXIT_REFUSED
    return 0


def _named(cuda: driver.Driver, library: c_void_p, names: Sequence[str]) -> list[c_void_p]:
    kernels = [c_void_p() for _ in names]
    for name, kernel in zip(names, kernels, strict=True):
        cuda.call("cuLibraryGetKernel", byref(kernel), library, name.encode())
    return kernels


def _all(cuda: driver.Driver, library: c_void_p) -> list[int | None]:
    """Every kernel, where the driver can tell (12.4): the image's names are not known here."""
    if not cuda.has("cuLibraryEnumerateKernels") or not cuda.has("cuLibraryGetKernelCount"):
        return []
    count = c_uint()
    cuda.call("cuLibraryGetKernelCount", byref(count), library)
    kernels = (c_void_p * max(count.value, 1))()
    cuda.call("cuLibraryEnumerateKernels", kernels, count, library)
    return kernels[: count.value]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
