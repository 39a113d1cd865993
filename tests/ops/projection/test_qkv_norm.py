"""qkv_linear whose queries and keys are normed a head: two launches, against fp64 and those two."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bits import same_bits
from product_problems import rotated
from test_qkv_linear import inputs, tables
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import append_kv, linear, qkv_linear
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check

Heads = tuple[int, int, int]


def truths(
    x: torch.Tensor, w: torch.Tensor, heads: Heads, norm: dict[str, Any], turn: tuple[Any, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v in `dtype`; turn: cosines and sines of each token, or (), and interleaved."""
    found = (x.to(dtype) @ w.to(dtype).T).unflatten(-1, (heads[0] + 2 * heads[1], heads[2]))
    parts = list(found.split((heads[0], heads[1], heads[1]), -2))
    for i, name in enumerate(("q_norm_weight", "k_norm_weight")):
        if name in norm:
            more = {"eps": norm["eps"], "weight_offset": norm["weight_offset"], "dtype": dtype}
            parts[i] = reference.rms_norm(parts[i], norm[name], **more)
        if turn:
            c, s, interleaved = turn
            c, s = c.to(dtype)[..., None, :], s.to(dtype)[..., None, :]
            parts[i] = rotated(parts[i], c, s, interleaved, 2 * c.shape[-1])
    return tuple(parts)


@pytest.mark.parametrize("number", range(16))
def test_by_lot(way: Way, number: int) -> None:
    lot = random.Random(number)
    head_dim, dtype = lot.choice([32, 64, 96, 128]), lot.choice([torch.float16, torch.bfloat16])
    heads = lot.randint(1, 5), lot.randint(1, 3), head_dim
    m, hidden = lot.choice([1, 5, 33]), 8 * lot.randint(2, 12)
    kind = lot.choice([dtype, torch.float32])
    norm: dict[str, Any] = {
        name: 1 + way.randn(head_dim, dtype=kind, seed=seed)
        for seed, name in enumerate(("q_norm_weight", "k_norm_weight"))
        if lot.random() < 0.85
    }
    norm |= {"eps": lot.choice([1e-6, 1e-2]), "weight_offset": lot.choice([0.0, 1.0])}
    x, w = inputs(way, (1, m), hidden, heads, dtype)
    interleaved, turn, given = lot.random() < 0.5, (), ()
    if lot.random() < 0.8:
        cos, sin = tables(way, lot.choice([16, head_dim // 2 // 16 * 16, head_dim]), torch.float32)
        turn, given = (cos[:m][None], sin[:m][None], interleaved), (None, cos, sin)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "interleaved": interleaved}
    found = qkv_linear(x, w, *given, **sizes, **norm)
    truth, own = (truths(x, w, heads, norm, turn, kind) for kind in (torch.float64, dtype))
    for i in range(3):
        out = found[i]
        assert out is not None
        check(out, truth[i], own[i], name="qkv"[i])


def test_a_flat_x_and_positions(way: Way) -> None:
    x, w = inputs(way, (1, 9), 64, (2, 1, 64), torch.bfloat16)
    norm = {f"{name}_norm_weight": way.randn(64, dtype=torch.bfloat16) for name in "qk"}
    table = tables(way, 64, torch.bfloat16)
    positions = torch.arange(9, device=way.device)
    dense = qkv_linear(x, w, None, *table, num_heads=2, num_kv_heads=1, **norm)
    flat = qkv_linear(x[0], w, None, *table, positions, num_heads=2, num_kv_heads=1, **norm)
    for mine, theirs in zip(flat, dense, strict=True):
        assert mine is not None and theirs is not None
        same_bits(mine, theirs[0])


def test_a_paged_cache(way: Way) -> None:
    """As linear, then append_kv; a finished row has no queries either."""
    heads: Heads = (4, 2, 64)
    x, w = inputs(way, (3, 5), 72, heads, torch.bfloat16)
    norm = {f"{name}_norm_weight": way.randn(64, dtype=torch.float32) for name in "qk"}
    cos, sin = tables(way, 64, torch.float32)
    where = {
        "cache_seqlens": torch.tensor([3, -2, 11], dtype=torch.int32, device=way.device),
        "block_table": torch.tensor([[4, 0], [1, 2], [3, 5]], dtype=torch.int32).to(way.device),
    }
    caches = [torch.full((2, 6, 8, 2, 64), 7.0, dtype=torch.bfloat16).to(way.device) for _ in "ab"]
    more = {**norm, "weight_offset": 1.0}
    out_q = torch.full((3, 5, 4, 64), 7.0, dtype=torch.bfloat16, device=way.device)
    expected = out_q.clone()
    qkv_linear(
        x, w, None, cos, sin, num_heads=4, num_kv_heads=2, k_cache=caches[0][0],
        v_cache=caches[0][1], out_q=out_q, **where, **more,
    )  # fmt: skip
    joint = linear(x, w).unflatten(-1, (8, 64))
    q, k, v = joint.split((4, 2, 2), -2)
    append_kv(
        k, v, caches[1][0], caches[1][1], q=q, cos=cos, sin=sin, out_q=expected, **where, **more
    )
    if way.is_gpu or way.name == "emulated":
        same_bits(out_q, expected)
        same_bits(caches[0], caches[1])
    assert bool((out_q[1] == 7.0).all())
    torch.testing.assert_close(out_q, expected, rtol=0.05, atol=0.05)


def test_refused() -> None:
    x, w = torch.ones(2, 3, 16).half(), torch.ones(4 * 32, 16).half()
    sizes = {"num_heads": 2, "num_kv_heads": 1}
    for weight, parts in ((torch.ones(31), "shape (32,)"), (torch.ones(32).double(), "float32")):
        with pytest.raises(TensorError, match="qkv_linear: q_norm_weight") as caught:
            qkv_linear(x, w, **sizes, q_norm_weight=weight)
        assert parts in str(caught.value)
    past = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TensorError, match="q_norm_weight: expected None, or a cache where"):
        qkv_linear(x, w, **sizes, q_norm_weight=torch.ones(32), cache_seqlens=past)
    with pytest.raises(TensorError, match="eps: expected at least 0"):
        qkv_linear(x, w, **sizes, k_norm_weight=torch.ones(32), eps=-1.0)


def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(2, 3, 16).half(), torch.randn(4 * 32, 16).half()
    weight = torch.randn(32)

    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, _ = qkv_linear(
            x, w, num_heads=2, num_kv_heads=1, q_norm_weight=weight, k_norm_weight=weight
        )
        assert k is not None
        return q.sum(-2) + k.sum(-2)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), run(x), rtol=0, atol=0)


