"""relu_squared, and into e4m3, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_relu_squared.json.
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


def _formula(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def _kind(is_e4m3: bool) -> Any:
    reads: Any = reference.relu_squared
    return partial(
        gated, ops.relu_squared, _formula, reads, None, is_e4m3=is_e4m3, name="relu_squared",
        parts=1,
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "14336"}, sizes="5120,14336")
    kinds = [_kind(False), _kind(True)]
    with torch.no_grad():
        return run_cases("relu_squared", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
