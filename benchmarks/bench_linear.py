"""linear against cuBLAS (torch.matmul) on the shapes of Llama 8B, 70B and an eighth of 70B; with
--epilogues also, for some of them, each fused epilogue and cuBLAS with the epilogue of torch.

256 rows and more: bursts of 6 ms of work after 35 ms of idleness, as clocks fall under longer load.
Fewer rows: CUDA-graph replays. Inputs are rotated past the L2; contenders alternate.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from harness import OURS, Inputs, Launch, Report, plan_of, product_arguments, replays

from kernel_hub.ops import linear
from kernel_hub.testing.compare import compare

# name -> (n, k)
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336), "70B qkv": (10240, 8192), "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192), "70B down": (8192, 28672),
    "70B/8 qkv": (1280, 8192), "70B/8 o": (8192, 1024), "70B/8 gate_up": (7168, 8192),
    "70B/8 down": (8192, 3584),
}  # fmt: skip
QUICK = {"tokens": "1,64,1024,8192", "rounds": 2}
EPILOGUES = ("bias", "gelu", "silu", "residual")  # each with a bias
EPILOGUE_SHAPES, EPILOGUE_ROWS = ("8B o", "8B gate_up", "70B o", "70B down"), (1, 64, 1024, 4096)


def wrong(inputs: tuple[torch.Tensor, ...]) -> str:
    """'' or what is wrong with our output, on up to 256 rows and columns."""
    a, b, out = inputs
    linear(a, b, out=out)
    rows, columns = a[:256], b[:256]
    truth = rows.double() @ columns.double().T
    result = compare(out[:256, :256], truth, rows @ columns.T)
    return "" if result.ok else result.message


def sound_products(
    report: Report, options: argparse.Namespace, shapes: Mapping[str, tuple[int, int]],
    made_of: Callable[[int, int, int], list[Any]], wrong: Callable[[Any], str],
) -> Iterator[tuple[str, int, int, int, list[Any]]]:  # fmt: skip
    """(name, m, n, k, operands) of each shape and number of tokens that we compute rightly; the
    others are failures of the report. made_of: sets of operands of m, n and k."""
    for name, m in itertools.product(options.shapes, options.tokens):
        n, k = shapes[name]
        made = made_of(m, n, k)
        if message := wrong(made[0]):
            report.failures.append(f"{name} {m}: {message}")
        else:
            yield name, m, n, k, made


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    report = Report("linear", options)
    for name, m, n, k, ss in sound_products(report, options, SHAPES, inputs.sets, wrong):
        contenders: dict[str, list[Launch]] = {
            OURS: [functools.partial(linear, a, b, out=o) for a, b, o in ss],
            "cuBLAS": [functools.partial(torch.matmul, a, b.T, out=o) for a, b, o in ss],
        }
        if options.epilogues and name in EPILOGUE_SHAPES and m in EPILOGUE_ROWS:
            contenders |= fused(ss, m, n)
        samples = replays(contenders, *plan_of(m, n, k, options.rounds))
        case = f"{name} {n}x{k} m{m}"
        medians = report.case(case, samples, "us", ratio_to="cuBLAS")
        ours = medians[OURS]
        ratio = medians["cuBLAS"] / ours
        range_of_m = "1-64 rows" if m <= 64 else "65-255 rows" if m < 256 else "256 rows and more"
        which = "an eighth of 70B" if "/8" in name else "8B and 70B"
        report.ahead(f"cuBLAS, {range_of_m}, {which}", ratio)
        rate = 2 * m * n * k / ours / 1e6
        read = ss[0][0].element_size() * (n * k + m * k + m * n) / ours / 1e6
        others = "".join(
            f"  {label} {us / ours:.3f}"
            for label, us in medians.items()
            if label not in (OURS, "cuBLAS")
        )
        print(
            f"{case:28} {ours:9.2f} us  {rate:6.1f} TFLOP/s  {read:5.2f} TB/s  "
            f"cuBLAS {medians['cuBLAS']:9.2f} us  x {ratio:.3f}{others}",
            flush=True,
        )
    return report.done()


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
    finish: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    bias: torch.Tensor, residual: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return finish(torch.matmul(a, b.T, out=out), bias, residual)


def main() -> int:
    """Measure, write, print."""
    options = product_arguments(
        __doc__,
        QUICK,
        SHAPES,
        ("bf16", "fp16", "fp32"),
        more=lambda parser: parser.add_argument(
            "--epilogues", action="store_true", help="for some shapes, fused too"
        ),
    )
    return run(options, Inputs(options.torch_dtype))


if __name__ == "__main__":
    sys.exit(main())
