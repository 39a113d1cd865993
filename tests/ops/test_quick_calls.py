"""The quick way through eager calls of one tensor launches what the general way does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ways import launch_for_cpu

from kernel_hub import ops
from kernel_hub.ops.core import common
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.core.launch import forget_all

MODULES = ("rowwise.softmax", "rowwise.gated", "rowwise.layer_norm", "tokens.embedding")
ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": ops.softmax,
    "log_softmax": lambda x: ops.log_softmax(x, scale=0.5),
    "gelu": lambda x: ops.gelu(x, approximate="tanh"),
    "relu_squared": ops.relu_squared,
    "silu_and_mul": ops.silu_and_mul,
    "gelu_and_mul": ops.gelu_and_mul,
    "swigluoai_and_mul": ops.swigluoai_and_mul,
    "layer_norm": ops.layer_norm,
    "layer_norm, weight": lambda x: ops.layer_norm(x, x.new_ones(x.shape[-1])),
    "layer_norm, bias": lambda x: ops.layer_norm(
        x, None, torch.ones(x.shape[-1], device=x.device), deterministic="batch"
    ),
}  # fmt: skip
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(4, 512),
    "strided": lambda: torch.randn(4, 600)[:, :514],
    "turned": lambda: torch.randn(3, 5, 96).transpose(0, 1),
    "three": lambda: torch.randn(3, 5, 40),
}


def is_quick_anywhere(x: Any) -> bool:
    """`is_quick`, wherever the tensor is."""
    return type(x) in common.PLAIN_TYPES and not (x.requires_grad and torch.is_grad_enabled())


def launched(patch: pytest.MonkeyPatch, is_quick: Any, call: Callable[[], Any]) -> list[Any]:
    """What two calls launch, and the layouts of their results."""
    seen: list[Any] = []

    def told(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return (value.shape, value.stride(), value.dtype) if is_tensor else value

    def shipped(cubin: str, name: str) -> Any:
        return lambda *given, **how: seen.append((name, given[:4], [*map(told, given[4])], how))

    with patch.context() as inner, pretend(PlannedGpu((9, 0), 132)):
        forget_all()
        launch_for_cpu(inner)
        inner.setattr(common, "shipped", shipped)
        for name in MODULES:
            inner.setattr(importlib.import_module(f"kernel_hub.ops.{name}"), "_is_quick", is_quick)
        found = [told(call()) for _ in range(2)]
    forget_all()
    assert len(seen) == 2
    return [seen, found]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("op", ROWS)
def test_rows(monkeypatch: pytest.MonkeyPatch, op: str, tensor: str, dtype: torch.dtype) -> None:
    x = TENSORS[tensor]().to(dtype)
    ways = [
        launched(monkeypatch, way, lambda: ROWS[op](x))
        for way in (lambda _: False, is_quick_anywhere)
    ]
    assert ways[0] == ways[1]


@pytest.mark.parametrize("columns", [64, 60])
def test_embedding(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    ids, weight = torch.tensor([[1, 2], [3, 0]]), torch.randn(9, 64).half()[:, :columns]
    ways = [
        launched(monkeypatch, way, lambda: ops.embedding(ids, weight))
        for way in (lambda _: False, is_quick_anywhere)
    ]
    assert ways[0] == ways[1]


def test_what_is_not_quick() -> None:
    x = torch.randn(4, 8)
    assert not common.is_quick(x) and not common.is_quick(None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("op", ROWS)
def test_planned_calls_give_what_the_first_does(op: str, tensor: str, dtype: torch.dtype) -> None:
    """From the second call on C makes and launches; of another tensor, in another stream, too."""
    x = TENSORS[tensor]().to("cuda", dtype)
    first = ROWS[op](x)
    other = x.flip(0)
    for each in (x, x.clone(memory_format=torch.preserve_format), other, x):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            found = ROWS[op](each)
            torch.cuda.synchronize()
        right = first if each is not other else ROWS[op](other.clone())
        assert found.shape == first.shape and found.dtype == first.dtype
        assert torch.equal(found, right)
    assert ROWS[op](x).stride() == first.stride()
    with torch.inference_mode():
        assert ROWS[op](x).is_inference()


@pytest.mark.gpu
def test_the_second_call_is_planned() -> None:
    softmax: Any = importlib.import_module("kernel_hub.ops.rowwise.softmax")
    forget_all()
    x = torch.randn(3, 40, device="cuda")
    found = [ops.softmax(x), ops.softmax(x), ops.softmax(x, scale=0.5), ops.log_softmax(x)]
    assert [type(plan).__name__ for plan in softmax._plain_plans.values()] == [
        "builtin_function_or_method"
    ]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], torch.softmax(0.5 * x, -1))
    torch.testing.assert_close(found[3], torch.log_softmax(x, -1))
