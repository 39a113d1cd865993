"""Builds the stand-in for libcuda and gives tests a typed handle on it.

Each `FakeCuda` is its own copy of the library, so no state passes from one test to the next.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from private import private_folder

HERE = Path(__file__).parent
_KINDS = ("contexts", "streams", "events", "pools", "libraries")


class CompilerMissingError(RuntimeError):
    """No C compiler: tests on the stand-in are skipped with this reason."""


def build(*defines: str) -> Path:
    """The compiled library (made once for each source text and set of defines)."""
    sources = sorted(HERE.glob("*.c"))
    digest = hashlib.sha256(repr(defines).encode())
    for path in [*sources, HERE / "fake_cuda.h"]:
        digest.update(path.read_bytes())
    library = private_folder("fakecuda") / f"libcuda_{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise CompilerMissingError("no C compiler (cc or gcc) to build tests/fakecuda with")
    made = library.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command += [
        "-fvisibility=hidden",
        "-pthread",
        "-Wl,-z,defs",
        *(f"-D{name}" for name in defines),
    ]
    done = subprocess.run(
        [*command, "-o", str(made), *map(str, sources)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"tests/fakecuda does not compile:\n{done.stderr}")
    made.replace(library)  # atomic: several pytest processes may build at once
    return library


class _Launch(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("gridDim", ctypes.c_uint * 3),
        ("blockDim", ctypes.c_uint * 3),
        ("sharedMemBytes", ctypes.c_uint),
        ("numAttributes", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
        ("device", ctypes.c_int),
        ("num_params", ctypes.c_int),
        ("attributes", (ctypes.c_ubyte * 72) * 8),
    )


@dataclass(frozen=True)
class Launch:
    """One recorded launch. `params` are the raw bytes of each; None when sizes are unknown."""

    name: str
    gridDim: tuple[int, int, int]  # noqa: N815
    blockDim: tuple[int, int, int]  # noqa: N815
    sharedMemBytes: int  # noqa: N815
    stream: int
    device: int
    thread: int
    attributes: dict[int, bytes]
    params: tuple[bytes, ...] | None

    def attribute(self, number: int, index: int = 0) -> int:
        """The 32-bit value at `index` of launch attribute `number`."""
        return int.from_bytes(self.attributes[number][4 * index : 4 * index + 4], "little")


# Called as fn(launch, addresses of the parameters) instead of running a kernel.
Callback = Callable[["_Launch", list[int]], None]
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch), ctypes.POINTER(ctypes.c_void_p))


class FakeCuda:
    """A fresh stand-in: `devices` H200s of `capability` under a driver of `version`."""

    def __init__(
        self,
        devices: int = 1,
        version: int = 13000,
        capability: tuple[int, int] = (9, 0),
        defines: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fakecuda_")
        self.path = str(shutil.copy(build(*defines), Path(self._folder.name) / "libcuda.so.1"))
        self._lib = ctypes.CDLL(self.path)
        self._callbacks: list[object] = []
        for name in (
            "launch_count",
            "recorded",
            "live_allocations",
            "live_host_allocations",
            "all_calls",
            "calls",
            "live",
            "capture_violations",
        ):
            getattr(self._lib, f"fakecuda_{name}").restype = ctypes.c_long
        self._lib.fakecuda_get_param.restype = ctypes.c_long
        self._lib.fakecuda_last_free_stream.restype = ctypes.c_void_p
        self._lib.fakecuda_configure(devices, version)
        for device in range(devices):
            self.set_capability(device, *capability)

    # -- what the driver is
    def set_capability(self, device: int, major: int, minor: int) -> None:
        """Make `device` one of compute capability major.minor."""
        self._lib.fakecuda_set_cc(device, major, minor)

    def set_device_attribute(self, device: int, attribute: int, value: int) -> None:
        """Set a CUdevice_attribute."""
        self._lib.fakecuda_set_device_attribute(device, attribute, value)

    def set_total_memory(self, device: int, num_bytes: int) -> None:
        """Give `device` that much memory."""
        self._lib.fakecuda_set_total_memory(device, ctypes.c_uint64(num_bytes))

    def set_init_code(self, code: int) -> None:
        """Let cuInit give `code`."""
        self._lib.fakecuda_set_init_code(code)

    # -- what goes wrong
    def fail(self, call: str, code: int, after: int = 0, count: int = 1) -> None:
        """`call` gives `code` `count` times (-1: for ever) once `after` calls went through."""
        self._lib.fakecuda_fail(call.encode(), code, ctypes.c_long(after), ctypes.c_long(count))

    def set_sticky(self, code: int) -> None:
        """Every call that needs the context gives `code` from now on, as after a kernel fault."""
        self._lib.fakecuda_set_sticky(code)

    def set_latency(self, call: str, microseconds: int) -> None:
        """Let each `call` take that long."""
        self._lib.fakecuda_set_latency(call.encode(), ctypes.c_long(microseconds))

    def clear_faults(self) -> None:
        """No more failures or latencies."""
        self._lib.fakecuda_clear_faults()

    def log(self, line: str) -> None:
        """Append a line to the driver's log."""
        self._lib.fakecuda_log(line.encode())

    def set_capture(self, stream: int, status: int = 1) -> None:
        """Let `stream` (a created one) record a graph: 0 no, 1 active, 2 invalidated."""
        self._lib.fakecuda_set_capture(ctypes.c_void_p(stream), status)

    def strict_capture(self, strict: bool = True) -> None:
        """While a stream captures, loading gives 900 unless the thread's mode is relaxed."""
        self._lib.fakecuda_strict_capture(int(strict))

    # -- what kernels are
    def set_params(self, function: str, sizes: Sequence[int]) -> None:
        """Record parameters of these sizes for `function` (else: what its cubin says)."""
        array = (ctypes.c_size_t * max(len(sizes), 1))(*sizes)
        self._lib.fakecuda_set_params(function.encode(), len(sizes), array)

    def set_kernel_attribute(self, function: str, attribute: int, value: int) -> None:
        """Set a CUfunction_attribute as cuKernelGetAttribute gives it."""
        self._lib.fakecuda_set_kernel_attribute(function.encode(), attribute, value)

    def set_callback(self, function: str, run: Callback) -> None:
        """Call `run` at each launch of `function`, in the launching thread."""

        def call(
            launch: ctypes._Pointer[_Launch], params: ctypes._Pointer[ctypes.c_void_p]
        ) -> None:
            run(launch.contents, [params[i] or 0 for i in range(launch.contents.num_params)])

        callback = _CALLBACK(call)
        self._callbacks.append(callback)
        self._lib.fakecuda_set_callback(function.encode(), callback)

    def set_jit(self, image: bytes | None, info: str = "") -> None:
        """PTX compiles to `image` (None: to itself), and the compiler says `info`."""
        self._lib.fakecuda_set_jit(image, ctypes.c_size_t(len(image or b"")), info.encode())

    def fail_jit(self, code: int, error: str) -> None:
        """PTX does not compile: `code`, and `error` in the log."""
        self._lib.fakecuda_fail_jit(code, error.encode())

    # -- what happened
    def calls(self, name: str) -> int:
        """How often the driver function `name` was called."""
        return int(self._lib.fakecuda_calls(name.encode()))

    @property
    def all_calls(self) -> int:
        """How often any driver function was called."""
        return int(self._lib.fakecuda_all_calls())

    def reset_counts(self) -> None:
        """Forget calls and launches so far."""
        self._lib.fakecuda_reset_counts()

    @property
    def launch_count(self) -> int:
        """Launches that the driver took."""
        return int(self._lib.fakecuda_launch_count())

    def record(self, on: bool) -> None:
        """Whether launches are kept (they are counted either way)."""
        self._lib.fakecuda_record(int(on))

    def launches(self) -> Iterator[Launch]:
        """The recorded launches, oldest first."""
        for index in range(int(self._lib.fakecuda_recorded())):
            yield self.launch(index)

    def launch(self, index: int = -1) -> Launch:
        """Recorded launch `index` (-1: the last)."""
        recorded = int(self._lib.fakecuda_recorded())
        index = index + recorded if index < 0 else index
        raw = _Launch()
        if not self._lib.fakecuda_get_launch(ctypes.c_long(index), ctypes.byref(raw)):
            raise IndexError(f"launch {index} of {recorded}")
        params: list[bytes] = []
        buffer = ctypes.create_string_buffer(32768)
        for param in range(raw.num_params):
            size = self._lib.fakecuda_get_param(
                ctypes.c_long(index), param, buffer, ctypes.c_size_t(len(buffer))
            )
            params.append(buffer.raw[:size])
        attributes = (bytes(raw.attributes[i]) for i in range(raw.numAttributes))
        return Launch(
            name=raw.name.decode(),
            gridDim=tuple(raw.gridDim),
            blockDim=tuple(raw.blockDim),
            sharedMemBytes=raw.sharedMemBytes,
            stream=raw.stream,
            device=raw.device,
            thread=raw.thread,
            attributes={int.from_bytes(a[:4], "little"): a[8:] for a in attributes},
            params=tuple(params) if raw.num_params >= 0 else None,
        )

    @property
    def capture_violations(self) -> int:
        """Calls that would have ended a graph capture of the process."""
        return int(self._lib.fakecuda_capture_violations())

    @property
    def live_allocations(self) -> int:
        """Device allocations not freed."""
        return int(self._lib.fakecuda_live_allocations())

    @property
    def live_host_allocations(self) -> int:
        """Page-locked host allocations not freed."""
        return int(self._lib.fakecuda_live_host_allocations())

    def live(self, kind: str) -> int:
        """Live 'contexts', 'streams', 'events', 'pools' or 'libraries'."""
        return int(self._lib.fakecuda_live(_KINDS.index(kind)))

    @property
    def last_free_stream(self) -> int:
        """The stream of the last cuMemFreeAsync."""
        return int(self._lib.fakecuda_last_free_stream() or 0)

    @property
    def context_depth(self) -> int:
        """Contexts on the calling thread's stack."""
        return int(self._lib.fakecuda_context_depth())
