"""The child process of `Kernel(..., probe=True)`: loads the image on stdin and every function.

Run as `python -m kernel_hub._probe NAME…`; exit 0 means the driver survived and took it.
"""

from __future__ import annotations

import sys
from ctypes import byref, c_void_p

from . import driver


def main(names: list[str]) -> int:
    """Load stdin's image on device 0 and look up `names`."""
    image = sys.stdin.buffer.read()
    cuda = driver.get()
    library, kernel, function = c_void_p(), c_void_p(), c_void_p()
    with cuda.on_device(0):
        cuda.call("cuLibraryLoadData", byref(library), image, None, None, 0, None, None, 0)
        for name in names:
            cuda.call("cuLibraryGetKernel", byref(kernel), library, name.encode())
            cuda.call("cuKernelGetFunction", byref(function), kernel)
            if cuda.has("cuFuncLoad"):
                cuda.call("cuFuncLoad", function)
        cuda.call("cuLibraryUnload", library)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
