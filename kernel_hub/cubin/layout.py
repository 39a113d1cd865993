"""The layout of a cubin: sections without a gap, and segments that cover them exactly.

Knows no section by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from .elf import (
    FIRST_SOUND_SEGMENTS,
    MERCURY_NOBITS,
    NOBITS,
    Elf,
    Section,
    Segment,
    align_up,
    corrupt,
)

SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR = 1, 2, 4
_FIRST_FITTED_LOADS = 111


def check_layout(elf: Elf) -> None:
    """Every byte of the file belongs to a table, a section or the padding between two.

    Of another linker's, all that is checked is that nothing points outside the file.
    """
    if not elf.canonical:
        _check_bounds(elf.sections, elf.segments, len(elf.image))
        return
    _check_sections(elf.image, elf.sections, elf.shoff)
    if elf.segments:
        _check_segments(elf)


def _check_sections(image: bytes, sections: Sequence[Section], shoff: int) -> None:
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
    # NVRTC 13.5 does not align them.
    if shoff not in (cursor, align_up(cursor, 8)) or image.count(0, cursor, shoff) != (
        shoff - cursor
    ):
        corrupt(
            f"section headers at {shoff:#x}, but the last section ends at {cursor:#x}",
            40,
        )


def _check_segments(elf: Elf) -> None:
    """PT_PHDR and its PT_LOAD cover the program headers; the other PT_LOADs split the sections."""
    sections, segments = elf.sections, elf.segments
    phoff, early = elf.shoff + 64 * len(sections), elf.is_before(FIRST_SOUND_SEGMENTS)
    size = 56 * len(segments)
    first = segments[0]
    if first[:5] != (6, first.flags, phoff, size, size) or first.flags not in (4, 5):
        corrupt(
            "the first program header does not describe the program headers", first.header_offset
        )
    loads = segments[1:]
    own = [load for load in loads if load[:5] == (1, first.flags, phoff, size, size)]
    either = elf.is_before(FIRST_SOUND_SEGMENTS + 1) and not early
    if len(own) not in ((0, 1) if either else (not early,)) or (
        own and own[0] not in (loads[0], loads[-1])
    ):
        corrupt("the program headers are not loaded exactly once", first.header_offset)
    allocated = [section for section in sections if section.flags & SHF_ALLOC]
    if allocated and allocated[0].number + len(allocated) != len(sections):
        corrupt(
            f"section {sections[-1].name} is not allocated but lies after one that is",
            allocated[0].header_offset,
        )
    if elf.is_before(_FIRST_FITTED_LOADS):
        _check_old_loads(elf, loads, allocated)
        return
    # Up to 11.4 there is an empty load where no section is writable, or none is not.
    spare = [(1, 5, 0, 0, 0), (1, 6, 0, 0, 0)] if early or either else []
    loads = [load for load in loads if load not in own and load[:5] not in spare]
    position: int | None = 0
    for load in loads:
        if position is not None:
            position = _cover(load, allocated, position, elf.sm)
    if position != len(allocated):
        _note_loads(elf)


def _note_loads(elf: Elf) -> None:
    """Loads that are not as toolkits known here divide the sections: in bounds, or damage."""
    for load in elf.segments:
        if load.offset + load.file_size > len(elf.image) or load.memory_size >= 1 << 40:
            corrupt("a program header ends beyond the file", load.header_offset)
    elf.note("program headers that divide the sections as no known toolkit does")


def _check_old_loads(elf: Elf, loads: list[Segment], allocated: list[Section]) -> None:
    """CUDA 10.0 to 11.0: one PT_LOAD for what is read, one for what is written, either empty.

    10.x leaves out the padding between read sections, and counts of the memory sections the largest
    alone. 11.0 counts them all, aligned against the end of the file's part.
    """
    expected = []
    for flags, writable in ((5, 0), (6, SHF_WRITE)):
        run = [section for section in allocated if section.flags & SHF_WRITE == writable]
        if not run:
            expected.append((1, flags, 0, 0, 0))
            continue
        start = run[0].offset
        stored = [section for section in run if section.type != NOBITS]
        in_memory = [section for section in run if section.type == NOBITS]
        end = max((section.offset + section.size for section in stored), default=start)
        if writable:
            file_size = elf.shoff - start
        elif elf.is_before(110):
            file_size = sum(section.size for section in run)
        else:
            file_size = end - start
        memory_size = file_size
        if writable:
            grown = largest = 0
            for section in in_memory:
                grown = align_up(grown, section.align) + section.size
                largest = max(largest, section.size)
            memory_size = end - start + (largest if elf.is_before(110) else grown)
        expected.append((1, flags, start, file_size, memory_size))
    if [load[:5] for load in loads] != expected:
        _note_loads(elf)


def _cover(load: Segment, allocated: list[Section], position: int, sm: int) -> int | None:
    """The position after the sections that one PT_LOAD covers; None where it does not fit them."""
    if load.type != 1 or position == len(allocated) or load.offset != allocated[position].offset:
        return None
    writable = allocated[position].flags & SHF_WRITE
    flags = 6 if writable else 5 if sm < 90 else 4
    end = load.offset  # where the last section ends in the file (or lies, if it takes no bytes)
    memory = load.file_size
    in_memory = False
    for section in allocated[position:]:
        if section.flags & SHF_WRITE != writable:
            break
        if section.type == NOBITS:
            # ptxas aligns the place in the file, not the distance from the segment's start.
            place = align_up(load.offset + memory, section.align)
            grown = place - load.offset + section.size
            if grown > load.memory_size:
                break
            in_memory, memory, end = True, grown, section.offset
        elif in_memory or section.offset + section.size - load.offset > load.file_size:
            break
        else:
            end = section.offset + section.size
        flags |= (section.flags & SHF_EXECINSTR) >> 2
        position += 1
    sound = memory == load.memory_size and load.offset + load.file_size == end
    return position if sound and load.flags == flags else None


def _check_bounds(sections: Sequence[Section], segments: list[Segment], size: int) -> None:
    for section in sections:
        in_file = section.type not in (NOBITS, MERCURY_NOBITS)
        if in_file and section.offset + section.size > size:
            corrupt(f"section {section.name} ends beyond the file", section.header_offset + 32)
    for segment in segments:
        if segment.offset + segment.file_size > size:
            corrupt("a program header ends beyond the file", segment.header_offset)
