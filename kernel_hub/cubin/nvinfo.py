"""The `.nv.info` records: what a kernel takes and uses.

A record is u8 format (1: nothing, 2: u8, 3: u16, 4: u16 length and a payload) and u8 code. Every
code has one format, so a flipped bit in either shows.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from .elf import MERCURY_SM, Elf, Section, corrupt
from .symbols import STT_FUNC, STT_SECTION, Symbol

_RECORD = struct.Struct("<BBH")
_PARAM = struct.Struct("<IHHI")
_PARAM_V2 = struct.Struct("<IHHHBB")
_CBANK = struct.Struct("<IHH")
_TRIPLE = struct.Struct("<3I")

MAX_LOCAL_BYTES = 512 * 1024
UNKNOWN_STACK = 0xFFFFFFFF  # recursion: the depth cannot be known

MAX_THREADS, PARAM_CBANK, EXTERNS, REQNTID = 0x05, 0x0A, 0x0F, 0x10
FRAME_SIZE, MIN_STACK_SIZE, MAX_STACK_SIZE, REGCOUNT = 0x11, 0x12, 0x23, 0x2F
KPARAM_INFO, KPARAM_INFO_V2, CBANK_PARAM_SIZE = 0x17, 0x45, 0x19
MAXREG_COUNT, EXIT_OFFSETS, BRANCH_TARGETS, API_VERSION = 0x1B, 0x1C, 0x34, 0x37
MBARRIER_OFFSETS, NUM_MBARRIERS, NUM_BARRIERS = 0x39, 0x38, 0x4C
CTA_PER_CLUSTER, MAX_CLUSTER_RANK = 0x3D, 0x3F
ATOMIC16_OFFSETS, COPY_OFFSETS = 0x2E, 0x40

# code: (format, exact payload length, or -n for any multiple of n)
_SHAPES: dict[int, tuple[int, int]] = {
    0x04: (1, 0), MAX_THREADS: (4, 12), PARAM_CBANK: (4, 8), EXTERNS: (4, -4), REQNTID: (4, 12),
    FRAME_SIZE: (4, 8), MIN_STACK_SIZE: (4, 8), KPARAM_INFO: (4, 12), CBANK_PARAM_SIZE: (3, 2),
    MAXREG_COUNT: (3, 2), EXIT_OFFSETS: (4, -4), 0x1D: (4, -4), 0x1E: (4, 4), 0x21: (1, 0),
    MAX_STACK_SIZE: (4, 8), 0x25: (4, -4), 0x27: (4, -4), 0x28: (4, -4), 0x29: (4, -4),
    0x2A: (1, 0), 0x2B: (1, 0), ATOMIC16_OFFSETS: (4, -8), REGCOUNT: (4, 8), 0x31: (4, -4),
    BRANCH_TARGETS: (4, -4), 0x35: (1, 0), 0x36: (4, 4), API_VERSION: (4, 4),
    NUM_MBARRIERS: (3, 2), MBARRIER_OFFSETS: (4, -16), CTA_PER_CLUSTER: (4, 12), 0x3E: (1, 0),
    MAX_CLUSTER_RANK: (4, 4), COPY_OFFSETS: (4, -12), 0x41: (1, 0), 0x44: (4, -4), 0x4A: (2, 1),
    KPARAM_INFO_V2: (4, 12), 0x46: (4, -4), 0x47: (4, -4), NUM_BARRIERS: (2, 1), 0x50: (3, 2),
    0x51: (1, 0), 0x52: (1, 0), 0x53: (1, 0), 0x54: (1, 0), 0x55: (4, -4), 0x57: (4, -4),
    0x59: (4, -4), 0x5B: (1, 0), 0x5F: (3, 2), 0x66: (4, 4), 0x6B: (3, 2), 0x6D: (2, 1),
}  # fmt: skip
PER_FUNCTION = {FRAME_SIZE, MIN_STACK_SIZE, MAX_STACK_SIZE, REGCOUNT}
_GLOBAL = PER_FUNCTION | {0x41, 0x53, 0x5F}
# Offsets of instructions in the function's code, ascending.
_OFFSET_LISTS = {EXIT_OFFSETS, 0x1D, 0x25, 0x27, 0x28, 0x31, 0x46, 0x47, 0x57, 0x59}
_OPCODE_EXIT = 0x94D
_MAX_POINTED = 16  # log2
_LAST_CODE = 0x7F


class ParamPlaces(NamedTuple):
    """Where the parameters lie: constant bank offset, bytes, and (offset, size) in order."""

    base: int
    size: int
    params: tuple[tuple[int, int], ...]


class Record(NamedTuple):
    """One record; `value` is an int for formats 1 to 3 and the payload for format 4."""

    code: int
    value: int
    payload: bytes
    offset: int


def read_records(elf: Elf, section: Section) -> list[Record]:
    """Split a section into records; each has the format and length of its code."""
    image, at, end = elf.image, section.offset, section.offset + section.size
    records = []
    while at < end:
        if at + 4 > end:
            corrupt(f"section {section.name} ends within a record", at)
        form, code, value = _RECORD.unpack_from(image, at)
        shape = _SHAPES.get(code)
        if shape is None:
            _check_unknown(elf, section, form, code, value, at)
        elif form != shape[0]:
            corrupt(
                f"section {section.name}: record {code:#x} has format {form}, expected {shape[0]}",
                at,
            )
        payload = b""
        if form == 4:
            if at + 4 + value > end:
                corrupt(
                    f"section {section.name}: record {code:#x} of {value} bytes is cut short",
                    at,
                )
            payload = image[at + 4 : at + 4 + value]
            if shape and (value != shape[1] if shape[1] > 0 else not value or value % -shape[1]):
                corrupt(
                    f"section {section.name}: record {code:#x} has a payload of {value} bytes",
                    at,
                )
            records.append(Record(code, 0, payload, at))
            at += 4 + value
        else:
            if (form == 1 and value) or (form == 2 and value > 255):
                corrupt(f"section {section.name}: record {code:#x} has padding {value:#x}", at)
            records.append(Record(code, value, payload, at))
            at += 4
    return records


def _check_unknown(elf: Elf, section: Section, form: int, code: int, value: int, at: int) -> None:
    """A code no known toolkit writes, in a sound format; Mercury has codes of its own."""
    if not (1 <= code <= _LAST_CODE and 1 <= form <= 4 and (form != 4 or value % 4 == 0)):
        corrupt(
            f"section {section.name}: record {code:#x} of format {form} is of no known kind", at
        )
    if elf.sm < MERCURY_SM:
        elf.note(f"record {code:#x} in section .nv.info")


def read_global_info(
    elf: Elf, section: Section, symbols: list[Symbol]
) -> dict[int, dict[int, int]]:
    """{code: {symbol index: value}} of the records per function: registers, frame, stack."""
    found: dict[int, dict[int, int]] = {code: {} for code in PER_FUNCTION}
    for code, _, payload, at in read_records(elf, section):
        if code not in PER_FUNCTION:
            if code in _SHAPES and code not in _GLOBAL:
                corrupt(f".nv.info: record {code:#x} belongs to a single kernel", at)
            continue
        index, value = struct.unpack("<II", payload)
        if index >= len(symbols) or symbols[index].type != STT_FUNC or not symbols[index].section:
            corrupt(
                f".nv.info: record {code:#x} is for symbol {index}, which is no function here",
                at + 4,
            )
        if code == REGCOUNT:
            sound = value <= 255
        else:
            sound = value <= MAX_LOCAL_BYTES or (value == UNKNOWN_STACK and code != FRAME_SIZE)
        known = found[code].get(index, value)
        # 12.4 gives the stack of a kernel that calls through pointers twice, once without calls.
        if not sound or (known != value and code != MIN_STACK_SIZE):
            corrupt(
                f".nv.info: {value} registers or bytes of stack for {symbols[index].name}", at + 8
            )
        found[code][index] = max(known, value)
    return found


def read_function_info(
    elf: Elf, section: Section, text: Section, symbols: list[Symbol], name: str
) -> tuple[dict[int, Record], ParamPlaces | None]:
    """The records of one function by code, each checked, and its parameters, if it has any."""
    records: dict[int, Record] = {}
    params: dict[int, tuple[int, int]] = {}
    for record in read_records(elf, section):
        code = record.code
        if code in (KPARAM_INFO, KPARAM_INFO_V2):
            ordinal, offset, size = _read_param(section, record)
            if params.setdefault(ordinal, (offset, size)) != (offset, size):
                corrupt(f"{section.name}: two parameters {ordinal}", record.offset)
            continue
        if code in records:
            corrupt(f"{section.name}: a second record {code:#x}", record.offset)
        records[code] = record
        if code in _OFFSET_LISTS:
            _check_offsets(elf, section, text, record)
        elif code in _CHECKS:
            _CHECKS[code](section, text, symbols, record)
    if API_VERSION not in records and not elf.is_before(111):
        corrupt(f"{section.name} has no toolkit version", section.offset)
    return records, _check_params(elf, section, records, params, symbols, name)


def _read_param(section: Section, record: Record) -> tuple[int, int, int]:
    if record.code == KPARAM_INFO:
        index, ordinal, offset, bits = _PARAM.unpack(record.payload)
        size, align, sound = bits >> 18, bits & 0xFF, bits & 0x3F000 == 0x1F000
    else:
        index, ordinal, offset, size, align, _ = _PARAM_V2.unpack(record.payload)
        sound = True
    sound = sound and align <= _MAX_POINTED  # to what a pointer is aligned, where PTX says so
    if index or not sound or not size:
        corrupt(f"{section.name}: parameter {ordinal} has an impossible description", record.offset)
    return ordinal, offset, size


def _check_params(
    elf: Elf,
    section: Section,
    records: dict[int, Record],
    params: dict[int, tuple[int, int]],
    symbols: list[Symbol],
    name: str,
) -> ParamPlaces | None:
    bank, total = records.get(PARAM_CBANK), records.get(CBANK_PARAM_SIZE)
    if bank is None or total is None:
        if bank or total or params:
            corrupt(f"{section.name}: parameters without their constant bank", section.offset)
        return None
    index, base, size = _CBANK.unpack(bank.payload)
    if index >= len(symbols) or symbols[index][1:4] != (".nv.constant0." + name, 0, STT_SECTION):
        elf.deny(
            f"{section.name}: symbol {index} is not the constant bank of {name}", bank.offset + 4
        )
    if size != total.value:
        corrupt(f"{section.name}: parameters take {size} or {total.value} bytes", bank.offset + 10)
    if base not in param_bases(elf.sm):
        corrupt(f"{section.name}: parameters at {base:#x} of the constant bank", bank.offset + 8)
    if sorted(params) != list(range(len(params))):
        corrupt(
            f"{section.name}: parameters {sorted(params)[:20]} are not counted from 0",
            section.offset,
        )
    ordered = tuple(params[ordinal] for ordinal in range(len(params)))
    end = 0
    for offset, length in ordered:
        if offset < end:
            corrupt(
                f"{section.name}: the parameter at {offset} overlaps the one before", section.offset
            )
        end = offset + length
    if end != size:
        corrupt(f"{section.name}: the parameters end at {end}, not at {size}", bank.offset + 10)
    return ParamPlaces(base, size, ordered)


def param_bases(sm: int) -> tuple[int, ...]:
    """Where parameters may start in constant bank 0 (the second: more than 4 KiB of them)."""
    return (0x160, 0x1A80) if sm < 90 else (0x210,) if sm < 100 else (0x380,)


def _check_offsets(elf: Elf, section: Section, text: Section, record: Record) -> None:
    last = -1
    for (offset,) in struct.iter_unpack("<I", record.payload):
        if offset % 16 or offset >= text.size or offset <= last:
            corrupt(
                f"{section.name}: record {record.code:#x} names {offset:#x}, no instruction",
                record.offset,
            )
        if record.code == EXIT_OFFSETS:
            at = text.offset + offset
            if (elf.image[at] | elf.image[at + 1] << 8) & 0xFFF != _OPCODE_EXIT:
                corrupt(f"{section.name}: the instruction at {offset:#x} is no EXIT", at)
        last = offset


def _check_threads(section: Section, text: Section, symbols: list[Symbol], record: Record) -> None:
    x, y, z = _TRIPLE.unpack(record.payload)
    if not (1 <= x <= 1024 and 1 <= y <= 1024 and 1 <= z <= 64 and x * y * z <= 1024):
        corrupt(f"{section.name}: a block of {x} x {y} x {z} threads", record.offset + 4)


def _check_cluster(section: Section, text: Section, symbols: list[Symbol], record: Record) -> None:
    x, y, z = _TRIPLE.unpack(record.payload)
    if min(x, y, z) < 1 or max(x, y, z) > 16 or x * y * z > 16:
        corrupt(f"{section.name}: a cluster of {x} x {y} x {z} blocks", record.offset + 4)


def _check_externs(section: Section, text: Section, symbols: list[Symbol], record: Record) -> None:
    for (index,) in struct.iter_unpack("<I", record.payload):
        if index >= len(symbols) or symbols[index].type != STT_FUNC:
            corrupt(f"{section.name}: extern symbol {index} is no function", record.offset)


def _check_branches(section: Section, text: Section, symbols: list[Symbol], record: Record) -> None:
    """Entries of u32 instruction, u32 0, u32 count and that many targets."""
    words = [word for (word,) in struct.iter_unpack("<I", record.payload)]
    at = 0
    while at < len(words):
        head = words[at : at + 3]
        count = head[2] if len(head) == 3 else len(words)
        if at + 3 + count > len(words) or head[1]:
            corrupt(f"{section.name}: a list of branch targets is cut short", record.offset)
        for offset in (head[0], *words[at + 3 : at + 3 + count]):
            if offset % 16 or offset >= text.size:
                corrupt(
                    f"{section.name}: a branch to {offset:#x}, outside {text.name}", record.offset
                )
        at += 3 + count


def _check_instructions(
    section: Section, text: Section, symbols: list[Symbol], record: Record
) -> None:
    """Entries that begin with an instruction's offset; those of 16-bit atomics name a register."""
    width = -_SHAPES[record.code][1]
    for at in range(0, len(record.payload), width):
        offset, value = struct.unpack_from("<II", record.payload, at)
        too_far = record.code == ATOMIC16_OFFSETS and value > 255
        if offset % 16 or offset >= text.size or too_far:
            corrupt(
                f"{section.name}: record {record.code:#x} names {offset:#x}, register {value}",
                record.offset,
            )


