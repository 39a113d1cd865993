"""softmax and log_softmax, and their gradients, against fp64: masks, strides, shared rows."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.ops import log_softmax, softmax
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.rowwise.softmax")
plans: Any = importlib.import_module("kernel_hub.ops.rowwise.softmax_plan")
SIZES = [1, 7, 8, 16, 127, 128, 129, 264, 1000, 1024, 4096, 5120]
LONG = [32768, 40000, 131072, 151936, 262144, 600000]
each_op = pytest.mark.parametrize("op", [softmax, log_softmax], ids=["softmax", "log_softmax"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Op = Callable[..., torch.Tensor]


class _Careful(torch.autograd.Function):
    """Of fp32, the logarithm or not: each number rounded to it, sums and powers from fp64.

    The rule's budget on the CPU, where torch's own errors are up to a hundred times a GPU's.
    """

    @staticmethod
    def forward(ctx: Any, s: torch.Tensor, is_log: bool) -> torch.Tensor:
        distances = s - s.amax(-1, keepdim=True)
        powers = distances.double().exp()
        total = powers.sum(-1, keepdim=True)
        out = distances - total.log().float() if is_log else powers.float() / total.float()
        ctx.save_for_backward(out)
        ctx.is_log = is_log
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        terms = dout.double() if ctx.is_log else dout.double() * out.double()
        total = terms.sum(-1, keepdim=True).float()
        found = dout - out.double().exp().float() * total if ctx.is_log else out * (dout - total)
        return torch.where(out == -torch.inf, 0.0, found) if ctx.is_log else found, None


def own_of(op: Op, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the rule allows twice the error of."""
    is_log = op is log_softmax
    if x.is_cuda or x.dtype != torch.float32:
        return reference.softmax(x, **options, is_log=is_log, dtype=x.dtype)
    s = x * options.get("scale", 1.0)
    if (mask := options.get("mask")) is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    found: torch.Tensor = _Careful.apply(s, is_log)
    return found


