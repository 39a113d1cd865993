"""Cases of activations beside torch, torch.compile and FlashInfer, results of a dtype and
e4m3, timed as bench_silu_and_mul.py says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, compiled

from kernel_hub.measure import timing

E4M3 = torch.float8_e4m3fn
Formula = Callable[[torch.Tensor], torch.Tensor]


def quantised(values: torch.Tensor) -> Any:
    """fp32 -> e4m3 with a scale a row, as torch has it."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return (values / scale).clamp(-448, 448).to(E4M3), scale.squeeze(-1)


def dequantised(found: Any) -> list[torch.Tensor]:
    """e4m3 and its scales as fp32."""
    return [found[0].float() * found[1].float()[:, None]]


def kind_of(
    op: Callable[..., Any], formula: Callable[..., Any], reference: Callable[..., Any],
    flashinfer: Callable[[], Callable[[torch.Tensor], Any]] | None = None, *, name: str,
    is_e4m3: bool, **options: Any,
) -> Any:  # fmt: skip
    """`gated` of options that the op, its formula and the reference take."""
    one, other, right = (partial(each, **options) for each in (op, formula, reference))
    return partial(gated, one, other, right, flashinfer, is_e4m3=is_e4m3, name=name)


def gated(
    op: Callable[..., Any], formula: Formula, reference: Callable[..., torch.Tensor],
    flashinfer: Callable[[], Callable[[torch.Tensor], Any]] | None, dtype: torch.dtype,
    tokens: int, size: int, *, is_e4m3: bool = False, name: str = "", parts: int = 2,
) -> Case:  # fmt: skip
    """`op` of (tokens, parts * size). formula: in fp32, as torch and torch.compile are given it."""
    num_bytes = tokens * size * (parts * dtype.itemsize + (1 if is_e4m3 else dtype.itemsize))
    x = torch.randn(timing.num_sets(num_bytes), tokens, parts * size, device="cuda", dtype=dtype)
    sets, checked = range(len(x)), x[0][:CHECKED_TOKENS]

    def whole(a: torch.Tensor) -> Any:
        return quantised(formula(a.float())) if is_e4m3 else formula(a.float()).to(a.dtype)

    def each(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, x[i]) for i in sets]
        return Contender(launches, dequantised) if is_e4m3 else Contender(launches)

    peers: Mapping[str, Callable[[], Contender]] = {
        "torch": lambda: each(whole),
        "torch.compile": lambda: each(compiled(whole)),
    }
    if flashinfer is not None and not is_e4m3:
        peers = {**peers, "flashinfer": lambda: each(flashinfer())}
    own = reference(checked, dtype=dtype)
    return Case(
        f"{name or op.__name__}{' e4m3' if is_e4m3 else ''} {tokens} x {size}",
        num_bytes,
        each(partial(op, out_dtype=E4M3) if is_e4m3 else op),
        [reference(checked)],
        dequantised(quantised(own.float())) if is_e4m3 else [own],
        peers,
    )
