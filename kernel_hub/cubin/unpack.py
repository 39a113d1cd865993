"""`unpack`: one compressed image of a fatbin.

LZ4 (CUDA 11 and 12) is read here, zstd (CUDA 13) by a library where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .elf import corrupt

LZ4, ZSTD = 0x2000, 0x8000
# Bytes of a whole fatbin that are unpacked: LZ4 takes Python 0.2 s a MiB, zstd is compiled code.
ROOM = {LZ4: 4 << 20, ZSTD: 64 << 20}
_PIECE = 1 << 12


def unpack(packed: bytes, method: int, size: int, offset: int) -> bytes | None:
    """The `size` bytes that `packed` stands for; None without a library for that.

    Args:
        method: LZ4 or ZSTD.
        offset: where `packed` lies in the file, for the error.

    Raises: CubinCorruptError when `packed` is no such thing.
    """
    reader = _unpack_lz4 if method == LZ4 else _zstd()
    if reader is None:
        return None
    try:
        image = reader(packed, size)
    except (ValueError, IndexError) as error:
        corrupt(f"a compressed fatbin entry does not unpack: {error}", offset)
    if len(image) != size:
        corrupt(f"a compressed fatbin entry unpacks to {len(image)} bytes, not to {size}", offset)
    return image


@cache
def _zstd() -> Callable[[bytes, int], bytes] | None:
    """`_unpack_lz4` for zstd, by Python 3.14's own module or the package `zstandard`."""
    failure: type[Exception]
    make: Callable[[], Any]
    try:
        from compression import zstd

        make, failure = zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        try:
            import zstandard

            make = zstandard.ZstdDecompressor().decompressobj
            failure = zstandard.ZstdError
        except ImportError:
            return None

    def read(packed: bytes, size: int) -> bytes:
        try:
            return _feed(make(), packed, size)
        except failure as error:
            raise ValueError(error) from None

    return read


def _feed(stream: Any, packed: bytes, size: int) -> bytes:
    """The image, given to `stream` in pieces so that a hostile one does not fill the memory."""
    out = bytearray()
    for at in range(0, len(packed), _PIECE):
        out += stream.decompress(packed[at : at + _PIECE])
        if len(out) > size:
            raise ValueError(f"it goes on after {size} bytes")
    return bytes(out)


def _unpack_lz4(packed: bytes, size: int) -> bytes:
    """An LZ4 block: stretches of literals, each followed by a copy of what came before."""
    out = bytearray()
    at, end = 0, len(packed)
    while at < end:
        token = packed[at]
        at += 1
        length, at = _read_length(packed, at, token >> 4)
        if length > end - at or len(out) + length > size:
            raise ValueError("literals reach beyond the end")
        out += packed[at : at + length]
        at += length
        if at == end:
            break
        distance = packed[at] | packed[at + 1] << 8
        length, at = _read_length(packed, at + 2, token & 15)
        length += 4
        start = len(out) - distance
        if start < 0 or not distance or len(out) + length > size:
            raise ValueError("a copy reaches beyond the image")
        if distance >= length:
            out += out[start : start + length]
        else:  # it repeats what it writes
            piece = bytes(out[start:])
            out += (piece * (length // distance + 1))[:length]
    return bytes(out)


def _read_length(packed: bytes, at: int, length: int) -> tuple[int, int]:
    """A length of four bits and, from 15 on, bytes that add to it; and the offset after them."""
    if length == 15:
        while True:
            more = packed[at]
            at += 1
            length += more
            if more != 255:
                break
    return length, at
