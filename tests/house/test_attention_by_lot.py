"""Families of attention in benchmarks/by_lot.py without a GPU: what is drawn, that it runs, what
peers are given."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks measure torch ops")

import torch
from lot_cases import Eager, lot_modules, smaller_attention

from kernel_hub.testing.reference_attention import (
    reference_attention,
    reference_attention_backward,
    reference_backward_of,
)

lot = lot_modules()
CASES, RUN = 200, 16
FAMILIES = lot.run.GROUPS["attention"]
PEERS = lot.attention_peers.ATTENTION_PEERS
CACHED = ("paged", "chunked", "decode_contiguous", "decode_paged")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Any]]:
    """Family -> its first cases under a seed."""
    return {family: [lot.run.draw(family, 3, i) for i in range(CASES)] for family in FAMILIES}


def test_a_seed_draws_the_same_whatever_else_is_drawn() -> None:
    names = lot.by_lot.families(["attention"])
    assert names == list(lot.attention_shapes.FAMILIES) == list(FAMILIES)
    many = list(lot.by_lot.drawn(names, 5, 110))
    assert many == list(lot.by_lot.drawn(names, 5, 110))
    alone = list(lot.by_lot.drawn(["chunked"], 5, 1, first=4))
    assert alone == [x for x in many if x.family == "chunked" and x.number == 4]
    assert many != list(lot.by_lot.drawn(names, 6, 110))
    assert len({(x.family, x.name) for x in many}) == len(many)


def test_every_head_dim_dtype_mask_and_group_appears(cases: Mapping[str, list[Any]]) -> None:
    for family, here in cases.items():
        head_dims = {x.heads[2] for x in here}
        assert {64, 80, 96, 128, 192, 224, 256} <= head_dims, family
        if family not in CACHED:
            assert head_dims >= {32, 160} and max(head_dims) == 256, family
        groups = {x.heads[0] // x.heads[1] for x in here}
        assert {1, 2, 4, 5, 8} <= groups and max(groups) > 8, family
        dtypes = {"softcap": {"bf16"}, "attention_fp8": {"e4m3"}}.get(family, {"bf16", "fp16"})
        assert {x.dtype for x in here} == dtypes, family
        if family not in (*CACHED, "window"):
            assert CASES / 4 < sum(x.is_causal for x in here) < 3 * CASES / 4, family
        slices = {x.layer.partition("/")[2][:1] for x in here}
        assert {"", "2", "4", "8"} <= slices, family


def test_lengths_are_those_of_their_family(cases: Mapping[str, list[Any]]) -> None:
    for family, here in cases.items():
        lengths = [x for case in here for x in case.seqlens_k]
        assert sum(x % 2 for x in lengths) > len(lengths) / 3, family
        for x in here:
            assert x.expected_us < 5000 and len(x.seqlens_q) == len(x.seqlens_k)
            assert all(0 < q <= k for q, k in zip(x.seqlens_q, x.seqlens_k, strict=True)), x
            assert x.page_size % 8 == 0 and x.page_size <= 256
            assert not x.heads[0] % x.heads[1] and not x.heads[2] % 8
            assert family in CACHED or x.seqlens_q == x.seqlens_k
            assert max(x.window) < 0 or x.window[0] < x.seqlens_k[0]
    new = [x.seqlens_q[0] for x in cases["chunked"]]
    assert min(new) < 30 and max(new) > 900 and all(17 <= n <= 1024 for n in new)
    over = [max(x.seqlens_k) for x in cases["chunked"]]
    assert min(over) < 2000 and max(over) > 32_000
    for family in ("decode_contiguous", "decode_paged"):
        new = [x.seqlens_q[0] for x in cases[family]]
        assert {*new} == {*range(1, 17)} and CASES / 3 < new.count(1) < 2 * CASES / 3
        assert max(max(x.seqlens_k) for x in cases[family]) > 64_000
        assert max(x.batch_size for x in cases[family]) > 128
    for family in (*CACHED, "varlen"):
        assert sum(x.is_ragged for x in cases[family]) > CASES / 8, family
    assert {x.page_size for x in cases["chunked"]} == {0, *lot.attention_shapes.PAGES}
    assert all(x.softcap > 0 for x in cases["softcap"])
    assert {x.window[0] for x in cases["window"]} >= {127, 511, 1023, 4095}


def test_pairs_are_counted() -> None:
    case = lot.run.draw("window", 3, 0)
    for q, k in itertools.combinations_with_replacement(range(1, 12), 2):
        for left, right, is_causal in itertools.product((-1, 0, 3, 20), (-1, 0, 2, 20), (0, 1)):
            found = dataclasses.replace(
                case, seqlens_q=(q, q), seqlens_k=(k, k), window=(left, right), is_causal=is_causal
            )
            right = 0 if is_causal else right
            seen = sum(
                (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
                for at in range(k - q, k)
                for j in range(k)
            )
            assert found.pairs == 2 * seen, found


# -- peers' stand-ins: what they ask of their arguments, by the reference


def fa3_forward(
    is_wheel: bool, q: Any, k: Any, v: Any, *, softmax_scale: float, is_causal: bool,
    num_splits: int, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0, seqused_k: Any = None, page_table: Any = None,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """FlashAttention-3: the wheel has bf16 and e4m3, the other bf16, fp16, windows and pages."""
    if is_wheel:
        assert q.dtype != torch.float16 and page_table is None and window_size_left < 0
    else:
        assert q.dtype in (torch.float16, torch.bfloat16) and not softcap
    assert page_table is None or seqused_k is not None
    assert (cu_seqlens_q is None) == (max_seqlen_q == 0) and num_splits in (0, 1)
    dtype = torch.bfloat16 if q_descale is not None else q.dtype
    if q_descale is not None:
        group = q.shape[2] // k.shape[2]
        assert q_descale.shape == k_descale.shape == v_descale.shape == (len(q), k.shape[2])
        scales = q_descale.repeat_interleave(group, 1), k_descale, v_descale
        q, k, v = (x.float() * s[:, None, :, None] for x, s in zip((q, k, v), scales, strict=True))
    out, lse = reference_attention(
        q, k, v, causal=is_causal, softmax_scale=softmax_scale, softcap=softcap,
        window_size=(window_size_left, window_size_right), cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, block_table=page_table, cache_seqlens=seqused_k,
        dtype=torch.float32,
    )  # fmt: skip
    return out.to(dtype), lse


def fa3_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, *,
    softmax_scale: float, is_causal: bool,
) -> None:  # fmt: skip
    assert lse.shape == (len(q), q.shape[2], q.shape[1]) and out.shape == dout.shape == q.shape
    grads = reference_attention_backward(
        q, k, v, dout, softmax_scale=softmax_scale, causal=is_causal, dtype=torch.float32
    )
    for to, grad in zip((dq, dk, dv), grads, strict=True):
        to.copy_(grad)


class Wrapper:
    """FlashInfer's, of prefill: what was planned, and attention over its pages."""

    def __init__(self, workspace: Any, layout: str, backend: str, **_: bool) -> None:
        assert layout == "NHD"

    def plan(
        self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, num_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, causal: bool, **dtypes: Any,
    ) -> None:  # fmt: skip
        assert all(x.dtype == torch.int32 for x in (qo_indptr, indptr, indices, last))
        assert len(indices) == indptr[-1] and dtypes.keys() == {"q_data_type", "kv_data_type"}
        assert causal and len(last) == len(indptr) - 1 and 0 < last.min() <= last.max() <= page_size
        self.bounds, self.pages = qo_indptr, (num_kv_heads, head_dim, page_size)
        self.of = [indices[a:b].long() for a, b in itertools.pairwise(indptr.tolist())]
        self.last = last

    def run(self, q: Any, caches: Sequence[Any]) -> Any:
        num_kv_heads, head_dim, page_size = self.pages
        assert caches[0].shape[1:] == (page_size, num_kv_heads, head_dim)
        parts = []
        for i, (a, b) in enumerate(itertools.pairwise(self.bounds.tolist())):
            length = (len(self.of[i]) - 1) * page_size + int(self.last[i])
            k, v = (x[self.of[i]].flatten(0, 1)[None, :length] for x in caches)
            parts.append(reference_attention(q[None, a:b], k, v, causal=True)[0][0])
        return torch.cat(parts).to(q.dtype)


