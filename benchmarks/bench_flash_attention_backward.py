"""The backward of flash_attention beside torch's flash (FlashAttention-2) and cuDNN backends and
FlashAttention-3.

The gradients are held against fp64 first, at small sizes. Timed is the backward alone: all
contenders are given the same q, k, v and dout, and the out and lse of our forward (torch's those of
their own). Burst: 6 ms of launches after 35 ms of idling, in random order, medians of the
rounds. TFLOP/s count 10 * head_dim operations a (query, key) pair seen. Writes
benchmarks/results/<gpu>_attention_backward.json.

FlashAttention-3's backward is that of xformers' library; peers that are not there or cannot run a
case are left out, and named on stderr.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from bench_flash_attention import HEADS, SHAPES
from flash_attention_cases import randn
from harness import DTYPES, OURS, Launch, Report, arguments, burst
from lot.attention_backward import Grads, Operands, by_cudnn, by_fa3, by_flash, ours, problem_of
from lot.attention_peers import CUDNN, FA2, FA3

from kernel_hub import ops
from kernel_hub.ops.attention.backward import portable as backward_portable
from kernel_hub.ops.attention.backward import sm90 as hopper
from kernel_hub.ops.core.device import has_wgmma
from kernel_hub.testing.compare import compare
from kernel_hub.testing.reference_attention import reference_backward_of, reference_of

DETERMINISTIC, PORTABLE = f"{OURS} deterministic", f"{OURS} portable"


def wrong(head_dim: int, causal: bool, dtype: torch.dtype) -> list[str]:
    """What is wrong with our gradients of a small problem."""
    q, dout = (randn(2, 300, 4, head_dim, dtype=dtype) for _ in range(2))
    k, v = (randn(2, 257, 2, head_dim, dtype=dtype) for _ in range(2))
    problem = problem_of(q, k, v, causal)
    out, lse = reference_of(problem)
    truths = reference_backward_of(problem, dout)
    owns = reference_backward_of(problem, dout, dtype=dtype)
    messages = []
    for deterministic in (False, True):
        grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
        backward_portable.backward(
            problem, out.to(dtype), lse.float(), dout, *grads, deterministic=deterministic
        )
        for name, grad, truth, own in zip(("dq", "dk", "dv"), grads, truths, owns, strict=True):
            result = compare(grad, truth, own, name=f"d{head_dim} {dtype} {name}")
            messages += [] if result.ok else [result.message]
    return messages


def contenders(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> dict[str, Launch]:
    """The backwards; a peer that cannot run is left out, and said."""
    given = Operands(q, k, v, dout, *ops.flash_attention(q, k, v, causal=causal, return_lse=True))

    def grads() -> Grads:
        return tuple(torch.empty_like(x) for x in (q, k, v))

    own = grads()

    def portable() -> None:
        before, hopper.is_enabled = hopper.is_enabled, False
        try:
            ours(given, own, causal)()
        finally:
            hopper.is_enabled = before

    makers: dict[str, Callable[[], Launch]] = {
        OURS: lambda: ours(given, own, causal),
        DETERMINISTIC: lambda: ours(given, own, causal, deterministic=True),
        FA2: lambda: by_flash(given, causal),
        CUDNN: lambda: by_cudnn(given, causal),
        FA3: lambda: by_fa3(given, grads(), causal),
    }
    if has_wgmma(torch.cuda.get_device_capability()):
        makers[PORTABLE] = lambda: portable
    launches = {}
    for name, make in makers.items():
        try:
            launch = make()
            launch()
            torch.cuda.synchronize()
        except (ImportError, RuntimeError) as error:
            if name.startswith(OURS):
                raise
            print(f"left out: {name}: {str(error)[:200]}", file=sys.stderr)
        else:
            launches[name] = launch
    return launches


def cases(
    options: argparse.Namespace,
) -> Iterator[tuple[str, float, Callable[[], dict[str, Launch]]]]:
    """(name, operations, how to make the contenders)."""
    shapes = SHAPES[::2] if options.quick else SHAPES
    heads = [(head_dim, (count, count)) for head_dim, count in HEADS.items()]
    for token in ("bf16",) if options.quick else ("bf16", "fp16"):
        for head_dim, (num_heads, num_kv_heads) in (*heads, (128, (32, 8))):
            for causal in (False, True):
                for batch, seqlen in shapes:
                    name = (
                        f"{batch} x {seqlen} h{num_heads}/{num_kv_heads} d{head_dim} "
                        f"{'causal' if causal else 'full'} {token}"
                    )
                    pairs = batch * num_heads * seqlen * seqlen * (0.5 if causal else 1.0)

                    def make(
                        token: str = token, batch: int = batch, seqlen: int = seqlen,
                        num_heads: int = num_heads, num_kv_heads: int = num_kv_heads,
                        head_dim: int = head_dim, causal: bool = causal,
                    ) -> dict[str, Launch]:  # fmt: skip
                        dtype = DTYPES[token]
                        q, dout = (
                            randn(batch, seqlen, num_heads, head_dim, dtype=dtype) for _ in range(2)
                        )
                        k, v = (
                            randn(batch, seqlen, num_kv_heads, head_dim, dtype=dtype)
                            for _ in range(2)
                        )
                        return contenders(q, k, v, dout, causal)

                    yield name, 10.0 * pairs * head_dim, make


def main() -> int:
    """Check, measure, write, print."""
    options = arguments(__doc__, rounds=9, quick={"rounds": 4})
    report = Report("attention_backward", options)
    report.failures += [
        message
        for head_dim in (32, *HEADS, 192)
        for causal in (False, True)
        for dtype in (torch.bfloat16, torch.float16)
        for message in wrong(head_dim, causal, dtype)
    ]
    with torch.no_grad():
        for name, flops, make in cases(options):
            samples = burst(make(), options.rounds)
            medians = {who: statistics.median(values) for who, values in samples.items()}
            rates = {who: [flops / ms / 1e9 for ms in values] for who, values in samples.items()}
            report.case(name, rates, "TFLOP/s", ratio_to=FA2)
            for peer in (FA2, FA3, CUDNN):
                for who in (OURS, DETERMINISTIC):
                    if peer in medians:
                        for group in (" ".join(name.split()[3:6]), "all"):
                            ratio = medians[peer] / medians[who]
                            report.ahead(f"{who} beside {peer}, {group}", ratio)
            shown = ", ".join(f"{who} {flops / ms / 1e9:.0f}" for who, ms in medians.items())
            print(f"{name}: {shown}", flush=True)
            torch.cuda.empty_cache()
    return report.done()


if __name__ == "__main__":
    sys.exit(main())
