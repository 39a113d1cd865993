"""rms_norm and rms_norm + residual beside torch, torch.compile, Liger and FlashInfer, in one run.

Kernel time by CUDA-graph replays over inputs rotated past the L2; each contender's output is held
against fp64 first. All contenders read the same inputs and allocate their outputs themselves, in
the capture, from one memory pool, so that all write the same addresses; three pools are averaged
over, and the order is drawn anew each round (kernel_hub/measure/timing.py). FlashInfer's residual
norm is in place only. --joined bias,e4m3: with that joined to it, too. Writes
benchmarks/results/<gpu>_rms_norm.json.
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
from kernel_hub.testing import reference

EPS = 1e-6
QUANTISED = {torch.float8_e4m3fn: 448, torch.int8: 127}
JOINED = ("bias", "fp32 weight", "after", "e4m3", "int8")


def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What torch.compile is given."""
    s = x.float()
    return (s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def fused_formula(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> Any:
    """The same after a residual add."""
    s = x + r
    return formula(s, weight), s


def norm(dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    """x -> rms_norm(x)."""
    num_bytes = 2 * tokens * hidden * dtype.itemsize
    x = torch.randn(timing.num_sets(num_bytes), tokens, hidden, device="cuda", dtype=dtype)
    weight = torch.randn(hidden, device="cuda", dtype=dtype)
    sets = range(len(x))

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x[i], weight) for i in sets])

    def liger() -> Contender:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        launches = [partial(rms_norm_forward, x[i], weight, EPS, 0.0, "llama", True) for i in sets]
        return Contender(launches, lambda found: found[:1])

    def flashinfer() -> Contender:
        from flashinfer.norm import rmsnorm

        return Contender([partial(rmsnorm, x[i], weight, EPS) for i in sets])

    checked = x[0][:CHECKED_TOKENS]
    return Case(
        f"rms_norm {tokens} x {hidden}",
        num_bytes,
        Contender([partial(ops.rms_norm, x[i], weight, EPS) for i in sets]),
        [reference.rms_norm(checked, weight, EPS)],
        [reference.rms_norm(checked, weight, EPS, dtype=dtype)],
        {
            "torch": lambda: each(lambda a, w: torch.nn.functional.rms_norm(a, (hidden,), w, EPS)),
            "torch.compile": lambda: each(compiled(formula)),
            "liger": liger,
            "flashinfer": flashinfer,
        },
    )


