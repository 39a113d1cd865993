"""The door behind torch's scaled_dot_product_attention: on CPU tensors through torch's dispatcher.

The door is put at the dispatcher's CPU key, where aten has no flash kernels, so autograd, fake
tensors and torch.compile meet it as they do on a GPU; `test_sdpa_gpu.py` asks which kernel ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import attention  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402

from kernel_hub.errors import KernelHubError  # noqa: E402
from kernel_hub.integrations import sdpa  # noqa: E402
from kernel_hub.testing.compare import compare  # noqa: E402
from kernel_hub.testing.reference_attention import reference_attention  # noqa: E402

aten = torch.ops.aten
F = torch.nn.functional


@pytest.fixture(autouse=True)
def counted() -> None:
    """Counts from nothing."""
    sdpa._taken.clear()
    sdpa._passed.clear()


@pytest.fixture
def door() -> Iterator[None]:
    """The door at the CPU's key."""
    handle = sdpa._register("CPU")
    yield
    handle.remove()


def tensors(*shape: int, dtype: Any = torch.bfloat16, count: int = 3) -> list[Any]:
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape).to(dtype) for _ in range(count)]


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """By torch's own arithmetic."""
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def stepwise(q: Any, k: Any, v: Any, is_causal: bool = False, scale: float | None = None) -> Any:
    """Each step in the tensors' own dtype, which torch's arithmetic on the CPU is not."""
    options: Any = {"layout": "bhsd", "causal": is_causal, "softmax_scale": scale}
    return reference_attention(q, k, v, dtype=q.dtype, **options)[0]


def hold(out: Any, q: Any, k: Any, v: Any, attn_mask: Any = None) -> None:
    truth = plain(q.double(), k.double(), v.double(), attn_mask=attn_mask)
    verdict = compare(out, truth, stepwise(q, k, v, attn_mask is not None))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", sdpa._TAKERS)
def test_every_argument_of_the_schema_is_known(name: str) -> None:
    """Of the torch that is installed; others would send calls that use them elsewhere."""
    arguments = [each.name for each in getattr(aten, name).default._schema.arguments]
    assert not set(arguments) - sdpa._KNOWN
    outputs = {
        "_flash_attention_forward": 5,
        "_scaled_dot_product_flash_attention": 9,
        "_flash_attention_forward_no_dropout_inplace": 1,
    }
    assert len(getattr(aten, name).default._schema.returns) == outputs.get(name, 3)


def test_an_argument_of_a_later_torch_goes_elsewhere(
    former: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_KNOWN", sdpa._KNOWN - {"scale"})
    handle = sdpa._register("CPU")
    try:
        inputs = tensors(1, 2, 4, 16)
        aten._scaled_dot_product_flash_attention(*inputs)
        assert former == []
        aten._scaled_dot_product_flash_attention(*inputs, scale=0.5)
    finally:
        handle.remove()
    (reasons,) = sdpa.report().passed.values()
    assert former == ["forward"] and reasons == {"scale, which is new": 1}


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice": lambda x: torch.stack([x, x], 3)[..., 0, :],
    "broadcast": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 4, 33, 64), (1, 1, 1, 16), (2, 2, 5, 256)], ids=str)
def test_outputs_are_what_torch_traces(door: None, layout: str, shape: tuple[int, ...]) -> None:
    """Sizes, strides and dtypes of all nine outputs, and of the gradients, as on meta tensors."""
    q, k, v = (LAYOUTS[layout](x) for x in tensors(*shape))
    found = aten._scaled_dot_product_flash_attention(q, k, v)
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        views = [fake.from_tensor(x) for x in (q, k, v)]
        traced = aten._scaled_dot_product_flash_attention(*views)
    grads = aten._scaled_dot_product_flash_attention_backward(
        q, q, k, v, *found[:2], *found[2:6], 0.0, False, *found[6:8]
    )
    same_layout(found, traced)
    same_layout(grads, [torch.empty_like(x) for x in (q, k, v)])
    hold(found[0], q, k, v)


