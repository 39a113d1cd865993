"""pad_input and unpad_input beside what flash-attention's bert_padding.py does, compiled or not.

Timed as bench_silu_and_mul.py says; tokens are sequences, a third of whose rows are padding, sizes
elements of a row. Writes benchmarks/results/<gpu>_pad_input.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Case, Contender, cases_of, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing

SEQLEN = 512


def by_torch(x: torch.Tensor, bounds: torch.Tensor, size: int, pads: bool) -> torch.Tensor:
    batch = bounds.shape[0] - 1
    seqlen = size if pads else x.shape[1]
    lengths = bounds[1:] - bounds[:-1]
    mask = torch.arange(seqlen, device=x.device) < lengths[:, None]
    if pads:
        at = (bounds[:-1, None] + torch.arange(seqlen, device=x.device)).clamp(max=len(x) - 1)
        return x[at] * mask[..., None]
    token = torch.arange(size, device=x.device)
    row = torch.searchsorted(bounds[1:], token, right=True).clamp(max=batch - 1)
    return x[row, token - bounds[row]]


def ours(x: torch.Tensor, bounds: torch.Tensor, size: int, pads: bool) -> torch.Tensor:
    return (ops.pad_input if pads else ops.unpad_input)(x, bounds, size)


def rows(dtype: torch.dtype, batch: int, hidden: int, *, pads: bool) -> Case:
    lengths = torch.arange(batch, device="cuda") * 97 % SEQLEN + SEQLEN // 6
    bounds = torch.nn.functional.pad(lengths.clamp(max=SEQLEN).cumsum(0), (1, 0)).int()
    total = int(bounds[-1])
    num_bytes = (total + (batch * SEQLEN if pads else total)) * hidden * dtype.itemsize
    shape = (total, hidden) if pads else (batch, SEQLEN, hidden)
    size = SEQLEN if pads else total
    sets = [
        torch.randn(shape, device="cuda", dtype=dtype) for _ in range(timing.num_sets(num_bytes))
    ]

    def each(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, x, bounds, size, pads) for x in sets]
        return Contender(launches, lambda found: [found[:8].float()])

    right = by_torch(sets[0], bounds, size, pads)[:8]
    name = "pad_input" if pads else "unpad_input"
    return Case(
        f"{name} {batch} x {SEQLEN} x {hidden}", num_bytes, each(ours), [right.double()],
        [right.float()],
        {"torch": lambda: each(by_torch), "torch.compile": lambda: each(compiled(by_torch))},
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"tokens": "1,16,128", "sizes": "4096"}, sizes="1,4096")
    kinds = [partial(rows, pads=pads) for pads in (True, False)]
    return run_cases("pad_input", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
