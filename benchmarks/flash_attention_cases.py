"""The cases of bench_flash_attention.py: inputs, contenders, what outputs are held against."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness import DTYPES, OURS
from lot.attention_peers import (
    CUDNN,
    FA2,
    FA3,
    FLASHINFER,
    Launch,
    fa3,
    flashinfer_paged,
    sdpa,
    torch_flash,
    xformers_fa3,
)

from kernel_hub import ops
from kernel_hub.ops.attention import forward_sm90 as hopper
from kernel_hub.ops.core.device import has_wgmma
from kernel_hub.testing.reference_attention import reference_attention

PORTABLE, CONTIGUOUS = f"{OURS} portable", f"{OURS} contiguous"
PADDED = f"{OURS} v padded"
CHECKED_ROWS = 128


@dataclass
class Case:
    """One shape: contenders, its operations, and what to hold their outputs against.

    checks: (rows of out, truth in fp64, the same reference in the tensors' dtype).
    """

    name: str
    flops: float
    contenders: dict[str, Callable[[], Launch]]
    checks: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )

    def check(
        self, rows: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, causal: bool,
    ) -> None:  # fmt: skip
        """Hold `rows` of every output against attention of q (the last queries) over k and v."""
        truth, own = (
            reference_attention(q, k, v, causal=causal, dtype=dtype)[0]
            for dtype in (torch.float64, q.dtype)
        )
        self.checks.append((rows, truth, own))


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def portable(**options: Any) -> torch.Tensor:
    """Our op without Hopper's own kernels."""
    before, hopper.is_enabled = hopper.is_enabled, False
    try:
        return ops.flash_attention(**options)
    finally:
        hopper.is_enabled = before


def ours(**options: Any) -> dict[str, Callable[[], Launch]]:
    """Our op; on Hopper also its portable kernels."""
    found: dict[str, Callable[[], Launch]] = {OURS: lambda: partial(ops.flash_attention, **options)}
    if has_wgmma(torch.cuda.get_device_capability()):
        found[PORTABLE] = lambda: partial(portable, **options)
    return found


def dense(
    title: str, batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, causal: bool,
    dtype: torch.dtype, own_head_dim_v: int | None = None,
) -> Case:  # fmt: skip
    """(batch, seqlen, heads, head_dim) contiguous."""
    head_dim_v = own_head_dim_v or head_dim
    q = randn(batch, seqlen, heads[0], head_dim, dtype=dtype)
    k, v = (randn(batch, seqlen, heads[1], width, dtype=dtype) for width in (head_dim, head_dim_v))

    def use_fa3() -> Launch:
        op = fa3() if dtype == torch.bfloat16 else xformers_fa3()
        scale = 1 / math.sqrt(head_dim)
        return lambda: op(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)[0]

    token = next(name for name, kind in DTYPES.items() if kind == dtype)
    mask = "causal" if causal else "full"
    width = f"d{head_dim}" if own_head_dim_v is None else f"d{head_dim}/{head_dim_v}"
    pairs = batch * heads[0] * seqlen * seqlen * (0.5 if causal else 1)
    case = Case(
        f"{title} {batch} x {seqlen} h{heads[0]}/{heads[1]} {width} {mask} {token}",
        2.0 * pairs * (head_dim + head_dim_v),
        {
            **ours(q=q, k=k, v=v, causal=causal),
            FA2: lambda: sdpa(q, k, v, causal, FA2),
            CUDNN: lambda: sdpa(q, k, v, causal, CUDNN),
            FA3: use_fa3,
        },
    )
    if own_head_dim_v is not None:
        wide = torch.nn.functional.pad(v, (0, head_dim - head_dim_v))
        case.contenders[PADDED] = lambda: (
            lambda: ops.flash_attention(q, k, wide, causal=causal)[..., :head_dim_v]
        )
    for b in {0, batch - 1}:
        rows = partial(lambda b, out: out[b : b + 1, -CHECKED_ROWS:, : heads[0] // heads[1]], b)
        case.check(rows, rows(q), k[b : b + 1, :, :1], v[b : b + 1, :, :1], causal)
    return case


def packed(
    batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, causal: bool
) -> Case:  # fmt: skip
    """q, k and v of bf16 in one tensor, as one projection gives them; peers read it too."""
    num_heads, num_kv_heads = heads
    qkv = randn(batch, seqlen, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 2)
    given = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "causal": causal}

    def use_fa3() -> Launch:
        op, scale = fa3(), 1 / math.sqrt(head_dim)
        return lambda: op(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)[0]

    case = Case(
        f"packed {batch} x {seqlen} h{num_heads}/{num_kv_heads} d{head_dim} "
        f"{'causal' if causal else 'full'} bf16",
        4.0 * batch * num_heads * seqlen * seqlen * head_dim * (0.5 if causal else 1),
        {
            OURS: lambda: partial(ops.flash_attention_qkvpacked, qkv, **given),
            FA2: lambda: sdpa(q, k, v, causal, FA2),
            CUDNN: lambda: sdpa(q, k, v, causal, CUDNN),
            FA3: use_fa3,
        },
    )
    rows = partial(lambda out: out[:1, -CHECKED_ROWS:, : num_heads // num_kv_heads])
    case.check(rows, rows(q), k[:1, :, :1], v[:1, :, :1], causal)
    return case


def varlen(heads: tuple[int, int], head_dim: int, causal: bool, dtype: torch.dtype) -> Case:
    """16 lengths, log-uniform from 64 to 8k, the same every time."""
    draw = random.Random(0)
    lengths = [round(64 * 128 ** draw.random()) for _ in range(16)]
    starts = [sum(lengths[:i]) for i in range(17)]
    bounds = torch.tensor(starts, dtype=torch.int32, device="cuda")
    longest, total = max(lengths), starts[-1]
    q = randn(total, heads[0], head_dim, dtype=dtype)
    k, v = (randn(total, heads[1], head_dim, dtype=dtype) for _ in range(2))
    scale = 1 / math.sqrt(head_dim)
    tables: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    tables |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def use_fa3() -> Launch:
        op = fa3()
        return lambda: op(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, **tables)[0]

    token = next(name for name, kind in DTYPES.items() if kind == dtype)
    case = Case(
        f"varlen 16 x 64..8192 h{heads[0]}/{heads[1]} d{head_dim} "
        f"{'causal' if causal else 'full'} {token}",
        sum(4.0 * heads[0] * n * n * head_dim * (0.5 if causal else 1) for n in lengths),
        {
            **ours(q=q, k=k, v=v, causal=causal, **tables),
            FA2: lambda: torch_flash(q, k, v, causal, scale, bounds, longest),
            FA3: use_fa3,
        },
    )
    for i in (0, lengths.index(longest)):
        start, end = starts[i], starts[i + 1]
        first = max(start, end - CHECKED_ROWS)
        rows = partial(lambda a, b, out: out[None, a:b, : heads[0] // heads[1]], first, end)
        case.check(rows, rows(q), k[None, start:end, :1], v[None, start:end, :1], causal)
    return case


def paged(
    page_size: int, batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int],
    head_dim: int, dtype: torch.dtype,
) -> Case:  # fmt: skip
    """Causal prefill of seqlen_q new tokens over seqlen_k in shuffled pages."""
    per_sequence = -(-seqlen_k // page_size)
    num_pages = batch * per_sequence
    q = randn(batch, seqlen_q, heads[0], head_dim, dtype=dtype)
    k, v = (randn(num_pages, page_size, heads[1], head_dim, dtype=dtype) for _ in range(2))
    table = torch.randperm(num_pages, device="cuda").to(torch.int32).view(batch, per_sequence)
    lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device="cuda")
    gathered = [x[table[:1].long()].flatten(1, 2)[:, :seqlen_k].contiguous() for x in (k, v)]
    dense_k, dense_v = (x[table.long()].flatten(1, 2)[:, :seqlen_k].contiguous() for x in (k, v))

    def use_fa3() -> Launch:
        op, scale = xformers_fa3(), 1 / math.sqrt(head_dim)
        return lambda: op(
            q,
            k,
            v,
            softmax_scale=scale,
            is_causal=True,
            num_splits=0,
            seqused_k=lengths,
            page_table=table,
        )[0]

    def use_flashinfer() -> Launch:
        lengths = ([seqlen_q] * batch, [seqlen_k] * batch)
        run = flashinfer_paged(table, *lengths, (*heads, head_dim), page_size, dtype, "auto")
        return lambda: run(q.flatten(0, 1), (k, v)).view(q.shape)

    token = next(name for name, kind in DTYPES.items() if kind == dtype)
    hidden = seqlen_q * (seqlen_q - 1) / 2
    case = Case(
        f"paged {page_size} {batch} x {seqlen_q} over {seqlen_k} h{heads[0]}/{heads[1]} "
        f"d{head_dim} causal {token}",
        4.0 * batch * heads[0] * (seqlen_q * seqlen_k - hidden) * head_dim,
        {
            OURS: lambda: partial(
                ops.flash_attention, q, k, v, causal=True, block_table=table, cache_seqlens=lengths
            ),
            PORTABLE: lambda: partial(
                portable, q=q, k=k, v=v, causal=True, block_table=table, cache_seqlens=lengths
            ),
            CONTIGUOUS: lambda: partial(ops.flash_attention, q, dense_k, dense_v, causal=True),
            FA3: use_fa3,
            FLASHINFER: use_flashinfer,
        },
    )
    rows = partial(lambda out: out[:1, -CHECKED_ROWS:, : heads[0] // heads[1]])
    case.check(rows, rows(q), gathered[0][:, :, :1], gathered[1][:, :, :1], True)
    return case
