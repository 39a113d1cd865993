"""The ELF frame of a cubin: header, section headers and program headers.

Everything a compiler writes here is canonical, so everything is checked for equality, not for
plausibility. Knows no CUDA section by name beyond the first three.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple, NoReturn

from ..errors import CubinCorruptError

PROGBITS, SYMTAB, STRTAB, RELA, NOTE, NOBITS, REL = 1, 2, 3, 4, 7, 8, 9
MERCURY_NOBITS = 0x70000015  # reserved shared memory beside Mercury code
# From here on cubins carry a second, intermediate code; kernel_hub inspects them, never loads them.
MERCURY_SM = 100

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")

_ABIS = {(0x33, 7), (0x41, 8)}
# 11.0 to 11.4 have no segment for the program headers, 11.5 to 11.7 no program headers at all.
FIRST_SOUND_SEGMENTS = 118
_KNOWN_SM = {70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121}
_OLD_SM = {20, 21, 30, 32, 35, 37, 50, 52, 53, 60, 61, 62}
_MACHINES = {3: "x86", 40: "Arm", 62: "x86-64", 183: "AArch64", 224: "AMD GPU", 247: "BPF"}
_ELF_TYPES = {
    1: "a relocatable object (link it with nvlink first)",
    3: "a shared library",
    4: "a core dump",
}
_UNPRINTABLE = re.compile(rb"[^\x00\x21-\x7e]")


class Section(NamedTuple):
    """One section header, with its name looked up."""

    number: int
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entsize: int
    header_offset: int


class Segment(NamedTuple):
    """One program header."""

    type: int
    flags: int
    offset: int
    file_size: int
    memory_size: int
    header_offset: int


class Elf(NamedTuple):
    """A cubin whose tables are sound."""

    image: bytes
    os_abi: int
    abi_version: int
    version: int
    sm: int
    arch_flag: bool
    shoff: int
    sections: tuple[Section, ...]
    segments: list[Segment]
    by_name: dict[str, Section]

    def is_before(self, toolkit: int) -> bool:
        """Whether a toolkit before `toolkit` (118 for 11.8) wrote it; ABI 8 began with 12.8."""
        return _is_before(self.os_abi, self.version, toolkit)


def corrupt(message: str, offset: int | None = None) -> NoReturn:
    """Raise the package's one error."""
    raise CubinCorruptError(message, offset=offset)


def align_up(value: int, align: int) -> int:
    """`value` rounded up to a multiple of the power of two `align`."""
    return (value + align - 1) & -align


def read_elf(image: bytes) -> Elf:
    """Check header and tables of `image`; where sections lie, `layout` checks."""
    header = _read_header(image)
    os_abi, abi_version, version, flags, shoff, shnum = header
    sm, arch_flag = _read_flags(flags, os_abi)
    raw = list(_SECTION.iter_unpack(image[shoff : shoff + 64 * shnum]))
    sections = _name_sections(image, raw, shoff)
    segments = _read_segments(image, shoff + 64 * shnum)
    by_name = {section.name: section for section in sections}
    if len(by_name) != shnum:
        corrupt("two sections have the same name", shoff)
    return Elf(
        image, os_abi, abi_version, version, sm, arch_flag, shoff, sections, segments, by_name
    )


def unread_architecture(sm: int) -> str:
    """Why no cubin for `sm` is read, or ''."""
    old = "an architecture before sm_70"
    return "" if sm in _KNOWN_SM else old if sm < 70 else "an unknown architecture"


def read_names(image: bytes, offset: int, size: int, what: str) -> dict[int, str]:
    """The strings of a string table by the offset where each starts."""
    table = image[offset : offset + size]
    if size < 1 or table[0] or table[-1]:
        corrupt(f"{what} does not start and end with NUL", offset)
    bad = _UNPRINTABLE.search(table)
    if bad:
        corrupt(
            f"{what} holds the byte {table[bad.start()]:#04x}, which no name has",
            offset + bad.start(),
        )
    names = {}
    at = 0
    for name in table[:-1].decode("ascii").split("\0"):
        names[at] = name
        at += len(name) + 1
    return names


