"""batched_matmul against fp64: sizes, batches of every layout, every variant, refusals."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from product_runs import force_choice, portable
from refused import check_misaligned, check_refused
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops.matmul import grouped_plan
from kernel_hub.testing.compare import check, product_atol
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.matmul.batched_matmul")
batched_matmul: Callable[..., torch.Tensor] = module.batched_matmul
DTYPES = [torch.float16, torch.bfloat16]


def reference(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return a.to(dtype) @ b.to(dtype).transpose(-1, -2)


def compare(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, name: str = ""
) -> None:
    truth = reference(a, b, torch.float64)
    atol = product_atol(truth, dtype, a.shape[-1])
    check(got, truth, reference(a, b, dtype), atol=atol, name=name)


def check_batched(
    way: Way, batch: int, m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None, row_stride: int | None = None,
) -> None:  # fmt: skip
    a, b = way.randn(batch, m, k, dtype=dtype), way.randn(batch, n, k, dtype=dtype, seed=1)
    kind = out_dtype or dtype
    out = Guarded((batch, m, n), kind, way.device, row_stride=row_stride or n)
    assert batched_matmul(a, b, out=out.tensor) is out.tensor
    out.check()
    compare(out.tensor, a, b, kind, f"{(batch, m, n, k)}")
    same_bits(batched_matmul(a, b, out_dtype=out_dtype), out.tensor.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [8, 72, 264])
@pytest.mark.parametrize("n", [1, 127, 136])
@pytest.mark.parametrize("m", [1, 7, 65, 130])
def test_sizes(way: Way, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    check_batched(way, 3, m, n, k, dtype=dtype)


@pytest.mark.parametrize("n", [40, 45])
@pytest.mark.parametrize("m", [3, 70])
def test_fp32_results(way: Way, m: int, n: int) -> None:
    check_batched(way, 2, m, n, 64, out_dtype=torch.float32)
    check_batched(way, 2, m, n, 64, out_dtype=torch.float32, row_stride=n + 3)


def test_strided_out(way: Way) -> None:
    for stride in (48, 51):
        check_batched(way, 3, 70, 40, 64, row_stride=stride)


def test_leading_dimensions(way: Way) -> None:
    a, b = way.randn(2, 3, 5, 64, dtype=torch.float16), way.randn(2, 3, 24, 64, dtype=torch.float16)
    flat = batched_matmul(a.view(6, 5, 64), b.view(6, 24, 64))
    same_bits(batched_matmul(a, b).view(6, 5, 24), flat)
    same_bits(batched_matmul(a[1, 2], b[1, 2]), flat[5])
    compare(flat, a.view(6, 5, 64), b.view(6, 24, 64), torch.float16)


def test_tokens_before_heads(way: Way) -> None:
    # As attention has it: (tokens, heads, head_dim), heads are the batch; and two batches of it.
    q, w = way.randn(2, 37, 4, 64, dtype=torch.bfloat16), way.randn(4, 72, 64, dtype=torch.bfloat16)
    out = Guarded((2, 37, 4, 72), torch.bfloat16, way.device)
    a, to = q.transpose(1, 2), out.tensor.transpose(1, 2)
    batched_matmul(a, w, out=to)
    out.check()
    compare(to, a, w, torch.bfloat16)
    batched_matmul(a[1], w, out=to[1])
    compare(to, a, w, torch.bfloat16)


def test_broadcast(way: Way) -> None:
    a, b = way.randn(2, 3, 21, 64, dtype=torch.float16), way.randn(40, 64, dtype=torch.float16)
    whole = batched_matmul(a, b)
    compare(whole, a, b, torch.float16)
    same_bits(batched_matmul(a, b.expand(2, 3, 40, 64)), whole)
    padded = way.randn(2, 3, 24, 64, dtype=torch.float16, seed=4)[:, :, :21]
    compare(batched_matmul(padded, b), padded, b, torch.float16)
    same_bits(batched_matmul(padded, b), batched_matmul(padded.contiguous(), b))
    one = way.randn(3, 1, 16, 64, dtype=torch.float16, seed=5)
    compare(batched_matmul(one, a[0]), one, a[0], torch.float16)
    same_bits(batched_matmul(b, a), batched_matmul(b.expand(2, 3, 40, 64), a))
    # A head of b for several of a.
    grouped = b.view(5, 1, 8, 64).expand(5, 3, 8, 64)
    many = way.randn(5, 3, 9, 64, dtype=torch.float16, seed=6)
    compare(batched_matmul(many, grouped), many, grouped, torch.float16)


@pytest.mark.parametrize("m", [1, 12, 70])
def test_expanded_and_overlapping_rows(way: Way, m: int) -> None:
    row, b = way.randn(2, 1, 72, dtype=torch.float16), way.randn(2, 40, 72, dtype=torch.float16)
    windows = way.randn(8 * m + 64 + 512, dtype=torch.float16).as_strided((2, m, 72), (512, 8, 1))
    for a, weights in ((row.expand(2, m, 72), b), (windows, b), (windows, row.expand(2, 24, 72))):
        compare(batched_matmul(a, weights), a, weights, torch.float16)


def test_three_groups_are_refused(way: Way) -> None:
    a = way.randn(4, 4, 4, 4, 8, dtype=torch.float16)[::2, ::2, ::2]
    with pytest.raises(TensorError, match=r"contiguous\(\)"):
        batched_matmul(a, a)
    same_bits(batched_matmul(a[0], a[0]), batched_matmul(a.contiguous(), a.contiguous())[0])


@pytest.mark.parametrize("shape", [(0, 3, 8, 16), (2, 0, 8, 16), (2, 3, 0, 16), (2, 3, 8, 0)])
def test_nothing_to_do(way: Way, shape: tuple[int, int, int, int]) -> None:
    batch, m, n, k = shape
    a, b = way.randn(batch, m, k, dtype=torch.float16), way.randn(batch, n, k, dtype=torch.float16)
    out = batched_matmul(a, b)
    assert out.shape == (batch, m, n)
    assert not bool(out.any())


def test_nan_and_inf(way: Way) -> None:
    a, b = way.randn(2, 4, 16, dtype=torch.bfloat16), way.randn(2, 8, 16, dtype=torch.bfloat16)
    a[1, 1, 3], a[1, 2, 0] = float("nan"), float("inf")
    out = batched_matmul(a, b)
    assert bool(out[1, 1].isnan().all())
    assert bool(out[1, 2].isinf().all())
    assert bool(torch.isfinite(out[0]).all())
    assert bool(torch.isfinite(out[1, [0, 3]]).all())


force = partial(force_choice, module)


@pytest.mark.parametrize("which", [0, 1])
def test_portable_variants(way: Way, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, portable(way, which))
    for dtype in DTYPES:
        check_batched(way, 2, 131, 136, 136, dtype=dtype)
    check_batched(way, 2, 70, 141, 40, row_stride=150)
    check_batched(way, 2, 70, 136, 72, out_dtype=torch.float32)


def check_unaligned_rows(way: Way) -> None:
    """Rows of out that begin or end at multiples of 2, 4 and 8 bytes, whole boxes and parts."""
    for n, stride in ((64, 65), (66, 70), (129, 129), (1, 1), (2, 3), (5, 8), (67, 72)):
        check_batched(way, 2, 70, n, 72, row_stride=stride)
        check_batched(way, 2, 70, n, 72, out_dtype=torch.float32, row_stride=stride)


@pytest.mark.parametrize("variant", sorted(grouped_plan.HOPPER["batched_matmul"]))
def test_hopper_variants(hopper_way: Way, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, sms = hopper_way, hopper_way.num_sms
    if not way.is_gpu:
        force(monkeypatch, partial(grouped_plan.hopper_choice, variant, sms, group=8))
        checks = [
            partial(check_batched, way, 1, 1, 8, 64, dtype=torch.float16),
            partial(check_batched, way, 3, 150, 136, 136),
            partial(check_batched, way, 2, 77, 333, 72, row_stride=341),
            partial(check_batched, way, 2, 70, 136, 200, out_dtype=torch.float32),
            partial(check_unaligned_rows, way),
        ]
        for check_one in way.some(checks, 3, variant):
            check_one()
        return
    sizes = (
        (1, 1, 8, 64),
        (3, 700, 520, 264),
        (40, 130, 384, 72),
        (2, 1030, 4104, 520),
        (2, 300, 400, 2056),
    )
    for group, dtype in itertools.product((1, 8), DTYPES):
        force(monkeypatch, partial(grouped_plan.hopper_choice, variant, sms, group=group))
        for size in sizes:
            check_batched(way, *size, dtype=dtype)
        check_batched(way, 3, 77, 333, 200, dtype=dtype)
        check_batched(way, 3, 77, 328, 200, dtype=dtype, row_stride=331)
        check_batched(way, 3, 150, 328, 200, dtype=dtype, out_dtype=torch.float32)
        check_unaligned_rows(way)
    test_tokens_before_heads(way)
    test_broadcast(way)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back(
        "b = randn(16, 512, 128)\n"
        "cases = [partial(ops.batched_matmul, randn(16, m, 128), b) for m in (1, 16, 300, 900)]"
    )


A, B = torch.ones(2, 3, 16, dtype=torch.float16), torch.ones(2, 8, 16, dtype=torch.float16)
REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: batched_matmul(None, B), ["a", "a torch tensor", "NoneType"]),
    (lambda: batched_matmul(A, None), ["b", "a torch tensor", "NoneType"]),
    (lambda: batched_matmul(A, B, out=[B]), ["out", "a torch tensor", "list"]),
    (lambda: batched_matmul(A.float(), B), ["a", "float16 or bfloat16", "float32"]),
    (lambda: batched_matmul(A[0, 0], B), ["a", "at least two dimensions", "shape (16,)"]),
    (lambda: batched_matmul(A, B[0, 0]), ["b", "at least two dimensions", "shape (16,)"]),
    (lambda: batched_matmul(A[..., :12], B), ["a", "multiple of 8", "(2, 3, 12)"]),
    (lambda: batched_matmul(A, B.bfloat16()), ["b", "dtype float16", "bfloat16"]),
    (lambda: batched_matmul(A, B[..., :8]), ["b", "shape (2, 8, 16)", "shape (2, 8, 8)"]),
    (lambda: batched_matmul(A, B.repeat(3, 1, 1)), ["b", "broadcast with (2,)", "(6, 8, 16)"]),
    (lambda: batched_matmul(A, B, out_dtype=torch.float64), ["out_dtype", "float32", "float64"]),
    (lambda: batched_matmul(A, B, out=A[..., :8][:, :2]), ["out", "(2, 3, 8)", "(2, 2, 8)"]),
    (lambda: batched_matmul(A.clone().requires_grad_(), B), ["a", "no backward", "a.detach()"]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(way: Way, case: int) -> None:
    check_refused("batched_matmul", *REFUSED[case])


def test_misaligned_rows_are_refused(way: Way) -> None:
    b = way.randn(2, 8, 16, dtype=torch.float16)
    check_misaligned(lambda a: batched_matmul(a, b), way.randn(2, 3, 20, dtype=torch.float16))
