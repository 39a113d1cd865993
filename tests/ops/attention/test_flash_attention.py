"""flash_attention against fp64: layouts, sizes, masks, gradients; what must not leak or change."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from attention_cases import (
    LAYOUTS,
    ONE_LENGTH_K,
    ONE_LENGTH_Q,
    PAGED,
    SAME_LENGTHS,
    Case,
    call,
    guarded_results,
    make,
    run,
)
from attention_devices import pretend
from attention_random import random_case
from bits import same_bits
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.errors import FunctionNotFoundError
from kernel_hub.ops import flash_attention, flash_attention_qkvpacked
from kernel_hub.testing.compare import check
from kernel_hub.testing.reference_attention import reference_attention

DTYPES = ["fp16", "bf16"]
WITH_BACKWARD = [layout for layout in LAYOUTS if layout not in PAGED]
# Bodies that are compiled, and head_dims that fill them in part.
HEAD_DIMS = [16, 24, 32, 40, 64, 80, 96, 104, 128, 136, 160, 192, 200, 256]


def layout_case(layout: str, **options: Any) -> Case:
    """Two or three sequences, ragged where the layout allows."""
    lengths_q = (21, 21, 21) if layout in ONE_LENGTH_Q else (21, 0, 70)
    lengths_k = (67, 67, 67) if layout in ONE_LENGTH_K else (67, 3, 0)
    if layout in SAME_LENGTHS:
        lengths_k = lengths_q
    kv_heads = 2 if layout == "qkvpacked" else 1
    case = Case(layout=layout, num_kv_heads=kv_heads, lengths_q=lengths_q, lengths_k=lengths_k)
    return dataclasses.replace(case, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(way: Way, layout: str, causal: bool) -> None:
    bound = "loose" if causal else "none"
    run(layout_case(layout, causal=causal, bound=bound, seed=int(causal)), way.device)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(way: Way, dtype: str, head_dim: int) -> None:
    case = Case(
        dtype=dtype, head_dim=head_dim, num_heads=1, lengths_q=(17,), lengths_k=(33,), causal=True
    )
    run(case, way.device)
    run(dataclasses.replace(case, softcap=3.0), way.device)
    lengths = {"lengths_q": (5, 18), "lengths_k": (9, 70)}
    run(dataclasses.replace(case, layout="varlen_paged", **lengths), way.device)


@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 129), (127, 128), (128, 127), (129, 65), (0, 5), (5, 0), (65, 1), (199, 1023)],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(way: Way, causal: bool, lengths: tuple[int, int]) -> None:
    if not way.is_gpu and max(lengths) > 200:
        pytest.skip("long for the emulator")
    for batch_size in (1, 2):
        case = Case(
            lengths_q=lengths[:1] * batch_size, lengths_k=lengths[1:] * batch_size, causal=causal,
            head_dim=32, dtype="fp16",
        )  # fmt: skip
        run(case, way.device)


@pytest.mark.parametrize("window_size", [(0, 0), (9, 0), (-1, 3), (30, 20), (2, -1), (500, 500)])
@pytest.mark.parametrize("lengths", [(33, 90), (90, 33)], ids=str)
def test_windows(way: Way, lengths: tuple[int, int], window_size: tuple[int, int]) -> None:
    case = Case(lengths_q=lengths[:1], lengths_k=lengths[1:], window_size=window_size)
    run(case, way.device)
    run(dataclasses.replace(case, causal=True, layout="varlen"), way.device)


@pytest.mark.parametrize("alibi", ["", "heads", "batch"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("layout", ["bshd", "varlen", "paged"])
def test_scores_made_otherwise(way: Way, layout: str, softcap: float, alibi: str) -> None:
    for scale in (None, 0.7, -0.2, 0.0) if way.is_gpu else (-0.2,):
        run(
            layout_case(layout, softcap=softcap, alibi=alibi, softmax_scale=scale, causal=True),
            way.device,
        )


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (3, 1)], ids=str)
def test_groups_of_heads(way: Way, heads: tuple[int, int]) -> None:
    case = Case(num_heads=heads[0], num_kv_heads=heads[1], head_dim=32, alibi="batch")
    run(case, way.device)
    run(dataclasses.replace(case, layout="gqapacked", alibi=""), way.device)


@pytest.mark.parametrize("page_size", [1, 2, 4, 7, 8, 16, 24, 64, 128, 256])
def test_page_sizes(way: Way, page_size: int) -> None:
    case = Case(
        layout="varlen_paged", lengths_q=(5, 1, 70), lengths_k=(page_size, 0, 2 * page_size + 7),
        page_size=page_size, causal=True, head_dim=32,
    )  # fmt: skip
    run(case, way.device)
    run(dataclasses.replace(case, softcap=2.0, seed=1), way.device)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", WITH_BACKWARD)
def test_gradients(way: Way, layout: str, causal: bool, deterministic: bool) -> None:
    case = layout_case(
        layout, causal=causal, backward=True, deterministic=deterministic, head_dim=32,
        seed=2 * causal + deterministic, num_heads=4,
        num_kv_heads=4 if layout == "qkvpacked" else 2,
    )  # fmt: skip
    run(case, way.device)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_head_dims(way: Way, dtype: str, head_dim: int) -> None:
    case = Case(
        dtype=dtype, head_dim=head_dim, lengths_q=(40,), lengths_k=(70,), num_heads=1,
        causal=True, backward=True,
    )  # fmt: skip
    run(case, way.device)
    run(dataclasses.replace(case, softcap=3.0, alibi="heads"), way.device)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5}, {"alibi": "heads"}, {"alibi": "batch", "softcap": 3.0},
        {"window_size": (9, 4)}, {"window_size": (0, 0)}, {"softmax_scale": -0.3},
        {"lengths_q": (0, 0)}, {"lengths_k": (0, 0)}, {"lengths_q": (90, 90)},
    ],
    ids=str,
)  # fmt: skip
def test_gradients_of_scores_made_otherwise(way: Way, options: dict[str, Any]) -> None:
    for causal in (False, True):
        run(Case(**{"backward": True, "causal": causal, "seed": 1, **options}), way.device)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9)], ids=str)
def test_what_smaller_gpus_run(
    way: Way, capability: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels chosen for less shared memory, run where the tests are.
    pretend(monkeypatch, capability)
    missing: list[str] = []
    for dtype, softcap in itertools.product(DTYPES, (0.0, 3.0)):
        case = Case(
            dtype=dtype, head_dim=head_dim, lengths_q=(40,), lengths_k=(70,), num_heads=1,
            causal=True, softcap=softcap, backward=True,
        )  # fmt: skip
        forward = dataclasses.replace(case, backward=False)
        for each in (dataclasses.replace(forward, layout="paged"), forward, case):
            try:
                run(each, way.device)
            except FunctionNotFoundError as error:
                missing.append(str(error))
    if missing:
        pytest.skip(f"not built for this GPU: {missing[0]}"[:200])


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("layout", ["bshd", "varlen", "cache"])
def test_gradients_of_groups_of_heads(
    way: Way, layout: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where blocks are few, the query heads of a group get some of their own.
    pretend(monkeypatch, (9, 0), multiprocessors)
    for heads, kv_heads in ((4, 1), (6, 2)):
        case = layout_case(
            layout, num_heads=heads, num_kv_heads=kv_heads, backward=True, deterministic=True
        )
        run(case, way.device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(way: Way, dtype: str) -> None:
    # q k^T reaches +-1e4 before scaling.
    for seed in range(3):
        run(Case(dtype=dtype, magnitude=35.0, causal=True, seed=seed), way.device)


@pytest.mark.parametrize("layout", ["bshd", "varlen"])
def test_a_row_of_minus_infinity(way: Way, layout: str) -> None:
    case = Case(layout=layout, lengths_q=(40, 40), lengths_k=(70, 70))
    inputs = make(case, way.device)
    q, k, _ = inputs.tensors
    k[..., 0] = k[..., 0].abs() + 0.1
    rows = q.view(-1, case.num_heads, case.head_dim)
    rows[5, 0, 0] = float("-inf")
    out, lse = call(case, inputs, return_lse=True)
    truth, truth_lse = reference_attention(*inputs.tensors, **inputs.options)
    check(out, truth, reference_attention(*inputs.tensors, **inputs.options, dtype=q.dtype)[0])
    assert bool((out.view(rows.shape)[5, 0] == 0).all())
    same_bits(torch.isinf(lse), torch.isinf(truth_lse))


def test_the_same_bits_every_time(way: Way) -> None:
    for layout in ("bshd", "varlen_paged"):
        run(layout_case(layout, twice=True, causal=True), way.device)


def test_both_layouts_and_packings_agree_bit_by_bit(way: Way) -> None:
    q, k, v = (way.randn(2, 33, 2, 32, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    other = flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bhsd")
    same_bits(other.transpose(1, 2).contiguous(), out)
    packed, packed_lse = flash_attention_qkvpacked(
        torch.stack((q, k, v), 2), causal=True, return_lse=True
    )
    same_bits(packed, out)
    same_bits(packed_lse, lse)
    bounds = torch.tensor([0, 33, 66], dtype=torch.int32, device=way.device)
    rows = flash_attention(
        *(x.flatten(0, 1) for x in (q, k, v)), causal=True, cu_seqlens_q=bounds,
        cu_seqlens_k=bounds, max_seqlen_q=33, max_seqlen_k=33,
    )  # fmt: skip
    same_bits(rows.view(out.shape), out)


def test_packed_gradients_come_back_as_one_tensor(way: Way) -> None:
    qkv = way.randn(1, 20, 3, 2, 32, dtype=torch.bfloat16).requires_grad_()
    with guarded_results():
        out = flash_attention_qkvpacked(qkv)
        out.backward(torch.ones_like(out))
    assert qkv.grad is not None and qkv.grad.shape == qkv.shape
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    flash_attention(q, k, v, deterministic=True).sum().backward()
    for packed, apart in zip(qkv.grad.unbind(2), (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(packed, apart, rtol=1e-2, atol=1e-2)


def test_nothing_at_all(way: Way) -> None:
    nothing_at_all(way)


def test_nothing_at_all_on_hopper(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    if hopper_way.is_gpu:
        pytest.skip("test_nothing_at_all does that")
    with hopper_attention(monkeypatch, 4):
        nothing_at_all(hopper_way)


@pytest.mark.gpu
def test_nothing_at_all_of_e4m3() -> None:
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    q = torch.randn(3, 2, 128, device="cuda").to(torch.float8_e4m3fn)
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), torch.ones(1, device="cuda"))
    assert flash_attention(q, q, q, cu_seqlens_q=none, cu_seqlens_k=none, **scales).shape == q.shape


def nothing_at_all(way: Way) -> None:
    for shape in ((0, 5, 2, 32), (2, 0, 2, 32), (2, 5, 0, 32)):
        q = way.randn(*shape, dtype=torch.bfloat16)
        k = way.randn(shape[0], 4, max(1, shape[2]), 32, dtype=torch.bfloat16)
        out, lse = flash_attention(q, k, k, return_lse=True)
        assert out.shape == q.shape and lse.shape == (shape[0], shape[2], shape[1])
    none = torch.zeros(1, dtype=torch.int32, device=way.device)
    q = way.randn(3, 2, 32, dtype=torch.bfloat16).requires_grad_()
    out = flash_attention(q, q, q, cu_seqlens_q=none, cu_seqlens_k=none)
    (grad,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert out.shape == q.shape and bool((grad == 0).all())


@pytest.mark.gpu
def test_cases_drawn_by_lot() -> None:
    generator = random.Random(20)
    for _ in range(150):
        case = random_case(generator)
        try:
            run(case, "cuda")
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    # 40 sequences of 512 Ki keys' worth of rows: the last ones lie beyond 2^31 elements.
    rows, heads, head_dim = (1 << 31) // (32 * 128) + 64, 32, 128
    q = torch.empty(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16).normal_()
    bounds = torch.tensor([0, 7, rows - 200, rows], device="cuda", dtype=torch.int32)
    sizes = {"max_seqlen_q": rows, "max_seqlen_k": rows}
    out = flash_attention(
        q, q[:, :4], q[:, 4:8], cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True,
        window_size=(64, 0), **sizes,
    )  # fmt: skip
    part = q[rows - 200 :][None]
    options = {"causal": True, "window_size": (64, 0)}
    truth, _ = reference_attention(part, part[:, :, :4], part[:, :, 4:8], **options)
    own, _ = reference_attention(
        part, part[:, :, :4], part[:, :, 4:8], **options, dtype=torch.bfloat16
    )
    check(out[rows - 200 :][None], truth, own)


@pytest.mark.gpu
def test_a_cuda_graph_follows_lengths_that_change() -> None:
    case = layout_case("varlen_paged", lengths_q=(8, 8), lengths_k=(70, 70), bound="loose")
    inputs = make(case, "cuda")
    run(case, "cuda")
    graph = torch.cuda.CUDAGraph()
    call(case, inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call(case, inputs)
    for lengths in ((70, 70), (33, 8)):
        inputs.options["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        same_bits(out, call(case, inputs))


@pytest.mark.gpu
def test_a_cuda_graph_of_forward_and_backward() -> None:
    q, k, v = (torch.randn(1, 200, 4, 64, device="cuda").half().requires_grad_() for _ in range(3))

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_attention(q, k, v, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        same_bits(a.detach(), b.detach())


@pytest.mark.gpu
def test_the_current_stream_is_used() -> None:
    q = torch.zeros(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.fill_(1.0)
        out = flash_attention(q, q, q)
    stream.synchronize()
    assert bool((out == 1).all())
