"""The ELF frame of a cubin: header, section headers, program headers, and the layout of the file.

Everything a compiler writes here is canonical, so everything is checked for equality, not for
plausibility. Knows no CUDA section by name beyond the first three.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from ..errors import CubinCorruptError

PROGBITS, SYMTAB, STRTAB, RELA, NOTE, NOBITS, REL = 1, 2, 3, 4, 7, 8, 9
MERCURY_NOBITS = 0x70000015  # reserved shared memory beside Mercury code
# From here on cubins carry a second, intermediate code; kernel_hub inspects them, never loads them.
MERCURY_SM = 100
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR = 1, 2, 4

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")

_ABIS = {(0x33, 7), (0x41, 8)}
_KNOWN_SM = {70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121}
_OLD_SM = {20, 21, 30, 32, 35, 37, 50, 52, 53, 60, 61, 62}
_MACHINES = {
    3: "x86",
    40: "Arm",
    62: "x86-64",
    183: "AArch64",
    224: "AMD GPU",
    243: "RISC-V",
    247: "BPF",
}
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
    """A cubin whose frame is sound: every section lies inside `image`."""

    image: bytes
    os_abi: int
    abi_version: int
    version: int
    sm: int
    arch_flag: bool
    sections: tuple[Section, ...]
    by_name: dict[str, Section]


def corrupt(message: str, offset: int | None = None) -> NoReturn:
    """Raise the package's one error."""
    raise CubinCorruptError(message, offset=offset)


def align_up(value: int, align: int) -> int:
    """`value` rounded up to a multiple of the power of two `align`."""
    return (value + align - 1) & -align


def read_elf(image: bytes) -> Elf:
    """Check header, tables and layout of `image`; what comes back is safe to index."""
    header = _read_header(image)
    os_abi, abi_version, version, flags, shoff, shnum = header
    sm, arch_flag = _read_flags(flags, os_abi)
    raw = list(_SECTION.iter_unpack(image[shoff : shoff + 64 * shnum]))
    sections = _name_sections(image, raw, shoff)
    phoff = shoff + 64 * shnum
    segments = _read_segments(image, phoff)
    if sm < MERCURY_SM:
        _check_layout(image, sections, shoff)
        _check_segments(sections, segments, phoff, sm)
    else:
        _check_bounds(sections, segments, shoff, len(image))
    by_name = {section.name: section for section in sections}
    if len(by_name) != shnum:
        corrupt("two sections have the same name", shoff)
    return Elf(image, os_abi, abi_version, version, sm, arch_flag, sections, by_name)


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
    if (entry, ehsize, phentsize, shentsize, shstrndx) != (0, 64, 56, 64, 1):
        corrupt(
            "ELF header: entry point, header sizes or string table index are not those of a cubin",
            24,
        )
    if shnum < 4 or phnum < 2 or shoff % 8 or shoff < 64:
        corrupt(
            f"ELF header: {shnum} sections at {shoff:#x}, {phnum} segments: no cubin has that", 40
        )
    if phoff != shoff + 64 * shnum:
        corrupt(f"program headers at {phoff:#x} do not follow the section headers", 32)
    end = phoff + 56 * phnum
    if end != len(image):
        what = "truncated" if end > len(image) else "trailing bytes"
        corrupt(f"{what}: {len(image)} bytes, the tables end at {end}", min(end, len(image)))
    return ident[7], ident[8], version, flags, shoff, shnum


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
        corrupt(f"built for sm_{sm}: architectures before sm_70 are not read", 48)
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


