"""verify_tree, greedy, of certain drafts and of drafts with probabilities, beside what torch takes
to find the target's tokens alone.

Timed as bench_silu_and_mul.py says; tokens are rows of binary trees of 15 drafts. Writes
benchmarks/results/<gpu>_verify_tree.json.
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

DRAFTS = 15
KINDS = ("greedy", "certain", "probabilities")


def by_torch(logits: torch.Tensor, greedy: bool) -> torch.Tensor:
    """The tokens behind every draft, from which a host would find the path."""
    if greedy:
        return logits.argmax(-1)
    p = logits.float().softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


def verifying(kind: str, dtype: torch.dtype, batch: int, size: int) -> Case:
    num_bytes = batch * (DRAFTS + 1) * size * dtype.itemsize
    sets = timing.num_sets(num_bytes)
    logits = torch.randn(sets, batch, DRAFTS + 1, size, device="cuda").mul(3).to(dtype)
    logits[:, 0, :, 7] = 300.0  # of the first row the target is certain
    nodes = torch.arange(DRAFTS, device="cuda")
    parents = ((nodes + 1) // 2 - 1).int().repeat(batch, 1)
    ids = torch.full((batch, DRAFTS), 7, device="cuda")
    probs = None
    if kind == "probabilities":
        probs = torch.randn(batch, DRAFTS, size, device="cuda").softmax(-1)
    temperature = torch.full((batch,), float(kind != "greedy"), device="cuda")
    seed = torch.arange(batch, device="cuda")

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ops.verify_tree(ids, parents, x, probs, temperature=temperature, seed=seed)[0]

    def each(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, x) for x in logits]
        return Contender(launches, lambda found: [found[0, :1].float()])

    right = torch.full((1,), 7.0, device="cuda")
    greedy = kind == "greedy"
    return Case(
        f"verify_tree {kind} {batch} x {DRAFTS} x {size}", num_bytes, each(ours),
        [right.double()], [right],
        {
            "torch": lambda: each(partial(by_torch, greedy=greedy)),
            "torch.compile": lambda: each(compiled(partial(by_torch, greedy=greedy))),
        },
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"tokens": "1,8,32", "sizes": "128256"}, sizes="32000,128256")
    kinds = [partial(verifying, kind) for kind in KINDS]
    return run_cases("verify_tree", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
