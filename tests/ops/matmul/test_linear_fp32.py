"""linear of fp32 against fp64: every variant, any rows, binades, what has no parts, its plan."""

from __future__ import annotations

import itertools

import pytest
import torch
from bits import same_bits
from product_problems import ACTIVATIONS
from ways import Way

from kernel_hub.ops import linear
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import linear_fp32_plan
from kernel_hub.testing.compare import check, parts_atol
from kernel_hub.testing.guard import Guarded

FP32 = torch.float32


def check_fp32(
    way: Way, m: int, n: int, k: int, *, room: int = 0, activation: str | None = None,
    adds: bool = False, binades: int = 0,
) -> None:  # fmt: skip
    """By the rule, and the same bits twice."""

    def rows(count: int, seed: int) -> torch.Tensor:
        made = way.randn(count, k + room, seed=seed)
        if binades:
            made *= 2.0 ** (way.randn(count, k + room, seed=seed + 9) * binades / 3).round()
        return made[:, room:]

    a, b = rows(m, 0), rows(n, 1)
    bias, residual = (way.randn(n, seed=2), way.randn(m, n, seed=3)) if adds else (None, None)
    out = Guarded((m, n), FP32, way.device)
    given = {"activation": activation, "residual": residual}
    linear(a, b, bias, out=out.tensor, **given)
    out.check()

    def reference(dtype: torch.dtype) -> torch.Tensor:
        values = a.to(dtype) @ b.to(dtype).T
        if bias is not None:
            values = values + bias.to(dtype)
        values = ACTIVATIONS[activation](values)
        return values if residual is None else values + residual.to(dtype)

    truth = reference(torch.float64)
    atol = parts_atol(a, b) + torch.finfo(FP32).eps * float(truth.abs().max())
    check(out.tensor, truth, reference(FP32), atol=atol, name=f"{(m, n, k, room)}")
    same_bits(linear(a, b, bias, **given), out.tensor)


@pytest.mark.parametrize("k", [1, 3, 16, 70, 264])
@pytest.mark.parametrize("n", [1, 127, 136])
@pytest.mark.parametrize("m", [1, 7, 16, 31, 65, 130])
def test_sizes(way: Way, m: int, n: int, k: int) -> None:
    for room in way.some((0, 1, 4), 1, m, n, k):
        check_fp32(way, m, n, k, room=room)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("m", [3, 40])
def test_epilogues(way: Way, m: int, activation: str | None) -> None:
    for n, adds in itertools.product((40, 45), (False, True)):
        check_fp32(way, m, n, 64, activation=activation, adds=adds)


@pytest.mark.parametrize("m", [5, 40])
@pytest.mark.parametrize("binades", [8, 40])
def test_many_binades(way: Way, m: int, binades: int) -> None:
    check_fp32(way, m, 40, 300, binades=binades)


@pytest.mark.parametrize("size", [(1, 4096, 14336), (300, 1000, 9001), (129, 4112, 4096)], ids=str)
@pytest.mark.gpu
def test_larger(way: Way, size: tuple[int, int, int]) -> None:
    check_fp32(way, *size, activation="silu", adds=True)
    check_fp32(way, *size, binades=20)


@pytest.mark.parametrize("m", [2, 40])
def test_sums_of_one_sign(way: Way, m: int) -> None:
    # Where a sum that is cut off at each step would fall behind.
    k = 16384 if way.is_gpu else 2048
    a, b = way.randn(m, k).abs(), way.randn(24, k, seed=1).abs()
    check(linear(a, b), a.double() @ b.double().T, a @ b.T)


@pytest.mark.parametrize("m", [5, 40])
@pytest.mark.parametrize("room", [0, 1])
def test_what_has_no_parts(way: Way, m: int, room: int) -> None:
    a, b = way.randn(m, 50 + room)[:, room:], way.randn(30, 50 + room, seed=1)[:, room:]
    inf, largest = float("inf"), torch.finfo(FP32).max
    a[0, 4], a[1, 6], a[2, 8], a[3, 9], a[4, 0] = inf, float("nan"), largest, -inf, -largest
    b[:, [0, 8]] *= 0.2  # times the largest it is below inf
    b[2, 4], b[3, 4], b[4, 9], b[5, 8] = 0.0, 1.0, inf, 0.25
    bias = way.randn(30, seed=2)
    for activation in (None, "relu"):
        out = linear(a, b, bias, activation=activation)
        own = ACTIVATIONS[activation](a.cpu() @ b.cpu().T + bias.cpu()).to(way.device)
        truth = ACTIVATIONS[activation](a.double() @ b.double().T + bias.double())
        assert bool(out[0, 2].isnan()) and bool(out[1].isnan().all())
        check(out, truth, own)


def test_k_shared_and_every_variant(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = torch.cuda.get_device_capability() if way.is_gpu else (9, 0)
    for m, splits, room in ((5, 3, 0), (12, 3, 0), (40, 3, 1), (100, 1, 0), (100, 2, 4)):
        n, k = 150, 601 if room % 4 else 600
        is_aligned = room % 4 == 0
        for choice in linear_fp32_plan.choices(capability, way.num_sms, m, n, splits, is_aligned):
            monkeypatch.setattr(
                "kernel_hub.ops.matmul.linear_launch.choose_fp32", lambda *_, c=choice: c
            )
            forget_all()
            check_fp32(way, m, n, k, room=room, activation="gelu", adds=True)


def test_layouts(way: Way) -> None:
    a, b = way.randn(2, 3, 5, 33), way.randn(24, 33, seed=1)
    flat = linear(a.view(30, 33), b)
    same_bits(linear(a, b).view(30, 24), flat)
    same_bits(linear(a[:1, :1, :1].expand(2, 3, 5, 33), b)[1, 2], flat[:1].expand(5, 24))
    out = Guarded((30, 24), FP32, way.device, row_stride=29, shift=1)
    out.tensor.copy_(flat)
    linear(a.view(30, 33), b, residual=out.tensor, out=out.tensor)
    out.check()
    same_bits(out.tensor.contiguous(), flat + flat)
    assert linear(a[:0], b).shape == (0, 3, 5, 24)
    assert bool((linear(way.randn(3, 0), way.randn(5, 0)) == 0).all())


def test_the_plan() -> None:
    def chosen(m: int, n: int, k: int, is_aligned: bool = True) -> tuple[str, int]:
        choice = linear_fp32_plan.choose((9, 0), 132, m, n, k, is_aligned)
        return choice.variant, choice.grid[1]

    assert chosen(1, 4096, 14336) == ("m8", 1)
    assert chosen(16, 512, 8192) == ("m16", 8)
    assert chosen(16, 512, 8192, is_aligned=False)[0] == "32x128"
    assert chosen(4096, 4096, 4096) == ("96x128", 1)
    assert chosen(24, 4096, 4096) == ("32x128", 8)