def _check_layout(image: bytes, sections: Sequence[Section], shoff: int) -> None:
    """Sections follow each other up to the section headers, with zeroed alignment padding alone."""
    cursor = 64
    for section in sections[1:]:
        align = section.align
        if align < 1 or align & (align - 1) or align > 1 << 16:
            corrupt(f"section {section.name}: alignment {align}", section.header_offset + 48)
        expected = align_up(cursor, align)
        # Names that were dropped leave a hole after .shstrtab: the only gap a toolkit writes.
        if section.offset != expected and not (section.number == 2 and section.offset > expected):
            corrupt(
                f"section {section.name} lies at {section.offset:#x}, expected {expected:#x}",
                section.header_offset + 24,
            )
        end = section.offset + (0 if section.type == NOBITS else section.size)
        if end > shoff:
            corrupt(
                f"section {section.name} ends at {end:#x}, the section headers start at {shoff:#x}",
                section.header_offset + 32,
            )
        if (
            section.offset > cursor
            and image.count(0, cursor, section.offset) != section.offset - cursor
        ):
            corrupt(f"padding before section {section.name} is not zero", cursor)
        cursor = end
    if align_up(cursor, 8) != shoff or image.count(0, cursor, shoff) != shoff - cursor:
        corrupt(
            f"section headers at {shoff:#x}, but the last section ends at {cursor:#x}",
            40,
        )


def _check_bounds(
    sections: Sequence[Section], segments: list[Segment], shoff: int, size: int
) -> None:
    """All that is checked of the layout from sm_100 on: nothing points outside the file."""
    for section in sections:
        if (
            section.type != NOBITS
            and section.type != MERCURY_NOBITS
            and section.offset + section.size > shoff
        ):
            corrupt(
                f"section {section.name} ends beyond the section headers",
                section.header_offset + 32,
            )
    for segment in segments:
        if segment.offset + segment.file_size > size:
            corrupt("a program header ends beyond the file", segment.header_offset)


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


def _check_segments(
    sections: Sequence[Section], segments: list[Segment], phoff: int, sm: int
) -> None:
    """PT_PHDR and its PT_LOAD cover the program headers; the other PT_LOADs split the sections."""
    size = 56 * len(segments)
    first = segments[0]
    if first[:5] != (6, first.flags, phoff, size, size) or first.flags not in (4, 5):
        corrupt(
            "the first program header does not describe the program headers", first.header_offset
        )
    loads = segments[1:]
    own = [load for load in loads if load[:5] == (1, first.flags, phoff, size, size)]
    if len(own) != 1 or own[0] not in (loads[0], loads[-1]):
        corrupt("the program headers are not loaded exactly once", first.header_offset)
    loads.remove(own[0])

    allocated = [section for section in sections if section.flags & SHF_ALLOC]
    if allocated and allocated[0].number + len(allocated) != len(sections):
        corrupt(
            f"section {sections[-1].name} is not allocated but lies after one that is",
            allocated[0].header_offset,
        )
    position = 0
    for load in loads:
        position = _check_load(load, allocated, position, sm)
    if position != len(allocated):
        corrupt(
            f"section {allocated[position].name} is in no segment",
            allocated[position].header_offset,
        )


def _check_load(load: Segment, allocated: list[Section], position: int, sm: int) -> int:
    """Check one PT_LOAD against the sections from `position` on; returns the position after it."""
    if load.type != 1 or position == len(allocated) or load.offset != allocated[position].offset:
        corrupt("a program header loads what is no section", load.header_offset)
    writable = allocated[position].flags & SHF_WRITE
    flags = 6 if writable else 5 if sm < 90 else 4
    end = (
        load.offset
    )  # the file offset where the last section ends (or lies, when it takes no bytes)
    memory = load.file_size
    in_memory = False
    for section in allocated[position:]:
        if section.flags & SHF_WRITE != writable:
            break
        if section.type == NOBITS:
            grown = align_up(memory, section.align) + section.size
            if grown > load.memory_size:
                break
            in_memory, memory, end = True, grown, section.offset
        elif in_memory or section.offset + section.size - load.offset > load.file_size:
            break
        else:
            end = section.offset + section.size
        flags |= (section.flags & SHF_EXECINSTR) >> 2
        position += 1
    if memory != load.memory_size or load.flags != flags or load.offset + load.file_size != end:
        corrupt(
            "a program header does not cover whole sections, or with the wrong rights",
            load.header_offset,
        )
    return position
