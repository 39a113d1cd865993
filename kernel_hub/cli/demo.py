"""`kernel-hub demo`: ops on real tensors against their references, on the GPU or the CPU."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import driver
from ..errors import KernelHubError
from ..manifest import open_collection
from . import _console
from ._gather import KNOWN_GPUS, choices

if TYPE_CHECKING:
    from ..testing.demo import Result

NAME = "demo"
HELP = "run ops on real tensors, on the GPU or the CPU, against their references"
EXAMPLE = "kernel-hub demo"
GPU_TOKENS, CPU_TOKENS = 8192, 64


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"rows of every tensor (default {GPU_TOKENS} on a GPU, {CPU_TOKENS} on the CPU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def no_gpu() -> str | None:
    """Why nothing can be launched here, or None."""
    try:
        driver.get().primary_context(0)
    except KernelHubError as error:
        return str(error).splitlines()[0].removesuffix(". Tried:") + " (see kernel-hub doctor)"
    return None


def no_torch() -> str | None:
    """Why the ops cannot run, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install torch)"
    try:
        importlib.import_module("kernel_hub.ops")
    except (ImportError, OSError) as error:
        return f"torch does not import: {error}"
    return None


def run_ops(device: str, num_tokens: int) -> list[Result]:
    """The cases in every dtype on `device`; on a GPU timed too."""
    from ..testing import demo, timing

    measure: Callable[[demo.Case], Result]
    cases = list(demo.cases(device, num_tokens))  # which make their tensors when they are run
    with _console.progress(len(cases), f"ops on {device}") as advance:
        if device == "cuda":
            copy = timing.copy_bandwidth()
            measure = partial(demo.measured, timer=timing.GraphTimer(), copy_terabytes_per_s=copy)
        else:
            measure = demo.checked
        results = []
        for case in cases:
            advance(f"{case.op} {case.dtype}")
            results.append(measure(case))
    return results


def numpy_launch() -> float:
    """Launch a shipped kernel on DeviceArrays, without torch; the largest error."""
    import numpy as np

    from .. import DeviceArray, Kernel

    random = np.random.default_rng(0)
    x, y = (random.standard_normal(100_003, dtype=np.float32) for _ in range(2))
    out = DeviceArray.zeros(x.shape)
    arrays = [out, DeviceArray.from_numpy(x), DeviceArray.from_numpy(y)]
    Kernel("launch_probe").launch_probe_5(
        gridDim=-(-x.size // 256), blockDim=256, params=[*arrays, x.size, 0.5]
    )
    return float(np.abs(out.to_numpy() - (x + np.float32(0.5) * y)).max())


def resolver_rows() -> list[list[str]]:
    """For each shipped cubin, the architecture that each known GPU would load."""
    collection = open_collection()
    columns = [choices(collection, capability) for capability in KNOWN_GPUS]
    return [
        [row[0].name, *(choice.entry.arch if choice.entry else "-" for choice in row)]
        for row in zip(*columns, strict=True)
    ]


def run(args: argparse.Namespace) -> int:
    without_gpu, without_torch = no_gpu(), no_torch()
    device = "cpu" if without_gpu or without_torch or not _torch_has_cuda() else "cuda"
    results: list[Result] = []
    if without_torch is None:
        results = run_ops(device, args.tokens or (GPU_TOKENS if device == "cuda" else CPU_TOKENS))
    error = None if without_gpu or device == "cuda" else numpy_launch()
    failed = [result for result in results if not result.ok]
    ok = not failed and (error is None or error <= 1e-6)
    if args.json:
        _console.as_json(
            {
                "ok": ok,
                "device": device,
                "no_gpu": without_gpu,
                "no_torch": without_torch,
                "ops": [asdict(result) for result in results],
                "numpy_launch_error": error,
                "would_load": resolver_rows(),
            }
        )
        return 0 if ok else 1
    _print_ops(results, device)
    if without_torch:
        _console.note(f"the ops did not run: {without_torch}")
    if without_gpu:
        _console.note(f"no kernel was launched: {without_gpu}")
    elif device == "cpu":
        _console.note("the ops ran on the CPU: they need a torch with CUDA to use the GPU")
        _console.note(
            f"launch_probe_5 ran on {driver.get().device_name(0)} on NumPy data without torch: "
            f"largest error {error:.2g}"
        )
    if device == "cpu":
        _print_resolver()
    for result in failed:
        _console.note(f"FAILED {result.dtype} {result.message}")
    if results:
        where = f"on {_where(device)}"
        _console.note(f"{len(results) - len(failed)} of {len(results)} ops are right {where}")
    return 0 if ok else 1


def _torch_has_cuda() -> bool:
    from ..tensors import loaded_torch

    torch = loaded_torch()
    return torch is not None and bool(torch.cuda.is_available())


def _where(device: str) -> str:
    return driver.get().device_name(0) if device == "cuda" else "the CPU (the reference path)"


def _print_ops(results: list[Result], device: str) -> None:
    if not results:
        return
    columns = ["op", "shape", "dtype", "max error", "allowed", "result"]
    rows: list[list[Any]] = [
        [r.op, r.shape, r.dtype, f"{r.error:.2e}", f"{r.limit:.2e}", "ok" if r.ok else "WRONG"]
        for r in results
    ]
    if device == "cuda":
        columns += ["us", "TB/s", "of copy"]
        for row, r in zip(rows, results, strict=True):
            row += [f"{r.time_us:.1f}", f"{r.terabytes_per_s:.2f}", f"{r.share_of_copy:.0%}"]
    _console.heading(f"ops on {_where(device)}, against fp64 references")
    _console.table(columns, rows, right=["max error", "allowed", "us", "TB/s", "of copy"])


def _print_resolver() -> None:
    _console.heading("on a GPU of these compute capabilities, these cubins would be loaded")
    gpus = [f"{major}.{minor} ({names})" for (major, minor), names in KNOWN_GPUS.items()]
    _console.table(["cubin", *gpus], resolver_rows())
