"""swigluoai_and_mul, interleaved and halves and into e4m3, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_swigluoai_and_mul.json.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from gated_contenders import gated
from harness import cases_of, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.testing import reference


def _formula(interleaved: bool, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _kind(interleaved: bool, is_e4m3: bool) -> Any:
    return partial(
        gated,
        partial(ops.swigluoai_and_mul, interleaved=interleaved),
        partial(_formula, interleaved),
        partial(reference.swigluoai_and_mul, interleaved=interleaved),
        None,
        is_e4m3=is_e4m3,
        name=f"swigluoai_and_mul {'interleaved' if interleaved else 'halves'}",
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "2880"}, sizes="2880,11520")
    kinds = [_kind(True, False), _kind(False, False), _kind(True, True)]
    with torch.no_grad():
        return run_cases("swigluoai_and_mul", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
