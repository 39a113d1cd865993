"""`kernel-hub demo`: kernels on real data against references, on the GPU or the CPU."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import driver
from ..archs import KNOWN_GPUS
from ..collection.manifest import open_collection
from ..errors import KernelHubError
from .parts import console
from .parts.gather import choices

if TYPE_CHECKING:
    from ..measure.rates import Result

NAME = "demo"
HELP = "run kernels on real data against references, on the GPU or the CPU (exit code 0 or 1)"
EXAMPLE = "kernel-hub demo"
GPU_TOKENS, NUMPY_TOKENS, CPU_TOKENS = 8192, 2048, 64
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class DemoReport:
    """What ran, and why other things did not. `problems` are what went wrong, each said whole."""

    no_gpu: str | None
    no_torch: str | None
    torch_on_gpu: bool = False
    ops: list[Result] = field(default_factory=list)
    numpy: list[Result] = field(default_factory=list)
    words: str | None = None  # of the engine
    problems: list[str] = field(default_factory=list)

    def try_to(self, run: Callable[..., list[Any]], *args: Any) -> list[Any]:
        """What `run(*args)` gives, or nothing and a problem: a refusal of the runtime."""
        try:
            return run(*args)
        except KernelHubError as error:
            self.problems.append(str(error))
            return []

    @property
    def wrong(self) -> list[Result]:
        """What ran and is off by more than is allowed."""
        return [result for result in (*self.numpy, *self.ops) if not result.ok]

    @property
    def ok(self) -> bool:
        """Something ran, all of it was right, and nothing failed."""
        return bool(self.ops or self.numpy) and not self.wrong and not self.problems


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help=f"rows of the tensors (default {GPU_TOKENS} on a GPU, {NUMPY_TOKENS} there without "
        f"torch, {CPU_TOKENS} on the CPU)",
    )
    parser.add_argument(
        "--numpy", action="store_true", help="leave torch out, as where it is not installed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows: 1 or more")
    return int(text)


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
        return "torch is not installed"
    try:
        importlib.import_module("kernel_hub.ops")
    except Exception as error:  # noqa: BLE001 - a torch that is broken raises what it likes
        return f"torch does not import: {error}"
    return None


def run_ops(num_tokens: int, device: str) -> list[Result]:
    """torch's ops in every dtype on `device`; on a GPU timed too."""
    from ..measure import demo, timing

    measure: Callable[[demo.DemoCase], Result] = demo.checked
    if device == "cuda":
        timer = timing.GraphTimer()
        measure = partial(demo.measured, timer=timer, roofs=demo.roofs(timer))
    # Cases make their tensors when they are run.
    return _run(list(demo.cases(device, num_tokens)), measure, f"ops on {device}")


def run_numpy(num_tokens: int) -> list[Result]:
    """Shipped kernels on NumPy's data on the GPU, without torch."""
    import numpy as np

    from ..measure import demo_numpy

    cases = list(demo_numpy.cases(num_tokens, driver.get().compute_capability(0)))
    measure = partial(
        demo_numpy.measured, random=np.random.default_rng(0), roofs=demo_numpy.roofs()
    )
    return _run(cases, measure, "kernels on NumPy data")


def _run(cases: Sequence[Any], measure: Callable[[Any], Result], label: str) -> list[Result]:
    with console.progress(len(cases), label) as advance:
        results = []
        for case in cases:
            advance(f"{case.op} {case.dtype}")
            results.append(measure(case))
    return results


def run_engine(device: str) -> str:
    """What a tiny model of random weights says."""
    from ..measure import demo

    return demo.words(device)


def resolver_rows() -> list[list[str]]:
    """For each shipped cubin, the architecture that each known GPU would load."""
    collection = open_collection()
    columns = [choices(collection, capability) for capability in KNOWN_GPUS]
    return [
        [row[0].name, *(choice.entry.arch if choice.entry else "-" for choice in row)]
        for row in zip(*columns, strict=True)
    ]


def examine(num_tokens: int | None, without_torch: bool) -> DemoReport:
    """Run what can run here."""
    report = DemoReport(no_gpu(), "left out" if without_torch else no_torch())
    report.torch_on_gpu = not (report.no_gpu or report.no_torch) and _torch_has_cuda()
    if not report.no_gpu and not report.torch_on_gpu:
        report.numpy = report.try_to(run_numpy, num_tokens or NUMPY_TOKENS)
    if not report.no_torch:
        device, default = ("cuda", GPU_TOKENS) if report.torch_on_gpu else ("cpu", CPU_TOKENS)
        report.ops = report.try_to(run_ops, num_tokens or default, device)
        if report.ops:
            report.words = (report.try_to(lambda: [run_engine(device)]) or [None])[0]
    return report


