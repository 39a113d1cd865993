"""gelu, by erf and tanh and into e4m3, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_gelu.json.
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


def _kind(approximate: str, is_e4m3: bool) -> Any:
    return partial(
        gated,
        partial(ops.gelu, approximate=approximate),
        partial(torch.nn.functional.gelu, approximate=approximate),
        partial(reference.gelu, approximate=approximate),
        None,
        is_e4m3=is_e4m3,
        name=f"gelu {approximate}",
        parts=1,
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "14336"}, sizes="5120,14336")
    kinds = [_kind("tanh", False), _kind("none", False), _kind("none", True)]
    with torch.no_grad():
        return run_cases("gelu", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
