"""What the ops refuse: one TensorError each, naming the argument, what was expected and found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import rms_norm, rope, silu_and_mul

X, WEIGHT = torch.ones(3, 8), torch.ones(8)
Q, K, COS, SIN = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 2, 8), torch.ones(6, 4), torch.ones(6, 4)
ROWS, FAR = torch.ones(2, 5, 8), torch.ones(2, 6, 8)[:, :5]  # of tables, one a token
OVERLAPPING = torch.ones(8).expand(3, 8)
# Four leading dimensions of which no two merge.
SCATTERED = torch.ones(5, 5, 5, 5, 8)[:2, :2, :2, :2]

REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: rms_norm(None, WEIGHT), ["x", "a torch tensor", "NoneType"]),
    (lambda: rms_norm([1.0], WEIGHT), ["x", "a torch tensor", "list"]),
    (lambda: rms_norm(X, 1.0), ["weight", "a torch tensor", "float"]),
    (lambda: rms_norm(X.double(), WEIGHT), ["x", "float16, bfloat16 or float32", "float64"]),
    (lambda: rms_norm(X.int(), WEIGHT), ["x", "float16, bfloat16 or float32", "int32"]),
    (lambda: rms_norm(torch.tensor(1.0), WEIGHT), ["x", "at least one dimension", "shape ()"]),
    (lambda: rms_norm(X, WEIGHT[:7]), ["weight", "shape (8,)", "shape (7,)"]),
    (lambda: rms_norm(X, WEIGHT[None]), ["weight", "shape (8,)", "shape (1, 8)"]),
    (lambda: rms_norm(X, WEIGHT.half()), ["weight", "dtype float32", "float16"]),
    (lambda: rms_norm(X, torch.ones(16)[::2]), ["weight", "contiguous last", "strides (2,)"]),
    (lambda: rms_norm(X.t(), WEIGHT[:3]), ["x", "contiguous last", "strides (1, 8)"]),
    (lambda: rms_norm(X, WEIGHT.to("meta")), ["weight", "device cpu", "on meta"]),
    (lambda: rms_norm(X, WEIGHT, residual=X[:2]), ["residual", "shape (3, 8)", "shape (2, 8)"]),
    (lambda: rms_norm(X, WEIGHT, residual=X.half()), ["residual", "float32", "float16"]),
    (lambda: rms_norm(X, WEIGHT, out=X[:2]), ["out", "shape (3, 8)", "shape (2, 8)"]),
    (lambda: rms_norm(X, WEIGHT, out=OVERLAPPING), ["out", "do not overlap", "strides (0, 1)"]),
    (lambda: rms_norm(X, WEIGHT, residual_out=X), ["residual_out", "without residual"]),
    (
        lambda: rms_norm(X, WEIGHT, residual=X, out=X, residual_out=X),
        ["out", "that of residual_out"],
    ),
    (lambda: rms_norm(X.clone().requires_grad_(), WEIGHT), ["x", "no backward", "x.detach()"]),
    (lambda: silu_and_mul(None), ["x", "a torch tensor", "NoneType"]),
    (lambda: silu_and_mul(torch.ones(3, 7)), ["x", "an even last dimension", "shape (3, 7)"]),
    (lambda: silu_and_mul(torch.tensor(1.0)), ["x", "at least one dimension"]),
    (lambda: silu_and_mul(torch.ones(3, 8).t()), ["x", "contiguous last", "strides (1, 8)"]),
    (lambda: silu_and_mul(torch.ones(3, 8), out=X), ["out", "shape (3, 4)", "shape (3, 8)"]),
    (lambda: silu_and_mul(torch.ones(3, 8).long()), ["x", "float16, bfloat16 or float32"]),
    (lambda: rope(Q[0, 0], K, COS, SIN), ["q", "(..., seqlen, num_heads, head_dim)"]),
    (lambda: rope(Q, K[:1], COS, SIN), ["k", "shape (2, 5, 2, 8)", "shape (1, 5, 2, 8)"]),
    (lambda: rope(Q, K[..., :4], COS, SIN), ["k", "shape (2, 5, 2, 8)", "shape (2, 5, 2, 4)"]),
    (lambda: rope(Q, K.half(), COS, SIN), ["k", "dtype float32", "float16"]),
    (lambda: rope(Q, K, COS[0], SIN), ["cos", "(max_position, rotary_dim // 2)", "shape (4,)"]),
    (
        lambda: rope(Q, K, COS[None], SIN[None]),
        ["cos", "(2 or 1, 5, rotary_dim or half of it)", "(1, 6, 4)"],
    ),
    (
        lambda: rope(Q, K, ROWS, COS),
        ["sin", "(2 or 1, 5, rotary_dim or half of it)", "shape (6, 4)"],
    ),
    (lambda: rope(Q, K, ROWS, ROWS[:1]), ["sin", "shape and strides of cos", "(1, 5, 8)"]),
    (lambda: rope(Q, K, ROWS, ROWS, torch.arange(5)), ["positions", "None where cos has a row"]),
    (lambda: rope(Q, K, FAR, FAR), ["cos", "evenly spaced rows", "strides (48, 8, 1)"]),
    (lambda: rope(Q, K, None, SIN), ["cos", "a torch tensor", "NoneType"]),
    (lambda: rope(Q, K, COS[:4], SIN[:4]), ["cos", "at least seqlen = 5", "shape (4, 4)"]),
    (lambda: rope(Q, K, COS, SIN[:5]), ["sin", "shape (6, 4)", "shape (5, 4)"]),
    (lambda: rope(Q, K, COS, SIN.half()), ["sin", "dtype", "float16"]),
    (lambda: rope(Q, K, COS, torch.ones(6, 8)[:, :4]), ["sin", "strides of cos", "(8, 1)"]),
    (lambda: rope(Q, K, COS, SIN, rotary_dim=6), ["cos", "shape (6, 3)", "shape (6, 4)"]),
    (lambda: rope(Q, K, COS, SIN, rotary_dim=7), ["rotary_dim", "even number", "7"]),
    (lambda: rope(Q, K, torch.ones(6, 5), torch.ones(6, 5)), ["rotary_dim", "head_dim = 8", "10"]),
    (lambda: rope(Q, K, COS, SIN, torch.arange(4)), ["positions", "shape (5,)", "shape (4,)"]),
    (lambda: rope(Q, K, COS, SIN, torch.ones(5)), ["positions", "int32 or int64", "float32"]),
    (lambda: rope(Q, K, COS, SIN, [0] * 5), ["positions", "a torch tensor", "list"]),
    (lambda: rope(Q, K, COS, SIN, torch.arange(10)[::2]), ["positions", "contiguous"]),
    (lambda: rope(Q, K, COS, SIN, out_q=K), ["out_q", "shape (2, 5, 4, 8)", "(2, 5, 2, 8)"]),
    (lambda: rope(Q, K, COS, SIN, out_k=K[:1].expand(2, 5, 2, 8)), ["out_k", "do not overlap"]),
]


@pytest.mark.parametrize("call, parts", REFUSED, ids=[" ".join(parts) for _, parts in REFUSED])
def test_refused(call: Callable[[], object], parts: list[str]) -> None:
    try:
        with pytest.raises(TensorError) as caught:
            call()
    finally:
        X.requires_grad_(False)
    for part in parts:
        assert part in str(caught.value)


def test_too_many_separate_strides(way: Way) -> None:
    scattered = SCATTERED.to(way.device)
    weight = WEIGHT.to(way.device)
    big = torch.ones(5, 5, 5, 5, 8, device=way.device)[:2, :2, :2, :2]
    for call in (lambda: rms_norm(big, weight), lambda: silu_and_mul(big)):
        with pytest.raises(TensorError, match=r"call \.contiguous\(\) first"):
            call()
    assert rms_norm(scattered.contiguous(), weight).shape == scattered.shape


def test_inference_mode_and_no_grad_are_no_obstacle() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    with torch.no_grad():
        out = rms_norm(X, weight)
    with torch.inference_mode():
        assert torch.equal(rms_norm(X, weight), out)
    with pytest.raises(TensorError, match="weight: requires grad"):
        rms_norm(X, weight)


@pytest.mark.gpu
def test_devices_must_agree() -> None:
    x, weight = X.cuda(), WEIGHT.cuda()
    rms_norm(x, weight)  # the plan is made; the next calls go the quick way
    for call in (
        lambda: rms_norm(x, WEIGHT),
        lambda: rms_norm(X, weight),
        lambda: rms_norm(x, weight, out=torch.ones(3, 8)),
        lambda: rms_norm(x, weight.half()),
        lambda: silu_and_mul(x, out=torch.ones(3, 4)),
        lambda: rope(Q.cuda(), K, COS, SIN),
        lambda: rope(Q.cuda(), K.cuda(), COS, SIN),
        lambda: rope(Q.cuda(), K.cuda(), COS.cuda(), SIN.cuda(), torch.arange(5)),
    ):
        with pytest.raises(TensorError, match=r"device|dtype"):
            call()
