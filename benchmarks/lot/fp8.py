"""Contenders of linear of e4m3: with sums that stay in the tensor cores, without, with blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_hub.ops import linear

from .contenders import E4M3, Contender, Expected, Launch, Made, Peer, Source, Written, product
from .product_peers import DEEPGEMM, SCALED_MM, deep_gemm
from .shapes import BIAS, FP32, RESIDUAL, Lot

BLOCK = 128
# Error of the largest result: rounding to bf16, and the sums' own.
_SLACK = {False: 2**-8 + 1e-3, True: 2**-8 + 2e-2}
Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def wide(
    values: torch.Tensor, scale: torch.Tensor, kind: str, block_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """values * scale in `dtype`; block_rows: rows under one scale of blocks."""
    factors = scale.to(dtype)
    if kind == "block":
        factors = factors.repeat_interleave(block_rows, 0)[: len(values)]
        factors = factors.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return values.to(dtype) * factors


def make(lot: Lot, source: Source) -> Made:
    """The contenders of a case."""
    m, n, k = lot.m, lot.n, lot.k
    out_dtype = torch.float32 if FP32 in lot.options else torch.bfloat16
    sets: list[Set] = [
        (
            source.rows(m, k, dtype=E4M3, options=lot.options),
            source.normal(n, k, dtype=E4M3),
            source.empty(m, n, dtype=out_dtype),
        )
        for _ in range(source.num_sets(lot.num_bytes))
    ]
    shapes = {
        "tensor": ((), ()),
        "row": ((m, 1), (n, 1)),
        "block": ((m, _blocks(k)), (_blocks(n), _blocks(k))),
    }[lot.kind]
    scales = [source.scales(*shape).mul_(k**-0.25) for shape in shapes]
    bias = source.normal(n, dtype=out_dtype) if BIAS in lot.options else None
    residual = source.normal(m, n, dtype=out_dtype) if RESIDUAL in lot.options else None
    fast = lot.family == "linear_fp8_fast"
    rows = source.some(m)
    a, b, out = sets[0]
    picked = scales[0][rows] if scales[0].dim() else scales[0]
    truth = _product(a[rows], picked, b, scales[1], lot.kind)
    for more in (bias, None if residual is None else residual[rows]):
        truth = truth if more is None else truth + more.double()
    expected = [Expected(truth, truth.to(out_dtype), _SLACK[fast])]
    written = Written([out], lambda: [out[rows]])

    def contender(launch_of: Any) -> Contender:
        return Contender([launch_of(*one) for one in sets], written, expected)

    def ours(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        return functools.partial(
            linear, a, b, bias, residual=residual, out=out, a_scale=scales[0], b_scale=scales[1],
            use_fast_accum=fast,
        )  # fmt: skip

    def apart(launch: Launch, out: torch.Tensor, *added: torch.Tensor | None) -> Launch:
        """What is not fused follows as kernels of torch's."""
        rest = [more for more in added if more is not None]

        def run() -> None:
            launch()
            for more in rest:
                out.add_(more)

        return run if rest else launch

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        a_scale, b_scale = scales
        if lot.kind == "block":  # columns contiguous, as cuBLASLt wants them
            a_scale = a_scale.t().contiguous().t()
        if b_scale.dim():
            b_scale = b_scale.t()
        fused = bias if out_dtype == torch.bfloat16 else None  # torch adds none in fp32
        launch = functools.partial(
            torch._scaled_mm, a, b.t(), a_scale, b_scale, bias=fused, out_dtype=out_dtype,
            use_fast_accum=fast, out=out,
        )  # fmt: skip
        return apart(launch, out, None if fused is not None else bias, residual)

    def deep(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        # Columns of whole 16 bytes, which it else makes at each call.
        aligned = source.empty(_blocks(k), -(-m // 4) * 4, dtype=torch.float32).t()[:m]
        aligned.copy_(scales[0])
        launch = functools.partial(deep_gemm().fp8_gemm_nt, (a, aligned), (b, scales[1]), out)
        return apart(launch, out, bias, residual)

    tail = " + residual" * (residual is not None)
    peers = {f"{SCALED_MM}{tail}": Peer((SCALED_MM,), lambda: contender(scaled_mm))}
    if lot.kind == "block":
        tail = " + bias" * (bias is not None) + tail
        peers[f"{DEEPGEMM}{tail}"] = Peer((DEEPGEMM,), lambda: contender(deep))
    is_rotated = source.is_rotated(len(sets), lot.num_bytes)
    return Made(contender(ours), peers, is_rotated)


def _product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, kind: str
) -> torch.Tensor:
    """Of dequantised operands in fp64, b in parts of whole blocks."""
    first = wide(a, a_scale, kind, 1, torch.float64)
    step = max(BLOCK, (1 << 26) // b.shape[1] // BLOCK * BLOCK)
    found = []
    for start in range(0, len(b), step):
        rows = slice(start, start + step)
        under = slice(start // BLOCK, (start + step) // BLOCK) if kind == "block" else rows
        part = b_scale[under] if b_scale.dim() else b_scale
        second = wide(b[rows], part, kind, BLOCK, torch.float64)
        found.append(product(first, second, torch.float64))
    return torch.cat(found, dim=1)
