"""pad_input and unpad_input against rows copied sequence by sequence, bit for bit."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import cu_seqlens, pad_input, unpad_input
from kernel_hub.testing import reference_tokens
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.tokens.pad_input")
BOUNDS = [[0], [0, 0], [0, 5], [0, 3, 3, 7], [2, 2, 4, 9], [0, 1, 2, 3, 300, 300]]
BYTES = torch.uint8


def rows_of(way: Way, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits."""
    generator = torch.Generator().manual_seed(len(shape))
    raw = (*shape[:-1], shape[-1] * dtype.itemsize)
    made = torch.randint(0, 2 if dtype == torch.bool else 256, raw, generator=generator)
    return made.to(BYTES).view(dtype).to(way.device)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    same_bits(found.cpu().contiguous().view(BYTES), wanted.contiguous().view(BYTES))


def check(
    way: Way, bounds: list[int], seqlen: int, total: int, row: tuple[int, ...] = (4,),
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    table = torch.tensor(bounds, dtype=torch.int32, device=way.device)
    packed = rows_of(way, total, *row, dtype=dtype)
    padded = rows_of(way, len(bounds) - 1, seqlen, *row, dtype=dtype)
    for op, x, size, shape in (
        (pad_input, packed, seqlen, padded.shape), (unpad_input, padded, total, packed.shape),
    ):  # fmt: skip
        wanted = getattr(reference_tokens, op.__name__)(x.cpu().view(BYTES), bounds, size)
        out = Guarded(tuple(shape), dtype, way.device)
        assert op(x, table, size, out=out.tensor) is out.tensor
        out.check()
        equal(out.tensor, wanted)
        equal(op(x, table, size), wanted)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_bounds(way: Way, bounds: list[int]) -> None:
    for seqlen in (0, 1, 4, 9):
        for more in (0, 3):
            check(way, bounds, seqlen, bounds[-1] + more)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("row", [(1,), (3,), (16,), (2, 40), (5000,)], ids=str)
def test_rows_of_any_kind(way: Way, dtype: torch.dtype, row: tuple[int, ...]) -> None:
    check(way, [0, 3, 3, 7], 4, 8, row, dtype)


@pytest.mark.parametrize("row", [(18,), (44,), (1700,)], ids=str)
def test_several_units_a_thread(
    way: Way, monkeypatch: pytest.MonkeyPatch, row: tuple[int, ...]
) -> None:
    """As of many rows, which are then no whole number of blocks."""
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        check(way, [0, 30, 30, 37], 35, 39, row, dtype)


def test_threads_of_rows() -> None:
    """Few rows have all the threads there are, many as few as read a row at once."""
    choose = module._choose
    assert choose(1, 1, 132) == (1, 1)
    assert choose(160, 100, 132) == (160, 1)
    assert choose(160, 1024, 132) == (80, 3)
    assert choose(200, 36864, 132) == (56, 4)
    assert choose(5000, 36864, 132) == (256, 1)
    assert choose(3, 100000, 132) == (1, 256)


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for _ in range(60 if way.is_gpu else 15):
        batch, longest = lot.randrange(1, 40), lot.choice((1, 5, 60 if way.is_gpu else 9))
        bounds = [0]
        for _ in range(batch):
            bounds.append(bounds[-1] + lot.choice((0, 1, longest, lot.randrange(longest + 1))))
        seqlen, total = lot.randrange(longest + 3), bounds[-1] + lot.choice((0, 0, 5))
        row = (lot.choice((1, 8, 33, 64, 3072 if way.is_gpu else 300)),)
        print(bounds, seqlen, total, row)
        check(way, bounds, seqlen, total, row, lot.choice((torch.half, torch.float32)))


def test_by_torch_on_the_cpu() -> None:
    way = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
    for bounds in BOUNDS:
        check(way, bounds, 4, bounds[-1] + 2)
        check(way, bounds, 3, bounds[-1], (2, 3), torch.float8_e4m3fn)


def test_strided_batches(way: Way) -> None:
    table = torch.tensor([0, 3, 5], dtype=torch.int32, device=way.device)
    wide, tall = way.randn(2, 6, 24), way.randn(9, 16)
    view, rows = wide[:, 1:5, 8:24], tall[::2]
    equal(unpad_input(view, table, 6), reference_tokens.unpad_input(view.cpu(), [0, 3, 5], 6))
    equal(pad_input(rows, table, 4), reference_tokens.pad_input(rows.cpu(), [0, 3, 5], 4))
    turned = wide.transpose(0, 1)[:2]  # rows of a batch further apart than batches
    equal(unpad_input(turned, table, 6), reference_tokens.unpad_input(turned.cpu(), [0, 3, 5], 6))


def test_there_and_back_from_lengths(way: Way) -> None:
    lengths = torch.tensor([3, -1, 0, 5], dtype=torch.int32, device=way.device)
    x, bounds = way.randn(8, 40), cu_seqlens(lengths)
    same_bits(unpad_input(pad_input(x, bounds, 5), bounds, 8), x)


@pytest.mark.parametrize("compiles", [False, True])
def test_gradients(way: Way, compiles: bool) -> None:
    table = torch.tensor([0, 3, 3, 6], dtype=torch.int32, device=way.device)
    packed, padded = way.randn(7, 5), way.randn(3, 2, 5)
    for op, other, x, size in (
        (pad_input, unpad_input, packed, 2), (unpad_input, pad_input, padded, 7),
    ):  # fmt: skip
        call: Any = op
        if compiles:
            call = torch.compile(
                lambda x, n, op=op: op(x, table, n), fullgraph=True, backend="aot_eager"
            )
            call = lambda x, table, n, call=call: call(x, n)  # noqa: E731
        x.requires_grad_()
        out = call(x, table, size)
        dout = way.randn(*out.shape, seed=3)
        wanted = other(dout, table, x.shape[1 if op is unpad_input else 0])
        for each in (dout, dout.transpose(0, 1).contiguous().transpose(0, 1)):
            (found,) = torch.autograd.grad(out, x, each, retain_graph=True)
            same_bits(found, wanted)
        (expanded,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        same_bits(expanded, other(torch.ones_like(out), table, x.shape[op is unpad_input]))


def test_gradients_of_gradients() -> None:
    table = torch.tensor([0, 2, 5], dtype=torch.int32)
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: pad_input(x * x, table, 2), (x,))
    assert torch.autograd.gradgradcheck(lambda y: unpad_input(y * y, table, 6), (y,))


X, CU = torch.ones(5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
BATCH = torch.ones(2, 3, 8)
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (pad_input, (None, CU, 3), {}, "pad_input: x: expected a torch tensor"),
    (pad_input, (X, CU.long(), 3), {}, "pad_input: cu_seqlens: expected dtype int32"),
    (pad_input, (X, CU[:0], 3), {}, r"pad_input: cu_seqlens: expected shape \(1,\)"),
    (pad_input, (X, CU, -1), {}, "pad_input: seqlen: expected at least 0"),
    (pad_input, (X.expand(3, 5, 8)[..., ::2], CU, 3), {}, "pad_input: x: expected contiguous rows"),
    (pad_input, (X, CU, 3), {"out": BATCH[:, :2]}, r"pad_input: out: expected shape \(2, 3, 8\)"),
    (pad_input, (X.clone().requires_grad_(), CU, 3), {"out": BATCH}, "into out: x: requires grad"),
    (unpad_input, (X[0], CU, 5), {}, r"unpad_input: x: expected shape \(batch, seqlen, ...\)"),
    (unpad_input, (BATCH, CU[:2], 5), {}, r"unpad_input: cu_seqlens: expected shape \(3,\)"),
    (unpad_input, (BATCH, CU, 2.5), {}, "unpad_input: total: expected a whole number"),
    (unpad_input, (BATCH, CU, 5), {"out": X.half()}, "unpad_input: out: expected dtype float32"),
]


@pytest.mark.parametrize("op, args, more, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_refused(op: Any, args: tuple[Any, ...], more: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=text):
        op(*args, **more)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_registered_ops_pass_opcheck(device: str) -> None:
    registered, table = torch.ops.kernel_hub, CU.to(device)
    x, batch = torch.randn(5, 8).to(device), torch.randn(2, 3, 8).to(device)
    for op, arguments in (
        (registered.pad_input, (x.clone().requires_grad_(), table, 3)),
        (registered.pad_input_out, (x, table, 3, batch.clone())),
        (registered.unpad_input, (batch.clone().requires_grad_(), table, 6)),
        (registered.unpad_input_out, (batch, table, 5, x.clone())),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back(way: Way) -> None:
    check_back_to_back(
        "table = torch.tensor([0, 60, 200], dtype=torch.int32, device='cuda')\n"
        "cases = [partial(ops.pad_input, randn(200, 4096), table, n) for n in (1, 99, 140)]"
    )