def same_layout(found: Any, traced: Any) -> None:
    assert len(found) == len(traced)
    for mine, theirs in zip(found, traced, strict=True):
        if not isinstance(mine, torch.Tensor):
            assert mine == theirs
            continue
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        steps = [s for s, n in zip(mine.stride(), mine.shape, strict=True) if n > 1]
        assert steps == [s for s, n in zip(theirs.stride(), theirs.shape, strict=True) if n > 1]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward_and_backward_by_autograd(
    door: None, dtype: Any, causal: bool, kv_heads: int
) -> None:
    (q,) = tensors(2, 4, 37, 32, dtype=dtype, count=1)
    k, v, = tensors(2, kv_heads, 37, 32, dtype=dtype, count=2)  # fmt: skip
    dout = torch.randn_like(q)
    options = {"is_causal": causal, "scale": 0.3}

    def run(attend: Any, *inputs: Any) -> list[Any]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    found = run(lambda *x: aten._scaled_dot_product_flash_attention(*x, **options)[0], q, k, v)
    truth = run(lambda *x: plain(*x, **options), q.double(), k.double(), v.double())
    own = run(lambda *x: stepwise(*x, **options), q, k, v)
    for name, *each in zip(("out", "dq", "dk", "dv"), found, truth, own, strict=True):
        verdict = compare(*(x.detach() for x in each), name=name)
        assert verdict.ok, verdict.message
    assert sdpa.report().taken == {
        "_scaled_dot_product_flash_attention": 1,
        "_scaled_dot_product_flash_attention_backward": 1,
    }


def test_lse_is_natural_and_causal_ends_at_the_last_key(door: None) -> None:
    q, k, v = tensors(1, 2, 3, 16)[0], *tensors(1, 2, 7, 16, count=2)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    hold(out, q, k, v, attn_mask=mask)
    scores = (q.double() @ k.double().mT / 4).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 4)], ids=str)
def test_ragged_sequences(door: None, window: tuple[int, int]) -> None:
    """torch's own varlen_attn, forward and backward, sequence by sequence."""
    lengths = [5, 1, 17]
    q, k, v = (x.requires_grad_() for x in tensors(23, 4, 32))
    bounds = torch.tensor([0, 5, 6, 23], dtype=torch.int32)
    aux = varlen.AuxRequest(lse=True)
    call = varlen.varlen_attn
    out, lse = call(q, k, v, bounds, bounds, 17, 17, window_size=window, return_aux=aux)
    assert lse.shape == (4, 23)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        at = torch.arange(length)
        distance = at - at[:, None]
        seen = torch.ones(length, length, dtype=torch.bool)
        if window[0] >= 0:
            seen &= distance >= -window[0]
        if window[1] >= 0:
            seen &= distance <= window[1]

        def by(dtype: Any, rows: slice = rows, seen: Any = seen) -> list[Any]:
            leaves = [x.detach()[rows].to(dtype).requires_grad_() for x in (q, k, v)]
            heads = (x.transpose(0, 1)[None] for x in leaves)
            result = plain(*heads, attn_mask=seen)[0].transpose(0, 1)
            return [result, *torch.autograd.grad(result.to(dtype).square().sum(), leaves)]

        mine = [out[rows], *(grad[rows] for grad in grads)]
        for found, truth, own in zip(mine, by(torch.float64), by(torch.float32), strict=True):
            each = (x.detach() for x in (found, truth, own.to(found.dtype)))
            verdict = compare(*each, atol=0.02)
            assert verdict.ok, verdict.message
        start += length
    assert not sdpa.report().passed


def test_paged_keys_and_an_out(door: None) -> None:
    q, pages_k, pages_v = tensors(3, 4, 32)[0], *tensors(6, 8, 2, 32, count=2)
    bounds = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    table = torch.tensor([[5, 0], [1, 3], [2, 4]], dtype=torch.int32)
    used = torch.tensor([9, 16, 3], dtype=torch.int32)
    options: Any = {"seqused_k": used, "block_table": table, "enable_gqa": True}
    out = varlen.varlen_attn(q, pages_k, pages_v, bounds, None, 1, 16, **options)
    for index, length in enumerate(used.tolist()):
        k, v = (x[table[index].long()].flatten(0, 1)[:length] for x in (pages_k, pages_v))
        heads = q[index : index + 1].transpose(0, 1)[None], k.transpose(0, 1)[None]
        hold(out[index : index + 1].transpose(0, 1)[None], *heads, v.transpose(0, 1)[None])
    into = torch.empty_like(q)
    varlen.varlen_attn_out(into, q, pages_k, pages_v, bounds, None, 1, 16, **options)
    assert torch.equal(into, out)
    assert "_flash_attention_forward_no_dropout_inplace" in sdpa.report().taken


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_under_torch_compile(door: None, backend: str) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0] * 2

    inputs = [x.transpose(1, 2) for x in tensors(2, 9, 4, 32)]
    eager, compiled = (
        [*torch.autograd.grad(out.sum(), leaves), out]
        for call in (attend, torch.compile(attend, backend=backend, fullgraph=True))
        for leaves in [[x.detach().requires_grad_() for x in inputs]]
        for out in [call(*leaves)]
    )
    for mine, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    assert sdpa.report().taken["_scaled_dot_product_flash_attention_backward"] == 2


