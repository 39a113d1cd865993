"""Damaged cubins from sound ones, reproducible from (seed, index); for CPU tests and the GPU."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from kernel_hub.cubin import elf as _elf

Span = tuple[int, int]  # start, end


@dataclass(frozen=True)
class Mutation:
    """One damaged image: what was done to which base, and the bytes of the base that changed."""

    index: int
    kind: str
    base: str
    image: bytes
    offsets: tuple[int, ...]

    def sections_hit(self, spans: dict[str, list[Span]]) -> list[str]:
        """Names of the parts of the base that the changed offsets lie in."""
        return sorted(
            name
            for name, parts in spans.items()
            if any(start <= at < end for start, end in parts for at in self.offsets)
        )


def part_spans(image: bytes) -> dict[str, list[Span]]:
    """Byte ranges of a sound cubin: header, tables and every section."""
    elf = _elf.read_elf(image)
    shoff = struct.unpack_from("<Q", image, 40)[0]
    phoff = shoff + 64 * len(elf.sections)
    spans = {
        "header": [(0, 64)],
        "section table": [(shoff, phoff)],
    }
    if phoff < len(image):  # 11.5 to 11.7 wrote none
        spans["program headers"] = [(phoff, len(image))]
    for section in elf.sections[1:]:
        if section.type != _elf.NOBITS and section.size:
            spans[section.name] = [(section.offset, section.offset + section.size)]
    return spans


# kind of mutation -> which parts of the file it aims at
_TARGETS: dict[str, Callable[[str], bool]] = {
    "header": lambda name: name == "header",
    "section table": lambda name: name == "section table",
    "program headers": lambda name: name == "program headers",
    "symbols": lambda name: name == ".symtab",
    "strings": lambda name: name in (".strtab", ".shstrtab"),
    "nv.info": lambda name: name.startswith(".nv.info"),
    "notes": lambda name: name.startswith(
        (".note", ".nv.compat", ".nv.rel.action", ".nv.callgraph", ".nv.prototype")
    ),
    "relocations": lambda name: name.startswith(".rel"),
    "code": lambda name: name.startswith(".text"),
    "data": lambda name: name.startswith((".nv.constant", ".nv.global")),
    "debug": lambda name: name.startswith((".debug", ".nv_debug")),
}
_ANYWHERE = (
    "truncate",
    "flip bit",
    "flip bytes",
    "word",
    "zero",
    "ones",
    "noise",
    "swap",
    "duplicate",
    "delete",
    "splice",
)
KINDS = (*_ANYWHERE, *_TARGETS)
_INTERESTING = (
    0, 1, 2, 3, 4, 7, 8, 15, 16, 64, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 0x10000, 1 << 24,
    0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip


class Mutator:
    """Makes mutation number `index` of a set of sound cubins, the same for the same seed."""

    def __init__(self, bases: dict[str, bytes], seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        self.bases = dict(sorted(bases.items()))
        self.spans = {name: part_spans(image) for name, image in self.bases.items()}
        self.seed = seed
        self.kinds = kinds
        self._names = list(self.bases)
        self._aims = {
            (name, kind): [
                span for part, span_list in spans.items() if wanted(part) for span in span_list
            ]
            for name, spans in self.spans.items()
            for kind, wanted in _TARGETS.items()
        }

    def make(self, index: int) -> Mutation:
        """Mutation `index`; never equal to its base."""
        rng = random.Random(self.seed * 1_000_003 + index)
        kind = self.kinds[index % len(self.kinds)]
        # Not every cubin has what is aimed at: debug data, program headers.
        fit = [name for name in self._names if self._aims.get((name, kind))]
        name = rng.choice(fit or self._names)
        base = self.bases[name]
        while True:
            image = bytearray(base)
            if kind in _TARGETS:
                aims = self._aims[name, kind] or [(0, len(base))]
                for _ in range(rng.choice((1, 1, 1, 2, 4))):
                    start, end = rng.choice(aims)
                    _change_in_place(rng, image, start, end)
            elif kind == "truncate":
                del image[rng.randrange(len(image)) :]
            elif kind == "splice":
                _splice(rng, image, self.bases[rng.choice(self._names)])
            elif kind in ("swap", "duplicate", "delete"):
                _move_chunk(rng, image, kind)
            else:
                _change_in_place(rng, image, 0, len(image), kind)
            if image != base:
                return Mutation(index, kind, name, bytes(image), _differences(base, bytes(image)))


def _change_in_place(
    rng: random.Random, image: bytearray, start: int, end: int, how: str = ""
) -> None:
    """Change some bytes of image[start:end] without moving anything."""
    how = how or rng.choice(
        (
            "flip bit",
            "flip bit",
            "flip bytes",
            "word",
            "word",
            "step",
            "zero",
            "ones",
            "noise",
            "copy",
        )
    )
    at = rng.randrange(start, end)
    length = min(rng.choice((1, 2, 4, 8, 16, 64)), end - at)
    if how == "flip bit":
        image[at] ^= 1 << rng.randrange(8)
    elif how == "flip bytes":
        for _ in range(rng.randrange(1, 9)):
            image[rng.randrange(start, end)] = rng.randrange(256)
    elif how in ("word", "step", "copy"):
        width = rng.choice((2, 4, 8))
        at -= (at - start) % width
        if at + width > end:
            return
        old = int.from_bytes(image[at : at + width], "little")
        if how == "word":
            new = rng.choice(_INTERESTING)
        elif how == "step":
            new = old + rng.choice((-64, -16, -8, -4, -1, 1, 4, 8, 16, 64))
        else:
            source = rng.randrange(start, end - width + 1)
            new = int.from_bytes(image[source : source + width], "little")
        image[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    elif how == "zero":
        image[at : at + length] = bytes(length)
    elif how == "ones":
        image[at : at + length] = b"\xff" * length
    else:
        image[at : at + length] = rng.randbytes(length)


def _move_chunk(rng: random.Random, image: bytearray, kind: str) -> None:
    """Swap two stretches, or insert one twice, or take one out."""
    length = rng.choice((1, 4, 8, 16, 24, 64, 256))
    first, second = (rng.randrange(max(1, len(image) - length)) for _ in range(2))
    a, b = bytes(image[first : first + length]), bytes(image[second : second + length])
    if kind == "swap":
        if len(a) == len(b) and abs(first - second) >= length:
            image[first : first + length], image[second : second + length] = b, a
    elif kind == "duplicate":
        image[second:second] = a
    else:
        del image[first : first + length]


def _splice(rng: random.Random, image: bytearray, other: bytes) -> None:
    """Continue with another cubin from the same offset on, or put a stretch of it in."""
    at = rng.randrange(min(len(image), len(other)))
    if rng.random() < 0.5:
        image[at:] = other[at:]
    else:
        length = rng.choice((8, 24, 64, 256, 1024))
        source = rng.randrange(len(other))
        piece = other[source : source + length][: len(image) - at]
        image[at : at + len(piece)] = piece


def _differences(base: bytes, image: bytes) -> tuple[int, ...]:
    """Up to 64 offsets where they differ; for another length the first, and the shorter end."""
    if len(base) != len(image):
        end = min(len(base), len(image))
        first = next((at for at in range(end) if base[at] != image[at]), end)
        return (first, end)
    found = []
    for block in range(0, len(base), 256):
        if base[block : block + 256] != image[block : block + 256]:
            found += [
                at for at in range(block, min(block + 256, len(base))) if base[at] != image[at]
            ]
    return tuple(found[:64])


class FatbinMutator:
    """As `Mutator`, of fatbins: their headers, and what lies behind them, packed or not."""

    def __init__(self, bases: dict[str, bytes], seed: int) -> None:
        self.bases = dict(sorted(bases.items()))
        self.spans: dict[str, dict[str, list[Span]]] = {}
        for name, image in self.bases.items():
            headers, contents, at = [(0, 16)], [], 16
            while at < len(image):
                header, size = struct.unpack_from("<IQ", image, at + 4)
                headers.append((at, at + header))
                contents.append((at + header, at + header + size))
                at += header + size
            self.spans[name] = {"fatbin headers": headers, "fatbin contents": contents}
        self.seed = seed

    def make(self, index: int) -> Mutation:
        """Mutation `index`; never equal to its base."""
        rng = random.Random(self.seed * 1_000_003 + index)
        name = rng.choice(list(self.bases))
        kind = rng.choice(("fatbin headers", "fatbin contents", "fatbin contents"))
        base = self.bases[name]
        image = bytearray(base)
        while image == base:
            for _ in range(rng.choice((1, 1, 2, 8))):
                _change_in_place(rng, image, *rng.choice(self.spans[name][kind]))
        return Mutation(index, kind, name, bytes(image), _differences(base, bytes(image)))
