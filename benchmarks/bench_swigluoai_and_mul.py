"""swigluoai_and_mul, interleaved and halves and into e4m3, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_swigluoai_and_mul.json.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from gated_contenders import kind_of
from harness import cases_of, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.testing import reference


def _formula(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _kind(interleaved: bool, is_e4m3: bool) -> Any:
    name = f"swigluoai_and_mul {'interleaved' if interleaved else 'halves'}"
    return kind_of(
        ops.swigluoai_and_mul, _formula, reference.swigluoai_and_mul, name=name, is_e4m3=is_e4m3,
        interleaved=interleaved,
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "2880"}, sizes="2880,11520")
    kinds = [_kind(True, False), _kind(False, False), _kind(True, True)]
    with torch.no_grad():
        return run_cases("swigluoai_and_mul", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
