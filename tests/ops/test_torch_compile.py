"""The ops inside torch.compile, torch.export and FakeTensorMode, and as registered ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled_calls import DEVICES, Call, check_compiled, each_call
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_hub.errors import TensorError
from kernel_hub.ops import batched_matmul, grouped_linear, linear, rms_norm, rope, silu_and_mul


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


UTILS = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
)  # fmt: skip


def inputs(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    return {
        "x": randn(2, 5, 64), "r": randn(2, 5, 64), "w": randn(64),
        "q": randn(2, 5, 4, 64), "k": randn(2, 5, 2, 64), "cos": randn(9, 16), "sin": randn(9, 16),
        "weight": randn(64, 64), "experts": randn(3, 64, 64),
        "offsets": torch.tensor([0, 4, 4, 10], dtype=torch.int32, device=device),
    }  # fmt: skip


def norm(t: dict[str, torch.Tensor]) -> Any:
    return rms_norm(t["x"], t["w"], weight_offset=1.0) + 1


def norm_residual(t: dict[str, torch.Tensor]) -> Any:
    return rms_norm(t["x"], t["w"], residual=t["r"])


def norm_in_place(t: dict[str, torch.Tensor]) -> Any:
    x, r = t["x"] + 0, t["r"] * 1
    out, residual_out = rms_norm(x, t["w"], residual=r, out=x, residual_out=r)
    return out, residual_out, x + r


def norm_of_an_input_in_place(t: dict[str, torch.Tensor]) -> Any:
    rms_norm(t["x"], t["w"], out=t["x"])
    return t["x"].sum(), t["x"]


def silu(t: dict[str, torch.Tensor]) -> Any:
    out = torch.empty(2, 5, 32, dtype=t["x"].dtype, device=t["x"].device)
    return silu_and_mul(t["x"]) * 2, silu_and_mul(t["x"], out=out)


def rotate(t: dict[str, torch.Tensor]) -> Any:
    positions = torch.arange(5, device=t["q"].device).flip(0)
    return (
        *rope(t["q"], t["k"], t["cos"], t["sin"]),
        *rope(t["q"], t["k"], t["cos"], t["sin"], positions, interleaved=True),
    )


def rotate_in_place(t: dict[str, torch.Tensor]) -> Any:
    q, k = t["q"].clone(), t["k"].clone()
    rope(q, k, t["cos"], t["sin"], out_q=q, out_k=k)
    return q, k


def multiply(t: dict[str, torch.Tensor]) -> Any:
    out = linear(t["x"], t["weight"], t["w"], activation="gelu", out_dtype=torch.float32)
    return out + 1, linear(t["x"], t["weight"], residual=t["r"])


def multiply_in_place(t: dict[str, torch.Tensor]) -> Any:
    r = t["r"] + 0
    return linear(t["x"], t["weight"], residual=r, out=r), r + 1


def experts(t: dict[str, torch.Tensor]) -> Any:
    rows, out = t["x"].view(10, 64), torch.empty_like(t["x"]).view(10, 64)
    grouped_linear(rows, t["experts"], t["offsets"], activation="silu", out=out)
    return out * 2, grouped_linear(rows, t["experts"], t["offsets"], bias=t["experts"][:, 0])


def heads(t: dict[str, torch.Tensor]) -> Any:
    q = t["q"].transpose(1, 2)
    out = torch.empty(2, 4, 5, 64, dtype=q.dtype, device=q.device)
    return batched_matmul(q, t["weight"], out=out) + 1, batched_matmul(
        q, q, out_dtype=torch.float32
    )


FUNCTIONS = [norm, norm_residual, norm_in_place, norm_of_an_input_in_place, silu, rotate,
             rotate_in_place, multiply, multiply_in_place, experts, heads]  # fmt: skip


@each_call(FUNCTIONS)
def test_compiled_equals_eager(function: Call, backend: str, device: str) -> None:
    check_compiled(function, inputs, backend, device)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shapes_compile_once(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda x, w: rms_norm(x, w), fullgraph=True, dynamic=True, backend=counter
    )
    weight = torch.randn(64, device=device)
    for rows in (3, 4, 17):
        x = torch.randn(rows, 64, device=device)
        assert torch.equal(compiled(x, weight), rms_norm(x, weight))
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
def test_export(device: str, strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, device=device), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return silu_and_mul(rms_norm(x, self.weight))

    layer, x = Layer(), torch.randn(3, 64, device=device)
    batch = torch.export.Dim("batch", max=1024)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {0: batch}}, strict=strict)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"kernel_hub.rms_norm.default", "kernel_hub.silu_and_mul.default"} <= called
    other = torch.randn(7, 64, device=device)
    assert torch.equal(program.module()(other), layer(other))


@pytest.mark.parametrize("device", DEVICES)
def test_registered_ops_pass_opcheck(device: str) -> None:
    t, ops = inputs(device), torch.ops.kernel_hub
    x, r, w = t["x"], t["r"], t["w"]
    rotary = (t["q"], t["k"], t["cos"], t["sin"], None, False, 32)
    added = (
        x,
        w,
        w,
        r,
        1e-5,
        0.0,
        True,
        False,
        torch.empty_like(x),
        *(x.new_empty(0) for _ in "ab"),
    )
    ids = torch.zeros(5, dtype=torch.int64, device=device)
    half, scale, oai = x[..., :32].contiguous(), torch.ones(2, 5, device=device), (1.7, 7.0, True)
    for op, arguments in (
        (ops.rms_norm, (x, w, 1e-6, 0.0)),
        (ops.rms_norm_out, (x, w, 1e-6, 0.0, torch.empty_like(x))),
        (ops.rms_norm_residual, (x, r, w, 1e-6, 0.0)),
        (ops.rms_norm_residual_out, (x, r, w, 1e-6, 0.0, x.clone(), r.clone())),
        (ops.layer_norm, (x, w, None, r, 1e-5, 0.0, False, False, torch.float8_e4m3fn)),
        (ops.layer_norm_out, added),
        (ops.rms_norm_joined, (x, w, w, None, 1e-5, 0.0, False, True, torch.int8)),
        (ops.rms_norm_joined_out, added),
        (ops.silu_and_mul, (x,)),
        (ops.silu_and_mul_out, (x, x.new_empty(2, 5, 32))),
        (ops.silu_and_mul_e4m3, (x,)),
        (ops.silu_and_mul_e4m3_out, (x, half.to(torch.float8_e4m3fn), scale.clone())),
        (ops.gelu, (x, True)),
        (ops.gelu_out, (x, False, r.clone())),
        (ops.gelu_e4m3, (x, False)),
        (ops.gelu_e4m3_out, (x, True, x.to(torch.float8_e4m3fn), scale.clone())),
        (ops.relu_squared, (x,)),
        (ops.relu_squared_out, (x, r.clone())),
        (ops.relu_squared_e4m3, (x,)),
        (ops.relu_squared_e4m3_out, (x, x.to(torch.float8_e4m3fn), scale.clone())),
        (ops.gelu_and_mul, (x, True)),
        (ops.gelu_and_mul_out, (x, False, half.clone())),
        (ops.gelu_and_mul_e4m3, (x, False)),
        (ops.gelu_and_mul_e4m3_out, (x, True, half.to(torch.float8_e4m3fn), scale.clone())),
        (ops.swigluoai_and_mul, (x, *oai)),
        (ops.swigluoai_and_mul_out, (x, *oai, half.clone())),
        (ops.swigluoai_and_mul_e4m3, (x, *oai)),
        (ops.swigluoai_and_mul_e4m3_out, (x, *oai, half.to(torch.float8_e4m3fn), scale.clone())),
        (ops.quantize_e4m3, (x, "1x128")),
        (ops.quantize_e4m3_out, (x, "row", x.to(torch.float8_e4m3fn), scale.clone())),
        (ops.quantize_e4m3_given, (x, scale, "row")),
        (ops.quantize_e4m3_given_out, (x, scale, "row", x.to(torch.float8_e4m3fn))),
        (
            ops.sample,
            (
                x[0],
                None,
                None,
                scale[0] / 2,
                *[None] * 11,
                0.0,
                ids.clone(),
                scale[0].clone(),
                ids.new_empty(len(ids), 3),
                scale.new_empty(len(ids), 3),
            ),
        ),
        (ops.sample_slice, (x[0], 5, *[None] * 10, 0.0, ids.new_empty(len(ids), 522).int())),
        (
            ops.verify_draft,
            (
                ids[None],
                x[:1].repeat(1, 6, 1)[:, : len(ids) + 1],
                *[None] * 4,
                ids.new_empty(1, len(ids) + 1),
                ids.new_empty(1, dtype=torch.int32),
            ),
        ),
        (ops.linear, (x, t["weight"], w, 1, r, False, True, torch.bfloat16)),
        (ops.linear_out, (x, t["weight"], w, 2, None, True, False, torch.empty_like(x))),
        (
            ops.grouped_linear,
            (r.view(10, 64), t["experts"], t["offsets"], None, 2, True, torch.float32),
        ),
        (
            ops.grouped_linear_out,
            (
                r.view(10, 64),
                t["experts"],
                t["offsets"],
                None,
                0,
                False,
                torch.empty_like(r).view(10, 64),
            ),
        ),
        (ops.batched_matmul, (x, t["weight"], torch.bfloat16)),
        (ops.batched_matmul_out, (x, t["weight"], torch.empty_like(x))),
        (ops.rope, rotary),
        (ops.rope_out, (*rotary, t["q"].clone(), t["k"].clone())),
    ):
        # Whether e4m3 was written torch cannot compare.
        is_e4m3 = any(
            isinstance(given, torch.Tensor) and given.dtype == torch.float8_e4m3fn
            for given in arguments
        )
        torch.library.opcheck(op.default, arguments, test_utils=UTILS[is_e4m3:])


def test_fake_and_meta_tensors_give_shapes_only() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 64, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(64, device="cuda", dtype=torch.bfloat16)
        out, residual_out = rms_norm(x, w, residual=x)
        assert out.device.type == "cuda" and residual_out.shape == x.shape
        assert silu_and_mul(x).shape == (4, 32)
        with pytest.raises(TensorError, match="weight"):
            rms_norm(x, torch.empty(3, device="cuda", dtype=torch.bfloat16))
    meta = torch.empty(4, 64, device="meta")
    assert rms_norm(meta, meta[0]).is_meta
    assert silu_and_mul(meta).shape == (4, 32)


def test_strides_of_the_result_are_known_to_the_tracer() -> None:
    x, w = torch.randn(4, 3, 64).transpose(0, 1), torch.randn(64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = rms_norm(mode.from_tensor(x), mode.from_tensor(w))
    assert fake.stride() == rms_norm(x, w).stride()


def test_gradients_are_refused_while_tracing_too() -> None:
    x, w = torch.randn(3, 64, requires_grad=True), torch.randn(64)
    with pytest.raises(Exception, match="no backward"):
        torch.compile(lambda a, b: rms_norm(a, b), fullgraph=True, backend="eager")(x, w)
