"""What flash_attention refuses: one TensorError each, naming the argument and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_hub.errors import TensorError
from kernel_hub.ops import flash_attention, flash_attention_qkvpacked

HALF = torch.float16


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=HALF)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Q, K, V = half(2, 5, 4, 32), half(2, 7, 2, 32), half(2, 7, 2, 32)
ROWS_Q, ROWS_K = half(10, 4, 32), half(14, 2, 32)
BOUNDS_Q, BOUNDS_K = int32(0, 5, 10), int32(0, 7, 14)
PAGES, TABLE, LENGTHS = half(6, 8, 2, 32), int32(0, 1, 2, 3).view(2, 2), int32(9, 16)
QKV = half(2, 5, 3, 4, 32)


def dense(**options: Any) -> Any:
    tensors = [options.pop(name, x) for name, x in (("q", Q), ("k", K), ("v", V))]
    return flash_attention(*tensors, **options)


def varlen(**options: Any) -> Any:
    given = {"q": ROWS_Q, "k": ROWS_K, "v": ROWS_K, "cu_seqlens_q": BOUNDS_Q}
    return flash_attention(**{**given, "cu_seqlens_k": BOUNDS_K, **options})


def paged(**options: Any) -> Any:
    given = {"q": Q, "k": PAGES, "v": PAGES, "block_table": TABLE, "cache_seqlens": LENGTHS}
    return flash_attention(**{**given, **options})


def grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


INTO = half(2, 7, 4, 32)  # K and V would fit in here
REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: dense(q=None), ["q", "a torch tensor", "NoneType"]),
    (lambda: dense(k=[1.0]), ["k", "a torch tensor", "list"]),
    (lambda: dense(v=1), ["v", "a torch tensor", "int"]),
    (lambda: dense(q=Q.double()), ["q", "dtype float16, bfloat16 or float32", "float64"]),
    (lambda: dense(q=Q.float()), ["k", "dtype float32", "float16"]),
    (lambda: dense(k=K.bfloat16()), ["k", "dtype float16", "bfloat16"]),
    (lambda: dense(v=V.float()), ["v", "dtype float16", "float32"]),
    (lambda: dense(k=K.to(torch.float8_e4m3fn)), ["v", "dtype float8_e4m3fn", "float16"]),
    (lambda: dense(k=K.to("meta")), ["k", "device cpu", "on meta"]),
    (lambda: dense(q=Q[0]), ["q", "(batch_size, seqlen_q, num_heads, head_dim)", "(5, 4, 32)"]),
    (lambda: dense(k=K[0]), ["k", "(batch_size, seqlen_k, num_kv_heads", "(7, 2, 32)"]),
    (lambda: dense(k=K[:1], v=V[:1]), ["k", "2 sequences", "(1, 7, 2, 32)"]),
    (lambda: dense(v=V[:, :6]), ["v", "(2, 7, 2, 32)", "(2, 6, 2, 32)"]),
    (lambda: dense(k=K[..., :16]), ["k", "(2, 7, 2, 32)", "(2, 7, 2, 16)"]),
    (lambda: dense(v=V[..., :8]), ["v", "head_dim from 16 to 256", "8"]),
    (lambda: dense(v=V[..., :28]), ["v", "multiples of 8", "28"]),
    (lambda: dense(v=half(2, 7, 2, 264)), ["v", "head_dim from 16 to 256", "264"]),
    (lambda: dense(v=half(2, 7, 2, 32)[..., ::2]), ["v", "contiguous last", "strides"]),
    (lambda: dense(v=V[..., :16], out=Q.clone()), ["out", "(2, 5, 4, 16)", "(2, 5, 4, 32)"]),
    (
        lambda: flash_attention(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V[..., :16]))),
        ["v", "(2, 7, 2, 32)", "(2, 7, 2, 16)"],
    ),
    (lambda: dense(q=half(2, 5, 4, 8)), ["q", "head_dim from 16 to 256", "8"]),
    (lambda: dense(q=half(2, 5, 4, 36)), ["q", "multiples of 8", "36"]),
    (lambda: dense(q=half(2, 5, 4, 264)), ["q", "head_dim from 16 to 256", "264"]),
    (lambda: dense(q=half(2, 5, 4, 64)[..., ::2]), ["q", "contiguous last", "strides"]),
    (lambda: dense(k=half(2, 7, 2, 64)[..., ::2]), ["k", "contiguous last", "strides"]),
    (lambda: dense(q=half(2, 5, 3, 32)), ["k", "divide num_heads = 3", "found 2"]),
    (lambda: dense(k=K[:, :, :0], v=V[:, :, :0]), ["k", "divide num_heads = 4", "found 0"]),
    (lambda: dense(layout="sbhd"), ["layout", "'bshd' or 'bhsd'", "'sbhd'"]),
    (lambda: dense(layout=None), ["layout", "'bshd' or 'bhsd'", "None"]),
    (lambda: dense(softmax_scale="1"), ["softmax_scale", "a number", "str '1'"]),
    (lambda: dense(softmax_scale=float("nan")), ["softmax_scale", "finite", "nan"]),
    (lambda: dense(softmax_scale=float("inf")), ["softmax_scale", "finite", "inf"]),
    (lambda: dense(softcap=-1.0), ["softcap", "at least 0", "-1.0"]),
    (lambda: dense(softcap=float("nan")), ["softcap", "finite", "nan"]),
    (lambda: dense(softcap=None, window_size=3), ["window_size", "(left, right)", "3"]),
    (lambda: dense(window_size=(1, 2, 3)), ["window_size", "two whole numbers", "(1, 2, 3)"]),
    (lambda: dense(window_size=(-2, 0)), ["window_size", "from -1", "(-2, 0)"]),
    (lambda: dense(window_size=(1.5, 0)), ["window_size", "whole numbers", "(1.5, 0)"]),
    (lambda: dense(window_size=[0, None]), ["window_size", "whole numbers", "(0, None)"]),
    (lambda: dense(alibi_slopes=1.0), ["alibi_slopes", "a torch tensor", "float"]),
    (lambda: dense(alibi_slopes=torch.ones(3)), ["alibi_slopes", "(4,) or (2, 4)", "(3,)"]),
    (lambda: dense(alibi_slopes=torch.ones(3, 4)), ["alibi_slopes", "(4,) or (2, 4)", "(3, 4)"]),
    (lambda: dense(alibi_slopes=half(4)), ["alibi_slopes", "dtype float32", "float16"]),
    (lambda: dense(sinks=1.0), ["sinks", "a torch tensor", "float"]),
    (lambda: dense(sinks=torch.ones(2)), ["sinks", "shape (4,)", "shape (2,)"]),
    (lambda: dense(sinks=torch.ones(4).double()), ["sinks", "float32", "float64"]),
    (lambda: dense(sinks=torch.ones(8)[::2]), ["sinks", "contiguous", "(2,)"]),
    (lambda: dense(sinks=grad(torch.ones(4))), ["sinks", "no backward", "sinks.detach()"]),
    (lambda: dense(alibi_slopes=torch.ones(8)[::2]), ["alibi_slopes", "contiguous", "(2,)"]),
    (lambda: dense(max_seqlen_q=5), ["max_seqlen_q", "None where the tensors say", "5"]),
    (lambda: dense(max_seqlen_k=5), ["max_seqlen_k", "None where the tensors say", "5"]),
    (lambda: dense(cache_seqlens=[1, 2]), ["cache_seqlens", "a torch tensor", "list"]),
    (lambda: dense(cache_seqlens=int32(1)), ["cache_seqlens", "shape (2,)", "shape (1,)"]),
    (lambda: dense(cache_seqlens=torch.ones(2).long()), ["cache_seqlens", "int32", "int64"]),
    (lambda: dense(cu_seqlens_q=BOUNDS_Q), ["q", "(total_q, num_heads", "(2, 5, 4, 32)"]),
    (lambda: dense(cu_seqlens_k=BOUNDS_K), ["k", "(total_k, num_kv_heads", "(2, 7, 2, 32)"]),
    (lambda: varlen(cu_seqlens_q=[0, 5, 10]), ["cu_seqlens_q", "a torch tensor", "list"]),
    (lambda: varlen(cu_seqlens_q=BOUNDS_Q.long()), ["cu_seqlens_q", "dtype int32", "int64"]),
    (lambda: varlen(cu_seqlens_q=BOUNDS_Q.view(1, 3)), ["cu_seqlens_q", "(batch_size + 1,)"]),
    (lambda: varlen(cu_seqlens_q=BOUNDS_Q[:0]), ["cu_seqlens_q", "(batch_size + 1,)", "(0,)"]),
    (lambda: varlen(cu_seqlens_q=BOUNDS_Q.to("meta")), ["cu_seqlens_q", "cpu", "meta"]),
    (lambda: varlen(cu_seqlens_q=int32(*[0] * 6)[::2]), ["cu_seqlens_q", "contiguous", "(2,)"]),
    (lambda: varlen(cu_seqlens_k=BOUNDS_K[:2]), ["cu_seqlens_k", "shape (3,)", "shape (2,)"]),
    (lambda: varlen(cu_seqlens_k=BOUNDS_K.float()), ["cu_seqlens_k", "int32", "float32"]),
    (lambda: varlen(max_seqlen_q=-1), ["max_seqlen_q", "a whole number from 0", "-1"]),
    (lambda: varlen(max_seqlen_k=2.5), ["max_seqlen_k", "a whole number from 0", "2.5"]),
    (lambda: varlen(max_seqlen_k=int32(7)), ["max_seqlen_k", "a whole number", "tensor"]),
    (lambda: varlen(cache_seqlens=LENGTHS), ["cache_seqlens", "None beside cu_seqlens_k"]),
    (lambda: varlen(block_table=TABLE), ["k", "(num_pages, page_size", "(14, 2, 32)"]),
    (lambda: paged(cu_seqlens_k=BOUNDS_K), ["block_table", "None beside cu_seqlens_k"]),
    (lambda: paged(block_table=[[0, 1]]), ["block_table", "a torch tensor", "list"]),
    (lambda: paged(block_table=TABLE.long()), ["block_table", "dtype int32", "int64"]),
    (lambda: paged(block_table=TABLE[0]), ["block_table", "(batch_size, max_pages)", "(2,)"]),
    (lambda: paged(block_table=TABLE[:1]), ["block_table", "shape (2, 2)", "shape (1, 2)"]),
    (lambda: paged(block_table=TABLE.t()), ["block_table", "contiguous last", "(1, 2)"]),
    (lambda: paged(block_table=TABLE.to("meta")), ["block_table", "device cpu", "meta"]),
    (lambda: paged(k=half(6, 0, 2, 32), v=half(6, 0, 2, 32)), ["k", "page_size", "found 0"]),
    (lambda: paged(k=half(1, 257, 2, 32), v=half(1, 257, 2, 32)), ["page_size", "found 257"]),
    (lambda: paged(q=grad(Q)), ["block_table", "no backward", "no_grad"]),
    (lambda: dense(q=grad(Q), alibi_slopes=grad(torch.ones(4))), ["alibi_slopes", "detach"]),
    (lambda: dense(q=grad(Q), out=half(2, 5, 4, 32)), ["q", "requires grad", "out"]),
    (lambda: dense(out=Q[:1].clone()), ["out", "(2, 5, 4, 32)", "(1, 5, 4, 32)"]),
    (lambda: dense(out=half(2, 4, 5, 32), layout="bhsd", q=Q.transpose(1, 2)), ["k"]),
    (lambda: dense(out=Q.bfloat16()), ["out", "dtype float16", "bfloat16"]),
    (lambda: dense(out=1), ["out", "a torch tensor", "int"]),
    (lambda: dense(out=Q[:1].clone().expand(2, 5, 4, 32)), ["out", "do not overlap", "(0,"]),
    (lambda: dense(out=Q), ["out", "memory of its own", "that of q"]),
    (lambda: dense(q=INTO, k=half(2, 7, 4, 32), v=INTO, out=INTO), ["out", "that of q"]),
    (lambda: dense(q=half(2, 7, 4, 32), k=INTO, v=INTO, out=INTO), ["out", "that of k"]),
    (lambda: flash_attention_qkvpacked(None), ["qkv", "a torch tensor", "NoneType"]),
    (lambda: flash_attention_qkvpacked(QKV[:, :, :2]), ["qkv", "3, num_heads", "(2, 5, 2, 4, 32)"]),
    (lambda: flash_attention_qkvpacked(QKV[:, :, 0]), ["qkv", "3, num_heads", "(2, 5, 4, 32)"]),
    (lambda: flash_attention_qkvpacked(QKV, num_heads=4), ["num_kv_heads", "num_heads=4"]),
    (
        lambda: flash_attention_qkvpacked(QKV.flatten(2, 3), num_heads=4, num_kv_heads=2),
        ["qkv", "num_heads + 2 * num_kv_heads = 8", "(2, 5, 12, 32)"],
    ),
    (
        lambda: flash_attention_qkvpacked(QKV, cu_seqlens=BOUNDS_Q),
        ["qkv", "(total, 3, num_heads, head_dim)", "(2, 5, 3, 4, 32)"],
    ),
    (lambda: flash_attention_qkvpacked(QKV.double()), ["q", "bfloat16 or float32", "float64"]),
]


@pytest.mark.parametrize("call, parts", REFUSED, ids=[" ".join(parts) for _, parts in REFUSED])
def test_refused(call: Callable[[], object], parts: list[str]) -> None:
    with pytest.raises(TensorError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("flash_attention")
    for part in parts:
        assert part in message


def test_what_the_refusals_start_from_is_accepted() -> None:
    for call in (dense, varlen, paged, lambda: flash_attention_qkvpacked(QKV)):
        call()
    dense(window_size=[3, 2**40], softcap=2, softmax_scale=1, out=half(2, 5, 4, 32))
    # Slices of one buffer, none of which lies in another.
    buffer = half(2, 7, 8, 32)
    flash_attention(buffer[:, :, :2], buffer[:, :, 2:4], buffer[:, :, 4:6], out=buffer[:, :, 6:])


WRONG_VALUES: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: varlen(cu_seqlens_q=int32(1, 5, 10)), ["cu_seqlens_q", "start at 0", "[1, 5, 10]"]),
    (lambda: varlen(cu_seqlens_k=int32(0, 9, 7)), ["cu_seqlens_k", "do not fall", "[0, 9, 7]"]),
    (lambda: varlen(cu_seqlens_k=int32(-1, 7, 9)), ["cu_seqlens_k", "or after it", "[-1, 7, 9]"]),
    (lambda: varlen(cu_seqlens_q=int32(0, 5, 11)), ["cu_seqlens_q", "at most 10 rows", "11"]),
    (lambda: varlen(max_seqlen_k=6), ["cu_seqlens_k", "max_seqlen_k = 6", "found 7"]),
    (lambda: paged(cache_seqlens=int32(9, 17)), ["cache_seqlens", "at most 16", "[9, 17]"]),
    (lambda: paged(block_table=TABLE + 3), ["block_table", "from 0 to 5", "sequence 1", "[5, 6]"]),
    (lambda: paged(block_table=TABLE - 1), ["block_table", "sequence 0", "[-1, 0]"]),
    (lambda: dense(cache_seqlens=int32(8, 0)), ["cache_seqlens", "at most 7", "[8, 0]"]),
]


@pytest.mark.parametrize(
    "call, parts", WRONG_VALUES, ids=[" ".join(parts) for _, parts in WRONG_VALUES]
)
def test_values_are_refused_when_debugging(
    call: Callable[[], object], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    with pytest.raises(TensorError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_good_values_pass_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    varlen(max_seqlen_q=5, max_seqlen_k=7)
    # Keys before the first sequence, and 8 of a sequence without queries: nobody sees them.
    bounds = {"cu_seqlens_q": int32(0, 5, 5, 10), "cu_seqlens_k": int32(1, 4, 12, 14)}
    varlen(**bounds, max_seqlen_q=5, max_seqlen_k=3)
    with pytest.raises(TensorError, match="max_seqlen_k = 2, found 3"):
        varlen(**bounds, max_seqlen_q=5, max_seqlen_k=2)
    garbage = TABLE.clone()
    garbage[0, 1] = -5
    paged(block_table=garbage, cache_seqlens=int32(8, 16))
    paged(cache_seqlens=int32(-1, 3))  # a finished row


@pytest.mark.gpu
def test_devices_and_dtypes_are_named_on_calls_seen_before() -> None:
    q, k, rows_q, rows_k, bounds_q, bounds_k = (
        x.cuda() for x in (Q, K, ROWS_Q, ROWS_K, BOUNDS_Q, BOUNDS_K)
    )
    flash_attention(q, k, k)  # the plans are made; the next calls go the quick way
    flash_attention(rows_q, rows_k, rows_k, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k)
    for call in (
        lambda: flash_attention(q, K, k),
        lambda: flash_attention(q, k, k.bfloat16()),
        lambda: flash_attention(q, k, k, out=torch.empty_like(Q)),
        lambda: flash_attention(
            rows_q, rows_k, rows_k, cu_seqlens_q=BOUNDS_Q, cu_seqlens_k=bounds_k
        ),
        lambda: flash_attention(
            rows_q, rows_k, rows_k, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k.float()
        ),
    ):
        with pytest.raises(TensorError, match=r"device|dtype"):
            call()
