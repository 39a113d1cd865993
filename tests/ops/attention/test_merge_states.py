"""merge_states against fp64: layouts, empty sides, in place, large logarithms."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from bits import same_bits
from refused import check_refused
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import merge_states
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

INF = float("inf")
# (batch, seqlen, num_heads, head_dim), or (total, num_heads, head_dim)
SHAPES = [
    (2, 5, 4, 128), (1, 1, 32, 64), (3, 7, 5, 80), (9, 8, 256), (17, 3, 40), (4, 2, 127),
    (1, 1, 1, 1), (2, 3, 70, 16), (5, 1, 512),
]  # fmt: skip


def states(
    way: Way, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *outer, seqlen, heads, _ = shape
    lse_shape = (*outer, heads, seqlen)
    out_a, out_b = (way.randn(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    lse_a, lse_b = (4 * way.randn(*lse_shape, seed=seed) + 3 for seed in (2, 3))
    return out_a, lse_a, out_b, lse_b


def check_merge(found: tuple[torch.Tensor, torch.Tensor], given: tuple[Any, ...]) -> None:
    out, lse = found
    truth, own = (reference.merge_states(*given, dtype=d) for d in (torch.float64, out.dtype))
    check(out, truth[0], own[0])
    check(lse, truth[1], own[1], name="lse")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(way: Way, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = states(way, shape, dtype)
    outs = Guarded(shape, dtype, way.device), Guarded(given[1].shape, torch.float32, way.device)
    found = merge_states(*given, out=outs[0].tensor, out_lse=outs[1].tensor)
    for guarded in outs:
        guarded.check()
    check_merge(found, given)
    fresh = merge_states(*given)
    same_bits(fresh[0], found[0])
    same_bits(fresh[1], found[1])
    for side in (0, 2):
        mine = [x.clone() for x in given]
        again = merge_states(*mine, out=mine[side], out_lse=mine[side + 1])
        assert again[0] is mine[side] and again[1] is mine[side + 1]
        same_bits(mine[side], found[0])
        same_bits(mine[side + 1], found[1])


@pytest.mark.parametrize("chosen", [(1, 2, 3), (2, 3, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_launch_shape(
    way: Way, dtype: torch.dtype, chosen: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with many tokens, whose threads take two heads.
    module = importlib.import_module("kernel_hub.ops.attention.merge_states")
    monkeypatch.setattr(module, "_choose", lambda *sizes: chosen)
    for shape in ((2, 5, 7, 64), (1, 3, 1, 16)):
        given = states(way, shape, dtype)
        check_merge(merge_states(*given), given)
        mine = [x.clone() for x in given]
        check_merge(merge_states(*mine, out=mine[2], out_lse=mine[3]), given)
        turned = given[1].transpose(-1, -2).contiguous().transpose(-1, -2)
        check_merge(merge_states(given[0], turned, *given[2:]), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_and_free_strides(way: Way, dtype: torch.dtype) -> None:
    given = states(way, (2, 6, 4, 64), dtype)
    for shift in (0, 1):
        # Outputs as (batch, heads, seqlen, head_dim), logarithms as (batch, seqlen, heads).
        outs = [Guarded((2, 4, 6, 64), dtype, way.device, shift=shift) for _ in range(3)]
        logs = [Guarded((2, 6, 4), torch.float32, way.device, shift=shift) for _ in range(3)]
        turned = [g.tensor.transpose(1, 2) for g in outs], [g.tensor.transpose(1, 2) for g in logs]
        for i in range(2):
            turned[0][i].copy_(given[2 * i])
            turned[1][i].copy_(given[2 * i + 1])
        (a, b, out), (lse_a, lse_b, out_lse) = turned
        found = merge_states(a, lse_a, b, lse_b, out=out, out_lse=out_lse)
        for guarded in (*outs, *logs):
            guarded.check()
        check_merge(found, given)
        check_merge(merge_states(a, lse_a, b, lse_b), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 7])
def test_a_side_that_saw_no_key_counts_nothing(way: Way, dtype: torch.dtype, head_dim: int) -> None:
    out_a, lse_a, out_b, lse_b = states(way, (4, 3, head_dim), dtype)
    lse_a[0], lse_b[1] = -INF, -INF
    lse_a[2] = lse_b[2] = -INF
    # Whatever an empty side holds, and the other one to its last bit, minus zeros too.
    out_a[:, 0], out_b[:, 1], out_a[:, 2], out_b[:, 2] = math.nan, math.inf, math.nan, math.nan
    out_b[:, 0, 3], out_a[:, 1, 3] = -0.0, -0.0
    out, lse = merge_states(out_a[:, :], lse_a, out_b, lse_b)
    same_bits(out[:, 0], out_b[:, 0])
    same_bits(out[:, 1], out_a[:, 1])
    same_bits(out[:, 2], torch.zeros_like(out[:, 2]))
    same_bits(lse[0], lse_b[0])
    same_bits(lse[1], lse_a[1])
    same_bits(lse[2], torch.full_like(lse[2], -INF))


def test_nan_is_not_hidden(way: Way) -> None:
    for side in (1, 3):
        given = states(way, (4, 2, 64))
        given[side][0, 1] = math.nan
        out, lse = merge_states(*given)
        assert out.isnan().all(-1).nonzero().tolist() == [[1, 0]]
        assert lse.isnan().nonzero().tolist() == [[0, 1]]


def test_large_logarithms(way: Way) -> None:
    out_a, lse_a, out_b, lse_b = states(way, (6, 2, 64), torch.float32)
    for scale in (1e4, 1e30):
        given = (out_a, lse_a * scale, out_b, lse_b * scale)
        check_merge(merge_states(*given), given)
    same = (out_a, lse_a + 1e4, out_b, lse_a + 1e4)
    check_merge(merge_states(*same), same)


def test_it_is_attention_over_both_halves(way: Way) -> None:
    q, k, v = (way.randn(5, 2, 32, seed=seed).double() for seed in range(3))
    scores = torch.einsum("ihd,jhd->hij", q, k)
    parts = []
    for keys in (slice(0, 3), slice(3, 5), slice(0, 5)):
        weights = scores[..., keys].softmax(-1)
        parts += [torch.einsum("hij,jhd->ihd", weights, v[keys]), scores[..., keys].logsumexp(-1)]
    out, lse = merge_states(*(part.float() for part in parts[:4]))
    torch.testing.assert_close(out.double(), parts[4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), parts[5], rtol=1e-5, atol=1e-6)


def test_no_tokens_or_no_elements(way: Way) -> None:
    for shape in ((0, 4, 64), (2, 0, 4, 64), (3, 0, 64)):
        given = states(way, shape)
        out, lse = merge_states(*given)
        assert out.shape == shape and lse.shape == given[1].shape
    given = states(way, (3, 2, 0))
    check_merge((given[0], merge_states(*given)[1]), given)


def test_the_same_bits_every_time(way: Way) -> None:
    given = states(way, (33, 8, 128))
    first = merge_states(*given)
    for _ in range(20 if way.is_gpu else 1):
        again = merge_states(*given)
        same_bits(again[0], first[0])
        same_bits(again[1], first[1])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    way = Way("gpu", "cuda")
    tokens = (1 << 31) // (32 * 128) + 5
    out_a = torch.empty(tokens, 32, 128, device="cuda", dtype=torch.bfloat16).normal_()
    out_b = out_a[:1].clone().expand(tokens, 32, 128)
    lse_a, lse_b = (way.randn(32, tokens, seed=seed) for seed in range(2))
    part = slice(tokens - 6, tokens)
    given = (out_a[part].clone(), lse_a[:, part].clone(), out_b[part], lse_b[:, part])
    out, lse = merge_states(out_a, lse_a, out_b, lse_b, out=out_a, out_lse=lse_a)
    check_merge((out[part], lse[:, part]), given)


A, LSE = torch.ones(2, 5, 4, 8), torch.ones(2, 4, 5)
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"out_a": None}, ["out_a", "a torch tensor", "NoneType"]),
    ({"out_a": A.double()}, ["out_a", "float16, bfloat16 or float32", "float64"]),
    ({"out_a": A[0, 0]}, ["out_a", "(total, num_heads, head_dim)", "shape (4, 8)"]),
    ({"out_a": A.transpose(-1, -2)}, ["out_a", "contiguous last"]),
    ({"out_b": A[:1]}, ["out_b", "shape (2, 5, 4, 8)", "shape (1, 5, 4, 8)"]),
    ({"out_b": A.half()}, ["out_b", "dtype float32", "float16"]),
    ({"lse_a": 1.0}, ["lse_a", "a torch tensor", "1.0"]),
    ({"lse_a": LSE.double()}, ["lse_a", "dtype float32", "float64"]),
    ({"lse_a": LSE.transpose(1, 2)}, ["lse_a", "shape (2, 4, 5)", "shape (2, 5, 4)"]),
    ({"lse_b": LSE.to("meta")}, ["lse_b", "device cpu", "on meta"]),
    ({"out": A[:1]}, ["out", "shape (2, 5, 4, 8)", "shape (1, 5, 4, 8)"]),
    ({"out": A[:1].expand(2, 5, 4, 8)}, ["out", "do not overlap"]),
    ({"out_lse": LSE[:1].expand(2, 4, 5)}, ["out_lse", "do not overlap"]),
    ({"out_lse": LSE.half()}, ["out_lse", "dtype float32", "float16"]),
]


@pytest.mark.parametrize("change, parts", REFUSED, ids=[" ".join(p) for _, p in REFUSED])
def test_refused(change: dict[str, Any], parts: list[str]) -> None:
    given = {"out_a": A, "lse_a": LSE, "out_b": A, "lse_b": LSE, **change}
    check_refused("merge_states", lambda: merge_states(**given), parts)


def test_gradients_are_refused() -> None:
    with pytest.raises(TensorError, match="out_b: requires grad"):
        merge_states(A, LSE, A.clone().requires_grad_(), LSE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_equals_eager(backend: str, device: str) -> None:
    given = states(Way("as it is", device), (2, 5, 4, 64))

    def fresh(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        out, lse = merge_states(out_a, lse_a, out_b, lse_b)
        return out * 2, lse

    def in_place(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        out_a, lse_a = out_a + 0, lse_a + 0
        merge_states(out_a, lse_a, out_b, lse_b, out=out_a, out_lse=lse_a)
        return out_a + 1, lse_a

    for function in (fresh, in_place):
        torch._dynamo.reset()
        found = torch.compile(function, fullgraph=True, backend=backend)(*given)
        torch.testing.assert_close(found, function(*given), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_registered_ops_pass_opcheck(device: str) -> None:
    given = states(Way("as it is", device), (2, 5, 4, 64))
    ops = torch.ops.kernel_hub
    torch.library.opcheck(ops.merge_states.default, given)
    torch.library.opcheck(
        ops.merge_states_out.default, (*given, given[0].clone(), given[1].clone())
    )
