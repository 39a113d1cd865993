"""What a caller asks of an fmha_v2 kernel besides tensors, against what the kernel's name says."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any

import numpy as np

from ...errors import LaunchConfigError
from .names import SLIDING, KernelName

NO_WINDOW = 2**31 - 1
_MAX_SOFTCAP = 1 << 24  # what a float holds exactly
_NOT_RUN = ("sage_", "skipSoftmax", "mtp", "scale_max")


def check_options(
    name: KernelName,
    causal: bool | None,
    window_size: tuple[int, int],
    chunk_size: int | None,
    softcap: float | None,
    alibi: bool,
) -> int:
    """The options against what the kernel's name says it does; returns the window, or -1."""
    if unknown := [a for a in name.attributes if a.startswith(_NOT_RUN)]:
        raise LaunchConfigError(f"{name}: kernels with {', '.join(unknown)} are not run here")
    for option, flag in (("causal", causal), ("alibi", alibi)):
        if not isinstance(flag, (bool, np.bool_)) and not (option == "causal" and flag is None):
            raise LaunchConfigError(f"{option}={flag!r:.80}: expected True or False")
    sliding = name.mask in SLIDING
    is_causal = sliding or name.mask == "causal"
    if causal is not None and (bool(causal) != is_causal or name.mask == "custom_mask"):
        raise LaunchConfigError(
            f"causal={causal}: {name} has the mask {name.mask}; take a kernel with "
            + ("_causal" if causal else "no mask word")
            + " in its name"
        )
    try:
        if not isinstance(window_size, (tuple, list)):
            raise TypeError
        left, right = map(index, window_size)
    except (TypeError, ValueError):
        left, right = -2, 0
    if left < -1 or right not in (-1, 0) or left >= NO_WINDOW - 1:
        raise LaunchConfigError(f"window_size={window_size!r:.80}: expected (left, 0) or (-1, -1)")
    for argument, value in (
        ("window_size", None if left < 0 else left),
        ("chunk_size", chunk_size),
    ):
        if value is not None and not sliding:
            raise LaunchConfigError(
                f"{argument}: {name} has the mask {name.mask}; take one with "
                "_sliding_or_chunked_causal or _sliding_window_causal in its name"
            )
    if chunk_size is not None:
        good = type(chunk_size) is int and 2 <= chunk_size < 2**31
        if not good or chunk_size & (chunk_size - 1) or left >= 0 or name.variant != "tma_ws":
            raise LaunchConfigError(
                f"chunk_size={chunk_size!r}: a power of two, without window_size, and only tma_ws "
                f"kernels know chunks ({name})"
            )
    if (softcap is not None) != ("softcapping" in name.attributes):
        raise LaunchConfigError(
            f"softcap={softcap}: {name} is a kernel "
            + ("with softcapping: it needs one" if softcap is None else "without _softcapping")
        )
    if alibi and ("softcapping" in name.attributes or not is_causal):
        raise LaunchConfigError(
            f"alibi=True: {name} adds no ALiBi, only kernels with a causal mask and without "
            "softcapping do"
        )
    if name.variant == "tma_ws" and alibi != ("alibi" in name.attributes):
        raise LaunchConfigError(
            f"alibi={alibi}: {name} {'has no' if alibi else 'always adds'} ALiBi"
        )
    return left


def check_sinks(name: KernelName) -> None:
    """Refuse sinks where the kernel weighs them wrongly.

    e4m3 kernels that take their exponentials in base e, those with ALiBi or softcapping, scale
    scores by 256 = e^5.545 and a sink by e^8: it counts 11.6 times.
    """
    in_base_e = {"alibi", "softcapping"} & set(name.attributes)
    if name.dtype == "e4m3" and in_base_e:
        raise LaunchConfigError(
            f"attention_sinks: {name} weighs a sink e^8 / 256 = 11.6 times, a fault of e4m3 ones "
            f"with _{' or _'.join(sorted(in_base_e))}: take a bf16 or fp16 kernel"
        )


@dataclass
class Factors:
    """Factors of QK^T and of PV, before they are written as the kernel reads them."""

    qk: float
    pv: float


def read_softcap(name: KernelName, softcap: float | None) -> int | None:
    """The cap as the kernels read it: an unsigned integer, which they convert to a float."""
    if softcap is None:
        return None
    number = _finite(softcap)
    if number is None or number != int(number) or not 0 < number <= _MAX_SOFTCAP:
        raise LaunchConfigError(
            f"softcap={softcap!r:.80}: expected a whole number from 1 to {_MAX_SOFTCAP}, as {name} "
            "reads an integer"
        )
    return int(number)


def read_scales(
    name: KernelName, softmax_scale: float | None, softcap: int | None, factors: dict[str, float]
) -> Factors:
    given: dict[str, Any] = {"softmax_scale": softmax_scale, **factors}
    numbers: dict[str, float] = {}
    for argument, value in given.items():
        positive = argument != "softmax_scale"
        absent = value is None and argument not in factors
        if absent:
            continue
        number = _finite(value)
        if number is None or (positive and number <= 0):
            raise LaunchConfigError(
                f"{argument}={value!r:.80}: expected a finite "
                f"{'positive ' if positive else ''}number"
            )
        numbers[argument] = number
        if argument in factors and number != 1 and name.dtype != "e4m3":
            raise LaunchConfigError(f"{argument}={value}: only e4m3 kernels have scales ({name})")
    scale = numbers.get("softmax_scale", name.head_dim**-0.5)
    scale *= numbers["q_scale"] * numbers["k_scale"] / (softcap or 1)
    return Factors(scale, numbers["v_scale"] / numbers["out_scale"])


def _finite(value: Any) -> float | None:
    """`value` as a float; None where it is no number or none that a float holds."""
    try:
        number = float(value) if isinstance(value, Real) and value is not True else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def bits(value: float, dtype: str) -> int:
    """`value` as the kernels read a factor: float bits, or those of a half twice."""
    try:
        if not math.isfinite(value):
            raise OverflowError
        if dtype == "fp32":
            return int.from_bytes(struct.pack("<f", value), "little")
        return int.from_bytes(struct.pack("<e", value) * 2, "little")
    except OverflowError:
        raise LaunchConfigError(f"a factor of {value} overflows the kernel's {dtype}") from None
