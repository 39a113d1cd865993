"""Symbols, relocations and call graph of a cubin, each checked against the sections it names."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .elf import MERCURY_SM, Elf, Names, Section, corrupt

STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_SECTION = 0, 1, 2, 3
_REFERENCES = (10, 11)
STB_LOCAL, STB_GLOBAL, STB_WEAK = 0, 1, 2
STO_ENTRY = 0x10  # a kernel
_STO_ANONYMOUS, _STO_MANAGED, _STO_RESERVED_SHARED = 0x01, 0x04, 0xA0

_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QIIq")
_REL = struct.Struct("<QII")
_PAIR = struct.Struct("<Ii")

# The types seen in data (64-bit words) and in code (128-bit instructions), and what they take the
# address of. 58 and 75 are calls; 35, 62 and 63 function descriptors.
_DATA_RELOCATIONS = {2: (STT_OBJECT, STT_FUNC), 4: (STT_OBJECT,), 35: (STT_FUNC,)}
_TEXT_RELOCATIONS = {
    56: (STT_OBJECT, STT_FUNC),
    57: (STT_OBJECT, STT_FUNC),
    58: (STT_FUNC,),
    62: (STT_FUNC,),
    63: (STT_FUNC,),
    75: (STT_FUNC,),
}
_RESERVED = ".nv.reservedSmem."
_OPTIMIZER = ".nv.constant.optimizer."
_FIRST_SOUND_COUNT = 114  # before, sh_info of .symtab left local symbols out
_UNCOUNTED = (".debug_frame", ".nv.rel.action", ".nv_debug_ptx_txt")
_MAX_PROTOTYPES = 1 << 20


class Symbol(NamedTuple):
    """One symbol; `section` is 0 when it is undefined."""

    number: int
    name: str
    bind: int
    type: int
    other: int
    section: int
    value: int
    size: int


def read_symbols(elf: Elf) -> list[Symbol]:
    """Every symbol, each consistent with the section it lies in."""
    table, strings = elf.symtab, elf.strtab
    names = Names(elf.image, strings.offset, strings.size, ".strtab", elf.canonical)
    sections = elf.sections
    symbols = []
    section_symbols = set()
    at = table.offset
    for index, (name_at, info, other, shndx, value, size) in enumerate(
        _SYMBOL.iter_unpack(elf.image[at : at + table.size])
    ):
        name = names.get(name_at)
        bind, kind = info >> 4, info & 15
        if name is None or bind > STB_WEAK or shndx >= len(sections):
            corrupt(f"symbol {index}: name, binding or section is out of range", at)
        symbol = Symbol(index, name, bind, kind, other, shndx, value, size)
        if kind == STT_SECTION:
            known = sections[shndx].name
            if name.startswith(_OPTIMIZER):  # 13.5
                known = known.replace(".nv.constant2.", _OPTIMIZER)
            if (bind, other, value, size) != (0, 0, 0, 0) or known != name or not shndx:
                elf.deny(f"symbol {index} ({name}) is not the symbol of its section", at)
            if shndx in section_symbols:
                elf.deny(f"symbol {index} ({name}) is the second of its section", at)
            section_symbols.add(shndx)
        elif kind == STT_FUNC:
            _check_function(elf, symbol, sections[shndx], at)
        elif kind == STT_OBJECT:
            _check_object(elf, symbol, sections[shndx], at)
        elif kind == STT_NOTYPE:
            _check_untyped(elf, symbol, sections[shndx], at)
        elif kind in _REFERENCES and name and not shndx:
            elf.note(f"texture or surface reference {name}, which CUDA 12 has no way to bind")
        else:
            elf.note(f"symbol of type {kind}")
        symbols.append(symbol)
        at += 24
    _check_order(elf, symbols)
    return symbols


def _check_order(elf: Elf, symbols: list[Symbol]) -> None:
    """sh_info counts all symbols, or those before the global ones; weak ones stand on either side.

    From sm_90 on, the symbols of the constant banks follow the global ones; up to 11.3 the symbols
    of .debug_frame, .nv.rel.action and PTX texts were not counted.
    """
    table, early = elf.symtab, elf.is_before(_FIRST_SOUND_COUNT)
    count = table.info
    if count == len(symbols) or elf.is_before(111):  # 10.x left out some of any kind
        return
    for symbol in symbols[:count]:
        if symbol.bind == STB_GLOBAL:
            elf.deny(
                f"global symbol {symbol.name} lies among the local ones", table.header_offset + 44
            )
    for symbol in symbols[count:]:
        uncounted = early and symbol.name.startswith(_UNCOUNTED)
        late = uncounted or symbol.name.startswith(".nv.constant0.")
        if symbol.bind == STB_LOCAL and not late:
            elf.deny(
                f"local symbol {symbol.name} lies among the global ones", table.header_offset + 44
            )


def check_text_symbols(
    elf: Elf, texts: list[tuple[Section, str]], symbols: list[Symbol]
) -> dict[int, Symbol]:
    """The function symbol of each .text section (which names it in sh_info), by its number."""
    functions = {}
    for section, owner in texts:
        index = section.info & 0xFFFFFF
        symbol = symbols[index] if index < len(symbols) else None
        if symbol is None or (symbol.type, symbol.name, symbol.section) != (
            STT_FUNC,
            owner,
            section.number,
        ):
            corrupt(
                f"section {section.name}: symbol {index} is not its function",
                section.header_offset + 44,
            )
        if symbol.value or symbol.size != section.size:
            corrupt(
                f"function {owner} does not span section {section.name}", section.header_offset + 32
            )
        functions[section.number] = symbol
    return functions


def check_relocations(elf: Elf, section: Section, target: Section, symbols: list[Symbol]) -> None:
    """Each relocation patches whole words inside `target` with the address of a symbol."""
    image, count = elf.image, len(symbols)
    is_text = target.name.startswith(".text.")
    is_data = not is_text and target.name.startswith(".nv.")
    types = _TEXT_RELOCATIONS if is_text else _DATA_RELOCATIONS
    unit, width = (16, 16) if is_text else (8, 8) if is_data else (1, 8)
    limit = target.size - width
    data = image[section.offset : section.offset + section.size]
    entries = _RELA.iter_unpack(data) if section.entsize == 24 else _REL.iter_unpack(data)
    at = section.offset
    for offset, kind, index, *addend in entries:
        known = kind in types
        if index >= count or offset >= target.size or (known and (offset > limit or offset % unit)):
            corrupt(
                f"{section.name}: relocation {kind} at {offset:#x} by symbol {index}",
                at,
            )
        symbol = symbols[index]
        if not known:
            elf.note(f"relocation {kind} of {'code' if is_text else 'data'}")
        elif symbol.type not in types[kind]:
            corrupt(
                f"{section.name}: relocation {kind} by symbol {index}, of type {symbol.type}",
                at,
            )
        if (
            addend
            and addend[0]
            and not (symbol.section and 0 < addend[0] <= elf.sections[symbol.section].size)
        ):
            corrupt(
                f"{section.name}: addend {addend[0]} leads out of the section of {symbol.name}",
                at + 16,
            )
        at += section.entsize


def check_callgraph(elf: Elf, section: Section, symbols: list[Symbol]) -> None:
    """Lists opened by (0, -1) to (0, -4): calls, functions and calls by prototype, aliases."""
    at, part = section.offset, 0
    for caller, callee in _PAIR.iter_unpack(elf.image[at : at + section.size]):
        if caller == 0:
            part += 1
            sound = callee == -part
        else:
            sound = caller < len(symbols) and symbols[caller].type == STT_FUNC
            if part in (2, 3):
                sound = sound and 0 <= callee < _MAX_PROTOTYPES
            else:
                sound = sound and 0 < callee < len(symbols) and symbols[callee].type == STT_FUNC
        if not sound:
            corrupt(f"{section.name}: no entry ({caller}, {callee}) is possible in list {part}", at)
        at += 8
    if part != 4 and (part != 3 or not elf.is_before(120)):
        corrupt(f"{section.name} has {part} lists, expected 4 (3 before 12.0)", section.offset)


def _check_function(elf: Elf, symbol: Symbol, section: Section, at: int) -> None:
    name = symbol.name
    if not symbol.section:
        if symbol.bind != STB_GLOBAL or symbol.other or symbol.value or symbol.size or not name:
            corrupt(
                f"symbol {symbol.number} ({name}) is no sound reference to a driver function",
                at,
            )
        return
    if not section.name.startswith(".text.") or not name:
        corrupt(f"function {name} lies in section {section.name}", at + 6)
    if symbol.value % 16 or symbol.value + symbol.size > section.size:
        corrupt(f"function {name} reaches beyond section {section.name}", at + 8)
    if symbol.other == STO_ENTRY:
        if section.name != ".text." + name:
            corrupt(f"kernel {name} lies in section {section.name}", at + 6)
    elif symbol.other:
        elf.note(f"function with st_other {symbol.other:#x}")


def _check_object(elf: Elf, symbol: Symbol, section: Section, at: int) -> None:
    name = symbol.name
    if symbol.other not in (0, _STO_MANAGED):
        elf.note(f"variable with st_other {symbol.other:#x}")
    if not symbol.section:
        # 11.8 drops the name in stripped code.
        nameless = symbol.bind == STB_LOCAL and not name and not symbol.value
        sound = nameless or (name.startswith(_RESERVED) and symbol.bind != STB_LOCAL)
        if not sound or symbol.size != 4 or symbol.value > _reserved_limit(elf, name):
            corrupt(f"variable {name} is not defined here", at + 6)
        return
    if not section.name.startswith(
        (".nv.global", ".nv.constant", ".nv.shared.", ".nv_debug.shared")
    ):
        corrupt(f"variable {name} lies in section {section.name}", at + 6)
    # Debug builds place dynamic shared memory, which has no size here, behind the static.
    if symbol.value + symbol.size > section.size and section.name != ".nv_debug.shared":
        corrupt(f"variable {name} reaches beyond section {section.name}", at + 8)
    if symbol.value + symbol.size >= 1 << 40:
        corrupt(f"variable {name} has {symbol.size} bytes at {symbol.value:#x}", at + 8)


def _reserved_limit(elf: Elf, name: str) -> int:
    """Up to sm_90 the driver's shared memory starts at 0, has one known word and an end."""
    known = elf.sm < MERCURY_SM and name != _RESERVED + "cap"
    return 0 if known else 1024


def _check_untyped(elf: Elf, symbol: Symbol, section: Section, at: int) -> None:
    if symbol.name.startswith("$L__"):
        # Of debug data: 13.5 leaves such labels for any GPU, 13.0 in code of fp8 before sm_90.
        sound = symbol[2:7] == (STB_LOCAL, 0, 0, 0, 0)
    elif symbol.other == _STO_RESERVED_SHARED:
        sound = (
            symbol.bind == STB_WEAK
            and section.name == ".nv.shared.reserved.0"
            and bool(symbol.name)
        )
        sound = sound and symbol.value <= _reserved_limit(elf, symbol.name)
    else:
        first = symbol.number == 0
        sound = symbol.bind == STB_LOCAL and not symbol.section and not symbol.name
        sound = sound and not symbol.value and symbol.other == (0 if first else _STO_ANONYMOUS)
    if not sound or symbol.size:
        elf.deny(f"symbol {symbol.number} ({symbol.name}) is of no kind that cubins have", at)
