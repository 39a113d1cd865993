"""embedding, plain, scaled and with positions added, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says; ids are drawn over the whole table, which is larger than the
L2. Writes benchmarks/results/<gpu>_embedding.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, cases_of, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference_tokens

VOCABULARY, MAX_POSITION = 128256, 8192
KINDS = ("plain", "scaled", "positions")


def formula(
    ids: torch.Tensor, weight: torch.Tensor, scale: float | None = None,
    position_weight: torch.Tensor | None = None, positions: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What a model in eager torch runs."""
    found = torch.nn.functional.embedding(ids, weight)
    if scale is not None:
        found = found * scale
    if position_weight is not None and positions is not None:
        found = found + torch.nn.functional.embedding(positions, position_weight)
    return found


def looking_up(kind: str, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    """ids -> rows of a table of 128256."""
    reads = 2 if kind == "positions" else 1
    num_bytes = (reads + 1) * tokens * hidden * dtype.itemsize + 8 * reads * tokens
    weight = torch.randn(VOCABULARY, hidden, device="cuda", dtype=dtype)
    ids = [
        torch.randint(VOCABULARY, (tokens,), device="cuda")
        for _ in range(timing.num_sets(num_bytes))
    ]
    given: dict[str, Any] = {"scale": float(hidden**0.5)} if kind == "scaled" else {}
    if kind == "positions":
        given["position_weight"] = torch.randn(MAX_POSITION, hidden, device="cuda", dtype=dtype)
        given["positions"] = torch.arange(tokens, device="cuda") % MAX_POSITION

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x, weight, **given) for x in ids])

    checked = ids[0][:CHECKED_TOKENS]
    cut = {**given}
    if kind == "positions":
        cut["positions"] = given["positions"][:CHECKED_TOKENS]
    return Case(
        f"embedding {kind} {tokens} x {hidden}", num_bytes, each(ops.embedding),
        [reference_tokens.embedding(checked, weight, **cut)],
        [reference_tokens.embedding(checked, weight, **cut, dtype=dtype)],
        {"torch": lambda: each(formula), "torch.compile": lambda: each(compiled(formula))},
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "4096"}, sizes="896,4096,7168")
    kinds = [partial(looking_up, kind) for kind in KINDS]
    with torch.no_grad():
        return run_cases("embedding", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
