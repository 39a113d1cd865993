"""`read_fatbin`: the frame of a fatbin. The images inside are unpacked, but not read."""

from __future__ import annotations

import struct

from ..errors import CubinCorruptError
from .elf import corrupt, unread_architecture
from .model import FatbinEntry, FatbinInfo
from .unpack import LZ4, ROOM, ZSTD, unpack

MAGIC = 0xBA55ED50

_HEADER = struct.Struct("<IHHQ")
# kind, version, header bytes, payload bytes, compressed bytes, options offset, minor, major, SM,
# name offset, name bytes, flags, zero (not for LTO code), uncompressed bytes
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")

_KINDS = {1: "ptx", 2: "cubin", 8: "ltoir"}
_ARCH_SPECIFIC, _FAMILY_SPECIFIC = 0x100000, 0x200000
_MAX_HEADER_BYTES = 1 << 16
_MAX_IMAGE_BYTES = 1 << 32


def read_fatbin(image: bytes) -> FatbinInfo:
    """Check the frame of a fatbin and list its images.

    Args:
        image: the whole file.

    Returns: one entry an image. `image` of an entry is None when only the driver can unpack it, or
        it is large, or it is not what its header says: `unread` has the reason then. A cubin there
        is not validated: pass it to `read_cubin` before trusting it.
    Raises: CubinCorruptError when the frame is wrong, with the offset: no entry can be found then.
    """
    image = bytes(image)
    if len(image) < 16:
        corrupt(f"truncated: {len(image)} bytes, a fatbin header takes 16", len(image))
    magic, version, header_bytes, size = _HEADER.unpack_from(image)
    if magic != MAGIC:
        corrupt(f"not a fatbin: it starts with {magic:#010x}, not with {MAGIC:#010x}", 0)
    if version != 1 or header_bytes != 16:
        corrupt(f"fatbin of version {version} with a header of {header_bytes} bytes", 4)
    if size != len(image) - 16:
        what = "truncated" if size > len(image) - 16 else "trailing bytes"
        corrupt(f"{what}: the fatbin has {len(image) - 16} bytes of images and says {size}", 8)
    entries = []
    at, room = 16, dict(ROOM)
    while at < len(image):
        entry, at = _read_entry(image, at, room)
        entries.append(entry)
    if not entries:
        corrupt("the fatbin holds no image", 16)
    return FatbinInfo(tuple(entries))


def _read_entry(image: bytes, at: int, room: dict[int, int]) -> tuple[FatbinEntry, int]:
    """The entry at `at` and the offset of the next one; `room` is what may still be unpacked."""
    if at + _ENTRY.size > len(image):
        corrupt("the fatbin ends within an entry's header", at)
    (
        kind,
        version,
        header_bytes,
        size,
        packed,
        options,
        minor,
        major,
        sm,
        name,
        name_bytes,
        flags,
        zero,
        unpacked,
    ) = _ENTRY.unpack_from(image, at)
    if not _ENTRY.size <= header_bytes <= _MAX_HEADER_BYTES or header_bytes % 8:
        corrupt(f"fatbin entry with a header of {header_bytes} bytes", at + 4)
    if size % 8 or not size or size > len(image) - at - header_bytes:
        corrupt(f"fatbin entry of {size} bytes reaches beyond the end", at + 8)
    if options > header_bytes or name > header_bytes or name_bytes > header_bytes - name:
        corrupt("fatbin entry whose name or options lie outside its header", at + 20)
    unread = _unknown(kind, version, sm, major, minor, zero)
    method = flags & (LZ4 | ZSTD)
    if (
        bool(method) != bool(unpacked)
        or bool(method) != bool(packed)
        or method == LZ4 | ZSTD
        or packed > size
        or unpacked > _MAX_IMAGE_BYTES
    ):
        corrupt(
            f"fatbin entry of {size} bytes, {packed} compressed, {unpacked} uncompressed", at + 16
        )
    start = at + header_bytes
    payload, damaged = None, False
    try:
        if not unread and not method:
            payload = image[start : start + size]
        elif not unread and unpacked <= room[method]:
            payload = unpack(image[start : start + packed], method, unpacked, start)
            room[method] -= unpacked
        if payload is not None and kind == 2 and payload[:4] != b"\x7fELF":
            corrupt("a fatbin entry for a cubin holds no ELF image", start)
    except CubinCorruptError as error:
        payload, unread, damaged = None, str(error), True
    if payload is not None and kind == 1:
        payload = payload.rstrip(b"\0")
    entry = FatbinEntry(
        kind=_KINDS.get(kind, f"kind {kind}"),
        compute_capability=divmod(sm, 10),
        suffix="a" if flags & _ARCH_SPECIFIC else "f" if flags & _FAMILY_SPECIFIC else "",
        version=(major, minor),
        compressed=bool(method),
        size_bytes=unpacked if method else size,
        image=payload,
        unread=unread,
        damaged=damaged,
    )
    return entry, start + size


def _unknown(kind: int, version: int, sm: int, major: int, minor: int, zero: int) -> str:
    """Why an entry whose place is sound is not read, or ''."""
    if kind not in _KINDS or version != 0x101:
        return f"an entry of kind {kind}, version {version:#x}: neither PTX (1) nor cubin (2)"
    if _KINDS[kind] == "ltoir":
        return "link-time code: nvlink makes a cubin of it"
    if zero or major > 20 or minor > 20:
        return f"an entry for sm_{sm}, version {major}.{minor}, of no known form"
    return unread_architecture(sm) if kind == 2 else ""