def _read_header(image: bytes) -> tuple[int, int, int, int, int, int]:
    """(os_abi, abi_version, e_version, e_flags, shoff, shnum)"""
    if image[:4] != b"\x7fELF":
        corrupt(
            f"not an ELF image: it starts with {image[:4].hex(' ') or 'nothing'}, "
            "not with 7f 45 4c 46",
            0,
        )
    if len(image) < 64:
        corrupt(f"truncated: {len(image)} bytes, an ELF header takes 64", len(image))
    (
        ident,
        kind,
        machine,
        version,
        entry,
        phoff,
        shoff,
        flags,
        ehsize,
        phentsize,
        phnum,
        shentsize,
        shnum,
        shstrndx,
    ) = _HEADER.unpack_from(image)
    if ident[4] != 2:
        corrupt(f"not a 64-bit ELF (class {ident[4]})", 4)
    if ident[5] != 1:
        corrupt(
            "a big-endian ELF; cubins are little-endian"
            if ident[5] == 2
            else f"ELF byte order {ident[5]}",
            5,
        )
    if machine != 190:
        name = f" ({_MACHINES[machine]})" if machine in _MACHINES else ""
        corrupt(f"an ELF for machine {machine}{name}, not for CUDA (190)", 18)
    if kind != 2:
        corrupt(
            f"ELF type {kind} is {_ELF_TYPES.get(kind, 'unknown')}; a loadable cubin has type 2", 16
        )
    if (ident[7], ident[8]) not in _ABIS:
        corrupt(
            f"unknown cubin ABI: OSABI {ident[7]:#x}, version {ident[8]} (known: 0x33/7, 0x41/8)",
            7,
        )
    if ident[6] != 1 or any(ident[9:]):
        corrupt("ELF identification is not that of a cubin", 6)
    if not (version == 1 if ident[7] == 0x41 else 100 <= version < 200):
        corrupt(f"ELF version {version} belongs to no known toolkit", 20)
    bare = phnum == 0 and _is_before(ident[7], version, FIRST_SOUND_SEGMENTS)
    if (entry, ehsize, phentsize, shentsize, shstrndx) != (0, 64, 0 if bare else 56, 64, 1):
        corrupt(
            "ELF header: entry point, header sizes or string table index are not those of a cubin",
            24,
        )
    if shnum < 4 or (phnum < 2 and not bare) or shoff < 64:
        corrupt(
            f"ELF header: {shnum} sections at {shoff:#x}, {phnum} segments: no cubin has that", 40
        )
    end = shoff + 64 * shnum
    if phoff != (0 if bare else end):
        corrupt(f"program headers at {phoff:#x} do not follow the section headers", 32)
    end += 56 * phnum
    if end != len(image):
        what = "truncated" if end > len(image) else "trailing bytes"
        corrupt(f"{what}: {len(image)} bytes, the tables end at {end}", min(end, len(image)))
    return ident[7], ident[8], version, flags, shoff, shnum


def _is_before(os_abi: int, version: int, toolkit: int) -> bool:
    return os_abi == 0x33 and version < toolkit


def _read_flags(flags: int, os_abi: int) -> tuple[int, bool]:
    """(SM, 'a' flag) of e_flags in the layout of the ABI."""
    if os_abi == 0x41:
        sm, arch_flag = flags >> 8 & 0xFF, bool(flags & 8)
        sound = (
            flags & 0xFF00F1 == 0 and 1 <= flags >> 24 <= 31 and flags & 6 == (4 if sm < 100 else 2)
        )
        sound = sound and not (arch_flag and sm < 90)
    else:
        sm, arch_flag = flags & 0xFF, bool(flags & 0x800)
        virtual = flags >> 16
        sound = (
            flags >> 8 & 0xF7 == 5
            and 50 <= virtual <= sm
            and (virtual in _KNOWN_SM or virtual in _OLD_SM)
        )
    if sm in _OLD_SM:
        corrupt(f"built for sm_{sm}, {unread_architecture(sm)}: that is not read", 48)
    if not sound or sm not in _KNOWN_SM or (arch_flag and sm < 90):
        corrupt(f"ELF flags {flags:#x} name no known architecture", 48)
    return sm, arch_flag


def _name_sections(image: bytes, raw: list[tuple[int, ...]], shoff: int) -> tuple[Section, ...]:
    if any(raw[0]):
        corrupt("section 0 is not empty", shoff)
    _, kind, _, _, offset, size, *_ = raw[1]
    if kind != STRTAB or offset != 64 or offset + size > shoff:
        corrupt("section 1 is not the section name table at 0x40", shoff + 64)
    names = read_names(image, offset, size, ".shstrtab")
    sections = []
    at = shoff
    for index, (name, kind, flags, address, offset, size, link, info, align, entsize) in enumerate(
        raw
    ):
        text = names.get(name)
        if text is None or (index == 0) != (text == ""):
            corrupt(f"section {index}: its name lies at no string's start in .shstrtab", at)
        if address:
            corrupt(f"section {text}: address {address:#x}, cubins have none", at + 16)
        sections.append(
            Section(index, text, kind, flags, offset, size, link, info, align, entsize, at)
        )
        at += 64
    if [section.name for section in sections[1:4]] != [".shstrtab", ".strtab", ".symtab"]:
        corrupt("the first sections are not .shstrtab, .strtab, .symtab", shoff + 64)
    return tuple(sections)


def _read_segments(image: bytes, phoff: int) -> list[Segment]:
    segments = []
    at = phoff
    for (
        kind,
        flags,
        offset,
        virtual,
        physical,
        file_size,
        memory_size,
        align,
    ) in _SEGMENT.iter_unpack(image[phoff:]):
        if virtual or physical or align != 8:
            corrupt("program header: address or alignment is not that of a cubin", at)
        segments.append(Segment(kind, flags, offset, file_size, memory_size, at))
        at += 56
    return segments
