"""The child's half of a probe: loads an image where only this process can be lost by it.

Started by `_probe` with nothing but the standard library and this package to import from; it
imports as little of either as it can.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from ctypes import byref, c_uint, c_void_p

from .. import driver
from ..errors import KernelHubError

OUT_OF_MEMORY = 2  # a CUresult
REFUSED, FULL = 1, 75  # exit codes


def main() -> int:
    """Load stdin's image and look up its functions; says when the context stands, and the end.

    stdin: a line of JSON (device, names of functions or none for all, and the two words to say),
    then the image. An exit code of 0 alone says nothing: any code that runs can give it.
    """
    head = json.loads(sys.stdin.buffer.readline())
    image = sys.stdin.buffer.read()
    library, function = c_void_p(), c_void_p()
    try:
        cuda = driver.get()
        context = cuda.primary_context(head["device"])
        cuda.call("cuCtxSetCurrent", context)
        _say(head["ready"])
        cuda.call("cuLibraryLoadData", byref(library), image, None, None, 0, None, None, 0)
        names = head["names"]
        for kernel in _named(cuda, library, names) if names else _all(cuda, library):
            cuda.call("cuKernelGetFunction", byref(function), kernel)
            if cuda.has("cuFuncLoad"):
                cuda.call("cuFuncLoad", function)
        cuda.call("cuLibraryUnload", library)
    except KernelHubError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return FULL if getattr(error, "code", None) == OUT_OF_MEMORY else REFUSED
    _say(head["survived"])
    return 0


def _say(word: str) -> None:
    os.write(1, word.encode() + b"\n")


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
