"""qkv_linear against fp64: sizes, rotations, caches, every variant, refusals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from product_problems import rotated
from refused import check_misaligned, check_refused
from ways import Way

from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import paired_plan
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.projection.qkv_linear")
qkv_linear: Callable[..., Any] = module.qkv_linear
DTYPES = [torch.float16, torch.bfloat16]
Heads = tuple[int, int, int]  # num_heads, num_kv_heads, head_dim


def reference(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, positions: torch.Tensor, heads: Heads, interleaved: bool,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v as (tokens, heads, head_dim), each step rounded to `dtype`."""
    values = x.to(dtype).flatten(0, -2) @ w.to(dtype).T
    if bias is not None:
        values = values + bias.to(dtype)
    num_heads, num_kv_heads, head_dim = heads
    found = values.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = found.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if cos is not None and sin is not None:
        c, s = (table.to(dtype)[positions.long().flatten()][:, None] for table in (cos, sin))
        q, k = (rotated(part, c, s, interleaved, 2 * cos.shape[-1]) for part in (q, k))
    return q, k, v


def tables(
    way: Way, rotary_dim: int, dtype: torch.dtype, rows: int = 97
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 3 * way.randn(rows, rotary_dim // 2, seed=7)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def inputs(
    way: Way, leading: tuple[int, ...], hidden: int, heads: Heads, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (heads[0] + 2 * heads[1]) * heads[2]
    w = way.randn(rows, hidden, dtype=dtype, seed=1) * hidden**-0.5
    return way.randn(*leading, hidden, dtype=dtype), w


def check_qkv(
    way: Way,
    m: int,
    heads: Heads,
    hidden: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    has_bias: bool = False,
    table_dtype: torch.dtype = torch.float32,
) -> None:
    """Without a cache."""
    num_heads, num_kv_heads, head_dim = heads
    x, w = inputs(way, (m,), hidden, heads, dtype)
    bias = way.randn(len(w), dtype=dtype, seed=2) if has_bias else None
    positions = torch.arange(m, device=way.device) * 5 % 97
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    cos, sin = tables(way, rotary_dim, table_dtype) if rotary_dim else (None, None)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "interleaved": interleaved}
    shapes = [(m, count, head_dim) for count in (num_heads, num_kv_heads, num_kv_heads)]
    outs = [Guarded(shape, dtype, way.device) for shape in shapes]
    given = (x, w, bias, cos, sin, positions if rotary_dim else None)
    places = {f"out_{name}": out.tensor for name, out in zip("qkv", outs, strict=True)}
    got = qkv_linear(*given, **sizes, **places)
    about = (x, w, bias, cos, sin, positions, heads, interleaved)
    again = qkv_linear(*given, **sizes)
    for i, (truth, own) in enumerate(zip(reference(*about), reference(*about, dtype), strict=True)):
        assert got[i] is outs[i].tensor
        outs[i].check()
        check(got[i], truth, own, name=f"{'qkv'[i]} {m} {heads} {hidden}")
        same_bits(again[i], got[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(2, 1, 64), (3, 2, 128), (1, 1, 96), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("m", [1, 7, 16, 31, 65, 130])
def test_sizes(way: Way, dtype: torch.dtype, heads: Heads, m: int) -> None:
    check_qkv(way, m, heads, 72, dtype=dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 16, 32, 48, 80, 96])
@pytest.mark.parametrize("m", [3, 70])
def test_rotations(way: Way, m: int, rotary_dim: int, interleaved: bool) -> None:
    # 48 divides 96, and 64 does not.
    for heads, dim in (((2, 1, 96), rotary_dim), ((1, 2, 96), min(rotary_dim, 64))):
        for has_bias in (False, True):
            check_qkv(
                way, m, heads, 64, rotary_dim=dim, interleaved=interleaved, has_bias=has_bias,
                table_dtype=torch.bfloat16 if has_bias else torch.float32,
            )  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("variant", paired_plan.HOPPER["qkv_linear"], ids=lambda v: v.name)
def test_hopper_variants(
    hopper_way: Way, variant: Any, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = variant.block_n if variant.swaps else 700 if hopper_way.is_gpu else 150
    cases: list[tuple[int, Heads, int, int]] = [
        (1, (1, 1, 64), 64, 64), (most, (8, 2, 128), 520, 128), (most - 3, (5, 1, 192), 1096, 192),
        (most, (5, 3, 128), 200, 64), (most, (3, 1, 64), 136, 0), (most, (32, 8, 128), 4096, 128),
    ]  # fmt: skip
    if not hopper_way.is_gpu:
        cases = [cases[0], cases[3], (most - 3, (2, 1, 128), 264, 128), cases[4]]
    cases += [(most - 1, (3, 2, 96), 136, 48), (most, (4, 1, 32), 72, 32)][: 2 * interleaved]
    chosen = hopper_way.some(enumerate(cases), 3, variant.name, interleaved)
    for i, (m, heads, hidden, rotary_dim) in chosen:
        n = (heads[0] + 2 * heads[1]) * heads[2]
        hidden = max(hidden, 64 * variant.splits)
        choice = paired_plan.hopper_choice("qkv_linear", variant, hopper_way.num_sms, m, n)
        monkeypatch.setattr(module, "choose", lambda *_, c=choice: c)
        forget_all()
        for dtype in DTYPES if hopper_way.is_gpu else [DTYPES[i % 2]]:
            check_qkv(
                hopper_way, m, heads, hidden, dtype=dtype, rotary_dim=rotary_dim,
                interleaved=interleaved, has_bias=dtype == torch.float16,
                table_dtype=torch.float32 if m % 2 else dtype,
            )  # fmt: skip


@pytest.mark.parametrize("m", [5, 12, 40])
def test_portable_bodies(way: Way, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = (3, 1, 64)
    for choice in paired_plan.portable_choices("qkv_linear", (9, 0), 4, m, 320):
        monkeypatch.setattr(module, "choose", lambda *_, c=choice: c)
        forget_all()
        for dtype in DTYPES:
            check_qkv(way, m, heads, 200, dtype=dtype, has_bias=True)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back(way: Way) -> None:
    check_back_to_back("""
table = randn(2048, 64, dtype=torch.float32)
cases = [
    partial(
    ops.qkv_linear, randn(m, 512), randn(1536, 512), None, table, table,
    torch.arange(m, device="cuda"), num_heads=8, num_kv_heads=2,
    )
    for m in (1, 7, 30, 64, 300, 1500)
]
""")


CACHES = ["slots", "table", "contiguous", "varlen"]


@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("seqlen", [1, 13])
def test_caches(way: Way, layout: str, seqlen: int) -> None:
    check_cache(way, layout, seqlen)


@pytest.mark.parametrize("layout", CACHES)
def test_the_cpu_reference(layout: str) -> None:
    check_cache(Way("reference", "cpu"), layout, 13)


def check_cache(way: Way, layout: str, seqlen: int) -> None:
    dtype, heads, hidden = torch.float16, (4, 2, 64), 72
    batch, page_size, num_pages = 3, 8, 16
    cos, sin = tables(way, 64, torch.float32)
    held = torch.tensor([5, 0, 17], dtype=torch.int32)
    index = held[:, None] + torch.arange(seqlen)
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3))
    table = table[: batch * 5].view(batch, 5)
    page, row = table.gather(1, index // page_size), index % page_size
    leading: tuple[int, ...] = (batch, seqlen)
    shape = (num_pages, page_size, 2, 64)
    options: dict[str, Any] = {}
    if layout == "slots":
        slots = page * page_size + row
        slots[1, 0] = -1
        options = {"slot_mapping": slots.to(way.device), "positions": index.to(way.device)}
    elif layout == "contiguous":
        shape, page, row = (batch, 40, 2, 64), torch.arange(batch)[:, None].expand_as(index), index
        options = {"cache_seqlens": held.to(way.device)}
    else:
        table = table.to(torch.int32)
        options = {"cache_seqlens": held.to(way.device), "block_table": table.to(way.device)}
        if layout == "varlen":
            leading = (batch * seqlen,)
            starts = torch.arange(batch + 1, dtype=torch.int32) * seqlen
            options["cu_seqlens"] = starts.to(way.device)
    x, w = inputs(way, leading, hidden, heads, dtype)
    caches = [Guarded(shape, dtype, way.device) for _ in range(2)]
    before = [cache.tensor.clone() for cache in caches]
    positions = options.pop("positions", None)
    out_q, *nothing = qkv_linear(
        x, w, None, cos, sin, positions, num_heads=4, num_kv_heads=2,
        k_cache=caches[0].tensor, v_cache=caches[1].tensor, **options,
    )  # fmt: skip
    assert nothing == [None, None]
    about = (x, w, None, cos, sin, index.to(way.device), heads, False)
    truths, owns = reference(*about), reference(*about, dtype)
    check(out_q.view(-1, 4, 64), truths[0], owns[0], name="q")
    stored = torch.ones(batch * seqlen, dtype=torch.bool)
    stored[seqlen] = layout != "slots"
    at = page.flatten()[stored], row.flatten()[stored]
    for name, cache, old, truth, own in zip(
        "kv", caches, before, truths[1:], owns[1:], strict=True
    ):
        kept = stored.to(way.device)
        check(cache.tensor[at], truth[kept], own[kept], name=name)
        cache.tensor[at] = old[at]  # and nothing else was written
        same_bits(cache.tensor, old)


def test_tokens_of_no_sequence(way: Way) -> None:
    # cu_seqlens covers tokens 2 to 7 of 9: the others are not written.
    x, w = inputs(way, (9,), 64, (2, 1, 64), torch.bfloat16)
    cos, sin = tables(way, 64, torch.float32)
    starts = torch.tensor([2, 5, 8], dtype=torch.int32, device=way.device)
    outs = [torch.full((9, n, 64), 7.0, dtype=x.dtype, device=way.device) for n in (2, 1, 1)]
    q, k, v = qkv_linear(
        x, w, None, cos, sin, num_heads=2, num_kv_heads=1, cu_seqlens=starts,
        out_q=outs[0], out_k=outs[1], out_v=outs[2],
    )  # fmt: skip
    positions = torch.tensor([0, 1, 2, 0, 1, 2], device=way.device)
    about = (x[2:8], w, None, cos, sin, positions, (2, 1, 64), False)
    truths, owns = reference(*about), reference(*about, x.dtype)
    for found, truth, own in zip((q, k, v), truths, owns, strict=True):
        check(found[2:8], truth, own)
        assert bool((found[[0, 1, 8]] == 7.0).all())


def test_a_position_outside_the_table_gives_nan(way: Way) -> None:
    x, w = inputs(way, (3,), 64, (1, 1, 64), torch.float16)
    cos, sin = tables(way, 32, torch.float32)
    positions = torch.tensor([0, 97, -1], device=way.device)
    q, k, v = qkv_linear(x, w, None, cos, sin, positions, num_heads=1, num_kv_heads=1)
    for found in (q, k):
        assert bool(found[1:, :, :32].isnan().all())
        assert bool(torch.isfinite(found[1:, :, 32:]).all())
        assert bool(torch.isfinite(found[0]).all())
    assert bool(torch.isfinite(v).all())


def test_strided(way: Way) -> None:
    # Queries, keys and values of one packed tensor; halves of one table of cosines and sines.
    dtype, heads = torch.bfloat16, (4, 2, 64)
    wide, w = way.randn(70, 80, dtype=dtype), inputs(way, (1,), 80, heads, dtype)[1]
    both = torch.cat(tables(way, 64, torch.float32), dim=1)
    cos, sin = both[:, :32], both[:, 32:]
    x, positions = wide[:, 8:72], torch.arange(70, dtype=torch.int32, device=way.device)
    packed = Guarded((70, 8, 64), dtype, way.device)
    q, k, v = packed.tensor.split([4, 2, 2], dim=1)
    sizes = {"num_heads": 4, "num_kv_heads": 2}
    qkv_linear(x, w[:, :64], None, cos, sin, positions, **sizes, out_q=q, out_k=k, out_v=v)
    packed.check()
    expected = qkv_linear(
        x.contiguous(), w[:, :64].contiguous(), None, cos.contiguous(), sin.contiguous(),
        positions, **sizes,
    )  # fmt: skip
    for got, one in zip((q, k, v), expected, strict=True):
        same_bits(got.contiguous(), one)


def test_positions_of_a_batch(way: Way) -> None:
    x, w = inputs(way, (3, 5), 64, (2, 1, 64), torch.float16)
    cos, sin = tables(way, 64, torch.float32)
    sizes = {"num_heads": 2, "num_kv_heads": 1}
    counted = qkv_linear(x, w, None, cos, sin, **sizes)
    positions = torch.arange(5, device=way.device).expand(3, 5).contiguous()
    given = qkv_linear(x, w, None, cos, sin, positions, **sizes)
    for one, other in zip(counted, given, strict=True):
        assert one.shape[:2] == (3, 5)
        same_bits(one, other)


def test_compiled() -> None:
    x, w = inputs(Way("reference", "cpu"), (3,), 64, (2, 1, 32), torch.float16)
    cos = torch.ones(9, 16)
    positions, slots = torch.arange(3), torch.tensor([4, 1, -1])

    def project(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor) -> Any:
        q = qkv_linear(
            x, w, None, cos, cos, positions, num_heads=2, num_kv_heads=1, k_cache=cache[0],
            v_cache=cache[1], slot_mapping=slots,
        )[0]  # fmt: skip
        return q + 1, cache.sum()

    caches = [torch.zeros(2, 2, 4, 1, 32, dtype=torch.float16) for _ in range(2)]
    expected = project(x, w, caches[0])
    found = torch.compile(project, fullgraph=True, backend="aot_eager")(x, w, caches[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    same_bits(caches[1], caches[0])
    outs = [x.new_empty(3, heads, 32) for heads in (2, 1, 1)]
    arguments = (x, w, None, cos, cos, positions, *[None] * 6, *outs, 2, 1, False, 32)
    torch.library.opcheck(torch.ops.kernel_hub.qkv_linear.default, arguments)


def test_nothing_to_do(way: Way) -> None:
    x, w = inputs(way, (0,), 64, (2, 1, 64), torch.float16)
    q, k, _ = qkv_linear(x, w, num_heads=2, num_kv_heads=1)
    assert (q.shape, k.shape) == ((0, 2, 64), (0, 1, 64))


X, W = torch.ones(3, 16, dtype=torch.float16), torch.ones(128, 16, dtype=torch.float16)
COS, POSITIONS = torch.ones(9, 8), torch.zeros(3, dtype=torch.int64)
CACHE = torch.zeros(2, 4, 1, 32, dtype=torch.float16)


def call(*given: Any, **options: Any) -> object:
    return qkv_linear(*given, **{"num_heads": 2, "num_kv_heads": 1, **options})


REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: call(None, W), ["x", "a torch tensor", "NoneType"]),
    (lambda: call(X, None), ["w_qkv", "a torch tensor", "NoneType"]),
    (lambda: call(X.float(), W.float()), ["x", "float16 or bfloat16", "float32"]),
    (lambda: call(X[0], W), ["x", "(total, hidden_size)", "shape (16,)"]),
    (lambda: call(X[:, :12], W[:, :12]), ["x", "multiple of 8", "shape (3, 12)"]),
    (lambda: call(X, W.bfloat16()), ["w_qkv", "dtype float16", "bfloat16"]),
    (lambda: call(X, W[:, :8]), ["w_qkv", "shape (128, 16)", "shape (128, 8)"]),
    (lambda: call(X, W[:64]), ["w_qkv", "multiple of 32", "shape (64, 16)"]),
    (lambda: call(X, W, num_heads=3), ["w_qkv", "5 heads", "shape (128, 16)"]),
    (lambda: call(X, W, num_heads=0), ["num_heads", "at least 1", "0"]),
    (lambda: call(X, W, W[0]), ["bias", "shape (128,)", "shape (16,)"]),
    (lambda: call(X, W, None, COS, COS), ["positions", "3 tokens", "None"]),
    (lambda: call(X, W, None, COS, None, POSITIONS), ["sin", "a torch tensor", "NoneType"]),
    (lambda: call(X, W, None, None, COS), ["sin", "None where cos is None"]),
    (lambda: call(X, W, None, COS[:, :4], COS[:, :4], POSITIONS), ["rotary_dim", "16", "8"]),
    (
        lambda: call(X, W, None, COS, COS, POSITIONS, rotary_dim=64),
        ["rotary_dim", "multiple of 16", "head_dim = 32", "64"],
    ),
    (lambda: call(X, W, None, COS, COS, POSITIONS.float()), ["positions", "int64", "float32"]),
    (lambda: call(X, W, v_cache=CACHE), ["v_cache", "None where k_cache is None"]),
    (lambda: call(X, W, k_cache=CACHE), ["v_cache", "a torch tensor", "NoneType"]),
    (lambda: call(X, W, k_cache=CACHE, v_cache=CACHE), ["x", "cu_seqlens or slot_mapping"]),
    (
        lambda: call(X, W, k_cache=CACHE, v_cache=CACHE, slot_mapping=POSITIONS, out_k=CACHE),
        ["out_k", "go into the cache"],
    ),
    (
        lambda: call(X, W, k_cache=CACHE, v_cache=CACHE, slot_mapping=POSITIONS[:2]),
        ["slot_mapping", "shape (3,)", "shape (2,)"],
    ),
    (
        lambda: call(X[None], W, k_cache=CACHE, v_cache=CACHE),
        ["k_cache", "one row of pages for each of 1", "shape (2, 4, 1, 32)"],
    ),
    (
        lambda: call(X, W, cache_seqlens=torch.zeros(1, dtype=torch.int32)),
        ["cache_seqlens", "give cu_seqlens"],
    ),
    (lambda: call(X, W, out_q=X), ["out_q", "shape (3, 2, 32)", "shape (3, 16)"]),
    (lambda: call(X.clone().requires_grad_(), W), ["x", "no backward", "x.detach()"]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(way: Way, case: int) -> None:
    check_refused("qkv_linear", *REFUSED[case])


def test_misaligned_rows_are_refused(way: Way) -> None:
    w = way.randn(128, 16, dtype=torch.float16)
    x, weight = way.randn(3, 20, dtype=torch.float16), way.randn(32)
    check_misaligned(lambda x: call(x, w), x, "x", "qkv_linear")
    check_misaligned(lambda x: call(x, w, k_norm_weight=weight), x, "x", "qkv_linear")
