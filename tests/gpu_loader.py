"""A child process that loads images into the CUDA driver, and the handle on it for `gpu_fuzz`.

The child is this file run as a script; it says each driver call before it makes it.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable

START_TIMEOUT_S = 60.0


def child() -> None:
    """Read images from stdin, load each, say each call before it is made and its result after."""
    driver = ctypes.CDLL("libcuda.so.1")
    say = _speaker(sys.stdout.fileno())
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
        ("cuCtxSetCurrent", (context,)),
    ):
        code = getattr(driver, call)(*arguments)
        if code:
            say(f"end {call} {code}")
            return
    say("ready")
    stream = sys.stdin.buffer
    while True:
        head = stream.read(4)
        if len(head) < 4:
            return
        image = stream.read(struct.unpack("<I", head)[0])
        call, code = load(driver, image, say)
        say(f"end {call} {code}")


def _speaker(descriptor: int) -> Callable[[str], int]:
    return lambda line: os.write(descriptor, line.encode() + b"\n")


def load(driver: ctypes.CDLL, image: bytes, say: Callable[[str], int]) -> tuple[str, int]:
    """Load, resolve and unload one image; (the first call that failed or '-', its code)."""
    library, module, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint()
    failed: list[tuple[str, int]] = []

    def do(call: str, *arguments: object) -> bool:
        say(call)
        code = getattr(driver, call)(*arguments)
        if code:
            failed.append((call, code))
        return not code

    zero = ctypes.c_uint(0)
    if not do(
        "cuLibraryLoadData", ctypes.byref(library), image, None, None, zero, None, None, zero
    ):
        return failed[0]
    do("cuLibraryGetModule", ctypes.byref(module), library)
    if do("cuLibraryGetKernelCount", ctypes.byref(count), library):
        kernels = (ctypes.c_void_p * max(1, min(count.value, 4096)))()
        if do("cuLibraryEnumerateKernels", kernels, ctypes.c_uint(len(kernels)), library):
            for kernel in kernels[: count.value]:
                function, value = ctypes.c_void_p(), ctypes.c_int()
                offset, size, index = ctypes.c_size_t(), ctypes.c_size_t(), 0
                handle = ctypes.c_void_p(kernel)
                if not do("cuKernelGetFunction", ctypes.byref(function), handle):
                    continue
                for attribute in (0, 1, 3, 4):
                    do("cuFuncGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), function)
                while index < 64 and not driver.cuKernelGetParamInfo(
                    handle, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
                ):
                    index += 1
    do("cuLibraryUnload", library)
    return failed[0] if failed else ("-", 0)


class Worker:
    """One child process, started again whenever it dies or hangs."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.loads = 0

    def start(self) -> None:
        """Start the child and wait until it has a context."""
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.buffer = b""
        self.loads = 0
        line = self._line(START_TIMEOUT_S)
        if line != "ready":
            self.stop()
            raise SystemExit(f"a child got no context: {line}")

    def stop(self) -> int:
        """Kill the child; its exit status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except OSError:
                pass  # the child is gone, and what was not written with it
        return process.wait()

    def try_image(self, image: bytes) -> tuple[str, str, int]:
        """('accepted' | 'refused' | 'killed' | 'hung', last call, code or signal)."""
        if self.process is None:
            self.start()
        process, call = self.process, "write"
        try:
            process.stdin.write(struct.pack("<I", len(image)) + image)
            process.stdin.flush()
        except OSError:
            return "killed", call, self._status()
        deadline = time.monotonic() + self.timeout_s
        while True:
            line = self._line(deadline - time.monotonic())
            if line is None:
                self.stop()
                return "hung", call, 0
            if line == "":
                return "killed", call, self._status()
            if line.startswith("end "):
                _, call, code = line.split()
                self.loads += 1
                return ("accepted" if code == "0" else "refused"), call, int(code)
            call = line

    def _status(self) -> int:
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass  # still dying; killed below
        return self.stop()

    def _line(self, timeout_s: float) -> str | None:
        """The next line; '' at the end of the child's output, None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                return ""
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()


if __name__ == "__main__":
    child()
