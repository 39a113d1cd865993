"""linear against cuBLAS (torch.matmul) on the shapes of Llama 8B, 70B and an eighth of 70B; with
--epilogues also, for some of them, each fused epilogue and cuBLAS with the epilogue of torch.

256 rows and more: bursts of 6 ms of work after 35 ms of idleness, as clocks fall under longer load.
Fewer rows: CUDA-graph replays. Inputs are rotated past the L2; contenders alternate.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from _ops_common import RESULTS, _gpu_token

from kernel_hub.measure import results, timing
from kernel_hub.testing.compare import compare

module: Any = importlib.import_module("kernel_hub.ops.matmul.linear")
linear: Callable[..., torch.Tensor] = module.linear
Launch = Callable[[], object]
Key = TypeVar("Key")
# name -> (n, k)
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336), "70B qkv": (10240, 8192), "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192), "70B down": (8192, 28672),
    "70B/8 qkv": (1280, 8192), "70B/8 o": (8192, 1024), "70B/8 gate_up": (7168, 8192),
    "70B/8 down": (8192, 3584),
}  # fmt: skip
BURST_US, IDLE_SECONDS = 6000.0, 0.035
FEW_ROWS = 128
EPILOGUES = ("bias", "gelu", "silu", "residual")  # each with a bias
EPILOGUE_SHAPES, EPILOGUE_ROWS = ("8B o", "8B gate_up", "70B o", "70B down"), (1, 64, 1024, 4096)


class Inputs:
    """Sets of (a, b, out) cut from one pool of random numbers, together past the L2."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._pool = torch.randn(1 << 30, device="cuda", dtype=dtype)

    def sets(self, m: int, n: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        each = m * k + n * k
        wanted = -(-timing.L2_FACTOR * timing.l2_bytes() // (2 * (each + m * n)))
        step = -(-each // 1024) * 1024
        count = max(1, min(24, wanted, self._pool.numel() // step))
        made = []
        for i in range(count):
            a, b = self._pool[i * step : i * step + each].split([m * k, n * k])
            out = torch.empty(m, n, device="cuda", dtype=a.dtype)
            made.append((a.view(m, k), b.view(n, k), out))
        return made


def measure(
    contenders: Mapping[Key, Sequence[Launch]], count: int, idle: float, rounds: int
) -> dict[Key, list[float]]:
    """Samples in microseconds a launch, each of one replay of `count` launches."""
    graphs = {}
    for name, launches in contenders.items():
        launches[0]()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            for launch in itertools.islice(itertools.cycle(launches), count):
                launch()
    samples: dict[Key, list[float]] = {name: [] for name in graphs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(graphs), len(graphs)):
            torch.cuda.synchronize()
            time.sleep(idle)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            stop.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / count)
    return samples


def plan_of(m: int, n: int, k: int, rounds: int) -> tuple[int, float, int]:
    """Launches a replay, idle seconds before it, rounds."""
    if m <= FEW_ROWS:
        return 24, 0.0, 5 * rounds
    expected = 2 * m * n * k / 700e6
    return max(4, min(250, int(BURST_US / max(expected, 8)))), IDLE_SECONDS, rounds


def wrong(inputs: tuple[torch.Tensor, ...]) -> str:
    """'' or what is wrong with our output, on up to 256 rows and columns."""
    a, b, out = inputs
    linear(a, b, out=out)
    rows, columns = a[:256], b[:256]
    truth = rows.double() @ columns.double().T
    result = compare(out[:256, :256], truth, rows @ columns.T)
    return "" if result.ok else result.message


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    rows: list[results.ResultRow] = []
    ratios: dict[str, list[float]] = {}
    failures = []
    for name, m in itertools.product(options.shapes, options.tokens):
        n, k = SHAPES[name]
        ss = inputs.sets(m, n, k)
        if message := wrong(ss[0]):
            failures.append(f"{name} {m}: {message}")
            continue
        contenders: dict[str, list[Launch]] = {
            "kernel_hub": [functools.partial(linear, a, b, out=o) for a, b, o in ss],
            "cuBLAS": [functools.partial(torch.matmul, a, b.T, out=o) for a, b, o in ss],
        }
        if options.epilogues and name in EPILOGUE_SHAPES and m in EPILOGUE_ROWS:
            contenders |= fused(ss, m, n)
        samples = measure(contenders, *plan_of(m, n, k, options.rounds))
        case = f"{name} {n}x{k} m{m}"
        rows += results.summarise("linear", case, samples, "us", ratio_to="cuBLAS")
        medians = {label: statistics.median(values) for label, values in samples.items()}
        ratio = medians["cuBLAS"] / medians["kernel_hub"]
        range_of_m = "1-64 rows" if m <= 64 else "65-255 rows" if m < 256 else "256 rows and more"
        which = f"{range_of_m}, {'an eighth of 70B' if '/8' in name else '8B and 70B'}"
        ratios.setdefault(which, []).append(ratio)
        rate = 2 * m * n * k / medians["kernel_hub"] / 1e6
        read = 2 * (n * k + m * k + m * n) / medians["kernel_hub"] / 1e6
        others = "".join(
            f"  {label} {us / medians['kernel_hub']:.3f}"
            for label, us in medians.items()
            if label not in ("kernel_hub", "cuBLAS")
        )
        print(
            f"{case:28} {medians['kernel_hub']:9.2f} us  {rate:6.1f} TFLOP/s  {read:5.2f} TB/s  "
            f"cuBLAS {medians['cuBLAS']:9.2f} us  x {ratio:.3f}{others}",
            flush=True,
        )
    for which, found in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        print(f"{which}: geometric mean {mean:.3f} x cuBLAS, least {min(found):.3f}")
    about = results.environment()
    results.write(options.out or RESULTS / f"{_gpu_token(about['gpu'])}_linear.json", rows)
    for failure in failures:
        print(f"WRONG {failure}", file=sys.stderr)
    return 1 if failures else 0


def fused(ss: Sequence[tuple[torch.Tensor, ...]], m: int, n: int) -> dict[str, list[Launch]]:
    """Each epilogue fused, and as torch has it: by cuBLAS (bias) or compiled, after cuBLAS."""
    bias = torch.randn(n, device="cuda", dtype=ss[0][0].dtype)
    residual = torch.randn(m, n, device="cuda", dtype=ss[0][0].dtype)
    made: dict[str, list[Launch]] = {}
    for label in EPILOGUES:
        more = {"residual": residual} if label == "residual" else {}
        activation = label if label in ("gelu", "silu") else None
        ours = functools.partial(linear, activation=activation, **more)
        made[label] = [functools.partial(ours, a, b, bias, out=out) for a, b, out in ss]
        theirs: list[Launch]
        if label == "bias":
            theirs = [functools.partial(torch.addmm, bias, a, b.T, out=o) for a, b, o in ss]
        else:
            finish = compiled(label)
            finish(ss[0][2], bias, residual)
            theirs = [
                functools.partial(apart, finish, a, b, out, bias, residual) for a, b, out in ss
            ]
        made[f"cuBLAS + {label}"] = theirs
    return made


@functools.cache
def compiled(label: str) -> Callable[..., torch.Tensor]:
    """The epilogue as a kernel of its own."""

    def finish(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = x + bias
        if label == "residual":
            return x + residual
        return torch.nn.functional.gelu(x) if label == "gelu" else torch.nn.functional.silu(x)

    made: Callable[..., torch.Tensor] = torch.compile(finish, dynamic=True)
    return made


def apart(
    finish: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    return finish(torch.matmul(a, b.T, out=out), bias, residual)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epilogues", action="store_true", help="for some shapes, fused too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.tokens = [int(count) for count in options.tokens.split(",")]
    inputs = Inputs({"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype])
    return run(options, inputs)


if __name__ == "__main__":
    sys.exit(main())
