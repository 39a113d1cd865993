"""sample in kinds of rows as engines have them, beside torch's sort and topk, torch.compile and
FlashInfer.

Timed as bench_silu_and_mul.py says. Draws differ from one to the other: each is held to what a sort
in fp64 keeps. `torch topk` knows that all rows have one top_k. Writes
benchmarks/results/<gpu>_sample.json.
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
from kernel_hub.testing import reference

# What all rows of a kind ask for; `mixed` has a row of each kind in turn.
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top_k top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "plain": {"temperature": 1.0},
}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def parameters(kind: str, batch: int) -> dict[str, torch.Tensor]:
    rows = [KINDS[kind]] * batch if kind in KINDS else [*KINDS.values()] * (batch // 4 + 1)
    made = {
        name: torch.tensor([{**NEUTRAL, **row}[name] for row in rows[:batch]], device="cuda")
        for name in NEUTRAL
    }
    return {**made, "top_k": made["top_k"].int()}


def by_sort(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """As engines did it without kernels of their own: every row sorted."""
    temperature, k, p = (given[name][:, None] for name in NEUTRAL)
    greedy = temperature <= 0
    z = logits.float() / torch.where(greedy, 1.0, temperature)
    z, order = z.sort(-1, descending=True)
    z = z.masked_fill((k > 0) & (torch.arange(z.shape[1], device=z.device) >= k), -torch.inf)
    probs = z.softmax(-1)
    probs = probs.masked_fill((p < 1) & (probs.cumsum(-1) - probs >= p), 0)
    place = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    place = torch.where(greedy[:, 0], 0, place)
    return order.gather(1, place[:, None])[:, 0]


def by_topk(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where 50 is every row's top_k."""
    z, order = logits.topk(50, -1)
    probs = (z.float() / given["temperature"][:, None]).softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= given["top_p"][:, None], 0)
    place = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
    return order.gather(1, place[:, None])[:, 0]


def by_argmax(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return logits.argmax(-1)


def flashinfer(kind: str, given: dict[str, torch.Tensor]) -> Callable[..., Any]:
    from flashinfer.sampling import (
        sampling_from_probs,
        top_k_top_p_sampling_from_logits,
        top_p_sampling_from_probs,
    )

    def run(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        z = logits.float() / given["temperature"][:, None]
        if kind == "top_k top_p":
            return top_k_top_p_sampling_from_logits(z, given["top_k"], given["top_p"])
        probs = z.softmax(-1)
        return top_p_sampling_from_probs(probs, given["top_p"]) if kind == "top_p" else (
            sampling_from_probs(probs)
        )  # fmt: skip

    return run


def peers_of(kind: str) -> dict[str, Callable[..., Any]]:
    if kind == "greedy":
        return {"torch": by_argmax}
    return {"torch sort": by_sort, **({"torch topk": by_topk} if kind == "top_k top_p" else {})}


def sampling(kind: str, dtype: torch.dtype, batch: int, size: int) -> Case:
    num_bytes = batch * size * dtype.itemsize
    logits = torch.randn(timing.num_sets(num_bytes), batch, size, device="cuda") * 3
    logits = logits.to(dtype)
    given = parameters(kind, batch)
    seed, offset = (torch.arange(batch, device="cuda") for _ in range(2))
    rows = [KINDS[kind]] if kind in KINDS else list(KINDS.values())
    checked = min(batch, 4)
    kept = [
        logits[0, i] == logits[0, i].max() if row["temperature"] <= 0
        else reference.sample(logits[0, i], **row) > 0  # type: ignore[arg-type]
        for i, row in enumerate((rows * 4)[:checked])
    ]  # fmt: skip
    # A peer may end one token earlier or later: sums in fp32.
    wanted = [torch.ones(checked, device="cuda", dtype=torch.float64)]

    def drawn(ids: Any) -> list[torch.Tensor]:
        found = [each[int(token)] for each, token in zip(kept, ids[:checked], strict=True)]
        return [torch.stack(found).float()]

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x) for x in logits], drawn)

    ours = partial(ops.sample, **given, seed=seed, offset=offset)
    peers: dict[str, Callable[[], Contender]] = {}
    for name, function in peers_of(kind).items():
        peers[name] = lambda function=function: each(partial(function, given=given))  # type: ignore[misc]
        peers[name.replace("torch", "torch.compile")] = lambda function=function: each(  # type: ignore[misc]
            partial(compiled(function), given=given)
        )
    if kind in ("top_k top_p", "top_p", "plain"):
        peers["flashinfer"] = lambda: each(partial(flashinfer(kind, given), given=given))
    own = [each.float() for each in wanted]
    return Case(f"sample {kind} {batch} x {size}", num_bytes, each(ours), wanted, own, peers)


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(
        __doc__, {"tokens": "1,64,128", "sizes": "128256"}, sizes="32000,128256,151936"
    )
    kinds = [partial(sampling, kind) for kind in (*KINDS, "mixed")]
    with torch.no_grad():
        return run_cases("sample", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
