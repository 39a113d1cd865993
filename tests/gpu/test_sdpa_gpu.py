"""The door behind torch's attention on a GPU: which kernels ran, and what went elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import attention  # noqa: E402

from kernel_hub.integrations import sdpa  # noqa: E402
from kernel_hub.testing.compare import compare  # noqa: E402
from kernel_hub.testing.reference_attention import (  # noqa: E402
    reference_attention,
    reference_attention_backward,
)

F = torch.nn.functional
OURS = "flash_attention_"  # torch's own flash kernels are named flash_fwd_…, cuDNN's cudnn_…


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    before = list(torch._C._get_sdp_priority_order())
    sdpa.activate()
    yield
    sdpa.restore()
    assert sorted(torch._C._get_sdp_priority_order()) == sorted(before)


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels that a call launches."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events()]


def tensors(*shape: int, dtype: Any = torch.bfloat16) -> list[Any]:
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_our_kernels_run(head_dim: int, causal: bool, compiled: bool) -> None:
    q, k, v = tensors(2, 4, 199, head_dim)
    attend = F.scaled_dot_product_attention
    if compiled:
        attend = torch.compile(attend, fullgraph=True)
    dout = torch.randn_like(q)
    found: list[Any] = []

    def step() -> None:
        out = attend(q, k, v, is_causal=causal)
        found[:] = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    names = kernels_of(step)
    assert any(name.startswith(OURS) and "backward" not in name for name in names), names
    assert any(name.startswith(OURS) and "backward" in name for name in names), names
    assert not [name for name in names if "flash_fwd" in name or "cudnn" in name or "fmha" in name]
    options: Any = {"layout": "bhsd", "causal": causal}
    inputs = [x.detach().cpu() for x in (q, k, v)]
    truth, own = (
        [
            reference_attention(*inputs, **options, dtype=dtype)[0],
            *reference_attention_backward(*inputs, dout.cpu(), **options, dtype=dtype),
        ]
        for dtype in (torch.float64, torch.bfloat16)
    )
    for name, *each in zip(("out", "dq", "dk", "dv"), found, truth, own, strict=True):
        verdict = compare(each[0].cpu(), *each[1:], name=name)
        assert verdict.ok, verdict.message


def test_autocast_and_a_captured_graph() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 64, 64, dtype=torch.float32))
    with torch.autocast("cuda", torch.bfloat16):
        names = kernels_of(lambda: F.scaled_dot_product_attention(q, k, v))
    assert any(name.startswith(OURS) for name in names), names
    q, k, v = (x.bfloat16() for x in (q, k, v))
    graph = torch.cuda.CUDAGraph()
    eager = F.scaled_dot_product_attention(q, k, v)
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(q, k, v)
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)


def test_nested_tensors_come_here() -> None:
    parts = [torch.randn(n, 4, 64, device="cuda").bfloat16() for n in (7, 1, 130)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    names = kernels_of(lambda: F.scaled_dot_product_attention(nested, nested, nested))
    assert any(name.startswith(OURS) for name in names), names


def test_what_is_lacking_runs_as_before() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 64, 64))
    passed = sdpa.report().passed.get("_scaled_dot_product_flash_attention", {})
    reason = "dropout_p is not 0"
    names = kernels_of(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert any("flash_fwd" in name for name in names), names
    found = sdpa.report().passed["_scaled_dot_product_flash_attention"]
    assert found[reason] == passed.get(reason, 0) + 2
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    own = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, own, rtol=2e-2, atol=2e-2)


def test_restored_it_is_torchs_again() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 64, 64))
    sdpa.restore()
    names = kernels_of(lambda: F.scaled_dot_product_attention(q, k, v))
    assert not any(name.startswith(OURS) for name in names), names
    assert attention.current_flash_attention_impl() is None
