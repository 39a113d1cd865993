"""quantize_e4m3 by scales of each kind, found and given, beside torch and torch.compile.

Timed as bench_silu_and_mul.py says; results are held against fp64 after they are multiplied by
their scales. One scale of the whole needs two passes, of which `num_bytes` counts both. Writes
benchmarks/results/<gpu>_quantize_e4m3.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, cases_of, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing

E4M3 = torch.float8_e4m3fn


def _shared(per: str, x: torch.Tensor) -> torch.Tensor:
    """A view of x whose last dimensions share a scale: those that `_axes` names."""
    if per in ("tensor", "row"):
        return x
    blocks = x.unflatten(-1, (-1, 128))
    return blocks if per == "1x128" else blocks.unflatten(-3, (-1, 128))


def _axes(per: str) -> tuple[int, ...]:
    return {"tensor": (-2, -1), "row": (-1,), "1x128": (-1,), "128x128": (-3, -1)}[per]


def _found(per: str, x: torch.Tensor) -> Any:
    parts = _shared(per, x.float())
    scale = parts.abs().amax(_axes(per), keepdim=True).clamp_min(1e-12) / 448
    return (parts / scale).clamp(-448, 448).to(E4M3).view(x.shape), scale.squeeze(_axes(per))


def _given(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale[..., None]).clamp(-448, 448).to(E4M3)


def quantise(per: str, dtype: torch.dtype, tokens: int, size: int) -> Case:
    """per: what shares a scale that is found; "given": rows, by scales that are there."""
    tokens = -(-tokens // 128) * 128 if per == "128x128" else tokens
    passes = 2 if per == "tensor" else 1
    num_bytes = tokens * size * (passes * dtype.itemsize + 1)
    x = torch.randn(timing.num_sets(num_bytes), tokens, size, device="cuda", dtype=dtype)
    sets, checked = range(len(x)), x[0][:CHECKED_TOKENS]
    scale = torch.full((tokens,), 2.0**-6, device="cuda")

    def wide(found: Any) -> list[torch.Tensor]:
        if per == "given":
            return [found.float() * 2.0**-6]
        parts, scales = _shared(per, found[0].float()), found[1]
        shape = [1 if i - parts.dim() in _axes(per) else n for i, n in enumerate(parts.shape)]
        return [(parts * scales.reshape(shape)).view(found[0].shape)]

    def each(function: Callable[..., Any]) -> Contender:
        more = (scale,) if per == "given" else ()
        return Contender([partial(function, x[i], *more) for i in sets], wide)

    formula: Callable[..., Any] = _given if per == "given" else partial(_found, per)
    ours = ops.quantize_e4m3 if per == "given" else partial(ops.quantize_e4m3, per=per)
    own = wide(formula(x[0], scale) if per == "given" else formula(x[0]))[0][:CHECKED_TOKENS]
    return Case(
        f"quantize_e4m3 {per} {tokens} x {size}",
        num_bytes,
        each(ours),
        [checked.double()],
        [own],
        {"torch": lambda: each(formula), "torch.compile": lambda: each(compiled(formula))},
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "4096"}, sizes="4096,7168,14336")
    kinds = [partial(quantise, per) for per in ("row", "1x128", "128x128", "tensor", "given")]
    with torch.no_grad():
        return run_cases("quantize_e4m3", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
