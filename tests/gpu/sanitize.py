"""Every variant of the ops over ugly shapes once, for compute-sanitizer (no comparison: tests/ops
does that; tests/ops/test_sanitizer_cases.py holds that no variant is left out).

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/sanitize.py
done
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from kernel_hub import Kernel, ops
from kernel_hub.ops.matmul import linear_plan, paired_plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HIDDEN = (1, 8, 127, 256, 1000, 2048, 4096, 5120, 8192, 16384, 40000)
ROWS = (1, 3, 300)
# What takes long under racecheck: wide rows few, many rows narrow.
FEW = (*itertools.product((1, 3), HIDDEN), *((300, size) for size in (1, 8, 127, 1000, 2048)))
# (m, n, k) for linear as it chooses its variant on an H200; those with fp32 results, of every such
# variant; and those of its portable bodies.
LINEAR = (
    (1, 8, 64), (1, 4096, 4096), (5, 8, 64), (17, 8, 1024), (65, 8, 8192), (5, 14336, 64),
    (300, 6144, 64), (3000, 512, 512), (33, 5120, 1024), (300, 333, 520), (37, 45, 72),
)  # fmt: skip
LINEAR_FP32 = (
    (1, 8, 64), (5, 8, 64), (5, 8, 256), (17, 8, 512), (5, 14336, 64), (37, 45, 72),
    (200, 512, 1024), (700, 1536, 1024), (1500, 5120, 1024), (100, 8192, 64), (257, 8192, 512),
)  # fmt: skip
LINEAR_PORTABLE = ((5, 40, 72), (12, 40, 4104), (20, 101, 1032), (2000, 2000, 72))
# What the choice of a variant turns on beyond the shapes above.
MANY_ROWS = ((4100, 4096), (4100, 2048), (1100, 8192), (1100, 16384))


def rms_norm(device: str) -> None:
    """Rows far apart, rows one behind the other (flat), with a residual and without."""
    shapes = [*itertools.product(ROWS, HIDDEN), *MANY_ROWS]
    for dtype, (rows, hidden) in itertools.product(DTYPES, shapes):
        x = torch.randn(rows, hidden + 8, device=device, dtype=dtype)[:, :hidden]
        residual = torch.randn(rows, hidden, device=device, dtype=dtype)
        weight = torch.randn(hidden, device=device, dtype=dtype)
        ops.rms_norm(x, weight)
        _ = [ops.rms_norm(x.contiguous(), weight, weights_ready=ready) for ready in (False, True)]
        ops.rms_norm(x, weight, residual=residual)
        ops.rms_norm(residual, weight, residual=x.contiguous(), out=residual)


def layer_norm(device: str) -> None:
    """Weights of either type or none, a residual before or after, results of each type."""
    for dtype, (rows, hidden) in itertools.product(DTYPES, FEW):
        x = torch.randn(rows, hidden + 8, device=device, dtype=dtype)[:, :hidden]
        residual = torch.randn(rows, hidden, device=device, dtype=dtype)
        weight = torch.randn(hidden, device=device)
        ops.layer_norm(x, weight, weight, deterministic="batch")
        ops.rms_norm(x, weight, bias=weight)
        ops.rms_norm(x.contiguous(), weight.to(dtype), residual=residual, adds_after=True)
        ops.layer_norm(x.contiguous(), weight.to(dtype), residual=residual, adds_after=True)
        for kind, how in itertools.product((torch.float8_e4m3fn, torch.int8), (False, "batch")):
            ops.layer_norm(x, weight, residual=residual, out_dtype=kind, deterministic=how)
            ops.rms_norm(x, weight, residual=residual, out_dtype=kind, deterministic=how)


def _activated(op: Callable[..., Any], *forms: dict[str, Any]) -> Callable[[str], None]:
    """Of every type and width, into its dtype and e4m3."""

    def run(device: str) -> None:
        for dtype, hidden, rows in itertools.product(DTYPES, (*HIDDEN[1:], 20480, 80000), (1, 300)):
            hidden -= hidden % 2
            x = torch.randn(rows, hidden + 16, device=device, dtype=dtype)[:, :hidden]
            for options in forms:
                op(x, **options)
                op(x.contiguous(), **options)
                op(x, **options, out_dtype=torch.float8_e4m3fn)

    return run


_BY_ERF_OR_TANH: list[dict[str, Any]] = [{"approximate": form} for form in ("none", "tanh")]
silu_and_mul, relu_squared = _activated(ops.silu_and_mul, {}), _activated(ops.relu_squared, {})
gelu = _activated(ops.gelu, *_BY_ERF_OR_TANH)
gelu_and_mul = _activated(ops.gelu_and_mul, *_BY_ERF_OR_TANH)
swigluoai_and_mul = _activated(
    ops.swigluoai_and_mul, *({"interleaved": interleaved} for interleaved in (False, True))
)


def softmax(device: str) -> None:
    """And its logarithm: all masks, rows of blocks, of a warp, kept, read twice; gradients."""
    long = ((1, 100001), (1, 140001), (17, 70000), (1, 151936), (1, 600000), (140, 20480))
    for dtype, (rows, size) in itertools.product(DTYPES, (*FEW, *long, (4100, 539))):
        x = torch.randn(rows, size + 8, device=device, dtype=dtype)[:, :size]
        mask = torch.randn(size, device=device)
        for op in (ops.softmax, ops.log_softmax):
            op(x, mask=mask > 0)
            with torch.enable_grad():
                out = op(leaf := x.contiguous().requires_grad_(), mask=mask.to(dtype), scale=0.5)
            torch.autograd.grad(out, leaf, x)


def quantize_e4m3(device: str) -> None:
    """Scales of each kind, found and given."""
    shapes = [*itertools.product((1, 3, 300), (*HIDDEN, 80000)), *MANY_ROWS, (300, 20480)]
    for dtype, (rows, size) in itertools.product(DTYPES, shapes):
        x = torch.randn(rows, size + 8, device=device, dtype=dtype)
        for per in ("tensor", "row", "1x128", "128x128"):
            for y in (x[:, :size], x.view(-1)[8 : 8 + rows * size].view(rows, size)):
                scale = ops.quantize_e4m3(y, per=per)[1]
                ops.quantize_e4m3(y, scale, per=per)


def sample(device: str) -> None:
    """Rows of one block and of several, candidates that suffice and that do not, all changes."""
    shapes = [*itertools.product((1, 5, 200), (1, 33, 3000)), (2, 20000)]
    for dtype, (batch, size) in itertools.product(DTYPES, shapes):
        logits = torch.randn(batch, size, device=device, dtype=dtype)
        ops.sample_slice(torch.cat([logits, logits * 0]), 7)
        rows = torch.arange(batch, device=device)
        top_k, top_p = (rows % 4 * 120).int(), 1 - (rows % 3) * 0.2
        words = torch.zeros(batch, -(-size // 32), dtype=torch.int32, device=device) + 0x1234567
        counts = torch.ones(batch, size, dtype=torch.int32, device=device)
        for given in ({}, {"top_k": top_k}, {"top_k": top_k, "top_p": top_p}, {"top_p": top_p}):
            top = torch.empty(batch, 20, dtype=torch.int64, device=device)
            best = {"out_top_ids": top, "out_top_logprobs": torch.empty(batch, 20, device=device)}
            ops.sample(logits, **given, **best, seed=rows, return_logprob=True)
        ops.sample(
            logits, top_k=top_k, min_p=top_p * 0.1, temperature=top_p - 0.6, seed=rows,
            bias=torch.randn(size, device=device), token_bitmask=words, prompt_bitmask=words,
            output_counts=counts, repetition_penalty=top_p, presence_penalty=top_p,
            frequency_penalty=top_p, softcap=30.0,
        )  # fmt: skip


def verify_draft(device: str) -> None:
    """Drafts with probabilities and without, greedy rows, drafts that are none; trees of them."""
    for dtype, size, batch in itertools.product(DTYPES, (33, 4096, 50257), (1, 5, 40)):
        logits = torch.randn(batch, 4, size, device=device, dtype=dtype)
        drafts = torch.arange(-1, 3 * batch - 1, device=device).view(batch, 3)
        temperature = torch.arange(batch, device=device) % 2 * 0.7
        for given in (None, torch.rand(batch, 3, size, device=device) * (2 / size)):
            ops.verify_draft(drafts, logits, given, temperature=temperature)
            ops.verify_tree(drafts, drafts.int() % 4 - 2, logits, given, temperature=temperature)


def cu_seqlens(device: str) -> None:
    """Few and many sequences, finished ones, more tokens than there are."""
    for batch in (1, 7, 300, 5000):
        lengths = torch.arange(-1, batch - 1, device=device).int() % 9 - 1
        table = torch.arange(3 * batch, device=device).int().view(batch, 3) - 2
        names = ("out_positions", "out_slots")
        places = {name: torch.empty(9 * batch, dtype=torch.int64, device=device) for name in names}
        ops.cu_seqlens(lengths)
        ops.cu_seqlens(lengths, cache_seqlens=lengths, block_table=table, page_size=4, **places)


def pad_input(device: str) -> None:
    """Both ways: units of 16, 4, 2 and 1 bytes, bounds that lie, sequences with too little room."""
    for size, lies, seqlen in itertools.product((4096, 12, 14, 7), (0, 9000), (1, 30)):
        bounds = torch.tensor([0, 3, 3 - lies, 40], device=device, dtype=torch.int32)
        x = torch.zeros(44, size, device=device, dtype=torch.uint8)
        ops.unpad_input(ops.pad_input(x, bounds, seqlen), bounds, 44)


def copy_blocks(device: str) -> None:
    """Whole vectors and bytes, pairs that are none."""
    for size, pairs in itertools.product((64, 18, 40000), (1, 4)):
        caches = [torch.randn(9, size, device=device, dtype=torch.half) for _ in "kv"]
        ops.copy_blocks(*caches, torch.arange(-1, 2 * pairs - 1, device=device).view(-1, 2))


def embedding(device: str) -> None:
    """Both widths, few and many tokens, with positions and without, ids of nobody."""
    for dtype, hidden, tokens in itertools.product(DTYPES, (8, 127, 4096), (1, 3, 300)):
        weight = torch.randn(tokens + 9, hidden + 1, device=device, dtype=dtype)
        ids = torch.arange(-1, tokens - 1, device=device)
        for rows in (weight[:, 1:], weight[:, 1:].contiguous()):
            ops.embedding(ids, rows)
            ops.embedding(ids.int(), rows, scale=2.0, position_weight=rows, positions=ids + 1)


def rope(device: str) -> None:
    """Half the head and the whole of it (flat), strided heads, positions or none, odd sizes."""
    for dtype, head_dim, heads, tokens, interleaved in itertools.product(
        DTYPES, (64, 80, 128, 256, 18), ((32, 8), (5, 1), (64, 8)), (1, 7, 300), (False, True)
    ):
        _rotate(device, dtype, head_dim, heads, tokens, interleaved, heads[0] != 64)
    for dtype, heads, interleaved in itertools.product(DTYPES, ((32, 8), (64, 8)), (False, True)):
        _rotate(device, dtype, 64, heads, 1030, interleaved, False)


def _rotate(
    device: str, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], tokens: int,
    interleaved: bool, some_positions: bool,
) -> None:  # fmt: skip
    q = torch.randn(tokens, heads[0], head_dim, device=device, dtype=dtype)
    k = torch.randn(tokens, heads[1], head_dim, device=device, dtype=dtype)
    angles = torch.randn(max(512, tokens), head_dim // 2, device=device)
    positions = torch.randint(0, 512, (tokens,), device=device)
    for table in {torch.float32, dtype}:
        cos, sin = angles.cos().to(table), angles.sin().to(table)
        for where in (None, positions) if some_positions else (None,):
            ops.rope(q, k, cos, sin, where, interleaved=interleaved)
        half = cos[:, : head_dim // 4], sin[:, : head_dim // 4]
        ops.rope(q, k, *half, interleaved=interleaved)


def append_kv(device: str) -> None:
    """Each way to say where tokens go, tables that point outside, both caches, odd sizes."""
    kinds = [(None, False), *itertools.product((torch.float8_e4m3fn, torch.int8), (False, True))]
    for dtype, (cache_dtype, of_tokens), head_dim, kind in itertools.product(
        DTYPES, kinds, (64, 128, 18), ("dense", "paged", "slots")
    ):
        if dtype == torch.float32 and (of_tokens or cache_dtype == torch.int8):
            continue
        heads, kv_heads, lengths = 8, 2, (5, 0, 70)
        total = 64 if kind == "dense" else sum(lengths) + 3
        leading: tuple[int, ...] = (4, 16) if kind == "dense" else (total,)
        q, k, v = (
            torch.randn(*leading, n, head_dim, device=device, dtype=dtype)
            for n in (heads, kv_heads, kv_heads)
        )
        pages = (4, 20) if kind == "dense" else (9, 16)
        shape, to = (*pages, kv_heads, head_dim), cache_dtype or dtype
        caches = [torch.zeros(shape, device=device).to(to) for _ in "kv"]
        options: dict[str, Any] = {}
        if kind == "dense":
            options["cache_seqlens"] = torch.tensor([0, 3, -2, 17], device=device).int()
        else:
            starts = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
            options["cu_seqlens"] = starts.int()
        if kind == "paged":
            options["cache_seqlens"] = torch.tensor([11, 0, 12], device=device).int()
            table = [[0, 1, 2, 3, 4], [-1] * 5, [8, 7, 99, 6, 5]]
            options["block_table"] = torch.tensor(table, device=device).int()
        if kind == "slots":
            options["slot_mapping"] = torch.arange(total, device=device) * 2 - 1
        if cache_dtype is not None:
            size, end = ((*pages, kv_heads), "_cache") if of_tokens else ((kv_heads,), "")
            options |= {f"{x}_scale{end}": torch.rand(size, device=device) + 0.1 for x in "kv"}
        ops.append_kv(k, v, *caches, **options)
        weights = {f"{name}_norm_weight": torch.rand(head_dim, device=device) for name in "qk"}
        ops.append_kv(k, v, *caches, **options, **weights, q=q)
        angles = torch.randn(80, head_dim // 2, device=device)
        for table, interleaved in itertools.product({torch.float32, dtype}, (False, True)):
            cos, sin = angles.cos().to(table), angles.sin().to(table)
            ops.append_kv(
                k, v, *caches, **options, q=q, cos=cos, sin=sin, interleaved=interleaved, out_k=k
            )
            ops.append_kv(
                k, v, *caches, **options, **weights, q=q, cos=cos, sin=sin, interleaved=interleaved
            )


def merge_states(device: str) -> None:
    """Few and many heads, into a third place and in place."""
    sizes = [*itertools.product((64, 128, 18), (3, 32), (1, 7, 300)), (64, 32, 4200)]
    for dtype, (head_dim, heads, tokens) in itertools.product(DTYPES, sizes):
        out_a, out_b = (
            torch.randn(tokens, heads, head_dim, device=device, dtype=dtype) for _ in "ab"
        )
        lse_a, lse_b = (torch.randn(heads, tokens, device=device) for _ in "ab")
        ops.merge_states(out_a, lse_a, out_b, lse_b)
        ops.merge_states(out_a, lse_a, out_b, lse_b, out=out_b, out_lse=lse_b)
        turned = torch.randn(tokens, heads, device=device).t()
        ops.merge_states(out_a, turned, out_b, lse_b)


def moe_route(device: str) -> None:
    """Few and many experts, groups, a bias, rows that are not aligned."""
    for dtype, num_experts, tokens in itertools.product(DTYPES, (1, 8, 60, 256, 512), ROWS):
        logits = torch.randn(tokens, num_experts + 1, device=device, dtype=dtype)
        bias = torch.randn(num_experts, device=device)
        k, groups = min(8, num_experts // 2 + 1), 4 if num_experts % 8 == 0 else 1
        options: dict[str, Any] = {"num_groups": groups, "top_groups": groups}
        for rows in (logits[:, 1:], logits[:, 1:].contiguous()):
            ops.moe_route(rows, k, renormalise=True)
            ops.moe_route(rows, k, scoring="sigmoid", bias=bias, **options)


def moe_permute(device: str) -> None:
    """Blocks that count, a launch that counts, one that places slots; experts of nobody."""
    sizes = itertools.product((8, 127, 4096), (1, 3, 300, 3000), (1, 8, 300))
    for dtype, (hidden, tokens, num_experts) in itertools.product(DTYPES, sizes):
        if tokens == 3000 and hidden == 4096 and (dtype, num_experts) != (torch.bfloat16, 8):
            continue
        wide = torch.randn(tokens, hidden + 1, device=device, dtype=dtype)
        experts = torch.randint(-1, num_experts, (tokens, 6), device=device, dtype=torch.int32)
        ops.moe_permute(wide[:, 1:], experts, num_experts)
        ops.moe_permute(wide[:, 1:].contiguous(), experts, num_experts)


def moe_combine(device: str) -> None:
    """With a residual, into it, and slots of no row."""
    for dtype, hidden, tokens in itertools.product(DTYPES, (8, 127, 4096, 8200), (1, 3, 300)):
        rows = torch.randn(8 * tokens, hidden + 1, device=device, dtype=dtype)
        places = torch.arange(-2, 8 * tokens - 2, device=device, dtype=torch.int32).clamp(min=-1)
        weights = torch.randn(8 * tokens, device=device)
        for each, k in itertools.product((rows[:, 1:], rows[:, 1:].contiguous()), (2, 4, 6, 8)):
            given = [x[: 8 * tokens // k * k].view(-1, k) for x in (places, weights)]
            out = ops.moe_combine(each, *given)
            ops.moe_combine(each, *given, residual=out, out=out)


def linear(device: str) -> None:
    """Every variant, plain and with all that can be added; and rows a tensor map cannot tell of."""
    variants = enumerate(linear_plan.HOPPER)
    for dtype, (i, name), deals in itertools.product(DTYPES[:2], variants, (0, 1)):
        # Of the last tiles some rows, of tiles dealt out some steps.
        m, n, k = 5 + 300 * deals, 168 + 8 * i, 200 + 512 * deals
        shapes = (m, k), (n, k), (n,), (m, n)
        a, b, bias, residual = (torch.randn(*x, device=device, dtype=dtype) for x in shapes)
        with linear_plan.TABLE.forcing(linear_plan.Row(name, {"group": 8, "deals": deals})):
            ops.linear(a, b, weights_ready=True)
            ops.linear(a, b, bias, activation="gelu")
            ops.linear(a, b, bias, residual=residual)
            ops.linear(a, b, bias, activation="silu", residual=residual, out=residual)
    for dtype, wide in itertools.product(DTYPES[:2], (False, True)):
        out_dtype = torch.float32 if wide else dtype
        sizes = LINEAR_FP32 if wide else LINEAR
        for i, (m, n, k) in enumerate((*sizes, *LINEAR_PORTABLE)):
            is_expanded = i >= len(sizes)
            a = torch.randn(1 if is_expanded else m, k, device=device, dtype=dtype).expand(m, k)
            b = torch.randn(n, k, device=device, dtype=dtype)
            bias = torch.randn(n, device=device, dtype=dtype)
            residual = torch.randn(m, n, device=device, dtype=out_dtype)
            ops.linear(a, b, out_dtype=out_dtype, weights_ready=True)
            ops.linear(a, b, bias, activation="gelu", residual=residual, out=residual)
    for m, n, k in itertools.product((3, 12, 30, 300), (168, 6144), (200, 201, 4100)):
        a, b, bias = (torch.randn(*size, device=device) for size in ((m, k), (n, k), (n,)))
        ops.linear(a, b, bias, activation="silu")


def _paired(op: str, call: Callable[[int, torch.dtype], object]) -> None:
    """Every variant, whatever would be chosen: call(rows of a, dtype)."""
    portable = ("m8", "m8_deep", "m16", "128x128", "64x128")
    for variant in (*portable, *(hopper.name for hopper in paired_plan.HOPPER[op])):
        m = 5 if variant.startswith(("m", "swapped")) else 300
        for dtype in DTYPES[:2]:
            with paired_plan.TABLES[op].forcing(paired_plan.Row(variant, {})):
                call(m, dtype)


def swiglu_linear(device: str) -> None:
    """Every variant, over tiles that end early."""

    def call(m: int, dtype: torch.dtype) -> None:
        a, weight = (torch.randn(n, 136, device=device, dtype=dtype) for n in (m, 2 * 168))
        gate, is_half = ("silu", True) if dtype == torch.half else ("gelu", False)
        ops.gated_linear(a, weight, gate, interleaved=m == 5, weights_ready=is_half)

    _paired("swiglu_linear", call)


def qkv_linear(device: str) -> None:
    """Every variant, with a bias and a paged cache, halves and neighbours rotated."""

    def call(m: int, dtype: torch.dtype) -> None:
        x = torch.randn(m, 136, device=device, dtype=dtype)
        w, bias = (torch.randn(7 * 64, *k, device=device, dtype=dtype) for k in ((136,), ()))
        table = torch.randn(m, 32, device=device)
        tokens = torch.arange(m, device=device)
        caches = [torch.zeros(m, 4, 1, 64, device=device, dtype=dtype) for _ in range(2)]
        for on in (False, True):
            ops.qkv_linear(
                x, w, bias, table, table, tokens, num_heads=5, num_kv_heads=1, k_cache=caches[0],
                v_cache=caches[1], slot_mapping=tokens * 3, interleaved=on, weights_ready=on,
            )  # fmt: skip

    _paired("qkv_linear", call)


CASES: dict[str, Callable[[str], None]] = {x: globals()[x] for x in ops.__all__ if x in globals()}


def matmul() -> None:
    """The example kernel."""
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.half) for _ in range(2))
    c = torch.empty(512, 512, device="cuda")
    Kernel("matmul_cache_kernel").matmul_cache_kernel_0d1d2d(
        (8, 8, 1), (32, 32, 1), 16384, None, [a, b, c]
    )


def main() -> int:
    """Launch everything, wait, say what it was."""
    with torch.no_grad():
        for run in CASES.values():
            run("cuda")
        matmul()
    torch.cuda.synchronize()
    print(f"launched {', '.join(CASES)} and matmul_cache_kernel")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