def _check_value(section: Section, text: Section, symbols: list[Symbol], record: Record) -> None:
    value = record.value if not record.payload else struct.unpack("<I", record.payload)[0]
    low, high = _VALUES[record.code]
    if not low <= value <= high and not (record.code == 0x1E and value == UNKNOWN_STACK):
        corrupt(f"{section.name}: record {record.code:#x} has the value {value}", record.offset)


_VALUES = {
    MAXREG_COUNT: (1, 255), 0x1E: (0, MAX_LOCAL_BYTES), API_VERSION: (100, 199),
    NUM_MBARRIERS: (0, 0xFFFF), NUM_BARRIERS: (0, 16), MAX_CLUSTER_RANK: (1, 16),
    0x36: (0, 0xFFFF), 0x50: (0, 0x80FF), 0x5F: (0, 0xFFF),
}  # fmt: skip
_CHECKS = {
    MAX_THREADS: _check_threads, REQNTID: _check_threads, CTA_PER_CLUSTER: _check_cluster,
    EXTERNS: _check_externs, BRANCH_TARGETS: _check_branches, **dict.fromkeys(
        (MBARRIER_OFFSETS, ATOMIC16_OFFSETS, COPY_OFFSETS), _check_instructions
    ),
    **dict.fromkeys(_VALUES, _check_value),
}  # fmt: skip
