"""The architectures that kernels are built for, and the GPUs of each. Knows no other module.

An architecture is a token, `sm90`: the folder of its cubins and their key in the manifest.
"""

from __future__ import annotations

# What is built where nothing else is asked, oldest first.
ARCHS = ("sm80", "sm89", "sm90")
# From here on wgmma and TMA exist on the exact architecture alone, which targets name with an 'a'.
_FIRST_EXACT = 90
# GPUs that the tables name, newest last; nothing shipped runs on the last.
KNOWN_GPUS = {
    (8, 0): "A100",
    (8, 6): "A10, RTX 30",
    (8, 9): "L4, L40S, RTX 40",
    (9, 0): "H100, H200",
    (10, 0): "B200",
}


def target_of(arch: str, *, exact: bool = False) -> str:
    """What a compiler calls `arch`: 'sm_90', or 'sm_90a' where `exact` code needs it."""
    number = int(arch.removeprefix("sm"))
    return f"sm_{number}{'a' if exact and number >= _FIRST_EXACT else ''}"
