"""Which sections a cubin may have, and what the header of each must hold.

A section of a kind that no toolkit from 10.0 to 13.5 writes is noted as unknown, one of a known
kind with another header is refused. Mercury sections (sm_100 and later) pass unread.
"""

from __future__ import annotations

from typing import NamedTuple

from .elf import (
    MERCURY_SM,
    NOBITS,
    NOTE,
    PROGBITS,
    REL,
    RELA,
    STRTAB,
    SYMTAB,
    Elf,
    Section,
    corrupt,
)

CUDA_INFO, CUDA_CALLGRAPH, CUDA_PROTOTYPE = 0x70000000, 0x70000001, 0x70000002
CUDA_RELOC_ACTION, CUDA_COMPAT = 0x7000000B, 0x70000086

MAX_SHARED_BYTES = 228 * 1024
MAX_CONSTANT_BYTES = 64 * 1024
MAX_ALIGN = 4096
_INSTRUCTION_BYTES = 16  # from sm_70 on

_SHF_INFO_LINK = 0x40
# Before 12.4, ptxas left SHF_INFO_LINK out and wrote sh_link of an earlier order of the sections.
_FIRST_SOUND_LINKS = 124

# .nv.rel.action: a head of 16 bytes (from 12.0 on that is all), then a row a kind of relocation.
_ACTION_HEADS = (
    bytes.fromhex("73000000000000000000001125000536"),
    bytes.fromhex("4b0000000000000000020208100a2f22"),
)
# What rows of 11.0 to 11.8 hold: kind, shift, and width with what follows it.
_ACTION_KINDS, _ACTION_SHIFTS = (0, 1, 2, 3, 9), range(0, 64, 8)
_ACTION_WIDTHS = ((8, 0), (12, 0), (32, 0), (64, 0), (32, 32), (0x14, 0x2C))

_DEBUG = {
    "abbrev",
    "addr",
    "aranges",
    "frame",
    "info",
    "line",
    "line_str",
    "loc",
    "loclists",
    "macinfo",
    "macro",
    "names",
    "pubnames",
    "pubtypes",
    "ranges",
    "rnglists",
    "str",
    "str_offsets",
    "types",
}
_NV_DEBUG = {"info_ptx", "info_reg_sass", "info_reg_type", "line_sass", "ptx_txt", "ptx_txt."}
_DIGITS = "0123456789"  # nvlink numbers the PTX texts of the objects it joined


class Rule(NamedTuple):
    """What a section header must hold.

    `owner` says what sh_info points to: 'text' the function's code, 'target' the section that the
    name ends in, 'any' something checked elsewhere, '' nothing (0).
    """

    kind: str
    type: int
    flags: int
    linked: bool  # sh_link is the symbol table
    owner: str
    aligns: tuple[int, ...]  # empty: any power of two up to MAX_ALIGN
    entsize: int


_EXACT = {
    ".shstrtab": Rule("strings", STRTAB, 0, False, "", (1,), 0),
    ".strtab": Rule("strings", STRTAB, 0, False, "", (1,), 0),
    ".nv.info": Rule("info", CUDA_INFO, 0, True, "", (4,), 0),
    ".nv.compat": Rule("compat", CUDA_COMPAT, 0, False, "", (4,), 0),
    ".nv.callgraph": Rule("callgraph", CUDA_CALLGRAPH, 0, True, "", (4,), 8),
    ".nv.prototype": Rule("prototype", CUDA_PROTOTYPE, 0, True, "", (4,), 8),
    ".nv.rel.action": Rule("reloc action", CUDA_RELOC_ACTION, 0, False, "", (8,), 8),
    ".nv.global": Rule("global", NOBITS, 3, False, "", (), 0),
    ".nv.global.init": Rule("global", PROGBITS, 3, False, "", (), 0),
    ".nv.shared.reserved.0": Rule("reserved shared", NOBITS, 3, False, "", (), 0),
    ".nv_debug.shared": Rule("shared", NOBITS, 3, False, "", (), 0),
}
_TEXT = Rule("text", PROGBITS, 6, True, "any", (128,), 0)
_FUNCTION_INFO = Rule("function info", CUDA_INFO, 0x40, True, "text", (4,), 0)
_SHARED = Rule("shared", NOBITS, 0x43, False, "text", (), 0)
_LOCAL = Rule("local", NOBITS, 0x43, False, "text", (), 0)
_CONSTANT = Rule("constant", PROGBITS, 2, False, "", (), 0)
_FUNCTION_CONSTANT = Rule("constant", PROGBITS, 0x42, False, "text", (), 0)
_PARAMETERS = _FUNCTION_CONSTANT._replace(kind="constant 0")
_DEBUG_RULE = Rule("debug", PROGBITS, 0, False, "", (1, 4, 8), 0)
_RELA_RULE = Rule("relocations", RELA, 0x40, True, "target", (8,), 24)
_REL_RULE = Rule("relocations", REL, 0x40, True, "target", (8,), 16)


