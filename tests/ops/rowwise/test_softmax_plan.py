"""Which kernel of softmax takes which rows, by how many blocks; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import TensorError
from kernel_hub.ops import log_softmax, softmax
from kernel_hub.ops.core.device import SM90, PlannedGpu, pretend
from kernel_hub.ops.rowwise import softmax_plan as plans

X = torch.ones(2, 3, 8)


def test_plans() -> None:
    """Rows in registers, shared from where a block would be alone, read twice beyond 16 blocks."""
    entry = open_collection().manifest.cubins["softmax"]["sm90"]
    for name, function in entry.functions.items():
        assert function.launch is not None
        assert function.launch.shared_bytes == plans.SHARED_BYTES, name
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
    assert choose(32769, 64, 4, 66) == choose(4097, 64, 4, 0) == shape("loop", 640)
    vecs = [plans.edge_vecs(size, 8) for size in (1, 2, 539, 286, 50257)]
    assert vecs == [1, 2, 69, 37, 6283]
    # In columns: four or eight of a thread where rows are short, then a warp a row, then as few as
    # let all rows run at once.
    columns = plans.choose_columns
    assert columns(1, 10, 132) == shape("edges", 1, 128)
    assert columns(18, 384, 132) == shape("edges", 8, 16)
    assert columns(25, 40000, 132) == shape("edges", 4, 32)
    assert columns(77, 4096, 132) == shape("edges", 16, 8)
    assert columns(129, 8, 132) == columns(539, 11456, 132) == shape("warps", 32, 4)
    assert columns(640, 8, 132) == shape("warps", 32, 4)
    assert columns(641, 8, 132) == shape("edges", 96)
    assert columns(1883, 648, 132) == shape("edges", 160)
    assert columns(9999, 8, 132) == shape("edges", 864)
    assert choose(50257, 64, plans.COLUMNS, 132) == shape("vec", 320, 1, 8)
    # Read twice: shared until there are three blocks a multiprocessor, with room for two rows or
    # three parts.
    passes, gpu = plans.choose_passes, PlannedGpu(SM90, 132)
    assert passes(4000, 4096, 1, gpu) == shape("loop", 384, 1, 1, 67584)
    assert passes(6284, 635, 1, gpu) == shape("loop", 640, 1, 1, 102400)
    assert passes(16032, 512, 1, gpu) == shape("loop", 384, 1, 4, 67584)
    assert passes(18992, 105, 1, gpu) == shape("loop", 256, 1, 8, 40960)
    assert passes(6283, 4096, 2, gpu) == shape("loop", 320, 1, 4, 51200)
    assert passes(32776, 65, 2, gpu) == shape("loop", 352, 1, 16, 67584)
    assert passes(32776, 3, 2, gpu) == shape("loop", 544, 1, 16, 69632)
    assert passes(300000, 3, 2, gpu) == shape("loop", 640, 1, 16)  # no shared memory has that
    assert passes(6283, 64, 2, PlannedGpu((8, 0), 108)) == shape("loop", 640, 1, 1, 204800)
    assert passes(69, 5000, 1, PlannedGpu((8, 0), 108)) == shape("loop", 96, 1, 1, 1536)


def test_which_kernel_takes_which_rows() -> None:
    def name(op: str, size: int, rows: int = 64, dtype: Any = torch.bfloat16) -> tuple[str, int]:
        x = torch.empty(rows, size, dtype=dtype, device="meta")
        is_backward, token = op == plans.BACKWARD, "fp32" if dtype == torch.float32 else "bf16"
        kind, third = (f"backward_{token}", x) if is_backward else (token, None)
        a_thread = 2 if is_backward and token == "bf16" else 4
        launch = plans.plan(op, kind, [x, x, third], 0, a_thread)
        variant = launch.function.name.removeprefix(f"softmax_{kind}_")
        return variant, launch.options.get("cluster", (1,))[0]

    with pretend(PlannedGpu(SM90, 132)):
        assert name("softmax", 77) == name("softmax", 999) == ("edges", 1)
        assert name("softmax", 539) == ("warps", 1)
        # Many long ones are kept in shared memory, a block each.
        assert name("softmax", 8191, 64) == ("edges", 1)
        assert name("softmax", 8191, 2048) == ("loop", 1)
        assert name("softmax", 50257, 52) == ("edges", 8)
        # Rows whose blocks would not run all at once are kept in shared memory.
        assert name("softmax", 50257, 53) == ("loop", 8)
        assert name("softmax", 50272, 81) == ("vec", 4)
        assert name("softmax", 50272, 82) == ("loop", 8)
        assert name("softmax", 50272, 635) == ("loop", 1)
        assert name("softmax", 262208) == ("loop", 8)
        assert name("softmax", 50272, 635, torch.float32) == ("loop", 4)
        assert name("softmax", 50257, 635, torch.float32) == ("loop", 4)
        gradient = plans.BACKWARD
        assert name(gradient, 539) == name(gradient, 1883, 648) == ("vec", 1)
        assert name(gradient, 50257, 169) == ("loop", 4)
        assert name(gradient, 100352, 14) == ("vec", 16)
        assert name(gradient, 100352, 113) == ("loop", 8)
        assert name(gradient, 262208, 3) == ("loop", 16)
        assert name(gradient, 539, 64, torch.float32) == ("loop", 1)


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
