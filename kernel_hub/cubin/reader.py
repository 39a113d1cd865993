"""`read_cubin`: validate a cubin from end to end and say what its kernels take and use.

The driver dies on damaged images, so whatever two places of the file say, they must say the same.
What cannot be seen from the bytes: damage inside machine code, constants, debug data, or plain
numbers (registers, stack) that stays within the limits.
"""

from __future__ import annotations

import struct

from .elf import MERCURY_SM, Elf, Section, corrupt, read_elf
from .layout import check_layout
from .model import CubinInfo, FunctionInfo, GlobalInfo, ParamInfo, SectionInfo
from .notes import read_compat, read_note
from .nvinfo import (
    API_VERSION,
    CTA_PER_CLUSTER,
    FRAME_SIZE,
    MAX_CLUSTER_RANK,
    MAX_THREADS,
    MAXREG_COUNT,
    MIN_STACK_SIZE,
    PER_FUNCTION,
    REGCOUNT,
    REQNTID,
    UNKNOWN_STACK,
    ParamPlaces,
    Record,
    param_bases,
    read_function_info,
    read_global_info,
)
from .sections import check_sections
from .symbols import (
    STO_ENTRY,
    STT_OBJECT,
    Symbol,
    check_callgraph,
    check_relocations,
    check_text_symbols,
    read_symbols,
)
from .unwrap import unwrap

_Found = dict[str, list[tuple[Section, str]]]

# The driver keeps the first KiB of a block's shared memory from sm_90 on; the section counts it.
_RESERVED_SHARED = 1024


def read_cubin(image: bytes) -> CubinInfo:
    """Validate `image` and describe it.

    Args:
        image: the whole file, nothing before or after it but what CuPy adds and leaves off.

    Returns: its architecture, toolkit, kernels, variables and sections. With an empty `unknown` it
        is sound: all of it is what a toolkit from 10.0 to 13.5 writes. Otherwise it is in bounds,
        and whether a driver takes it only a driver can tell.
    Raises: CubinCorruptError, with the offset, for damage: what lies out of bounds, what two places
        of the file say differently, what no value can be.
    """
    elf = read_elf(unwrap(bytes(image)))
    check_layout(elf)
    found = check_sections(elf)
    symbols = read_symbols(elf)
    functions = check_text_symbols(elf, found.get("text", []), symbols)
    for section, _ in found.get("relocations", []):
        check_relocations(elf, section, elf.sections[section.info], symbols)
    for section, _ in found.get("callgraph", []):
        check_callgraph(elf, section, symbols)
    noted = max((read_note(elf, section) or 0 for section, _ in found.get("note", [])), default=0)
    version = elf.version if elf.os_abi == 0x33 else noted or None
    specific = elf.arch_flag
    for section, _ in found.get("compat", []):
        specific = read_compat(elf, section) or specific
    if elf.os_abi == 0x41 and elf.sm < MERCURY_SM:
        needed = [".note.nv.tkinfo", ".note.nv.cuinfo"] + [".nv.compat"] * (elf.sm >= 90)
        missing = [name for name in needed if name not in elf.by_name]
        if missing:
            corrupt(f"section {missing[0]} is missing")
    kernels = _read_functions(elf, found, symbols, functions, version)
    capability = divmod(elf.sm, 10)
    return CubinInfo(
        arch=f"sm{elf.sm}",
        target=f"sm_{elf.sm}{'a' * specific}",
        compute_capability=capability,
        arch_specific=specific,
        os_abi=elf.os_abi,
        abi_version=elf.abi_version,
        toolkit=divmod(version, 10) if version else None,
        size_bytes=len(elf.image),
        functions=kernels,
        globals=_read_globals(elf, symbols),
        sections=tuple(
            SectionInfo(s.name, s.offset, s.size, s.type, s.flags) for s in elf.sections[1:]
        ),
        unknown=tuple(elf.unknown),
    )


def _read_functions(
    elf: Elf,
    found: _Found,
    symbols: list[Symbol],
    functions: dict[int, Symbol],
    version: int | None,
) -> dict[str, FunctionInfo]:
    """Every kernel in the order of the code, and each device function's records checked."""
    used: dict[int, dict[int, int]] = {code: {} for code in PER_FUNCTION}
    for section, _ in found.get("info", []):
        used = read_global_info(elf, section, symbols)
    parts = {
        kind: {section.info: section for section, _ in found.get(kind, [])}
        for kind in ("function info", "shared", "constant 0")
    }
    kernels: dict[str, FunctionInfo] = {}
    for text, name in found.get("text", []):
        symbol = functions[text.number]
        info = parts["function info"].get(text.number)
        if info is None:
            if elf.is_before(111) and symbol.other != STO_ENTRY:
                continue  # of the device runtime
            corrupt(f"function {name} has no section .nv.info.{name}", text.header_offset)
        records, params = read_function_info(elf, info, text, symbols, name)
        if elf.is_before(111):
            used[REGCOUNT].setdefault(symbol.number, text.info >> 24)
        needed = (
            (REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE)
            if symbol.other == STO_ENTRY
            else (REGCOUNT, FRAME_SIZE)
        )
        for code in needed:
            if symbol.number not in used[code]:
                corrupt(
                    f"function {name}: .nv.info has no record {code:#x} for it", text.header_offset
                )
        api = records.get(API_VERSION)
        built = int.from_bytes(api.payload, "little") if api else 0
        if api and version and built > version:
            corrupt(f"{info.name}: toolkit {built}, but the image is from {version}", api.offset)
        _check_registers(text, used[REGCOUNT][symbol.number])
        bank = parts["constant 0"].get(text.number)
        if symbol.other != STO_ENTRY:
            if params or bank:
                corrupt(f"function {name} is no kernel but has parameters", info.offset)
            continue
        if MAXREG_COUNT not in records:
            corrupt(f"{info.name} has no register limit", info.offset)
        _check_bank(elf, bank, name, params)
        if name in kernels:
            elf.note(f"two kernels {name}")
            continue
        shared = parts["shared"].get(text.number)
        kernels[name] = _describe(elf, symbol, text, shared, used, records, params)
    return kernels


