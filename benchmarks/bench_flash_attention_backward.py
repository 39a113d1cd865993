"""The backward of flash_attention beside torch's flash (FlashAttention-2) and cuDNN backends and
FlashAttention-3.

The gradients are held against fp64 first, at small sizes. Timed is the backward alone: all
contenders are given the same q, k, v and dout, and the out and lse of torch's flash forward (cuDNN
its own forward's). Burst: 6 ms of launches after 35 ms of idling, in random order, medians of the
rounds. TFLOP/s count 10 * head_dim operations a (query, key) pair seen. Writes
benchmarks/results/<gpu>_attention_backward.json.

FlashAttention-3's backward is that of xformers' library, named by --fa3; peers that are not there
or cannot run a case are left out, and named on stderr.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from bench_flash_attention import HEADS, SHAPES
from flash_attention_cases import CUDNN, FA2, FA3, Launch, randn
from harness import DTYPES, OURS, Report, arguments, burst
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_hub.ops.attention import backward_portable
from kernel_hub.ops.attention import backward_sm90 as hopper
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.device import has_wgmma
from kernel_hub.testing.compare import compare
from kernel_hub.testing.reference_attention import reference_backward_of, reference_of

DETERMINISTIC, PORTABLE = f"{OURS} deterministic", f"{OURS} portable"
FA3_LIBRARY = Path.home() / "site/xf_fa3_C.so"


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Problem:
    """Dense (batch, seqlen, heads, head_dim)."""
    scale = 1 / math.sqrt(q.shape[-1])
    right = 0 if causal else -1
    return Problem(q, k, v, q.shape[0], q.shape[1], k.shape[1], scale, window_right=right)


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
    views = [x.transpose(1, 2) for x in (q, k, v)]
    flash_views = views
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    try:
        flash = forward(*views, 0.0, causal, False)
    except RuntimeError:  # it takes no groups: it is given a key head a query head
        group = q.shape[2] // k.shape[2]
        flash_views = [views[0], *(x.repeat_interleave(group, 1) for x in views[1:])]
        flash = forward(*flash_views, 0.0, causal, False)
    out, lse, *tables = flash[:8]
    problem = problem_of(q, k, v, causal)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    ours = partial(backward_portable.backward, problem, out.transpose(1, 2), lse, dout, *grads)

    def portable() -> None:
        before, hopper.is_enabled = hopper.is_enabled, False
        try:
            ours(deterministic=False)
        finally:
            hopper.is_enabled = before

    def use_fa3() -> Launch:
        op = torch.ops.flash_attn_3.bwd
        rows = out.transpose(1, 2).contiguous()
        return lambda: op(
            dout, q, k, v, rows, lse, *fa3_grads, softmax_scale=problem.softmax_scale,
            is_causal=causal,
        )  # fmt: skip

    fa3_grads = [torch.empty_like(x) for x in (q, k, v)]

    def use_cudnn() -> Launch:
        leaves = [x.detach().requires_grad_() for x in views]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            grouped = q.shape[2] != k.shape[2]
            attended = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=causal, enable_gqa=grouped
            )
        gradient = dout.transpose(1, 2)
        return lambda: torch.autograd.grad(attended, leaves, gradient, retain_graph=True)[0]

    launches: dict[str, Launch] = {
        OURS: partial(ours, deterministic=False),
        DETERMINISTIC: partial(ours, deterministic=True),
        FA2: lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout.transpose(1, 2), *flash_views, out, lse, *tables[:4], 0.0, causal, *tables[4:6]
        )[0],
    }
    if has_wgmma(torch.cuda.get_device_capability()):
        launches[PORTABLE] = portable
    for name, make in ((CUDNN, use_cudnn), (FA3, use_fa3)):
        try:
            launches[name] = make()
        except (AttributeError, RuntimeError) as error:
            print(f"left out: {name}: {str(error)[:200]}", file=sys.stderr)
    for name, launch in list(launches.items()):
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if name.startswith(OURS):
                raise
            print(f"left out: {name}: {str(error)[:200]}", file=sys.stderr)
            del launches[name]
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
    options = arguments(
        __doc__,
        rounds=9,
        quick={"rounds": 4},
        more=lambda parser: parser.add_argument(
            "--fa3", type=Path, default=FA3_LIBRARY, help=f"default: {FA3_LIBRARY}"
        ),
    )
    report = Report("attention_backward", options)
    if options.fa3.exists():
        torch.ops.load_library(str(options.fa3))
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
    report.write()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
