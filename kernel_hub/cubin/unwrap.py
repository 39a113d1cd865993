"""`unwrap`: a cubin as CuPy hands it out, whole again."""

from __future__ import annotations

import hashlib

from .elf import announced_bytes

_DIGEST = 40  # hexadecimal SHA-1 of what follows


def unwrap(image: bytes) -> bytes:
    """The cubin in `image`, or `image` itself where it is whole.

    Files of CuPy's kernel cache begin with a digest, and its NVRTC leaves off the last byte, which
    is zero in every cubin.
    """
    if image[_DIGEST : _DIGEST + 4] == b"\x7fELF":
        digest = hashlib.sha1(image[_DIGEST:], usedforsecurity=False).hexdigest()
        if image[:_DIGEST] == digest.encode():
            image = image[_DIGEST:]
    if announced_bytes(image) == len(image) + 1:
        image += b"\0"
    return image
