"""Each kind of damage is refused with its own words; what is unknown but in bounds is named."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kernel_hub.cubin import image_kind, read_cubin
from kernel_hub.cubin.elf import Section, read_elf
from kernel_hub.errors import CubinCorruptError

DATA = Path(__file__).parent / "data"
SM90 = (DATA / "features_sm90.cubin").read_bytes()
SM80 = (DATA / "features_sm80.cubin").read_bytes()
LINKED = (DATA / "linked_sm90.cubin").read_bytes()
ATOMICS = (DATA / "genuine_sm90.cubin").read_bytes()
FIRST_TEXT = next(part for part in read_elf(SM90).sections if part.name.startswith(".text."))
UNKNOWN_SECTION = SM90.replace(b".nv.callgraph\0", b".nv.callgriph\0")


def put(image: bytes, offset: int, form: str, *values: int) -> bytes:
    data = struct.pack("<" + form, *values)
    assert image[offset : offset + len(data)] != data
    return image[:offset] + data + image[offset + len(data) :]


def section(name: str, image: bytes = SM90) -> Section:
    return read_elf(image).by_name[name]


def header_of(name: str, field: int, form: str, value: int, image: bytes = SM90) -> bytes:
    return put(image, section(name, image).header_offset + field, form, value)


def record(name: str, code: int, image: bytes = SM90) -> int:
    """Offset of the first `.nv.info` record with that code."""
    at = section(name, image).offset
    while image[at + 1] != code:
        at += 4 + (struct.unpack_from("<H", image, at + 2)[0] if image[at] == 4 else 0)
    return at


def symbol(name: str, image: bytes = SM90) -> int:
    """Offset of the entry of a symbol."""
    strings, table = section(".strtab", image), section(".symtab", image)
    for at in range(table.offset, table.offset + table.size, 24):
        start = strings.offset + struct.unpack_from("<I", image, at)[0]
        if image[start : image.index(b"\0", start)] == name.encode():
            return at
    raise KeyError(name)


def content(name: str, skip: int, form: str, value: int, image: bytes = SM90) -> bytes:
    return put(image, section(name, image).offset + skip, form, value)


def info(name: str, code: int, skip: int, form: str, value: int) -> bytes:
    return put(SM90, record(name, code) + skip, form, value)


def entry(name: str, skip: int, form: str, value: int) -> bytes:
    return put(SM90, symbol(name) + skip, form, value)


def relocation(skip: int, form: str, value: int) -> bytes:
    return content(".rela.text.caller", skip, form, value, LINKED)


WRONG_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not an ELF image"),
    "text": (b"hello", "not an ELF image: it starts with 68 65 6c 6c"),
    "zeros": (bytes(4096), "not an ELF image"),
    "magic alone": (b"\x7fELF", "truncated: 4 bytes"),
    "header alone": (SM90[:64], "truncated"),
    "two bytes short": (SM90[:-2], "truncated"),
    "one byte long": (SM90 + b"\0", "trailing bytes"),
    "x86-64 program": (put(SM90, 18, "H", 62), "machine 62 (x86-64), not for CUDA"),
    "Arm program": (put(SM90, 18, "H", 183), "AArch64"),
    "big-endian": (put(SM90, 5, "B", 2), "big-endian"),
    "32-bit": (put(SM90, 4, "B", 1), "not a 64-bit ELF"),
    "relocatable": (put(SM90, 16, "H", 1), "relocatable object (link it"),
    "extensible": (put(SM90, 16, "H", 0xFF00), "extensible whole program"),
    "shared library": (put(SM90, 16, "H", 3), "shared library"),
    "unknown ABI": (put(SM90, 8, "B", 9), "unknown cubin ABI: OSABI 0x41, version 9"),
    "older architecture": (put(SM90, 48, "I", 0x06003D04), "sm_61, an architecture before sm_70"),
    "no architecture": (put(SM90, 48, "I", 0x0600FF04), "name no known architecture"),
    "entry point": (put(SM90, 24, "Q", 64), "entry point"),
    "no sections": (put(SM90, 60, "H", 0), "no cubin has that"),
    "more sections": (put(SM90, 60, "H", 0xFFFF), "do not follow"),
    "section table beyond the end": (put(SM90, 40, "Q", 1 << 62), "do not follow"),
    "program headers elsewhere": (put(SM90, 32, "Q", 64), "do not follow"),
}  # fmt: skip

DAMAGED: dict[str, tuple[bytes, str]] = {
    "section name": (header_of(".text.scale", 0, "I", 3), "no string's start"),
    "section type": (header_of(".text.scale", 4, "I", 8), ""),
    "section flags": (header_of(".nv.info", 8, "Q", 2), ""),
    "section address": (header_of(".text.scale", 16, "Q", 64), "cubins have none"),
    "section offset": (header_of(".text.scale", 24, "Q", 1 << 40), "expected 0x"),
    "section size": (header_of(".text.scale", 32, "Q", 1 << 63), "section headers start at"),
    "section overlap": (header_of(".nv.info", 32, "Q", 4), "expected 0x"),
    "section link": (header_of(".nv.info", 40, "I", 2), "linked to section 2"),
    "section owner": (header_of(".nv.info.scale", 44, "I", 1), "not to the one in its name"),
    "section alignment": (header_of(".nv.info.scale", 48, "Q", 3), "alignment 3"),
    "section alignment 0": (header_of(".nv.info.scale", 48, "Q", 0), "alignment 0"),
    "entry size": (header_of(".nv.callgraph", 56, "Q", 0), "entries of 0 bytes"),
    "padding": (put(SM90, FIRST_TEXT.offset - 1, "B", 1), "padding"),
    "program header": (put(SM90, len(SM90) - 56 + 32, "Q", 1 << 40), "beyond the file"),
    "program header's memory": (put(SM90, len(SM90) - 56 + 40, "Q", 1 << 40), "beyond the file"),
    "string table": (content(".strtab", 0, "B", 65), "does not start and end with NUL"),
    "control character": (content(".strtab", 2, "B", 7), "byte 0x07"),
    "symbol name": (entry("scale", 0, "I", 1 << 30), "out of range"),
    "symbol section": (entry("scale", 6, "H", 0xFFF1), "out of range"),
    "symbol size": (entry("scale", 16, "Q", 1 << 63), "reaches beyond"),
    "symbol value": (entry("scale", 8, "Q", 16), ""),
    "kernel elsewhere": (entry("scale", 6, "H", section(".text.calls").number), ""),
    "variable beyond": (entry("table", 16, "Q", 257), "reaches beyond"),
    "code's function": (header_of(".text.scale", 44, "I", 0), "is not its function"),
    "registers": (info(".nv.info", 0x2F, 8, "I", 300), "300 registers"),
    "stack": (info(".nv.info", 0x11, 8, "I", 1 << 20), "bytes of stack"),
    "info symbol": (info(".nv.info", 0x2F, 4, "I", 10**6), "no function here"),
    "info format": (info(".nv.info.scale", 0x17, 0, "B", 3), "format 3, expected 4"),
    "info code": (info(".nv.info.scale", 0x1B, 1, "B", 2), "no register limit"),
    "info length": (info(".nv.info.scale", 0x17, 2, "H", 0xFFFF), "cut short"),
    "info payload": (info(".nv.info.scale", 0x17, 2, "H", 8), "payload of 8 bytes"),
    "ordinal": (info(".nv.info.scale", 0x17, 8, "H", 9), "not counted from 0"),
    "param offset": (info(".nv.info.scale", 0x17, 10, "H", 18), "overlaps"),
    "param bytes": (info(".nv.info.scale", 0x19, 2, "H", 32), "24 or 32 bytes"),
    "param bank": (info(".nv.info.scale", 0x0A, 4, "I", 1), "not the constant bank"),
    "param base": (info(".nv.info.scale", 0x0A, 8, "H", 0x160), "parameters at 0x160"),
    "threads": (info(".nv.info.scale", 0x05, 4, "I", 2048), "2048 x 1 x 1 threads"),
    "cluster": (info(".nv.info.clustered", 0x3D, 4, "I", 99), "cluster of 99"),
    "exit": (info(".nv.info.scale", 0x1C, 4, "I", 0x10), "no EXIT"),
    "exit outside": (info(".nv.info.scale", 0x1C, 4, "I", 0x8000), "no instruction"),
    "constant bank": (content(".nv.constant0.scale", 0, "B", 1), "is not empty"),
    "relocation symbol": (relocation(12, "I", 999), "by symbol 999"),
    "relocation offset": (relocation(0, "Q", 1 << 40), "relocation"),
    "relocation addend": (relocation(16, "q", -64), "leads out of"),
    "call graph": (content(".nv.callgraph", 4, "i", -9), "entry (0, -9)"),
    "note": (content(".note.nv.cuinfo", 0, "I", 0xFFFFFFFF), "not NVIDIA's"),
    "note size": (content(".note.nv.tkinfo", 4, "I", 1 << 31), "beyond the section"),
    "toolkit": (content(".note.nv.cuinfo", 28, "H", 9), "toolkit 9"),
    "atomics": (put(ATOMICS, record(".nv.info.add_half", 0x2E, ATOMICS) + 4, "I", 8), "names 0x8"),
    "atomics' register": (
        put(ATOMICS, record(".nv.info.add_half", 0x2E, ATOMICS) + 8, "I", 256), "register 256"),
    "parameters' symbol": (info(".nv.info.scale", 0x0A, 4, "I", 10**6), "not the constant bank"),
}  # fmt: skip

# In bounds, and nothing else in the file says otherwise: what a later toolkit might write.
UNKNOWN: dict[str, tuple[bytes, str]] = {
    "program header kind": (put(SM90, len(SM90) - 56, "I", 2), "that divide the sections as no"),
    "program header's rights": (put(SM90, len(SM90) - 52, "I", 7), "that divide the sections"),
    "program header's place": (put(SM90, len(SM90) - 48, "Q", 64), "that divide the sections"),
    "section": (
        UNKNOWN_SECTION, "section .nv.callgriph, of a kind that no known toolkit writes"),
    "info code": (info(".nv.info.scale", 0x50, 1, "B", 0x6E), "record 0x6e in section .nv.info"),
    "relocation type": (relocation(8, "I", 1), "relocation 1 of code"),
    "relocation actions": (content(".nv.rel.action", 0, "B", 1, SM80), "table that no known"),
    "exact target": (content(".nv.compat", 2, "H", 77), ".nv.compat: record 0x9 with 0x4d"),
    "compatibility": (content(".nv.compat", 5, "B", 0x1E), ".nv.compat: record 0x1e"),
    "ELF flags": (put(SM90, 48, "I", 0x06005A84), "ELF flags 0x6005a84"),
    "symbol type": (entry("table", 4, "B", 0x0D), "symbol of type 13"),
    "variable's st_other": (entry("table", 5, "B", 0x40), "variable with st_other 0x40"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_file(case: str) -> None:
    image, words = WRONG_FILES[case]
    with pytest.raises(CubinCorruptError) as caught:
        read_cubin(image)
    assert words in str(caught.value)


@pytest.mark.parametrize("case", DAMAGED)
def test_damage(case: str) -> None:
    image, words = DAMAGED[case]
    with pytest.raises(CubinCorruptError) as caught:
        read_cubin(image)
    assert words in str(caught.value)
    assert caught.value.offset is None or 0 <= caught.value.offset <= len(image)
    assert caught.value.offset is None or f"{caught.value.offset:#x}" in str(caught.value)


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown(case: str) -> None:
    image, words = UNKNOWN[case]
    (text,) = read_cubin(image).unknown
    assert words in text


@pytest.mark.parametrize("image", [SM90, SM80, LINKED], ids=["sm90", "sm80", "linked"])
def test_every_truncation_is_refused(image: bytes) -> None:
    """But that of the last byte, which is known: CuPy's NVRTC leaves it off."""
    assert read_cubin(image[:-1]) == read_cubin(image)
    for length in range(0, len(image) - 1, 7):
        with pytest.raises(CubinCorruptError):
            read_cubin(image[:length])


def test_missing_function_info() -> None:
    """A kernel whose .nv.info goes by another kernel's name."""
    image = SM90.replace(b".nv.info.scale\0", b".nv.info.scalf\0")
    with pytest.raises(CubinCorruptError, match="not to the one in its name"):
        read_cubin(image)


@pytest.mark.parametrize("image", [b"", b"\0", b"MZ", b"PK\3\4", bytes(100), b"// nothing\n"])
def test_image_kind_of_something_else(image: bytes) -> None:
    with pytest.raises(CubinCorruptError, match="neither cubin, fatbin nor PTX"):
        image_kind(image)
