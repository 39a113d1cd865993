"""A layer of experts under torch.compile, and the registered ops by torch's own checks."""

from __future__ import annotations

import pytest
import torch

from kernel_hub.ops import grouped_linear, moe_combine, moe_permute, moe_route, silu_and_mul

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UTILS = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
)  # fmt: skip


def inputs(device: str) -> tuple[torch.Tensor, ...]:
    """x, logits, the weights of the experts' layers."""
    generator = torch.Generator().manual_seed(0)
    shapes = (10, 64), (10, 8), (8, 32, 64), (8, 64, 16)
    return tuple(
        torch.randn(shape, generator=generator).to(torch.bfloat16).to(device) for shape in shapes
    )


def layer(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    weights, experts = moe_route(logits, 2, renormalise=True)
    rows, offsets, row_id_map = moe_permute(x, experts, 8)
    inner = silu_and_mul(grouped_linear(rows, gate_up, offsets))
    out = torch.empty_like(x)
    moe_combine(grouped_linear(inner, down, offsets), row_id_map, weights, residual=x, out=out)
    return out + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_equals_eager(backend: str, device: str) -> None:
    given = inputs(device)
    found = torch.compile(layer, fullgraph=True, backend=backend)(*given)
    torch.testing.assert_close(found, layer(*given), rtol=0, atol=0)


@pytest.mark.gpu
def test_a_captured_layer_follows_its_inputs() -> None:
    given, other = inputs("cuda"), inputs("cuda")[1].flip(0, 1)
    expected = [layer(*given), layer(given[0], other, *given[2:])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*given)
    for logits, right in zip((given[1].clone(), other), expected, strict=True):
        given[1].copy_(logits)
        graph.replay()
        torch.testing.assert_close(out, right, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_registered_ops_pass_opcheck(device: str) -> None:
    ops, (x, logits, *_) = torch.ops.kernel_hub, inputs(device)
    places = torch.arange(20, dtype=torch.int32, device=device).view(10, 2) % 8
    weights, offsets = torch.rand(10, 2, device=device), places.new_empty(9)
    rule = (2, 1, True, 4, 2, 2.5, True)
    bias = torch.rand(8, device=device)
    for op, arguments in (
        (ops.moe_route, (logits, None, 2, 0, True, 1, 1, 1.0, False)),
        (ops.moe_route_out, (logits, bias, *rule, weights.clone(), places.clone())),
        (ops.moe_permute, (x, places, 8)),
        (ops.moe_permute_out, (x, places, 8, x.new_empty(20, 64), offsets, places.clone())),
        (ops.moe_combine, (x, places, weights, None)),
        (ops.moe_combine_out, (x, places, weights, x, x.clone())),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=UTILS)
