"""The child process of a probe: loads the image on stdin, and functions of it.

Run as `python -m kernel_hub._probe DEVICE NAME…`, without names for every function; exit 0 means
the driver survived and took it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import byref, c_uint, c_void_p

from . import driver


def main(device: int, names: Sequence[str]) -> int:
    """Load stdin's image on `device` and look up `names`."""
    image = sys.stdin.buffer.read()
    cuda = driver.get()
    library, function = c_void_p(), c_void_p()
    with cuda.on_device(device):
        cuda.call("cuLibraryLoadData", byref(library), image, None, None, 0, None, None, 0)
        for kernel in _named(cuda, library, names) if names else _all(cuda, library):
            cuda.call("cuKernelGetFunction", byref(function), kernel)
            if cuda.has("cuFuncLoad"):
                cuda.call("cuFuncLoad", function)
        cuda.call("cuLibraryUnload", library)
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