def run(args: argparse.Namespace) -> int:
    report = examine(args.tokens, args.numpy)
    if args.json:
        console.as_json(
            {
                "ok": report.ok,
                "device": "cuda" if report.torch_on_gpu or report.numpy else "cpu",
                "no_gpu": report.no_gpu,
                "no_torch": report.no_torch,
                "ops": [asdict(result) for result in report.ops],
                "numpy": [asdict(result) for result in report.numpy],
                "words": report.words,
                "problems": report.problems,
                "would_load": resolver_rows(),
            }
        )
    else:
        _print(report)
    return 0 if report.ok else 1


def _torch_has_cuda() -> bool:
    from ..arrays.interop import loaded_torch

    torch = loaded_torch()
    return torch is not None and bool(torch.cuda.is_available())


def _print(report: DemoReport) -> None:
    gpu = "" if report.no_gpu else driver.get().device_name(0)
    cpu = "the CPU (the reference path)"
    where = gpu if report.torch_on_gpu else cpu
    if report.numpy:
        console.heading(f"shipped kernels on {gpu} on NumPy's data, against NumPy in fp64")
        _print_results(report.numpy)
    if report.ops:
        console.heading(f"ops on {where}, against fp64 references")
        _print_results(report.ops)
    if report.no_torch:
        console.note(f"the ops did not run: {report.no_torch}")
    if report.no_gpu:
        console.note(f"no kernel was launched: {report.no_gpu}")
        _print_resolver()
    for result in report.wrong:
        console.note(f"FAILED {result.dtype} {result.message}")
    for problem in report.problems:
        console.note(f"FAILED: {problem}")
    for results, what, at in ((report.numpy, "kernels", gpu), (report.ops, "ops", where)):
        if results:
            right = sum(result.ok for result in results)
            console.note(f"{right} of {len(results)} {what} are right on {at}")
    if report.words is not None:
        console.note(f"kernel-hub generate tiny, random weights on {where}: {report.words!r}")
    if not report.ops and not report.numpy:
        console.note("FAILED: nothing ran")
    # Where the GPU refused, torch would not help: the problems say what does.
    if report.no_torch != "left out" and not report.torch_on_gpu and not report.problems:
        _print_way_on(report)


def _print_results(results: list[Result]) -> None:
    columns = ["op", "shape", "dtype", "max error", "allowed", "result"]
    verdicts = (console.good("ok") if r.ok else console.bad("WRONG") for r in results)
    rows: list[list[Any]] = [
        [r.op, r.shape, r.dtype, f"{r.error:.2e}", f"{r.limit:.2e}", verdict]
        for r, verdict in zip(results, verdicts, strict=True)
    ]
    if results[0].time_us is not None:
        columns += ["us", "rate", "of the card's"]
        for row, result in zip(rows, results, strict=True):
            row += [f"{result.time_us:.1f}", *_rate(result)]
    numbers = ["max error", "allowed", "us", "rate", "of the card's"]
    console.table(columns, rows, right=numbers, wraps=["shape", "of the card's"])


def _rate(result: Result) -> tuple[str, str]:
    """The rate by the roof that the op is nearer to, and its share of that."""
    if result.bound == "matrix":
        share = result.share_of_matrix
        return f"{result.teraflops:.0f} TFLOP/s", "" if share is None else f"{share:.0%} matmul"
    return f"{result.terabytes_per_s:.2f} TB/s", f"{result.share_of_copy:.0%} copy"


def _print_resolver() -> None:
    console.heading("on a GPU of these compute capabilities, these cubins would be loaded")
    gpus = {f"{major}.{minor}": names for (major, minor), names in KNOWN_GPUS.items()}
    console.table(["cubin", *gpus], resolver_rows())
    console.note("; ".join(f"{capability}: {names}" for capability, names in gpus.items()))


def _print_way_on(report: DemoReport) -> None:
    """The one command that brings the ops to this machine, and what it costs; nothing is asked."""
    from ..measure import torch_builds

    in_checkout = (ROOT / "Makefile").is_file()
    if report.no_gpu:
        if report.no_torch:
            console.note(
                "the ops on the CPU need torch (about 0.2 GB to download): "
                + ("make demo TORCH=cpu" if in_checkout else _pip(torch_builds.CPU_INDEX)),
                wraps=False,
            )
        return
    build = torch_builds.build_for(driver.get().version)
    if build is None:
        return
    console.note(
        f"the ops on this GPU need torch with CUDA {build.cuda}, "
        f"{torch_builds.cost(build, ROOT)}:\n"
        f"  {'make demo TORCH=cuda' if in_checkout else _pip(build.index)}",
        wraps=False,
    )


def _pip(index: str) -> str:
    return f"pip install torch --index-url {index}"
