"""Calls of fmha_v2 kernels on a GPU, and what they must give: torch's arithmetic in fp64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_hub import KernelFunction
from kernel_hub.errors import LaunchConfigError
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import KernelName, struct_layouts
from kernel_hub.formats.fmha_v2.names import SLIDING
from kernel_hub.testing.compare import compare

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
GUARD = 7.0
# (Q, K) lengths: those of Q are the ends of K where K is longer.
EQUAL = [(199, 199), (1, 1), (0, 0), (128, 128), (300, 300)]
LONGER = [(199, 260), (1, 129), (0, 17), (64, 64), (130, 300)]
E4M3_SCALES = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 0.5, "out_scale": 0.25}


def reader_of(function: KernelFunction, name: KernelName) -> Any:
    """What the kernel reads."""
    return struct_layouts.reader_of(function.load(), name, torch.cuda.current_device())


class Case:
    """Tensors for one kernel, how to call it, and what it must give."""

    def __init__(
        self, name: KernelName, heads: int, kv_heads: int, page_size: int = 32, **options: Any
    ) -> None:
        self.name, self.heads, self.kv_heads = name, heads, kv_heads
        self.page_size = page_size
        generator = torch.Generator("cuda").manual_seed(7)
        lengths = EQUAL if name.layout == "qkv" else LONGER
        if name.seq_len:
            lengths = [(min(q, name.seq_len), min(k, name.seq_len)) for q, k in lengths]
        self.lengths = lengths
        self.options: dict[str, Any] = {"max_seqlen": max(q for q, _ in lengths), **options}
        dtype = DTYPES[name.dtype]

        def values(*shape: int) -> Any:
            made = torch.randn(shape, device="cuda", generator=generator)
            return (made * (0.5 if name.dtype == "e4m3" else 1.0)).to(dtype)

        total_q, total_k = (sum(side) for side in zip(*lengths, strict=True))
        self.q = values(total_q, heads, name.head_dim)
        self.k = values(total_k, kv_heads, name.head_dim)
        self.v = values(total_k, kv_heads, name.head_dim_v)
        self.options["cu_seqlens"] = self.starts(0)
        if name.layout != "qkv":
            self.options["cu_seqlens_k"] = self.starts(1)
        self.inputs = getattr(self, f"as_{name.layout}")()
        if name.dtype == "e4m3":
            self.options |= E4M3_SCALES
        if "softcapping" in name.attributes:
            self.options.setdefault("softcap", 5.0)
        if "alibi" in name.attributes:
            self.options["alibi"] = True
        if self.options.pop("sinks", False):
            self.options["attention_sinks"] = torch.randn(heads, device="cuda") * 2 + 1
        if name.mask == "custom_mask":
            self.add_custom_mask()

    def starts(self, side: int) -> Any:
        ends = np.cumsum([0, *(pair[side] for pair in self.lengths)])
        return torch.tensor(ends, dtype=torch.int32, device="cuda")

    def as_qkv(self) -> list[Any]:
        total, d, dv = len(self.q), self.name.head_dim, self.name.head_dim_v
        self.options["num_kv_heads"] = self.kv_heads
        parts = [part.reshape(total, -1) for part in (self.q, self.k, self.v)]
        packed = torch.cat(parts, dim=1)
        if d == dv:
            return [packed.reshape(total, self.heads + 2 * self.kv_heads, d)]
        self.options["num_heads"] = self.heads
        return [packed]

    def as_q_kv(self) -> list[Any]:
        if self.name.head_dim == self.name.head_dim_v:
            return [self.q, torch.stack([self.k, self.v], dim=1)]
        total = len(self.k)
        self.options["num_kv_heads"] = self.kv_heads
        return [self.q, torch.cat([self.k.view(total, -1), self.v.view(total, -1)], dim=1)]

    def as_q_k_v(self) -> list[Any]:
        # Rows of V with a gap, as where it lies beside other things.
        wide = torch.zeros(len(self.v), self.kv_heads + 1, self.name.head_dim_v, device="cuda")
        wide = wide.to(self.v.dtype)
        wide[:, :-1] = self.v
        return [self.q, self.k, wide[:, :-1]]

    def as_q_paged_kv(self) -> list[Any]:
        name, device, size = self.name, "cuda", self.page_size
        pages = [-(-k // size) for _, k in self.lengths]
        order = torch.randperm(2 * sum(pages) + 3, generator=torch.Generator().manual_seed(1))
        shape = (len(order), self.kv_heads, size, name.head_dim)
        pool = torch.full(shape, float("nan"), device=device).to(self.k.dtype)
        table = torch.full((len(pages), 2, max(pages) + 1), 2**30, dtype=torch.int32)
        starts, free = self.starts(1).tolist(), iter(order.tolist())
        for seq, count in enumerate(pages):
            for part, rows in enumerate((self.k, self.v)):
                for page in range(count):
                    block = next(free)
                    table[seq, part, page] = block
                    first = starts[seq] + page * size
                    chunk = rows[first : min(first + size, starts[seq + 1])]
                    pool[block] = 0
                    pool[block, :, : len(chunk), : chunk.shape[-1]] = chunk.transpose(0, 1)
        self.options["block_table"] = table.to(device)
        return [self.q, pool]

    def add_custom_mask(self) -> None:
        rng = np.random.default_rng(3)
        self.masks = [rng.random(pair) < 0.6 for pair in self.lengths]
        for mask in self.masks:
            mask[:, :1] = True  # no row sees nothing
            if self.name.variant != "tma_ws":
                self.uncover(mask)
        longest = max(k for _, k in self.lengths)
        packed, rows = fmha_v2.pack_mask(self.name, self.masks, longest)
        self.options["packed_mask"] = torch.from_numpy(packed.view(np.int32)).cuda()
        self.options["cu_mask_rows"] = torch.from_numpy(rows).cuda()
        self.options["max_seqlen_k"] = longest

    def uncover(self, mask: Any) -> None:
        """What those kernels take as visible: see pack_mask."""
        rows, cols = mask.shape
        for first in range(0, rows, self.name.q_step):
            start = (first + cols - rows) // self.name.kv_step * self.name.kv_step
            mask[first : first + self.name.q_step, :start] = True

    def visible(self, index: int) -> Any:
        rows, cols = self.lengths[index]
        if self.name.mask == "custom_mask":
            return torch.from_numpy(self.masks[index]).cuda()
        place = torch.arange(rows, device="cuda")[:, None] + cols - rows
        col = torch.arange(cols, device="cuda")[None]
        if self.name.mask == "padding":
            return torch.ones(rows, cols, dtype=torch.bool, device="cuda")
        seen = col <= place
        left = self.options.get("window_size", (-1, -1))[0]
        if left >= 0:
            seen &= col >= place - left
        if chunk := self.options.get("chunk_size"):
            seen &= col >= place // chunk * chunk
        return seen

    def reference(self, dtype: Any, low: Any = None) -> tuple[Any, Any]:
        """(out, log-sum-exp): in fp64, or with what `low` cannot hold rounded to it."""
        name, options = self.name, self.options
        rounded = (lambda x: x) if low is None else (lambda x: x.to(low).to(dtype))
        scales = E4M3_SCALES if name.dtype == "e4m3" else dict.fromkeys(E4M3_SCALES, 1.0)
        scale = options.get("softmax_scale", name.head_dim**-0.5)
        scale *= scales["q_scale"] * scales["k_scale"]
        outs, sums = [], []
        q_starts, k_starts = self.starts(0).tolist(), self.starts(1).tolist()
        group = self.heads // self.kv_heads
        for index, (num_rows, _) in enumerate(self.lengths):
            if not num_rows:
                continue
            rows = slice(q_starts[index], q_starts[index + 1])
            cols = slice(k_starts[index], k_starts[index + 1])
            q = self.q[rows].to(dtype).transpose(0, 1)
            k, v = (x[cols].to(dtype).transpose(0, 1) for x in (self.k, self.v))
            k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
            scores = rounded(q @ k.transpose(1, 2) * scale)
            if cap := options.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            if options.get("alibi"):
                places = torch.arange(scores.shape[2], device="cuda").to(dtype)
                scores = scores + slopes(self.heads).to(dtype)[:, None, None] * places
            scores = scores.masked_fill(~self.visible(index), float("-inf"))
            sums.append(scores.logsumexp(dim=2).transpose(0, 1))
            if (sinks := options.get("attention_sinks")) is not None:  # a column without a value
                column = sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, column], dim=2)
            weights = rounded(scores.softmax(dim=2))[:, :, : k.shape[1]]
            out = weights @ v * (scales["v_scale"] / scales["out_scale"])
            outs.append(out.transpose(0, 1))
        return torch.cat(outs), torch.cat(sums)

    def check(self, function: KernelFunction) -> str:
        """Call it and compare; what was found."""
        name = self.name
        shape = (len(self.q) + 2, self.heads, name.head_dim_v)
        held = torch.full(shape, GUARD, device="cuda").to(DTYPES[name.out_dtype])
        stats = None
        default_scale = "softmax_scale" not in self.options
        has_stats = hasattr(reader_of(function, name).layout.struct, "softmax_stats")
        if has_stats and (
            name.variant != "tma_ws" or ("softmax" in name.attributes and default_scale)
        ):
            stats = torch.zeros(len(self.q), self.heads, 2, device="cuda")
        out = fmha_v2.run(
            function, *self.inputs, out=held[1:-1], softmax_stats=stats, **self.options
        )
        torch.cuda.synchronize()
        assert bool((held[0].float() == GUARD).all() and (held[-1].float() == GUARD).all())
        truth, sums = self.reference(torch.float64)
        # These kernels round scores and weights to the inputs' dtype; those that accumulate in
        # fp16 also each partial sum.
        own, _ = self.reference(torch.float32, DTYPES[name.dtype])
        atol = 4 * 2**-10 * float(truth.abs().max()) if name.accumulation == "fp16" else None
        result = compare(out.float(), truth, own.to(DTYPES[name.out_dtype]).float(), atol=atol)
        said = f"{self.heads} and {self.kv_heads} heads: {result.message}"
        assert result.ok, said
        if stats is None or {"alibi", "attention_sinks"} & self.options.keys():
            return said
        largest, total = stats.unbind(dim=2)
        differs = float((largest.double() + total.double().log() - sums).abs().max())
        said += f"; log-sum-exp differs by {differs:.3g}"
        assert differs < 0.05, said
        return said


def slopes(heads: int) -> Any:
    """ALiBi's slopes, for any number of heads (Press et al., 2022)."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 / power * (i + 1)) for i in range(power)]
    others = [2.0 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]
    return torch.tensor(first + others, device="cuda")


