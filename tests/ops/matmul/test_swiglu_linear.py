"""swiglu_linear and its other gates against fp64: sizes, layouts, every variant, refusals."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from refused import check_misaligned, check_refused
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import gated_linear
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import paired_plan
from kernel_hub.testing import reference as references
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.matmul.swiglu_linear")
swiglu_linear: Callable[..., torch.Tensor] = module.swiglu_linear
DTYPES = [torch.float16, torch.bfloat16]
GATES = ("gelu", "gelu_tanh", "swigluoai")


def reference(
    a: torch.Tensor, b: torch.Tensor, *, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """silu(a @ gate.T) * (a @ up.T), each step rounded to `dtype`."""
    gate, up = (a.to(dtype) @ half.to(dtype).T for half in b.chunk(2))
    return torch.nn.functional.silu(gate) * up


def check_swiglu(
    way: Way, m: int, columns: int, k: int, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    a = way.randn(m, k, dtype=dtype)
    b = way.randn(2 * columns, k, dtype=dtype, seed=1) * (2 / max(k, 4)) ** 0.5
    out = Guarded((m, columns), dtype, way.device)
    got = swiglu_linear(a, b, out=out.tensor)
    assert got is out.tensor
    out.check()
    check(got, reference(a, b), reference(a, b, dtype=dtype), name=f"{(m, columns, k)}")
    same_bits(swiglu_linear(a, b), got)
    check_gates(a, b, GATES if way.is_gpu else (GATES[(m + columns + k // 8) % 3],))


def check_gates(a: torch.Tensor, b: torch.Tensor, gates: tuple[str, ...] = GATES) -> None:
    """The other gates of the same operands, by halves and in turn."""
    turns = torch.stack(b.chunk(2), 1).flatten(0, 1)
    for gate in gates:
        how: dict[str, Any] = {"activation": gate, "alpha": 1.5, "limit": 1.25}
        out = Guarded((a.shape[0], b.shape[0] // 2), a.dtype, a.device.type)
        gated_linear(a, b, **how, out=out.tensor)
        out.check()
        truth, own = (
            references.gated_linear(a, b, **how, dtype=to) for to in (torch.float64, a.dtype)
        )
        check(out.tensor, truth, own, name=gate)
        same_bits(gated_linear(a, turns, **how, interleaved=True), out.tensor)
    same_bits(gated_linear(a, turns, interleaved=True), swiglu_linear(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [8, 72, 264])
@pytest.mark.parametrize("columns", [1, 8, 63, 136])
@pytest.mark.parametrize("m", [1, 7, 16, 31, 65, 130])
def test_sizes(way: Way, dtype: torch.dtype, m: int, columns: int, k: int) -> None:
    check_swiglu(way, m, columns, k, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 14336, 4096), (129, 1000, 1544), (300, 4112, 72)], ids=str)
def test_larger(way: Way, size: tuple[int, int, int]) -> None:
    for dtype in DTYPES:
        check_swiglu(way, *size, dtype=dtype)


@pytest.mark.parametrize("size", [(5, 24, 200), (12, 20, 96), (70, 72, 96)], ids=str)
def test_portable_bodies(
    way: Way, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, columns, k = size
    n = 16 * -(-columns // 8)
    for choice in paired_plan.portable_choices("swiglu_linear", (9, 0), 4, m, n):
        monkeypatch.setattr(module, "choose", lambda *_, c=choice: c)
        forget_all()
        for dtype in DTYPES:
            check_swiglu(way, m, columns, k, dtype=dtype)


@pytest.mark.parametrize("variant", paired_plan.HOPPER["swiglu_linear"], ids=lambda v: v.name)
def test_hopper_variants(
    hopper_way: Way, variant: paired_plan.PairedTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = variant.block_n if variant.swaps else 700
    sizes = [(1, 8, 64), (most, 168, 520), (most - 3, 2056, 1096), (most, 20000, 512)]
    if not hopper_way.is_gpu:
        most = variant.block_n if variant.swaps else 150
        sizes = [(1, 8, 64), (most, 168, 136), (most - 3, 72, 392)]
    for i, (m, columns, k) in hopper_way.some(enumerate(sizes), 2, variant.name):
        n, k = 2 * columns, max(k, 64 * variant.splits)
        choice = paired_plan.hopper_choice("swiglu_linear", variant, hopper_way.num_sms, m, n)
        monkeypatch.setattr(module, "choose", lambda *_, c=choice: c)
        forget_all()
        for dtype in DTYPES if hopper_way.is_gpu else [DTYPES[i % 2]]:
            check_swiglu(hopper_way, m, columns, k, dtype=dtype)


@pytest.mark.parametrize("m", [97, 104, 105, 305])
def test_shares_that_overlap(hopper_way: Way, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As linear's: both blocks of a cluster fetch some columns of a tile."""
    variants = paired_plan.HOPPER["swiglu_linear"]
    variant = next(each for each in variants if each.name == "swapped_128x200_c21")
    choice = paired_plan.hopper_choice("swiglu_linear", variant, hopper_way.num_sms, m, 336)
    monkeypatch.setattr(module, "choose", lambda *_: choice)
    forget_all()
    check_swiglu(hopper_way, m, 168, 136, dtype=torch.bfloat16)


