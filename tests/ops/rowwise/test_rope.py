"""rope against fp64: layouts, partial rotation, positions, strides."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import rope
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.rowwise.rope")
MAX_POSITION = 50
# (num_heads, num_kv_heads, head_dim, rotary_dim): GQA 4, 5, 1, 8; partial; odd sizes
SHAPES = [
    (8, 2, 128, 128), (5, 1, 64, 32), (3, 3, 40, 20), (64, 8, 128, 128), (2, 2, 256, 64),
    (8, 1, 80, 16), (1, 1, 2, 2), (4, 4, 127, 126), (6, 2, 96, 0), (1, 1, 512, 512),
]  # fmt: skip


def table(way: Way, rotary_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(MAX_POSITION)[:, None] * 100.0 ** -torch.linspace(0, 1, rotary_dim // 2)
    return angles.cos().to(dtype).to(way.device), angles.sin().to(dtype).to(way.device)


def check_rope(
    out: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    name: str = "out",
) -> None:
    options = {"positions": positions, "interleaved": interleaved}
    truth = reference.rope(x, cos, sin, **options)
    check(out, truth, reference.rope(x, cos, sin, **options, dtype=x.dtype), name=name)
    rest = slice(2 * cos.shape[-1], None)
    same_bits(out[..., rest], x[..., rest].to(out.dtype), name=f"{name}, what is not rotated")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("table32", [False, True], ids=["own table", "fp32 table"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(
    way: Way, dtype: torch.dtype, table32: bool, interleaved: bool, shape: tuple[int, int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    cos, sin = table(way, rotary_dim, torch.float32 if table32 else dtype)
    for seqlen in [1, 5, 49] if way.is_gpu else [3]:
        q = way.randn(2, seqlen, num_heads, head_dim, dtype=dtype)
        k = way.randn(2, seqlen, num_kv_heads, head_dim, dtype=dtype, seed=1)
        for positions in (
            None,
            torch.arange(seqlen, device=way.device).flip(0),
            torch.arange(2 * seqlen, dtype=torch.int32, device=way.device).view(2, -1) % 7,
        ):
            outs = [Guarded(x.shape, dtype, way.device) for x in (q, k)]
            out_q, out_k = rope(
                q, k, cos, sin, positions, interleaved=interleaved,
                out_q=outs[0].tensor, out_k=outs[1].tensor,
            )  # fmt: skip
            for out, x, guarded, name in ((out_q, q, outs[0], "q"), (out_k, k, outs[1], "k")):
                guarded.check(name)
                check_rope(out, x, cos, sin, positions, interleaved=interleaved, name=name)
            fresh_q, fresh_k = rope(q, k, cos, sin, positions, interleaved=interleaved)
            same_bits(fresh_q, out_q)
            same_bits(fresh_k, out_k)
            in_q, in_k = q.clone(), k.clone()
            rope(in_q, in_k, cos, sin, positions, interleaved=interleaved, out_q=in_q, out_k=in_k)
            same_bits(in_q, out_q)
            same_bits(in_k, out_k)


@pytest.mark.parametrize("tokens", [1024, 8192])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("table32", [False, True], ids=["own table", "fp32 table"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_chosen_for_many_tokens(
    way: Way,
    dtype: torch.dtype,
    table32: bool,
    interleaved: bool,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Several heads a thread and tokens a block, on tokens that are no whole number of blocks.
    for name in ("_choose", "_choose_flat"):
        choose = getattr(module, name)
        monkeypatch.setattr(module, name, lambda width, heads, _, f=choose: f(width, heads, tokens))
    for num_heads, num_kv_heads, head_dim, rotary_dim in ((5, 2, 64, 64), (9, 3, 96, 32)):
        cos, sin = table(way, rotary_dim, torch.float32 if table32 else dtype)
        q = way.randn(7, num_heads, head_dim, dtype=dtype)
        k = way.randn(7, num_kv_heads, head_dim, dtype=dtype, seed=1)
        outs = [Guarded(x.shape, dtype, way.device) for x in (q, k)]
        rope(
            q, k, cos, sin, interleaved=interleaved, out_q=outs[0].tensor, out_k=outs[1].tensor
        )  # fmt: skip
        for x, out, name in ((q, outs[0], "q"), (k, outs[1], "k")):
            out.check(name)
            check_rope(out.tensor, x, cos, sin, interleaved=interleaved, name=name)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_packed_projection(way: Way, dtype: torch.dtype, interleaved: bool) -> None:
    # q and k as slices of one (tokens, q + k + v) tensor, rotated where they lie.
    packed = Guarded((7, (4 + 2 + 2) * 64), dtype, way.device)
    packed.fill(way.randn(7, 8 * 64, dtype=dtype))
    q = packed.tensor[:, : 4 * 64].unflatten(-1, (4, 64))
    k = packed.tensor[:, 4 * 64 : 6 * 64].unflatten(-1, (2, 64))
    before = packed.tensor.clone()
    cos, sin = table(way, 64, torch.float32)
    out_q, out_k = rope(q, k, cos, sin, interleaved=interleaved)
    check_rope(out_q, q, cos, sin, interleaved=interleaved)
    check_rope(out_k, k, cos, sin, interleaved=interleaved)
    rope(q, k, cos, sin, interleaved=interleaved, out_q=q, out_k=k)
    packed.check()
    same_bits(q.contiguous(), out_q.contiguous())
    same_bits(k.contiguous(), out_k.contiguous())
    same_bits(packed.tensor[:, 6 * 64 :], before[:, 6 * 64 :])


def test_heads_before_tokens(way: Way) -> None:
    # (batch, heads, seqlen, head_dim) in memory, as transformers keeps it.
    q = way.randn(2, 4, 5, 64).transpose(1, 2)
    k = way.randn(2, 2, 5, 64, seed=1).transpose(1, 2)
    cos, sin = table(way, 64, torch.float32)
    out_q, out_k = rope(q, k, cos, sin)
    check_rope(out_q, q, cos, sin)
    check_rope(out_k, k, cos, sin)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned(way: Way, dtype: torch.dtype, interleaved: bool, shift: int) -> None:
    tensors = [Guarded((5, heads, 64), dtype, way.device, shift=shift) for heads in (4, 2, 4, 2)]
    q, k, out_q, out_k = (guarded.tensor for guarded in tensors)
    q.copy_(way.randn(5, 4, 64, dtype=dtype))
    k.copy_(way.randn(5, 2, 64, dtype=dtype, seed=1))
    cos, sin = table(way, 64, dtype)
    rope(q, k, cos, sin, interleaved=interleaved, out_q=out_q, out_k=out_k)
    for guarded in tensors:
        guarded.check()
    check_rope(out_q, q, cos, sin, interleaved=interleaved)
    check_rope(out_k, k, cos, sin, interleaved=interleaved)


@pytest.mark.parametrize("rotary_dim", [32, 20])
def test_halves_of_one_cache(way: Way, rotary_dim: int) -> None:
    cos, sin = table(way, rotary_dim, torch.float32)
    cache = torch.cat((cos, sin), -1)
    q, k = way.randn(5, 4, 64), way.randn(5, 2, 64, seed=1)
    half = rotary_dim // 2
    out_q, _ = rope(q, k, cache[:, :half], cache[:, half:])
    same_bits(out_q, rope(q, k, cos, sin)[0])


@pytest.mark.parametrize("rotary_dim", [64, 32, 20])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_a_token(way: Way, dtype: torch.dtype, interleaved: bool, rotary_dim: int) -> None:
    # As transformers has it: (batch or 1, seqlen, rotary_dim), both halves alike.
    batch, seqlen = 3, 5
    for table_dtype, rows in itertools.product({dtype, torch.float32}, (1, batch)):
        angles = way.randn(rows, seqlen, rotary_dim // 2, seed=2) * 9
        halves = [part.to(table_dtype) for part in (angles.cos(), angles.sin())]
        # The second half is not read.
        cos, sin = (torch.cat((half, torch.full_like(half, torch.nan)), -1) for half in halves)
        flat = [half.expand(batch, -1, -1).reshape(-1, rotary_dim // 2) for half in halves]
        at = torch.arange(batch * seqlen, device=way.device).view(batch, seqlen)
        for turned in (False, True):
            q = way.randn(batch, seqlen, 4, 64, dtype=dtype)
            k = way.randn(batch, seqlen, 2, 64, dtype=dtype, seed=1)
            if turned:  # heads before tokens in memory
                q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
            out_q, out_k = rope(q, k, cos, sin, interleaved=interleaved)
            check_rope(out_q, q, *flat, at, interleaved=interleaved)
            check_rope(out_k, k, *flat, at, interleaved=interleaved)
            if rows == 1:
                wide = [table.expand(batch, -1, -1) for table in (cos, sin)]
                same_bits(rope(q, k, *wide, interleaved=interleaved)[0], out_q)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_half_of_a_row_a_token(
    way: Way, dtype: torch.dtype, interleaved: bool, rows: int
) -> None:
    """As gpt-oss' tables have it: the same bits as of both halves."""
    q, k = (way.randn(2, 5, heads, 64, dtype=dtype, seed=heads) for heads in (4, 2))
    half = [way.randn(rows, 5, 32, dtype=dtype, seed=seed) for seed in (7, 8)]
    whole = [torch.cat((x, x), -1) for x in half]
    found = rope(q, k, *half, interleaved=interleaved, rotary_dim=64)
    for each, expected in zip(found, rope(q, k, *whole, interleaved=interleaved), strict=True):
        same_bits(each, expected)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_position_outside_the_table_is_nan(way: Way, interleaved: bool) -> None:
    cos, sin = table(way, 32, torch.float32)
    q, k = way.randn(4, 2, 64), way.randn(4, 2, 64, seed=1)
    positions = torch.tensor([0, MAX_POSITION, -1, MAX_POSITION - 1], device=way.device)
    out_q, out_k = rope(q, k, cos, sin, positions, interleaved=interleaved)
    for out, x in ((out_q, q), (out_k, k)):
        assert bool(out[1:3, :, :32].isnan().all())
        same_bits(out[..., 32:], x[..., 32:])
        good = positions[[0, 3]]
        check_rope(out[[0, 3]], x[[0, 3]], cos, sin, good, interleaved=interleaved)


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64), (3, 4, 0)])
def test_nothing_to_do(way: Way, shape: tuple[int, ...]) -> None:
    cos, sin = table(way, min(64, shape[-1]), torch.float32)
    q = way.randn(*shape)
    out_q, out_k = rope(q, q.clone(), cos, sin)
    assert out_q.shape == out_k.shape == q.shape


