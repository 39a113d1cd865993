"""quantize_e4m3 against fp64: scales of each kind, found and given, in every layout."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from bits import same_bits
from quantised import check_quantised
from row_layouts import say_rows
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import linear, quantize_e4m3
from kernel_hub.testing import reference
from kernel_hub.testing.guard import Guarded

op: Any = importlib.import_module("kernel_hub.ops.rowwise.quantize_e4m3")
KINDS = ["tensor", "row", "1x128", "128x128"]
SIZES = [1, 7, 16, 127, 129, 256, 264, 1024, 4096, 16384, 40000]
each_kind = pytest.mark.parametrize("per", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check_found(out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, per: str) -> None:
    truth, largest = reference.quantize_e4m3(x, per)
    check_quantised(out, op._spread(scale, x, per).expand(x.shape), truth, largest)


@each_kind
@pytest.mark.parametrize("size", SIZES)
@each_dtype
def test_scales_that_are_found(way: Way, dtype: torch.dtype, size: int, per: str) -> None:
    for rows in [1, 3, 300, 1000] if way.is_gpu else [1, 3, 130] if size < 200 else [3]:
        x = way.randn(rows, size, dtype=dtype)
        x[-1] = 0
        out = Guarded((rows, size), torch.float8_e4m3fn, way.device)
        scale = Guarded(op._scale_shape(x, per), torch.float32, way.device)
        found = quantize_e4m3(x, per=per, out=out.tensor, out_scale=scale.tensor)
        assert found[0] is out.tensor and found[1] is scale.tensor
        out.check()
        scale.check("out_scale")
        check_found(*found, x, per)
        for again, first in zip(quantize_e4m3(x, per=per), found, strict=True):
            same_bits(again, first)
        # By the scales that were found, but for what the reciprocal rounds.
        given = quantize_e4m3(x, scale.tensor, per=per)
        truth, largest = reference.quantize_e4m3(x, per)
        spread = op._spread(scale.tensor, x, per).expand(x.shape)
        check_quantised(given, spread, truth, largest)


@pytest.mark.parametrize(("shape", "launches"), [((4, 64), 1), ((4, 5), 1), ((9, 8192), 2)])
def test_a_whole_that_a_block_holds_is_a_row_of_it(
    way: Way, shape: tuple[int, ...], launches: int
) -> None:
    """Where both lie in one piece: else blocks wait for each other."""
    x = way.randn(*shape, dtype=torch.float16)
    out, scale = op._new_out(x), op._new_scale(x, "tensor")
    assert len(op._plan(x, None, "tensor", out, scale, 0)) == launches
    wide = way.randn(shape[0], shape[1] + 8, dtype=torch.float16)[:, : shape[1]]
    assert len(op._plan(wide, None, "tensor", out, scale, 0)) == 2
    check_found(*quantize_e4m3(wide, per="tensor"), wide, "tensor")


@each_kind
@each_dtype
def test_layouts(way: Way, dtype: torch.dtype, per: str) -> None:
    for x in (
        way.randn(2, 3, 4, 64, dtype=dtype)[0],
        way.randn(4, 3, 264, dtype=dtype).transpose(0, 1),
        way.randn(2, 3, 416, dtype=dtype)[..., :264],
        way.randn(3, 136, dtype=dtype).expand(2, 3, 136),
        way.randn(3, 257, dtype=dtype)[:, 1:],
        way.randn(130, 264, dtype=dtype)[::2],
    ):
        out, scale = quantize_e4m3(x, per=per)
        check_found(out, scale, x, per)
        # Scales of another layout, found and given.
        moved = scale.new_empty(scale.mT.shape).mT if scale.dim() > 1 else scale.clone()
        again = quantize_e4m3(x, per=per, out_scale=moved)
        same_bits(again[0], out)
        same_bits(again[1].contiguous(), scale)
        check_found(quantize_e4m3(x, moved, per=per), moved, x, per)
    if per != "128x128":
        x = way.randn(264, dtype=dtype)
        check_found(*quantize_e4m3(x, per=per), x, per)


@each_kind
@each_dtype
def test_values_that_are_none(way: Way, dtype: torch.dtype, per: str) -> None:
    x = way.randn(130, 264, dtype=dtype)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out, scale = quantize_e4m3(x, per=per)
    spread = op._spread(scale, x, per).expand(x.shape)
    assert bool(spread[1, 3].isnan()) and bool(out[1, 3].float().isnan())
    assert not bool(spread[2, 5].isfinite())
    if per != "tensor":
        assert bool(spread[129].isfinite().all()) or per == "128x128"
    given = quantize_e4m3(x, torch.ones_like(scale), per=per)
    assert bool(given[1, 3].float().isnan()) and given[2, 5].float() == 448


@pytest.mark.parametrize("scale", [1.0, -3.0, 2.0**-9, 1e-30, 1e30], ids=str)
@each_dtype
def test_one_scale_that_is_given(way: Way, dtype: torch.dtype, scale: float) -> None:
    x, given = way.randn(5, 264, dtype=dtype) * 300, torch.tensor(scale, device=way.device)
    out = quantize_e4m3(x, given, per="tensor")
    wanted = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    step = (out.float() - wanted.float()).abs() / wanted.float().abs().clamp_min(2.0**-6)
    assert float(step.max()) <= 0.126 and float((step > 0).float().mean()) < 0.01
    same_bits(quantize_e4m3(x, given[None], per="tensor"), out)


@pytest.mark.parametrize("body", ["vec", "scalar"])
@each_dtype
def test_many_rows(
    way: Way, dtype: torch.dtype, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than gridDim.y can be, and more than the blocks that look for the largest; four a thread.
    monkeypatch.setattr(op.common, "MAX_GRID_Y", 2)
    monkeypatch.setattr(op, "_AT_ONCE", 8)
    x = way.randn(266, 2 * 256, dtype=dtype)[:, : 256 if body == "vec" else 255]
    for per in KINDS:
        check_found(*quantize_e4m3(x, per=per), x, per)


def test_rows_a_thread() -> None:
    """As many as leave threads for the whole GPU."""
    found = [op._rows_a_thread(rows, lanes, 132) for rows, lanes in (
        (1, 4608), (167, 4608), (64, 4608), (300, 64), (8192, 512)
    )]  # fmt: skip
    assert found == [1, 4, 2, 1, 4]


@pytest.mark.parametrize("rows", [1024, 8192])
@pytest.mark.parametrize("vecs", [40, 160, 1024])
@each_dtype
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, vecs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_rows(monkeypatch, op, rows)
    x = way.randn(3, 16 // dtype.itemsize * vecs, dtype=dtype)
    check_found(*quantize_e4m3(x), x, "row")


@each_kind
@each_dtype
def test_what_torch_computes_on_the_cpu(dtype: torch.dtype, per: str) -> None:
    x = torch.randn(131, 258).to(dtype)
    out, scale = quantize_e4m3(x, per=per)
    check_found(out, scale, x, per)
    same_bits(quantize_e4m3(x, scale, per=per), out)


@each_kind
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)])
def test_nothing_to_do(way: Way, shape: tuple[int, ...], per: str) -> None:
    assert quantize_e4m3(way.randn(*shape), per=per)[0].shape == shape


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
@each_kind
def test_the_scale_of_nothing(way: Way, shape: tuple[int, ...], per: str) -> None:
    """It is written where nothing shares it."""
    x = way.randn(*shape)
    scale = torch.full(op._scale_shape(x, per), -7.0, device=way.device)
    quantize_e4m3(x, per=per, out_scale=scale)
    assert bool((scale == torch.tensor(1e-12 / 448)).all())


@pytest.mark.parametrize("per", KINDS)
def test_given_scales_of_symbolic_sizes(per: str) -> None:
    x = torch.randn(2, 11)
    scale = quantize_e4m3(x, per=per)[1]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, scale: quantize_e4m3(x, scale, per=per), backend="eager", fullgraph=True,
        dynamic=True,
    )  # fmt: skip
    found, expected = compiled(x, scale), quantize_e4m3(x, scale, per=per)
    same_bits(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("per", ["tensor", "row", "1x128"])
def test_what_linear_takes(per: str) -> None:
    # On the CPU, both by torch.
    a, b = torch.randn(5, 256), torch.randn(130, 256)
    kinds = (per, "128x128" if per == "1x128" else per)
    (qa, a_scale), (qb, b_scale) = (
        quantize_e4m3(each, per=kind) for each, kind in zip((a, b), kinds, strict=True)
    )
    found = linear(qa, qb, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32)
    torch.testing.assert_close(found, a @ b.T, rtol=0.1, atol=3.0)


X = torch.ones(3, 8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, "x: expected a torch tensor"),
    ({"x": X.long()}, "x: expected dtype float16, bfloat16 or float32"),
    ({"per": "token"}, "per: expected 'tensor', 'row', '1x128' or '128x128'"),
    ({"x": X[0], "per": "128x128"}, "x: expected at least two dimensions, as per='128x128'"),
    ({"scale": X[:, 0], "out_scale": X[:, 0]}, "out_scale is given, but so is scale"),
    ({"scale": X[:, 0].half()}, "scale: expected dtype float32"),
    ({"scale": X[0]}, r"scale: expected shape \(3,\), as per='row'"),
    ({"scale": X[0, 0]}, r"scale: expected shape \(3,\), as per='row'"),
    ({"out_scale": X[:, :2], "per": "1x128"}, r"out_scale: expected shape \(3, 1\)"),
    ({"out": X}, "out: expected dtype float8_e4m3fn"),
    ({"out": X[:2].to(torch.float8_e4m3fn)}, r"out: expected shape \(3, 8\)"),
]


@pytest.mark.parametrize("arguments, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"quantize_e4m3: {text}"):
        quantize_e4m3(**{"x": X.clone(), **arguments})
