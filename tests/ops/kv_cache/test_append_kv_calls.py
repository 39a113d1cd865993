"""append_kv as it is called: refusals by name, KERNEL_HUB_DEBUG, CPU tensors, torch.compile."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from refused import check_refused
from test_append_kv import E4M3, MODES, Append
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import append_kv

plan: Any = importlib.import_module("kernel_hub.ops.kv_cache.append_plan")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
K, CACHE, Q = torch.ones(2, 5, 4, 8), torch.ones(2, 9, 4, 8), torch.ones(2, 5, 8, 8)
FLAT, COS = K.flatten(0, 1), torch.ones(6, 4)
PAST, TABLE = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
SLOTS, STARTS = torch.zeros(10, dtype=torch.int64), torch.tensor([0, 5, 10], dtype=torch.int32)
SCALE = torch.ones(4)
FP8 = {"k_cache": CACHE.to(E4M3), "v_cache": CACHE.to(E4M3)}
TURN = {"cos": COS, "sin": COS}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"k": None}, ["k", "a torch tensor", "NoneType"]),
    ({"k": K.double()}, ["k", "float16, bfloat16 or float32", "float64"]),
    ({"k": K[0, 0]}, ["k", "(batch, seqlen, num_kv_heads, head_dim)", "shape (4, 8)"]),
    ({"k": K.transpose(-1, -2)}, ["k", "contiguous last"]),
    ({"k": FLAT, "v": FLAT}, ["k", "cu_seqlens or slot_mapping", "shape (10, 4, 8)"]),
    ({"v": K[:1]}, ["v", "shape (2, 5, 4, 8)", "shape (1, 5, 4, 8)"]),
    ({"v": K.half()}, ["v", "dtype float32", "float16"]),
    ({"k_cache": CACHE[0]}, ["k_cache", "page_size or max_seqlen, 4, 8", "shape (9, 4, 8)"]),
    ({"k_cache": CACHE.half()}, ["k_cache", "float32 or float8_e4m3fn", "float16"]),
    ({"k_cache": CACHE[..., :7]}, ["k_cache", "shape (2, 9, 4, 8)", "shape (2, 9, 4, 7)"]),
    ({"k_cache": CACHE[:, :, :2]}, ["k_cache", "shape (2, 9, 4, 8)", "shape (2, 9, 2, 8)"]),
    ({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, ["k_cache", "each of 2 sequences", "(1, 9"]),
    ({"k_cache": CACHE[:1].expand(2, 9, 4, 8)}, ["k_cache", "do not overlap", "(0, 32, 8, 1)"]),
    ({"v_cache": CACHE[:, :8]}, ["v_cache", "shape (2, 9, 4, 8)", "shape (2, 8, 4, 8)"]),
    ({"v_cache": FP8["v_cache"]}, ["v_cache", "dtype float32", "float8_e4m3fn"]),
    ({"cache_seqlens": PAST.long()}, ["cache_seqlens", "dtype int32", "int64"]),
    ({"cache_seqlens": PAST[:1]}, ["cache_seqlens", "shape (2,)", "shape (1,)"]),
    ({"cache_seqlens": [0, 0]}, ["cache_seqlens", "a torch tensor", "list"]),
    ({"k": FLAT, "v": FLAT, "slot_mapping": SLOTS, "cache_seqlens": PAST},
     ["cache_seqlens", "None", "give cu_seqlens"]),
    ({"block_table": TABLE[:1]}, ["block_table", "shape (2, 3)", "shape (1, 3)"]),
    ({"block_table": TABLE.long()}, ["block_table", "dtype int32", "int64"]),
    ({"block_table": TABLE[0]}, ["block_table", "(batch_size, max_pages)", "shape (3,)"]),
    ({"block_table": TABLE, "slot_mapping": SLOTS}, ["block_table", "None where slot_mapping"]),
    ({"slot_mapping": SLOTS[:9]}, ["slot_mapping", "shape (10,)", "shape (9,)"]),
    ({"slot_mapping": SLOTS.short()}, ["slot_mapping", "int32 or int64", "int16"]),
    ({"slot_mapping": torch.zeros(5, 2).long().t()}, ["slot_mapping", "contiguous"]),
    ({"cu_seqlens": STARTS}, ["k", "(total, num_kv_heads, head_dim) where cu_seqlens", "(2, 5"]),
    ({"k": FLAT, "v": FLAT, "cu_seqlens": STARTS.long()}, ["cu_seqlens", "int32", "int64"]),
    ({"k": FLAT, "v": FLAT, "cu_seqlens": STARTS[:0]}, ["cu_seqlens", "(batch_size + 1,)", "(0,)"]),
    ({"q": Q}, ["q", "None where cos is None", "(2, 5, 8, 8)"]),
    ({"q": Q[:1], **TURN}, ["q", "shape (2, 5, 8, 8)", "shape (1, 5, 8, 8)"]),
    ({"q": Q.half(), **TURN}, ["q", "dtype float32", "float16"]),
    ({"cos": COS}, ["sin", "a torch tensor", "NoneType"]),
    ({"sin": COS}, ["sin", "None where cos is None"]),
    ({"cos": COS[0], "sin": COS[0]}, ["cos", "(max_position, rotary_dim // 2)", "shape (4,)"]),
    ({"cos": COS[:0], "sin": COS[:0]}, ["cos", "at least one row", "shape (0, 4)"]),
    ({"cos": COS, "sin": COS[:5]}, ["sin", "shape (6, 4)", "shape (5, 4)"]),
    ({"cos": COS, "sin": COS.half()}, ["sin", "dtype", "float16"]),
    ({"cos": COS, "sin": torch.ones(6, 8)[:, :4]}, ["sin", "strides of cos", "(8, 1)"]),
    ({**TURN, "rotary_dim": 6}, ["cos", "shape (6, 3)", "shape (6, 4)"]),
    ({**TURN, "rotary_dim": 7}, ["rotary_dim", "even number up to head_dim = 8", "7"]),
    ({"rotary_dim": 4}, ["rotary_dim", "0 or None where cos is None", "4"]),
    ({"positions": SLOTS}, ["positions", "None where cos is None"]),
    ({**TURN, "positions": SLOTS[:4]}, ["positions", "shape (10,)", "shape (4,)"]),
    ({**TURN, "positions": SLOTS.float()}, ["positions", "int32 or int64", "float32"]),
    ({**TURN, "k": FLAT, "v": FLAT, "slot_mapping": SLOTS}, ["positions", "10 tokens", "None"]),
    ({"k_scale": SCALE}, ["k_scale", "None for a cache of float32", "(4,)"]),
    ({**FP8, "k_scale": SCALE[:3]}, ["k_scale", "shape (4,)", "shape (3,)"]),
    ({**FP8, "v_scale": SCALE.half()}, ["v_scale", "dtype float32", "float16"]),
    ({**FP8, "v_scale": 1.0}, ["v_scale", "a torch tensor", "float 1.0"]),
    ({"out_q": Q}, ["out_q", "None where q is None", "(2, 5, 8, 8)"]),
    ({**TURN, "q": Q, "out_q": K}, ["out_q", "shape (2, 5, 8, 8)", "shape (2, 5, 4, 8)"]),
    ({"out_k": K[:1].expand(2, 5, 4, 8)}, ["out_k", "do not overlap", "(0, 32, 8, 1)"]),
    ({"out_k": K.to("meta")}, ["out_k", "device cpu", "on meta"]),
]  # fmt: skip


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, whatever they are."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((size,), (1,), 0).cuda().as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("change, parts", REFUSED, ids=[" ".join(p) for _, p in REFUSED])
def test_refused(way: Way, change: dict[str, Any], parts: list[str]) -> None:
    given = {"k": K, "v": K, "k_cache": CACHE, "v_cache": CACHE, **change}
    if way.is_gpu:
        given = {
            name: on_gpu(value) if isinstance(value, torch.Tensor) and not value.is_meta else value
            for name, value in given.items()
        }
        parts = [part.replace("device cpu", "device cuda") for part in parts]
    check_refused("append_kv", lambda: append_kv(**given), parts)


def test_gradients_are_refused() -> None:
    with pytest.raises(TensorError, match="v: requires grad"):
        append_kv(K, K.clone().requires_grad_(), CACHE, CACHE)


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"cache_seqlens": torch.tensor([4, 5], dtype=torch.int32)},
     ["cache_seqlens", "room for token 9 of sequence 1", "9 tokens a sequence"]),
    ({"block_table": torch.tensor([[0, 1], [7, 0]], dtype=torch.int32)},
     ["block_table", "pages 0 to 1", "7 at [1, 0]"]),
    ({"block_table": TABLE, "cache_seqlens": torch.tensor([0, 25], dtype=torch.int32)},
     ["cache_seqlens", "room for token 27 of sequence 1", "27 tokens"]),
    ({"slot_mapping": torch.tensor([*range(9), 18])},
     ["slot_mapping", "slots 0 to 17, or -1", "18 for token 9"]),
    ({"slot_mapping": torch.tensor([-1] * 9 + [-2])}, ["slot_mapping", "-2 for token 9"]),
    ({**TURN, "cache_seqlens": torch.tensor([0, 2], dtype=torch.int32)},
     ["cos", "positions 0 to 5", "6 for token 9"]),
    ({**TURN, "positions": torch.tensor([*range(5), -1, *range(4)])},
     ["positions", "positions 0 to 5", "-1 for token 5"]),
    ({"k": FLAT, "v": FLAT, "cu_seqlens": torch.tensor([0, 5, 11], dtype=torch.int32)},
     ["cu_seqlens", "at most 10", "[0, 5, 11]"]),
    ({"k": FLAT, "v": FLAT, "cu_seqlens": torch.tensor([0, 6, 5], dtype=torch.int32)},
     ["cu_seqlens", "none less than the one before", "[0, 6, 5]"]),
    ({"k": FLAT, "v": FLAT, "cu_seqlens": torch.tensor([1, 5, 10], dtype=torch.int32)},
     ["cu_seqlens", "0 first", "[1, 5, 10]"]),
]  # fmt: skip


@pytest.mark.parametrize("change, parts", BAD, ids=[" ".join(p) for _, p in BAD])
@pytest.mark.parametrize("device", DEVICES)
def test_debugging_refuses_what_is_skipped_otherwise(
    device: str, change: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"k": K, "v": K, "k_cache": CACHE.clone(), "v_cache": CACHE.clone(), **change}
    given = {name: value.to(device) for name, value in given.items()}
    if "cu_seqlens" not in change:
        append_kv(**given)
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    check_refused("append_kv", lambda: append_kv(**given), parts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["plain", "half", "interleaved"])
@pytest.mark.parametrize("cache", [None, E4M3], ids=["own", "e4m3"])
def test_cpu_tensors(
    mode: str, layout: str, cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for debug, dtype in (("", torch.float32), ("1", torch.bfloat16)):
        monkeypatch.setenv("KERNEL_HUB_DEBUG", debug)
        call = Append(
            Way("cpu", "cpu"), mode, dtype, layout=layout, cache=cache, shape=(4, 2, 64, 32)
        )
        call.run()
        call.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["contiguous", "paged", "slots"])
def test_compiled_equals_eager(mode: str, backend: str, device: str) -> None:
    torch._dynamo.reset()

    def run(k_cache: Any, v_cache: Any, call: Append, in_place: bool) -> Any:
        q, k = call.q + 0, call.k + 0
        outs = {"out_q": q, "out_k": k} if in_place else {}
        out_q = append_kv(k, call.v, k_cache, v_cache, **call.options, q=q, **outs)
        return out_q * 2, k + 1

    for in_place, cache in ((True, None), (False, E4M3)):
        found, expected = (
            Append(Way("as it is", device), mode, cache=cache, shape=(4, 2, 64, 32)) for _ in "ab"
        )
        results = []
        for call, function in (
            (found, torch.compile(run, fullgraph=True, backend=backend)),
            (expected, run),
        ):
            caches = [c.tensor.contiguous().clone() for c in call.caches]
            inside = slice(0, call.total) if call.k.dim() == 3 else slice(None)
            out = function(*caches, call, in_place)
            results.append([*(x[inside] for x in out), *(c.view(torch.uint8) for c in caches)])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_registered_op_passes_opcheck(device: str) -> None:
    k, cache, q = (x.to(device) for x in (K, CACHE, Q))
    cos, past = COS.to(device), PAST.to(device)
    op = torch.ops.kernel_hub.append_kv.default
    for q_out, k_out in ((q.clone(), k.clone()), (q.clone(), None)):
        torch.library.opcheck(
            op,
            (k, k.clone(), cache.clone(), cache.clone(), past, None, None, None, q, cos, cos, None,
             False, 8, None, None, q_out, k_out),
        )  # fmt: skip
    plain = (k, k.clone(), cache.clone(), cache.clone(), past, *[None] * 7, False, 0, *[None] * 4)
    torch.library.opcheck(op, plain)


def test_queries_of_no_heads(way: Way) -> None:
    k, cache = way.randn(2, 1, 2, 64), torch.zeros(2, 4, 2, 64, device=way.device)
    cos, sin = (way.randn(9, 32, seed=seed) for seed in (1, 2))
    q = append_kv(k, k, cache, cache.clone(), q=k[:, :, :0], cos=cos, sin=sin)
    assert q is not None and q.shape == (2, 1, 0, 64)
    assert bool(cache[:, 0].any())


def test_queries_of_no_heads_on_the_cpu() -> None:
    test_queries_of_no_heads(Way("cpu", "cpu"))


@pytest.mark.parametrize("is_normed", [False, True])
def test_contiguous_caches_of_no_rows(way: Way, is_normed: bool) -> None:
    k, room = way.randn(2, 3, 2, 64), torch.zeros(2, 2, 5, 2, 64, device=way.device)
    weight = torch.ones(64, device=way.device) if is_normed else None
    for past in (None, torch.zeros(2, dtype=torch.int32, device=way.device)):
        append_kv(k, k, room[0, :, :0], room[1, :, :0], cache_seqlens=past, k_norm_weight=weight)
    assert not bool(room.any())


@pytest.mark.parametrize("heads", [(0, 1 << 23), (1 << 24, 1), (1 << 24, 1 << 23)])
def test_the_grid_of_many_heads(heads: tuple[int, int]) -> None:
    q_parts, _, grid, _ = plan._vec_shape(8, *heads, 1)
    assert 0 <= q_parts < grid[1] <= 65_535 and (q_parts > 0) == (heads[0] > 0)


@pytest.mark.parametrize("most", [2, 4])
def test_fewer_parts_than_heads_ask_for(
    way: Way, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.common, "MAX_GRID_Y", most)
    call = Append(way, "paged", shape=(70, 35, 64, 32))
    call.run()
    call.check()