def check_rows(op: Op, out: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
    truth = reference.softmax(x, **options, is_log=op is log_softmax)
    check(out, truth, own_of(op, x, **options))


def check_gradient(op: Op, x: torch.Tensor, dout: torch.Tensor, **options: Any) -> None:
    """By autograd, against that of the reference."""
    ours = x.detach().requires_grad_()
    out = op(ours, **options)
    (dx,) = torch.autograd.grad(out, ours, dout)
    true, own = x.detach().double().requires_grad_(), x.detach().requires_grad_()
    made = reference.softmax(true, **options, is_log=op is log_softmax)
    (truth,) = torch.autograd.grad(made, true, dout.double())
    (budget,) = torch.autograd.grad(own_of(op, own, **options), own, dout)
    # The output that the gradient is made of was rounded once, in either.
    check(
        dx, truth, budget, atol={torch.float32: 1e-6}.get(x.dtype, 1e-3) * float(dout.abs().amax())
    )


def drawn_mask(way: Way, lot: random.Random, x: torch.Tensor) -> torch.Tensor | None:
    kind = lot.choice(["none", "truth", "added"])
    if kind == "none":
        return None
    leading = [lot.choice([1, n]) for n in x.shape[:-1]][lot.randrange(x.dim()) :]
    seed = lot.randrange(1 << 20)
    numbers = way.randn(*leading, x.shape[-1], seed=seed)
    if kind == "added":
        return (3 * numbers).to(x.dtype)
    truth = numbers > -0.3
    truth[..., 0] = True  # of a row of nothing all is nan: another test
    return truth


@each_op
@pytest.mark.parametrize("size", SIZES)
@each_dtype
def test_sizes(way: Way, dtype: torch.dtype, size: int, op: Op) -> None:
    for rows in [1, 3, 1000, 5000] if way.is_gpu else [1, 9] if size <= 1024 else [2]:
        x = 4 * way.randn(rows, size, dtype=dtype)
        out = Guarded((rows, size), dtype, way.device)
        assert op(x, out=out.tensor) is out.tensor
        out.check()
        check_rows(op, out.tensor, x)
        same_bits(op(x), out.tensor)
        check_rows(op, op(x, scale=-0.3), x, scale=-0.3)
        dout = way.randn(rows, size, dtype=dtype, seed=1)
        check_gradient(op, x, dout, scale=0.7)


@each_op
@pytest.mark.parametrize("seed", range(24))
def test_by_lot(way: Way, monkeypatch: pytest.MonkeyPatch, seed: int, op: Op) -> None:
    lot = random.Random(f"softmax {seed}")
    if not way.is_gpu:
        monkeypatch.setattr(plans, "_THREADS", (32, 32 * lot.choice([1, 2, 8])))
    most = 3000 if way.is_gpu else 700
    shape = [lot.choice([1, 2, 3, 5]) for _ in range(lot.randrange(4))]
    size = lot.choice([round(most ** lot.random()), 8 * round((most / 8) ** lot.random())])
    dtype = lot.choice(DTYPES)
    x = 3 * way.randn(*shape, size + lot.choice([0, 0, 1, 8]), dtype=dtype)[..., :size]
    if len(shape) > 1 and lot.random() < 0.4:
        x = x.transpose(0, 1)
    options = {"mask": drawn_mask(way, lot, x), "scale": lot.choice([1.0, 0.125, -2.0])}
    print(f"{x.shape} {x.stride()} {dtype} {options['scale']}")
    found = op(x, **options)
    check_rows(op, found, x, **options)
    inside = x.clone()
    assert op(inside, **options, out=inside) is inside
    same_bits(inside, found)
    check_gradient(op, x, way.randn(*x.shape, dtype=dtype, seed=1), **options)


@pytest.mark.parametrize("seed", range(12))
@each_op
def test_short_rows_by_lot(way: Way, seed: int, op: Op) -> None:
    """Of 16 bits, not whole vectors: four columns of a thread, a warp a row at most."""
    lot = random.Random(f"softmax of short rows {seed}")
    size = lot.choice([lot.randrange(1, 33), lot.randrange(1, 129), 128, 127, 129])
    shape = [lot.choice([1, 2, 7, 33]) for _ in range(lot.randrange(3))]
    dtype = lot.choice([torch.float16, torch.bfloat16])
    # Rows that begin at odd elements, so that those of whole vectors are read so too.
    x = 3 * way.randn(*shape, size + lot.choice([1, 3]), dtype=dtype)[..., 1 : size + 1]
    options = {"mask": drawn_mask(way, lot, x), "scale": lot.choice([1.0, 0.125, -2.0])}
    print(f"{x.shape} {dtype} {options['scale']}")
    out = Guarded((*shape, size), dtype, way.device)
    op(x, **options, out=out.tensor)
    out.check()
    check_rows(op, out.tensor, x, **options)
    assert op(x, **options, out=x) is x
    same_bits(x, out.tensor)


@pytest.mark.parametrize("threads", [64, 192])
@each_op
@each_dtype
def test_rows_in_registers(
    way: Way, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: Op, threads: int
) -> None:
    """Of whole vectors and of others, two a thread or one."""
    monkeypatch.setattr(plans, "choose", lambda *_: plans.Shape("vec", threads))
    module._plans.clear()
    for size in (threads * 16 - 8, threads * 16 - 17) if dtype.itemsize == 2 else (threads * 16,):
        x = 5 * way.randn(3, size, dtype=dtype)
        mask = way.randn(3, size, seed=2) > 0
        for options in ({}, {"mask": mask}, {"mask": way.randn(size, dtype=dtype), "scale": 2.0}):
            check_rows(op, op(x, **options), x, **options)
            check_gradient(op, x, way.randn(3, size, dtype=dtype, seed=1), **options)
    module._plans.clear()


@pytest.mark.parametrize("seed", range(12))
@each_op
def test_rows_read_twice_by_lot(
    way: Way, monkeypatch: pytest.MonkeyPatch, op: Op, seed: int
) -> None:
    """Kept in shared memory or not, by one block or several, of any alignment."""
    lot = random.Random(f"softmax, read twice {seed}")
    has_clusters = not way.is_gpu or torch.cuda.get_device_capability() >= (9, 0)
    blocks, threads = lot.choice([1, 2, 4, 8] if has_clusters else [1]), lot.choice([32, 64, 96])
    is_kept, dtype = lot.random() < 0.7, lot.choice(DTYPES)

    def shape(vecs: int, rows: int, held: Any, name: str, *_: Any) -> Any:
        each = -(-vecs // (blocks * threads))
        kept = (2 if name == plans.BACKWARD else 1) * 16 * each * threads * is_kept
        return plans.Shape("loop", threads, 1, blocks, kept)

    monkeypatch.setattr(plans, "choose_any", shape)
    module._plans.clear()
    size = lot.choice([1, 8, 40 * blocks, lot.randrange(2, 3000), 8 * lot.randrange(1, 400)])
    lead, rows = lot.randrange(9), lot.randrange(1, 4)
    numbers = 4 * way.randn(lead + rows * size + 5, dtype=dtype)
    x = numbers[lead : lead + rows * size].view(rows, size)
    options = {"mask": drawn_mask(way, lot, x), "scale": lot.choice([1.0, 0.5, -2.0])}
    print(f"{blocks} x {threads} {is_kept} {rows} x {size} + {lead} {dtype} {options['scale']}")
    out = Guarded((rows, size), dtype, way.device)
    check_rows(op, op(x, **options, out=out.tensor), x, **options)
    out.check()
    check_gradient(op, x, way.randn(rows, size, dtype=dtype, seed=1), **options)
    module._plans.clear()


@pytest.mark.parametrize("blocks", [1, 4])
@each_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kept_rows_of_any_numbers(
    way: Way, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: Op, blocks: int
) -> None:
    """Without a mask: the least numbers, of which masks are made, parts of -inf, no numbers."""
    if blocks > 1:
        needs_clusters(way)
    size = 1531
    kept = 16 * 64 * -(-(size // 8 + 2) // (64 * blocks))
    monkeypatch.setattr(plans, "choose_any", lambda *_: plans.Shape("loop", 64, 1, blocks, kept))
    module._plans.clear()
    module._plain_plans.clear()
    least = torch.finfo(dtype).min
    x = 3 * way.randn(9, size, dtype=dtype)
    x[1, : size // 2], x[2], x[3, 5:], x[4, 9], x[5, 700], x[6] = (
        -torch.inf, least, least, torch.nan, torch.inf, -torch.inf
    )  # fmt: skip
    x[7] *= 300
    x[8, 1::2] = least
    by_torch = torch.log_softmax if op is log_softmax else torch.softmax
    other = torch.empty(9 * size + 3, dtype=dtype, device=x.device)[3:].view(9, size)
    for scale in (1.0, 0.5, 3.0):
        own = by_torch(x.float() * scale, -1)
        for out in (None, other):
            found = op(x, scale=scale, out=out)
            assert torch.equal(found.isnan(), own.isnan())
            rows = [0, 1, 7] if scale > 1 else [0, 1, 2, 3, 7, 8]  # the least numbers overflow
            check_rows(op, found[rows], x[rows], scale=scale)
    # Of a large number times no power of two no part is left in its logarithm.
    x[0, 5] = 30000
    for scale in (10.1, 1.1):
        largest = op(x[:1], scale=scale)[0, 5]
        assert -1e-5 <= largest <= 1e-5 if op is log_softmax else largest == 1
    module._plans.clear()
    module._plain_plans.clear()


@pytest.mark.parametrize("size", [1, 6, 8, 17, 1031])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_any_alignment(way: Way, dtype: torch.dtype, size: int) -> None:
    """Nothing beyond a row is read or written, whatever vectors its ends share with others."""
    for lead in range(8):
        numbers = 3 * way.randn(lead + 3 * size + 9, dtype=dtype, seed=lead)
        numbers[:lead] = numbers[lead + 3 * size :] = torch.nan
        x = numbers[lead:][: 3 * size].view(3, size)
        other = torch.full_like(numbers, 7.0)
        out = other[(3 * lead) % 8 :][: 3 * size].view(3, size)
        mask = way.randn(3, size, seed=2) > 0
        mask[:, 0] = True
        for options in ({}, {"mask": mask}):
            found = softmax(x, **options)
            check_rows(softmax, found, x, **options)
            same_bits(softmax(x, **options, out=out), found)
            assert int((other == 7.0).sum()) == len(other) - 3 * size
        other.fill_(7.0)
        whole, out = found.clone(), x.copy_(found)  # each of dout, out and dx lies otherwise
        dout = way.randn(3 * size + 8, dtype=dtype, seed=3)[(5 * lead) % 8 :][: 3 * size]
        dout, dx = dout.view(3, size), other[(3 * lead) % 8 :][: 3 * size].view(3, size)
        into = module._cuda_gradient_into
        into(dout, out, 0.5, False, dx)
        assert int((other == 7.0).sum()) == len(other) - 3 * size
        same = torch.empty_like(whole)
        into(dout.clone(), whole, 0.5, False, same)
        torch.testing.assert_close(dx, same)  # sums of other vectors, in another order


def needs_clusters(way: Way) -> None:
    if way.is_gpu and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")


@pytest.mark.parametrize("blocks", [2, 4, 8])
@each_op
@each_dtype
def test_a_row_of_several_blocks(
    way: Way, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: Op, blocks: int
) -> None:
    needs_clusters(way)
    monkeypatch.setattr(plans, "choose", lambda vecs, *_: plans.Shape("vec", 64, 1, blocks))
    module._plans.clear()
    held = 4 if dtype == torch.float32 else 2  # vectors of a thread, of a gradient
    size = (64 * blocks * held - 5) * 16 // dtype.itemsize
    x = 5 * way.randn(3, 2, size, dtype=dtype)
    x[0, 0, : size // 2] = -torch.inf  # whole parts
    mask = way.randn(2, size, seed=2) > 0
    mask[1, size // 3 :] = False
    for options in ({}, {"mask": mask}, {"scale": 0.5}):
        check_rows(op, op(x, **options), x, **options)
    x[0, 0] = 3 * way.randn(size, dtype=dtype, seed=5)
    odd = x[..., 3 : 64 * blocks * 16 // dtype.itemsize - 8]  # of 16 bits, a vector a thread
    for options in ({}, {"mask": mask[:, : odd.shape[-1]]}):
        check_rows(op, op(odd, **options), odd, **options)
    check_gradient(op, x, way.randn(3, 2, size, dtype=dtype, seed=1), mask=mask)
    nothing = x.clone()
    nothing[1, 1], nothing[2, 0, 5] = -torch.inf, torch.nan
    found = op(nothing)
    assert found[1, 1].isnan().all() and found[2, 0].isnan().all()
    assert not found[0].isnan().any() and not found[2, 1].isnan().any()
    module._plans.clear()


@each_op
@pytest.mark.parametrize("size", LONG)
@each_dtype
def test_long_rows(way: Way, dtype: torch.dtype, size: int, op: Op) -> None:
    for rows in (1, 40) if way.is_gpu else (1,):
        x = 4 * way.randn(rows, size, dtype=dtype)
        check_rows(op, op(x), x)
        check_gradient(op, x, way.randn(rows, size, dtype=dtype, seed=1))


@pytest.mark.gpu
def test_back_to_back() -> None:
    """Blocks that wait for each other end, whatever runs beside them."""
    check_back_to_back("""
cases = [
    partial(op, randn(rows, size), scale=0.5)
    for op, rows, size in itertools.product(
        (ops.softmax, ops.log_softmax), (1, 40), (3000, 40000, 151936)
    )
]
""")


@each_op
@each_dtype
def test_numbers_that_are_none(way: Way, dtype: torch.dtype, op: Op) -> None:
    """As torch's: nan and +inf make a row nan, -inf alone too; large numbers do not overflow."""
    for size in (64, 67):
        x = way.randn(6, size, dtype=dtype)
        x[0], x[1, 3], x[2, 5], x[3, :9] = -torch.inf, torch.nan, torch.inf, -torch.inf
        x[4] *= 1000
        found, own = op(x), (torch.log_softmax if op is log_softmax else torch.softmax)(x, -1)
        assert torch.equal(found.isnan(), own.isnan())
        assert found[:3].isnan().all()
        check_rows(op, found[3:], x[3:])
        mask = torch.zeros(6, size, dtype=torch.bool, device=way.device)
        assert op(x, mask=mask).isnan().all()


@each_op
def test_a_gradient_as_torch_compile_sees_it(op: Op) -> None:
    x, mask = torch.randn(3, 40).requires_grad_(), torch.randn(40) > -1
    mask[0] = True

    def step(x: torch.Tensor) -> torch.Tensor:
        return op(x * 2, mask=mask, scale=0.5).square().sum()

    (eager,) = torch.autograd.grad(step(x), x)
    (traced,) = torch.autograd.grad(torch.compile(step, backend="aot_eager")(x), x)
    torch.testing.assert_close(traced, eager)


def test_opcheck(way: Way) -> None:
    x, mask = way.randn(3, 40), way.randn(40) > 0
    ops = torch.ops.kernel_hub
    for options in ((None, 1.0, False), (mask, 0.5, True)):
        torch.library.opcheck(ops.softmax.default, (x.clone().requires_grad_(), *options))
        torch.library.opcheck(ops.softmax_out.default, (x, *options, x.clone()))
    torch.library.opcheck(ops.softmax_backward.default, (x, x.softmax(-1), 1.0, False))
