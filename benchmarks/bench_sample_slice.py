"""A draw where each of eight ranks has a slice of the vocabulary: sample_slice of one slice, and
sample_slices of what all have said, beside torch's topk of the slice.

Timed as bench_silu_and_mul.py says; the exchange between is not. Checked is the value of the most
probable token. Writes benchmarks/results/<gpu>_sample_slice.json.
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
from kernel_hub.ops import vocab_slices
from kernel_hub.ops.sampling import slices

WORLD_SIZE = 8


def by_topk(logits: torch.Tensor) -> torch.Tensor:
    """As many values and tokens, and what the rest weighs."""
    values, tokens = logits.topk(slices.LISTED, -1)
    rest = logits.float().logsumexp(-1, keepdim=True)
    return torch.cat([values.float(), tokens.float(), rest], -1)


def summing_up(dtype: torch.dtype, batch: int, size: int) -> Case:
    size = size // WORLD_SIZE // 32 * 32
    num_bytes = batch * size * dtype.itemsize
    logits = torch.randn(timing.num_sets(num_bytes), batch, size, device="cuda").mul(3).to(dtype)
    seed = torch.arange(batch, device="cuda")
    wanted = [logits[0].double().amax(-1)]

    def most(found: Any) -> list[torch.Tensor]:
        listed = slice(slices.HEAD, slices.HEAD + slices.LISTED)
        values = found[:, listed].view(torch.float32) if found.dtype == torch.int32 else found
        return [values[:, : slices.LISTED].amax(-1)]

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x) for x in logits], most)

    peers = {"torch": lambda: each(by_topk), "torch.compile": lambda: each(compiled(by_topk))}
    ours = each(lambda x: ops.sample_slice(x, 0, seed=seed))
    name = f"sample_slice {batch} x {size}"
    return Case(name, num_bytes, ours, wanted, [x.float() for x in wanted], peers)


def drawing(dtype: torch.dtype, batch: int, size: int) -> Case:
    size = size // WORLD_SIZE // 32 * 32
    logits = torch.randn(WORLD_SIZE, batch, size, device="cuda").mul(3).to(dtype)
    seed = torch.arange(batch, device="cuda")
    said = torch.stack(
        [ops.sample_slice(x, i * size, seed=seed) for i, x in enumerate(logits.unbind())]
    )
    given = {
        "top_k": torch.full((batch,), 50, dtype=torch.int32, device="cuda"),
        "top_p": torch.full((batch,), 0.9, device="cuda"),
    }
    whole = logits.transpose(0, 1).flatten(1)
    wanted = [ops.sample(whole, **given, seed=seed).double()]
    ours = Contender(
        [lambda: vocab_slices.sample_slices(said, WORLD_SIZE * size, **given, seed=seed)[0]],
        lambda ids: [ids.float()],
    )
    name = f"sample_slices {WORLD_SIZE} x {batch}"
    return Case(name, said.nbytes, ours, wanted, [x.float() for x in wanted], {})


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(
        __doc__, {"tokens": "1,64,128", "sizes": "128256"}, sizes="32000,128256,151936"
    )
    with torch.no_grad():
        cases = cases_of([summing_up, drawing], options.sizes, options)
        return run_cases("sample_slice", cases, options)


if __name__ == "__main__":
    sys.exit(main())
