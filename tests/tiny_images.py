"""Tiny images of two GPUs: cubins, PTX, and fatbins made of them."""

from __future__ import annotations

import struct
from pathlib import Path

DATA = Path(__file__).parent / "cubin/data"
PTX = (DATA / "tiny_sm90.ptx").read_text()
SM80, SM90 = ((DATA / f"tiny_sm{arch}.cubin").read_bytes() for arch in (80, 90))


def entry(
    kind: int, sm: int, image: bytes, *, flags: int = 0, version: tuple[int, int] = (8, 1)
) -> bytes:
    """One entry of a fatbin. `version` as (minor, major)."""
    image += bytes(-len(image) % 8)
    return (
        struct.pack(
            "<HHIQIIHHIIIQQQ",
            kind,
            0x101,
            64,
            len(image),
            0,
            0,
            *version,
            sm,
            0,
            0,
            0x11 | flags,
            0,
            0,
        )
        + image
    )


def fatbin(*entries: bytes) -> bytes:
    """A fatbin of uncompressed entries."""
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def ptx(target: str, version: str = "9.0") -> bytes:
    text = PTX.replace(".target sm_90", f".target {target}").replace("9.0", version)
    number = int("".join(filter(str.isdigit, target)))
    flags = {"a": 0x100000, "f": 0x200000}.get(target[-1], 0)
    major, minor = map(int, version.split("."))
    return entry(1, number, text.encode(), flags=flags, version=(minor, major))


MIXED = fatbin(
    entry(2, 61, b"\x7fELF that nobody reads"), entry(2, 80, SM80), entry(2, 90, SM90), ptx("sm_90")
)
