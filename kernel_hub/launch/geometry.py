"""Launch geometry: grid, block, shared memory and launch attributes, checked against their limits.

Pure but for the limits it is handed; every refusal names the value, the limit and its origin.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any, NamedTuple

from ..errors import LaunchConfigError, ParamsError

# CUlaunchConfig: grid x3, block x3, shared bytes, pad, stream, attributes, their count, pad.
CONFIG = struct.Struct("<7I4xQQI4x")
ATTRIBUTE_BYTES = 72
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC, _PRIORITY, _CARVEOUT = 2, 4, 6, 8, 14
PORTABLE_CLUSTER = 8


class Limits(NamedTuple):
    """What one function can be launched with on one device."""

    function: str
    device_name: str
    compute_capability: tuple[int, int]
    max_grid: tuple[int, int, int]
    max_block: tuple[int, int, int]
    max_threads: int
    required_block: tuple[int, int, int] | None
    static_shared_bytes: int
    max_dynamic_shared_bytes: int
    cluster: tuple[int, int, int] | None
    num_multiprocessors: int
    # What the kernel's source states: the one blockDim, the fewest bytes of dynamic shared memory.
    built_block: tuple[int, int, int] | None = None
    least_shared_bytes: int = 0


class LaunchOptions(NamedTuple):
    """The launch attributes beyond grid, block, shared memory and stream."""

    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    programmatic: bool = False
    priority: int | None = None
    carveout: int | None = None

    @classmethod
    def make(
        cls,
        limits: Limits,
        cluster: Any,
        cooperative: Any,
        programmatic: Any,
        priority: Any,
        carveout: Any,
    ) -> LaunchOptions:
        """Options as given to a launch, checked."""
        where = f"{limits.function} on {limits.device_name}"
        if cluster is not None:
            cluster = dims(cluster, "cluster", where)
            size = cluster[0] * cluster[1] * cluster[2]
            if limits.compute_capability < (9, 0):
                raise LaunchConfigError(
                    f"cluster={cluster}: thread-block clusters need compute capability 9.0, "
                    f"{limits.device_name} has {'.'.join(map(str, limits.compute_capability))}"
                )
            if min(cluster) < 1 or size > 2 * PORTABLE_CLUSTER:
                raise LaunchConfigError(
                    f"cluster={cluster} of {where}: 1 to {PORTABLE_CLUSTER} blocks in all "
                    f"(16 where the GPU allows the non-portable size)"
                )
            if limits.cluster is not None and cluster != limits.cluster:
                raise LaunchConfigError(
                    f"cluster={cluster}: {limits.function} is compiled for {limits.cluster}"
                )
        if priority is not None:
            priority = index(priority, "priority", where)
            if not -(2**31) <= priority < 2**31:
                raise LaunchConfigError(f"priority={priority} of {where}: a 32-bit int")
        if carveout is not None:
            carveout = index(carveout, "carveout", where)
            if not -1 <= carveout <= 100:
                raise LaunchConfigError(f"carveout={carveout} of {where}: a percentage, 0 to 100")
        cooperative = _flag(cooperative, "cooperative", where)
        return cls(
            cluster, cooperative, _flag(programmatic, "programmatic", where), priority, carveout
        )

    def encode(self) -> bytes:
        """The CUlaunchAttribute array."""
        parts = []
        if self.cluster is not None:
            parts.append(struct.pack("<I4x3I", _CLUSTER, *self.cluster))
        if self.cooperative:
            parts.append(struct.pack("<I4xi", _COOPERATIVE, 1))
        if self.programmatic:
            parts.append(struct.pack("<I4xi", _PROGRAMMATIC, 1))
        if self.priority is not None:
            parts.append(struct.pack("<I4xi", _PRIORITY, self.priority))
        if self.carveout is not None:
            parts.append(struct.pack("<I4xi", _CARVEOUT, self.carveout))
        return b"".join(part.ljust(ATTRIBUTE_BYTES, b"\0") for part in parts)


# The default of sharedMemBytes: 0, and told from a 0 that the caller gave.
NOT_GIVEN = False


def one_shared(sharedMemBytes: Any, options: dict[str, Any], function: str) -> Any:
    """Dynamic shared memory under whichever of its two names it was given.

    `options` may hold `sharedMem`, the name in CUDA's own launch syntax, and loses it.
    """
    if "sharedMem" not in options:
        check_shared(sharedMemBytes, function)
        return sharedMemBytes
    sharedMem = options.pop("sharedMem")
    if sharedMemBytes is not NOT_GIVEN:
        raise LaunchConfigError(
            f"sharedMem={sharedMem!r:.80} of {function}: sharedMemBytes={sharedMemBytes!r:.80} is "
            "given too, another name for the same; give one"
        )
    return sharedMem


def check_shared(sharedMemBytes: Any, function: str) -> None:
    """Refuse params in the place of sharedMemBytes, where CuPy's launches take them."""
    if isinstance(sharedMemBytes, (tuple, list, Mapping)):
        raise ParamsError(
            f"the third argument of {function} is sharedMemBytes, dynamic shared memory in bytes; "
            f"found a {type(sharedMemBytes).__name__} of {len(sharedMemBytes)} there. params come "
            "fifth: f(gridDim, blockDim, 0, None, params), or f(gridDim, blockDim, params=params)"
        )


