"""Norms and activations by lot: any columns, strides, offsets and dtypes, results in place or of 8
bits. Rows end where memory does, and what lies between them stays as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from arena import Arena
from quantised import check_quantised_rows
from rows_in_memory import Rows
from ways import DTYPES, Way

from kernel_hub import ops
from kernel_hub.testing.compare import check

LOTS = 60
_QUANTISED = (torch.float8_e4m3fn, torch.int8)
_COLUMNS = (1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 1000, 1023,
            1024, 1025, 2047, 2048, 2049, 4095, 4096, 4104)  # fmt: skip


class Call:
    """What a call of the lot is made of."""

    def __init__(self, memory: Arena, lot: random.Random, way: Way) -> None:
        self.memory, self.lot, self.way = memory, lot, way
        self.dtype = lot.choice(DTYPES)
        self.size = lot.choice(_COLUMNS) if lot.random() < 0.8 else lot.randrange(1, 6000)
        self.leading = lot.choice(((), (1,), (3,), (5,), (2, 3), (3, 1)))
        self.seed = lot.randrange(1 << 20)
        self.written: list[Rows] = []

    def rows(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Rows:
        return Rows(self.memory, self.lot, name, shape, dtype or self.dtype)

    def given(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Rows:
        self.seed += 1
        made = self.rows(name, shape, dtype)
        made.tensor.copy_(self.way.randn(*shape, seed=self.seed).to(made.tensor.dtype))
        return made

    def to_write(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        self.written.append(self.rows(name, shape, dtype))
        return self.written[-1].tensor

    def may_be(self, *names: str) -> list[bool]:
        return [self.lot.random() < 0.5 for _ in names]


def check_out(call: Call, out: torch.Tensor, scale: Any, truth: torch.Tensor, slack: float) -> None:
    """`truth` in fp64 of sums that fp32 has; slack: of what is computed in fp32."""
    if scale is None:
        check(out, truth, truth.to(out.dtype), atol=slack, name="out")
    else:
        check_quantised_rows(out, scale, truth, slack)
    for each in call.written:
        each.check_around()


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("lot", range(LOTS))
def test_norms(way: Way, op: str, lot: int) -> None:
    draw = random.Random(f"{op} {lot}")
    with Arena(way.device, draw) as memory:
        call = Call(memory, draw, way)
        shape, dtype = (*call.leading, call.size), call.dtype
        x = call.given("x", shape)
        parameters = draw.choice((dtype, torch.float32))
        has_weight, has_bias, adds, after = call.may_be("weight", "bias", "residual", "after")
        weight = call.given("weight", shape[-1:], parameters).tensor if has_weight else None
        bias = call.given("bias", shape[-1:], parameters).tensor if has_bias else None
        residual = call.given("residual", shape) if adds else None
        out_dtype = draw.choice((dtype, dtype, *_QUANTISED)) if not (adds and after) else dtype
        options: dict[str, Any] = {"weight_offset": draw.choice((0.0, 1.0)), "eps": 1e-5}
        s = x.tensor.double()
        if residual is not None:
            options |= {"residual": residual.tensor, "adds_after": after}
            if not after:
                s = (x.tensor.float() + residual.tensor.float()).to(dtype).double()
                at = draw.choice((None, residual, x))
                room = call.to_write("residual_out", shape) if at is None else at.tensor
                options["residual_out"] = room
                call.written += [] if at is None else [at]
        normed = s - s.mean(-1, keepdim=True) if op == "layer_norm" else s
        normed = normed / (normed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        factor = (1.0 if weight is None else weight.double()) + options["weight_offset"]
        truth = normed * factor + (0.0 if bias is None else bias.double())
        if residual is not None and after:
            truth = truth + residual.tensor.double()
        if out_dtype == dtype and options.get("residual_out") is not x.tensor:
            in_place = draw.random() < 0.3
        else:
            in_place = False
        out = x.tensor if in_place else call.to_write("out", shape, out_dtype)
        call.written += [x] if in_place else []
        scale = None
        if out_dtype in _QUANTISED:
            scale = call.to_write("out_scale", shape[:-1], torch.float32)
            options["out_scale"] = scale
        print(op, dtype, shape, x.tensor.stride(), options.keys(), out_dtype, in_place)
        getattr(ops, op)(x.tensor, weight, bias=bias, out=out, **options)
        slack = 1e-5 * max(1.0, float(truth.abs().max()))
        check_out(call, out, scale, truth, slack)
        if "residual_out" in options:
            assert torch.equal(options["residual_out"].double(), s)


def activations(op: str, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """In fp64."""
    if op == "relu_squared":
        return x.clamp_min(0).square()
    if op == "gelu":
        return torch.nn.functional.gelu(x, **options)
    if op == "swigluoai_and_mul":
        pairs = options["interleaved"]
        gate, up = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = x.chunk(2, -1)
    if op == "silu_and_mul":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, **options) * up


@pytest.mark.parametrize(
    "op", ["relu_squared", "gelu", "silu_and_mul", "gelu_and_mul", "swigluoai_and_mul"]
)
@pytest.mark.parametrize("lot", range(LOTS))
def test_activations(way: Way, op: str, lot: int) -> None:
    draw = random.Random(f"{op} {lot}")
    with Arena(way.device, draw) as memory:
        call = Call(memory, draw, way)
        shape, dtype, is_gated = (*call.leading, call.size), call.dtype, op.endswith("and_mul")
        x = call.given("x", (*call.leading, call.size * (1 + is_gated)))
        x.tensor.mul_(draw.choice((1, 3)))
        options: dict[str, Any] = {}
        if "gelu" in op:
            options["approximate"] = draw.choice(("none", "tanh"))
        if op == "swigluoai_and_mul":
            options["interleaved"] = draw.random() < 0.5
        truth = activations(op, x.tensor.double(), options)
        slack = 3e-6 * max(1.0, float(truth.abs().max()))
        if "gelu" in op and dtype != torch.float32:  # by a polynomial (activations.cuh)
            slack = 2e-5 * max(1.0, float(x.tensor.abs().max()))
        in_place, is_e4m3 = not is_gated and draw.random() < 0.3, draw.random() < 0.3
        is_e4m3 = is_e4m3 and not in_place
        out_dtype = torch.float8_e4m3fn if is_e4m3 else dtype
        out = x.tensor if in_place else call.to_write("out", shape, out_dtype)
        call.written += [x] if in_place else []
        scale = call.to_write("out_scale", shape[:-1], torch.float32) if is_e4m3 else None
        print(op, dtype, shape, x.tensor.stride(), options, out_dtype, in_place)
        getattr(ops, op)(x.tensor, **options, out=out, **({"out_scale": scale} if is_e4m3 else {}))
        check_out(call, out, scale, truth, slack)
