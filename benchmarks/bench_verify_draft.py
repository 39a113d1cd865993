"""verify_draft, greedy, of certain drafts and of drafts with probabilities, beside torch,
torch.compile and FlashInfer.

Timed as bench_silu_and_mul.py says; tokens are rows of four drafts. Draws differ from one to the
other: checked is how many drafts are kept of rows whose models are certain. Writes
benchmarks/results/<gpu>_verify_draft.json.
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

DRAFTS = 4
KINDS = ("greedy", "certain", "probabilities")
Given = dict[str, Any]


def by_torch(ids: torch.Tensor, logits: torch.Tensor, given: Given) -> torch.Tensor:
    """As engines did it without kernels of their own; how many are kept."""
    if given["probs"] is None:
        if given["greedy"]:
            tokens = logits.argmax(-1)
        else:
            p = logits.float().softmax(-1)
            tokens = (p / torch.empty_like(p).exponential_()).argmax(-1)
        return (tokens[:, :-1] == ids).long().cumprod(-1).sum(-1)
    p, q = logits.float().softmax(-1), given["probs"]
    at = ids[..., None]
    chance = p[:, :-1].gather(-1, at) / q.gather(-1, at)
    num = (torch.rand_like(chance) < chance)[..., 0].long().cumprod(-1).sum(-1)
    rest = torch.cat([(p[:, :-1] - q).clamp(min=0), p[:, -1:]], 1)
    rest = rest.gather(1, num[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]
    token = (rest / torch.empty_like(rest).exponential_()).argmax(-1)
    return num + 0 * token


def flashinfer(ids: torch.Tensor, logits: torch.Tensor, given: Given) -> torch.Tensor:
    from flashinfer.sampling import chain_speculative_sampling

    target = logits.float().softmax(-1)
    # Those that would be accepted one by one are its second result.
    *_, emitted = chain_speculative_sampling(given["probs"], ids.int(), target)
    return emitted


def verifying(kind: str, dtype: torch.dtype, batch: int, size: int) -> Case:
    num_bytes = batch * (DRAFTS + 1) * size * dtype.itemsize
    sets = timing.num_sets(num_bytes)
    logits = torch.randn(sets, batch, DRAFTS + 1, size, device="cuda").mul(3).to(dtype)
    ids = logits[:, :, :-1].argmax(-1)
    ids[:, :, 2] = (ids[:, :, 2] + 1) % size
    # Of the first row both models are certain, so that two drafts are kept.
    for j in range(DRAFTS):
        logits[:, 0, j].scatter_(1, logits[:, 0, j].argmax(-1, keepdim=True), 1000.0)
    seed = torch.arange(batch, device="cuda")
    given: Given = {"greedy": kind == "greedy", "probs": None}
    if kind == "probabilities":
        probs = logits[0, :, :-1].float().softmax(-1)
        probs[0] = torch.nn.functional.one_hot(ids[0, 0], size)
        given["probs"] = probs.contiguous()
    temperature = torch.zeros(batch, device="cuda") if given["greedy"] else None

    def ours(ids: torch.Tensor, logits: torch.Tensor, given: Given) -> torch.Tensor:
        return ops.verify_draft(ids, logits, given["probs"], temperature=temperature, seed=seed)[1]

    def each(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, i, x, given) for i, x in zip(ids, logits, strict=True)]
        return Contender(launches, lambda found: [found[:1].float()])

    peers = {"torch": lambda: each(by_torch), "torch.compile": lambda: each(compiled(by_torch))}
    if kind == "probabilities":
        peers["flashinfer"] = lambda: each(flashinfer)
    right = torch.full((1,), 2.0, device="cuda")
    name = f"verify_draft {kind} {batch} x {DRAFTS} x {size}"
    return Case(name, num_bytes, each(ours), [right.double()], [right], peers)


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(
        __doc__, {"tokens": "1,8,64", "sizes": "128256"}, sizes="32000,128256,151936"
    )
    kinds = [partial(verifying, kind) for kind in KINDS]
    with torch.no_grad():
        return run_cases("verify_draft", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