KEYWORDS = tuple(LaunchOptions._fields)
_ARGUMENTS = ("gridDim", "blockDim", "sharedMemBytes", "stream", "params", "sharedMem")
# What other launchers call them, where likeness of spelling does not tell.
_CALLED = {
    **dict.fromkeys(("shared_mem", "shared", "smem", "shmem", "shared_bytes"), "sharedMemBytes"),
    **dict.fromkeys(("args", "arguments", "kernel_args"), "params"),
    "grid": "gridDim",
    "block": "blockDim",
    "pdl": "programmatic",
}


def check_keywords(function: str, given: Iterable[str]) -> None:
    """Refuse keywords that no launch takes, and name those that were meant."""
    unknown = [name for name in given if name not in (*KEYWORDS, *_ARGUMENTS)]
    if not unknown:
        return
    from difflib import get_close_matches  # a millisecond, for errors alone

    hints = []
    for name in unknown:
        like = get_close_matches(name, [*_ARGUMENTS[:5], *KEYWORDS], 1)
        if meant := _CALLED.get(name) or next(iter(like), None):
            hints.append(f"{name} is {meant}= here")
    raise ParamsError(
        f"{function}() got unexpected keywords {', '.join(unknown)}; "
        + "".join(f"{hint}; " for hint in hints)
        + f"it takes {', '.join([*_ARGUMENTS[:5], *KEYWORDS])}"
    )


def index(value: Any, name: str, where: str) -> int:
    """`value` as an int, or LaunchConfigError."""
    try:
        return operator.index(value)
    except TypeError:
        raise LaunchConfigError(
            f"{name}={value!r} of {where}: an int, not {type(value).__name__}"
        ) from None


def _flag(value: Any, name: str, where: str) -> bool:
    """`value` as a bool, or LaunchConfigError for what is neither true nor false (an array)."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: torch's
        raise LaunchConfigError(
            f"{name}={value!r:.80} of {where}: True or False, not {type(value).__name__}"
        ) from error


def dims(value: Any, name: str, where: str) -> tuple[int, int, int]:
    """An int or 1 to 3 ints as (x, y, z)."""
    if value is ...:  # the launchers' default, so that a wrong keyword is named before this is
        raise ParamsError(f"{name} of {where} is missing: an int or 1 to 3 ints")
    if isinstance(value, (tuple, list)):
        if not 1 <= len(value) <= 3:
            raise LaunchConfigError(f"{name}={value!r} of {where}: 1 to 3 ints, got {len(value)}")
        numbers = [index(part, name, where) for part in value]
    elif isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        raise LaunchConfigError(
            f"{name}={value!r} of {where}: an int or 1 to 3 ints, not {type(value).__name__}"
        )
    else:
        try:
            numbers = [operator.index(value)]
        except TypeError:
            # Not by __getitem__ alone: a ctypes pointer would be read until the process dies.
            if not hasattr(type(value), "__iter__"):
                index(value, name, where)
            try:
                parts = list(islice(value, 4))
            except TypeError:  # a 0-dimensional array of floats
                parts = [value]
            numbers = [index(part, name, where) for part in parts]
            if not 1 <= len(numbers) <= 3:
                raise LaunchConfigError(f"{name}={value!r} of {where}: 1 to 3 ints") from None
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def check(
    limits: Limits, gridDim: Any, blockDim: Any, sharedMemBytes: Any, options: LaunchOptions
) -> tuple[int, int, int, int, int, int, int]:
    """(grid x, y, z, block x, y, z, shared bytes), or LaunchConfigError."""
    where = f"{limits.function} on {limits.device_name}"
    grid, block = dims(gridDim, "gridDim", where), dims(blockDim, "blockDim", where)
    shared = index(sharedMemBytes, "sharedMemBytes", where)
    for name, value, most in (
        ("gridDim", grid, limits.max_grid),
        ("blockDim", block, limits.max_block),
    ):
        for axis, number, limit in zip("xyz", value, most, strict=True):
            if not 1 <= number <= limit:
                raise LaunchConfigError(
                    f"{name}={value} of {where}: {axis} is {number}, the device takes 1 to {limit}"
                )
    threads = block[0] * block[1] * block[2]
    if limits.required_block is not None and block != limits.required_block:
        raise LaunchConfigError(
            f"blockDim={block} of {where}: the kernel is compiled for exactly "
            f"{limits.required_block} (.reqntid)"
        )
    if limits.built_block is not None and block != limits.built_block:
        raise LaunchConfigError(
            f"blockDim={block} of {where}: the kernel is built for blocks of exactly "
            f"{limits.built_block} threads; pass blockDim={limits.built_block}"
        )
    if threads > limits.max_threads:
        raise LaunchConfigError(
            f"blockDim={block} of {where}: {threads} threads, the function takes at most "
            f"{limits.max_threads} (its __launch_bounds__ and registers)"
        )
    if not 0 <= shared <= limits.max_dynamic_shared_bytes:
        raise LaunchConfigError(
            f"sharedMemBytes={shared} of {where}: the limit is {limits.max_dynamic_shared_bytes} "
            f"(the device's opt-in limit a block less {limits.static_shared_bytes} static bytes)"
        )
    if shared < limits.least_shared_bytes:
        raise LaunchConfigError(
            f"sharedMemBytes={shared} of {where}: the kernel is built for "
            f"{limits.least_shared_bytes} bytes of dynamic shared memory; pass "
            f"sharedMemBytes={limits.least_shared_bytes}"
        )
    cluster = options.cluster or limits.cluster
    if cluster is not None:
        for axis, blocks, part in zip("xyz", grid, cluster, strict=True):
            if blocks % part:
                raise LaunchConfigError(
                    f"gridDim={grid} of {where}: {axis} is not a multiple of cluster={cluster}"
                )
    return (*grid, *block, shared)
