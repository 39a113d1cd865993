"""deterministic="batch" in products and norms: a row's bits are those that it has alone.

On the CPU by the emulator, whose tensor cores add in one order whatever the tile; on a GPU what is
held is the order of the tensor cores too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import Way

from kernel_hub import ops
from kernel_hub.errors import TensorError
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.matmul import linear_fp8_plan
from kernel_hub.tuning import Row

HALF = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
Rows = Callable[[torch.Tensor, Any], torch.Tensor]  # (rows, deterministic) -> results, by row


def _linear(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    b, bias = way.randn(n, k, dtype=dtype, seed=1), way.randn(n, dtype=dtype, seed=2)
    how = {"activation": lot.choice((None, "gelu", "silu")), "bias": lot.choice((None, bias))}
    if lot.random() < 0.3:
        how["out_dtype"] = torch.float32
    return lambda a, d: ops.linear(a, b, **how, deterministic=d)


def _fp32(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    b = way.randn(n, k, seed=1)
    return lambda a, d: ops.linear(a.float(), b, deterministic=d)


def _fp8(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    b, scales = way.randn(n, k, seed=1).to(E4M3), lot.choice(("none", "rows", "blocks"))
    fast = scales != "blocks" and lot.random() < 0.5
    shape = {"none": (), "rows": (n,), "blocks": (-(-n // 128), -(-k // 128))}[scales]
    b_scale = way.randn(*shape, seed=2).abs() if shape else None
    out_dtype = lot.choice((None, torch.float32))

    def run(a: torch.Tensor, d: Any) -> torch.Tensor:
        # Of a row's own numbers, as everything else is.
        blocks = a.float().abs().unflatten(1, (-1, 16)).amax(2)[:, :: 128 // 16].contiguous()
        a_scale = {"none": None, "rows": blocks[:, 0] / 3, "blocks": blocks}[scales]
        return ops.linear(
            a.to(E4M3), b, a_scale=a_scale, b_scale=b_scale, use_fast_accum=fast,
            out_dtype=out_dtype, deterministic=d,
        )  # fmt: skip

    return run


def _gated(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    b = way.randn(2 * n, k, dtype=dtype, seed=1)
    how = {"activation": lot.choice(("silu", "gelu")), "interleaved": lot.random() < 0.5}
    if lot.random() < 0.5:
        return lambda a, d: ops.swiglu_linear(a, b, deterministic=d)
    return lambda a, d: ops.gated_linear(a, b, **how, deterministic=d)


def _qkv(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    heads, kv_heads, head_dim = (*lot.choice(((4, 1), (2, 2))), lot.choice((64, 128)))
    w = way.randn((heads + 2 * kv_heads) * head_dim, k, dtype=dtype, seed=1)
    norm = {}
    if lot.random() < 0.4:
        norm["q_norm_weight"] = way.randn(head_dim, dtype=dtype, seed=2)
    angles = way.randn(1, head_dim // 2, seed=3)

    def run(a: torch.Tensor, d: Any) -> torch.Tensor:
        found = ops.qkv_linear(
            a, w, num_heads=heads, num_kv_heads=kv_heads, cos=angles.cos(), sin=angles.sin(),
            positions=torch.zeros(len(a), dtype=torch.int32, device=a.device), **norm,
            deterministic=d,
        )  # fmt: skip
        return torch.cat([x.flatten(1) for x in found if x is not None], 1)

    return run


def _grouped(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    """Each row is one expert's, the others' rows before and behind it."""
    b = way.randn(3, n, k, dtype=dtype, seed=1)

    def run(a: torch.Tensor, d: Any) -> torch.Tensor:
        m = len(a)
        rows = torch.cat((a[: m // 3], a, a[: m // 2]))
        bounds = [0, m // 3, m // 3 + m, len(rows)]
        offsets = torch.tensor(bounds, dtype=torch.int32, device=a.device)
        return ops.grouped_linear(rows, b, offsets, deterministic=d)[m // 3 :][:m]

    return run


def _norm(way: Way, lot: random.Random, n: int, k: int, dtype: torch.dtype) -> Rows:
    weight, wide = way.randn(k, dtype=dtype, seed=1), way.randn(k, seed=2)
    how = lot.choice(("plain", "residual", "joined", "layer"))
    if how == "plain":
        return lambda a, d: ops.rms_norm(a, weight, deterministic=d)
    if how == "residual":
        return lambda a, d: ops.rms_norm(a, weight, residual=a + 1, deterministic=d)[0]
    if how == "joined":
        return lambda a, d: ops.rms_norm(a, wide, residual=a, adds_after=True, deterministic=d)
    return lambda a, d: ops.layer_norm(a, wide, wide, deterministic=d)


KINDS: dict[str, Callable[..., Rows]] = {
    "linear": _linear, "linear_fp32": _fp32, "linear_fp8": _fp8, "gated": _gated, "qkv": _qkv,
    "grouped": _grouped, "norm": _norm,
}  # fmt: skip


def _dtype(kind: str, lot: random.Random) -> torch.dtype:
    return torch.float32 if kind == "norm" else lot.choice(HALF)  # which hides less


# (rows of out, k) of models' layers, for a GPU.
SHAPES = [(4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (1024, 5120), (2560, 9728)]


def check(run: Rows, a: torch.Tensor, counts: list[int], lot: random.Random) -> None:
    """Rows of `a` among others: any run of them, and each alone."""
    whole = run(a, "batch")
    for count in counts:
        first = lot.randrange(len(a) - count + 1)
        part = run(a[first : first + count], "batch")
        same_bits(part, whole[first : first + count], name=f"{count} rows from {first}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(3))
def test_rows_emulated(hopper_way: Way, kind: str, index: int) -> None:
    if hopper_way.is_gpu:
        pytest.skip("the test below does that with larger cases")
    lot = random.Random(f"batch {kind} {index}")
    n, k, m = 8 * lot.randrange(1, 40), 16 * lot.choice((4, 9, 40, 72)), lot.choice((40, 150, 300))
    dtype = _dtype(kind, lot)
    with pretend(PlannedGpu((9, 0), lot.choice((4, 24, 132)))):
        run = KINDS[kind](hopper_way, lot, n, k, dtype)
        check(run, hopper_way.randn(m, k, dtype=dtype), [1, 3, 17, m // 2, m - 1], lot)


@pytest.mark.parametrize("mode", ["rows", "one"])
def test_scales_in_one_order(hopper_way: Way, mode: str) -> None:
    """Of tiles with either side the rows: a sum times a's scale, then b's, then the bias."""
    m, n, k = (300, 400, 1152) if hopper_way.is_gpu else (40, 72, 144)
    a, b = hopper_way.randn(m, k).to(E4M3), hopper_way.randn(n, k, seed=1).to(E4M3)
    a_scale, b_scale = (
        hopper_way.randn(rows if mode == "rows" else 1, seed=seed).abs() + 0.1
        for rows, seed in ((m, 2), (n, 3))
    )
    found = {}
    for name, tile in linear_fp8_plan.VARIANTS.items():
        if tile.is_fast or tile.splits > 1:
            continue
        with linear_fp8_plan.TABLE.forcing(Row(name, {"group": 3, "deals": 0})):
            found[name] = ops.linear(
                a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32,
                deterministic="batch",
            )  # fmt: skip
    assert len({linear_fp8_plan.VARIANTS[name].swaps for name in found}) == 2
    first = next(iter(found.values()))
    for name, each in found.items():
        same_bits(each, first, name=name)


@pytest.mark.parametrize("kind", ["linear", "gated", "qkv", "grouped"])
def test_portable_rows(way: Way, kind: str) -> None:
    """The kernels of GPUs before Hopper."""
    if way.is_gpu:
        pytest.skip("on a GPU the test below runs what it has")
    lot = random.Random(f"portable {kind}")
    with pretend(PlannedGpu((8, 0), 20)):
        run = KINDS[kind](way, lot, 136, 1152, torch.bfloat16)
        check(run, way.randn(200, 1152, dtype=torch.bfloat16), [1, 7, 17, 100], lot)


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_free_plans_depend_on_the_batch(hopper_way: Way, kind: str) -> None:
    """What is asked for is not there anyway."""
    if hopper_way.is_gpu:
        pytest.skip("emulated: on a GPU it depends on which plans are fastest")
    lot, k = random.Random(0), 2304 if kind == "linear" else 1024
    dtype = _dtype(kind, lot)
    run = KINDS[kind](hopper_way, lot, 64, k, dtype)
    a = hopper_way.randn(300, k, dtype=dtype)
    with pretend(PlannedGpu((9, 0), 132 if kind == "linear" else 16)):
        whole = run(a, False)
        assert any(not torch.equal(run(a[i : i + 1], False)[0], whole[i]) for i in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(hopper_way: Way, kind: str, shape: tuple[int, int]) -> None:
    lot = random.Random(f"batch {kind} {shape}")
    (n, k), dtype = shape, _dtype(kind, lot)
    run = KINDS[kind](hopper_way, lot, n, k, dtype)
    counts = [1, 2, 7, 16, 17, 33, 64, 65, 129, 256, 777, 2048, 4095]
    counts += [round(2 ** (12 * lot.random())) for _ in range(8)]
    check(run, hopper_way.randn(4096, k, dtype=dtype), counts, lot)


@pytest.mark.parametrize("name", ["linear", "swiglu_linear", "gated_linear", "rms_norm"])
def test_refusals(name: str) -> None:
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    given = (x, x[0]) if name == "rms_norm" else (x, x)
    with pytest.raises(TensorError, match="deterministic: expected True, False or 'batch'"):
        getattr(ops, name)(*given, deterministic="on")
    for deterministic in (True, "batch"):
        same_bits(
            getattr(ops, name)(*given, deterministic=deterministic), getattr(ops, name)(*given),
            name="on the CPU",
        )  # fmt: skip
