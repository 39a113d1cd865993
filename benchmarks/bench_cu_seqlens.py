"""cu_seqlens with positions and slots of a step's tokens, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says; tokens are sequences of a decoding step, sizes the tokens that
each of eight of them brings from its prompt. Writes benchmarks/results/<gpu>_cu_seqlens.json.
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

PAGE_SIZE, MAX_PAGES = 16, 512


def by_torch(
    lengths: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Positions and slots as engines find them with torch on the device."""
    counts = lengths.clamp(min=0)
    ends = counts.cumsum(0)
    token = torch.arange(num_tokens, device=lengths.device)
    row = torch.searchsorted(ends, token, right=True).clamp(max=len(lengths) - 1)
    position = cached[row] + token - (ends - counts)[row]
    page = table[row, position // PAGE_SIZE]
    return page.long() * PAGE_SIZE + position % PAGE_SIZE


def ours(
    lengths: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    slots = torch.empty(num_tokens, dtype=torch.int64, device=lengths.device)
    ops.cu_seqlens(
        lengths, cache_seqlens=cached, block_table=table, page_size=PAGE_SIZE,
        out_positions=torch.empty_like(slots), out_slots=slots,
    )  # fmt: skip
    return slots


def placing(dtype: torch.dtype, batch: int, prompt: int) -> Case:
    del dtype  # of whole numbers alone
    lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
    lengths[: min(batch, 8)] = prompt
    num_tokens = int(lengths.sum())
    cached = (torch.arange(batch, device="cuda") * 37 % 4000).int()
    num_bytes = 16 * num_tokens + 4 * batch * (MAX_PAGES + 3)
    tables = [
        torch.arange(batch * MAX_PAGES, device="cuda", dtype=torch.int32).view(batch, MAX_PAGES) + i
        for i in range(timing.num_sets(num_bytes))
    ]

    def each(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, lengths, cached, table, num_tokens) for table in tables]
        return Contender(launches, lambda found: [found[:256].float()])

    right = by_torch(lengths, cached, tables[0], num_tokens)[:256]
    return Case(
        f"cu_seqlens {batch} rows, {num_tokens} tokens", num_bytes, each(ours), [right.double()],
        [right.float()],
        {"torch": lambda: each(by_torch), "torch.compile": lambda: each(compiled(by_torch))},
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"tokens": "1,64,1024", "sizes": "1"}, sizes="1,1000")
    return run_cases("cu_seqlens", cases_of([placing], options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