def test_deterministic_backwards_are_asked_for(door: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = sdpa.run.backward

    def watch(*args: Any) -> None:
        asked.append(args[6])
        backward(*args)

    monkeypatch.setattr(sdpa.run, "backward", watch)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            (q,) = tensors(1, 1, 4, 16, count=1)
            q.requires_grad_()
            aten._scaled_dot_product_flash_attention(q, q, q)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.1}, "dropout_p is not 0"),
    "debug": ({"return_debug_mask": True}, "return_debug_mask"),
    "fp32": ({"dtype": torch.float32}, "q: expected dtype float16 or bfloat16"),
    "head_dim": ({"head_dim": 8}, "q: expected a head_dim from 16 to 256 in multiples of 8"),
    "heads": ({"kv_heads": 3}, "k: expected num_kv_heads to divide num_heads = 4 of q"),
    "mixed": ({"k_dtype": torch.float16}, "k: expected dtype bfloat16"),
}


@pytest.fixture
def former() -> Iterator[list[str]]:
    """Kernels that were there before the door, at the CPU's key; the names of those called."""
    called: list[str] = []
    library = torch.library.Library("aten", "IMPL")

    def forward(*args: Any, **options: Any) -> Any:
        called.append("forward")
        q = args[0]
        seed, offset, mask = sdpa._unused(q)
        lse = torch.zeros(q.shape[:-1])
        return q + 1, lse, None, None, q.shape[2], args[1].shape[2], seed, offset, mask

    def backward(dout: Any, q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        called.append("backward")
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    yield called
    library._destroy()


@pytest.mark.parametrize("case", REASONS)
def test_what_is_lacking_runs_as_before(former: list[str], door: None, case: str) -> None:
    given, reason = dict(REASONS[case][0]), REASONS[case][1]
    dtype, head_dim = given.pop("dtype", torch.bfloat16), given.pop("head_dim", 16)
    (q,) = tensors(1, 4, 5, head_dim, dtype=dtype, count=1)
    kv = tensors(1, given.pop("kv_heads", 4), 5, head_dim, dtype=given.pop("k_dtype", dtype))[:2]
    q.requires_grad_()
    out = aten._scaled_dot_product_flash_attention(q, *kv, **given)[0]
    assert torch.equal(out, q + 1)
    found = sdpa.report()
    assert former == ["forward"] and not found.taken
    assert found.passed["_scaled_dot_product_flash_attention"] == {reason: 1}
    if case != "debug":  # no gradient knows of that
        out.sum().backward()
        assert torch.equal(q.grad, torch.ones_like(q)) and former == ["forward", "backward"]
        assert not sdpa.report().taken
    assert f"1 passed on: {reason}" in str(found)


def test_a_gradient_of_another_kernels_forward_is_ours_only_where_it_fits(
    former: list[str], door: None
) -> None:
    q, k, v = tensors(1, 2, 5, 16)
    out, lse, _, _, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v
    )
    rest = (None, None, max_q, max_k, 0.0, False, seed, offset)
    backward = aten._scaled_dot_product_flash_attention_backward
    backward(q, q, k, v, out, lse.double(), *rest)
    backward(q, q, k, v, out, lse[..., :4], *rest)
    backward(q.half(), q, k, v, out, lse, *rest)
    assert former == ["backward"] * 3
    assert sum(sdpa.report().passed.popitem()[1].values()) == 3


def test_nothing_to_pass_to_is_said(door: None) -> None:
    with pytest.raises(KernelHubError, match="dropout_p is not 0, and no other kernel"):
        aten._scaled_dot_product_flash_attention(*tensors(1, 1, 4, 16), 0.5)


def test_num_splits_of_one_is_anothers(door: None) -> None:
    q, k, v = tensors(4, 1, 16)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(KernelHubError, match="same bits in any batch"):
        varlen.varlen_attn(q, k, v, bounds, bounds, 4, 4, num_splits=1)


def test_vmap_merges_batches_for_us(door: None) -> None:
    q, k, v = tensors(3, 2, 4, 5, 16)
    mapped = torch.func.vmap(lambda *x: aten._scaled_dot_product_flash_attention(*x)[0])(q, k, v)
    hold(mapped.flatten(0, 1), *(x.flatten(0, 1) for x in (q, k, v)))
