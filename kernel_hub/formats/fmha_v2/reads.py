"""What a kernel's machine code reads of its one parameter: bytes, and a struct's fields."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...cubin import read_cubin

_INSTRUCTION_BYTES = 16
_BARRIER, _LOAD_UNIFORM = 0xB1D, 0x7AC  # opcodes: no operand there; one a bit lower
_LOADS = (0xB82, 0xAB9, _LOAD_UNIFORM)  # these say how much they read; any other reads 4 bytes
_LOAD_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 5: 8, 6: 16}
_NARROW = (ctypes.c_bool, ctypes.c_int32, ctypes.c_uint32)  # of which one byte may be read
# The symbol that a device-side assert() calls.
_ASSERT = b"\0__assertfail\0"


class Read(NamedTuple):
    """One operand: its first byte in the struct, and how many it has."""

    offset: int
    size: int


class Field(NamedTuple):
    """A number of a struct, or an array of bytes, and where it is."""

    name: str
    offset: int
    size: int
    kind: Any


def struct_reads(image: bytes, symbol: str, size_bytes: int) -> frozenset[Read]:
    """What a kernel's code reads of its one parameter, a struct of that size."""
    sections = {section.name: section for section in read_cubin(image).sections}
    text, bank = sections[f".text.{symbol}"], sections[f".nv.constant0.{symbol}"]
    start = bank.size_bytes - size_bytes  # parameters end constant bank 0
    code = image[text.offset : text.offset + text.size_bytes]
    found = set()
    for at in range(0, len(code), _INSTRUCTION_BYTES):
        word = int.from_bytes(code[at : at + _INSTRUCTION_BYTES], "little")
        opcode = word & 0xFFF
        # An operand in a constant bank: its form, its bank, the byte in it.
        if opcode == _BARRIER or word >> 9 & 7 not in (3, 5) or word >> 54 & 0x1F:
            continue
        offset = word >> (37 if opcode == _LOAD_UNIFORM else 38) & 0xFFFF
        if offset >= start:
            size = _LOAD_BYTES.get(word >> 73 & 7, 4) if opcode in _LOADS else 4
            found.add(Read(offset - start, size))
    return frozenset(found)


def may_assert(image: bytes) -> bool:
    """Whether code of this cubin was built with assertions that it may run into."""
    return _ASSERT in image


def fields_read(struct: type[ctypes.Structure], reads: frozenset[Read]) -> frozenset[str] | None:
    """The fields that these reads are of, those of a part as `part.field`.

    One read may take several neighbours, or half of 8 bytes. None where one of them begins at no
    field, or as no compiler reads such a field: then it is another struct.
    """
    fields, places = all_fields(struct), _places(struct)
    begun = {read.offset for read in reads}
    found = set()
    for offset, size in reads:
        field = places.get(offset)
        if field is None:
            return None
        into = offset - field.offset
        if size < 4:
            fits = field.kind in _NARROW and into == 0
        elif field.size == 8:  # the upper half is not read alone
            fits = into == 0 or (into == 4 and field.offset in begun)
        else:
            fits = field.kind is ctypes.c_bool or into % 4 == 0
        if not fits:
            return None
        end = offset + size
        found |= {one.name for one in fields if one.offset < end and offset < one.offset + one.size}
    return frozenset(found)


@functools.cache
def all_fields(struct: type[ctypes.Structure]) -> tuple[Field, ...]:
    """Every number of a struct and of its parts."""
    return tuple(_walk(struct, 0, ""))


def _walk(struct: type[ctypes.Structure], base: int, prefix: str) -> Iterator[Field]:
    anonymous: tuple[str, ...] = getattr(struct, "_anonymous_", ())
    for name, kind, *_ in struct._fields_:
        offset: int = base + getattr(struct, name).offset
        if issubclass(kind, ctypes.Structure):
            yield from _walk(kind, offset, "" if name in anonymous else f"{name}.")
        elif not name.startswith("_"):
            yield Field(prefix + name, offset, ctypes.sizeof(kind), kind)


@functools.cache
def _places(struct: type[ctypes.Structure]) -> dict[int, Field]:
    """The field that each byte of a struct is of; padding is of none."""
    return {
        field.offset + byte: field for field in all_fields(struct) for byte in range(field.size)
    }
