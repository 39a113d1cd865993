"""rms_norm and rms_norm + residual against fp64, in every layout the op accepts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from bits import same_bits
from emulated import written_just_ahead
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import rms_norm
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.rowwise.rms_norm")
HIDDEN_SIZES = [1, 7, 16, 127, 128, 129, 199, 256, 264, 1024, 2048, 4096, 5120, 8192, 16384, 40000]


def check_rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> None:
    options = {"residual": residual, "eps": eps, "weight_offset": weight_offset}
    truth = reference.rms_norm(x, weight, **options)
    check(out, truth, reference.rms_norm(x, weight, **options, dtype=x.dtype))


def rows_for(way: Way, hidden: int) -> list[int]:
    if way.is_gpu:
        return [1, 3, 1000, 5000] if hidden <= 8192 else [1, 3, 1000]
    return [1, 3] if hidden > 1024 else [1, 3, 300 if hidden == 264 else 9]


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(way: Way, dtype: torch.dtype, hidden: int) -> None:
    for rows in rows_for(way, hidden):
        x, weight = way.randn(rows, hidden, dtype=dtype), way.randn(hidden, dtype=dtype, seed=1)
        out = Guarded((rows, hidden), dtype, way.device)
        result = rms_norm(x, weight, out=out.tensor)
        assert result is out.tensor
        out.check()
        check_rms_norm(result, x, weight)
        fresh = rms_norm(x, weight, 1e-3, weight_offset=1.0)
        assert fresh.shape == x.shape and fresh.dtype == dtype
        check_rms_norm(fresh, x, weight, eps=1e-3, weight_offset=1.0)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual(way: Way, dtype: torch.dtype, hidden: int) -> None:
    for rows in rows_for(way, hidden):
        x, residual = (way.randn(rows, hidden, dtype=dtype, seed=seed) for seed in (0, 2))
        weight = way.randn(hidden, dtype=dtype, seed=1)
        out, residual_out = (Guarded((rows, hidden), dtype, way.device) for _ in range(2))
        rms_norm(x, weight, residual=residual, out=out.tensor, residual_out=residual_out.tensor)
        out.check()
        residual_out.check("residual_out")
        same_bits(residual_out.tensor, x + residual, name="residual_out")
        check_rms_norm(out.tensor, x, weight, residual=residual)
        fresh, fresh_residual = rms_norm(x, weight, residual=residual)
        same_bits(fresh, out.tensor)
        same_bits(fresh_residual, residual_out.tensor)


@pytest.mark.parametrize("vecs, rows", [(40, 1024), (160, 1024), (160, 8192), (1024, 1024)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, vecs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several vectors a thread and rows a block, on rows that are no whole number of blocks.
    choose, hidden = module._choose, 16 // dtype.itemsize * vecs
    monkeypatch.setattr(module, "_choose", lambda vecs, _, *how: choose(vecs, rows, *how))
    wide = way.randn(3, hidden + 64, dtype=dtype)
    residual = way.randn(3, hidden, dtype=dtype, seed=2)
    weight = way.randn(hidden, dtype=dtype, seed=1)
    for x in (wide[:, :hidden], wide[:, :hidden].contiguous()):
        out, residual_out = (Guarded((3, hidden), dtype, way.device) for _ in range(2))
        rms_norm(x, weight, out=out.tensor)
        out.check()
        check_rms_norm(out.tensor, x, weight)
        outs = {"out": out.tensor, "residual_out": residual_out.tensor}
        rms_norm(x, weight, residual=residual, **outs)
        out.check()
        residual_out.check("residual_out")
        same_bits(residual_out.tensor, x + residual, name="residual_out")
        check_rms_norm(out.tensor, x, weight, residual=residual)


@pytest.mark.parametrize("hidden", [8, 1000, 4096, 8192, 8200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_is_ready(way: Way, dtype: torch.dtype, hidden: int) -> None:
    """The same bits; the weight alone is read before the launch ahead has ended."""
    weight = way.randn(hidden, dtype=dtype, seed=1)
    offset: dict[str, Any] = {"weight_offset": 1.0}
    for rows in (1, 5, 257) if way.is_gpu else (1, 5):
        x = way.randn(rows, hidden, dtype=dtype)
        expected, out = rms_norm(x, weight, **offset), Guarded((rows, hidden), dtype, way.device)
        same_bits(rms_norm(x, weight, **offset, weights_ready=True), expected)
        rms_norm(x, weight, **offset, weights_ready=True, out=out.tensor)
        out.check()
        same_bits(out.tensor, expected)
        same_bits(rms_norm(x, weight, **offset), expected, name="its own plan")
        if way.is_gpu:
            continue
        for written, is_early in ((x, False), (weight, dtype != torch.float32 and hidden <= 8192)):
            with written_just_ahead(written, torch.full_like(written, 9.0)):
                same_bits(rms_norm(x, weight, **offset), expected)
                found = rms_norm(x, weight, **offset, weights_ready=True)
                assert torch.equal(found, expected) != is_early
    soon: Any = "soon"
    with pytest.raises(TensorError, match="weights_ready: expected True or False"):
        rms_norm(x, weight, weights_ready=soon)


def test_few_rows_are_those_that_run_at_once() -> None:
    """Then each thread has one vector; more of them whatever the rows where bits are the same."""
    choose = module._choose
    for residual in (False, True):
        assert choose(160, 616, residual, False, 132) == ("vec1", 160, 1)
        assert choose(128, 1056, residual, False, 132) == ("vec1", 128, 1)
        assert choose(64, 616, residual, False, 132)[0] == ("vec1" if residual else "vec2")
        for rows in (1, 257, 100000):
            assert choose(160, rows, residual, True, 132)[:2] == ("vec1", 160)
    assert choose(160, 1000, False, False, 132) == ("vec2", 96, 1)
    assert choose(160, 1000, True, False, 132) == ("vec4", 64, 2)
    assert choose(257, 300, False, False, 132)[0] == "vec2"
    assert choose(640, 1025, False, False, 132) == ("vec2", 320, 1)
    assert choose(836, 1025, False, False, 132) == ("vec4", 224, 1)
    assert choose(836, 1025, False, True, 132)[0] == choose(836, 1, False, True, 132)[0] == "vec2"
    assert choose(5000, 300, True, False, 132) == ("loop", 1024, 1)
    # Some wide rows with a residual: as many threads as read at once.
    assert choose(640, 403, True, False, 132) == ("vec1", 640, 1)
    assert choose(512, 300, True, False, 132) == ("vec2", 256, 1)
    assert choose(512, 300, True, True, 132) == choose(512, 1, True, True, 132)
    assert choose(512, 1025, True, False, 132)[0] == "vec4"


@pytest.mark.parametrize("hidden", [16, 129, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(way: Way, dtype: torch.dtype, hidden: int) -> None:
    x, residual = (way.randn(5, hidden, dtype=dtype, seed=seed) for seed in (0, 2))
    weight = way.randn(hidden, dtype=dtype, seed=1)
    expected = rms_norm(x, weight)
    inside = Guarded((5, hidden), dtype, way.device)
    inside.fill(x)
    rms_norm(inside.tensor, weight, out=inside.tensor)
    inside.check()
    same_bits(inside.tensor, expected)

    expected, expected_residual = rms_norm(x, weight, residual=residual)
    rms_norm(x, weight, residual=residual, out=x, residual_out=residual)
    same_bits(x, expected)
    same_bits(residual, expected_residual)


@pytest.mark.parametrize("row_stride, shift", [(136, 0), (129, 0), (136, 1), (128, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_unaligned_rows(
    way: Way, dtype: torch.dtype, row_stride: int, shift: int
) -> None:
    shape = (3, 128)
    weight = way.randn(128, dtype=dtype, seed=1)
    tensors = [
        Guarded(shape, dtype, way.device, row_stride=row_stride, shift=shift) for _ in range(4)
    ]
    x, residual, out, residual_out = (guarded.tensor for guarded in tensors)
    x.copy_(way.randn(*shape, dtype=dtype))
    residual.copy_(way.randn(*shape, dtype=dtype, seed=2))
    rms_norm(x, weight, residual=residual, out=out, residual_out=residual_out)
    for guarded in tensors:
        guarded.check()
    same_bits(residual_out, x + residual)
    check_rms_norm(out, x, weight, residual=residual)
    fresh = rms_norm(x, weight)
    check_rms_norm(fresh, x, weight)


def test_unaligned_weight(way: Way) -> None:
    x = way.randn(3, 128)
    weight = way.randn(129)[1:]
    check_rms_norm(rms_norm(x, weight), x, weight)


def test_heads_of_a_packed_projection(way: Way) -> None:
    # The q-norm of a model: (tokens, heads, head_dim) inside a wider row does not collapse.
    packed = way.randn(5, 6 * 128, dtype=torch.bfloat16)
    q = packed[:, : 4 * 128].unflatten(-1, (4, 128))
    weight = way.randn(128, dtype=torch.bfloat16, seed=1)
    out = rms_norm(q, weight)
    check_rms_norm(out, q, weight)
    before = packed[:, 4 * 128 :].clone()
    rms_norm(q, weight, out=q)
    same_bits(q.contiguous(), out.contiguous())
    same_bits(packed[:, 4 * 128 :], before)


def test_leading_dimensions_of_any_kind(way: Way) -> None:
    weight = way.randn(64, seed=1)
    for x in (
        way.randn(64),
        way.randn(2, 3, 4, 64),
        way.randn(4, 3, 64).transpose(0, 1),
        way.randn(1, 3, 1, 64),
        way.randn(3, 64).expand(2, 3, 64),
    ):
        out = rms_norm(x, weight)
        assert out.shape == x.shape
        check_rms_norm(out, x, weight)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (2, 0, 64)])
def test_nothing_to_do(way: Way, shape: tuple[int, ...]) -> None:
    x, weight = way.randn(*shape), way.randn(shape[-1])
    assert rms_norm(x, weight).shape == x.shape
    out, residual_out = rms_norm(x, weight, residual=x)
    assert out.shape == residual_out.shape == x.shape


@pytest.mark.parametrize("hidden", [129, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_inf_and_large_values(way: Way, dtype: torch.dtype, hidden: int) -> None:
    x, weight = way.randn(6, hidden, dtype=dtype), way.randn(hidden, dtype=dtype, seed=1)
    x[0, 5] = float("nan")
    x[1, 7] = float("inf")
    x[2] *= 100
    x[3] = 0
    x[4] = torch.finfo(dtype).tiny
    out = rms_norm(x, weight)
    # As the formula has it: a nan makes its row nan; an inf makes its row zero and itself nan.
    assert bool(out[0].isnan().all())
    assert bool(out[1, 7].isnan()) and int(out[1].isnan().sum()) == 1
    check_rms_norm(out[2:], x[2:], weight)


def test_the_same_bits_every_time(way: Way) -> None:
    x, weight = way.randn(17, 5120, dtype=torch.bfloat16), way.randn(5120, dtype=torch.bfloat16)
    first = rms_norm(x, weight)
    for _ in range(20 if way.is_gpu else 1):
        same_bits(rms_norm(x, weight), first)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, hidden = (1 << 31) // 8192 + 5, 8192
    x = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16).normal_()
    weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
    out = rms_norm(x, weight)
    for part in (slice(0, 4), slice(rows - 8, rows)):
        check_rms_norm(out[part], x[part], weight)
    out.fill_(float("nan"))
    rms_norm(x, weight, residual=out.zero_(), out=out, residual_out=x)
    check_rms_norm(out[-4:], x[-4:], weight)


@pytest.mark.gpu
def test_on_another_stream_and_in_a_graph() -> None:
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    expected = rms_norm(x, weight)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        same_bits(rms_norm(x, weight), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm(x, weight)
    out.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(out, expected)
