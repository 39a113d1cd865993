"""append_kv of queries and keys that are normed first: every variant, against fp64."""

from __future__ import annotations

import importlib
import itertools
import random
from typing import Any

import pytest
import torch
from bits import same_bits
from refused import check_refused
from test_append_kv import BAD, E4M3, MODES, Append
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import append_kv, rms_norm, rope
from kernel_hub.ops.core.launch import Plans

# (num_heads, num_kv_heads, head_dim, rotary_dim): Qwen 3, Gemma 3, partial rotation, odd sizes
SHAPES = [
    (16, 8, 128, 128), (4, 1, 256, 256), (5, 1, 64, 32), (4, 4, 80, 16), (3, 3, 40, 20),
    (2, 1, 127, 126), (1, 1, 2, 2), (32, 8, 64, 64), (2, 2, 96, 32), (1, 1, 520, 64),
]  # fmt: skip


def norm(way: Way, head_dim: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    q_weight, k_weight = (way.randn(head_dim, dtype=dtype, seed=seed) for seed in (8, 9))
    return {"q_norm_weight": q_weight, "k_norm_weight": k_weight, **more}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "half", "interleaved"])
@pytest.mark.parametrize("cache", [None, E4M3], ids=["own", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(
    way: Way, dtype: torch.dtype, cache: torch.dtype | None, layout: str,
    shape: tuple[int, int, int, int],
) -> None:  # fmt: skip
    number = SHAPES.index(shape) + DTYPES.index(dtype) + len(layout)
    for i, mode in enumerate(MODES):
        if not way.is_gpu and (i + number) % 3:
            continue
        kind = torch.float32 if (number + i) % 2 else dtype
        options = {"weight_offset": 1.0, "eps": 1e-5} if number % 2 else {}
        call = Append(
            way, mode, dtype, shape=shape, layout=layout, cache=cache,
            table32=bool((number + i) % 3), page_size=(8, 1, 16, 7)[number % 4],
            norm=norm(way, shape[2], kind, **options),
        )  # fmt: skip
        call.run()
        call.check()


@pytest.mark.parametrize("number", range(20))
def test_by_lot(way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any heads, and the launch shapes of any number of tokens."""
    lot = random.Random(number)
    module = importlib.import_module("kernel_hub.ops.kv_cache.append_plan")
    monkeypatch.setattr(module, "_WARPS", lot.choice((0, module._WARPS)))
    dtype, head_dim = (
        lot.choice(DTYPES),
        lot.choice((8, 16, 24, 32, 64, 72, 80, 96, 128, 160, 192, 256, 384, 512)),
    )
    shape = (lot.randint(1, 9), lot.randint(1, 5), head_dim, 2 * lot.randint(0, head_dim // 2))
    if lot.random() < 0.5:
        shape = (*shape[:3], shape[3] // 16 * 16)
    options = norm(way, head_dim, lot.choice((dtype, torch.float32)), eps=lot.choice((0.0, 1e-3)))
    if lot.random() < 0.3:
        options.pop(lot.choice(("q_norm_weight", "k_norm_weight")))
    layout = lot.choice(("half", "interleaved")) if shape[3] else "plain"
    call = Append(
        way, lot.choice(MODES), dtype, shape=shape, layout=layout, table32=lot.random() < 0.5,
        cache=lot.choice((None, E4M3)), page_size=lot.choice((1, 7, 16)), shift=lot.choice((0, 3)),
        norm=options,
    )  # fmt: skip
    call.run()
    call.check()


@pytest.mark.parametrize("cache", [None, E4M3], ids=["own", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 384, 512])
def test_launch_shapes_have_the_same_bits(
    way: Way, head_dim: int, cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens: two heads a thread; many: round after round."""
    op, plan = (
        importlib.import_module(f"kernel_hub.ops.kv_cache.append_{name}") for name in ("kv", "plan")
    )
    found = []
    for warps in (plan._WARPS, 0):
        monkeypatch.setattr(op, "_plans", Plans())
        monkeypatch.setattr(plan, "_WARPS", warps)
        call = Append(
            way, "paged", shape=(24, 5, head_dim, head_dim), cache=cache,
            norm=norm(way, head_dim, torch.bfloat16),
        )  # fmt: skip
        call.run()
        call.check()
        assert call.out_q is not None and call.out_k is not None
        found.append([x.tensor for x in (*call.caches, call.out_q, call.out_k)])
    for few, many in zip(*found, strict=True):
        same_bits(few, many)


@pytest.mark.parametrize("layout", ["plain", "half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_caches_have_the_same_bits(way: Way, dtype: torch.dtype, layout: str) -> None:
    """As those that vectors are written to, in other kernels."""
    for cache, table32 in itertools.product((None, E4M3), (False, True)):
        vec, scalar = (
            Append(way, "paged", dtype, layout=layout, cache=cache, table32=table32, shift=shift)
            for shift in (0, 3)
        )
        for call in (vec, scalar):
            call.run()
            call.check()
        for mine, theirs in zip(
            (*vec.caches, vec.out_q, vec.out_k),
            (*scalar.caches, scalar.out_q, scalar.out_k),
            strict=True,
        ):
            if mine is not None and theirs is not None:
                mine_bytes, their_bytes = (x.tensor.view(torch.uint8) for x in (mine, theirs))
                assert torch.equal(mine_bytes, their_bytes)


def test_packed_and_in_place(way: Way) -> None:
    """Slices of a projection in; queries and keys written over themselves."""
    for head_dim, mode in itertools.product((64, 18), MODES):
        shape = (8, 2, head_dim, head_dim)
        call = Append(way, mode, shape=shape, norm=norm(way, head_dim, torch.bfloat16))
        assert call.q is not None and call.out_q is not None and call.out_k is not None
        packed = torch.cat((call.q, call.k, call.v), -2).contiguous()
        q, k, v = packed.split((8, 2, 2), -2)
        caches = [cache.tensor for cache in call.caches]
        assert append_kv(k, v, *caches, **call.options, **call.norm, q=q, out_q=q, out_k=k) is q
        for out, x in ((call.out_q, q), (call.out_k, k)):
            out.tensor[: call.total].copy_(x[: call.total])
        same_bits(v, call.v)
        call.check()


def test_the_same_as_norms_then_rope(way: Way) -> None:
    """Within a rounding of the two ops alone, in fp32."""
    call = Append(
        way, "no past", torch.float32, shape=(8, 2, 64, 64), norm=norm(way, 64, torch.float32)
    )
    call.run()
    assert call.q is not None and call.out_q is not None and call.out_k is not None
    q, k = (
        rms_norm(x.contiguous(), call.norm[f"{name}_norm_weight"])
        for name, x in (("q", call.q), ("k", call.k))
    )
    q, k = rope(q, k, call.options["cos"], call.options["sin"])
    torch.testing.assert_close(call.out_q.tensor, q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.out_k.tensor, k, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("head_dim", [64, 18])
def test_tables_that_point_outside_write_nothing_there(way: Way, name: str, head_dim: int) -> None:
    mode, argument, values = BAD[name]
    shape = (8, 2, head_dim, head_dim)
    call = Append(way, mode, shape=shape, norm=norm(way, head_dim, torch.bfloat16))
    call.options["positions"] = torch.zeros_like(call.k[..., 0, 0], dtype=torch.int64)
    wide = torch.int64 if name == "slots" else torch.int32
    call.options[argument] = torch.tensor(values, dtype=wide, device=way.device)
    call.run()
    call.check()


@pytest.mark.parametrize("mode", ["contiguous", "paged"])
@pytest.mark.parametrize("head_dim", [64, 18])
def test_a_length_below_zero_is_a_finished_row(way: Way, mode: str, head_dim: int) -> None:
    shape = (8, 2, head_dim, head_dim)
    call = Append(way, mode, shape=shape, norm=norm(way, head_dim, torch.bfloat16))
    lengths = torch.tensor([-1, 3, -2, -(2**31)], dtype=torch.int32)
    call.options["cache_seqlens"] = lengths.to(way.device)
    call.run()
    call.check()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [64, 18])
def test_a_position_outside_the_table_is_nan(way: Way, interleaved: bool, head_dim: int) -> None:
    shape = (2, 2, head_dim, head_dim // 2 // 2 * 2)
    call = Append(way, "no past", shape=shape, norm=norm(way, head_dim, torch.bfloat16))
    positions = torch.arange(16, device=way.device).view(4, 4)
    positions[1, 2], positions[3, 0] = -1, 70
    call.run(positions=positions, interleaved=interleaved)
    assert call.out_q is not None
    for rows in (call.out_q.tensor, call.caches[0].tensor[:, :4]):
        lost = rows[..., : shape[3]].isnan().all(-1).all(-1)
        assert lost.nonzero().tolist() == [[1, 2], [3, 0]]
        assert not bool(rows[..., shape[3] :].isnan().any())
    same_bits(call.caches[1].tensor[:, :4], call.v)


K, CACHE, Q, W = (
    torch.ones(2, 5, 4, 8),
    torch.ones(2, 9, 4, 8),
    torch.ones(2, 5, 8, 8),
    torch.ones(8),
)
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"k_norm_weight": W[:7]}, ["k_norm_weight", "shape (8,)", "shape (7,)"]),
    ({"k_norm_weight": W.half()}, ["k_norm_weight", "float32", "float16"]),
    ({"k_norm_weight": [1.0]}, ["k_norm_weight", "a torch tensor", "list"]),
    ({"q_norm_weight": W}, ["q_norm_weight", "None where q is None"]),
    ({"q": Q}, ["q", "None where cos is None"]),
    ({"q": Q, "k_norm_weight": W}, ["q", "None where cos is None"]),
    ({"k_norm_weight": W, "eps": -1.0}, ["eps", "at least 0", "-1"]),
    ({"eps": "small"}, ["eps", "a number"]),
    ({"k_norm_weight": W, "weight_offset": float("nan")}, ["weight_offset", "a finite number"]),
    ({"k_norm_weight": W.to("meta")}, ["k_norm_weight", "device cpu", "on meta"]),
]


@pytest.mark.parametrize("change, parts", REFUSED, ids=[" ".join(p) for _, p in REFUSED])
def test_refused(change: dict[str, Any], parts: list[str]) -> None:
    given = {"k": K, "v": K, "k_cache": CACHE, "v_cache": CACHE, **change}
    check_refused("append_kv", lambda: append_kv(**given), parts)


def test_the_weights_have_one_dtype() -> None:
    half = K.half(), CACHE.half()
    with pytest.raises(TensorError, match="k_norm_weight: expected the dtype of q_norm_weight"):
        append_kv(half[0], half[0], half[1], half[1].clone(), q=Q.half(), q_norm_weight=W,
                  k_norm_weight=W.half())  # fmt: skip


def test_a_norm_without_a_weight_has_no_other_numbers() -> None:
    caches = [torch.zeros_like(CACHE) for _ in range(4)]
    append_kv(K, K, *caches[:2])
    append_kv(K, K, *caches[2:], eps=0.5, weight_offset=1.0)
    same_bits(caches[0], caches[2])


@pytest.mark.parametrize("mode", ["contiguous", "paged", "slots"])
def test_cpu_tensors_and_compiled(mode: str) -> None:
    torch._dynamo.reset()

    def run(caches: list[torch.Tensor], call: Append) -> torch.Tensor:
        out = append_kv(call.k, call.v, *caches, **call.options, **call.norm, q=call.q)
        assert out is not None
        return out * 2

    way, results = Way("cpu", "cpu"), []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        weights = norm(way, 64, torch.float32, weight_offset=1.0)
        call = Append(way, mode, shape=(4, 2, 64, 32), norm=weights)
        caches = [cache.tensor.contiguous().clone() for cache in call.caches]
        results.append([function(caches, call)[: call.total], *caches])
        call.run()
        call.check()
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_registered_op_passes_opcheck() -> None:
    op, cos = torch.ops.kernel_hub.append_kv.default, torch.ones(6, 4)
    torch.library.opcheck(
        op,
        (K, K.clone(), CACHE.clone(), CACHE.clone(), *[None] * 4, Q, cos, cos, None, False, 8, None,
         None, Q.clone(), None, W, W, 1e-6, 1.0),
    )  # fmt: skip
