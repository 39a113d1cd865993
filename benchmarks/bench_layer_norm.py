"""layer_norm, with a residual and into e4m3, beside torch, torch.compile and Liger, in one run.

Timed as bench_rms_norm.py does. Results in e4m3 are held against fp64 after they are multiplied by
their scales. Writes benchmarks/results/<gpu>_layer_norm.json.
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

EPS = 1e-5
E4M3 = torch.float8_e4m3fn
_layer_norm = torch.nn.functional.layer_norm


def quantised_formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """What torch.compile is given for e4m3."""
    normed = _layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), EPS)
    scale = normed.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return (normed / scale).clamp(-448, 448).to(E4M3), scale.squeeze(-1)


def dequantised(found: Any) -> list[torch.Tensor]:
    """e4m3 and its scales as fp32."""
    return [found[0].float() * found[1].float()[:, None]]


def norm(kind: str, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    """One of plain, residual and e4m3."""
    out_bytes = {"plain": dtype.itemsize, "residual": 3 * dtype.itemsize, "e4m3": 1}[kind]
    num_bytes = tokens * hidden * (dtype.itemsize + out_bytes)
    x = torch.randn(timing.num_sets(num_bytes), tokens, hidden, device="cuda", dtype=dtype)
    r = torch.randn_like(x) if kind == "residual" else x
    weight, bias = (torch.randn(hidden, device="cuda", dtype=dtype) for _ in range(2))
    sets, shape, checked = range(len(x)), (hidden,), x[0][:CHECKED_TOKENS]
    ways: dict[str, Callable[[Any], Any]] = {"plain": lambda out: [out], "residual": tuple}
    outputs = ways.get(kind, dequantised)

    def ours(i: int) -> Any:
        if kind == "residual":
            return ops.layer_norm(x[i], weight, bias, EPS, residual=r[i])
        return ops.layer_norm(x[i], weight, bias, EPS, out_dtype=E4M3 if kind == "e4m3" else None)

    def eager(a: torch.Tensor, b: torch.Tensor) -> Any:
        if kind == "e4m3":
            return quantised_formula(a, weight, bias)
        s = a + b if kind == "residual" else a
        normed = _layer_norm(s, shape, weight, bias, EPS)
        return (normed, s) if kind == "residual" else normed

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x[i], r[i]) for i in sets], outputs)

    def liger() -> Contender:
        from liger_kernel.ops.layer_norm import layer_norm_forward

        launches = [partial(layer_norm_forward, x[i], weight, bias, EPS) for i in sets]
        return Contender(launches, lambda found: found[:1])

    total = checked + r[0][:CHECKED_TOKENS] if kind == "residual" else checked
    truth, own = (
        reference.layer_norm(total, weight, bias, EPS, dtype=to) for to in (torch.float64, dtype)
    )
    if kind == "e4m3":
        own = dequantised(quantised_formula(checked, weight, bias))[0]
    more = [total] if kind == "residual" else []
    peers = {"torch": lambda: each(eager), "torch.compile": lambda: each(compiled(eager))}
    return Case(
        f"layer_norm {kind} {tokens} x {hidden}",
        num_bytes,
        Contender([partial(ours, i) for i in sets], outputs),
        [truth, *[s.double() for s in more]],
        [own, *more],
        {**peers, "liger": liger} if kind == "plain" else peers,
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"hidden": "4096,8192"}, hidden="2048,4096,8192,16384")

    def cases() -> Iterator[Callable[[], Case]]:
        for kind in ("plain", "residual", "e4m3"):
            for hidden in options.hidden:
                for tokens in options.tokens:
                    yield partial(norm, kind, options.torch_dtype, tokens, int(hidden))

    with torch.no_grad():
        return run_cases("layer_norm", cases(), options)


if __name__ == "__main__":
    sys.exit(main())
