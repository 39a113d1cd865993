"""layer_norm, and rms_norm with what may be joined to it, against fp64: parameters of each type,
residuals before and after, quantised rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from quantised import check_quantised_rows
from row_layouts import rows_of_64
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import layer_norm, rms_norm
from kernel_hub.ops.rowwise.norm_shapes import Joined, choose_joined
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

plans: Any = importlib.import_module("kernel_hub.ops.rowwise.norm")
HIDDEN_SIZES = [1, 7, 16, 127, 129, 256, 264, 1024, 4096, 5120, 16384, 40000]
NORMS = [(layer_norm, reference.layer_norm), (rms_norm, reference.rms_norm)]
each_norm = pytest.mark.parametrize("norm", NORMS, ids=["layer_norm", "rms_norm"])
Norm = tuple[Callable[..., Any], Callable[..., torch.Tensor]]  # the op and its reference
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def check_norm(norm: Norm, out: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
    check(out, norm[1](x, **options), norm[1](x, **options, dtype=x.dtype))


def check_quantised(norm: Norm, found: Any, x: torch.Tensor, **options: Any) -> None:
    check_quantised_rows(found[0], found[1], norm[1](x, **options))


def rows_for(way: Way, hidden: int) -> list[int]:
    if way.is_gpu:
        return [1, 3, 1000, 5000] if hidden <= 8192 else [1, 3, 1000]
    return [2] if hidden > 1024 else [1, 9]


@each_norm
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(way: Way, dtype: torch.dtype, hidden: int, norm: Norm) -> None:
    for rows in rows_for(way, hidden):
        x, bias = way.randn(rows, hidden, dtype=dtype) + 2, way.randn(hidden, dtype=dtype, seed=2)
        for kind in {dtype, torch.float32}:
            weight = way.randn(hidden, dtype=kind, seed=1)
            out = Guarded((rows, hidden), dtype, way.device)
            assert norm[0](x, weight, bias=bias.to(kind), out=out.tensor) is out.tensor
            out.check()
            eps = 1e-5 if norm[0] is layer_norm else 1e-6
            check_norm(norm, out.tensor, x, weight=weight, bias=bias.to(kind), eps=eps)
            moved = norm[0](x, weight, eps=1e-3, weight_offset=1.0)
            check_norm(norm, moved, x, weight=weight, eps=1e-3, weight_offset=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_without_parameters(way: Way, dtype: torch.dtype) -> None:
    x, bias = way.randn(3, 264, dtype=dtype), way.randn(264, dtype=dtype, seed=2)
    check_norm(NORMS[0], layer_norm(x), x)
    check_norm(NORMS[0], layer_norm(x, None, bias), x, bias=bias)
    check_norm(NORMS[0], layer_norm(x, None, bias.float()), x, bias=bias)


@each_norm
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_before_and_after(way: Way, dtype: torch.dtype, hidden: int, norm: Norm) -> None:
    for rows in rows_for(way, hidden):
        x, residual = (way.randn(rows, hidden, dtype=dtype, seed=seed) for seed in (0, 2))
        weight, eps = way.randn(hidden, seed=1), {"eps": 1e-5}
        out, residual_out = (Guarded((rows, hidden), dtype, way.device) for _ in range(2))
        outs = {"out": out.tensor, "residual_out": residual_out.tensor}
        norm[0](x, weight, residual=residual, **eps, **outs)
        out.check()
        residual_out.check("residual_out")
        same_bits(residual_out.tensor, x + residual, name="residual_out")
        check_norm(norm, out.tensor, x, weight=weight, residual=residual, **eps)
        options = {"weight": weight, "adds_after": True, **eps}
        after = norm[0](x, residual=residual, **options)
        check_norm(norm, after, x, residual=residual, **options)
        inside = residual.clone()
        norm[0](x, residual=inside, **options, out=inside)
        same_bits(inside, after)


@each_norm
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("kind", [E4M3, INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised(
    way: Way, dtype: torch.dtype, kind: torch.dtype, hidden: int, norm: Norm
) -> None:
    for rows in rows_for(way, hidden):
        x, residual = (way.randn(rows, hidden, dtype=dtype, seed=seed) for seed in (0, 2))
        x[-1] = residual[-1] = 0  # its norm is 0
        options = {"weight": way.randn(hidden, dtype=dtype, seed=1), "eps": 1e-5}
        out = Guarded((rows, hidden), kind, way.device)
        scale = Guarded((rows,), torch.float32, way.device)
        found = norm[0](x, **options, out=out.tensor, out_scale=scale.tensor)
        assert found[0] is out.tensor and found[1] is scale.tensor
        out.check()
        scale.check("out_scale")
        check_quantised(norm, found, x, **options)
        assert not found[0][-1].float().any()
        fresh = norm[0](x, **options, residual=residual, out_dtype=kind)
        same_bits(fresh[2], x + residual, name="residual_out")
        check_quantised(norm, fresh, x, **options, residual=residual)


@each_norm
@pytest.mark.parametrize(
    "vecs, rows", [(40, 1024), (100, 9000), (160, 1024), (160, 8192), (1024, 1024)]
)
@pytest.mark.parametrize("kind", [None, E4M3, INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, kind: Any, vecs: int, rows: int, norm: Norm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Several vectors a thread and rows a block, on rows that are no whole number of blocks.
    choose, hidden = plans.choose_joined, 16 // dtype.itemsize * vecs
    monkeypatch.setattr(plans, "choose_joined", lambda vecs, _, *how: choose(vecs, rows, *how))
    x = way.randn(3, hidden + 64, dtype=dtype)[:, :hidden]
    weight = way.randn(hidden, seed=1)
    options = {"weight": weight, "bias": weight, "eps": 1e-5}
    found = norm[0](x, **options, out_dtype=kind)
    if kind is None:
        check_norm(norm, found, x, **options)
    else:
        check_quantised(norm, found, x, **options)


@pytest.mark.parametrize("vecs", [40, 100, 160, 500])
@pytest.mark.parametrize("kind", [None, E4M3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rows_far_from_zero(
    way: Way, dtype: torch.dtype, kind: Any, vecs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both sums at once have lost the variance of such rows: beside near ones, and alone.
    choose, hidden = plans.choose_joined, 16 // dtype.itemsize * vecs
    monkeypatch.setattr(plans, "choose_joined", lambda vecs, _, *how: choose(vecs, 9000, *how))
    means = torch.tensor([0.0, 0.8, -3.0, 30.0, 1000.0], device=way.device)[:, None]
    x = (way.randn(5, hidden) + means).to(dtype)
    x[1, 0] = 200.0
    options = {"weight": way.randn(hidden, seed=1), "bias": way.randn(hidden, seed=2), "eps": 1e-5}
    found = layer_norm(x, **options, out_dtype=kind)
    if kind is None:
        check_norm(NORMS[0], found, x, **options)
    else:
        check_quantised(NORMS[0], found, x, **options)


def test_shapes_of_joined_norms() -> None:
    """A vector a thread where all rows run at once or a residual is read, else four."""

    def chosen(rows: int, vecs: int, batch_invariant: bool = False, **how: bool) -> Any:
        joined = Joined(**{**dict.fromkeys(Joined._fields, False), **how})
        return choose_joined(vecs, rows, joined, batch_invariant, 132)

    layer, quantised = {"waits": True}, {"waits": True, "is_quantised": True}
    for how in (layer, quantised, {}):
        assert chosen(2, 448, **how) == ("vec1", 448, 1)
        assert chosen(2, 448, True, **how) == chosen(9000, 448, True, **how) == ("vec2", 224, 1)
        assert chosen(5952, 672, **how) == ("vec4", 192, 1)
        assert chosen(41666, 96, **how) == ("vec4", 32, 4)
        assert chosen(9000, 64, **how) == ("vec2", 32, 4)
        assert chosen(3, 5000, **how) == ("loop", 512, 1)
        assert chosen(9000, 200, **how) == ("vec4", 64, 1)
    assert chosen(2000, 200, **layer) == ("vec4", 64, 1)
    assert chosen(1000, 200, **layer) == chosen(2000, 200) == ("vec2", 128, 1)
    assert chosen(700, 640, **layer) == chosen(700, 640, **quantised) == ("vec4", 160, 1)
    assert chosen(700, 640) == ("vec2", 320, 1)
    assert chosen(3201, 112, **layer) == ("vec4", 32, 4)
    after = {"has_residual": True, "adds_after": True}
    assert chosen(1200, 1024, **after) == ("vec1", 1024, 1)
    assert chosen(5952, 448, **after) == ("vec2", 224, 1)
    assert chosen(584, 448, **layer) == chosen(277, 448, **quantised) == ("vec2", 224, 1)
    assert chosen(1200, 448, has_residual=True, **layer) == ("vec1", 448, 1)
    assert chosen(1200, 448, has_residual=True, **quantised)[0] == "vec4"


@each_norm
@pytest.mark.parametrize("kind", [None, E4M3, INT8], ids=str)
def test_leading_dimensions_of_any_kind(way: Way, kind: Any, norm: Norm) -> None:
    options = {"weight": way.randn(64), "bias": way.randn(64, seed=1), "eps": 1e-5}
    for x in rows_of_64(way):
        found = norm[0](x, **options, out_dtype=kind)
        if kind is None:
            check_norm(norm, found, x, **options)
        else:
            assert found[1].shape == x.shape[:-1]
            check_quantised(norm, found, x, **options)


@each_norm
def test_large_means_and_values_that_are_none(way: Way, norm: Norm) -> None:
    x, options = way.randn(4, 256) + 1000, {"weight": way.randn(256), "eps": 1e-5}
    check_norm(norm, norm[0](x, **options), x, **options)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out = norm[0](x, **options)
    assert bool(out[1].isnan().all()) and not out[0].isnan().any()
    check_norm(norm, out[::3], x[::3], **options)
    for kind in (E4M3, INT8):  # int8 has no nan: the scale has it
        quantised, scale = norm[0](x, **options, out_dtype=kind)
        assert scale.isnan().tolist() == [False, True, True, False]
        check_quantised(norm, (quantised[::3], scale[::3]), x[::3], **options)


@each_norm
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)])
@pytest.mark.parametrize("kind", [None, E4M3], ids=str)
def test_nothing_to_do(way: Way, shape: tuple[int, ...], kind: Any, norm: Norm) -> None:
    x = way.randn(*shape)
    found = norm[0](x, way.randn(shape[-1]), residual=x, out_dtype=kind)
    assert len(found) == (2 if kind is None else 3) and found[0].shape == found[-1].shape == shape


@each_norm
def test_the_same_bits_every_time(way: Way, norm: Norm) -> None:
    x, weight = way.randn(33, 5120, dtype=torch.bfloat16), way.randn(5120)
    first = norm[0](x, weight, out_dtype=INT8)
    for _ in range(20 if way.is_gpu else 1):
        again = norm[0](x, weight, out_dtype=INT8)
        same_bits(again[0], first[0])
        same_bits(again[1], first[1])


@each_norm
@pytest.mark.parametrize("kind", [None, E4M3, INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_torch_computes_on_the_cpu(dtype: torch.dtype, kind: Any, norm: Norm) -> None:
    x, residual = (torch.randn(2, 5, 129).to(dtype) for _ in range(2))
    options = {"weight": torch.randn(129), "bias": torch.randn(129), "weight_offset": 1.0}
    for adds_after in (False, True) if kind is None else (False,):
        more = {"residual": residual, "adds_after": adds_after, "eps": 1e-5}
        found = norm[0](x, **options, **more, out_dtype=kind)
        if kind is not None:
            check_quantised(norm, found, x, **options, **more)
        else:
            check_norm(norm, found if adds_after else found[0], x, **options, **more)
        if not adds_after:
            same_bits(found[-1], x + residual, name="residual_out")


X, W = torch.ones(3, 8), torch.ones(8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, "x: expected a torch tensor"),
    ({"x": X.long()}, "x: expected dtype float16, bfloat16 or float32"),
    ({"weight": W[:7]}, r"weight: expected shape \(8,\)"),
    ({"weight": W.half()}, "weight: expected dtype float32"),
    ({"weight": W, "bias": W.half()}, "bias: expected dtype float32"),
    ({"residual": X[:2]}, r"residual: expected shape \(3, 8\)"),
    ({"eps": -1.0}, "eps: expected at least 0"),
    ({"adds_after": True}, "adds_after is set without residual"),
    ({"adds_after": 2.0, "residual": X}, "adds_after: expected True or False"),
    ({"residual": X, "adds_after": True, "out_dtype": E4M3}, "out_dtype: .* as adds_after is set"),
    ({"residual_out": X}, "residual_out is given without a residual added before"),
    ({"out_scale": W[:3]}, "out_scale is given, but out is not quantised"),
    ({"out_dtype": torch.float16}, "out_dtype: expected torch.float32 or torch.float8_e4m3fn or"),
    ({"out": X.to(E4M3), "out_dtype": INT8}, "out: expected dtype int8, as out_dtype"),
    ({"out_dtype": E4M3, "out_scale": W}, r"out_scale: expected shape \(3,\)"),
    ({"out_dtype": E4M3, "out_scale": torch.ones(6)[::2]}, "out_scale: expected a contiguous last"),
]


@each_norm
@pytest.mark.parametrize("arguments, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(arguments: dict[str, Any], text: str, norm: Norm) -> None:
    name = norm[0].__name__
    with pytest.raises(TensorError, match=f"{name}: {text}"):
        # A bias, so that rms_norm is the one that much is joined to.
        norm[0](**{"x": X.clone(), "weight": W, "bias": W, **arguments})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [7, 64, 4096])
def test_rms_norm_without_a_weight(way: Way, dtype: torch.dtype, hidden_size: int) -> None:
    """As with one of ones, to the bit; as torch's own."""
    x = way.randn(5, hidden_size, dtype=dtype)
    ones, zeros = torch.ones_like(x[0]), torch.zeros_like(x[0])
    found = rms_norm(x)
    same_bits(found, rms_norm(x, ones, bias=zeros))
    truth, own = (
        torch.nn.functional.rms_norm(each, (hidden_size,), eps=1e-6) for each in (x.double(), x)
    )
    check(found, truth, own)
    both = rms_norm(x, residual=x, bias=zeros)
    for each, other in zip(both, rms_norm(x, ones, residual=x, bias=zeros), strict=True):
        same_bits(each, other)


def test_both_dtypes_of_a_weight_are_named() -> None:
    for norm in (layer_norm, rms_norm):
        with pytest.raises(TensorError, match="weight: expected dtype bfloat16 or float32"):
            norm(torch.ones(3, 8).bfloat16(), torch.ones(8).half())


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_sum_is_refused_by_what_asked_for_it(norm: Any, dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    options: dict[str, Any] = {"residual": x, "adds_after": True}
    expected = r"expected dtype torch\.float32, as adds_after"
    with pytest.raises(TensorError, match=f"out_dtype: {expected}"):
        norm(x, weight, out_dtype=dtype, **options)
    with pytest.raises(TensorError, match=f" out: {expected}"):
        norm(x, weight, out=x.to(dtype), **options)
