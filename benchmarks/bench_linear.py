"""linear against cuBLAS (torch.matmul) on the shapes of Llama 8B and 70B.

256 rows and more: bursts of 6 ms of work after 35 ms of idleness, as clocks fall under longer load.
Fewer rows: CUDA-graph replays. Inputs are rotated past the L2; contenders alternate.
`--tune` times every variant that applies and prints the lines of kernel_hub/ops/_linear_table.py.
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
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from _ops_common import RESULTS, _gpu_token

from kernel_hub.ops import _linear_launch, _linear_plan
from kernel_hub.testing import results, timing
from kernel_hub.testing.compare import compare

module: Any = importlib.import_module("kernel_hub.ops.linear")
linear: Callable[..., torch.Tensor] = module.linear
Launch = Callable[[], object]
Key = TypeVar("Key")
# name -> (n, k)
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336), "70B qkv": (10240, 8192), "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192), "70B down": (8192, 28672),
}  # fmt: skip
BURST_US, IDLE_SECONDS = 6000.0, 0.035
FEW_ROWS = 128
EPILOGUES = {
    "bias": {}, "gelu": {"activation": "gelu"}, "silu": {"activation": "silu"}, "residual": {}
}  # fmt: skip


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
        with torch.cuda.graph(graphs[name]):
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


def forced(choice: _linear_plan.Choice, ss: Sequence[tuple[torch.Tensor, ...]]) -> list[Launch]:
    """Launches of one variant, whatever the plan would take."""
    with unittest.mock.patch.object(_linear_launch, "choose", lambda *_: choice):
        plans = [_linear_launch.plan_launch(a, b, None, 0, None, out) for a, b, out in ss]
    return [
        functools.partial(plan.run, a, b, None, None, out)
        for plan, (a, b, out) in zip(plans, ss, strict=True)
    ]


def choices(m: int, n: int, k: int) -> Iterator[tuple[str, int, _linear_plan.Choice]]:
    """(name, group or shares of k, launch) of what may be the fastest."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    costs = {x: _linear_plan.hopper_cost(x, num_sms, m, n, k) for x in _linear_plan.HOPPER}
    known = {name: cost for name, cost in costs.items() if cost is not None}
    least = min(known.values())
    for name, cost in known.items():
        if cost <= 1.5 * least:
            groups = (8,) if m <= 1024 else (4, 8, 16)
            for group in groups:
                yield name, group, _linear_plan.hopper_choice(name, num_sms, m, n, k, group)
    if m <= 16:
        for splits in (1, 2):
            choice = next(_linear_plan.portable_choices((9, 0), m, n, k, splits, num_sms))
            yield choice.variant, splits, choice


def tune(options: argparse.Namespace, inputs: Inputs) -> None:
    for name in options.shapes:
        n, k = SHAPES[name]
        lines = []
        for m in options.tokens:
            ss = inputs.sets(m, n, k)
            contenders = {
                (variant, group): forced(choice, ss) for variant, group, choice in choices(m, n, k)
            }
            samples = measure(contenders, *plan_of(m, n, k, options.rounds))
            medians = {key: statistics.median(values) for key, values in samples.items()}
            variant, group = min(medians, key=medians.__getitem__)
            lines.append((m, variant, group))
            print(f"# {name} {m}: {variant} {group} {min(medians.values()):.2f} us", flush=True)
        print(f"    ({n}, {k}): {lines},", flush=True)


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    rows: list[results.Row] = []
    ratios: dict[bool, list[float]] = {True: [], False: []}
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
        if options.epilogues:
            contenders |= fused(ss, m, n)
        samples = measure(contenders, *plan_of(m, n, k, options.rounds))
        case = f"{name} {n}x{k} m{m}"
        rows += results.summarise("linear", case, samples, "us", ratio_to="cuBLAS")
        medians = {label: statistics.median(values) for label, values in samples.items()}
        ratio = medians["cuBLAS"] / medians["kernel_hub"]
        ratios[m <= FEW_ROWS].append(ratio)
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
    for few, found in ratios.items():
        if found:
            mean = math.exp(statistics.fmean(map(math.log, found)))
            which = f"up to {FEW_ROWS} rows" if few else "more rows"
            print(f"{which}: geometric mean {mean:.3f} x cuBLAS, least {min(found):.3f}")
    about = results.environment()
    results.write(options.out or RESULTS / f"{_gpu_token(about['gpu'])}_linear.json", rows)
    for failure in failures:
        print(f"WRONG {failure}", file=sys.stderr)
    return 1 if failures else 0


def fused(ss: Sequence[tuple[torch.Tensor, ...]], m: int, n: int) -> dict[str, list[Launch]]:
    bias = torch.randn(n, device="cuda", dtype=ss[0][0].dtype)
    residual = torch.randn(m, n, device="cuda", dtype=ss[0][0].dtype)
    made: dict[str, list[Launch]] = {}
    for label, extra in EPILOGUES.items():
        keywords: dict[str, Any] = {"residual": residual} if label == "residual" else extra
        made[label] = [functools.partial(linear, a, b, bias, out=o, **keywords) for a, b, o in ss]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epilogues", action="store_true", help="time fused epilogues too")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.tokens = [int(count) for count in options.tokens.split(",")]
    inputs = Inputs({"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype])
    if options.tune:
        tune(options, inputs)
        return 0
    return run(options, inputs)


if __name__ == "__main__":
    sys.exit(main())
