"""A kernel in many configurations in one folder, for the dispatcher's tests in Python and in C."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

POINTER, GRID = "*fp32", "cdiv(n, BLOCK), heads"
NAMES = ["x_ptr", "bias_ptr", "out_ptr", "n", "stride", "scale"]
BLOCKS = (256, 512)
# What each configuration assumes: 16 divides pointers and n, the stride is 1, there is no bias.
ASSUMED = [
    (False, False, False), (False, False, True), (True, False, False), (True, True, False),
    (True, True, True),
]  # fmt: skip


def build(
    out: Path,
    arch: str,
    grid: str | None = "cdiv(n, BLOCK)",
    assumed: list[tuple[bool, bool, bool]] = ASSUMED,
) -> None:
    """Every configuration, into the collection `out`."""
    from triton_kernels import scale_kernel

    from kernel_hub.formats import triton

    for aligned, unit, plain in assumed:
        hint = ":16" if aligned else ""
        signature = dict.fromkeys(NAMES[:3], f"{POINTER}{hint}") | {
            "n": f"i32{hint}",
            "stride": "i32:1" if unit else "i32",
            "scale": "fp32",
        }
        constants: dict[str, Any] = {"bias_ptr": None} if plain else {}
        if plain:
            del signature["bias_ptr"]
        configs = [{"BLOCK": block, "num_warps": 4} for block in BLOCKS]
        triton.compile_configs(
            scale_kernel, configs, signature=signature, constexprs=constants, arch=arch, out=out,
            grid=grid,
        )  # fmt: skip


def fitting(values: dict[str, int]) -> tuple[bool, bool, bool]:
    """What the configuration assumes that these arguments get: the most that holds."""
    pointers = [values[name] for name in NAMES[:3] if name != "bias_ptr"]
    for aligned, unit, plain in reversed(ASSUMED):
        checked = [*pointers, values["n"], *([] if plain else [values["bias_ptr"]])]
        if (
            (not aligned or not any(value % 16 for value in checked))
            and (not unit or values["stride"] == 1)
            and plain == (values["bias_ptr"] == 0)
        ):
            return aligned, unit, plain
    raise AssertionError("the first two assume nothing else")


def drawn(rng: random.Random) -> dict[str, int]:
    """Arguments: addresses, 0 for no bias, sizes."""

    def address() -> int:
        return 0x10000 + 16 * rng.randrange(1 << 20) + (4 if rng.random() < 0.15 else 0)

    return {
        "x_ptr": address(),
        "bias_ptr": 0 if rng.random() < 0.5 else address(),
        "out_ptr": address(),
        "n": rng.randrange(1, 5000) * rng.choice([1, 16, 16]),
        "stride": rng.choice([1, 1, 2, 16]),
        "scale": 2,
    }


def assumed_by(name: str, described: Any) -> tuple[int, tuple[bool, bool, bool]]:
    """(BLOCK, what it assumes) of a configuration, from what the collection says."""
    plain = "bias_ptr" not in described.declared
    unit = described.declared["stride"].endswith(":1")
    aligned = described.declared["x_ptr"].endswith(":16")
    return described.constexprs["BLOCK"], (aligned, unit, plain)
