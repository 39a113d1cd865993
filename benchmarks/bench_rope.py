"""rope on q and k beside torch, torch.compile, Liger and FlashInfer, in one run.

Kernel time by CUDA-graph replays over inputs rotated past the L2; each contender's output is held
against fp64 first. All contenders read the same inputs and allocate their outputs themselves, in
the capture, from one memory pool, so that all write the same addresses; three pools are averaged
over, and the order is drawn anew each round (kernel_hub/measure/timing.py).
Everybody gets cosines and sines as he takes them: ours and torch's a table of
half a head a row, Liger rows of a whole head already picked by position, FlashInfer an fp32 cache
and positions. Writes benchmarks/results/<gpu>_rope.json.
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

HEAD_DIM = 128
BASE = 500_000.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One of q and k in torch."""
    a, b = x.float().chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def rotate_both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """What torch and torch.compile are given."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotary(
    dtype: torch.dtype, tokens: int, num_heads: int, num_kv_heads: int, in_place: bool
) -> Case:
    """q, k -> rotated q, k."""
    total = num_heads + num_kv_heads
    num_bytes = 2 * tokens * total * HEAD_DIM * dtype.itemsize
    # In place a launch touches half as many bytes as it moves.
    sets = range(timing.num_sets(num_bytes // 2))
    q = torch.randn(len(sets), tokens, num_heads, HEAD_DIM, device="cuda", dtype=dtype)
    k = torch.randn(len(sets), tokens, num_kv_heads, HEAD_DIM, device="cuda", dtype=dtype)
    frequencies = BASE ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    angles = torch.arange(tokens, device="cuda")[:, None] * frequencies
    cos32, sin32 = angles.cos(), angles.sin()
    cos, sin = cos32.to(dtype), sin32.to(dtype)
    checked = slice(0, CHECKED_TOKENS)
    heads = [part[0][checked].clone() for part in (q, k)]
    qs, ks = q.clone(), k.clone()  # what all contenders that work in place work on

    def fresh() -> None:
        qs.copy_(q)
        ks.copy_(k)

    def ours() -> Contender:
        def launch(i: int) -> Any:
            if in_place:
                return ops.rope(qs[i], ks[i], cos, sin, out_q=qs[i], out_k=ks[i])
            return ops.rope(q[i], k[i], cos, sin)

        return Contender([partial(launch, i) for i in sets], lambda found: _kept(found))

    def torch_way(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, q[i], k[i], cos, sin) for i in sets], tuple)

    def liger() -> Contender:
        from liger_kernel.ops.rope import rope_forward

        fresh()
        wide_cos, wide_sin = (torch.cat((t, t), -1)[None].contiguous() for t in (cos, sin))
        launches = [
            partial(
                rope_forward, qs[i][None].transpose(1, 2), ks[i][None].transpose(1, 2),
                wide_cos, wide_sin,
            )
            for i in sets
        ]  # fmt: skip
        return Contender(launches, lambda _: (qs[0].clone(), ks[0].clone()))

    def flashinfer() -> Contender:
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        fresh()
        cache = torch.cat((cos32, sin32), -1).contiguous()
        positions = torch.arange(tokens, device="cuda", dtype=torch.int64)

        def launch(i: int) -> Any:
            return apply_rope_with_cos_sin_cache_inplace(
                positions, qs[i].view(tokens, -1), ks[i].view(tokens, -1), HEAD_DIM, cache, True
            )

        return Contender(
            [partial(launch, i) for i in sets], lambda _: (qs[0].clone(), ks[0].clone())
        )

    return Case(
        f"rope{' in place' if in_place else ''} {tokens} x {num_heads}/{num_kv_heads}",
        num_bytes,
        ours(),
        [reference.rope(x, cos[checked], sin[checked]) for x in heads],
        [reference.rope(x, cos[checked], sin[checked], dtype=dtype) for x in heads],
        {
            "torch": lambda: torch_way(rotate_both),
            "torch.compile": lambda: torch_way(compiled(rotate_both)),
            "liger (in place)": liger,
            "flashinfer (in place)": flashinfer,
        },
    )


def _kept(found: Any) -> tuple[torch.Tensor, ...]:
    return tuple(part.clone() for part in found)


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, heads="32/8,64/8")

    def cases() -> Iterator[Callable[[], Case]]:
        for in_place in (False, True):
            for heads in options.heads:
                num_heads, num_kv_heads = map(int, heads.split("/"))
                for tokens in options.tokens:
                    yield partial(
                        rotary, options.torch_dtype, tokens, num_heads, num_kv_heads, in_place
                    )

    with torch.no_grad():
        return run_cases("rope", cases(), options)


if __name__ == "__main__":
    sys.exit(main())
