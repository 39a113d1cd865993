"""Rows that sample draws from, and what torch draws from them on the CPU."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from bits import same_bits
from ways import Way

from kernel_hub.ops import sample
from kernel_hub.ops.sampling import cpu
from kernel_hub.testing.guard import Guarded

op: Any = importlib.import_module("kernel_hub.ops.sampling.sample")
INF, NAN = math.inf, math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def arguments(batch: int, seed: int = 0, *names: str) -> dict[str, torch.Tensor]:
    """Parameters that mix everything; names: only those, besides seed and
    offset."""
    made = generator(seed)

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (batch,), generator=made)]

    drawn = {
        "temperature": pick(0.0, 0.3, 0.7, 1.0, 1.5, NAN, -1.0),
        "top_k": pick(0, 0, 1, 3, 20, 50, 256, 257, 1000, 10**9).int(),
        "top_p": pick(1.0, 0.0, 0.1, 0.5, 0.9, 0.999, NAN, 2.0),
        "min_p": pick(0.0, 0.0, 0.0, 0.05, 1e-4, 1.0, NAN),
    }
    seeds = torch.randint(-(2**63), 2**63 - 1, (2, batch), generator=made)
    chosen = {name: x for name, x in drawn.items() if not names or name in names}
    return {**chosen, "seed": seeds[0], "offset": seeds[1]}


def more(batch: int, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """What changes logits."""
    made = generator(seed)
    words = -(-size // 32)

    def bits() -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (batch, words), generator=made).int()

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=made)

    return {
        "bias": torch.randn(batch, size, generator=made),
        "token_bitmask": bits(),
        "prompt_bitmask": bits(),
        "output_counts": torch.randint(-6, 4, (batch, size), generator=made).clamp(min=0).int(),
        "repetition_penalty": rand(batch) + 0.7,
        "presence_penalty": rand(batch),
        "frequency_penalty": rand(batch) / 2,
    }


def by_torch(logits: torch.Tensor, softcap: float = 0.0, **given: Any) -> tuple[Any, Any]:
    """ids and log probabilities, by torch on the CPU."""
    fields = dict.fromkeys(op.SampleGiven._fields)
    given = {name: x.cpu() for name, x in given.items()}
    out = torch.empty(len(logits), dtype=torch.int64)
    made = {"out": out, "out_logprob": torch.empty(len(logits)), "softcap": softcap}
    found = op.SampleGiven(**{**fields, **given, **made, "logits": logits.cpu()})
    cpu.sample_into(found)
    return found.out, found.out_logprob


def check(way: Way, logits: torch.Tensor, softcap: float = 0.0, **given: Any) -> torch.Tensor:
    """What is drawn, held against torch."""
    moved = {name: x.to(way.device) for name, x in given.items()}
    out = Guarded((len(logits),), torch.int64, way.device)
    logprob = Guarded((len(logits),), torch.float32, way.device)
    found = sample(
        logits.to(way.device), **moved, softcap=softcap, return_logprob=True,
        out=out.tensor, out_logprob=logprob.tensor,
    )  # fmt: skip
    assert found[0] is out.tensor and found[1] is logprob.tensor
    out.check()
    logprob.check("out_logprob")
    ids, logprobs = by_torch(logits, softcap, **given)
    same_bits(out.tensor.cpu(), ids)
    torch.testing.assert_close(logprob.tensor.cpu(), logprobs, rtol=1e-5, atol=1e-5)
    again = sample(logits.to(way.device), **moved, softcap=softcap)
    same_bits(again, out.tensor)
    return ids


def hard_row(way: Way, kind: str) -> torch.Tensor:
    """Logits whose candidates alone do not end a search."""
    size = 3000
    return {
        "flat": torch.zeros(size),
        "ties": way.randn(size).cpu().mul(4).round() / 4,
        "rising": torch.arange(size) / 300.0,
        "peaked": torch.cat([torch.full((1,), 9.0), way.randn(size - 1).cpu() / 10]),
        "one": torch.cat([torch.full((1,), 99.0), torch.full((size - 1,), -INF)]),
        "scales": way.randn(size).cpu().mul(12).exp() - 1e-3,
    }[kind]
