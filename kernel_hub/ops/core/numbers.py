"""Arguments that are no tensors: numbers, counts, switches, names and dtypes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...arrays.dtypes import BOOL, FLOATING, INTEGER
from .refusals import refuse

_NUMBERS = (int, float, INTEGER, FLOATING, torch.SymInt, torch.SymFloat)
_COUNTS = (int, INTEGER, torch.SymInt)
_FLAGS = (bool, int, BOOL, torch.SymBool, type(None))
_TOKENS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "e4m3": "float8_e4m3fn"}
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
# Sizes are C ints on the device, and an index may pass the end by one block's span.
MAX_SIZE = 2**30
# Kernels take numbers as fp32, a scale of scores times log2(e) as well.
MAX_NUMBER = 2.0**127


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


def check_number(op: str, argument: str, value: Any, *, least: float = -math.inf) -> float:
    """`value` as a float that fits fp32, `least` or more."""
    if not isinstance(value, _NUMBERS):
        is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
        do = f"; pass {argument}=float({value!r})" if is_number else ""
        raise refuse(op, argument, "a number", _shown(value) + do)
    if not -math.inf < value < math.inf:
        raise refuse(op, argument, "a finite number", value)
    if value < least:
        raise refuse(op, argument, f"at least {least:g}", value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value  # a tracer's number
    if not -MAX_NUMBER <= (value if isinstance(value, int) else float(value)) <= MAX_NUMBER:
        raise refuse(op, argument, "a number that fits fp32, up to 2**127", f"{value!r:.60}")
    return float(value)


def check_whole(op: str, argument: str, value: Any, *, least: int = 0, expected: str = "") -> int:
    """`value`, `least` or more, as a Python int, or as a tracer's; NumPy's fit no kernel."""
    if type(value) is int and value >= least:
        return value
    if not isinstance(value, _COUNTS) or isinstance(value, bool):
        raise refuse(op, argument, expected or "a whole number", _shown(value))
    if value < least:
        raise refuse(op, argument, expected or f"at least {least}", value)
    return _plain(value)


def _plain(value: Any) -> int:
    """Of a whole number Python's, or a tracer's."""
    return value if isinstance(value, torch.SymInt) else int(value)


def check_count(op: str, argument: str, value: Any, *, least: int = 0) -> int:
    """As `check_whole`, of what fits a C int."""
    value = check_whole(op, argument, value, least=least)
    if value > MAX_SIZE:
        raise refuse(op, argument, f"at most {MAX_SIZE}", f"{value!r:.60}")
    return value


def check_flag(op: str, argument: str, value: Any) -> None:
    """`value` must be True or False, or what counts as one of them."""
    if not isinstance(value, _FLAGS):
        raise refuse(op, argument, "True or False", _shown(value))


def is_batch(op: str, deterministic: Any) -> bool:
    """Whether results may not depend on the batch: 'batch', not True or False."""
    if type(deterministic) is not str:
        check_flag(op, "deterministic", deterministic)
        return False
    if deterministic != "batch":
        raise refuse(op, "deterministic", "True, False or 'batch'", _shown(deterministic))
    return True


def check_flags(op: str, **flags: Any) -> None:
    """Each must be True or False, or what counts as one of them."""
    for argument, value in flags.items():
        check_flag(op, argument, value)


def check_choice(op: str, argument: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    """What `choices` has for `value`, one of its keys."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        *names, last = map(repr, choices)
        expected = f"{', '.join(names)} or {last}"
        raise refuse(op, argument, expected, f"{value!r:.60}") from None


def check_dtype(op: str, argument: str, value: Any, dtypes: Sequence[torch.dtype]) -> None:
    """`value` must be one of `dtypes`, or None."""
    if value is not None and (not isinstance(value, torch.dtype) or value not in dtypes):
        found = f"{value!r:.60}"
        if isinstance(value, str):
            text = value.removeprefix("torch.")
            meant = getattr(torch, _TOKENS.get(text, text), None)
            if isinstance(meant, torch.dtype):
                found = f"the text {value!r}: pass {meant}, no text"
        raise refuse(op, argument, " or ".join(map(str, dtypes)), found)


def check_window(op: str, window_size: Any) -> tuple[int, int]:
    """(left, right) of a window: whole numbers from -1, which is no bound."""
    expected = "two whole numbers from -1 (no bound), (left, right)"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise refuse(op, "window_size", expected, f"{window_size!r:.60}")
    for side in window_size:
        if not isinstance(side, _COUNTS) or isinstance(side, bool) or side < -1:
            raise refuse(op, "window_size", expected, f"{tuple(window_size)!r:.60}")
    # A window no sequence can reach the end of is none; device arithmetic is in C ints.
    left, right = (-1 if side >= MAX_SIZE else _plain(side) for side in window_size)
    return left, right


def last_size(x: Any) -> Any:
    """The last size of a tensor, for a default; 0 where there is none, which checks will name."""
    try:
        return x.shape[-1] if isinstance(x, torch.Tensor) and x.dim() else 0
    except (RuntimeError, ValueError):  # nested, or not initialised
        return 0