def _check_registers(text: Section, num_regs: int) -> None:
    """The section header may repeat the registers, those of called functions left out.

    It does up to sm_89, and in code of early toolkits for the first GPUs after.
    """
    if text.info >> 24 > num_regs:
        corrupt(
            f"section {text.name} says {text.info >> 24} registers, .nv.info {num_regs}",
            text.header_offset + 44,
        )


def _check_bank(elf: Elf, bank: Section | None, name: str, params: ParamPlaces | None) -> None:
    """Constant bank 0 ends where the parameters end, and holds zeros until a launch fills it."""
    if bank is None:
        corrupt(f"kernel {name} has no section .nv.constant0.{name}")
    end = params.base + params.size if params else min(param_bases(elf.sm))
    if bank.size < end:
        corrupt(
            f"section {bank.name}: {bank.size} bytes do not fit the parameters of {name}",
            bank.header_offset + 32,
        )
    if bank.size > end and (params or bank.size not in param_bases(elf.sm)):
        elf.note("constants behind a kernel's parameters")  # texture references have theirs there
    if elf.image.count(0, bank.offset, bank.offset + bank.size) != bank.size:
        corrupt(f"section {bank.name} is not empty", bank.offset)


def _describe(
    elf: Elf,
    symbol: Symbol,
    text: Section,
    shared: Section | None,
    used: dict[int, dict[int, int]],
    records: dict[int, Record],
    params: ParamPlaces | None,
) -> FunctionInfo:
    def triple(code: int) -> tuple[int, int, int] | None:
        return struct.unpack("<3I", records[code].payload) if code in records else None

    name, number = symbol.name, symbol.number
    threads, rank = triple(MAX_THREADS), records.get(MAX_CLUSTER_RANK)
    shared_bytes = shared.size if shared else 0
    if elf.sm >= 90:
        shared_bytes = max(0, shared_bytes - _RESERVED_SHARED)
    local = [
        used[code][number]
        for code in (FRAME_SIZE, MIN_STACK_SIZE)
        if used[code][number] != UNKNOWN_STACK
    ]
    return FunctionInfo(
        name=name,
        params=tuple(
            ParamInfo(ordinal, *place)
            for ordinal, place in enumerate(params.params if params else ())
        ),
        num_regs=used[REGCOUNT][number],
        static_shared_bytes=shared_bytes,
        local_bytes=max(local),
        max_threads=threads[0] * threads[1] * threads[2] if threads else None,
        required_block=triple(REQNTID),
        cluster=triple(CTA_PER_CLUSTER),
        max_cluster_rank=int.from_bytes(rank.payload, "little") if rank else None,
        cooperative=_reads_grid_workspace(elf, text),
        code_bytes=text.size,
    )


def _reads_grid_workspace(elf: Elf, text: Section) -> bool:
    """grid.sync() finds its barrier by two words of constant bank 0 that nothing else reads."""
    words = (0x90, 0x8C) if elf.sm < 90 else (0x48, 0x44)
    if elf.sm >= MERCURY_SM:
        return False
    return all(_reads_constant(elf.image, text, offset) for offset in words)


def _reads_constant(image: bytes, text: Section, offset: int) -> bool:
    """An instruction has the operand c[0][offset]: bytes 4 to 7, with an opcode of form 3 or 5."""
    operand = struct.pack("<I", offset >> 2 << 8)
    start, end = text.offset, text.offset + text.size
    at = image.find(operand, start, end)
    while at >= 0:
        if (at - start) % 16 == 4 and image[at - 3] >> 1 & 7 in (3, 5):
            return True
        at = image.find(operand, at + 1, end)
    return False


def _read_globals(elf: Elf, symbols: list[Symbol]) -> dict[str, GlobalInfo]:
    """Variables by name, without the compiler's own (string literals, `$` names)."""
    found: dict[str, GlobalInfo] = {}
    for symbol in symbols:
        section = elf.sections[symbol.section].name
        is_data = symbol.type == STT_OBJECT and section.startswith((".nv.global", ".nv.constant"))
        if is_data and not symbol.name.startswith(("$", "__unnamed_")):
            found.setdefault(
                symbol.name, GlobalInfo(symbol.name, symbol.size, section, symbol.value)
            )
    return found
