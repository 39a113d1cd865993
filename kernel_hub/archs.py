"""The architectures that kernels are built for, the GPUs of each, and how people write them.

An architecture is a token, `sm90`: the folder of its cubins and their key in the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .errors import ParamsError

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
_SPELLED = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)([af]?)", re.IGNORECASE)


def token_of(arch: Any, argument: str = "arch") -> str:
    """'sm90' of 'sm90', 'sm_90', 'SM90', '90', 90, '9.0' or (9, 0); 'sm90a' of 'sm_90a'.

    Raises ParamsError, which calls it `argument`.
    """
    text = str(arch) if type(arch) is int else arch
    if isinstance(arch, tuple) and len(arch) == 2 and all(type(part) is int for part in arch):
        text = "{}.{}".format(*arch)
    found = _SPELLED.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ParamsError(
            f"{argument}={arch!r:.80} is no architecture: 'sm90' is one (also written sm_90, SM90, "
            f"90, 9.0 or (9, 0)), and so is 'sm_90a'; kernels are built for {', '.join(ARCHS)}"
        )
    return f"sm{found[1]}{found[2]}{found[3].lower()}"


def tokens_of(archs: Any, argument: str = "arch") -> list[str]:
    """The token of each of 'sm80,90', or of a list of such texts, once. Raises ParamsError."""
    if isinstance(archs, str) or not isinstance(archs, Iterable):
        archs = [archs]
    parts = [part for text in archs for part in (text.split(",") if type(text) is str else [text])]
    if not parts:
        raise ParamsError(f"{argument}={archs!r:.80} names no architecture: {', '.join(ARCHS)}, …")
    return list(dict.fromkeys(token_of(part, argument) for part in parts))


def target_of(arch: str, *, exact: bool = False) -> str:
    """What a compiler calls `arch`: 'sm_90', or 'sm_90a' where `exact` code needs it."""
    number = int(arch.removeprefix("sm"))
    return f"sm_{number}{'a' if exact and number >= _FIRST_EXACT else ''}"
