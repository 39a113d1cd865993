"""linear of e4m3 against torch._scaled_mm (cuBLASLt; CUTLASS for scales of rows) on Llama shapes.

256 rows and more: bursts of 6 ms of work after 35 ms of idleness, as clocks fall under longer load.
Fewer rows: CUDA-graph replays. Inputs are rotated past the L2; contenders alternate. Each peer is
of the same scales and of the same accumulation; where torch refuses one it is left out.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bench_linear import QUICK, SHAPES, sound_products
from harness import OURS, Launch, Report, arguments, plan_of, replays, rows_group

from kernel_hub.measure import timing
from kernel_hub.ops import linear

E4M3 = torch.float8_e4m3fn
# name -> (scales, whether sums stay in the tensor cores)
KINDS = {
    "tensor": ("tensor", False), "row": ("row", False), "block": ("block", False),
    "tensor fast": ("tensor", True), "row fast": ("row", True),
}  # fmt: skip
# Largest error against fp64, of the largest result: rounding to bf16, and the sums' own.
LIMITS = {False: 2**-8 + 1e-3, True: 2**-8 + 2e-2}


@dataclass(frozen=True)
class Case:
    """Operands of one launch."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k."""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]


class Inputs:
    """Operands cut from one pool of random numbers, together past the L2, and their scales."""

    def __init__(self) -> None:
        self._pool = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16).to(E4M3)

    def cases(self, m: int, n: int, k: int) -> list[Case]:
        each = (m + n) * k
        step = -(-each // 1024) * 1024
        wanted = -(-timing.L2_FACTOR * timing.l2_bytes() // (each + 2 * m * n))
        made = []
        for i in range(max(1, min(24, wanted, self._pool.numel() // step))):
            a, b = self._pool[i * step : i * step + each].split([m * k, n * k])
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            made.append(Case(a.view(m, k), b.view(n, k), out))
        return made

    @staticmethod
    def scales(kind: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = {
            "tensor": ((), ()),
            "row": ((m, 1), (n, 1)),
            "block": ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))),
        }[kind]
        first, second = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes)
        return first, second


def ours(kind: str, fast: bool, cases: Sequence[Case]) -> list[Launch]:
    scales = Inputs.scales(kind, *cases[0].sizes)
    return [
        functools.partial(
            linear, case.a, case.b, out=case.out, a_scale=scales[0], b_scale=scales[1],
            use_fast_accum=fast,
        )
        for case in cases
    ]  # fmt: skip


def peer(kind: str, fast: bool, cases: Sequence[Case]) -> list[Launch] | None:
    """torch._scaled_mm, or None where this torch does not take such scales."""
    m, n, k = cases[0].sizes
    a_scale, b_scale = Inputs.scales(kind, m, n, k)
    if kind == "block":  # columns of a_scale contiguous, as cuBLASLt wants them
        a_scale = a_scale.t().contiguous().t()
    if b_scale.dim():
        b_scale = b_scale.t()
    launches: list[Launch] = [
        functools.partial(
            torch._scaled_mm, case.a, case.b.t(), a_scale, b_scale,
            out_dtype=torch.bfloat16, use_fast_accum=fast, out=case.out,
        )
        for case in cases
    ]  # fmt: skip
    try:
        launches[0]()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        print(f"# torch._scaled_mm {kind}{' fast' * fast} {m}x{n}x{k}: {error!s:.120}")
        return None
    return launches


def wrong(case: Case) -> str:
    """'' or what is wrong with our output, on up to 256 rows and columns."""
    m, n, k = case.sizes
    for name, (kind, fast) in KINDS.items():
        a_scale, b_scale = Inputs.scales(kind, m, n, k)
        case.out.fill_(float("nan"))
        linear(case.a, case.b, out=case.out, a_scale=a_scale, b_scale=b_scale, use_fast_accum=fast)
        a, b = case.a[:256].double(), case.b[:256].double()
        if kind == "block":
            a *= a_scale[:256].double().repeat_interleave(128, 1)[:, :k]
            b *= b_scale[:2].double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:256, :k]
        else:
            a *= a_scale[:256].double() if a_scale.dim() else a_scale.double()
            b *= b_scale[:256].double() if b_scale.dim() else b_scale.double()
        truth = a @ b.T
        error = float((case.out[:256, :256] - truth).abs().max() / truth.abs().max())
        if not error <= LIMITS[fast]:
            return f"{name}: largest error {error:.3g} of the largest result"
    return ""


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    report = Report("linear_fp8", options)
    for name, m, n, k, cases in sound_products(report, options, SHAPES, inputs.cases, wrong):
        contenders: dict[str, list[Launch]] = {}
        for label, (kind, fast) in KINDS.items():
            contenders[f"{OURS} {label}"] = ours(kind, fast, cases)
            launches = peer(kind, fast, cases)
            if launches is not None:
                contenders[f"torch {label}"] = launches
        samples = replays(contenders, *plan_of(m, n, k, options.rounds))
        case = f"{name} {n}x{k} m{m}"
        medians: dict[str, float] = {}
        parts = []
        for label in KINDS:
            mine = f"{OURS} {label}"
            # Scales of blocks are held against those of rows where torch has no such product.
            other = f"torch {label}" if f"torch {label}" in samples else "torch row"
            pair = {mine: samples[mine], other: samples[other]}
            medians |= report.case(case, pair, "us", ratio_to=other)
            ratio = medians[other] / medians[mine]
            report.ahead(f"{label}, {rows_group(m)}", ratio)
            parts.append(f"{label} {medians[mine]:.2f} x{ratio:.3f}")
        rate = 2 * m * n * k / medians[f"{OURS} tensor fast"] / 1e6
        read = (n * k + m * k + 2 * m * n) / medians[f"{OURS} tensor"] / 1e6
        print(f"{case:26} {rate:6.0f} TFLOP/s {read:5.2f} TB/s  {';  '.join(parts)}", flush=True)
    return report.done()


def main() -> int:
    """Measure, write, print."""
    options = arguments(
        __doc__, rounds=3, quick=QUICK, shapes="8B qkv,8B o,8B gate_up,8B down",
        tokens="1,16,64,256,1024,4096,8192",
    )  # fmt: skip
    return run(options, Inputs())


if __name__ == "__main__":
    sys.exit(main())
