"""flash_attention inside torch.compile, torch.export and FakeTensorMode, and what autograd sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_calls import DEVICES, Call, check_compiled, each_call
from emulated import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_hub.errors import TensorError
from kernel_hub.ops import flash_attention, flash_attention_qkvpacked


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(device: str, requires_grad: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)
        return x.requires_grad_(requires_grad)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    return {
        "q": randn(2, 9, 4, 32), "k": randn(2, 12, 2, 32), "v": randn(2, 12, 2, 32),
        "qkv": randn(2, 9, 3, 2, 32), "bounds_q": int32(0, 4, 9), "bounds_k": int32(0, 2, 12),
        "pages": randn(4, 8, 2, 32).detach(), "table": int32(3, 1, 0, 2).view(2, 2),
        "lengths": int32(9, 16), "slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], device=device),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device).bfloat16(),
    }  # fmt: skip


def dense(t: dict[str, torch.Tensor]) -> Any:
    return flash_attention(t["q"], t["k"], t["v"], causal=True, return_lse=True, deterministic=True)


def heads_first(t: dict[str, torch.Tensor]) -> Any:
    q, k, v = (t[name].transpose(1, 2) * 1 for name in "qkv")
    return flash_attention(
        q, k, v, layout="bhsd", window_size=(3, 2), softcap=2.0, alibi_slopes=t["slopes"],
        deterministic=True,
    ) + 1  # fmt: skip


def narrow(t: dict[str, torch.Tensor]) -> Any:
    q, k, v = (t[name].transpose(1, 2) * 1 for name in "qkv")
    out = flash_attention(q, k, v[..., :16], layout="bhsd", causal=True, deterministic=True)
    return torch.cat((out, out), -1)


def varlen(t: dict[str, torch.Tensor]) -> Any:
    return flash_attention(
        t["q"][0], t["k"][0], t["v"][0], cu_seqlens_q=t["bounds_q"], cu_seqlens_k=t["bounds_k"],
        causal=True, max_seqlen_q=5, sinks=t["sinks"], deterministic=True,
    )  # fmt: skip


def packed(t: dict[str, torch.Tensor]) -> Any:
    return flash_attention_qkvpacked(t["qkv"], causal=True, deterministic=True)


def paged(t: dict[str, torch.Tensor]) -> Any:
    return flash_attention(
        t["q"].detach(), t["pages"], t["pages"], block_table=t["table"], cache_seqlens=t["lengths"],
        return_lse=True,
    )  # fmt: skip


def into(t: dict[str, torch.Tensor]) -> Any:
    out = torch.zeros_like(t["q"])
    flash_attention(t["q"].detach(), t["k"].detach(), t["v"].detach(), out=out)
    return out * 2


DIFFERENTIABLE = [dense, heads_first, narrow, varlen, packed]
FUNCTIONS = [*DIFFERENTIABLE, paged, into]


@each_call(FUNCTIONS)
def test_compiled_equals_eager(function: Call, backend: str, device: str) -> None:
    check_compiled(function, inputs, backend, device)


@each_call(DIFFERENTIABLE)
def test_compiled_gradients_equal_eager(function: Call, backend: str, device: str) -> None:
    def gradients(run: Call) -> list[torch.Tensor | None]:
        t = inputs(device, requires_grad=True)
        out = run(t)
        out = out[0] if isinstance(out, tuple) else out
        (out * torch.arange(32, device=device).to(out.dtype)).sum().backward()
        return [t[name].grad for name in ("q", "k", "v", "qkv")]

    expected = gradients(function)
    found = gradients(torch.compile(function, fullgraph=True, backend=backend))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert any(grad is not None for grad in found)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shapes_compile_once(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda q: flash_attention(q, q, q, causal=True), fullgraph=True, dynamic=True,
        backend=counter,
    )  # fmt: skip
    for seqlen in (3, 4, 17):
        q = torch.randn(2, seqlen, 4, 32, device=device).bfloat16()
        assert torch.equal(compiled(q), flash_attention(q, q, q, causal=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
def test_export(device: str, strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return flash_attention(q, k, k, causal=True, layout="bhsd")

    layer = Layer()
    q = torch.randn(3, 4, 9, 32, device=device).bfloat16()
    sizes = {0: torch.export.Dim("batch", max=64), 2: torch.export.Dim("seqlen", max=4096)}
    k = q[:, :2].contiguous()
    program = torch.export.export(
        layer, (q, k), dynamic_shapes={"q": sizes, "k": sizes}, strict=strict
    )
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "kernel_hub.flash_attention.default" in called
    other = torch.randn(2, 4, 15, 32, device=device).bfloat16()
    other_k = other[:, :2].contiguous()
    assert torch.equal(program.module()(other, other_k), layer(other, other_k))


@pytest.mark.parametrize("device", DEVICES)
def test_registered_ops_pass_opcheck(device: str) -> None:
    for requires_grad in (False, True):
        t, ops = inputs(device, requires_grad), torch.ops.kernel_hub
        options = (True, None, [-1, -1], 0.0, *[None] * 8, False)
        bounds = (t["bounds_q"], t["bounds_k"], 5, 10, None, None, t["sinks"], False)
        ragged = (False, 0.1, [4, -1], 3.0, t["slopes"], *bounds)
        q, k, v = t["q"], t["k"], t["v"]
        packed_qkv = t["qkv"].flatten(2, 3).detach().requires_grad_(requires_grad)
        cases: list[tuple[Any, tuple[Any, ...]]] = [
            (ops.flash_attention, (q, k, v, *options, True, True)),
            (ops.flash_attention, (q[0], k[0], v[0], *ragged, True, True)),
            (ops.flash_attention_qkvpacked, (packed_qkv, 2, 2, *options, True, True)),
        ]
        if not requires_grad:
            out, lse = ops.flash_attention(q, k, v, *options, True, True)
            dqkv = (torch.ones_like(t["qkv"][:, :, 0]), packed_qkv)
            packed_out, packed_lse = ops.flash_attention_qkvpacked(
                packed_qkv, 2, 2, *options, True, True
            )
            cases += [
                (ops.flash_attention, (q, k, v, *options, True, False)),
                (ops.flash_attention_out, (q, k, v, *options, True, torch.empty_like(q))),
                (ops.flash_attention_backward, (out * 1, q, k, v, out, lse, *options, True)),
                (
                    ops.flash_attention_qkvpacked_backward,
                    (*dqkv, packed_out, packed_lse, 2, 2, *options, True),
                ),
            ]
        for op, arguments in cases:
            torch.library.opcheck(op.default, arguments)


def test_fake_and_meta_tensors_give_shapes_only() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 7, 2, 64, device="cuda", dtype=torch.bfloat16)
        out, lse = flash_attention(q, k, k, return_lse=True)
        assert out.device.type == "cuda" and out.shape == q.shape
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
        k = torch.empty(2, 7, 3, 64, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(TensorError, match="num_kv_heads"):
            flash_attention(q, k, k)
    meta = torch.empty(2, 4, 5, 64, device="meta", dtype=torch.float16)
    out, lse = flash_attention(meta, meta, meta, layout="bhsd", return_lse=True)
    assert out.is_meta and out.shape == meta.shape and lse.shape == (2, 4, 5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_strides_of_the_result_are_known_to_the_tracer(layout: str) -> None:
    qkv = torch.randn(2, 6, 3, 4, 32).half()
    for x in (qkv[:, :, 0], torch.randn(2, 4, 6, 64).half(), qkv[:1, :, 1].expand(2, 6, 4, 32)):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = flash_attention(*[mode.from_tensor(x)] * 3, layout=layout)
        out = flash_attention(x, x, x, layout=layout)
        assert fake.stride() == out.stride() and out.stride(-1) == 1
        for own in (16, 40):  # a head_dim of v's own
            v = torch.randn(*x.shape[:-1], own).half()
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = flash_attention(
                    *[mode.from_tensor(x)] * 2, mode.from_tensor(v), layout=layout
                )
            out = flash_attention(x, x, v, layout=layout)
            assert fake.stride() == out.stride() and out.stride(-1) == 1


def test_results_of_heads_first_are_laid_out_heads_first() -> None:
    q = torch.randn(2, 4, 6, 32).half()
    assert flash_attention(q, q, q, layout="bhsd").is_contiguous()


def test_lse_carries_no_gradient_and_out_does() -> None:
    t = inputs("cpu", requires_grad=True)
    out, lse = flash_attention(t["q"], t["k"], t["v"], return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    with torch.no_grad():
        assert not flash_attention(t["q"], t["k"], t["v"]).requires_grad


def test_only_what_asks_gets_a_gradient() -> None:
    t = inputs("cpu")
    k = t["k"].requires_grad_()
    flash_attention(t["q"], k, t["v"]).sum().backward()
    assert k.grad is not None and t["q"].grad is None


def test_deterministic_algorithms_make_the_backward_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kernel_hub.ops.attention import eager

    asked: list[bool] = []
    backward = eager.cpu_backward

    def spy(*arguments: Any, deterministic: bool, **plans: Any) -> None:
        asked.append(deterministic)
        backward(*arguments, deterministic=deterministic, **plans)

    monkeypatch.setattr(eager, "cpu_backward", spy)
    q = torch.randn(1, 4, 2, 32).half().requires_grad_()
    flash_attention(q, q, q).sum().backward()
    flash_attention(q, q, q, deterministic=True).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        flash_attention(q, q, q).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


@pytest.mark.parametrize("function", [dense, packed], ids=lambda f: f.__name__)
def test_double_backward_is_refused(function: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    t = inputs("cpu", requires_grad=True)
    out = function(t)
    out = out[0] if isinstance(out, tuple) else out
    leaf = t["qkv"] if function is packed else t["q"]
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(TensorError, match="double backward"):
        grad.sum().backward()


def test_transforms_are_refused() -> None:
    q = torch.randn(3, 2, 4, 2, 32).half()
    with pytest.raises(TensorError, match=r"vmap.*leading dimensions are a batch"):
        torch.func.vmap(lambda x: flash_attention(x, x, x))(q)
    with pytest.raises(TensorError, match="transforms"):
        torch.func.grad(lambda x: flash_attention(x, x, x).sum())(q[0])
    options = (True, None, [-1, -1], 0.0, *[None] * 8, False)
    op = torch.ops.kernel_hub.flash_attention
    if hasattr(torch.library, "register_vmap"):
        with pytest.raises(TensorError, match="vmap"):
            torch.func.vmap(lambda x: op(x, x, x, *options, False, False))(q)


def test_a_torch_that_names_its_stack_otherwise_loses_nothing_else() -> None:
    code = """
import torch
del torch._C._functorch.peek_interpreter_stack
from kernel_hub import ops
q = torch.ones(1, 3, 2, 16, requires_grad=True)
assert torch.equal(ops.flash_attention(q.half(), q.half(), q.half()), q.half())
assert ops.rms_norm(torch.ones(2, 8), torch.ones(8)).shape == (2, 8)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