class DecodeWrapper(Wrapper):
    """The same with one query a sequence."""

    def plan(self, indptr: Any, *rest: Any, **dtypes: Any) -> None:
        super().plan(torch.arange(len(indptr)).int(), indptr, *rest, causal=True, **dtypes)


def torch_flash(
    q: Any, k: Any, v: Any, causal: bool, scale: float, bounds: Any = None, longest: int = 0,
    window: Any = (-1, -1),
) -> Any:  # fmt: skip
    """In place of an op that CPUs do not have."""
    return lambda: reference_attention(
        q, k, v, causal=causal, softmax_scale=scale, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
        window_size=window,
    )[0].to(q.dtype)  # fmt: skip


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins of every peer but torch's own, and of our backward's kernels."""

    def backward(problem: Any, out: Any, lse: Any, dout: Any, *grads: Any, **_: bool) -> None:
        assert out.shape == dout.shape and lse.dtype == torch.float32
        found = reference_backward_of(problem, dout)
        for to, grad in zip(grads, found, strict=True):
            to.copy_(grad)

    ops = {"fwd": functools.partial(fa3_forward, False), "bwd": fa3_backward}
    library, backwards = lot.attention_peers, lot.attention_backward
    monkeypatch.setattr(library, "fa3", lambda: functools.partial(fa3_forward, True))
    monkeypatch.setattr(library, "xformers_fa3", lambda op="fwd": ops[op])
    monkeypatch.setattr(backwards, "xformers_fa3", library.xformers_fa3)
    monkeypatch.setattr(library, "torch_flash", torch_flash)
    wrappers = {
        "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
    }
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**wrappers))
    monkeypatch.setattr(backwards.backward_portable, "backward", backward)
    yield


# family -> peers that must have run beside it
BESIDE = {
    "prefill": {"FlashAttention-3", "torch flash"},
    "varlen": {"FlashAttention-3", "torch flash"},
    "paged": {"FlashAttention-3", "FlashInfer"},
    "window": {"FlashAttention-3", "torch flash"},
    "chunked": {"FlashAttention-3", "FlashInfer", "torch flash"},
    "softcap": {"FlashAttention-3"},
    "backward": {"FlashAttention-3"},
    "backward_eager": {"FlashAttention-3"},
    "backward_deterministic": {"in any order"},
    "attention_fp8": {"FlashAttention-3"},
    "decode_contiguous": {"FlashAttention-3", "FlashInfer", "torch flash"},
    "decode_paged": {"FlashAttention-3", "FlashInfer"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_run_and_are_right(cases: Mapping[str, list[Any]], family: str, peers: None) -> None:
    """On the CPU, with lengths cut down."""
    beside: set[str] = set()
    for case in cases[family][:RUN]:
        small = smaller_attention(case)
        with torch.no_grad():
            found = lot.run.run(small, lot.contenders.Source("cpu"), Eager(), PEERS)
        assert not found.wrong, f"{small.name}: {found.wrong}"
        assert "kernel_hub" in found.train
        for name, reason in found.reasons.items():  # torch's own, without a GPU
            lacking = ("NotImplemented", "No viable backend")
            assert any(word in reason for word in lacking), f"{small.name}: {name}: {reason}"
        beside |= found.peers.keys()
    assert beside == BESIDE[family]


def test_a_wrong_output_is_seen(
    cases: Mapping[str, list[Any]], monkeypatch: pytest.MonkeyPatch, peers: None
) -> None:
    """Of ours, in the last row alone; of a peer, which is left out."""
    forward, backwards = lot.run.attention, lot.attention_backward
    attend, backward = forward.flash_attention, backwards.backward_portable.backward

    def spoilt(*given: Any, out: Any, **options: Any) -> None:
        attend(*given, out=out, **options)[..., -1, -1, -1] += 0.5

    for family in ("varlen", "window", "softcap", "attention_fp8", "paged"):
        small = smaller_attention(cases[family][0])
        run = functools.partial(lot.run.run, small, lot.contenders.Source("cpu"), Eager())
        assert not run(PEERS).wrong
        monkeypatch.setattr(forward, "flash_attention", spoilt)
        assert "largest error" in run(PEERS).wrong, family
        monkeypatch.setattr(forward, "flash_attention", attend)

    def spoilt_keys(*given: Any, **options: Any) -> None:
        backward(*given, **options)
        given[5][-1, 0, -1, -1] += 0.5

    small = smaller_attention(cases["backward"][0])
    monkeypatch.setattr(backwards.backward_portable, "backward", spoilt_keys)
    found = lot.run.run(small, lot.contenders.Source("cpu"), Eager(), PEERS)
    assert "largest error" in found.wrong
    monkeypatch.setattr(backwards.backward_portable, "backward", backward)
    monkeypatch.setattr(backwards, "xformers_fa3", lambda op="fwd": lambda *_, **__: None)
    found = lot.run.run(small, lot.contenders.Source("cpu"), Eager(), PEERS)
    assert not found.wrong and "FlashAttention-3" in found.refused


@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_own_ops_take_such_arguments(is_causal: bool) -> None:
    """On tensors without memory: names, order and shapes."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    q, k = empty(2, 40, 6, 64), empty(2, 40, 2, 64)
    library, backwards = lot.attention_peers, lot.attention_backward
    window = (7, -1) if is_causal else (7, 7)
    assert library.torch_flash(q, k, k, is_causal, 0.1, window=window)().shape == q.shape
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    rows = q.flatten(0, 1)
    found = library.torch_flash(rows, *[k.flatten(0, 1)] * 2, is_causal, 0.1, bounds, 40)()
    assert found.shape == rows.shape
    lse = torch.empty(2, 6, 40, device="meta")
    grads = backwards.by_flash(backwards.Operands(q, k, k, q, q, lse), is_causal)()
    assert grads[0].shape == q.shape and grads[1].shape[:2] == k.shape[:2]


def test_loops_in_python_are_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], []

    def launch(seconds: float) -> None:
        log.append(seconds)
        now[0] += seconds

    cuda = SimpleNamespace(synchronize=lambda: launch(1e-5))
    fake = SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: 0, sum=lambda _: None, int32=0)
    monkeypatch.setattr(lot.clock, "torch", fake)
    monkeypatch.setattr(lot.clock, "l2_bytes", lambda: 50 << 20)
    monkeypatch.setattr(lot.clock.time, "perf_counter", lambda: now[0])
    given = {"x": [functools.partial(launch, 1e-3), functools.partial(launch, 3e-3)]}
    times = lot.clock.Clock(4).measure(given, 1000.0, is_eager=True)
    assert not times.failed and not times.behind
    # Five calls in turn and the wait for the last.
    assert times.train["x"] == [pytest.approx((3e-3 + 6e-3 + 1e-5) / 5 * 1e6)] * len(
        times.train["x"]
    )
    assert len(times.train["x"]) == 4