@pytest.mark.parametrize("batch, seqlen", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_a_token(way: Way, batch: int, seqlen: int) -> None:
    q = way.randn(batch, seqlen, 4, 64)
    cos, sin = (way.randn(batch, seqlen, 64) for _ in range(2))
    for out in rope(q, q, cos, sin):
        assert out.shape == q.shape


def test_tables_of_no_rows(way: Way) -> None:
    q, positions = way.randn(2, 3, 4, 64), torch.zeros(3, dtype=torch.int32, device=way.device)
    cos, sin = (way.randn(0, 32) for _ in range(2))
    with pytest.raises(TensorError, match="cos: expected at least one row"):
        rope(q, q, cos, sin, positions)
    for out in rope(q[:, :0], q[:, :0], cos, sin):
        assert out.shape == (2, 0, 4, 64)


def test_large_values_and_inf(way: Way) -> None:
    cos, sin = table(way, 64, torch.float32)
    q, k = way.randn(3, 2, 64) * 1e30, way.randn(3, 2, 64, seed=1)
    q[0, 0, 3] = float("nan")
    out_q, out_k = rope(q, k, cos, sin)
    check_rope(out_q, q, cos, sin)
    check_rope(out_k, k, cos, sin)


def test_the_same_bits_every_time(way: Way) -> None:
    cos, sin = table(way, 128, torch.float32)
    q, k = (way.randn(33, heads, 128, dtype=torch.bfloat16) for heads in (8, 2))
    first_q, first_k = rope(q, k, cos, sin)
    for _ in range(20 if way.is_gpu else 1):
        again_q, again_k = rope(q, k, cos, sin)
        same_bits(again_q, first_q)
        same_bits(again_k, first_k)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    way = Way("gpu", "cuda")
    tokens = (1 << 31) // (32 * 128) + 5
    q = torch.empty(tokens, 32, 128, device="cuda", dtype=torch.bfloat16).normal_()
    k = torch.empty(tokens, 1, 128, device="cuda", dtype=torch.bfloat16).normal_()
    positions = torch.arange(tokens, device="cuda") % MAX_POSITION
    cos, sin = table(way, 128, torch.float32)
    part = slice(tokens - 6, tokens)
    before = q[part].clone()
    rope(q, k, cos, sin, positions, out_q=q, out_k=k)
    check_rope(q[part], before, cos, sin, positions[part])
