"""gelu_and_mul, by erf and tanh and into e4m3, beside torch, torch.compile and FlashInfer.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_gelu_and_mul.json.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from gated_contenders import kind_of
from harness import cases_of, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.testing import reference


def _formula(x: torch.Tensor, approximate: str) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _flashinfer(approximate: str) -> Any:
    from flashinfer import activation

    return activation.gelu_tanh_and_mul if approximate == "tanh" else activation.gelu_and_mul


def _kind(approximate: str, is_e4m3: bool) -> Any:
    return kind_of(
        ops.gelu_and_mul, _formula, reference.gelu_and_mul, partial(_flashinfer, approximate),
        name=f"gelu_and_mul {approximate}", is_e4m3=is_e4m3, approximate=approximate,
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "10240"}, sizes="6912,10240,14336")
    kinds = [_kind("tanh", False), _kind("none", False), _kind("tanh", True), _kind("none", True)]
    with torch.no_grad():
        return run_cases("gelu_and_mul", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
