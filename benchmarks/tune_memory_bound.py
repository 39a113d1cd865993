"""Times every variant and launch shape of the memory-bound kernels beside what the plan chooses.

For whoever changes the plans (`_choose` in kernel_hub/ops): prints the best launches of each cell.
Correctness is the tests' business; here a launch that leaves the output unlike the plan's is said.
`--throttle` also tries fewer blocks an SM, by shared memory nobody uses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_rms_norm import formula, fused_formula
from bench_silu_and_mul import formula as silu_formula
from harness import DTYPES, compiled

from kernel_hub.measure import timing
from kernel_hub.ops.core.launch import Launch as Planned
from kernel_hub.ops.rowwise import layer_norm as layer_norm_module
from kernel_hub.ops.rowwise import rms_norm as norm_module
from kernel_hub.ops.rowwise import rope as rope_module
from kernel_hub.ops.rowwise import silu_and_mul as silu_module
from kernel_hub.registry import own

Dims = tuple[int, int, int]
EPS = 1e-6
SHARED_BYTES_AN_SM = 228 << 10
HEAD_DIM, NUM_KV_HEADS = 128, 8


@dataclass(frozen=True)
class Launch:
    """One variant with its launch shape."""

    cubin: str
    function: str
    grid: Dims
    block: Dims
    shared: int = 0

    def __str__(self) -> str:
        shape = f"{'x'.join(map(str, self.grid))} of {'x'.join(map(str, self.block))}"
        return f"{self.function} {shape}" + (f" shared {self.shared}" if self.shared else "")

    def throttled(self) -> Iterator[Launch]:
        """The same with fewer blocks an SM."""
        resident = own[self.cubin][self.function].occupancy(self.block)
        for blocks in (2, 3, 4, 5, 6, 8, 10, 12):
            if blocks < resident:
                shared = (SHARED_BYTES_AN_SM // blocks - 1536) // 128 * 128
                yield replace(self, shared=shared)


def by_vectors(op: str, prefix: str, vecs: int, tokens: int) -> list[Launch]:
    """A norm's variants that hold a row of `vecs` vectors in registers, of one row and several."""
    launches = []
    for per_thread, rows in itertools.product((1, 2, 4), (1, 2, 4)):
        threads = max(32, 32 * -(-vecs // (32 * per_thread)))
        if rows <= tokens and threads * rows <= (1024 if rows == 1 else 512):
            grid, block = (-(-tokens // rows), 1, 1), (threads, rows, 1)
            launches.append(Launch(op, f"{prefix}_vec{per_thread}", grid, block))
    return launches


@dataclass
class Cell:
    """One op on one shape: tensors and parameters of a launch by input set, launches, peer."""

    num_bytes: int
    planned: Launch
    launches: list[Launch]
    params: Callable[[int], tuple[Any, ...]]
    outputs: list[torch.Tensor]
    sets: int
    peer: Callable[[], list[Callable[[], Any]]] | None = None


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def planned(cubin: str, plan: Planned) -> Launch:
    return Launch(cubin, plan.function.name, plan.grid, plan.block, plan.shared_bytes)


def rms_norm(dtype: torch.dtype, tokens: int, hidden: int, residual: bool) -> Cell:
    num_bytes = (4 if residual else 2) * tokens * hidden * dtype.itemsize
    sets = timing.num_sets(num_bytes)
    x, weight = random(sets, tokens, hidden, dtype=dtype), random(hidden, dtype=dtype)
    out = torch.empty_like(x)
    r = random(sets, tokens, hidden, dtype=dtype) if residual else None
    r_out = torch.empty_like(x) if residual else None
    plan = norm_module._plan(
        x[0], None if r is None else r[0], weight, out[0],
        None if r_out is None else r_out[0], 0, False,
    )  # fmt: skip
    chosen, numbers = planned("rms_norm", plan), plan.numbers
    prefix = chosen.function.rpartition("_")[0]
    vecs = hidden * dtype.itemsize // 16
    launches = by_vectors("rms_norm", prefix, vecs, tokens)
    for threads in (128, 256, 512):
        if 128 <= vecs >= threads and not prefix.endswith("flat"):
            launches.append(Launch("rms_norm", f"{prefix}_loop", (tokens, 1, 1), (threads, 1, 1)))

    def params(i: int) -> tuple[Any, ...]:
        tensors = [each[i] for each in (out, r_out, x, r) if each is not None]
        return (*tensors, weight, *numbers, EPS, 0.0)

    def peer() -> list[Callable[[], Any]]:
        if r is None:
            plain = compiled(formula)
            return [partial(plain, x[i], weight) for i in range(sets)]
        fused = compiled(fused_formula)
        return [partial(fused, x[i], r[i], weight) for i in range(sets)]

    outputs = [t for t in (out, r_out) if t is not None]
    return Cell(num_bytes, chosen, launches, params, outputs, sets, peer)


def layer_norm(dtype: torch.dtype, tokens: int, hidden: int, to: torch.dtype | None) -> Cell:
    num_bytes = tokens * hidden * (dtype.itemsize + (to or dtype).itemsize)
    sets = timing.num_sets(num_bytes)
    x, weight, bias = (
        random(*shape, dtype=dtype) for shape in ((sets, tokens, hidden), (hidden,), (hidden,))
    )
    out = torch.empty_like(x, dtype=to)
    scale = x.new_empty(sets, tokens, dtype=torch.float32) if to else None
    given = layer_norm_module.NormGiven(x[0], weight, bias, None, EPS, 0.0, False)
    plan = layer_norm_module._norm.plan(
        given, layer_norm_module.Outs(out[0], None if scale is None else scale[0], None), 0
    )
    chosen = planned("layer_norm", plan)
    prefix, vecs = chosen.function.rpartition("_")[0], hidden * dtype.itemsize // 16
    launches = by_vectors("layer_norm", prefix, vecs, tokens)

    def params(i: int) -> tuple[Any, ...]:
        scales = None if scale is None else scale[i]
        return (out[i], scales, None, x[i], None, weight, bias, *plan.numbers, EPS, 0.0)

    def peer() -> list[Callable[[], Any]]:
        function = compiled(partial(torch.nn.functional.layer_norm, normalized_shape=(hidden,)))
        return [partial(function, x[i], weight=weight, bias=bias) for i in range(sets)]

    return Cell(num_bytes, chosen, launches, params, [out], sets, None if to else peer)


def silu_and_mul(dtype: torch.dtype, tokens: int, size: int) -> Cell:
    num_bytes = 3 * tokens * size * dtype.itemsize
    sets = timing.num_sets(num_bytes)
    x, out = random(sets, tokens, 2 * size, dtype=dtype), random(sets, tokens, size, dtype=dtype)
    plan = silu_module._gated.plan(x[0], (), out[0], None, 0)
    chosen, vecs = planned("silu_and_mul", plan), size * dtype.itemsize // 16
    launches = []
    for threads in (64, 128, 192, 256, 384, 448, 512, 704, 768, 896, 1024):
        blocks = -(-vecs // threads)
        if blocks * threads <= 1.08 * vecs:
            launches.append(replace(chosen, grid=(blocks, tokens, 1), block=(threads, 1, 1)))

    def peer() -> list[Callable[[], Any]]:
        function = compiled(silu_formula)
        return [partial(function, x[i]) for i in range(sets)]

    def params(i: int) -> tuple[Any, ...]:
        return (out[i], x[i], *plan.numbers)

    return Cell(num_bytes, chosen, launches, params, [out], sets, peer)


def rope(dtype: torch.dtype, tokens: int, num_heads: int, in_place: bool) -> Cell:
    total = num_heads + NUM_KV_HEADS
    num_bytes = 2 * tokens * total * HEAD_DIM * dtype.itemsize
    sets = timing.num_sets(num_bytes)
    q = random(sets, tokens, num_heads, HEAD_DIM, dtype=dtype)
    k = random(sets, tokens, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    cos, sin = (random(tokens, HEAD_DIM // 2, dtype=dtype) for _ in range(2))
    out_q, out_k = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
    plan = rope_module._plan(q[0], k[0], cos, sin, None, False, HEAD_DIM, out_q[0], out_k[0], 0)
    chosen, width = planned("rope", plan), HEAD_DIM * dtype.itemsize // 32
    prefix = chosen.function.rpartition("_")[0]
    launches = []
    for per_thread, rounds, at_once in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4)):
        heads = -(-total // (per_thread * rounds))
        if 64 <= width * heads * at_once <= 512 and at_once <= tokens:
            # Flat variants: rounds are blocks of heads along gridDim.y.
            grid, block = (-(-tokens // at_once), rounds, 1), (width, heads, at_once)
            launches.append(Launch("rope", f"{prefix}_vec{per_thread}", grid, block))

    def params(i: int) -> tuple[Any, ...]:
        return (out_q[i], out_k[i], q[i], k[i], cos, sin, None, *plan.numbers)

    outputs = [] if in_place else [out_q, out_k]
    return Cell(num_bytes, chosen, launches, params, outputs, sets)


FAMILIES: dict[str, tuple[Callable[..., Cell], tuple[int, ...]]] = {
    "rms_norm": (partial(rms_norm, residual=False), (1024, 2048, 4096, 5120, 8192, 16384)),
    "add_rms_norm": (partial(rms_norm, residual=True), (1024, 2048, 4096, 5120, 8192, 16384)),
    "layer_norm": (partial(layer_norm, to=None), (1024, 2048, 4096, 5120, 8192)),
    "layer_norm_e4m3": (partial(layer_norm, to=torch.float8_e4m3fn), (1024, 4096, 8192)),
    "silu_and_mul": (silu_and_mul, (11008, 14336, 28672)),
    "rope": (partial(rope, in_place=False), (32, 64)),
    "rope_in_place": (partial(rope, in_place=True), (32, 64)),
}


def measure(cell: Cell, timer: timing.GraphTimer, options: argparse.Namespace) -> dict[str, float]:
    """Name -> median us; the plan's own launch is marked."""
    launches = dict.fromkeys([cell.planned, *cell.launches])
    if options.throttle:
        launches |= dict.fromkeys(again for one in list(launches) for again in one.throttled())
    contenders: dict[str, list[Callable[[], Any]]] = {}
    expected: list[torch.Tensor] = []
    for launch in launches:
        function = own[launch.cubin][launch.function]
        calls: list[Callable[[], Any]] = [
            partial(function, launch.grid, launch.block, launch.shared, None, cell.params(i))
            for i in range(cell.sets)
        ]
        for out in cell.outputs:
            out[0].fill_(float("nan"))
        calls[0]()
        torch.cuda.synchronize()
        found = [out[0].float() for out in cell.outputs]
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            if not torch.allclose(a, b, rtol=1e-2, atol=1e-2):
                print(f"UNLIKE THE PLAN'S OUTPUT: {launch}")
        contenders[f"{launch}{' (plan)' if launch == cell.planned else ''}"] = calls
    if options.peer and cell.peer is not None:
        contenders["torch.compile"] = cell.peer()
    samples = timer.measure(contenders, cell.num_bytes)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--tokens", default="1,64,1024,8192,32768")
    parser.add_argument("--sizes", default="", help="only these sizes (rope: query heads)")
    parser.add_argument("--throttle", action="store_true", help="also with fewer blocks an SM")
    parser.add_argument("--peer", action="store_true", help="torch.compile beside them")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=500, help="stop starting cells then")
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "tune.json")
    options = parser.parse_args()
    wanted = {int(size) for size in options.sizes.split(",") if size}
    began, timer = time.monotonic(), timing.GraphTimer(options.rounds)
    copy = timing.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}; copy {copy:.3f} TB/s")
    rows = []
    for family in options.families.split(","):
        make, sizes = FAMILIES[family]
        for size, tokens in itertools.product(sizes, map(int, options.tokens.split(","))):
            if (wanted and size not in wanted) or time.monotonic() - began > options.seconds:
                continue
            with torch.no_grad():
                cell = make(DTYPES[options.dtype], tokens, size)
                times = measure(cell, timer, options)
            print(f"\n{family} {tokens} x {size}")
            ordered = sorted(times.items(), key=lambda item: item[1])
            for i, (name, us) in enumerate(ordered):
                rate = cell.num_bytes / us / 1e6
                rows.append({"family": family, "tokens": tokens, "size": size, "name": name,
                             "us": us, "tbps": rate, "of_copy": rate / copy})  # fmt: skip
                if i < options.top or name.endswith("(plan)") or name == "torch.compile":
                    print(f"  {rate:6.3f} TB/s {us:9.2f} us  {name}")
            del cell
            torch.cuda.empty_cache()
    options.json.write_text(json.dumps(rows, indent=1))
    print(f"\n{time.monotonic() - began:.0f} s; {len(rows)} rows in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
