"""What every activation, gated or not, is asked, held against its reference in fp64.

The tests here are run where they are imported, beside a fixture `gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bits import same_bits
from quantised import check_quantised_rows
from row_layouts import rows_of_64
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.rowwise import gated
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

E4M3 = torch.float8_e4m3fn
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZES = [1, 7, 8, 127, 128, 129, 199, 256, 4096, 5120, 14336, 16384, 40000]
# What is chosen for many rows: several vectors a thread, several rows a block.
SHAPES = [(40, 1024), (160, 1024), (160, 8192), (1024, 2048), (2368, 1024), (4000, 1024)]


@dataclass(frozen=True)
class Gate:
    """An op, its reference and the options of both."""

    op: Callable[..., Any]
    reference: Callable[..., torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    slack: float = 0.0  # absolute error of the activation of 16-bit rows
    parts: int = 2  # of a row of x, for a row of results

    def __call__(self, x: torch.Tensor, **more: Any) -> Any:
        return self.op(x, **self.options, **more)

    def check(self, out: torch.Tensor, x: torch.Tensor) -> None:
        truth, own = (
            self.reference(x, **self.options, dtype=to) for to in (torch.float64, x.dtype)
        )
        check(out, truth, own)

    def check_e4m3(self, found: Any, x: torch.Tensor) -> None:
        assert found[0].dtype == E4M3 and found[1].shape == x.shape[:-1]
        # In fp32 a difference of numbers near 1 is left of a gate far below 0, as in torch's own.
        slack = (self.slack if x.dtype.itemsize == 2 else 2e-7) * float(x.abs().max()) ** 2
        check_quantised_rows(*found, self.reference(x, **self.options), slack)


@pytest.mark.parametrize("size", [1, 7, 33, 255, 257, 4099])
@each_dtype
def test_many_rows_by_the_element(
    way: Way, dtype: torch.dtype, size: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of a thread as vectors have; few have one each."""
    monkeypatch.setattr(gated, "_THREADS_AN_SM", 0)
    forget_all()
    for rows in (1, 3):
        x = way.randn(rows, gate.parts * size, dtype=dtype) * 3
        out = Guarded((rows, size), dtype, way.device, shift=1)
        gate(x, out=out.tensor)
        out.check()
        gate.check(out.tensor, x)
    forget_all()


@pytest.mark.parametrize("size", SIZES)
@each_dtype
def test_sizes(way: Way, dtype: torch.dtype, size: int, gate: Gate) -> None:
    for rows in [1, 3, 300, 1000] if way.is_gpu else [1, 3]:
        x = way.randn(rows, gate.parts * size, dtype=dtype)
        out = Guarded((rows, size), dtype, way.device)
        assert gate(x, out=out.tensor) is out.tensor
        out.check()
        gate.check(out.tensor, x)
        same_bits(gate(x), out.tensor)


def check_e4m3(way: Way, gate: Gate, dtype: torch.dtype, size: int) -> None:
    for rows in [1, 3, 300, 5000] if way.is_gpu and size < 16384 else [3]:
        x = way.randn(rows, gate.parts * size, dtype=dtype)
        x[-1] = 0
        out = Guarded((rows, size), E4M3, way.device)
        scale = Guarded((rows,), torch.float32, way.device)
        found = gate(x, out=out.tensor, out_scale=scale.tensor)
        assert found[0] is out.tensor and found[1] is scale.tensor
        out.check()
        scale.check("out_scale")
        gate.check_e4m3(found, x)
        assert not found[0][-1].float().any()
        for again, first in zip(gate(x, out_dtype=E4M3), found, strict=True):
            same_bits(again, first)


@pytest.mark.parametrize("size", SIZES)
@each_dtype
def test_rows_of_e4m3(way: Way, dtype: torch.dtype, size: int, gate: Gate) -> None:
    check_e4m3(way, gate, dtype, size)


@pytest.mark.parametrize("vecs, rows", SHAPES)
@each_dtype
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, vecs: int, rows: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = gated.choose_of_rows
    monkeypatch.setattr(gated, "choose_of_rows", lambda vecs, _, *how: choose(vecs, rows, *how))
    size = 16 // dtype.itemsize * vecs * gate.parts
    x = way.randn(3, size + 64, dtype=dtype)[:, :size]
    gate.check_e4m3(gate(x, out_dtype=E4M3), x)


