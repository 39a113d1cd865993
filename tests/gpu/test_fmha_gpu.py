"""fmha_v2 on a real GPU: the stand-ins of fmha_stand_in.cu, and the user's own kernels.

KERNEL_HUB_FMHA_DIR names a folder of TensorRT-LLM's cubins or `.cubin.cpp` files: each kernel in it
is called too, of any version whose struct is known.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference of these tests is torch's arithmetic")

from kernel_hub import KernelFunction  # noqa: E402
from kernel_hub.errors import LaunchConfigError  # noqa: E402
from kernel_hub.formats import fmha_v2  # noqa: E402
from kernel_hub.formats.fmha_v2 import KernelName, _layouts  # noqa: E402
from kernel_hub.memory import DeviceArray  # noqa: E402
from kernel_hub.testing.compare import compare  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
GUARD = 7.0
# (Q, K) lengths: those of Q are the ends of K where K is longer.
EQUAL = [(199, 199), (1, 1), (0, 0), (128, 128), (300, 300)]
LONGER = [(199, 260), (1, 129), (0, 17), (64, 64), (130, 300)]
E4M3_SCALES = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 0.5, "out_scale": 0.25}


def folder() -> Path | None:
    given = os.environ.get("KERNEL_HUB_FMHA_DIR")
    return Path(given) if given else None


def own_kernels() -> list[Any]:
    """(file, name) of each kernel in KERNEL_HUB_FMHA_DIR that `run` takes.

    Alibi's tma_ws kernels exist in TensorRT-LLM under the causal mask alone.
    """
    root = folder()
    files = (
        [] if root is None else sorted(p for p in root.iterdir() if p.suffix in (".cubin", ".cpp"))
    )
    return [
        pytest.param(path, name, id=str(name))
        for path in files
        for name in fmha_v2.load(path)
        if not any(a.startswith(("sage", "skip", "mtp")) for a in name.attributes)
        and not ("alibi" in name.attributes and name.mask in ("padding", "custom_mask"))
    ]


def reader_of(function: KernelFunction, name: KernelName) -> Any:
    """What the kernel reads."""
    return _layouts.reader_of(function.load(), name, torch.cuda.current_device())


def reads_sinks(function: KernelFunction, name: KernelName) -> bool:
    """Some kernels have the field and do not read it; for them the argument is refused."""
    reader = reader_of(function, name)
    field = getattr(reader.layout.struct, "attention_sinks", None)
    return field is not None and field.offset in reader.reads


def is_run(function: KernelFunction, name: KernelName) -> bool:
    """Older kernels of some kinds are refused."""
    is_old = not hasattr(reader_of(function, name).layout.struct, "k_stride")
    return not is_old or (name.variant != "tma_ws" and name.layout in ("qkv", "q_paged_kv"))


@functools.cache
def load(path: Path) -> dict[KernelName, KernelFunction]:
    return fmha_v2.load(path)


@pytest.fixture(scope="module")
def stand_ins(
    compile_cuda: Callable[..., Path], device_arch: str
) -> dict[KernelName, KernelFunction]:
    if device_arch != "sm_90":
        pytest.skip("the stand-ins use the TMA and are named sm90")
    return load(compile_cuda("fmha_stand_in.cu", "-cubin", "-arch=sm_90a"))


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

    def check(self, function: KernelFunction) -> None:
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
        print(f"{name}: {result.message}")
        assert result.ok, result.message
        if stats is not None and not {"alibi", "attention_sinks"} & self.options.keys():
            self.check_stats(stats, sums)

    def check_stats(self, stats: Any, sums: Any) -> None:
        largest, total = stats.unbind(dim=2)
        found = largest.double() + total.double().log()
        print(f"{self.name}: log-sum-exp differs by {float((found - sums).abs().max()):.3g}")
        assert float((found - sums).abs().max()) < 0.05


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
    if name.mask in ("sliding_or_chunked_causal", "sliding_window_causal"):
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


def call_all(name: KernelName, function: KernelFunction) -> None:
    found = variations(name)
    if reads_sinks(function, name):
        found.append({"sinks": True})
    for options in found:
        for heads, kv_heads, page_size in ((4, 4, 32), (6, 2, 256)):
            Case(name, heads, kv_heads, page_size, **options).check(function)


def call_each(kernels: dict[KernelName, KernelFunction]) -> None:
    failed = {}
    for name, function in kernels.items():
        try:
            if is_run(function, name):
                call_all(name, function)
            else:
                with pytest.raises(LaunchConfigError, match="are not known here"):
                    Case(name, 4, 4).check(function)
        except AssertionError as error:
            failed[str(name)] = str(error)
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


def test_stand_ins(stand_ins: dict[KernelName, KernelFunction]) -> None:
    assert len(stand_ins) == 11
    call_each(stand_ins)


@pytest.mark.parametrize("struct", ["WITHOUT_SINKS", "P640", "P576", "LONG512", "P512"])
def test_stand_ins_of_other_structs(
    compile_cuda: Callable[..., Path], device_arch: str, struct: str
) -> None:
    if device_arch != "sm_90":
        pytest.skip("the stand-ins use the TMA and are named sm90")
    kernels = load(compile_cuda("fmha_stand_in.cu", "-cubin", "-arch=sm_90a", f"-DSTRUCT={struct}"))
    assert len(kernels) == (11 if struct == "WITHOUT_SINKS" else 5)
    call_each(kernels)


@pytest.mark.parametrize(("path", "name"), own_kernels())
def test_real_kernels(path: Path, name: KernelName) -> None:
    function = load(path)[name]
    if name.arch != "sm90":
        pytest.skip(f"a kernel for {name.arch}")
    if not is_run(function, name):
        pytest.skip("an older kernel of a kind that is refused")
    if name.q_step is None:
        with pytest.raises(LaunchConfigError, match="threads="):
            Case(name, 4, 4).check(function)
        return
    call_all(name, function)


@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_a_plan_repeats_itself_in_a_graph_too(
    stand_ins: dict[KernelName, KernelFunction], mask: str
) -> None:
    fields = {"variant": "tma_ws", "dtype": "fp16"} if mask == "causal" else {"variant": "nl"}
    function = fmha_v2.find(stand_ins, mask=mask, head_dim=128, **fields)
    case = Case(fmha_v2.parse_name(function.name), 4, 4)
    plan = fmha_v2.plan(function, *case.inputs, **case.options)
    first = plan().clone()
    for _ in range(3):
        plan.out.zero_()
        torch.testing.assert_close(plan(), first, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan()
    for _ in range(2):
        plan.out.zero_()
        graph.replay()
        torch.testing.assert_close(plan.out, first, rtol=0, atol=0)


def test_arrays_of_our_own_and_another_stream(
    stand_ins: dict[KernelName, KernelFunction],
) -> None:
    function = fmha_v2.find(stand_ins, mask="causal", variant="nl")
    case = Case(fmha_v2.parse_name(function.name), 2, 2)
    expected = fmha_v2.run(function, *case.inputs, **case.options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    again = fmha_v2.run(function, *case.inputs, stream=stream, **case.options)
    stream.synchronize()
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    packed = DeviceArray.from_numpy(case.inputs[0].cpu().numpy())
    starts = DeviceArray.from_numpy(case.options["cu_seqlens"].cpu().numpy())
    ours = fmha_v2.run(function, packed, cu_seqlens=starts, num_kv_heads=2)
    assert isinstance(ours, DeviceArray)
    np.testing.assert_array_equal(ours.to_numpy(), expected.cpu().numpy())
