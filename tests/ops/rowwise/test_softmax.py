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

from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import TensorError
from kernel_hub.ops import log_softmax, softmax
from kernel_hub.ops.core.device import SM90, PlannedGpu, pretend
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


@pytest.mark.parametrize("body", ["vec", "edges", "kept", "loop", "scalar"])
@each_op
@each_dtype
def test_every_variant(
    way: Way, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: Op, body: str
) -> None:
    """A row is held in registers, by one block or several, or read twice."""
    shapes = {
        "vec": lambda vecs: plans.Shape("vec", 32 * -(-vecs // 64)),
        "edges": lambda vecs: plans.Shape("vec", 192),
        "kept": lambda vecs: plans.Shape("loop", 64),
        "loop": lambda vecs: plans.Shape("loop", 64),
        "scalar": lambda vecs: plans.Shape("scalar", 64),
    }
    monkeypatch.setattr(plans, "choose", lambda vecs, *_: shapes[body](vecs))
    monkeypatch.setattr(plans, "is_kept", lambda *_: body == "kept")
    monkeypatch.setattr(plans, "_LOOP_THREADS", 64)
    module._plans.clear()
    size = 1031 if body == "edges" else 1032
    x = 5 * way.randn(3, size, dtype=dtype)
    mask = way.randn(3, size, seed=2) > 0
    for options in ({}, {"mask": mask}, {"mask": way.randn(size, dtype=dtype), "scale": 2.0}):
        check_rows(op, op(x, **options), x, **options)
        check_gradient(op, x, way.randn(3, size, dtype=dtype, seed=1), **options)
    module._plans.clear()


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


@pytest.mark.parametrize("blocks", [2, 4])
@each_op
@each_dtype
def test_a_gradient_that_several_blocks_read_twice(
    way: Way, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: Op, blocks: int
) -> None:
    needs_clusters(way)
    monkeypatch.setattr(plans, "_PORTABLE", blocks)
    monkeypatch.setattr(plans, "_LOOP_THREADS", 64)
    monkeypatch.setattr(plans, "choose", lambda vecs, *_: plans.Shape("vec", 64, 1, 2 * blocks))
    module._plans.clear()
    size = 64 * 2 * blocks * 16 // dtype.itemsize - 8
    x = 3 * way.randn(40 if way.is_gpu else 2, size, dtype=dtype)
    check_gradient(op, x, way.randn(*x.shape, dtype=dtype, seed=1), scale=0.5)
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


def test_plans() -> None:
    """Rows in registers, shared from where a block would be alone, read twice beyond 16 blocks."""
    entry = open_collection().manifest.cubins["softmax"]["sm90"]
    for name, function in entry.functions.items():
        assert function.launch is not None
        may_share = name.endswith(("_vec", "_edges")) or "_backward_" in name
        assert function.launch.shared_bytes == plans.SHARED_BYTES * may_share
    choose, shape = plans.choose, plans.Shape
    assert choose(16, 10000, 4, 132) == shape("vec", 4, 32)
    assert choose(16, 10, 4, 132) == shape("vec", 16, 8)
    assert choose(512, 10000, 4, 132) == shape("vec", 128)
    assert choose(512, 10, 4, 132) == choose(2048, 10000, 4, 132) == shape("vec", 512)
    assert choose(4000, 4096, 4, 132) == shape("vec", 512, 1, 2)
    assert choose(4000, 4096, 4, 0) == shape("vec", 1024)
    assert choose(16032, 4096, 4, 132) == shape("vec", 512, 1, 8)
    assert choose(4096, 4, 4, 132) == shape("vec", 128, 1, 8)
    assert choose(32768, 64, 4, 132) == shape("vec", 512, 1, 16)
    assert choose(65536, 64, 4, 132) == shape("vec", 1024, 1, 16)
    assert choose(32768, 64, 4, 66) == shape("vec", 1024, 1, 8)
    assert choose(32769, 64, 4, 66) == choose(4097, 64, 4, 0) == shape("loop", 512)
    # A vector a thread: rows of 539 by three warps, of 50,257 by a cluster.
    vecs = [plans.edge_vecs(size, 8) for size in (1, 2, 539, 286, 50257)]
    assert vecs == [1, 2, 69, 37, 6283]
    assert choose(vecs[2], 11456, plans.EDGE_VECS, 132) == shape("vec", 96)
    assert choose(vecs[3], 694, plans.EDGE_VECS, 132) == shape("vec", 64, 2)
    assert choose(vecs[4], 64, plans.EDGE_VECS, 132) == shape("vec", 416, 1, 16)


def test_which_kernel_takes_which_rows() -> None:
    def name(op: str, kind: str, size: int, rows: int = 64, a_thread: int = 4) -> tuple[str, int]:
        x = torch.empty(rows, size, dtype=torch.bfloat16, device="meta")
        launch = plans.plan(op, kind, [x, x, None if op == "softmax" else x], 0, a_thread)
        return launch.function.name, launch.options.get("cluster", (1,))[0]

    with pretend(PlannedGpu(SM90, 132)):
        assert name("softmax", "bf16", 539) == ("softmax_bf16_edges", 1)
        assert name("softmax", "bf16", 50257) == ("softmax_bf16_edges", 16)
        assert name("softmax", "bf16", 140001) == ("softmax_bf16_scalar", 1)
        # Of many rows two a multiprocessor are kept in shared memory.
        assert name("softmax", "bf16", 50272, 132) == ("softmax_bf16_vec", 4)
        assert name("softmax", "bf16", 50272, 133) == ("softmax_bf16_loop", 1)
        assert name("softmax", "bf16", 57352, 133) == ("softmax_bf16_vec", 4)
        gradient = ("softmax_backward", "backward_bf16")
        assert name(*gradient, 539) == ("softmax_backward_bf16_scalar", 1)
        # Many rows that clusters of 16 would hold are read twice, few at a time.
        assert name(*gradient, 100352, 113, 2) == ("softmax_backward_bf16_loop", 8)
        assert name(*gradient, 100352, 16, 2) == ("softmax_backward_bf16_vec", 16)
        assert name(*gradient, 65536, 113, 2) == ("softmax_backward_bf16_vec", 8)


X = torch.ones(2, 3, 8)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"mask": X[0, 0] > 0, "scale": "1"}, "softmax: scale: expected"),
        ({"mask": X.double()}, "mask: expected dtype bool or float32"),
        ({"mask": X[..., :1]}, r"mask: expected a shape that broadcasts to \(2, 3, 8\)"),
        ({"mask": X[:, :2]}, "mask: expected a shape that broadcasts"),
        ({"mask": X[None]}, "mask: expected a shape that broadcasts"),
        ({"mask": X.mT.contiguous().mT}, "mask: expected a contiguous last dimension"),
        ({"out": X.half()}, "out: expected dtype float32"),
        ({"mask": X, "out": X}, "out"),
    ],
)
def test_refusals(options: Any, said: str) -> None:
    with pytest.raises(TensorError, match=said):
        softmax(X.clone(), **options)


def test_gradients_that_are_not_there() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(TensorError, match="softmax into out: x: requires grad"):
        softmax(x, out=X.clone())
    with pytest.raises(TensorError, match="mask: requires grad, but softmax has no backward"):
        softmax(X, mask=X.clone().requires_grad_())
    (dx,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(TensorError, match="double backward"):
        dx.sum().backward()
    # What sum() hands back has no rows in memory.
    assert torch.autograd.grad(log_softmax(x).sum(), x)[0].abs().amax() < 1e-6


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