@each_dtype
def test_in_place(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    """Where it is not gated."""
    for x in (way.randn(3, 264, dtype=dtype), way.randn(3, 265, dtype=dtype)[:, 1:]):
        wanted = gate(x)
        assert gate(x, out=x) is x
        same_bits(x, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_exact_to_16_bits(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    # The whole range of gates, so that the polynomial of a GELU is seen everywhere.
    gates = torch.linspace(-12, 12, 4096 if way.is_gpu else 1024).to(dtype).to(way.device)
    x = torch.cat((gates, *[torch.ones_like(gates)] * (gate.parts - 1)))[None]
    error = (gate(x).double() - gate.reference(x, **gate.options)).abs()
    bound = gates.double().abs() * torch.finfo(dtype).eps / 2 + 3e-5
    assert bool((error <= bound).all())


def test_layouts(way: Way, gate: Gate) -> None:
    check_layouts(way, gate)


def test_refused(gate: Gate) -> None:
    check_refusals(gate)


def check_layouts(way: Way, gate: Gate) -> None:
    for x in (*rows_of_64(way), way.randn(3, 68, dtype=torch.bfloat16)[:, :64]):
        out = gate(x)
        assert out.shape == (*x.shape[:-1], 64 // gate.parts)
        gate.check(out, x)
        gate.check_e4m3(gate(x, out_dtype=E4M3), x)
    for shape in [(0, 64), (3, 0), (0,), (2, 0, 64)]:
        half = (*shape[:-1], shape[-1] // gate.parts)
        assert gate(way.randn(*shape)).shape == half
        assert gate(way.randn(*shape), out_dtype=E4M3)[0].shape == half


@each_dtype
def test_strided_and_unaligned_rows(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    for row_stride, shift in [(264, 0), (257, 0), (264, 1), (256, 3)]:
        x = Guarded((3, 256), dtype, way.device, row_stride=row_stride, shift=shift)
        x.fill(way.randn(3, 256, dtype=dtype))
        for kind in (dtype, E4M3):
            out = Guarded(
                (3, 256 // gate.parts), kind, way.device, row_stride=row_stride, shift=shift
            )
            found = gate(x.tensor, out=out.tensor)
            out.check()
            x.check("x")
            if kind == E4M3:
                gate.check_e4m3(found, x.tensor)
            else:
                gate.check(found, x.tensor)


def fixture_of(gates: Sequence[Gate], ids: Sequence[str]) -> Any:
    """The fixture `gate` of a test module: each of them in its turn."""

    @pytest.fixture(params=gates, ids=ids)
    def gate(request: pytest.FixtureRequest) -> Gate:
        found: Gate = request.param
        return found

    return gate


def strange(*more: float) -> torch.Tensor:
    """Values that are none or large, nan first, and some more."""
    inf = float("inf")
    return torch.tensor([float("nan"), inf, -inf, 100.0, -100.0, *more])


def check_values_that_are_none(gate: Gate, x: torch.Tensor) -> None:
    """Of one row, which begins with nan."""
    out = gate(x)
    assert bool(out[0, 0].isnan())
    torch.testing.assert_close(
        out.double(), gate.reference(x, **gate.options), rtol=1e-2, atol=1e-2, equal_nan=True
    )
    scale = gate(torch.cat((x, torch.ones_like(x))), out_dtype=E4M3)[1]
    assert bool(scale[0].isnan()) and bool(scale[1].isfinite())


@each_dtype
def test_what_torch_computes_on_the_cpu(dtype: torch.dtype, gate: Gate) -> None:
    x = torch.randn(2, 5, 258).to(dtype)
    gate.check(gate(x), x)
    gate.check_e4m3(gate(x, out_dtype=E4M3), x)


def check_refusals(gate: Gate) -> None:
    name, x = gate.op.__name__, torch.ones(3, 8)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (None, {}, "x: expected a torch tensor"),
        (x.long(), {}, "x: expected dtype float16, bfloat16 or float32"),
        (x, {"out": torch.ones(3, 5)}, rf"out: expected shape \(3, {8 // gate.parts}\)"),
        (x, {"out_dtype": torch.float16}, "out_dtype: expected torch.float32 or torch.float8_e4m3"),
        (
            x,
            {"out_dtype": E4M3, "out": torch.ones(3, 8 // gate.parts)},
            "out: expected dtype float8_e4m3fn, as out_dty",
        ),
        (x, {"out_scale": x[:, 0].clone()}, "out_scale is given, but out is not e4m3"),
        (x, {"out_dtype": E4M3, "out_scale": x[0]}, r"out_scale: expected shape \(3,\)"),
    ]
    if gate.parts == 2:
        cases.append((torch.ones(3, 7), {}, "x: expected an even last dimension"))
    for given, more, text in cases:
        with pytest.raises(TensorError, match=f"{name}: {text}"):
            gate(given, **more)