def check_sections(elf: Elf) -> dict[str, list[tuple[Section, str]]]:
    """Check every section header; returns (section, the function or target it names) by kind."""
    found: dict[str, list[tuple[Section, str]]] = {}
    for section in elf.sections[1:]:
        name = section.name
        if name == ".symtab":
            _check_symtab(elf, section)
            continue
        if section.type == NOTE:
            if _check_note(elf, section):
                found.setdefault("note", []).append((section, ""))
            continue
        rule, owner = _rule(elf, section)
        if rule is None:  # in bounds, by the layout
            continue
        _check_header(elf, section, rule, owner)
        _check_size(elf, section, rule)
        found.setdefault(rule.kind, []).append((section, owner))
    return found


def _rule(elf: Elf, section: Section) -> tuple[Rule | None, str]:
    """The rule for a section's name and the function or section that the name ends in."""
    name = section.name
    rule = _EXACT.get(name)
    if rule:
        return rule, ""
    if name.startswith(".text."):
        return _TEXT, name[6:]
    if name.startswith(".nv.info."):
        return _FUNCTION_INFO, name[9:]
    if name.startswith(".nv.shared."):
        return _SHARED, name[11:]
    if name.startswith(".nv.constant"):
        bank, _, owner = name[12:].partition(".")
        if len(bank) <= 2 and bank.isdecimal():
            kernel = _PARAMETERS if int(bank) == 0 else _FUNCTION_CONSTANT
            return (kernel if owner else _CONSTANT), owner
    if name.startswith(".rela."):
        return _RELA_RULE, name[5:]
    if name.startswith(".rel."):
        return _REL_RULE, name[4:]
    if name.startswith(".nv.local."):
        return _LOCAL, name[10:]
    if (name.startswith(".debug_") and name[7:] in _DEBUG) or (
        name.startswith(".nv_debug_") and name[10:].rstrip(_DIGITS) in _NV_DEBUG
    ):
        return _DEBUG_RULE, ""
    if elf.sm >= MERCURY_SM and name.startswith((".nv.merc.", ".nv.capmerc.", ".nv.constant.")):
        return None, ""
    elf.note(f"section {name}, of a kind that no known toolkit writes")
    return None, ""


def _check_header(elf: Elf, section: Section, rule: Rule, owner: str) -> None:
    name, at = section.name, section.header_offset
    if section.type != rule.type:
        elf.deny(f"section {name} has type {section.type:#x}, expected {rule.type:#x}", at + 4)
    flags, link = section.flags, elf.symtab.number if rule.linked else 0
    if elf.is_before(_FIRST_SOUND_LINKS):
        flags |= rule.flags & _SHF_INFO_LINK
        link = section.link if rule.linked else 0
    if rule is _TEXT and elf.os_abi == 0x33:  # bits 20 to 24: the number of barriers
        if flags >> 20 > 16:
            corrupt(f"section {name} uses {flags >> 20} barriers; there are 16", at + 8)
        flags &= 0xFFFFF
    if flags != rule.flags:
        elf.deny(f"section {name} has flags {section.flags:#x}, expected {rule.flags:#x}", at + 8)
    if section.link != link:
        elf.deny(f"section {name} is linked to section {section.link}", at + 40)
    if rule.owner == "":
        if section.info:
            elf.deny(f"section {name} has sh_info {section.info}, expected 0", at + 44)
    elif rule.owner != "any":
        wanted = f".text.{owner}" if rule.owner == "text" else owner
        # By number: nvlink keeps functions of one name that are static in two files.
        found = elf.sections[section.info].name if section.info < len(elf.sections) else ""
        if found != wanted:
            corrupt(
                f"section {name} belongs to section {section.info}, not to the one in its name",
                at + 44,
            )
    if section.align not in rule.aligns and (rule.aligns or section.align > MAX_ALIGN):
        elf.deny(f"section {name} is aligned to {section.align}", at + 48)
    if section.entsize != rule.entsize:
        elf.deny(
            f"section {name} has entries of {section.entsize} bytes, expected {rule.entsize}",
            at + 56,
        )


