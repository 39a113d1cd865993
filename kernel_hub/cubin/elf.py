"""The ELF frame of a cubin: header, section headers and program headers.

Up to sm_90 ptxas and nvlink write it in one canonical form, so everything is checked for equality,
not for plausibility. From sm_100 on, and where the section headers come first, other linkers wrote
it: only bounds are checked, and such an image is never called sound. Knows no CUDA section by name
beyond the first three.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple, NoReturn

from ..errors import CubinCorruptError

PROGBITS, SYMTAB, STRTAB, RELA, NOTE, NOBITS, REL = 1, 2, 3, 4, 7, 8, 9
MERCURY_NOBITS = 0x70000015  # reserved shared memory beside Mercury code
# From here on cubins carry a second, intermediate code, and what is checked is bounds alone.
MERCURY_SM = 100
# (section headers, program headers, how many) of a linker that writes section headers first.
_HEADERS_FIRST = (64, 0, 0)

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")

MAX_NOTES = 16

_ABIS = {(0x33, 7), (0x41, 8)}
# Up to 11.4 and in some builds of 11.8 the program headers have no segment; from 11.5 to 11.7 there
# are none of them.
FIRST_SOUND_SEGMENTS = 118
_KNOWN_SM = {70, 72, 75, 80, 86, 87, 88, 89, 90}  # and all from MERCURY_SM on
_OLD_SM = {20, 21, 30, 32, 35, 37, 50, 52, 53, 60, 61, 62}
_MACHINES = {3: "x86", 40: "Arm", 62: "x86-64", 183: "AArch64", 224: "AMD GPU", 247: "BPF"}
_ELF_TYPES = {
    1: "a relocatable object (link it with nvlink first)",
    3: "a shared library",
    4: "a core dump",
    0xFF00: "an extensible whole program (nvcc -ewp: link it with nvlink first)",
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
    """A cubin whose tables are sound.

    `by_name` has the first section of a name: nvlink keeps functions that are static in two files,
    so names repeat. `unknown` collects what no toolkit known here writes, all of it in bounds.
    """

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
    symtab: Section
    strtab: Section
    unknown: list[str]
    canonical: bool

    def note(self, message: str) -> None:
        """Remember something unknown that is in bounds."""
        if message not in self.unknown and len(self.unknown) < MAX_NOTES:
            self.unknown.append(message)

    def deny(self, message: str, offset: int) -> None:
        """Refuse what ptxas and nvlink do not write; of other linkers it is taken."""
        if self.canonical:
            corrupt(message, offset)

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
    unknown: list[str] = []
    header = _read_header(image, unknown)
    shoff, shnum = header.shoff, header.shnum
    raw = list(_SECTION.iter_unpack(image[shoff : shoff + 64 * shnum]))
    sections = _name_sections(image, raw, header)
    segments = _read_segments(image, header)
    by_name: dict[str, Section] = {}
    for section in sections:
        by_name.setdefault(section.name, section)
    symtab, strtab = by_name.get(".symtab"), by_name.get(".strtab")
    if symtab is None or strtab is None:
        corrupt("no section .symtab or .strtab", shoff)
    return Elf(
        image, header.os_abi, header.abi_version, header.version, header.sm, header.arch_flag,
        shoff, sections, segments, by_name, symtab, strtab, unknown, header.canonical,
    )  # fmt: skip


def announced_bytes(image: bytes) -> int:
    """Where the tables of an ELF image end, by its header: the size of a cubin up to sm_90."""
    if len(image) < 64 or image[:4] != b"\x7fELF":
        return 0
    _, _, _, _, _, phoff, shoff, *_, phnum, _, shnum, _ = _HEADER.unpack_from(image)
    return max(int(phoff) + 56 * int(phnum), int(shoff) + 64 * int(shnum))


def unread_architecture(sm: int) -> str:
    """Why no cubin for `sm` is read, or ''."""
    if sm in _KNOWN_SM or MERCURY_SM <= sm < 200:
        return ""
    return "an architecture before sm_70" if sm < 70 else "an unknown architecture"


class Names:
    """The strings of a string table. Raises CubinCorruptError when it is none."""

    def __init__(self, image: bytes, offset: int, size: int, what: str, canonical: bool) -> None:
        self._table = image[offset : offset + size]
        self._canonical = canonical
        if size < 1 or self._table[0] or self._table[-1]:
            corrupt(f"{what} does not start and end with NUL", offset)
        bad = _UNPRINTABLE.search(self._table)
        if bad:
            corrupt(
                f"{what} holds the byte {self._table[bad.start()]:#04x}, which no name has",
                offset + bad.start(),
            )
        self._known: dict[int, str] = {}
        at = 0
        for name in self._table[:-1].decode("ascii").split("\0"):
            self._known[at] = name
            at += len(name) + 1

    def get(self, at: int) -> str | None:
        """The name that starts at `at`; other linkers share the ends of names."""
        name = self._known.get(at)
        if name is None and not self._canonical and at < len(self._table):
            name = self._table[at : self._table.index(0, at)].decode("ascii")
        return name


class _Header(NamedTuple):
    os_abi: int
    abi_version: int
    version: int
    sm: int
    arch_flag: bool
    phoff: int
    phnum: int
    shoff: int
    shnum: int
    shstrndx: int

    @property
    def canonical(self) -> bool:
        return self.sm < MERCURY_SM and (self.shoff, self.phoff, self.phnum) != _HEADERS_FIRST


def _read_header(image: bytes, unknown: list[str]) -> _Header:
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
    _check_identity(ident, kind, machine)
    os_abi = ident[7]
    if not (version == 1 if os_abi == 0x41 else 90 <= version < 200):
        corrupt(f"ELF version {version} belongs to no known toolkit", 20)
    if 1 < version < 100:
        unknown.append(f"code of CUDA {version / 10:.1f}, which no driver known here was given")
    sm, arch_flag = _read_flags(flags, os_abi, unknown)
    header = _Header(os_abi, ident[8], version, sm, arch_flag, phoff, phnum, shoff, shnum, shstrndx)
    bare = phnum == 0 and _is_before(os_abi, version, FIRST_SOUND_SEGMENTS)
    canonical = header.canonical
    if (entry, ehsize, shentsize) != (0, 64, 64) or (
        phentsize != (0 if bare else 56) or shstrndx != 1 if canonical else shstrndx >= shnum
    ):
        corrupt(
            "ELF header: entry point, header sizes or string table index are not those of a cubin",
            24,
        )
    if shnum < 4 or shoff < 64 or (phnum < 2 and not bare and canonical):
        corrupt(
            f"ELF header: {shnum} sections at {shoff:#x}, {phnum} segments: no cubin has that", 40
        )
    if not canonical:
        _check_frame(image, header, unknown)
        return header
    end = shoff + 64 * shnum
    if phoff != (0 if bare else end):
        corrupt(f"program headers at {phoff:#x} do not follow the section headers", 32)
    end += 56 * phnum
    if end != len(image):
        what = "truncated" if end > len(image) else "trailing bytes"
        corrupt(f"{what}: {len(image)} bytes, the tables end at {end}", min(end, len(image)))
    return header


def _check_frame(image: bytes, header: _Header, unknown: list[str]) -> None:
    what = f"code for sm_{header.sm}" if header.sm >= MERCURY_SM else "another linker's layout"
    unknown.append(f"{what}, of which only the bounds are checked")
    for what, at, end in (
        ("section", header.shoff, header.shoff + 64 * header.shnum),
        ("program", header.phoff, header.phoff + 56 * header.phnum),
    ):
        if end > len(image):
            corrupt(f"truncated: {len(image)} bytes, the {what} headers end at {end}", at)


def _check_identity(ident: bytes, kind: int, machine: int) -> None:
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


def _is_before(os_abi: int, version: int, toolkit: int) -> bool:
    return os_abi == 0x33 and version < toolkit


def _read_flags(flags: int, os_abi: int, unknown: list[str]) -> tuple[int, bool]:
    """(SM, 'a' flag) of e_flags in the layout of the ABI; other bits than the known are noted."""
    if os_abi == 0x41:
        sm, arch_flag = flags >> 8 & 0xFF, bool(flags & 8)
        usual = flags & 0xFF00F7 == 4 and 1 <= flags >> 24 <= 31
    else:
        sm, arch_flag = flags & 0xFF, bool(flags & 0x800)
        virtual = flags >> 16
        usual = flags >> 8 & 0xF7 == 5 and 50 <= virtual <= sm
        usual = usual and (virtual in _KNOWN_SM or virtual in _OLD_SM)
    if sm in _OLD_SM:
        corrupt(f"built for sm_{sm}, {unread_architecture(sm)}: that is not read", 48)
    if unread_architecture(sm) or (arch_flag and sm < 90):
        corrupt(f"ELF flags {flags:#x} name no known architecture", 48)
    if not usual and sm < MERCURY_SM:
        unknown.append(f"ELF flags {flags:#x}")
    return sm, arch_flag


def _name_sections(
    image: bytes, raw: list[tuple[int, ...]], header: _Header
) -> tuple[Section, ...]:
    shoff = header.shoff
    if any(raw[0]):
        corrupt("section 0 is not empty", shoff)
    canonical = header.canonical
    _, kind, _, _, offset, size, *_ = raw[header.shstrndx]
    end = shoff if canonical else len(image)
    if kind != STRTAB or (offset != 64 and canonical) or offset + size > end:
        corrupt(
            f"section {header.shstrndx} is not the section name table at 0x40",
            shoff + 64 * header.shstrndx,
        )
    names = Names(image, offset, size, ".shstrtab", canonical)
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
    first = [section.name for section in sections[1:4]]
    if first != [".shstrtab", ".strtab", ".symtab"] and canonical:
        corrupt("the first sections are not .shstrtab, .strtab, .symtab", shoff + 64)
    return tuple(sections)


def _read_segments(image: bytes, header: _Header) -> list[Segment]:
    segments = []
    at = header.phoff
    for (
        kind,
        flags,
        offset,
        virtual,
        physical,
        file_size,
        memory_size,
        align,
    ) in _SEGMENT.iter_unpack(image[at : at + 56 * header.phnum]):
        if (virtual or physical or align != 8) and header.canonical:
            corrupt("program header: address or alignment is not that of a cubin", at)
        segments.append(Segment(kind, flags, offset, file_size, memory_size, at))
        at += 56
    return segments
