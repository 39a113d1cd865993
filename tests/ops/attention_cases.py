"""One case of attention: made from a few numbers, run through the public op, held against fp64.

Shared by test_flash_attention.py and the random grid tests/gpu_attention_grid.py. What lies
outside every sequence is nan, table entries that no length reaches are garbage, and outputs lie
poisoned in guard bands.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from bits import same_bits
from drawn_sinks import draw_sinks

from kernel_hub.ops import flash_attention, flash_attention_qkvpacked
from kernel_hub.ops.attention import eager, registered
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import (
    reference_attention,
    reference_attention_backward,
)

DENSE = ("bshd", "bhsd", "strided", "unaligned", "expanded", "kvpacked", "qkvpacked", "gqapacked")
RAGGED = ("varlen", "varlen_packed", "varlen_q", "varlen_k", "cache", "varlen_cache")
PAGED = ("paged", "paged_bhsd", "varlen_paged")
LAYOUTS = (*DENSE, *RAGGED, *PAGED)
# Layouts whose sequences have one length.
ONE_LENGTH_Q = (*DENSE, "varlen_k", "cache", "paged", "paged_bhsd")
ONE_LENGTH_K = (*DENSE, "varlen_q")
SAME_LENGTHS = ("qkvpacked", "gqapacked", "varlen_packed")
# Whose v has the head_dim of k.
ONE_HEAD_DIM = ("kvpacked", *SAME_LENGTHS)
GARBAGE_PAGES = (-1, -(2**31), 2**31 - 1, 10**6)


@dataclass(frozen=True)
class Case:
    """Lengths are those of each sequence; where a layout has one length, all are the same."""

    layout: str = "bshd"
    dtype: str = "bf16"
    head_dim: int = 64
    num_heads: int = 2
    num_kv_heads: int = 1
    lengths_q: tuple[int, ...] = (33, 33)
    lengths_k: tuple[int, ...] = (33, 33)
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # or "heads", "batch"
    softmax_scale: float | None = None
    page_size: int = 16
    bound: str = "tight"  # of the lengths: or "loose", "none"
    magnitude: float = 1.0
    return_lse: bool = True
    backward: bool = False
    deterministic: bool = False
    twice: bool = False
    seed: int = 0
    sinks: str = ""  # or their dtype
    own_head_dim_v: int | None = None

    @property
    def head_dim_v(self) -> int:
        return self.own_head_dim_v or self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    def features(self) -> list[str]:
        """What of the op this case uses, to be counted."""
        group = self.num_heads // self.num_kv_heads
        found = [self.layout, self.dtype, f"group {group}"]
        found += ["causal"] * self.causal + ["softcap"] * (self.softcap > 0)
        found += ["sinks"] * bool(self.sinks)
        found += ["own head_dim of v"] * (self.head_dim_v != self.head_dim)
        found += ["window"] * (self.window_size != (-1, -1)) + ["alibi"] * bool(self.alibi)
        found += ["no lse"] * (not self.return_lse) + ["large scores"] * (self.magnitude > 1)
        found += ["an empty sequence"] * (0 in self.lengths_q or 0 in self.lengths_k)
        found += ["backward"] * self.backward + ["own scale"] * (self.softmax_scale is not None)
        return found


@dataclass
class Inputs:
    """tensors: q, k, v as the op takes them, or one packed one; options: those of both sides."""

    tensors: list[torch.Tensor]
    options: dict[str, Any]
    out_shape: tuple[int, ...]
    own_options: dict[str, Any] = field(default_factory=dict)  # of the op's signature only


def make(case: Case, device: str) -> Inputs:
    """The tensors of a case."""
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype, batch_size = case.torch_dtype, len(case.lengths_q)
    head_dim, head_dim_v = case.head_dim, case.head_dim_v
    heads, kv_heads = case.num_heads, case.num_kv_heads

    def randn(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device)
        return (x * case.magnitude).to(dtype)

    def nans(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=device, dtype=dtype)

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    def spread(x: torch.Tensor) -> torch.Tensor:
        """x as a slice of something larger, full of nan."""
        if case.layout == "strided":
            room = nans(x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 1, x.shape[3] + 8)
            view = room[1:, 1:-1, 1:, 8:]
        else:
            room = nans(*x.shape[:-1], x.shape[-1] + 3)
            view = room[..., 1:-2]
        return view.copy_(x)

    def ragged(
        lengths: tuple[int, ...], num_heads: int, width: int = head_dim
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounds = int32([0, *itertools.accumulate(lengths)])
        rows = nans(sum(lengths) + case.seed % 3, num_heads, width)
        rows[: sum(lengths)] = randn(sum(lengths), num_heads, width)
        return rows, bounds

    options: dict[str, Any] = {
        "causal": case.causal, "window_size": case.window_size, "softcap": case.softcap,
        "softmax_scale": case.softmax_scale,
    }  # fmt: skip
    own: dict[str, Any] = {}
    if case.alibi:
        shape = (heads,) if case.alibi == "heads" else (batch_size, heads)
        options["alibi_slopes"] = torch.rand(shape, generator=generator, device=device)
    if case.sinks:
        options["sinks"] = draw_sinks(case.sinks, heads, case.seed, device)

    longest_q, longest_k = max(case.lengths_q), max(case.lengths_k)
    extra = {"tight": 0, "loose": 70, "none": 0}[case.bound]

    def bound(name: str, longest: int) -> None:
        if case.bound != "none":
            own[name] = longest + extra

    layout, widths = case.layout, (head_dim, head_dim_v)
    if layout in ("qkvpacked", "gqapacked"):
        shape = (3, heads) if layout == "qkvpacked" else (heads + 2 * kv_heads,)
        qkv = randn(batch_size, longest_q, *shape, head_dim)
        if layout == "gqapacked":
            own |= {"num_heads": heads, "num_kv_heads": kv_heads}
        return Inputs([qkv], options, (batch_size, longest_q, heads, head_dim), own)
    if layout == "varlen_packed":
        qkv, bounds = ragged(case.lengths_q, heads + 2 * kv_heads)
        own |= {"num_heads": heads, "num_kv_heads": kv_heads, "cu_seqlens": bounds}
        bound("max_seqlen", longest_q)
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        return Inputs([qkv], options, (qkv.shape[0], heads, head_dim), own)

    if layout in ("varlen", "varlen_q", "varlen_cache", "varlen_paged"):
        q, options["cu_seqlens_q"] = ragged(case.lengths_q, heads)
        bound("max_seqlen_q", longest_q)
    else:
        q = randn(batch_size, longest_q, heads, head_dim)
    if layout in ("varlen", "varlen_k"):
        k, options["cu_seqlens_k"] = ragged(case.lengths_k, kv_heads)
        v, _ = ragged(case.lengths_k, kv_heads, head_dim_v)
        bound("max_seqlen_k", longest_k)
    elif layout in PAGED:
        page_size, generator_cpu = case.page_size, torch.Generator().manual_seed(case.seed)
        counts = [-(-length // page_size) for length in case.lengths_k]
        num_pages, most = sum(counts) + 3, max(counts) + case.seed % 3
        order = torch.randperm(num_pages, generator=generator_cpu).tolist()
        k = nans(num_pages, page_size, kv_heads, head_dim)
        # Sometimes v has strides of its own.
        v = nans(num_pages, page_size, kv_heads, head_dim_v + 8 * (case.seed % 4 == 3))
        v = v[..., :head_dim_v]
        table = [
            [GARBAGE_PAGES[(row + column) % len(GARBAGE_PAGES)] for column in range(most)]
            for row in range(batch_size)
        ]
        for row, (count, length) in enumerate(zip(counts, case.lengths_k, strict=True)):
            for column in range(count):
                page = table[row][column] = order.pop()
                filled = min(page_size, length - column * page_size)
                for x in (k, v):
                    x[page, :filled] = randn(filled, kv_heads, x.shape[-1])
        options["block_table"] = int32(table).reshape(batch_size, most)
        options["cache_seqlens"] = int32(case.lengths_k)
        bound("max_seqlen_k", longest_k)
    elif layout in ("cache", "varlen_cache"):
        k, v = (nans(batch_size, longest_k + 3, kv_heads, width) for width in widths)
        for row, length in enumerate(case.lengths_k):
            for x in (k, v):
                x[row, :length] = randn(length, kv_heads, x.shape[-1])
        options["cache_seqlens"] = int32(case.lengths_k)
        bound("max_seqlen_k", longest_k)
    elif layout == "kvpacked":
        k, v = randn(batch_size, longest_k, 2, kv_heads, head_dim).unbind(2)
    elif layout == "expanded":
        k, v = (
            randn(1, longest_k, 1, width).expand(batch_size, longest_k, kv_heads, width)
            for width in widths
        )
    else:
        k, v = (randn(batch_size, longest_k, kv_heads, width) for width in widths)
    if layout in ("strided", "unaligned"):
        q, k, v = spread(q), spread(k), spread(v)
    if layout in ("bhsd", "paged_bhsd"):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        options["layout"] = "bhsd"
    return Inputs([q, k, v], options, (*q.shape[:-1], head_dim_v), own)


def call(case: Case, inputs: Inputs, **more: Any) -> Any:
    """The public op on a case."""
    options = inputs.options | inputs.own_options | more
    if len(inputs.tensors) == 3:
        return flash_attention(*inputs.tensors, **options)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        options.pop(name, None)
    return flash_attention_qkvpacked(*inputs.tensors, **options)


def unpacked(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """q, k, v."""
    if len(inputs.tensors) == 3:
        return inputs.tensors
    (qkv,) = inputs.tensors
    heads, kv_heads = case.num_heads, case.num_kv_heads
    if case.layout == "qkvpacked":
        return list(qkv.unbind(2))
    return list(qkv.split((heads, kv_heads, kv_heads), -2))


@contextlib.contextmanager
def guarded_results() -> Iterator[None]:
    """What the op allocates for lse and gradients is poisoned, in guard bands, and watched."""
    made: list[Guarded] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        made.append(Guarded(x.shape, x.dtype, x.device))
        return made[-1].tensor

    with (
        mock.patch.object(eager, "_lse_like", watch),
        mock.patch.object(eager, "_cpu_lse", lambda q: watch(eager.new_lse(q))),
        mock.patch.object(registered, "_new_grad", watch),
    ):
        yield
    for each in made:
        each.check("lse or a gradient")


def run(case: Case, device: str) -> float:
    """Check a case; the largest error there was, in units of what is allowed."""
    inputs = make(case, device)
    dtype = case.torch_dtype
    qkv = unpacked(case, inputs)
    with torch.no_grad():
        truth, truth_lse = reference_attention(*qkv, **inputs.options)
        own, _ = reference_attention(*qkv, **inputs.options, dtype=dtype)
        row_stride = case.head_dim_v + 8 * (case.seed % 2)
        guarded = Guarded(inputs.out_shape, dtype, device, row_stride=row_stride)
        with guarded_results():
            result = call(case, inputs, out=guarded.tensor, return_lse=case.return_lse)
        out, lse = result if case.return_lse else (result, None)
        guarded.check()
        atol = attention_parts_atol(truth, dtype, case.softcap)
        ratios = [_ratio(check(out, truth, own, atol=atol))]
        if lse is not None:
            ratios.append(_ratio(check_lse(lse, truth_lse, _largest_score(case), case.softcap)))
        if case.twice:
            again = call(case, inputs)
            rows = slice(None)
            if "cu_seqlens_q" in inputs.options:
                rows = slice(int(inputs.options["cu_seqlens_q"][-1]))
            same_bits(again[rows].contiguous(), out[rows].contiguous(), name="out, again")
    if case.backward:
        ratios += check_gradients(case, inputs, out)
    return max(ratios)


def check_lse(lse: torch.Tensor, truth: torch.Tensor, largest_score: float, softcap: float) -> Any:
    """lse is fp32 whatever the dtype of q: it may be off by what fp32 makes of its scores."""
    assert lse.dtype == torch.float32
    finite = truth[torch.isfinite(truth)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    atol = 2e-6 * max(1.0, largest, softcap) + 1e-7 * largest_score
    return check(lse, truth, truth.float(), atol=atol, name="lse")


def _largest_score(case: Case) -> float:
    """Before softcap: four standard deviations of q k^T."""
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    return 4 * case.magnitude**2 * case.head_dim**0.5 * abs(scale)


def check_gradients(case: Case, inputs: Inputs, out: torch.Tensor) -> list[float]:
    """dq, dk and dv through autograd; one unit in the last place of the largest is allowed."""
    leaves = [x.detach().requires_grad_() for x in inputs.tensors]
    dout = torch.randn(out.shape, device=out.device).to(out.dtype)
    rows = None
    if "cu_seqlens_q" in inputs.options:
        rows = int(inputs.options["cu_seqlens_q"][-1])
        dout[rows:] = float("nan")
    if case.seed % 4 == 0 and rows is None:
        dout = torch.full((), 0.5, device=out.device, dtype=out.dtype).expand(out.shape)
    if case.layout == "strided":
        dout = torch.cat((dout, dout), -1)[..., : case.head_dim_v]
    given = Inputs(leaves, inputs.options, inputs.out_shape, inputs.own_options)

    def gradients() -> list[torch.Tensor]:
        with guarded_results():
            found = call(case, given, deterministic=case.deterministic)
            return list(torch.autograd.grad(found, leaves, dout))

    found = gradients()
    if case.deterministic:
        for index, again in enumerate(gradients()):
            same_bits(again.contiguous(), found[index].contiguous(), name=f"gradient {index}")
    for grad, x in zip(found, inputs.tensors, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
    if len(found) == 1:
        found = unpacked(case, Inputs(found, {}, ()))
    qkv = unpacked(case, inputs)
    truth = reference_attention_backward(*qkv, dout, **inputs.options)
    own = reference_attention_backward(*qkv, dout, **inputs.options, dtype=out.dtype)
    largest = max((float(x.abs().max()) for x in truth if x.numel()), default=0.0)
    atol = torch.finfo(out.dtype).eps * largest + torch.finfo(out.dtype).tiny
    return [
        _ratio(check(*each, atol=atol, name=name))
        for name, *each in zip(("dq", "dk", "dv"), found, truth, own, strict=True)
    ]


def _ratio(result: Any) -> float:
    return float(result.error / result.limit) if result.limit else 0.0