def _check_size(elf: Elf, section: Section, rule: Rule) -> None:
    size, at = section.size, section.header_offset + 32
    kind = rule.kind
    if rule.entsize and size % rule.entsize:
        corrupt(
            f"section {section.name}: {size} bytes in entries of {rule.entsize}",
            at,
        )
    if kind == "text":
        # Padded to 128 bytes, but for some large functions of ptxas 12.4.
        if not size or size % _INSTRUCTION_BYTES:
            corrupt(f"section {section.name}: {size} bytes are no whole instructions", at)
    elif kind in ("constant", "constant 0"):
        if size > MAX_CONSTANT_BYTES:
            corrupt(
                f"section {section.name}: {size} bytes, a constant bank has {MAX_CONSTANT_BYTES}",
                at,
            )
    elif kind == "shared" or kind == "reserved shared":
        if size > MAX_SHARED_BYTES:
            corrupt(
                f"section {section.name}: {size} bytes, a multiprocessor has {MAX_SHARED_BYTES}", at
            )
    elif kind == "global" or kind == "local":
        if size >= 1 << 40:
            corrupt(f"section {section.name}: {size} bytes", at)
    elif kind == "reloc action" and not _is_action_table(
        elf.image[section.offset : section.offset + size]
    ):
        elf.note(f"section {section.name} holds a table that no known toolkit writes")


def _is_action_table(table: bytes) -> bool:
    head, rows = table[:16], [table[at : at + 8] for at in range(16, len(table), 8)]
    if head == _ACTION_HEADS[0]:
        return not rows
    return head == _ACTION_HEADS[1] and len(set(rows)) == len(rows) and all(map(_is_action, rows))


def _is_action(row: bytes) -> bool:
    kind, zero, shift, width, *rest = row
    return (
        kind in _ACTION_KINDS
        and zero == 0
        and shift in _ACTION_SHIFTS
        and (width, rest[0]) in _ACTION_WIDTHS
        and not any(rest[1:])
    )


def _check_symtab(elf: Elf, section: Section) -> None:
    header = (section.type, section.flags, section.link, section.align, section.entsize)
    if header != (SYMTAB, 0, elf.strtab.number, 8, 24):
        elf.deny("section .symtab has a wrong header", section.header_offset)
    count, rest = divmod(section.size, 24)
    least = 0 if elf.is_before(111) else 1  # 10.x does not count the empty one
    if rest or not least <= section.info <= count:
        corrupt(
            f"section .symtab: {section.size} bytes, {section.info} local symbols",
            section.header_offset + 32,
        )


def _check_note(elf: Elf, section: Section) -> bool:
    """The header of a .note.nv.* section: the later ones link to .note.nv.tkinfo and .nv.compat.

    Returns whether it is one that `read_note` knows.
    """
    toolkit = elf.by_name.get(".note.nv.tkinfo")
    compat = elf.by_name.get(".nv.compat")
    if section is toolkit:
        expected = (0x2000000, 0, 0)
    elif section.name in (".note.nv.cuinfo", ".note.nv.cuver") and toolkit is not None:
        expected = (
            (0x1000040, toolkit.number, compat.number) if compat else (0x1000000, toolkit.number, 0)
        )
    else:
        elf.note(f"note section {section.name}, of a kind that no known toolkit writes")
        return False
    if (section.flags, section.link, section.info) != expected or (
        section.align,
        section.entsize,
    ) != (4, 0):
        elf.deny(f"section {section.name} has a wrong header", section.header_offset)
    return True
