"""copy_blocks beside torch's indexing, compiled or not.

Timed as bench_silu_and_mul.py says; tokens are pairs of pages, sizes the tokens of a page of 8
heads of 128. Writes benchmarks/results/<gpu>_copy_blocks.json.
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

HEADS, HEAD_DIM = 8, 128


def by_torch(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    for cache in (k_cache, v_cache):
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
    return k_cache


def ours(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    ops.copy_blocks(k_cache, v_cache, pairs)
    return k_cache


def copying(dtype: torch.dtype, num_pairs: int, page_size: int) -> Case:
    page = page_size * HEADS * HEAD_DIM
    num_bytes = 4 * num_pairs * page * dtype.itemsize
    sets = range(timing.num_sets(num_bytes))
    shape = (2 * num_pairs, page_size, HEADS, HEAD_DIM)
    caches = [[torch.randn(shape, device="cuda", dtype=dtype) for _ in "kv"] for _ in sets]
    pairs = torch.randperm(2 * num_pairs, device="cuda").view(-1, 2)

    def each(function: Callable[..., Any]) -> Contender:
        # What is held against the truth is read behind the launches, not in what is timed.
        launches = [partial(function, *caches[i], pairs) for i in sets]
        return Contender(launches, lambda k_cache: [k_cache[pairs[:1, 1]]])

    right = caches[0][0][pairs[:1, 0]].clone()
    return Case(
        f"copy_blocks {num_pairs} x {page_size}", num_bytes, each(ours), [right.double()], [right],
        {"torch": lambda: each(by_torch), "torch.compile": lambda: each(compiled(by_torch))},
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"tokens": "1,16,256", "sizes": "16"}, sizes="16,64")
    return run_cases("copy_blocks", cases_of([copying], options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
