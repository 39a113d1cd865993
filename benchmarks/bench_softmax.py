"""softmax and log_softmax, and their gradients, beside torch, torch.compile and Liger, in one run.

Rows of a vocabulary by tokens, and scores of attention (32 heads, causal truth as the mask). Timed
as bench_rms_norm.py does; gradients are made of an output that is there, by the registered op.
Writes benchmarks/results/<gpu>_softmax.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference

HEADS = 32


def rows(is_log: bool, dtype: torch.dtype, tokens: int, size: int) -> Case:
    """Each row by itself, no mask."""
    num_bytes = 2 * tokens * size * dtype.itemsize
    x = torch.randn(timing.num_sets(num_bytes), tokens, size, device="cuda", dtype=dtype)
    ours, by_torch = (
        (ops.log_softmax, torch.log_softmax) if is_log else (ops.softmax, torch.softmax)
    )

    def each(function: Callable[..., Any], *rest: Any) -> Contender:
        return Contender([partial(function, x[i], *rest) for i in range(len(x))])

    def liger() -> Contender:
        from liger_kernel.ops.softmax import _softmax_forward

        return Contender(
            [partial(_softmax_forward, x[i]) for i in range(len(x))], lambda found: found[:1]
        )

    truth, own = (
        reference.softmax(x[0][:CHECKED_TOKENS], is_log=is_log, dtype=to)
        for to in (torch.float64, dtype)
    )
    peers = {
        "torch": lambda: each(by_torch, -1),
        "torch.compile": lambda: each(compiled(partial(by_torch, dim=-1))),
    }
    name = f"{'log_softmax' if is_log else 'softmax'} {tokens} x {size}"
    peers = peers if is_log else {**peers, "liger": liger}
    return Case(name, num_bytes, each(ours), [truth], [own], peers)


def masked(dtype: torch.dtype, tokens: int, size: int) -> Case:
    """Scores (1, heads, seqlen, size) with a mask of truth (seqlen, size), scaled."""
    seqlen = max(1, tokens // HEADS)
    num_bytes = 2 * HEADS * seqlen * size * dtype.itemsize + seqlen * size
    x = torch.randn(timing.num_sets(num_bytes), HEADS, seqlen, size, device="cuda", dtype=dtype)
    mask = torch.ones(seqlen, size, device="cuda", dtype=torch.bool).tril(max(0, size - seqlen))

    def formula(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.125).masked_fill(~mask, -torch.inf), -1)

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x[i]) for i in range(len(x))])

    truth, own = (
        reference.softmax(x[0].view(-1, seqlen, size), mask, 0.125, dtype=to)
        for to in (torch.float64, dtype)
    )
    return Case(
        f"masked softmax {HEADS} x {seqlen} x {size}",
        num_bytes,
        each(partial(ops.softmax, mask=mask, scale=0.125)),
        [truth.flatten(0, 1)[:CHECKED_TOKENS]],
        [own.flatten(0, 1)[:CHECKED_TOKENS]],
        {"torch": lambda: each(formula), "torch.compile": lambda: each(compiled(formula))},
    )


def gradient(is_log: bool, dtype: torch.dtype, tokens: int, size: int) -> Case:
    """dx of dout and out."""
    num_bytes = 3 * tokens * size * dtype.itemsize
    out = torch.randn(timing.num_sets(num_bytes), tokens, size, device="cuda", dtype=dtype)
    out = (torch.log_softmax if is_log else torch.softmax)(out, -1)
    dout = torch.randn_like(out)

    def formula(dout: torch.Tensor, out: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        dout, out = dout.to(to), out.to(to)
        if is_log:
            return dout - out.exp() * dout.sum(-1, keepdim=True)
        return out * (dout - (dout * out).sum(-1, keepdim=True))

    def in_fp32(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return formula(dout, out, torch.float32).to(dtype)

    def by_torch(dout: torch.Tensor, out: torch.Tensor) -> Any:
        aten = torch.ops.aten
        backward = aten._log_softmax_backward_data if is_log else aten._softmax_backward_data
        return backward(dout, out, -1, dtype)

    def each(function: Callable[..., Any], *rest: Any) -> Contender:
        return Contender([partial(function, dout[i], out[i], *rest) for i in range(len(out))])

    checked = dout[0][:CHECKED_TOKENS], out[0][:CHECKED_TOKENS]
    return Case(
        f"{'log_softmax' if is_log else 'softmax'} gradient {tokens} x {size}",
        num_bytes,
        each(torch.ops.kernel_hub.softmax_backward, 1.0, is_log),
        [formula(*checked, torch.float64)],
        [formula(*checked, dtype)],
        {"torch": lambda: each(by_torch), "torch.compile": lambda: each(compiled(in_fp32))},
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(
        __doc__, {"sizes": "2048,128256"}, sizes="128,1000,2048,8192,32000,128256,151936,262144"
    )
    kinds: list[Callable[[torch.dtype, int, int], Case]] = [
        partial(rows, False), partial(rows, True), masked, partial(gradient, True),
        partial(gradient, False),
    ]  # fmt: skip

    def cases() -> Iterator[Callable[[], Case]]:
        for kind in kinds:
            for size in map(int, options.sizes):
                for tokens in options.tokens:
                    if tokens * size <= 1 << 30:
                        yield partial(kind, options.torch_dtype, tokens, size)

    with torch.no_grad():
        return run_cases("softmax", cases(), options)


if __name__ == "__main__":
    sys.exit(main())
