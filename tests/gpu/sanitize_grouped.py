"""Every variant of grouped_linear and batched_matmul over ugly shapes once, for compute-sanitizer
(no comparison: tests/ops does that).

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/sanitize_grouped.py
done
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import grouped_plan as plan

DTYPES = (torch.float16, torch.bfloat16)
# Rows of each expert, n, k; what is behind the last row belongs to no expert.
GROUPED = (((5, 0, 130, 1), 136, 72), ((0, 0, 300), 45, 264), ((1,) * 140, 520, 64))
# Matrices, m, n, k.
BATCHED = ((3, 130, 136, 72), (2, 7, 45, 264), (40, 65, 520, 64))


def choices(problem: Any) -> Iterator[Any]:
    """Every launch that this GPU can make of a problem."""
    properties = torch.cuda.get_device_properties(0)
    capability = properties.major, properties.minor
    yield from plan.portable_choices(capability, problem)
    if capability == (9, 0):
        for name in plan.HOPPER[problem.op]:
            yield plan.hopper_choice(name, properties.multi_processor_count, problem)


def forced(op: str, choice: Any) -> Any:
    """The op, which takes this launch whatever its plan would take."""
    module: Any = importlib.import_module(f"kernel_hub.ops.matmul.{op}")
    forget_all()
    return mock.patch.object(module, "choose", lambda *_: choice), getattr(module, op)


def grouped_linear(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Empty experts, experts of one row, rows of none; plain, and with bias and activation."""
    for counts, n, k in GROUPED:
        total, num_experts = sum(counts) + 3, len(counts)
        a = torch.randn(total, k, device="cuda", dtype=dtype)
        b = torch.randn(num_experts, n, k, device="cuda", dtype=dtype)
        bias = torch.randn(num_experts, n, device="cuda", dtype=dtype)
        offsets = torch.tensor([0, *itertools.accumulate(counts)], device="cuda").int()
        problem = plan.GroupedProblem("grouped_linear", num_experts, total, n, k)
        for choice in choices(problem):
            patch, op = forced("grouped_linear", choice)
            with patch:
                op(a, b, offsets, out_dtype=out_dtype)
                op(a, b, offsets, bias=bias, activation="gelu", out_dtype=out_dtype)
                op(a, b, offsets.flip(0).contiguous(), out_dtype=out_dtype)


def batched_matmul(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Dense matrices, and one b for all."""
    for batch, m, n, k in BATCHED:
        a = torch.randn(batch, m, k, device="cuda", dtype=dtype)
        b = torch.randn(batch, n, k, device="cuda", dtype=dtype)
        for choice in choices(plan.GroupedProblem("batched_matmul", batch, m, n, k)):
            patch, op = forced("batched_matmul", choice)
            with patch:
                op(a, b, out_dtype=out_dtype)
                op(a, b[:1].expand(batch, n, k), out_dtype=out_dtype)


def main() -> int:
    """Launch everything, wait, say what it was."""
    with torch.no_grad():
        for dtype in DTYPES:
            for out_dtype in (dtype, torch.float32):
                grouped_linear(dtype, out_dtype)
                batched_matmul(dtype, out_dtype)
    torch.cuda.synchronize()
    print("launched every variant of grouped_linear and batched_matmul")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
