"""Reading GPU binaries without a driver: cubins, fatbins, PTX, validated before anyone trusts them.

Knows nothing of drivers, manifests or launches. What a validated cubin can still hide: damage
inside machine code, constants, debug data and plain numbers within their limits. Nothing in the
file repeats those; only a digest, or a load in a child process, shows it.
"""

from __future__ import annotations

from .elf import corrupt
from .fatbin import MAGIC as _FATBIN_MAGIC
from .fatbin import read_fatbin
from .model import (
    CubinInfo,
    FatbinEntry,
    FatbinInfo,
    FunctionInfo,
    GlobalInfo,
    ParamInfo,
    PtxInfo,
    PtxParam,
    SectionInfo,
)
from .ptx import driver_of, looks_like_ptx, read_ptx
from .reader import read_cubin
from .unwrap import unwrap

__all__ = [
    "CubinInfo",
    "FatbinEntry",
    "FatbinInfo",
    "FunctionInfo",
    "GlobalInfo",
    "ParamInfo",
    "PtxInfo",
    "PtxParam",
    "SectionInfo",
    "driver_of",
    "image_kind",
    "read_cubin",
    "read_fatbin",
    "read_ptx",
    "unwrap",
]


def image_kind(image: bytes) -> str:
    """'cubin', 'fatbin' or 'ptx', by the first bytes alone; CubinCorruptError for anything else."""
    image = unwrap(bytes(image))
    if image[:4] == b"\x7fELF":
        return "cubin"
    if image[:4] == _FATBIN_MAGIC.to_bytes(4, "little"):
        return "fatbin"
    if looks_like_ptx(image):
        return "ptx"
    start = image[:8].hex(" ") or "nothing"
    corrupt(f"neither cubin, fatbin nor PTX: {len(image)} bytes that start with {start}", 0)
