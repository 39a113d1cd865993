"""Hostile tables for every body that this GPU runs, each tensor in memory of its own, for
compute-sanitizer: it finds what guard bands do not, reads above all. Nothing is compared: see
tests/gpu/test_bounds_gpu.py.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
    python tests/gpu/sanitize_bounds.py [lots of each, 12]
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.extend(
    [str(TESTS.parent), str(TESTS / "ops"), str(TESTS / "ops/bounds"), str(TESTS / "gpu")]
)

from arena import SEED, Arena
from hostile_attention import HostileAttention
from hostile_decode import HostileStep
from hostile_fp8 import HostileFp8
from hostile_grouped import HostileGroups
from hostile_mla import HostileLatents
from hostile_rows import forcing_qkv, hostile_append, hostile_qkv, hostile_rope
from sanitize_grouped import choices, forced

from kernel_hub.ops.attention import forward_sm90 as hopper
from kernel_hub.ops.attention.backward import sm90 as hopper_backward
from kernel_hub.ops.matmul import grouped_plan, paired_plan

LAYOUTS = ("varlen", "varlen_q", "varlen_k", "cache", "varlen_cache")


class OwnMemory(Arena):
    """Each tensor by an allocation of its own, which the sanitizer knows the ends of."""

    def __init__(self, generator: random.Random) -> None:
        self.device, self._generator, self._places = "cuda", generator, []
        self._pages = []

    def _bytes_of(self, name: str, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def check(self) -> None:
        """Nothing: the sanitizer does."""
        torch.cuda.synchronize()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *error: Any) -> None: ...


def attention(generator: random.Random, arena: Arena) -> None:
    HostileAttention(generator, arena).forward()


def backward(generator: random.Random, arena: Arena) -> None:
    case = HostileAttention(generator, arena, layout=generator.choice(LAYOUTS))
    case.backward(deterministic=generator.random() < 0.5)


def fp8(generator: random.Random, arena: Arena) -> None:
    HostileFp8(generator, arena).forward()


def decode(generator: random.Random, arena: Arena) -> None:
    HostileStep(generator, arena).run()


def mla(generator: random.Random, arena: Arena) -> None:
    HostileLatents(generator, arena).run()


def grouped(generator: random.Random, arena: Arena) -> None:
    case = HostileGroups(generator, arena)
    sizes = (case.drawn[name] for name in ("experts", "rows", "n", "k"))
    for choice in choices(grouped_plan.GroupedProblem("grouped_linear", *sizes)):
        patch, _ = forced("grouped_linear", choice)
        with patch:
            case.run()


def qkv(generator: random.Random, arena: Arena) -> None:
    names = ["m8", "m8_deep", "m16", "128x128", "64x128"]
    if torch.cuda.get_device_capability() == (9, 0):
        names += [found.name for found in paired_plan.HOPPER["qkv_linear"]]
    state = generator.getstate()
    for name in names:
        generator.setstate(state)
        with forcing_qkv(name):
            hostile_qkv(generator, arena)


def main(arguments: Sequence[str]) -> int:
    """Launch everything, wait, say what it was."""
    lots = int(arguments[0]) if arguments else 12
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    runs: list[tuple[str, Callable[..., None]]] = [
        ("attention", attention), ("backward", backward), ("decode", decode), ("mla", mla),
        ("rope", hostile_rope), ("append_kv", hostile_append), ("qkv_linear", qkv),
        ("grouped_linear", grouped),
    ]  # fmt: skip
    if is_hopper:
        runs += [("fp8", fp8), ("attention, portable", attention), ("backward, portable", backward)]
    log = cast(Any, sys.stdout)
    for name, run in runs:
        hopper.is_enabled = hopper_backward.is_enabled = "portable" not in name
        for lot in range(lots):
            generator = random.Random(f"{SEED} sanitize {name} {lot}")
            with open(os.devnull, "w", encoding="utf-8") as sys.stdout:  # what was drawn
                run(generator, OwnMemory(generator))
            sys.stdout = log
        torch.cuda.synchronize()
        print(f"launched {name}: {lots} lots", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
