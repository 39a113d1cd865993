"""flash-attn's functions on the CPU against fp64, forward and backward, in both versions."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_hub import flash_attn as two  # noqa: E402
from kernel_hub import flash_attn_interface as three  # noqa: E402
from kernel_hub.errors import TensorError  # noqa: E402
from kernel_hub.flash_attn import bert_padding  # noqa: E402
from kernel_hub.testing.compare import compare  # noqa: E402
from kernel_hub.testing.reference_attention import (  # noqa: E402
    reference_attention,
    reference_attention_backward,
)


def randn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(dtype)


def qkv(
    seqlen_q: int = 33, seqlen_k: int = 33, kv_heads: int = 2, head_dim: int = 32
) -> tuple[Any, Any, Any]:
    q = randn(2, seqlen_q, 4, head_dim)
    return (
        q,
        randn(2, seqlen_k, kv_heads, head_dim),
        randn(2, seqlen_k + 1, kv_heads, head_dim)[:, 1:],
    )


def hold(found: Any, truth: Any, own: Any, name: str = "out") -> None:
    verdict = compare(found.detach(), truth.detach(), own.detach(), name=name)
    assert verdict.ok, verdict.message


def hold_call(found: Any, q: Any, k: Any, v: Any, *leaves: Any, **options: Any) -> None:
    """out, and its gradients where it has them, against the reference.

    leaves: the tensors that hold q, k and v, packed, if these are no leaves.
    """
    truth, own = (
        reference_attention(q, k, v, dtype=dtype, **options)[0]
        for dtype in (torch.float64, q.dtype)
    )
    hold(found, truth, own)
    if found.requires_grad:
        dout = randn(*found.shape)
        grads = torch.autograd.grad(found, leaves or (q, k, v), dout)
        if leaves:
            place = grads[-1].dim() - 3
            grads = (*grads[:-1], *grads[-1].unbind(place))
        truths, owns = (
            reference_attention_backward(q, k, v, dout, dtype=dtype, **options)
            for dtype in (torch.float64, q.dtype)
        )
        for name, *each in zip(("dq", "dk", "dv"), grads, truths, owns, strict=True):
            hold(*each, name=name)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.2},
    "window": {"window_size": (7, 3)},
    "softcap": {"softcap": 15.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.05, 0.01])},
}


@pytest.mark.parametrize("head_dim", [8, 32, 59])
@pytest.mark.parametrize("case", OPTIONS)
def test_func_with_its_gradients(case: str, head_dim: int) -> None:
    """A head_dim without kernels is padded; the scale is that of the one given."""
    options = OPTIONS[case]
    q, k, v = (x.detach().requires_grad_() for x in qkv(33, 41, head_dim=head_dim))
    hold_call(two.flash_attn_func(q, k, v, deterministic=True, **options), q, k, v, **options)
    if case != "alibi":
        hold_call(three.flash_attn_func(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("head_dim_v", [59, 16, 40])
def test_a_head_dim_of_v_in_3(head_dim_v: int) -> None:
    (q, k, _), v = qkv(33, 41), randn(2, 41, 2, head_dim_v)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    hold_call(three.flash_attn_func(q, k, v, causal=True), q, k, v, causal=True)
    ragged: dict[str, Any] = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
    q, k, v = (x.detach().flatten(0, 1)[: int(BOUNDS[-1])] for x in (q, k, v))
    hold_call(three.flash_attn_varlen_func(q, k, v, *ragged.values(), 99, 99), q, k, v, **ragged)


def test_the_fourth_argument_is_dropout_in_2_and_the_scale_in_3() -> None:
    q, k, v = qkv()
    hold_call(three.flash_attn_func(q, k, v, 0.3, True), q, k, v, softmax_scale=0.3, causal=True)
    hold_call(two.flash_attn_func(q, k, v, 0.0, 0.3, True), q, k, v, softmax_scale=0.3, causal=True)
    with pytest.raises(
        TensorError, match=r"dropout_p: expected 0\.0, found 0\.3: there is no drop"
    ):
        two.flash_attn_func(q, k, v, 0.3)


def test_what_is_returned_besides() -> None:
    q, k, v = qkv()
    _, expected = reference_attention(q, k, v)
    out, lse, probabilities = two.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=1e-4)
    assert (probabilities.shape, probabilities.dtype) == ((0,), q.dtype)
    again, lse_again = three.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("case", OPTIONS)
def test_packed(case: str) -> None:
    options = OPTIONS[case]
    packed = randn(2, 19, 3, 4, 40).requires_grad_()
    q, k, v = packed.unbind(2)
    hold_call(two.flash_attn_qkvpacked_func(packed, **options), q, k, v, packed, **options)
    q, kv = q.detach().requires_grad_(), packed.detach()[:, :, 1:].requires_grad_()
    hold_call(two.flash_attn_kvpacked_func(q, kv, **options), q, k, v, q, kv, **options)
    if case != "alibi":
        hold_call(three.flash_attn_qkvpacked_func(packed, **options), q, k, v, packed, **options)
        one = packed.flatten(2, 3)
        made = three.flash_attn_qkvpacked_func(one, num_heads_q=4, **options)
        hold_call(made, q, k, v, packed, **options)


BOUNDS = torch.tensor([0, 5, 5, 23], dtype=torch.int32)
BOUNDS_K = torch.tensor([0, 9, 12, 31], dtype=torch.int32)


@pytest.mark.parametrize("case", OPTIONS)
def test_ragged(case: str) -> None:
    options = OPTIONS[case]
    q, kv = randn(23, 4, 40).requires_grad_(), randn(31, 2, 2, 40).requires_grad_()
    k, v = (x.detach().requires_grad_() for x in kv.unbind(1))
    ragged = {**options, "cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS_K}
    lengths = torch.tensor(18), 19  # some programs give a tensor
    where = BOUNDS, BOUNDS_K, *lengths
    hold_call(two.flash_attn_varlen_func(q, k, v, *where, **options), q, k, v, **ragged)
    made = two.flash_attn_varlen_kvpacked_func(q, kv, *where, **options)
    hold_call(made, q, k, v, q, kv, **ragged)
    if case != "alibi":
        hold_call(three.flash_attn_varlen_func(q, k, v, *where, **options), q, k, v, **ragged)
    packed = randn(23, 3, 4, 40).requires_grad_()
    made = two.flash_attn_varlen_qkvpacked_func(packed, BOUNDS, 18, **options)
    hold_call(made, *packed.unbind(1), packed, **{**ragged, "cu_seqlens_k": BOUNDS})


def test_ragged_queries_over_padded_keys_in_3() -> None:
    q, k, v = randn(23, 4, 32), randn(3, 31, 2, 32), randn(3, 31, 2, 32)
    used = torch.tensor([31, 0, 20], dtype=torch.int32)
    made = three.flash_attn_varlen_func(q, k, v, BOUNDS, None, 18, 31, seqused_k=used, causal=True)
    options: Any = {"cu_seqlens_q": BOUNDS, "cache_seqlens": used, "causal": True}
    hold_call(made, q, k, v, **options)


@pytest.mark.parametrize("page_size", [1, 16, 256, 512])
def test_ragged_over_pages(page_size: int) -> None:
    """In place where there are kernels for the pages or parts of them, else copied."""
    q, pages_k, pages_v = randn(23, 4, 32), *randn(2, 70, page_size, 2, 32)
    table = torch.randperm(70)[:60].view(3, 20).int()
    made = two.flash_attn_varlen_func(
        q, pages_k, pages_v, BOUNDS, BOUNDS_K, 18, 19, causal=True, block_table=table
    )
    options: Any = {"cache_seqlens": BOUNDS_K.diff(), "block_table": table, "causal": True}
    hold_call(made, q, pages_k, pages_v, cu_seqlens_q=BOUNDS, **options)


def test_e4m3_in_3() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    out = three.flash_attn_func(q, k, v, None, True, None, *scales)
    assert out.dtype is torch.bfloat16
    grouped = [s[:, None, :, None].double() for s in scales]
    wide = q.double().unflatten(2, (2, 2)) * grouped[0][..., None]
    inputs = [wide.flatten(2, 3), k.double() * grouped[1], v.double() * grouped[2]]
    truth, _ = reference_attention(*inputs, causal=True)
    torch.testing.assert_close(out.double(), truth, rtol=0.1, atol=0.15)
    with pytest.raises(TensorError, match=r"q_descale: expected None where q is torch.bfloat16"):
        three.flash_attn_func(*qkv(), q_descale=scales[0])


def test_combine_in_3() -> None:
    outs = randn(3, 2, 5, 4, 32, dtype=torch.float32)
    lses = randn(3, 2, 4, 5, dtype=torch.float32).transpose(-1, -2)
    lses[0, 0, 0] = -torch.inf
    out, lse = three.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    torch.testing.assert_close(lse, lses.logsumexp(0))
    truth = (outs * (lses - lse).exp()[..., None]).sum(0)
    torch.testing.assert_close(out, truth.bfloat16(), rtol=1e-2, atol=1e-2)
    one, lse_one = three.flash_attn_combine(outs[:1], lses[:1])
    assert torch.equal(one, outs[0]) and torch.equal(lse_one, lses[0])
    assert one.data_ptr() != outs.data_ptr()
    into = torch.empty(2, 5, 4, 32)
    assert three.flash_attn_combine(outs, lses, into)[0] is into
    assert three.get_scheduler_metadata(1, 1, 9, 4, 4, 64, BOUNDS).dtype is torch.int32


def test_under_torch_compile() -> None:
    q, k, v = (x.detach().requires_grad_() for x in qkv(head_dim=40))

    def step(q: Any, k: Any, v: Any) -> Any:
        return two.flash_attn_func(q, k, v, causal=True, window_size=(9, 0)) * 2

    eager = step(q, k, v)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(eager, compiled)
    grads = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (eager, compiled))
    assert all(torch.equal(*each) for each in zip(*grads, strict=True))


def test_padding_goes_and_comes() -> None:
    states = randn(3, 7, 2, 5, dtype=torch.float32).requires_grad_()
    mask = torch.arange(7) < torch.tensor([4, 7, 0])[:, None]
    tokens, indices, bounds, longest, used = bert_padding.unpad_input(states, mask)
    assert torch.equal(tokens, states[mask]) and bounds.tolist() == [0, 4, 11, 11]
    assert (longest, used.tolist(), bounds.dtype) == (7, [4, 7, 0], torch.int32)
    back = bert_padding.pad_input(tokens, indices, 3, 7)
    assert torch.equal(back, states * mask[..., None, None])
    assert torch.equal(back, bert_padding.pad_input(tokens, indices.int(), 3, 7))
    (grad,) = torch.autograd.grad(back.square().sum(), states)
    assert torch.equal(grad, 2 * states.detach() * mask[..., None, None])
    unused = torch.arange(7) == torch.tensor([4, 9, 0])[:, None]
    tokens, _, bounds, _, used = bert_padding.unpad_input(states, mask, unused)
    assert bounds.tolist() == [0, 5, 12, 13] and used.tolist() == [4, 7, 0]
    joined = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
    found = bert_padding.unpad_input_for_concatenated_sequences(states, joined)
    assert found[2].tolist() == [0, 2, 5, 12, 13, 14, 15] and found[3] == 7
    assert found[1].tolist() == [*range(5), *range(7, 14), *range(14, 17)]
    rows, residual = bert_padding.index_first_axis_residual(states.flatten(0, 1), indices)
    assert torch.equal(rows, states.flatten(0, 1)[indices]) and residual.requires_grad
