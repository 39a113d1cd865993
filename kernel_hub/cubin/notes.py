"""Notes and compatibility records: which toolkit built the image, and for which exact target."""

from __future__ import annotations

import struct
from collections.abc import Collection

from .elf import MERCURY_SM, Elf, Section, corrupt

_OWNER = b"NVIDIA Corp\0"
_TKINFO, _CUINFO = 2000, 1000
_CUDA_VERSIONS = range(100, 200)  # 10 x major + minor

_ARCH_SPECIFIC, _FINALIZER = 0x09, 0x0B
# code: (format, payload bytes, values seen) of .nv.compat, 12.8 to 13.5; the first two count up.
_COMPAT: dict[int, tuple[int, int, Collection[int]]] = {
    0x02: (2, 0, range(8)), 0x03: (2, 0, range(8)), 0x05: (2, 0, (5, 6)), 0x06: (2, 0, (0, 1)),
    0x07: (3, 0, (0x101,)), _ARCH_SPECIFIC: (2, 0, (0, 1, 2)), _FINALIZER: (4, 8, ()),
    0x0C: (2, 0, (0, 1, 2)), 0x0D: (3, 0, (0x100, 0x101)), 0x0E: (3, 0, (0x400, 0x440)),
}  # fmt: skip


def read_note(elf: Elf, section: Section) -> int | None:
    """Toolkit version (130 for 13.0) when the notes of the section say it."""
    image, at, end = elf.image, section.offset, section.offset + section.size
    version = None
    while at < end:
        if end - at < 24:
            corrupt(f"{section.name} ends within a note", at)
        name_size, size, kind = struct.unpack_from("<3I", image, at)
        if name_size != 12 or image[at + 12 : at + 24] != _OWNER:
            corrupt(f"{section.name} holds a note that is not NVIDIA's", at)
        if size % 4 or size > end - at - 24:
            corrupt(f"{section.name}: a note of {size} bytes reaches beyond the section", at + 4)
        if kind != (_TKINFO if section.name == ".note.nv.tkinfo" else _CUINFO):
            corrupt(f"{section.name}: note type {kind}", at + 8)
        desc = image[at + 24 : at + 24 + size]
        if section.name == ".note.nv.tkinfo":
            _check_tkinfo(section, desc, at + 24)
        elif section.name == ".note.nv.cuinfo":
            version = _read_cuinfo(elf, section, desc, at + 24)
        at += 24 + size
    return version


def _check_tkinfo(section: Section, desc: bytes, at: int) -> None:
    """u32 version of the note (12.x: of the toolkit), then where five strings start.

    They are object, tool, tool version, branch and arguments.
    """
    strings = desc[24:]
    if len(desc) < 28 or strings[-1]:
        corrupt(f"{section.name}: no room for five strings", at)
    version, *offsets = struct.unpack_from("<6I", desc)
    if (
        version not in (2, *_CUDA_VERSIONS)
        or offsets[0]
        or offsets != sorted(offsets)
        or offsets[-1] >= len(strings)
    ):
        corrupt(f"{section.name}: version {version}, strings at {offsets}", at)
    if any(strings[offset - 1] for offset in offsets[1:]) or 0 in [
        strings[offset] for offset in offsets[1:4]
    ]:
        corrupt(f"{section.name}: its strings do not start where it says", at)


def _read_cuinfo(elf: Elf, section: Section, desc: bytes, at: int) -> int:
    if len(desc) != 8:
        corrupt(f"{section.name}: {len(desc)} bytes, expected 8", at)
    note, virtual, version, zero = struct.unpack("<4H", desc)
    if note != 2 or zero or not 50 <= virtual <= elf.sm or version not in _CUDA_VERSIONS:
        corrupt(
            f"{section.name}: note version {note}, virtual sm_{virtual}, toolkit {version}",
            at,
        )
    return version


def read_compat(elf: Elf, section: Section) -> bool:
    """True for an arch-specific ('a') image. The records have the formats of `.nv.info`.

    Another code than the known ones, or a known one with a new value, is noted.
    """
    image, at, end = elf.image, section.offset, section.offset + section.size
    found: dict[int, int] = {}
    while at < end:
        if at + 4 > end:
            corrupt(".nv.compat ends within a record", at)
        form, code, value = struct.unpack_from("<BBH", image, at)
        shape = _COMPAT.get(code)
        sound = 2 <= form <= 4 and (form != 2 or value <= 255)
        if shape is None:
            elf.note(f".nv.compat: record {code:#x}")
        else:
            sound = form == shape[0] and (form != 4 or value == shape[1])
            if form != 4 and value not in shape[2]:
                elf.note(f".nv.compat: record {code:#x} with {value:#x}")
        length = value if form == 4 else 0
        if not sound or code in found or length % 4 or at + 4 + length > end:
            corrupt(f".nv.compat: record {code:#x} of format {form} with {value:#x}", at)
        if code == _FINALIZER and elf.sm < MERCURY_SM and any(image[at + 4 : at + 4 + length]):
            corrupt(".nv.compat: finalizer options in an image that has nothing to finalize", at)
        found[code] = value
        at += 4 + length
    if elf.sm < MERCURY_SM and _ARCH_SPECIFIC not in found:
        corrupt(
            ".nv.compat does not say whether the image is for one exact architecture",
            section.offset,
        )
    return found.get(_ARCH_SPECIFIC) == 1