@pytest.mark.parametrize("number", range(6))
def test_seven_units_by_lot(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Several tiles a cluster, units that are not there, rows of a that one block alone has."""
    lot = random.Random(f"seven units {number}")
    m, columns = lot.choice((1, 104, 105, 193, 208)), 8 * lot.randrange(25, 115)
    k, dtype = 8 * lot.randrange(1, 42), lot.choice(DTYPES)
    variant = next(each for each in paired_plan.HOPPER["swiglu_linear"] if each.is_seven)
    choice = paired_plan.hopper_choice("swiglu_linear", variant, 2, m, 2 * columns)
    monkeypatch.setattr(module, "choose", lambda *_: choice)
    forget_all()
    a = hopper_way.randn(m, k + 8, dtype=dtype)[:, :k]
    b = hopper_way.randn(2 * columns, k, dtype=dtype, seed=1) * (2 / max(k, 4)) ** 0.5
    out = Guarded((m, columns), dtype, hopper_way.device, row_stride=columns + lot.choice((3, 8)))
    swiglu_linear(a, b, out=out.tensor, weights_ready=lot.choice((False, True)))
    out.check()
    check(out.tensor, reference(a, b), reference(a, b, dtype=dtype), name=f"{(m, columns, k)}")
    check_gates(a, b, (lot.choice(GATES),))
    forget_all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 72, generator=generator).to(dtype) / 3 for n in (9, 26))
    check(swiglu_linear(a, b), reference(a, b), reference(a, b, dtype=dtype))
    check_gates(a, b)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back(way: Way) -> None:
    check_back_to_back(
        "cases = [partial(ops.swiglu_linear, randn(m, 512), randn(4096, 512) / 16)"
        " for m in (1, 7, 30, 64, 300, 1500)]"
    )


def test_compiled() -> None:
    a, b = torch.randn(3, 16).half(), torch.randn(8, 16).half()
    operators = torch.ops.kernel_hub
    torch.library.opcheck(operators.swiglu_linear.default, (a, b, False, True))
    torch.library.opcheck(
        operators.swiglu_linear_out.default, (a, b, True, False, a[:, :4].clone())
    )
    how = (3, 1.7, 7.0, True, True, True)
    torch.library.opcheck(operators.gated_linear.default, (a, b, *how))
    torch.library.opcheck(operators.gated_linear_out.default, (a, b, *how, a[:, :4].clone()))
    by_gelu = torch.compile(
        lambda *x: gated_linear(*x, "gelu") + 1, fullgraph=True, backend="aot_eager"
    )
    same_bits(by_gelu(a, b), gated_linear(a, b, "gelu") + 1)
    compiled = torch.compile(lambda *x: swiglu_linear(*x) + 1, fullgraph=True, backend="aot_eager")
    same_bits(compiled(a, b), swiglu_linear(a, b) + 1)


def test_leading_dimensions(way: Way) -> None:
    a, b = way.randn(2, 3, 5, 64, dtype=torch.float16), way.randn(48, 64, dtype=torch.float16)
    flat = swiglu_linear(a.view(30, 64), b)
    assert swiglu_linear(a, b).shape == (2, 3, 5, 24)
    same_bits(swiglu_linear(a, b).view(30, 24), flat)
    one = a[0, 0, 0]
    check(swiglu_linear(one, b), reference(one, b), reference(one, b, dtype=a.dtype))


@pytest.mark.parametrize("m", [9, 70])
def test_strided_rows(way: Way, m: int) -> None:
    wide, weights = way.randn(m, 80, dtype=torch.float16), way.randn(96, 80, dtype=torch.float16)
    a, b = wide[:, 8:72], weights[::2, :64]
    out = Guarded((m, 24), torch.float16, way.device, row_stride=27)
    swiglu_linear(a, b, out=out.tensor)
    out.check()
    same_bits(out.tensor.contiguous(), swiglu_linear(a.contiguous(), b.contiguous()))


@pytest.mark.parametrize("m", [2, 12, 70])
def test_expanded_and_overlapping_rows(way: Way, m: int) -> None:
    row, b = way.randn(1, 72, dtype=torch.float16), way.randn(48, 72, dtype=torch.float16) / 8
    windows = way.randn(8 * m + 64, dtype=torch.float16).as_strided((m, 72), (8, 1))
    for a, weights in ((row.expand(m, 72), b), (windows, b), (windows, b[:1].expand(48, 72))):
        rounded = reference(a, weights, dtype=torch.float16)
        check(swiglu_linear(a, weights), reference(a, weights), rounded)


def test_nan_and_inf(way: Way) -> None:
    a, b = way.randn(4, 16, dtype=torch.bfloat16), way.randn(16, 16, dtype=torch.bfloat16)
    a[1, 3], a[2, 0] = float("nan"), float("inf")
    b[:, 0] = b[:, 0].abs() + 1
    out = swiglu_linear(a, b)
    assert bool(out[1].isnan().all())
    assert bool(out[2].isinf().all())
    assert bool(torch.isfinite(out[[0, 3]]).all())
    for gate in GATES:
        out = gated_linear(a, b, gate)
        assert bool(out[1].isnan().all())
        assert bool(torch.isfinite(out[[0, 3]]).all())
        found = torch.isfinite(out[2]) if gate == "swigluoai" else out[2].isinf()
        assert bool(found.all())


def test_large_gates(way: Way) -> None:
    # silu is x to the right and 0 to the left, however far.
    gates = torch.tensor([-3e38, -1e30, -100.0, -88.0, -30.0, 30.0, 88.0, 1e30, 3e38])
    for m in (3, 40):
        b = torch.zeros(18, 8, dtype=torch.bfloat16, device=way.device)
        b[:9, 0], b[9:, 1] = gates, 1.0
        a = torch.ones(m, 8, dtype=torch.bfloat16, device=way.device)
        check(swiglu_linear(a, b), reference(a, b), reference(a, b, dtype=torch.bfloat16))
        check_gates(a, b)


@pytest.mark.parametrize("shape", [(0, 8, 16), (3, 0, 16), (0, 0, 8), (3, 5, 0), (40, 8, 0)])
def test_empty(way: Way, shape: tuple[int, int, int]) -> None:
    m, columns, k = shape
    a, b = way.randn(m, k, dtype=torch.float16), way.randn(2 * columns, k, dtype=torch.float16)
    out = swiglu_linear(a, b)
    assert out.shape == (m, columns)
    assert not bool(out.any())


A, B = torch.ones(3, 16, dtype=torch.float16), torch.ones(8, 16, dtype=torch.float16)
REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: swiglu_linear(None, B), ["a", "a torch tensor", "NoneType"]),
    (lambda: swiglu_linear(A, None, out=B), ["b_gate_up", "a torch tensor", "NoneType"]),
    (lambda: swiglu_linear(A, B, out=[B]), ["out", "a torch tensor", "list"]),
    (lambda: swiglu_linear(A.float(), B), ["a", "float16 or bfloat16", "float32"]),
    (lambda: swiglu_linear(A[:, :12], B[:, :12]), ["a", "multiple of 8", "shape (3, 12)"]),
    (lambda: swiglu_linear(A, B.bfloat16()), ["b_gate_up", "dtype float16", "bfloat16"]),
    (lambda: swiglu_linear(A, B[:, :8]), ["b_gate_up", "shape (2 * i, 16)", "shape (8, 8)"]),
    (lambda: swiglu_linear(A, B[:7]), ["b_gate_up", "shape (2 * i, 16)", "shape (7, 16)"]),
    (lambda: swiglu_linear(A, B[0]), ["b_gate_up", "shape (2 * i, 16)", "shape (16,)"]),
    (lambda: swiglu_linear(A, B, out=A[:2, :4]), ["out", "shape (3, 4)", "shape (2, 4)"]),
    (lambda: swiglu_linear(A, B, out=A[:, :4].float()), ["out", "float16", "float32"]),
    (lambda: swiglu_linear(A.clone().requires_grad_(), B), ["a", "no backward", "a.detach()"]),
]
GATED_REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: gated_linear(A, B, "tanh"), "activation: expected 'silu', 'gelu', .*'swigluoai'"),
    (lambda: gated_linear(A, B, limit=-1.0), "limit: expected at least 0"),
    (lambda: gated_linear(A, B, alpha="1"), "alpha: expected a number"),  # type: ignore[arg-type]
    (lambda: gated_linear(A, B, interleaved=2.5), "interleaved"),  # type: ignore[arg-type]
    (lambda: gated_linear(A, B[:7]), r"weight: expected shape \(2 \* i, 16\)"),
    (lambda: gated_linear(A, B.clone().requires_grad_()), "weight: .*no backward"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(way: Way, case: int) -> None:
    check_refused("swiglu_linear", *REFUSED[case])


@pytest.mark.parametrize("case", range(len(GATED_REFUSED)))
def test_refusals_of_gates(way: Way, case: int) -> None:
    call, words = GATED_REFUSED[case]
    with pytest.raises(TensorError, match=f"gated_linear: {words}"):
        call()


def test_misaligned_rows_are_refused(way: Way) -> None:
    b = way.randn(8, 16, dtype=torch.float16)
    check_misaligned(lambda a: swiglu_linear(a, b), way.randn(3, 20, dtype=torch.float16))