def variations(name: KernelName) -> list[dict[str, Any]]:
    """Options that a kernel is called with besides none."""
    found: list[dict[str, Any]] = [{}]
    if "softcapping" in name.attributes:
        found.append({"softcap": 30})
    if name.mask in SLIDING:
        found.append({"window_size": (70, 0)})
        if name.variant == "tma_ws":
            found.append({"chunk_size": 64})
    elif (
        name.mask == "causal" and name.variant != "tma_ws" and "softcapping" not in name.attributes
    ):
        found.append({"alibi": True})
    else:
        found.append({"softmax_scale": 0.25, "causal": False if name.mask == "padding" else None})
    return found


@functools.cache
def load(path: Path) -> dict[KernelName, KernelFunction]:
    return fmha_v2.load(path)


def call(path: Path, text: str) -> str:
    """Call one kernel of a file in every way, or see it refused; AssertionError where it errs."""
    name = fmha_v2.parse_name(text)
    function = load(path)[name]
    if name.q_step is None:
        return refused(name, function, 4, "threads= is needed")
    reader = reader_of(function, name)
    is_old = not hasattr(reader.layout.struct, "k_stride")
    if is_old and (name.variant == "tma_ws" or name.layout not in ("qkv", "q_paged_kv")):
        return refused(name, function, 4, "are not known here")
    options = variations(name)
    sizes = [(4, 4, 32), (6, 2, 256)]
    said = []
    if "attention_sinks" in reader.fields:
        if name.dtype == "e4m3" and {"alibi", "softcapping"} & set(name.attributes):
            said.append(refused(name, function, 4, "weighs a sink e^8 / 256", sinks=True))
        else:
            options.append({"sinks": True})
    if is_old and name.layout == "q_paged_kv" and name.mask in SLIDING:
        ring = options.pop()
        said.append(refused(name, function, 4, "ring of the window's size", **ring))
    elif is_old and name.mask in SLIDING and "0.16" not in reader.layout.whose:
        said.append(refused(name, function, 4, "it is not known", **options.pop()))
    two_sizes = name.layout == "qkv" and name.head_dim != name.head_dim_v
    if two_sizes and name.variant != "tma_ws" and (is_old or reader.may_assert):
        said.append(refused(name, function, 2, "stop themselves at fewer"))
        sizes = [(4, 4, 32), (6, 6, 256)]
    for given in options:
        for heads, kv_heads, page_size in sizes:
            said.append(Case(name, heads, kv_heads, page_size, **given).check(function))
    return "\n".join(said)


def refused(
    name: KernelName, function: KernelFunction, kv_heads: int, words: str, **options: Any
) -> str:
    try:
        Case(name, 4, kv_heads, **options).check(function)
    except LaunchConfigError as error:
        assert words in str(error), str(error)
        return f"refused: {error}"
    raise AssertionError(f"{name} is not refused, but ran: {words}")