@pytest.mark.parametrize("number", range(8))
def test_e4m3_caches(way: Way, number: int) -> None:
    """As linear, then append_kv, to the bit; decode_attention reads what is there."""
    lot = random.Random(f"e4m3 {number}")
    heads: Heads = (4, 2, lot.choice((64, 96)))
    dtype = lot.choice((torch.float16, torch.bfloat16))
    x, w = inputs(way, (3, 5), 72, heads, dtype)
    options: dict[str, Any] = {}
    if lot.random() < 0.5:
        options |= {f"{name}_norm_weight": way.randn(heads[2]) for name in "qk"}
    cos, sin = tables(way, 64, torch.float32) if lot.random() < 0.7 else (None, None)
    if lot.random() < 0.7:
        options |= {f"{name}_scale": way.randn(2, seed=seed).abs() + 0.01
                    for seed, name in enumerate("kv")}  # fmt: skip
    where = {
        "cache_seqlens": torch.tensor([3, -2, 11], dtype=torch.int32, device=way.device),
        "block_table": torch.tensor([[4, 0], [1, 2], [3, 5]], dtype=torch.int32).to(way.device),
    }
    caches = [
        torch.full((2, 6, 8, 2, heads[2]), 7.0).to(torch.float8_e4m3fn).to(way.device) for _ in "ab"
    ]
    q = qkv_linear(
        x, w, None, cos, sin, num_heads=4, num_kv_heads=2, k_cache=caches[0][0],
        v_cache=caches[0][1], **where, **options,
    )[0]  # fmt: skip
    joint = linear(x, w).unflatten(-1, (8, heads[2]))
    parts = joint.split((4, 2, 2), -2)
    turns = cos is not None or "q_norm_weight" in options
    expected = append_kv(
        parts[1], parts[2], caches[1][0], caches[1][1], q=parts[0] if turns else None, cos=cos,
        sin=sin, **where, **options,
    )  # fmt: skip
    expected = parts[0] if expected is None else expected
    for i in (0, 2):
        torch.testing.assert_close(q[i], expected[i], rtol=0.05, atol=0.05)
    if way.is_gpu or way.name == "emulated":
        same_bits(q[0], expected[0].contiguous())
        same_bits(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


def test_scales_of_e4m3_caches_are_refused_elsewhere() -> None:
    x, w, scale = torch.ones(2, 3, 16).half(), torch.ones(4 * 32, 16).half(), torch.ones(1)
    sizes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}
    with pytest.raises(TensorError, match="qkv_linear: k_scale: expected None where k_cache is"):
        qkv_linear(x, w, **sizes, k_scale=scale)
    caches = [torch.zeros(2, 8, 1, 32).half() for _ in "kv"]
    with pytest.raises(TensorError, match="v_scale: expected None for a cache of float16"):
        qkv_linear(x, w, **sizes, k_cache=caches[0], v_cache=caches[1], v_scale=scale)
    bytes_ = [x.to(torch.float8_e4m3fn) for x in caches]
    with pytest.raises(TensorError, match=r"k_scale: expected shape \(1,\)"):
        qkv_linear(x, w, **sizes, k_cache=bytes_[0], v_cache=bytes_[1], k_scale=torch.ones(2))


def test_contiguous_caches_of_no_rows(way: Way) -> None:
    x, w = inputs(way, (2, 3), 64, (2, 1, 64), torch.bfloat16)
    room = torch.zeros(2, 2, 5, 1, 64, dtype=torch.bfloat16, device=way.device)
    qkv_linear(
        x, w, num_heads=2, num_kv_heads=1, k_cache=room[0, :, :0], v_cache=room[1, :, :0],
        cache_seqlens=torch.zeros(2, dtype=torch.int32, device=way.device),
    )  # fmt: skip
    assert not bool(room.any())