def norm_residual(dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    """x, r -> rms_norm(x + r), x + r."""
    num_bytes = 4 * tokens * hidden * dtype.itemsize
    x = torch.randn(timing.num_sets(num_bytes), tokens, hidden, device="cuda", dtype=dtype)
    r = torch.randn_like(x)
    weight = torch.randn(hidden, device="cuda", dtype=dtype)
    sets = range(len(x))

    def ours(i: int) -> Any:
        return ops.rms_norm(x[i], weight, EPS, residual=r[i])

    def torch_eager(i: int) -> Any:
        s = x[i] + r[i]
        return torch.nn.functional.rms_norm(s, (hidden,), weight, EPS), s

    def torch_compile() -> Contender:
        function = compiled(fused_formula)
        return Contender([partial(function, x[i], r[i], weight) for i in sets], tuple)

    def liger() -> Contender:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

        launches = [
            partial(fused_add_rms_norm_forward, x[i], r[i], weight, EPS, 0.0, "llama") for i in sets
        ]
        return Contender(launches, lambda found: found[:2])

    def flashinfer() -> Contender:
        from flashinfer.norm import fused_add_rmsnorm

        # In place: on copies, and the first check sees the first run.
        xs, rs = x.clone(), r.clone()
        launches = [partial(fused_add_rmsnorm, xs[i], rs[i], weight, EPS) for i in sets]
        return Contender(launches, lambda _: (xs[0].clone(), rs[0].clone()))

    checked, residual = x[0][:CHECKED_TOKENS], r[0][:CHECKED_TOKENS]
    total = checked + residual
    return Case(
        f"rms_norm + residual {tokens} x {hidden}",
        num_bytes,
        Contender([partial(ours, i) for i in sets], tuple),
        [reference.rms_norm(total, weight, EPS), total.double()],
        [reference.rms_norm(total, weight, EPS, dtype=dtype), total],
        {
            "torch": lambda: Contender([partial(torch_eager, i) for i in sets], tuple),
            "torch.compile": torch_compile,
            "liger": liger,
            "flashinfer (in place)": flashinfer,
        },
    )


def quantised_formula(x: torch.Tensor, weight: torch.Tensor, to: torch.dtype) -> Any:
    """What torch.compile is given for rows into e4m3 or int8."""
    s, most = x.float(), QUANTISED[to]
    normed = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
    scale = normed.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    scaled = (normed / scale).clamp(-most, most)
    return (scaled.round() if to == torch.int8 else scaled).to(to), scale.squeeze(-1)


def joined(kind: str, dtype: torch.dtype, tokens: int, hidden: int) -> Case:
    """A norm with something joined to it: one of JOINED."""
    to = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(kind, dtype)
    num_bytes = tokens * hidden * ((1 + (kind == "after")) * dtype.itemsize + to.itemsize)
    x = torch.randn(timing.num_sets(num_bytes), tokens, hidden, device="cuda", dtype=dtype)
    r = torch.randn_like(x) if kind == "after" else x
    weight, bias = (torch.randn(hidden, device="cuda", dtype=dtype) for _ in range(2))
    weight = weight.float() if kind == "fp32 weight" else weight
    sets, is_quantised = range(len(x)), to in QUANTISED

    def outputs(found: Any) -> list[torch.Tensor]:
        return [found[0].float() * found[1].float()[:, None]] if is_quantised else [found]

    def ours(i: int) -> Any:
        if kind == "after":
            return ops.rms_norm(x[i], weight, EPS, residual=r[i], adds_after=True)
        more = {"bias": bias} if kind == "bias" else {"out_dtype": to if is_quantised else None}
        return ops.rms_norm(x[i], weight, EPS, **more)

    def eager(a: torch.Tensor, b: torch.Tensor) -> Any:
        if is_quantised:
            return quantised_formula(a, weight, to)
        s = a.float()
        normed = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
        added = b.float() if kind == "after" else bias.float() if kind == "bias" else 0.0
        return (normed + added).to(a.dtype)

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x[i], r[i]) for i in sets], outputs)

    checked, residual = x[0][:CHECKED_TOKENS], r[0][:CHECKED_TOKENS]
    more: dict[str, Any] = {"bias": bias} if kind == "bias" else {}
    more |= {"residual": residual, "adds_after": True} if kind == "after" else {}
    truth, own = (
        reference.rms_norm(checked, weight, EPS, dtype=wide, **more)
        for wide in (torch.float64, dtype)
    )
    return Case(
        f"rms_norm {kind} {tokens} x {hidden}",
        num_bytes,
        Contender([partial(ours, i) for i in sets], outputs),
        [truth],
        outputs(quantised_formula(checked, weight, to)) if is_quantised else [own],
        {"torch": lambda: each(eager), "torch.compile": lambda: each(compiled(eager))},
    )


def main() -> int:
    """Measure, write, print."""
    lists = {"hidden": "2048,4096,8192,16384", "joined": ""}
    options = row_arguments(__doc__, {"hidden": "4096,8192"}, **lists)

    kinds: tuple[Callable[[torch.dtype, int, int], Case], ...]
    kinds = (norm, norm_residual, *[partial(joined, kind) for kind in options.joined if kind])
    cases = cases_of(kinds, options.hidden, options)
    with torch.no_grad():
        return run_cases("rms_norm", cases, options)


if __name__ == "__main__":
    sys.exit(main())
